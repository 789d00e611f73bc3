"""The transport over NIXL: one-sided writes into the peer's registered memory, with UCX below.

Releasing a handle or removing a peer's agent does not stop a write in flight: it runs on, unseen.
A handle is therefore kept until its write has ended, and a peer's agent until all writes to it
have, also when the peer is replaced.  What is known of a write that failed depends on its peer,
about which the truth takes a moment to come: see `_Link`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
from nixl._api import nixl_xfer_handle
from nixl._bindings import nixlRemoteDisconnectError

from optimized.transfer.endpoint import REACH, Endpoint, Remote
from optimized.transfer.hello import UNREADABLE, Hello, Instance, check, decode, introduce
from optimized.transfer.transport import (
    Event,
    PeerFenced,
    PeerLost,
    Received,
    Refused,
    Region,
    Write,
    WriteEnded,
)
from reference.protocol import Message, Outcome, Peer

GRACE_S = 2.0
"""Seconds from a failure to its verdict.  The connection of a killed process breaks before the
process is seen to be gone, and that of one that changes its agent before its new hello comes."""

PROCESS_CHECK_S = 0.01
"""Seconds between two looks at the peers' processes."""

log = logging.getLogger(__name__)
_decoder = msgspec.msgpack.Decoder(Message)


@dataclass(slots=True)
class _Posted:
    """A write until its WriteEnded.

    Fields:
        handles: its transfers that are not known to have ended.
        note: sent when it has landed; None where NIXL carries it, or there is none.
        failed_at: when NIXL first reported an error.
    """

    write: Write
    handles: list[nixl_xfer_handle]
    note: Message | None
    failed_at: float | None = None


@dataclass(slots=True)
class _Link:
    """One agent of a peer.

    Fields:
        broken_at: when NIXL said that its agent cannot be reached.
        gone: its process was reaped.
        withdrawn: it told of a newer agent, so this one is destroyed.
        lost: PeerLost was reported.
        kept: handles of failed writes which may not be over.
    """

    hello: Hello
    remote: Remote
    broken_at: float | None = None
    gone: bool = False
    withdrawn: bool = False
    lost: bool = False
    posted: list[_Posted] = field(default_factory=list)
    kept: list[nixl_xfer_handle] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        """Whether nothing reads on its behalf any more: a write to it that failed is BROKEN."""
        return self.gone or self.withdrawn

    def drop_handles(self) -> None:
        """Let NIXL release every handle, in flight or not."""
        for posted in self.posted:
            posted.handles.clear()
        self.posted.clear()
        self.kept.clear()


def _name(hello: Hello) -> str:
    """No two agents are called alike, so that a peer started again is added beside its past."""
    side, rank, _ = hello.peer
    return f"{side.name.lower()}{rank}-{hello.nonce.hex()}-{hello.epoch}"


