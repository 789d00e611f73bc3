"""The words of a simulated run: its bounds, what may happen in it, and what is on its way."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple

import msgspec

from reference.protocol import Completion, Message, Peer, Topology, TransferKey


class Kind(IntEnum):
    """What may happen.  Those before CANCEL_D happen sooner or later in any fair run."""

    SUBMIT_D = 0
    SUBMIT_P = 1
    ROUND_D = 2
    ROUND_P = 3
    ADVERTISE = 4
    TAKE = 5
    PREPARE = 6
    ARRIVE = 7
    SETTLE = 8
    DELIVER = 9
    RETRY = 10
    END_READING = 11
    RELAY_D = 12
    RELAY_P = 13
    NOTICE = 14
    FENCE = 15
    GIVE_UP = 16
    MEET = 17
    CANCEL_D = 18
    CANCEL_P = 19
    EXPIRE = 20
    LOSE = 21
    DOUBLE = 22
    BREAK = 23
    KILL = 24
    RESTART = 25


FAULTS = (Kind.KILL, Kind.LOSE, Kind.DOUBLE, Kind.BREAK, Kind.EXPIRE)
"""What may go wrong, the most consequential first."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What a world holds, and how much may go wrong in one run.

    Fields:
        topology, completion: as in `reference.protocol`.
        rooms: the room of each request, in the order in which they are submitted; one that is
            used again is so only once its former request is over or given up somewhere.
        slots: destinations on each rank of D; a request that finds none waits.
        parts: in so many parts a piece of data lands; an aux row lands whole.
        advertise_apart: a rank of D offers a transfer later than it reserves it.
        settle_apart: a writer learns later that its bytes have landed, and not as they do.
        faults: messages lost or doubled, writes broken, processes killed, and messages so late
            that a timeout comes first: in all.
        first: what the first of them may be.
        aborts: requests that somebody gives up, on either side.
        restarts: so often an instance with a dead process is started again, as a whole.
    """

    topology: Topology
    completion: Completion
    rooms: tuple[int, ...]
    slots: int
    parts: int = 2
    advertise_apart: bool = False
    settle_apart: bool = False
    faults: int = 1
    first: tuple[Kind, ...] = FAULTS
    aborts: int = 1
    restarts: int = 0


class Event(NamedTuple):
    """One thing that happens: `rank` is where, `what` to what."""

    kind: Kind
    rank: int = 0
    what: Any = None


class Envelope(msgspec.Struct, frozen=True, cache_hash=True):
    """A message on its way."""

    to: Peer
    message: Message


class Flight(msgspec.Struct, frozen=True, cache_hash=True):
    """A posted piece on its way to a `slot`: `parts` of it have landed.  `settled`: its writer has
    been told how it ended."""

    key: TransferKey
    writer: Peer
    to: Peer
    piece: int
    note: Message | None
    slot: int
    parts: int = 0
    settled: bool = False


class Around(NamedTuple):
    """What is neither in a rank nor in the network.

    Fields:
        at_d, at_p: requests submitted so far to either side.
        waiting: those that wait at D for a destination.
        reserved: those that had one in this life of D, in order: the k-th has generation k + 1.
        given_up: requests that somebody gave up; the router tells everybody.
        dead: processes that ended.
        noticed: (rank of D, process of P) that it knows to be gone.
        fenced: (rank of D, process of P) whose writes there are over.
        faults, aborts, restarts: still to be spent.
        aux: (rank of D, slot, key) of aux rows that somebody may still read.
        lost: some message was lost, so that timers go off.
        broken: some write ended with an unknown outcome, and its memory is gone for good.
    """

    faults: int
    aborts: int
    restarts: int = 0
    at_d: int = 0
    at_p: int = 0
    waiting: tuple[int, ...] = ()
    reserved: tuple[int, ...] = ()
    given_up: frozenset[int] = frozenset()
    dead: frozenset[Peer] = frozenset()
    noticed: frozenset[tuple[Peer, Peer]] = frozenset()
    fenced: frozenset[tuple[Peer, Peer]] = frozenset()
    aux: frozenset[tuple[Peer, int, TransferKey]] = frozenset()
    lost: bool = False
    broken: bool = False
