"""The parts that a world's state is made of, and how one of them is replaced.

A state is a tuple of small integers, one for each part, so that a search over millions of states
can keep them all (`fuzz.explore.intern`).
"""

from __future__ import annotations

from collections.abc import Collection
from types import ModuleType
from typing import Any

from fuzz.explore.intern import Interner
from fuzz.explore.turns import Effects, Prefill
from fuzz.explore.words import Around, Bounds, Envelope, Flight
from reference.protocol import Peer, Phase, Side

State = tuple[int, ...]
"""The number of each part: the ranks of D, the ranks of P, the bag, the flights, `Around`."""

UNSEEN = object()
"""Stands for a part that is not looked at."""


class Parts:
    """Reads and writes the parts of states; ranks are told nothing."""

    def __init__(self, bounds: Bounds, ranks: ModuleType) -> None:
        self.bounds = bounds
        self.ranks = ranks
        self.memo = Interner()
        topology = bounds.topology
        self.decoders = tuple(Peer(Side.DECODE, r, 0) for r in range(len(topology.writers)))
        self.writers = tuple(
            Peer(Side.PREFILL, r, 0) for r in sorted(set().union(*topology.writers))
        )
        # where each part stands in a state
        d, net = len(self.decoders), len(self.decoders) + len(self.writers)
        self.d_columns, self.p_columns = tuple(range(d)), tuple(range(d, net))
        self.bag_column, self.air_column, self.around_column = net, net + 1, net + 2

    def only(self, state: State, columns: Collection[int]) -> State:
        """The state without all other ranks, and with nothing else on its way."""
        unseen, nothing = self.memo.id(UNSEEN), self.memo.id(())
        net = (self.bag_column, self.air_column)
        return tuple(
            part if column in columns else nothing if column in net else unseen
            for column, part in enumerate(state)
        )

    def around(self, state: State) -> Around:
        """The part of a state that is in no rank and in no network."""
        return self.memo.values[state[-1]]

    def decode_rank(self, state: State, rank: int) -> Any:
        """A rank of D; None once it is dead."""
        return self.memo.values[state[rank]]

    def prefill(self, state: State, rank: int) -> Prefill | None:
        """A rank of P; None once it is dead."""
        return self.memo.values[state[len(self.decoders) + rank]]

    def lives(self, state: State, side: Side) -> tuple[Peer, ...]:
        """The processes of an instance that are alive."""
        if side is Side.DECODE:
            ranks = [self.decode_rank(state, me.rank) for me in self.decoders]
        else:
            prefills = [self.prefill(state, me.rank) for me in self.writers]
            ranks = [prefill.rank for prefill in prefills if prefill is not None]
        return tuple(rank.me for rank in ranks if rank is not None)

    def bag(self, state: State) -> tuple[Envelope, ...]:
        """Messages on their way."""
        return self.memo.values[state[-3]]

    def flights(self, state: State) -> tuple[Flight, ...]:
        """Writes on their way."""
        return self.memo.values[state[-2]]

    def parts_of(self, flight: Flight) -> int:
        """In how many parts a piece lands; an aux row lands whole."""
        return 1 if flight.piece == self.bounds.topology.pieces else self.bounds.parts

    # Another state.

    def _spend(self, state: State) -> Around:
        around = self.around(state)
        return around._replace(faults=around.faults - 1)

    def _put(self, state: State, part: int, value: Any) -> State:
        return (*state[:part], self.memo.id(value), *state[part + 1 :])

    def _with(self, state: State, around: Around) -> State:
        return (*state[:-1], self.memo.id(around))

    def _post(
        self, state: State, *, out: tuple[Envelope, ...] = (), into: tuple[Envelope, ...] = ()
    ) -> State:
        return self._bagged(state, -3, out, into)

    def _fly(
        self, state: State, *, out: tuple[Flight, ...] = (), into: tuple[Flight, ...] = ()
    ) -> State:
        return self._bagged(state, -2, out, into)

    def _bagged(self, state: State, part: int, out: tuple, into: tuple) -> State:
        """The state with some taken out of a bag and others put in."""
        if not out and not into:
            return state
        part += len(state)
        return (*state[:part], self.refilled(state[part], out, into), *state[part + 1 :])

    def refilled(self, bag: int, out: tuple, into: tuple) -> int:
        """The number of a bag with some taken out and others put in."""
        memo = self.memo
        return memo.once(
            ("refilled", bag, out, into),
            lambda: memo.id(self._refilled(memo.values[bag], out, into)),
        )

    def _refilled(self, bag: tuple, out: tuple, into: tuple) -> tuple:
        left = list(bag)
        for item in out:
            left.remove(item)
        # the order of a bag says nothing: any fixed one will do
        return tuple(sorted((*left, *into), key=self.memo.id))

    def _name(self, state: State, flight: Flight) -> State:
        """An aux row has landed: it names its transfer, wherever it came to lie."""
        around, place = self.around(state), (flight.to, flight.slot)
        others = {row for row in around.aux if row[:2] != place}
        aux = frozenset(others | {(*place, flight.key)})
        return self._unread(self._with(state, around._replace(aux=aux)))

    def _unread(self, state: State) -> State:
        """Forget aux rows that nobody will read any more."""
        around = self.around(state)
        if not around.aux:
            return state
        awaited = {
            (rank.me, transfer.places[0][0])
            for me in self.decoders
            if (rank := self.decode_rank(state, me.rank)) is not None
            for transfer in rank.transfers
            if transfer.phase is Phase.ADVERTISED
        }
        aux = frozenset(row for row in around.aux if row[:2] in awaited)
        return self._with(state, around._replace(aux=aux))

    def _given_up(self, state: State, requests: Collection[int]) -> State:
        """A rank gave requests up: the router tells the others."""
        around = self.around(state)
        if around.given_up.issuperset(requests):
            return state
        return self._with(state, around._replace(given_up=around.given_up | set(requests)))

    def _carry(self, state: State, effects: Effects) -> State:
        """Send what a rank sent; what goes to the dead is lost at once."""
        envelopes, dead = effects.envelopes, self.around(state).dead
        if dead:
            envelopes = tuple(e for e in envelopes if e.to not in dead)
        return self._fly(self._post(state, into=envelopes), into=effects.flights)

    def _dead(self, state: State, peer: Peer) -> bool:
        return peer in self.around(state).dead
