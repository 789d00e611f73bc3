"""Faults of a step's plan: what a batch reads and writes, and when a group closes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fuzz.mutants.addresses import STORED, for_verify
from fuzz.mutants.registry import Body, mutant
from reference.geometry import Geometry

Ints = npt.NDArray[np.int64]
CHUNK = "optimized.planner.plan_chunk"
CLOSING = "optimized.planner.closing_slots"
DECODE = "optimized.planner.DecodePlan.refresh"
VERIFY = "optimized.planner.VerifyPlan.refresh"


# several rows a request: extend and verify


def _as_if_alone(
    original: Body, geometry: Geometry, table: Ints, *spans: Ints, **where: Any
) -> Any:
    """A batch's plan, with the chunk rows of each request as though it came first."""
    plan = original(geometry, table, *spans, **where)
    keep_from = where.pop("keep_from")
    alone = [
        original(geometry, table, *(s[[i]] for s in spans), keep_from=keep_from[[i]], **where)
        for i in range(len(keep_from))
    ]
    return replace(plan, sources=torch.cat([one.sources for one in alone]))


@mutant(CHUNK, bug="own", killed_by=STORED)
def extend_rows_of_first_request(
    original: Body, geometry: Geometry, table: Ints, *spans: Ints, **where: Any
) -> Any:
    """An extend of several requests pools all their keys from the first request's rows."""
    if for_verify(*spans, **where):
        return original(geometry, table, *spans, **where)
    return _as_if_alone(original, geometry, table, *spans, **where)


@mutant(CHUNK, bug="own", killed_by=STORED)
def verify_rows_of_first_request(
    original: Body, geometry: Geometry, table: Ints, *spans: Ints, **where: Any
) -> Any:
    """A verify's row stride ignores the batch: all keys are pooled from the first request's
    drafts."""
    if not for_verify(*spans, **where):
        return original(geometry, table, *spans, **where)
    return _as_if_alone(original, geometry, table, *spans, **where)


@mutant(CHUNK, bug="own", killed_by=STORED)
def one_too_many_from_ring(
    original: Body,
    geometry: Geometry,
    table: Ints,
    rows: Ints,
    rings: Ints,
    starts: Ints,
    stops: Ints,
    **where: Any,
) -> Any:
    """A group that mixes ring and chunk takes its first new token from the ring as well."""
    plan = original(geometry, table, rows, rings, starts, stops, **where)
    first = where["ring_slots"] * geometry.ring_size + np.cumsum(stops - starts) - (stops - starts)
    stale = rings * geometry.ring_size + starts % geometry.ring_size
    mixed = plan.sources.numpy()[:, 1:]
    for row, ring_row in zip(first, stale, strict=True):
        mixed[mixed == row] = ring_row
    return plan


@mutant("optimized.addressing.tail_start", bug="own", killed_by=STORED)
def tail_one_short(original: Body, geometry: Geometry, length: Ints) -> Ints:
    """An extend keeps one key too few in the tail ring."""
    return np.minimum(original(geometry, length) + 1, length)


@mutant(CHUNK, bug="sglang#42178", killed_by=STORED)
def verify_keeps_last_tail_only(
    original: Body,
    geometry: Geometry,
    table: Ints,
    rows: Ints,
    rings: Ints,
    starts: Ints,
    stops: Ints,
    **where: Any,
) -> Any:
    """A verify keeps in the ring only the tail behind its last draft, accepted or not."""
    if where["keep_from"] is starts:
        where["keep_from"] = stops // geometry.kpool * geometry.kpool
    return original(geometry, table, rows, rings, starts, stops, **where)


@mutant("optimized.store.Store.chunk", bug="own", killed_by=STORED)
def ring_written_before_it_is_read(
    original: Body, self: Any, plan: Any, layer: int, kv: Tensor, key: Tensor, gate: Tensor
) -> None:
    """A chunk's tail goes to the ring before the group that it closes is pooled from there."""
    for ring, rows in ((self.pools.ring_key, key), (self.pools.ring_gate, gate)):
        flat = ring[layer].view(-1, key.shape[1])
        flat.index_copy_(0, plan.ring_rows, rows.index_select(0, plan.ring_sources))
    original(self, plan, layer, kv, key, gate)


@mutant(VERIFY, bug="sglang#42178", killed_by=STORED)
def verify_writes_first_group_only(
    original: Body, self: Any, table: Ints, rings: Ints, starts: Ints, stops: Ints, **where: Any
) -> None:
    """A verify stores the first group that closes for each request, and no further one."""
    original(self, table, rings, starts, stops, **where)
    closing = stops // self.geometry.kpool - starts // self.geometry.kpool
    number = np.arange(closing.sum()) - np.repeat(np.cumsum(closing) - closing, closing)
    self.chunk.index_slots[torch.from_numpy(number > 0)] = 0


