"""Where things are: positions and groups of a request to locs, index slots and ring rows.

All functions are vectorised over int64 arrays.  A page table `table` is [rows, logical pages];
`row` names the request's row in it, and broadcasts against positions or groups.  The rule of
SGLang #42178: a pooled key lives at the loc of its group's first token, divided by kpool, so
that an index page belongs to whoever owns the logical page of the same id.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reference.geometry import Geometry

Array = NDArray[np.int64]


def locs(geometry: Geometry, table: Array, row: Array | int, positions: Array) -> Array:
    """Loc of each position."""
    size = geometry.logical_page_size
    return np.asarray(table[row, positions // size] * size + positions % size)


def index_slots(geometry: Geometry, table: Array, row: Array | int, groups: Array) -> Array:
    """Index slot at which each group's pooled key is written."""
    return locs(geometry, table, row, groups * geometry.kpool) // geometry.kpool


def read_slots(geometry: Geometry, table: Array, row: Array | int, groups: Array) -> Array:
    """Index slot at which a reader looks for each group's pooled key."""
    return index_slots(geometry, table, row, groups)


def ring_rows(geometry: Geometry, ring: Array | int, positions: Array) -> Array:
    """Row of each position in the flattened tail rings; `ring` is the request's slot."""
    return ring * geometry.ring_size + positions % geometry.ring_size


def closed_groups(geometry: Geometry, length: Array) -> Array:
    """Groups that `length` positions close."""
    return length // geometry.kpool


def visible_groups(geometry: Geometry, position: Array) -> Array:
    """Groups that the query at a position may select; one that closes there counts."""
    return closed_groups(geometry, position + 1)


def tail_start(geometry: Geometry, length: Array) -> Array:
    """First position behind the last closed group."""
    return closed_groups(geometry, length) * geometry.kpool


def pages_for(geometry: Geometry, length: Array) -> Array:
    """Logical pages that hold `length` positions."""
    return -(-length // geometry.logical_page_size)
