"""Where a token and a pooled key lie, from a request's logical pages alone.

The rule is that of SGLang #42178: pooled key j is stored at loc(j * kpool) // kpool.
A group never straddles a logical page (kpool divides it), so the slot lies in the index
page whose id is the logical page's, and whoever owns the page owns the slot.

The scalar functions are plain integer arithmetic (+ * // %), so they also run on symbolic
integers; `pages` is anything indexed by the ordinal of a logical page within its request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from reference.geometry import Geometry, Group, IndexSlot, Loc, LogicalPage, PhysicalPage, Position

Ints = NDArray[np.int64]


class PageTable(Protocol):
    """The logical pages of a request, in order of its positions."""

    def __getitem__(self, ordinal: int, /) -> LogicalPage: ...


def loc_of(pages: PageTable, position: Position, geometry: Geometry) -> Loc:
    """The token row of a position."""
    size = geometry.logical_page_size
    return Loc(pages[position // size] * size + position % size)


def index_slot_of(pages: PageTable, group: Group, geometry: Geometry) -> IndexSlot:
    """The index slot of a group's pooled key: its first token's loc, in units of kpool."""
    return IndexSlot(loc_of(pages, Position(group * geometry.kpool), geometry) // geometry.kpool)


def index_page_of(slot: IndexSlot, geometry: Geometry) -> LogicalPage:
    """The index page of a slot, which is the logical page that owns its tokens."""
    return LogicalPage(slot // geometry.index_page_size)


def key_offset(slot: IndexSlot, geometry: Geometry, index_dim: int) -> int:
    """Byte offset of a slot's key (`index_dim` bytes) in the whole index buffer of a layer."""
    within = slot % geometry.index_page_size
    page = index_page_of(slot, geometry)
    return page * geometry.index_page_bytes(index_dim) + within * index_dim


def scale_offset(slot: IndexSlot, geometry: Geometry, index_dim: int) -> int:
    """Byte offset of a slot's float32 scale: the scales follow all keys of the page."""
    within = slot % geometry.index_page_size
    page = index_page_of(slot, geometry)
    keys = geometry.index_page_size * index_dim
    return page * geometry.index_page_bytes(index_dim) + keys + within * 4


def ring_row_of(position: Position, geometry: Geometry) -> int:
    """Row of the request's tail ring in which a position's key and gate wait."""
    return position % geometry.ring_size


def visible_groups(position: Position, geometry: Geometry) -> int:
    """How many groups the query at a position sees: those closed by then, its own included."""
    return (position + 1) // geometry.kpool


def tail_start(length: int, geometry: Geometry) -> Position:
    """First of the positions after the last closed group of a prefix of `length` tokens."""
    return Position(length // geometry.kpool * geometry.kpool)


def pages_for(length: int, geometry: Geometry) -> int:
    """Logical pages that `length` tokens need."""
    return -(-length // geometry.logical_page_size)


def physical_pages(pages: Sequence[LogicalPage], geometry: Geometry) -> tuple[PhysicalPage, ...]:
    """The physical page table that the attention kernels see: kpool entries a logical page."""
    return tuple(
        PhysicalPage(page * geometry.kpool + part)
        for page in pages
        for part in range(geometry.kpool)
    )


def locs(pages: Sequence[int] | Ints, start: int, stop: int, geometry: Geometry) -> Ints:
    """[stop - start] locs of the positions start .. stop - 1, as `loc_of` gives them."""
    return locs_at(pages, np.arange(start, stop, dtype=np.int64), geometry)


def locs_at(pages: Sequence[int] | Ints, positions: Ints, geometry: Geometry) -> Ints:
    """Locs of the given positions, of any shape, as `loc_of` gives them."""
    size = geometry.logical_page_size
    table = np.asarray(pages, dtype=np.int64)
    return table[positions // size] * size + positions % size


def index_slots(pages: Sequence[int] | Ints, start: int, stop: int, geometry: Geometry) -> Ints:
    """[stop - start] index slots of the groups start .. stop - 1, as `index_slot_of` gives them."""
    first = np.arange(start, stop, dtype=np.int64) * geometry.kpool
    return locs_at(pages, first, geometry) // geometry.kpool


def index_byte_offsets(slots: Ints, geometry: Geometry, index_dim: int) -> Ints:
    """[len(slots), index_dim + 4] byte offsets in a layer's index buffer of each slot's key
    bytes and then its scale bytes: what to gather to see the row as one."""
    page, within = slots // geometry.index_page_size, slots % geometry.index_page_size
    base = page * geometry.index_page_bytes(index_dim)
    keys = (base + within * index_dim)[:, None] + np.arange(index_dim)
    first_scale = base + geometry.index_page_size * index_dim + within * 4
    return np.concatenate([keys, first_scale[:, None] + np.arange(4)], axis=1)
