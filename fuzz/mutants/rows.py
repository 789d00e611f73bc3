"""Faults of stored rows: FP8 saturation, the scales of packed rows, what is read and what left."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuzz.mutants.registry import Body, mutant
from reference.geometry import RowFormat

KERNEL = "optimized.kernels.kv_store"
MEMORY = "optimized.memory.manager.Memory"
POOLS = "optimized.memory.pools.Pools"
LEFT = ("containment",)


@mutant(f"{KERNEL}.encode_rows", bug="own", killed_by=("provenance",))
def packed_scales_reversed(original: Body, rows: Tensor, *, row_format: RowFormat) -> Tensor:
    """The scales of a packed row stand in the order of the last block to the first."""
    stored = original(rows, row_format=row_format)
    if row_format is RowFormat.FP8_PACKED:
        scales = stored[:, rows.shape[1] :].reshape(len(rows), -1, 4)
        stored[:, rows.shape[1] :] = scales.flip(1).flatten(1)
    return stored


@mutant(f"{KERNEL}.encode_e4m3", bug="own", killed_by=("provenance",))
def fp8_overflow_is_nan(original: Body, values: Tensor) -> Tensor:
    """A value beyond the range of FP8 is stored as NaN, and not as the largest value."""
    beyond = values.abs() > torch.finfo(torch.float8_e4m3fn).max
    return original(values) | beyond.byte()


@mutant(f"{MEMORY}.read_kv", bug="own", killed_by=("provenance", "containment"))
def rows_read_as_a_view(original: Body, self: Any, slot: int, layer: int, *which: Any) -> Tensor:
    """KV rows that lie together are read as a view of the pool, and not as a copy."""
    copied: Tensor = original(self, slot, layer, *which)
    pages = self.table.pages[slot, : self.table.pages_held[slot]]
    first = int(self.kv_rows(pages[:1] * self.geometry.logical_page_size)[0])
    view: Tensor = self.pools.kv[layer, first : first + len(copied)]
    return view if view.equal(copied) else copied


@mutant(f"{MEMORY}.read_kv", bug="own", killed_by=("provenance",))
def part_read_from_its_page_on(
    original: Body, self: Any, slot: int, layer: int, positions: Any
) -> Tensor:
    """A read of a part of a request's rows begins with the page in which the part begins."""
    inside = positions[:1] % self.geometry.logical_page_size
    rows: Tensor = original(self, slot, layer, positions - (inside if len(inside) else 0))
    return rows


@mutant(f"{POOLS}.scrub_kv", bug="own", killed_by=LEFT)
def freed_rows_not_poisoned(original: Body, self: Any, ids: Any) -> None:
    """The KV rows of freed pages keep what they held."""


@mutant(f"{POOLS}.scrub_index", bug="own", killed_by=LEFT)
def freed_index_rows_not_poisoned(original: Body, self: Any, ids: Any) -> None:
    """The index rows of freed pages keep what they held."""


@mutant(f"{POOLS}.scrub_states", bug="own", killed_by=LEFT)
def freed_states_not_poisoned(original: Body, self: Any, ids: Any) -> None:
    """Freed state slots keep what they held."""


@mutant(f"{POOLS}.scrub_rings", bug="own", killed_by=LEFT)
def freed_ring_not_poisoned(original: Body, self: Any, ids: Any) -> None:
    """A freed ring keeps the tail that it held."""
