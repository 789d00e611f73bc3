"""Where things are, and what a step stores: the reference's formulas, request by request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from optimized import addressing
from optimized.planner import ChunkPlan, DecodePlan, ReplayTable, VerifyPlan
from reference import addressing as truth
from reference.geometry import Geometry
from systems.components.component import Component

Array = NDArray[np.int64]
ADDRESSING = Component("addressing", "positions and groups to locs, index slots and ring rows")
PLANNER = Component("planner", "which rows a step stores, and from where")


def by_row(at: Callable[[Any, Any], Any], table: Array, row: Any, items: Any) -> Array:
    """`at(pages, items)` of each request by itself; `row` broadcasts against `items`."""
    rows, values = np.broadcast_arrays(np.asarray(row), np.asarray(items))
    out = np.empty(values.shape, dtype=np.int64)
    for one in np.unique(rows):
        mine = rows == one
        out[mine] = at(table[one], values[mine])
    return out


@ADDRESSING.by("locs")
def locs(geometry: Geometry, table: Array, row: Any, positions: Array) -> Array:
    return by_row(lambda pages, at: truth.loc_of(pages, at, geometry), table, row, positions)


def slots_of(geometry: Geometry, table: Array, row: Any, groups: Array) -> Array:
    return by_row(lambda pages, at: truth.index_slot_of(pages, at, geometry), table, row, groups)


ADDRESSING.by("index_slots")(slots_of)
ADDRESSING.by("read_slots")(slots_of)


@ADDRESSING.by("ring_rows")
def ring_rows(geometry: Geometry, ring: Any, positions: Any) -> Any:
    return ring * geometry.ring_size + truth.ring_row_of(positions, geometry)


@ADDRESSING.by("closed_groups")
def closed_groups(geometry: Geometry, length: Any) -> Any:
    return truth.visible_groups(length - 1, geometry)


@ADDRESSING.by("visible_groups")
def visible_groups(geometry: Geometry, position: Any) -> Any:
    return truth.visible_groups(position, geometry)


@ADDRESSING.by("tail_start")
def tail_start(geometry: Geometry, length: Any) -> Any:
    return truth.tail_start(length, geometry)


@ADDRESSING.by("pages_for")
def pages_for(geometry: Geometry, length: Any) -> Any:
    return truth.pages_for(length, geometry)


@PLANNER.by("plan_chunk")
def plan_chunk(
    geometry: Geometry,
    table: Array,
    rows: Array,
    rings: Array,
    starts: Array,
    stops: Array,
    *,
    ring_slots: int,
    keep_from: Array,
) -> ChunkPlan:
    """Every position, and every group that closes, one after the other."""
    place: dict[tuple[int, int], int] = {}  # row of the chunk, by request and position
    spans = list(enumerate(zip(starts.tolist(), stops.tolist(), strict=True)))
    for request, (start, stop) in spans:
        for position in range(start, stop):
            place[request, position] = len(place)
    groups = [
        (request, group)
        for request, (start, stop) in spans
        for group in range(start // geometry.kpool, stop // geometry.kpool)
    ]
    kept = [
        (request, position) for request, position in place if position >= int(keep_from[request])
    ]

    def source(request: int, position: int) -> int:
        if (request, position) in place:
            return ring_slots * geometry.ring_size + place[request, position]
        return int(addressing.ring_rows(geometry, int(rings[request]), np.array([position]))[0])

    owner, positions = _columns(place)
    closing, group = _columns(groups)
    keeper, keeps = _columns(kept)
    members = [
        [source(request, one * geometry.kpool + slot) for slot in range(geometry.kpool)]
        for request, one in groups
    ]
    plan = (
        owner,
        positions,
        addressing.locs(geometry, table, rows[owner], positions),
        addressing.index_slots(geometry, table, rows[closing], group),
        np.array(members, dtype=np.int64).reshape(-1, geometry.kpool),
        addressing.ring_rows(geometry, rings[keeper], keeps),
        np.array([place[pair] for pair in kept], dtype=np.int64),
    )
    return ChunkPlan(*map(torch.from_numpy, plan))


def _columns(pairs: Any) -> Iterator[Array]:
    """Both columns of pairs, of which there may be none."""
    return iter(np.array(list(pairs), dtype=np.int64).reshape(-1, 2).T.copy())


def closing_slots(geometry: Geometry, table: Array, rows: Array, positions: Array) -> Array:
    slots = np.zeros(len(positions), dtype=np.int64)
    for request, position in enumerate(positions.tolist()):
        if (position + 1) % geometry.kpool == 0:
            group = np.array([truth.visible_groups(position, geometry) - 1])
            slots[request] = addressing.index_slots(geometry, table, rows[request], group)[0]
    return slots


def refresh_table(self: ReplayTable, table: Array, slots: Array, width: int) -> None:
    for request, slot in enumerate(slots.tolist()):
        self.pages[request, :width] = table[slot, :width]


@PLANNER.by("DecodePlan.refresh")
def refresh_decode(
    self: DecodePlan, table: Array, rings: Array, positions: Array, states: Array
) -> None:
    pages = self.table.pages
    pages[:] = 0
    refresh_table(self.table, table, rings, pages.shape[1])
    owner = np.arange(len(rings))
    self.owner, self.rings, self.positions, self.states = (
        torch.from_numpy(column.astype(np.int64)) for column in (owner, rings, positions, states)
    )
    self.locs = torch.from_numpy(addressing.locs(self.geometry, pages, owner, positions))
    self.index_slots = torch.from_numpy(closing_slots(self.geometry, pages, owner, positions))


@PLANNER.by("VerifyPlan.refresh")
def refresh_verify(
    self: VerifyPlan, table: Array, rings: Array, starts: Array, stops: Array, *, ring_slots: int
) -> None:
    pages = self.table.pages
    pages[:] = 0
    refresh_table(self.table, table, rings, pages.shape[1])
    self.chunk = plan_chunk(
        self.geometry,
        pages,
        np.arange(len(rings)),
        rings,
        starts,
        stops,
        ring_slots=ring_slots,
        keep_from=starts,
    )
