"""Faults of address arithmetic: which index slot, which bytes of it, which ring row.

`table` is [rows, logical pages], and a reader's index page id is a logical page id.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fuzz.mutants.registry import Body, mutant
from reference.geometry import Geometry, RowFormat

Ints = npt.NDArray[np.int64]
WRITE = "optimized.addressing.index_slots"
READ = "optimized.addressing.read_slots"
STORED = ("provenance", "containment")


def inside(slots: Ints, table: Ints, geometry: Geometry) -> Ints:
    """The slots, wrapped into the index pages that the table knows of."""
    return slots % ((table.max() + 1) * geometry.index_page_size)


def read_through(
    geometry: Geometry, table: Ints, row: Ints | int, column: Ints, groups: Ints, *, times: int = 1
) -> Ints:
    """Slots as a reader finds them that takes its index page from `column` of the page table."""
    pages = table[row, np.minimum(column, table.shape[1] - 1)] * times
    offset = groups % geometry.index_page_size
    return inside(pages * geometry.index_page_size + offset, table, geometry)


@mutant(READ, bug="sglang#42750", killed_by=("provenance",))
def pooled_table_not_divided(
    original: Body, geometry: Geometry, table: Ints, row: Ints, groups: Ints
) -> Ints:
    """The reader's pooled page table holds physical page ids that were not divided by kpool."""
    column = groups // geometry.index_page_size
    return read_through(geometry, table, row, column, groups, times=geometry.kpool)


@mutant(READ, bug="sglang#42178", killed_by=("provenance",))
def pooled_table_every_column(
    original: Body, geometry: Geometry, table: Ints, row: Ints, groups: Ints
) -> Ints:
    """The reader's pooled page table takes every column of the physical one for every kpool-th."""
    column = groups // geometry.index_page_size // geometry.kpool
    return read_through(geometry, table, row, column, groups)


@mutant(READ, bug="own", killed_by=("provenance",))
def pooled_table_one_column_on(
    original: Body, geometry: Geometry, table: Ints, row: Ints, groups: Ints
) -> Ints:
    """The reader's pooled page table starts one logical page too far on."""
    column = groups // geometry.index_page_size + 1
    return read_through(geometry, table, row, column, groups)


@mutant(READ, bug="sglang#31218", killed_by=("provenance",))
def gather_by_loc(original: Body, geometry: Geometry, table: Ints, row: Ints, groups: Ints) -> Ints:
    """The gather looks for a pooled key at its first token's loc, not divided by kpool."""
    slots = original(geometry, table, row, groups)
    return inside(slots * geometry.kpool, table, geometry)


@mutant("optimized.planner.plan_chunk", bug="sglang#31218", killed_by=STORED)
def extend_by_loc(
    original: Body, geometry: Geometry, table: Ints, *spans: Ints, **where: Any
) -> Any:
    """An extend stores a pooled key at its first token's loc, not divided by kpool."""
    plan = original(geometry, table, *spans, **where)
    if not for_verify(*spans, **where):
        _to_locs(plan, table, geometry)
    return plan


@mutant("optimized.planner.closing_slots", bug="sglang#31218", killed_by=STORED)
def decode_by_loc(
    original: Body, geometry: Geometry, table: Ints, rows: Ints, positions: Ints
) -> Ints:
    """A decode stores a pooled key at its first token's loc, not divided by kpool."""
    slots = original(geometry, table, rows, positions)
    return inside(slots * geometry.kpool, table, geometry)


@mutant("optimized.planner.VerifyPlan.refresh", bug="sglang#31218", killed_by=STORED)
def verify_by_loc(original: Body, self: Any, table: Ints, *spans: Ints, **where: Any) -> None:
    """A verify stores a pooled key at its first token's loc, not divided by kpool."""
    original(self, table, *spans, **where)
    _to_locs(self.chunk, table, self.geometry)