class NixlTransport:
    """One process's end (`optimized.transfer.transport.Transport`).

    A fence changes the agent: `epoch` grows, other connections break with it, and the owner must
    then hand a fresh hello() to every peer.  For `grace_s` seconds the peers hold the ends of
    their writes back, so as to learn of it.

    Args:
        regions: in the same order, under the same names, at all peers.
        grace_s: seconds from a failure until a peer is taken for lost, and a write's end for
            unknown, unless something was learnt of them.

    Raises:
        ValueError: where a region's memory is not [items, item bytes] uint8 and contiguous.
    """

    def __init__(
        self,
        me: Peer,
        instance: Instance,
        regions: Sequence[Region],
        *,
        grace_s: float = GRACE_S,
    ) -> None:
        self.me = me
        self._regions = tuple(regions)
        self._grace_s = grace_s
        self._hello = introduce(me, instance, regions, reach={})
        self.endpoint = Endpoint(_name(self._hello), self._regions)
        self._links: dict[tuple[int, int], _Link] = {}
        self._retired: list[_Link] = []
        # the first hello of every life that was ever known here
        self._lives: dict[Peer, Hello] = {}
        self._wishes: set[Peer] = set()
        self._fenced: set[Peer] = set()
        self._events: list[Event] = []
        self._next_check = 0.0

    @property
    def epoch(self) -> int:
        """How often this process has changed its agent."""
        return self._hello.epoch

    def hello(self) -> bytes:
        """What a peer must be given to connect to this process, until `epoch` changes."""
        reach = {REACH: self.endpoint.reach()}
        return msgspec.structs.replace(self._hello, reach=reach).encode()

    def connect(self, hello: bytes) -> Peer:
        """Get to know a peer, or its new life or agent; the same hello again changes nothing.

        Raises:
            Refused: where it does not fit, is older than what is known, was lost, or calls itself
                as another process did, whose writes may go on.
        """
        theirs = decode(hello)
        check(self._hello, theirs)
        if self._lives.get(theirs.peer, theirs).nonce != theirs.nonce:
            raise Refused(
                f"another process was {theirs.peer} before: start this one with a higher "
                "incarnation."
            )
        place = theirs.peer[:2]
        known = self._links.get(place)
        same_life = known is not None and known.hello.nonce == theirs.nonce
        if known is not None and same_life and known.hello.epoch == theirs.epoch:
            if known.lost or theirs != known.hello:
                raise Refused(
                    f"{theirs.peer} was lost, or changed without saying so: start it again."
                )
            return theirs.peer
        if known is not None and (
            theirs.peer.incarnation < known.hello.peer.incarnation
            or (same_life and theirs.epoch < known.hello.epoch)
        ):
            raise Refused(f"{theirs.peer} sent an old hello: hand over the bytes of its last one.")
        self._links[place] = _Link(theirs, self.endpoint.add(_name(theirs), theirs))
        self._lives.setdefault(theirs.peer, theirs)
        self._fenced.discard(theirs.peer)
        if known is not None:
            known.withdrawn = same_life
            self._retired.append(known)
        return theirs.peer

    def send(self, to: Peer, message: Message) -> None:
        """Send a message, at best effort; to an unknown or lost peer it is dropped."""
        link = self._link(to)
        if link is None or link.lost:
            return
        try:
            self.endpoint.agent.send_notif(link.remote.name, msgspec.msgpack.encode(message))
        except Exception as error:
            self._note_failure(link, error)

    def post(self, write: Write) -> None:
        """Start a write.  One that cannot be started ends as BROKEN.

        Raises:
            ValueError: where a run leaves a region of this process.
        """
        region, here, there, n = write.runs.T
        if not self.endpoint.items.hold(region, here, n):
            raise ValueError(
                f"piece {write.piece} of {write.key} reads past a region: give runs of items that "
                "lie within the registered memory."
            )
        link = self._link(write.to)
        if link is None or link.lost:
            self._end(write, Outcome.BROKEN)
            return
        if not link.remote.items.hold(region, there, n):
            log.warning("%s gave items of %s which it does not have.", write.to, write.key)
            self._end(write, Outcome.BROKEN)
            return
        note = b"" if write.note is None else msgspec.msgpack.encode(write.note)
        try:
            handles = self.endpoint.make(write.runs, link.remote, note)
        except Exception as error:
            self._note_failure(link, error)
            self._end(write, Outcome.BROKEN)
            return
        posted = _Posted(write, handles, None if len(handles) == 1 else write.note)
        link.posted.append(posted)
        try:
            for handle in handles:
                if self.endpoint.agent.transfer(handle) == "ERR":
                    posted.failed_at = time.monotonic()
        except Exception as error:
            posted.failed_at = self._note_failure(link, error)

    def poll(self) -> Sequence[Event]:
        """What happened since the last call, without waiting; all progress is made in here."""
        now = time.monotonic()
        if now >= self._next_check:
            self._next_check = now + PROCESS_CHECK_S
            self._watch(now)
            # before anything is received: what need not land any more does not
            self._keep_wishes()
        self._receive()
        for link in self._all_links():
            self._settle(link, now)
        self._retire()
        events, self._events = self._events, []
        return events

    def fence(self, peer: Peer) -> None:
        """Ask for PeerFenced: it comes once the peer's process was reaped and then this process's
        agent destroyed.  Never for a peer that was not known here, or of another machine or pid
        namespace, whose end cannot be seen from here."""
        self._wishes.add(peer)
        self._next_check = 0.0

    def close(self) -> None:
        """Give the registrations and the agent back.  Writes that have not ended stop somewhere."""
        self._forget_all()
        self.endpoint.destroy()

    def _link(self, peer: Peer) -> _Link | None:
        link = self._links.get(peer[:2])
        return link if link is not None and link.hello.peer == peer else None

    def _all_links(self) -> Iterator[_Link]:
        yield from self._links.values()
        yield from self._retired

    def _end(self, write: Write, outcome: Outcome) -> None:
        self._events.append(WriteEnded(write.key, write.to, write.piece, outcome))

    def _note_failure(self, link: _Link, error: Exception) -> float:
        """Remember what an error says of the peer; returns the time."""
        now = time.monotonic()
        log.info("%s: %s", link.remote.name, str(error))  # a kept error would keep the agent
        if isinstance(error, nixlRemoteDisconnectError) and link.broken_at is None:
            link.broken_at = now
        return now

    def _receive(self) -> None:
        known = {link.remote.name for link in self._all_links()}
        for name, notes in self.endpoint.agent.get_new_notifs().items():
            for note in notes:
                try:
                    message = _decoder.decode(note)
                except UNREADABLE as error:
                    log.warning("%s sent what is no message: %s", name, error)
                    continue
                if name in known:
                    self._events.append(Received(message))

    def _watch(self, now: float) -> None:
        """Look whose process is gone, and who has been out of reach for too long."""
        for link in self._all_links():
            link.gone = link.gone or link.hello.process.is_reaped()
        for link in self._links.values():
            silent = link.broken_at is not None and now - link.broken_at >= self._grace_s
            if (link.gone or silent) and not link.lost:
                link.lost = True
                self._events.append(PeerLost(link.hello.peer))

    def _settle(self, link: _Link, now: float) -> None:
        """Report the writes to `link` that have ended."""
        for posted in tuple(link.posted):
            if posted.failed_at is None:
                self._advance(link, posted)
            if posted.failed_at is None and posted.handles:
                continue
            if posted.failed_at is None:
                outcome = Outcome.LANDED
                if posted.note is not None:
                    self.send(posted.write.to, posted.note)
            elif link.is_over:
                outcome = Outcome.BROKEN
            elif now - posted.failed_at >= self._grace_s:
                outcome = Outcome.UNKNOWN
                link.kept += posted.handles
            else:
                continue
            link.posted.remove(posted)
            self._end(posted.write, outcome)

    def _advance(self, link: _Link, posted: _Posted) -> None:
        """Ask NIXL how the transfers of a write stand."""
        try:
            for handle in tuple(posted.handles):
                state = self.endpoint.agent.check_xfer_state(handle)
                if state == "DONE":
                    posted.handles.remove(handle)
                    handle.release()
                elif state == "ERR":
                    posted.failed_at = time.monotonic()
        except Exception as error:
            posted.failed_at = self._note_failure(link, error)

    def _retire(self) -> None:
        """Forget replaced agents to which no write can be under way."""
        for link in tuple(self._retired):
            if not link.posted and (link.is_over or not link.kept):
                self._retired.remove(link)
                link.drop_handles()
                self.endpoint.remove(link.remote)

    def _keep_wishes(self) -> None:
        """Give the proofs that were asked for, with a new agent where one is needed."""
        if not self._wishes:
            return
        over = {peer for peer, life in self._lives.items() if life.process.is_reaped()}
        ready = self._wishes & over
        if ready - self._fenced:
            self._renew()
            self._fenced |= over
        self._wishes -= ready
        self._events += map(PeerFenced, sorted(ready))

    def _renew(self) -> None:
        """Destroy the agent and get another, with connections to the peers that are not lost."""
        hellos = [link.hello for link in self._links.values() if not link.lost]
        for link in self._all_links():
            for posted in link.posted:
                self._end(posted.write, Outcome.BROKEN)
        self._forget_all()
        self.endpoint.destroy()
        self._hello = msgspec.structs.replace(self._hello, epoch=self.epoch + 1)
        self.endpoint = Endpoint(_name(self._hello), self._regions)
        for hello in hellos:
            try:
                remote = self.endpoint.add(_name(hello), hello)
            except Refused:
                self._events.append(PeerLost(hello.peer))
            else:
                self._links[hello.peer[:2]] = _Link(hello, remote)

    def _forget_all(self) -> None:
        """Drop all that refers to the agent, which is destroyed next."""
        for link in self._all_links():
            link.drop_handles()
            self.endpoint.remove(link.remote)
        self._links.clear()
        self._retired.clear()
