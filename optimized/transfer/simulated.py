"""A network in memory that does to messages and writes whatever a real one may do to them.

Nothing happens until a step is taken, and each step is one thing that may happen next: a message
comes, a part of a write lands, a writer learns how its write ended.  Which one, and what goes wrong
with it, is asked of one function, so that a tape decides a whole run; the answer 0 always is the
most ordinary: the oldest thing, and nothing wrong with it.

Bytes are copied out of the writer's memory and into the reader's when a part lands, so memory that
either end uses again too soon is damaged here as it would be by a real network.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

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
from reference.protocol import Arrived, Died, Message, Observation, Outcome, Peer

Choose = Callable[[int], int]
"""Picks one of n >= 2 possibilities by its number; 0 is the most ordinary."""


def ordinary(possibilities: int) -> int:
    """First come, first served, and nothing goes wrong."""
    return 0


def unobserved(seen: Observation) -> None:
    """Notes nothing."""


@dataclass(slots=True, eq=False)
class _Envelope:
    """A message on its way."""

    to: Peer
    message: Message


@dataclass(slots=True, eq=False)
class _Loss:
    """The news for `to` that a peer of it is gone."""

    to: Peer
    lost: Peer


@dataclass(slots=True, eq=False)
class _Fence:
    """A proof that `to` has asked for."""

    to: Peer
    against: Peer


@dataclass(slots=True, eq=False)
class Flight:
    """A write on its way.

    Fields:
        source: the writer's memory, which is read when a part lands.
        left: parts that have not landed: number, and [n, 3] (region, item here, item there).
        parts: how many there were.
        told: its writer knows how it ended, or is gone.
    """

    writer: Peer
    write: Write
    source: Sequence[Region]
    left: list[tuple[int, NDArray[np.int64]]]
    parts: int
    told: bool = False

    @property
    def to(self) -> Peer:
        """Where it lands."""
        return self.write.to


_Thing = _Envelope | _Loss | _Fence | Flight


class _Hello(msgspec.Struct, array_like=True):
    peer: Peer
    regions: list[tuple[str, int]]


@dataclass(slots=True, kw_only=True)
class Network:
    """All processes of a run, and what is on its way between them.

    Fields:
        choose: decides everything that is left open.
        parts: in how many parts a write lands, where it has so many items.
        message_faults: how many more messages may be lost, or come twice.
        write_faults: how many more writes may end as BROKEN or UNKNOWN for their writer, while
            their bytes go on landing.
        observe: told of each Arrived and Died.
    """

    choose: Choose = ordinary
    parts: int = 2
    message_faults: int = 0
    write_faults: int = 0
    observe: Callable[[Observation], None] = unobserved
    ends: dict[Peer, SimulatedTransport] = field(default_factory=dict)
    dead: set[Peer] = field(default_factory=set)
    stopped: set[Peer] = field(default_factory=set)
    way: list[_Thing] = field(default_factory=list)

    def attach(self, me: Peer, regions: Sequence[Region]) -> SimulatedTransport:
        """The end of a process that starts now."""
        self.ends[me] = SimulatedTransport(self, me, regions)
        return self.ends[me]

    def step(self) -> bool:
        """Let one thing happen that may; whether there was one."""
        return self._step(self.choose)

    def settle(self) -> None:
        """Let everything happen that may, the oldest first, and nothing go wrong."""
        while self._step(ordinary):
            pass

    def stop(self, peer: Peer) -> None:
        """The process stands still: nothing reaches it, and what it posted makes no progress.
        Its owner does not poll it before `resume`."""
        self.stopped.add(peer)

    def resume(self, peer: Peer) -> None:
        """The process goes on."""
        self.stopped.discard(peer)

    def kill(self, peer: Peer) -> None:
        """The process ends.  What it sent and posted goes on; all its peers will hear of it."""
        self.observe(Died(peer))
        self.dead.add(peer)
        self.stopped.discard(peer)
        self.leave(peer)

    def leave(self, peer: Peer) -> None:
        """Nothing reaches the process any more."""
        self._collect()
        del self.ends[peer]
        for thing in list(self.way):
            if isinstance(thing, Flight):
                thing.told = thing.told or thing.writer == peer
                if thing.told and not thing.left:
                    self.way.remove(thing)
            elif thing.to == peer:
                self.way.remove(thing)
        self.way += [_Loss(end.me, peer) for end in self.ends.values() if peer in end.known]

    def drop_flights(self, writer: Peer, to: Collection[Peer]) -> None:
        """No write of `writer` to these lands any more."""
        self.way = [
            thing
            for thing in self.way
            if not (isinstance(thing, Flight) and thing.writer == writer and thing.to in to)
        ]

    def _step(self, choose: Choose) -> bool:
        self._collect()
        ready = [thing for thing in self.way if self._may_happen(thing)]
        if not ready:
            return False
        thing = ready[_pick(choose, len(ready))]
        match thing:
            case _Envelope():
                self._deliver(thing, _pick(choose, 3 if self.message_faults else 1))
            case Flight():
                self._advance(thing, choose)
            case _Loss(to, lost):
                self.way.remove(thing)
                self.ends[to].lose(lost)
            case _Fence(to, against):
                self.way.remove(thing)
                self.drop_flights(against, {to})
                self.ends[to].inbox.append(PeerFenced(against))
        return True

    def _collect(self) -> None:
        """Take what the processes gave away since the last step, in an order that does not depend
        on which of them ran first."""
        for _, end in sorted(self.ends.items()):
            self.way += [t for t in end.outbox if isinstance(t, Flight) or t.to in self.ends]
            end.outbox.clear()

    def _may_happen(self, thing: _Thing) -> bool:
        if thing.to in self.stopped:
            return False
        if isinstance(thing, _Fence):
            return thing.against in self.dead
        return not (isinstance(thing, Flight) and thing.writer in self.stopped)

    def _deliver(self, envelope: _Envelope, fault: int) -> None:
        """A message comes (0), comes and will come again (1), or is lost (2)."""
        self.message_faults -= fault > 0
        if fault != 1:
            self.way.remove(envelope)
        if fault != 2:
            self.ends[envelope.to].inbox.append(Received(envelope.message))

    def _advance(self, flight: Flight, choose: Choose) -> None:
        """A write ends for its writer, fails for it, or lands a part further."""
        if flight.to not in self.ends:
            flight.left.clear()
            self._tell(flight, Outcome.BROKEN)
        elif not flight.left:
            self._tell(flight, Outcome.LANDED)
        elif fault := _pick(choose, 1 if flight.told or not self.write_faults else 3):
            self.write_faults -= 1
            self._tell(flight, (Outcome.BROKEN, Outcome.UNKNOWN)[fault - 1])
        else:
            self._land(flight, _pick(choose, len(flight.left)))
        if flight.told and not flight.left:
            self.way.remove(flight)

    def _land(self, flight: Flight, place: int) -> None:
        """Copy one part; after the last one the note goes its way."""
        number, items = flight.left.pop(place)
        write, target = flight.write, self.ends[flight.to].regions
        for region in np.unique(items[:, 0]).tolist():
            _, here, there = items[items[:, 0] == region].T
            target[region].memory[there] = flight.source[region].memory[here]
        self.observe(
            Arrived(flight.to, write.key, flight.writer, write.piece, number, flight.parts)
        )
        if not flight.left and write.note is not None:
            self.way.append(_Envelope(flight.to, write.note))

    def _tell(self, flight: Flight, outcome: Outcome) -> None:
        """Let the writer know how a write ended, if it is there and does not know yet."""
        if not flight.told:
            self.ends[flight.writer].end(flight.write, outcome)
        flight.told = True


class SimulatedTransport:
    """One process's end (`optimized.transfer.transport.Transport`), made by `Network.attach`.

    What the process gives away waits in `outbox` for the next step of the network, and what came
    for it waits in `inbox` for its next poll.
    """

    def __init__(self, network: Network, me: Peer, regions: Sequence[Region]) -> None:
        self.me = me
        self.regions = tuple(regions)
        self.known: set[Peer] = set()
        self.inbox: list[Event] = []
        self.outbox: list[_Thing] = []
        self._network = network

    def hello(self) -> bytes:
        return msgspec.msgpack.encode(_Hello(self.me, self._layout()))

    def connect(self, hello: bytes) -> Peer:
        theirs = msgspec.msgpack.decode(hello, type=_Hello)
        if theirs.peer.side is self.me.side or theirs.regions != self._layout():
            raise Refused(
                f"{theirs.peer} has the regions {theirs.regions} and {self.me} has "
                f"{self._layout()}: connect prefill with decode, of one model and one geometry."
            )
        self.known = {peer for peer in self.known if peer[:2] != theirs.peer[:2]} | {theirs.peer}
        return theirs.peer

    def send(self, to: Peer, message: Message) -> None:
        if to in self.known:
            self.outbox.append(_Envelope(to, message))

    def post(self, write: Write) -> None:
        end = self._network.ends.get(write.to)
        if (
            end is None
            or write.to not in self.known
            or not _inside(write.runs, self.regions, end.regions)
        ):
            self.end(write, Outcome.BROKEN)
            return
        parts = _parts(write.runs, self._network.parts)
        left = list(enumerate(parts, 1))
        self.outbox.append(Flight(self.me, write, self.regions, left, len(parts)))

    def poll(self) -> Sequence[Event]:
        events, self.inbox = self.inbox, []
        return events

    def fence(self, peer: Peer) -> None:
        self.outbox.append(_Fence(self.me, peer))

    def close(self) -> None:
        """Leave the network, if the process is not dead anyway; what it posted is over then."""
        if self.me in self._network.ends:
            self._network.leave(self.me)
            self._network.drop_flights(self.me, self._network.ends)

    def lose(self, peer: Peer) -> None:
        """A peer is gone."""
        self.known.discard(peer)
        self.inbox.append(PeerLost(peer))

    def end(self, write: Write, outcome: Outcome) -> None:
        """A write of this process ended."""
        self.inbox.append(WriteEnded(write.key, write.to, write.piece, outcome))

    def _layout(self) -> list[tuple[str, int]]:
        return [(name, memory.shape[1]) for name, memory in self.regions]


def _pick(choose: Choose, possibilities: int) -> int:
    return choose(possibilities) if possibilities > 1 else 0


def _inside(runs: NDArray[np.int64], here: Sequence[Region], there: Sequence[Region]) -> bool:
    """Whether all runs lie in regions of both ends."""
    region, first, at, items = runs.T
    sizes = np.array([[len(each.memory) for each in regions] for regions in (here, there)])
    inside = np.stack([first, at]) + items <= sizes[:, region]
    return bool(inside.all())


def _parts(runs: NDArray[np.int64], parts: int) -> list[NDArray[np.int64]]:
    """The items of some runs, [n, 3] (region, item here, item there), in up to so many parts."""
    region, here, there, items = runs.T
    offset = np.arange(items.sum()) - np.repeat(np.cumsum(items) - items, items)
    columns = (region, here, there)
    spread = np.column_stack([np.repeat(column, items) for column in columns])
    spread[:, 1:] += offset[:, None]
    return np.array_split(spread, max(1, min(parts, len(spread))))