def for_verify(
    rows: Ints, rings: Ints, starts: Ints, stops: Ints, *, ring_slots: int, keep_from: Ints
) -> bool:
    """Whether a chunk is planned for a verify, which keeps all its rows in the ring."""
    return keep_from is starts


def _to_locs(plan: Any, table: Ints, geometry: Geometry) -> None:
    slots = plan.index_slots.numpy()
    slots[:] = inside(slots * geometry.kpool, table, geometry)


@mutant(WRITE, bug="own", killed_by=STORED)
def slot_of_group_as_position(
    original: Body, geometry: Geometry, table: Ints, row: Ints, groups: Ints
) -> Ints:
    """A pooled key goes where position `group` would go, not position `group * kpool`."""
    page, offset = np.divmod(groups, geometry.logical_page_size)
    return (table[row, page] * geometry.logical_page_size + offset) // geometry.kpool


@mutant("optimized.kernels.pooled_key.page_views", bug="vllm#47783", killed_by=STORED)
def scales_interleaved(original: Body, index_pool: Any, *, index_page_size: int) -> tuple[Any, Any]:
    """A pooled key's scale is written as though each key had its scale behind it, not each page
    all its scales."""
    keys, _ = original(index_pool, index_page_size=index_page_size)
    return keys, index_pool.view(len(index_pool), index_page_size, -1)[..., -4:]


@mutant("optimized.kernels.pooled_key.page_views", bug="own", killed_by=STORED)
def scales_at_page_start(
    original: Body, index_pool: Any, *, index_page_size: int
) -> tuple[Any, Any]:
    """An index page's scales are written from its first byte on, over its keys."""
    keys, _ = original(index_pool, index_page_size=index_page_size)
    return keys, index_pool[:, : 4 * index_page_size].view(-1, index_page_size, 4)


@mutant("optimized.kernels.pooled_key.store_groups", bug="own", killed_by=STORED)
def index_pool_one_page_short(
    original: Body, index_pool: Any, slots: Any, *rows: Any, index_page_size: int, **options: Any
) -> None:
    """The index pool has a page less than the token pool: what is stored in the last wraps."""
    slots = slots % ((len(index_pool) - 1) * index_page_size)
    original(index_pool, slots, *rows, index_page_size=index_page_size, **options)


@mutant("optimized.addressing.ring_rows", bug="own", killed_by=STORED, target="slot_reuse")
def ring_without_drafts(
    original: Body, geometry: Geometry, ring: Ints | int, positions: Ints
) -> Ints:
    """A position's ring row is taken modulo kpool, not modulo kpool and the drafts."""
    return ring * geometry.ring_size + positions % geometry.kpool


@mutant("optimized.memory.manager.Memory.grow", bug="own", killed_by=("exact", "provenance"))
def page_short_at_boundary(
    original: Body, self: Any, slots: Ints, stops: Ints, **options: Any
) -> None:
    """A request that steps over the end of a page is given no new one for its first token."""
    original(self, slots, stops, **options)
    table, size = self.table, self.geometry.logical_page_size
    for slot in slots[stops % size == 1]:
        table.pages_held[slot] -= 1
        last = table.pages[slot, table.pages_held[slot] :][:1]
        self.pages.release(last)
        last[:] = 0


@mutant("optimized.kernels.kv_store.encode_rows", bug="own", killed_by=("provenance",))
def packed_scales_before_codes(original: Body, rows: Any, *, row_format: RowFormat) -> Any:
    """A packed FP8 row has its block scales in front of its codes."""
    stored = original(rows, row_format=row_format)
    return stored.roll(4, dims=1) if row_format is RowFormat.FP8_PACKED else stored


@mutant("optimized.addressing.locs", bug="vllm#47671", killed_by=("exact",), needs="address")
def loc_in_32_bits(
    original: Body, geometry: Geometry, table: Ints, row: Ints, positions: Ints
) -> Ints:
    """A loc is computed in 32 bits, and wraps beyond 2^31."""
    return np.asarray(original(geometry, table, row, positions)).astype(np.int32).astype(np.int64)
