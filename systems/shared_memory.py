"""Shared memory between instances in one process, with its copies and its device under a schedule.

The transport, its memory and its handshake are the real ones.  What runs by itself there waits
here until it is told to: a copy, and the work of the device that stores what is to be copied.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import patch

import msgspec
from torch import Tensor

from optimized.transfer import hello as hellos
from optimized.transfer import prefill_node, shm_copy
from optimized.transfer.hello import NONCE_BYTES, Instance
from optimized.transfer.shared_pool import SharedPool
from optimized.transfer.shm import ShmTransport
from optimized.transfer.shm_copy import Copy
from optimized.transfer.shm_hello import Setup, Visit, offer_of
from optimized.transfer.simulated import Network, SimulatedTransport
from optimized.transfer.transport import Refused, Region
from reference.protocol import Advertise, Peer, Side
from systems.wiring import Wiring


class Thread:
    """Stands in for the copier's thread: it does its work when it is joined."""

    def __init__(self, *, target: Callable[[], None], name: str, daemon: bool) -> None:
        self.join = target

    def start(self) -> None:
        """Nothing runs yet."""


@dataclass(slots=True)
class Device:
    """Stands in for a CUDA device and its one stream, as far as the copier uses them.  What the
    engine stores is there for a copy once the device has come to it.

    Fields:
        stored: the engine's memory; memory: what of it the device has stored so far.
        ordered, done: work given to it and work done; failing: the next copy breaks.
        waits: how often a copy had to wait for work that was not done.
    """

    stored: list[Tensor]
    memory: list[Tensor]
    ordered: int = 0
    done: int = 0
    failing: bool = False
    waits: int = 0

    @property
    def device(self) -> Device:
        """As of a stream."""
        return self

    def order(self) -> None:
        """The engine has given it more to do."""
        self.ordered += 1

    def run(self) -> None:
        """Do all that it was given."""
        self.done = self.ordered
        for memory, stored in zip(self.memory, self.stored, strict=True):
            if memory is not stored:
                memory.copy_(stored)

    def record_event(self) -> int:
        """All that was ordered so far."""
        return self.ordered

    def wait_event(self, event: int) -> None:
        """Nothing goes on before that is done."""
        if self.done < event:
            self.waits += 1
            self.run()

    def synchronize(self) -> None:
        """Its copies are done as they are made."""

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        if self.failing:
            self.failing = False
            raise RuntimeError("CUDA error: unspecified launch failure")
        yield


_THREADING = SimpleNamespace(Thread=Thread)
_TORCH = SimpleNamespace(
    cuda=SimpleNamespace(
        current_stream=lambda device: device, stream=lambda device: device.current()
    )
)


class Introduced(SimulatedTransport):
    """The simulated network's end of a process that introduces itself as over NIXL."""

    def __init__(
        self, network: Network, me: Peer, regions: Sequence[Region], instance: Instance
    ) -> None:
        super().__init__(network, me, regions)
        reach = {"simulated": super().hello()}
        self._hello = hellos.introduce(me, instance, regions, reach=reach)

    def hello(self) -> bytes:
        return self._hello.encode()

    def connect(self, hello: bytes) -> Peer:
        theirs = hellos.decode(hello)
        hellos.check(self._hello, theirs)
        return super().connect(theirs.reach["simulated"])


