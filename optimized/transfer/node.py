"""What joins a rank's protocol, engine and transport: one object in each process of P or D.

The serving loop owns the engine's steps, and calls `tick` between them.  All ranks of an instance
make the same calls of `submit`, `finish`, `abort` and `tick` in the same order, since a tick
holds one collective round, and memory is taken and given back in rounds alone: that keeps their
allocators equal.  What one rank learns alone, such as a failure, reaches the others in a round.

Each node notes what it does to the outside (`reference.protocol.Observation`); the notes of all
nodes, in an order that respects causes, are a run that can be judged.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from optimized.groups import ALONE, Group
from optimized.transfer.hello import NUMBERS
from optimized.transfer.plan import AUX_BYTES, CLEARED
from optimized.transfer.transport import (
    PeerFenced,
    PeerLost,
    Received,
    Region,
    Transport,
    WriteEnded,
)
from reference.contract import Engine, InvalidCall, RequestId
from reference.protocol import Message, Observation, Peer, Reduced, Sent


@dataclass(frozen=True, slots=True)
class Live:
    """D may decode `request` from `first_token` on: its prompt is there, on all ranks."""

    request: RequestId
    first_token: int


@dataclass(frozen=True, slots=True)
class Failed:
    """This rank gave `request` up, the others will follow, and Freed comes when it can."""

    request: RequestId


@dataclass(frozen=True, slots=True)
class Freed:
    """The memory of `request` was given back, on all ranks in this tick."""

    request: RequestId


News = Live | Failed | Freed


@dataclass(frozen=True, slots=True, kw_only=True)
class Timers:
    """How long a node waits, in the units of its clock (seconds).

    Fields:
        retry_s: until D says again what may have been lost.
        abort_timeout_s: for the ACKs of an abort, until the memory is quarantined.
        transfer_timeout_s: for a transfer, from its reservation at D and from its submission at
            P, until it is given up.
    """

    retry_s: float = 1.0
    abort_timeout_s: float = 30.0
    transfer_timeout_s: float = 120.0


def aux_rows(state_slots: int) -> Tensor:
    """[state_slots, AUX_BYTES] uint8: an aux row for each slot of the engine's state pool, of
    which every request has one."""
    return torch.full((state_slots, AUX_BYTES), CLEARED, dtype=torch.uint8)


def regions_of(engine: Engine, aux: Tensor) -> list[Region]:
    """What a node's transport must be given, in the order in which plans count."""
    return [Region(name, memory) for name, memory in (*engine.regions().items(), ("aux", aux))]


def checked_room(room: int) -> int:
    """A room's number, as an aux row can hold it.

    Raises:
        InvalidCall: it cannot.
    """
    if not isinstance(room, int) or not 0 <= room < NUMBERS:
        raise InvalidCall(f"room {room!r} is none: number rooms by integers from 0 to 2**63 - 1.")
    return room


def unobserved(seen: Observation) -> None:
    """Notes nothing."""


class Options(TypedDict, total=False):
    """What a node may be told besides.

    Fields:
        group: the ranks of the instance, for the rounds; none others by default.
        timers: how long it waits.
        clock: what the timers count in; seconds by default.
        observe: told of all that is done to the outside.
    """

    group: Group
    timers: Timers
    clock: Callable[[], float]
    observe: Callable[[Observation], None]


class Node(ABC):
    """What the nodes of both sides have in common."""

    def __init__(
        self, engine: Engine, transport: Transport, aux: Tensor, **how: Unpack[Options]
    ) -> None:
        """Own a transport over `regions_of(engine, aux)`.  What the engine keeps for a transfer is
        given back by the node alone."""
        self.me = transport.me
        self._engine = engine
        self.transport = transport
        self._aux = aux
        self._group = how.get("group", ALONE)
        self._timers = how.get("timers", Timers())
        self._clock = how.get("clock", time.monotonic)
        self._note = how.get("observe", unobserved)
        self._rounds = 0
        self._news: list[News] = []

    def tick(self) -> list[News]:
        """Handle what came, do what is due, and take part in one round.

        Returns:
            What the serving loop must know, in order.  All ranks return the same Live and Freed.

        Raises:
            RankLost: another rank did not come to the round: build the instance anew.
        """
        for event in self.transport.poll():
            match event:
                case Received(message):
                    self._receive(message)
                case WriteEnded():
                    self._end_write(event)
                case PeerLost(peer):
                    self._lose(peer)
                case PeerFenced(peer):
                    self._fence(peer)
        self._watch(self._clock())
        self._work()
        self._round()
        news, self._news = self._news, []
        return news

    @abstractmethod
    def connect(self, hello: bytes) -> Peer:
        """Get to know a process of the other side, which may have been started again.

        Raises:
            Refused: as the transport does.
        """

    @abstractmethod
    def _receive(self, message: Message) -> None: ...

    @abstractmethod
    def _end_write(self, ended: WriteEnded) -> None: ...

    @abstractmethod
    def _lose(self, peer: Peer) -> None: ...

    @abstractmethod
    def _fence(self, peer: Peer) -> None: ...

    @abstractmethod
    def _watch(self, now: float) -> None:
        """Do what the timers ask for."""

    @abstractmethod
    def _work(self) -> None:
        """Do what this rank does by itself."""

    @abstractmethod
    def _round(self) -> None:
        """Decide with the other ranks, and do what follows."""

    def _gather(self, values: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        """What each rank brings to the next round, in rank order.  About nothing there is none,
        as all ranks know alike."""
        if not values:
            return [[]]
        self._rounds += 1
        self._note(Reduced(self.me, self._rounds, len(values)))
        gathered = self._group.gather(torch.tensor(values, dtype=torch.int64))
        return [tensor.tolist() for tensor in gathered]

    def _send(self, to: Peer, message: Message) -> None:
        self._note(Sent(self.me, to, message))
        self.transport.send(to, message)
