"""States that differ only in the numbers of the ranks are one state.

Ranks do the same work, so a run in which rank 0 dies and one in which rank 1 does are the same run
with other names.  A search keeps one state of each such class: the least of all that renaming
gives (Ip and Dill, "Better verification through symmetry", 1996).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import permutations
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuzz.explore.rows import Dense, Ints
from fuzz.explore.world import State, World
from reference.protocol import Peer, Topology


class Symmetry:
    """Finds the representatives of states."""

    def __init__(self, world: World) -> None:
        self.world = world
        topology = world.bounds.topology
        ranks, writers = len(world.decoders), len(world.writers)
        # other topologies are searched in full
        renamings = permutations(range(ranks)) if ranks == writers else ()
        self.renamings = [p for p in renamings if _keeps(topology, p) and p != tuple(range(ranks))]
        # for each renaming and column: the column that it comes from, and how that is renamed
        self._columns = [self._columns_of(to) for to in self.renamings]

    def least(self, states: Ints) -> Ints:
        """The representatives of judged states, [n, columns]."""
        best = states
        for columns in self._columns:
            other = np.stack([rename(states[:, column]) for column, rename in columns], axis=1)
            best = np.where(_below(other, best)[:, None], other, best)
        return best

    def least_of(self, state: State) -> State:
        """The representative of one state."""
        return tuple(self.least(np.array([state], np.int32))[0].tolist())

    def _columns_of(self, to: tuple[int, ...]) -> list[tuple[int, Dense]]:
        back = sorted(range(len(to)), key=to.__getitem__)
        world = self.world
        value, bag, judge = (
            Dense(partial(self._once, to=to, rename=rename))
            for rename in (self._value, self._bag, self._judge)
        )
        return [
            *((world.d_columns[rank], value) for rank in back),
            *((world.p_columns[rank], value) for rank in back),
            *((world.bag_column, bag), (world.air_column, bag), (world.around_column, value)),
            (world.around_column + 1, judge),
        ]

    def _once(self, part: int, *, to: tuple[int, ...], rename: Rename) -> int:
        memo = self.world.memo
        return memo.once(
            ("renamed", rename.__name__, part, to), lambda: memo.id(rename(memo.values[part], to))
        )

    def _value(self, value: Any, to: tuple[int, ...]) -> Any:
        return renamed(value, to)

    def _bag(self, value: Any, to: tuple[int, ...]) -> Any:
        # the order of a bag says nothing: the world's own is kept
        return tuple(sorted(renamed(value, to), key=self.world.memo.id))

    def _judge(self, value: Any, to: tuple[int, ...]) -> Any:
        transfers, instance = value
        named = tuple((key, self._once(n, to=to, rename=self._transfer)) for key, n in transfers)
        return named, self._once(instance, to=to, rename=self._value)

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


def _below(one: Ints, other: Ints) -> NDArray[np.bool_]:
    """Where a row comes before another, [n]."""
    below = np.zeros(len(one), np.bool_)
    for mine, theirs in zip(one.T[::-1], other.T[::-1], strict=True):
        below = (mine < theirs) | ((mine == theirs) & below)
    return below


def _keeps(topology: Topology, to: tuple[int, ...]) -> bool:
    """Whether the renamed ranks of P write to the renamed ranks of D as before."""
    return all(
        tuple(to[writer] for writer in writers) == topology.writers[to[rank]]
        for rank, writers in enumerate(topology.writers)
    )