@dataclass(slots=True)
class Sharing:
    """All shared memory of a run.

    Fields:
        opted_in: sides that want it.
        impostor: D hands out other memory than it has announced.
        transports, devices: of each process that was started, by its peer.
    """

    network: Network
    wiring: Wiring
    opted_in: frozenset[Side]
    impostor: bool
    transports: dict[Peer, ShmTransport] = field(default_factory=dict)
    devices: dict[Peer, Device] = field(default_factory=dict)
    _pools: list[SharedPool] = field(default_factory=list)
    _stood_in: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        for name, standing_in in (("threading", _THREADING), ("torch", _TORCH)):
            self._stood_in.enter_context(patch.object(shm_copy, name, standing_in))
        # what is refused here is meant to be
        self._stood_in.enter_context(patch.object(prefill_node.log, "disabled", True))

    def memory(self, rank: int, size: int) -> Tensor:
        """A pool for a rank of D that starts."""
        self._pools.append(SharedPool(size))
        return self._pools[-1].memory

    def attach(self, me: Peer, regions: Sequence[Region]) -> ShmTransport:
        """The transport of a process that starts; a rank of D has been given its pool before."""
        wiring = self.wiring
        instance = Instance(wiring.ranks[me.side], wiring.completion, wiring.geometries[me.side])
        rest = self.network.ends[me] = Introduced(self.network, me, regions, instance)
        pool = None
        if me.side is Side.DECODE:
            mine = regions[0].memory
            pool = next(p for p in self._pools if p.offset_of(mine) is not None)
        setup = Setup(opted_in=me.side in self.opted_in)
        transport = ShmTransport(rest, regions, setup=setup, pool=pool)
        if pool is None:
            stored = [region.memory for region in regions]
            kv = [region.name.startswith("kv") for region in regions]
            memory = [m.clone() if of_kv else m for m, of_kv in zip(stored, kv, strict=True)]
            self.devices[me] = transport._copier._stream = Device(stored, memory)
            transport._copier._sources = memory
        elif self.impostor:
            decoy = SharedPool(pool.total_bytes)
            decoy.memory.fill_(0xFF)
            self._pools.append(decoy)
            transport._host._pool = SimpleNamespace(descriptor=decoy.descriptor, nonce=pool.nonce)
        self.transports[me] = transport
        return transport

    # what may happen

    def waiting(self) -> list[Peer]:
        """Processes of P, dead ones too, that have a copy to make."""
        return [me for me in sorted(self.devices) if self.transports[me]._copier._asked.qsize()]

    def copy(self, me: Peer, *, fails: bool = False) -> tuple[Copy, bool]:
        """Make a process's oldest copy, or let it fail; returns it, and whether its target was
        still mapped.  If it was not, nothing is done."""
        copier = self.transports[me]._copier
        waiting = [copier._asked.get() for _ in range(copier._asked.qsize())]
        first = waiting.pop(0)
        mapped = bool(first.share.rows)
        if mapped:
            self.devices[me].failing = fails
            copier._asked.put(first)
            copier._asked.put(None)
            copier._work()
        for copy in waiting:
            copier._asked.put(copy)
        return first, mapped

    def has_ended(self) -> bool:
        """Whether a copy has ended of which its process does not know."""
        return any(self.transports[me]._copier._ended.qsize() for me in self.devices)

    def behind(self) -> list[Peer]:
        """Processes of P whose device has work to do."""
        return [me for me, device in sorted(self.devices.items()) if device.done < device.ordered]

    def kill(self, me: Peer) -> None:
        """A process has ended: its sockets are closed, and copies that its device was given go
        on."""
        transport = self.transports[me]
        if transport._host is not None:
            transport._host.close()
            return
        for share in (*transport._shares.values(), *transport._retired):
            share._connection.close()

    # what peers may try

    def intrude(self, me: Peer) -> bool:
        """Whether a visitor that knows a rank of D's socket, but no nonce, is handed its memory."""
        theirs = hellos.decode(self.transports[me].hello())
        other = next(iter(self.devices))
        bare = hellos.decode(self.transports[other].hello())
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(5.0)
            connection.connect("\0" + offer_of(theirs).socket)
            visit = Visit(secrets.token_bytes(NONCE_BYTES), bare.encode())
            connection.send(msgspec.msgpack.encode(visit))
            _, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 1)
        for descriptor in descriptors:
            os.close(descriptor)
        return bool(descriptors)

    def misroute(self, me: Peer, to: Peer) -> bool:
        """Whether a process of P takes the hello of another rank of D for that of its own."""
        try:
            self.transports[me].connect(self.transports[to].hello())
        except Refused:
            return False
        return True

    def forge(self, offer: Advertise, places: Sequence[Sequence[int]]) -> None:
        """Change an offer of D on its way."""
        forged = msgspec.structs.replace(offer, places=tuple(map(tuple, places)))
        for thing in self.network.ends[offer.at].outbox:
            if getattr(thing, "message", None) == offer:
                thing.message = forged

    # the end

    def close(self) -> None:
        """Unmap everything, as the end of all processes would."""
        self._stood_in.close()
        for me, transport in sorted(self.transports.items()):
            shares = [*transport._shares.values(), *transport._retired]
            if transport._host is not None and me in self.network.ends:
                transport._host.close()
            for share in shares:
                share.tickets._spans.clear()
                share.close()
        self.transports.clear()
        self.devices.clear()
        self.network.ends.clear()
        for pool in self._pools:
            # engines are full of cycles: what D has mapped goes when they are collected
            os.close(pool.descriptor)
            pool.descriptor = -1
