"""How two processes agree to share memory: both, or neither.

Each end says in its hello what it runs.  Where all conditions hold, the mapper visits the owner at
a Unix socket, is handed the pool's descriptor, checks and maps it, and says so; the owner agrees.
From then on the open connection is the agreement: whoever leaves closes it.  Whatever fails before
is one sentence on both sides, and everything goes the other way (NIXL), as it would without.

The socket is in the abstract name space: it leaves no file behind, however its owner ends.  Anyone
on the machine can see its name, so a visitor must know the pool's nonce, and be the process that
its hello describes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct
import sys
import threading
from typing import Annotated, TypeVar

import msgspec

from optimized.transfer import hello as hellos
from optimized.transfer.hello import Hello, Natural, Nonce, Process
from optimized.transfer.shared_pool import Segment, SharedPool, attach
from optimized.transfer.transport import Refused
from reference.protocol import Peer

NAME = "shm"
"""Of this transport in a hello's `reach`."""

VARIABLE = "KVORACLE_SHM_TRANSFER"
TIMEOUT_S = 5.0
"""For each step of a visit; then the visitor goes the other way."""

MESSAGE_BYTES = 1 << 18


@functools.cache
def opted_in() -> bool:
    """Whether this process wants to share memory: KVORACLE_SHM_TRANSFER=1, read once."""
    return os.environ.get(VARIABLE) == "1"


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What one end runs, as far as sharing memory depends on it.

    Fields:
        opted_in: what `opted_in()` says.
        flat_pools: one row format for all layers, MLA or DSA, in pools of one size.
        staging: transfers go through a staging buffer.
        draft_kv: a draft model's KV moves too.
    """

    opted_in: bool
    linux: bool = sys.platform == "linux"
    pp_size: int = 1
    dcp_size: int = 1
    flat_pools: bool = True
    staging: bool = False
    draft_kv: bool = False


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A region by its number in the hello, and the byte of the pool at which it begins."""

    region: Natural
    offset: Natural


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The `reach` of this transport.  A prefill process offers nothing: the default fields."""

    setup: Setup
    socket: Annotated[str, msgspec.Meta(max_length=64)] = ""
    nonce: Nonce = bytes(hellos.NONCE_BYTES)
    total_bytes: Natural = 0
    places: tuple[Place, ...] = ()


class Visit(msgspec.Struct, frozen=True):
    """Mapper to owner: who I am, and the nonce of the pool that I want."""

    nonce: Nonce
    hello: bytes


class Verdict(msgspec.Struct, frozen=True):
    """Either side's: what speaks against it; None where nothing does.  The owner's first comes
    with the descriptor."""

    refusal: str | None = None


Reply = TypeVar("Reply", Visit, Verdict)


def offer_of(hello: Hello) -> Offer:
    """What a hello offers; one that does not know this transport did not opt in.

    Raises:
        Refused: where it cannot be read, or its regions do not lie in its pool side by side.
    """
    if NAME not in hello.reach:
        return Offer(setup=Setup(opted_in=False))
    try:
        offer = msgspec.msgpack.decode(hello.reach[NAME], type=Offer)
    except hellos.UNREADABLE as error:
        raise Refused(
            f"the peer's offer of shared memory cannot be read ({error}): run one release on both "
            "ends."
        ) from error
    end = 0
    for place in sorted(offer.places, key=lambda place: place.offset):
        if place.region >= len(hello.regions) or place.offset < end:
            raise Refused(
                f"region {place.region} of the peer's shared memory is unknown or overlaps "
                "another: run one release on both ends."
            )
        end = place.offset + hello.regions[place.region].total_bytes
    if end > offer.total_bytes:
        raise Refused(
            f"the peer's regions need {end} bytes and its shared memory has {offer.total_bytes}: "
            "run one release on both ends."
        )
    return offer


def unmet(mine: Hello, theirs: Hello) -> list[str]:
    """A sentence for each condition that keeps these two from sharing memory; both ends find the
    same.

    Raises:
        Refused: where an offer cannot be read.
    """
    sentences = []
    if not theirs.process.is_visible:
        sentences.append(
            "the two run on different machines or in different pid name spaces: put both into one."
        )
    if mine.ranks != theirs.ranks:
        sentences.append("the tensor-parallel sizes differ: start both ends with the same.")
    for who, hello in (("this process", mine), ("the peer", theirs)):
        setup = offer_of(hello).setup
        for is_met, sentence in (
            (setup.opted_in, f"did not opt in: set {VARIABLE}=1 on both ends."),
            (setup.linux, "does not run on Linux: share memory there only."),
            (setup.pp_size == 1, "runs pipeline-parallel: set pp_size to 1."),
            (setup.dcp_size == 1, "runs decode context-parallel: set dcp_size to 1."),
            (setup.flat_pools, "has pools that are not flat: use MLA or DSA layers only."),
            (not setup.staging, "stages its transfers: turn the staging buffer off."),
            (not setup.draft_kv, "moves a draft model's KV: turn speculative decoding off."),
        ):
            if not is_met:
                sentences.append(f"{who} {sentence}")
    return sentences


def visit(mine: Hello, theirs: Hello, *, cuda: bool) -> tuple[Segment, socket.socket]:
    """Map the pool that `theirs` offers.  The connection stands for the agreement; close it last.

    Raises:
        Refused: where a condition fails, or either side found something wrong; nothing is mapped.
    """
    if sentences := unmet(mine, theirs):
        raise Refused(sentences[0])
    offer = offer_of(theirs)
    if not offer.socket:
        raise Refused("the peer offers no shared memory: allocate its host pools in a SharedPool.")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(TIMEOUT_S)
        connection.connect("\0" + offer.socket)
        _authenticate(connection, theirs.process)
        bare = msgspec.structs.replace(mine, reach={NAME: mine.reach[NAME]})
        _send(connection, Visit(offer.nonce, bare.encode()))
        segment = _take(connection, offer, cuda=cuda)
        try:
            _send(connection, Verdict())
            _heed(_receive(connection, Verdict))
            connection.setblocking(False)
        except BaseException:
            segment.close()
            raise
    except OSError as error:
        connection.close()
        raise Refused(
            f"the peer's shared memory could not be reached ({error}): see whether it still runs, "
            "and shares the network name space."
        ) from error
    except BaseException:
        connection.close()
        raise
    return segment, connection


def _take(connection: socket.socket, offer: Offer, *, cuda: bool) -> Segment:
    """Receive the descriptor and map it; the owner is told what speaks against it."""
    message, descriptors, _, _ = socket.recv_fds(
        connection, MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
    )
    try:
        _heed(_decode(message, Verdict))
        if not descriptors:
            raise Refused("the peer sent no descriptor: run one release on both ends.")
        return attach(descriptors[0], total_bytes=offer.total_bytes, nonce=offer.nonce, cuda=cuda)
    except Refused as refusal:
        _tell(connection, str(refusal))
        raise
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


class Host:
    """The owner's end: hands the pool to visitors that fit, on a thread of its own, so that
    neither end's owner waits for the other's next poll.

    Fields:
        guests: for each peer that has the pool mapped, the connection that says so.
        refusals: for each peer that came and does not have it mapped, why.
    """

    def __init__(self, pool: SharedPool, mine: Hello) -> None:
        """Listen at the socket that `mine` offers."""
        self._pool = pool
        self._mine = mine
        self.guests: dict[Peer, socket.socket] = {}
        self.refusals: dict[Peer, str] = {}
        # every process that was ever handed the descriptor, whatever it said afterwards
        self._mappers: dict[Peer, set[Process]] = {}
        self._barred: set[Peer] = set()
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + offer_of(mine).socket)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, name="shm-host", daemon=True)
        self._thread.start()

    def bar(self, peer: Peer) -> bool:
        """Whether every process that could have mapped the pool as `peer` is reaped; its device
        copies ended with it.  None gets the descriptor in that name any more."""
        with self._lock:
            if not all(process.is_reaped() for process in self._mappers.get(peer, ())):
                return False
            self._barred.add(peer)
            return True

    def watch(self) -> None:
        """Note which guests have left."""
        for peer, connection in list(self.guests.items()):
            if has_left(connection):
                self.refusals[peer] = "the peer unmapped the shared memory, or ended: connect anew."
                self.guests.pop(peer).close()

    def close(self) -> None:
        """Receive nobody any more and let the guests know."""
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closing would not
        self._thread.join()
        self._listener.close()
        while self.guests:
            self.guests.popitem()[1].close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            try:
                connection.settimeout(TIMEOUT_S)
                self._receive_visit(connection)
            except (OSError, Refused):
                # who it was is not known; a visitor that is told nothing goes the other way
                connection.close()

    def _receive_visit(self, connection: socket.socket) -> None:
        request = _receive(connection, Visit)
        theirs = hellos.decode(request.hello)
        try:
            self._admit(connection, request.nonce, theirs)
            socket.send_fds(
                connection, [msgspec.msgpack.encode(Verdict())], [self._pool.descriptor]
            )
            _heed(_receive(connection, Verdict))
            self.refusals.pop(theirs.peer, None)
            connection.setblocking(False)
            self.guests[theirs.peer] = connection
            _send(connection, Verdict())
        except (OSError, Refused) as error:
            self.guests.pop(theirs.peer, None)
            why = str(error)
            if isinstance(error, OSError):
                why = f"the visitor left half-way ({error}): see whether it still runs."
            self.refusals[theirs.peer] = why
            _tell(connection, why)
            raise

    def _admit(self, connection: socket.socket, nonce: bytes, theirs: Hello) -> None:
        """Everything that can speak against a visitor, before it is handed anything."""
        _authenticate(connection, theirs.process)
        if nonce != self._pool.nonce:
            raise Refused("the visitor has the wrong nonce: exchange the hellos anew.")
        hellos.check(self._mine, theirs)
        if sentences := unmet(self._mine, theirs):
            raise Refused(sentences[0])
        with self._lock:
            if theirs.peer in self._barred:
                raise Refused("the visitor's life was fenced: start it with a new incarnation.")
            self._mappers.setdefault(theirs.peer, set()).add(theirs.process)


def has_left(connection: socket.socket) -> bool:
    """Whether the other end closed its side, or is gone."""
    try:
        return not connection.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _authenticate(connection: socket.socket, process: Process) -> None:
    """The kernel's word for it that the other end is that process, of this user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = struct.unpack("iII", credentials)
    if (pid, uid) != (process.pid, os.geteuid()) or process.is_reaped():
        raise Refused(
            f"process {pid} of user {uid} is not the one that the hello describes, process "
            f"{process.pid}: exchange the hellos anew, between processes of one user."
        )


def _send(connection: socket.socket, message: Visit | Verdict) -> None:
    connection.sendall(msgspec.msgpack.encode(message))


def _receive(connection: socket.socket, kind: type[Reply]) -> Reply:
    return _decode(connection.recv(MESSAGE_BYTES), kind)


def _decode(message: bytes, kind: type[Reply]) -> Reply:
    try:
        return msgspec.msgpack.decode(message, type=kind)
    except hellos.UNREADABLE as error:
        raise Refused(
            f"the other end broke off or spoke otherwise ({error}): run one release on both ends."
        ) from error


def _tell(connection: socket.socket, why: str) -> None:
    """Let the other end know why it is refused, if it still listens."""
    with contextlib.suppress(OSError):
        _send(connection, Verdict(why))


def _heed(verdict: Verdict) -> None:
    if verdict.refusal is not None:
        raise Refused(verdict.refusal)
