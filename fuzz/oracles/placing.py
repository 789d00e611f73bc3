"""Where a request lies on a rank of D, by the reference's addressing, and what lies there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fuzz.oracles.readers import Ints
from fuzz.stamps import Bytes
from reference.contract import Component, Engine, Places
from reference.geometry import Geometry, ModelShape
from reference.protocol import Side
from reference.transfer import End, Move, landing
from systems.wiring import Wiring

Layer = tuple[Component, int]
STORED = (Component.KV, Component.INDEX, Component.TAIL)
"""Of the DSA layers."""


class Cells(NamedTuple):
    """Cells of one component in one layer, [n] each: the pieces that they come with, what they are
    of the request (a position, a group, the n-th of the tail, a word of the state), and which rows
    or words of D's memory."""

    piece: Ints
    unit: Ints
    at: Ints

    def some(self, mask: npt.NDArray[np.bool_]) -> Cells:
        """Those of a mask [n]."""
        return Cells(*(column[mask] for column in self))


class Image:
    """The raw buffers of one rank of D, by rows of its components, states by words."""

    def __init__(self, engine: Engine, geometry: Geometry, shape: ModelShape) -> None:
        self.layers: dict[Layer, Bytes] = {}
        for layer in range(len(shape.dsa_layers)):
            kv, index, tail = (engine.raw(component, layer).numpy() for component in STORED)
            self.layers[Component.KV, layer] = kv
            self.layers[Component.INDEX, layer] = index
            self.layers[Component.TAIL, layer] = tail.reshape(-1, tail.shape[-1])
        for layer in range(len(shape.kda_layers)):
            state = engine.raw(Component.STATE, layer).numpy()
            self.layers[Component.STATE, layer] = state.reshape(len(state), -1, 4)
        self._slots = geometry.index_page_size

    def rows(self, at: Layer, items: Ints) -> Bytes:
        """[n, bytes] uint8."""
        memory = self.layers[at]
        if at[0] is Component.STATE:
            return memory[items // memory.shape[1], items % memory.shape[1]]
        if at[0] is not Component.INDEX:
            return memory[items]
        keys = memory.shape[1] - 4 * self._slots
        pages, slots = items // self._slots, items % self._slots
        key = memory[:, :keys].reshape(len(memory), self._slots, -1)[pages, slots]
        scale = memory[:, keys:].reshape(len(memory), self._slots, 4)[pages, slots]
        return np.concatenate([key, scale], axis=1)

    def copied(self) -> dict[Layer, Bytes]:
        """Everything as it is now."""
        return {at: memory.copy() for at, memory in self.layers.items()}

    def changed(self, at: Layer, before: Bytes) -> Ints:
        """Rows, index pages or words of the state that are not what they were."""
        memory = self.layers[at]
        if np.array_equal(memory, before):
            return np.zeros(0, dtype=np.int64)
        differs = (memory != before).any(axis=-1)
        return np.flatnonzero(differs)


class Placing:
    """Says what lands where on the ranks of D."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._geometry = wiring.geometries[Side.DECODE]
        self._known: dict[tuple[int, Places, int | None], dict[Layer, Cells]] = {}

    def cells(self, rank: int, there: Places) -> dict[Layer, Cells]:
        """All that lands at these places of a rank, told by what it is of the whole request."""
        return self._kept(rank, there, None)

    def sent(self, rank: int, there: Places, writer: int) -> dict[Layer, Cells]:
        """Of these the ones that a rank of P sends; of their units only pieces and places hold."""
        return self._kept(rank, there, writer)

    def rowed(self, cells: Mapping[Layer, Cells], length: int) -> dict[Layer, Cells]:
        """The same with index pages taken apart into the rows of closed groups."""
        slots, rowed = np.arange(self._geometry.index_page_size), dict(cells)
        for at, (piece, unit, items) in cells.items():
            if at[0] is Component.INDEX:
                groups, rows = ((x[:, None] * len(slots) + slots).ravel() for x in (unit, items))
                closed = groups < length // self._geometry.kpool
                pieces = piece.repeat(len(slots))
                rowed[at] = Cells(pieces[closed], groups[closed], rows[closed])
        return rowed

    def _kept(self, rank: int, there: Places, writer: int | None) -> dict[Layer, Cells]:
        if (rank, there, writer) not in self._known:
            self._known[rank, there, writer] = _by_layer(self._moves(rank, there, writer))
        return self._known[rank, there, writer]

    def _moves(self, rank: int, there: Places, writer: int | None) -> Iterable[Move]:
        """From a writer, or from one that has all heads, whose own places are 0, 1, 2, ..."""
        heads, place, writers = range(self._wiring.shape.kda_heads), 0, 1
        if writer is not None:
            heads = self._wiring.heads(Side.PREFILL, writer)
            ranks = self._wiring.topology.writers[rank]
            place, writers = ranks.index(writer), len(ranks)
        ordered = Places(
            kv=tuple(range(len(there.kv))),
            index=tuple(range(len(there.index))),
            tail=tuple(range(len(there.tail))),
            state=0,
            length=there.length,
        )
        return landing(
            End(places=ordered, heads=heads),
            End(places=there, heads=self._wiring.heads(Side.DECODE, rank)),
            self._geometry,
            self._wiring.shape,
            chunks=self._wiring.chunks,
            writer=place,
            writers=writers,
        )


def _by_layer(moves: Iterable[Move]) -> dict[Layer, Cells]:
    grouped: dict[Layer, list[tuple[int, int, int]]] = defaultdict(list)
    for piece, source, target in moves:
        grouped[target.component, target.layer].append((piece, source.item, target.item))
    # moves may come in any order, and oracles name what they find in this one
    order = {component: place for place, component in enumerate(Component)}
    return {
        at: Cells(*np.array(sorted(grouped[at]), dtype=np.int64).T)
        for at in sorted(grouped, key=lambda at: (order[at[0]], at[1]))
    }