@mutant(
    "optimized.kernels.pooled_key.store_groups",
    bug="vllm#53912",
    killed_by=STORED,
)
def written_group_not_rewritten(
    original: Body,
    index_pool: Tensor,
    slots: Tensor,
    *rows: Tensor,
    index_page_size: int,
    **options: Any,
) -> None:
    """A group that a rejected draft has closed counts as stored, and is not pooled again."""
    fresh = index_pool[slots // index_page_size, -4 * index_page_size :]
    scale = fresh.view(len(slots), index_page_size, 4)[
        torch.arange(len(slots)), slots % index_page_size
    ]
    slots = torch.where((scale == 0xFF).all(dim=1), slots, 0)
    original(index_pool, slots, *rows, index_page_size=index_page_size, **options)


# one row a request: decode


@mutant(CLOSING, bug="own", killed_by=STORED)
def group_closes_one_slot_early(
    original: Body, geometry: Geometry, table: Ints, rows: Ints, positions: Ints
) -> Ints:
    """A decode closes a group with its last slot but one."""
    last = table.shape[1] * geometry.logical_page_size - 1
    return original(geometry, table, rows, np.minimum(positions + 1, last))


@mutant(CLOSING, bug="own", killed_by=STORED)
def batch_closes_with_first_request(
    original: Body, geometry: Geometry, table: Ints, rows: Ints, positions: Ints
) -> Ints:
    """A decode batch closes groups only when its first request does."""
    slots = original(geometry, table, rows, positions)
    return slots if slots[0] else np.zeros_like(slots)


@mutant(CLOSING, bug="sglang#32477", killed_by=("containment", "provenance"))
def padded_row_writes_page_1(
    original: Body, geometry: Geometry, table: Ints, rows: Ints, positions: Ints
) -> Ints:
    """A decode that closes no group writes its pooled key to the first page behind padding."""
    slots = original(geometry, table, rows, positions)
    return np.where(slots == 0, geometry.index_page_size, slots)


@mutant("optimized.kernels.decode_update.decode_update", bug="triton#9887", killed_by=STORED)
def newest_key_from_stale_ring(
    original: Body,
    index_pool: Tensor,
    ring_key: Tensor,
    ring_gate: Tensor,
    key: Tensor,
    gate: Tensor,
    ring_slot: Tensor,
    position: Tensor,
    *rest: Any,
    **options: Any,
) -> None:
    """A decode pools the newest token's key from the ring before it is written there."""
    row = ring_slot, position % ring_key.shape[1]
    stale = ring_key[row], ring_gate[row]
    original(index_pool, ring_key, ring_gate, *stale, ring_slot, position, *rest, **options)
    ring_key[row], ring_gate[row] = key, gate


@mutant(DECODE, bug="own", killed_by=STORED, target="slot_reuse")
def ring_by_batch_row(original: Body, self: Any, table: Ints, rings: Ints, *rest: Ints) -> None:
    """A decode takes a request's place in the batch for its row in the tail ring."""
    original(self, table, rings, *rest)
    self.rings.copy_(torch.arange(1, len(rings) + 1))


@mutant("optimized.planner.ReplayTable.refresh", bug="own", killed_by=STORED, target="slot_reuse")
def table_by_request_slot(original: Body, self: Any, table: Ints, slots: Ints, width: int) -> None:
    """A request's row of the batch's page table is filled by its slot, not by its place in the
    batch."""
    self.pages[slots % len(self.pages), :width] = table[slots, :width]


@mutant("optimized.planner.ReplayTable.refresh", bug="TensorRT-LLM#18769", killed_by=STORED)
def replayed_table_stale(original: Body, self: Any, table: Ints, slots: Ints, width: int) -> None:
    """A replay keeps its page table as long as the batch is the same, though pages were added."""
    if not np.array_equal(self.pages[: len(slots), 0], table[slots, 0]):
        original(self, table, slots, width)


@mutant(VERIFY, bug="sglang#42750", killed_by=STORED, target="slot_reuse")
def verify_table_not_refreshed(
    original: Body, self: Any, table: Ints, rings: Ints, *rest: Ints, **where: Any
) -> None:
    """A replayed verify reads the page table of the batch that it was captured with."""
    if self.table.pages[: len(rings), 0].all():
        with patch.object(self.table, "refresh"):
            original(self, table, rings, *rest, **where)
    else:
        original(self, table, rings, *rest, **where)


@mutant(DECODE, bug="TensorRT-LLM#18769", killed_by=STORED)
def replayed_lengths_stale(
    original: Body, self: Any, table: Ints, rings: Ints, *rest: Ints
) -> None:
    """A replay of the same batch closes the groups that the last one closed."""
    before = self.index_slots.clone()
    original(self, table, rings, *rest)
    if len(before) == len(rings):
        self.index_slots.copy_(before)
