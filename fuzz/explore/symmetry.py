"""States that differ only in the numbers of the ranks are one state.

Ranks do the same work, so a run in which rank 0 dies and one in which rank 1 does are the same run
with other names.  A search keeps one state of each such class: the least of all that renaming
gives (Ip and Dill, "Better verification through symmetry", 1996).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import msgspec

from fuzz.explore.world import State, World
from reference.protocol import Peer, Topology


class Symmetry:
    """Finds the representative of a state."""

    def __init__(self, world: World) -> None:
        self.world = world
        topology = world.bounds.topology
        ranks, writers = len(world.decoders), len(world.writers)
        # other topologies are searched in full
        renamings = permutations(range(ranks)) if ranks == writers else ()
        self.renamings = [p for p in renamings if _keeps(topology, p) and p != tuple(range(ranks))]
        # for each renaming: parts that have been renamed, and from which place each place's comes
        self._known: dict[tuple[int, ...], tuple[dict[int, int], tuple[int, ...]]] = {}
        for to in self.renamings:
            back = sorted(range(ranks), key=to.__getitem__)
            rest = range(world.net, world.net + 3)
            self._known[to] = ({}, (*back, *(ranks + old for old in back), *rest))

    def least(self, state: State) -> State:
        """The representative of a judged state's class: the world's part decides."""
        world = state[:-1]
        best, by = world, None
        for to in self.renamings:
            other = self._renamed(world, to)
            if other < best:
                best, by = other, to
        if by is None:
            return state
        return (*best, self._once("judge", state[-1], by, self._judge))

    def _renamed(self, state: State, to: tuple[int, ...]) -> State:
        known, places = self._known[to]
        try:
            return tuple([known[state[place]] for place in places])
        except KeyError:
            for place in places:
                bag = place in (self.world.net, self.world.net + 1)
                rename = self._bag if bag else self._value
                known[state[place]] = self._once("part", state[place], to, rename)
            return self._renamed(state, to)

    def _once(self, what: str, part: int, to: tuple[int, ...], rename: Rename) -> int:
        memo = self.world.memo
        return memo.once((what, part, to), lambda: memo.id(rename(memo.values[part], to)))

    def _value(self, value: Any, to: tuple[int, ...]) -> Any:
        return renamed(value, to)

    def _bag(self, value: Any, to: tuple[int, ...]) -> Any:
        # the order of a bag says nothing: the world's own is kept
        return tuple(sorted(renamed(value, to), key=self.world.memo.id))

    def _judge(self, value: Any, to: tuple[int, ...]) -> Any:
        transfers, instance = value
        named = tuple((key, self._once("transfer", n, to, self._transfer)) for key, n in transfers)
        return named, self._once("part", instance, to, self._value)

    def _transfer(self, value: Any, to: tuple[int, ...]) -> Any:
        phases = list(value.phases)
        for old, new in enumerate(to):
            phases[new] = value.phases[old]
        return renamed(value, to)._replace(phases=tuple(phases))


Rename = Callable[[Any, tuple[int, ...]], Any]


def renamed(value: Any, to: tuple[int, ...]) -> Any:
    """A value in which rank r is called to[r]."""
    if isinstance(value, Peer):
        return value._replace(rank=to[value.rank])
    if isinstance(value, Topology):
        return value
    if isinstance(value, frozenset):
        return frozenset(renamed(item, to) for item in value)
    if isinstance(value, tuple):
        items = [renamed(item, to) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, msgspec.Struct):
        fields = value.__struct_fields__
        return type(value)(**{name: renamed(getattr(value, name), to) for name in fields})
    return value


def _keeps(topology: Topology, to: tuple[int, ...]) -> bool:
    """Whether the renamed ranks of P write to the renamed ranks of D as before."""
    return all(
        tuple(to[writer] for writer in writers) == topology.writers[to[rank]]
        for rank, writers in enumerate(topology.writers)
    )
