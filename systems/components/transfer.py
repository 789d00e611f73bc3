"""Which bytes of a request move where: the reference's moves, one cell each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from optimized.memory.manager import Memory
from optimized.memory.requests import Request
from optimized.transfer.plan import REGIONS_PER_LAYER, Plan, state_unit
from optimized.transfer.transport import Refused
from reference import transfer
from reference.contract import Component as Part
from reference.contract import InvalidCall, Places
from systems.components.component import Component

Array = NDArray[np.int64]
PLAN = Component("transfer.plan", "which runs of bytes move from P to D")
TRANSFERS = Component("memory.transfers", "where an engine says that a request is")
WITHIN_LAYER = {Part.KV: 0, Part.INDEX: 1, Part.TAIL: 2}


@PLAN.by("Plan.runs")
def runs(self: Plan, piece: int, here: Places, there: Places) -> Array:
    """Every move by itself; a state's are whole items where they begin one."""
    self._check(piece, here, there)
    moves = transfer.landing(
        transfer.End(places=_whole(here, there), heads=self.here),
        transfer.End(places=there, heads=self.there),
        self.geometry,
        self.shape,
        chunks=self.chunks,
        writer=self.writer,
        writers=self.writers,
    )
    unit = state_unit(self.shape)
    found = []
    for _, source, target in sorted(move for move in moves if move.piece == piece):
        if source.component is not Part.STATE:
            region = source.layer * REGIONS_PER_LAYER + WITHIN_LAYER[source.component]
            found.append((region, source.item, target.item, 1))
        elif target.item % unit == 0:
            here_item, there_item = (
                _word(self, cell, heads) // unit
                for cell, heads in ((source, self.here), (target, self.there))
            )
            found.append((self.aux_region - 1, here_item, there_item, 1))
    return np.array(found, dtype=np.int64).reshape(-1, 4)


def _whole(here: Places, there: Places) -> Places:
    """P's places with those that it does not have yet, which are of later pieces."""
    lacking = (0,) * (len(there.kv) - len(here.kv))
    tail = here.tail if here.length == there.length else (0,) * len(there.tail)
    return replace(here, kv=here.kv + lacking, index=here.index + lacking, tail=tail)


def _word(plan: Plan, cell: transfer.Cell, heads: range) -> int:
    """A word's place among those of all layers, as an engine with these heads keeps them."""
    width = replace(plan.shape, kda_heads=len(heads)).state_width
    slot, word = divmod(cell.item, width)
    return (slot * len(plan.shape.kda_layers) + cell.layer) * width + word


@PLAN.by("Plan.required")
def required(self: Plan, piece: int, length: int) -> int:
    return transfer.required(piece, length, self.geometry, chunks=self.chunks)


@PLAN.by("writers_of")
def writers_of(prefill: int, decode: int) -> tuple[tuple[int, ...], ...]:
    try:
        return transfer.writers_of(prefill, decode)
    except InvalidCall as error:
        raise Refused(str(error)) from error


@TRANSFERS.by("_places")
def places(memory: Memory, record: Request, length: int) -> Places:
    return transfer.places_of(memory.snapshot(), record.id, length, memory.geometry)
