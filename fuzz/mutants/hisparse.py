"""Faults of HiSparse's hot buffers: who is looked up where, who goes, and what is copied in."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fuzz.mutants.registry import Body, mutant
from fuzz.targets.setup import STAMPED_SHAPE
from reference.geometry import PACKED_BLOCK, Geometry, RowFormat

Ints = npt.NDArray[np.int64]
KERNEL = "optimized.kernels.swap_in"
STEP = "optimized.hisparse.step.HotStep"
COORDINATOR = "optimized.hisparse.coordinator"
HOT = f"{COORDINATOR}.Coordinator"
MEMORY = "optimized.hisparse.memory.HiSparseMemory"
TARGET = "hot_buffer"
RESIDENT = ("residency",)


# looking up


@mutant(f"{KERNEL}.plan_misses", bug="own", killed_by=RESIDENT, target=TARGET)
def newest_taken_for_length(
    original: Body, plan: Any, selection: Tensor, length: Tensor, *tables: Tensor
) -> None:
    """The newest token is compared with the length, not with the length less one: it is looked
    up by tag, and the position that is to come has its row."""
    original(plan, selection, length + 1, *tables)


@mutant(f"{COORDINATOR}.newest_slot", bug="own", killed_by=RESIDENT, target=TARGET)
def newest_in_last_slot(original: Body, newest: Tensor, size: int) -> Tensor:
    """The newest position is stored at slot H - 1, which has a tag of its own."""
    return original(newest, size - 1)


@mutant(f"{KERNEL}.plan_misses", bug="own", killed_by=RESIDENT, target=TARGET)
def full_buffer_looked_up(
    original: Body,
    plan: Any,
    selection: Tensor,
    length: Tensor,
    tags: Tensor,
    lru: Tensor,
    slot_rows: Tensor,
    host_rows: Tensor,
) -> None:
    """A request of exactly H positions goes the way of longer ones: `<` for `<=`."""
    full = (length == tags.shape[1])[:, None]
    newest = full & (selection == length[:, None] - 1)
    known = selection.masked_fill(full & (selection >= length[:, None]), -1)
    original(plan, known, length + full[:, 0], tags, lru, slot_rows, host_rows)
    plan.rows.copy_(torch.where(newest, slot_rows[:, -1:], plan.rows))


@mutant(f"{KERNEL}.plan_misses", bug="vllm#51323", killed_by=RESIDENT, target=TARGET)
def void_cell_not_written(
    original: Body, plan: Any, selection: Tensor, length: Tensor, *tables: Tensor
) -> None:
    """A void cell of a request that is longer than its buffer counts as a hit, and its output is
    whatever was there: here the row of slot 0."""
    original(plan, selection, length, *tables)
    tags, _, slot_rows, _ = tables
    void = (selection < 0) & (length > tags.shape[1])[:, None]
    plan.rows.copy_(torch.where(void, slot_rows[:, :1], plan.rows))


@mutant(
    "optimized.steps.Steps._stamp_decode",
    bug="sglang#42178",
    killed_by=RESIDENT,
    target=TARGET,
)
def tail_columns_dropped(original: Body, self: Any, store: Any, plan: Any, rows: Any) -> Any:
    """Only the first topk columns of a selection are looked up: the tail behind them is lost."""
    if rows.selected is not None:
        selected = rows.selected.clone()
        selected[..., self.geometry.topk :] = -1
        rows = replace(rows, selected=selected)
    return original(self, store, plan, rows)


@mutant(f"{HOT}.begin", bug="own", killed_by=RESIDENT, target=TARGET)
def buffer_by_batch_row(original: Body, self: Any, slots: Ints, *rest: Ints) -> Any:
    """A step looks into the hot buffers of the first slots, not into those of its requests."""
    step = original(self, slots, *rest)
    places = torch.arange(1, len(slots) + 1)
    return replace(step, slot_rows=self.slot_rows[places])


@mutant(
    f"{MEMORY}.host_rows",
    bug="own",
    killed_by=(*RESIDENT, "containment", "provenance"),
    target=TARGET,
)
def host_row_by_batch_row(original: Body, self: Any, slots: Ints | int, positions: Ints) -> Ints:
    """A decode takes the host rows of the requests in the first slots, not of its own."""
    if np.ndim(slots) == 2:
        slots = np.arange(1, len(slots) + 1)[:, None]
    return original(self, slots, positions)


# who goes, and who comes


@mutant(f"{KERNEL}.claim_slots", bug="own", killed_by=RESIDENT, target=TARGET)
def most_recent_slot_evicted(
    original: Body, plan: Any, selection: Tensor, *found: Tensor
) -> Tensor:
    """Misses take the slots that were used last."""
    *rest, lru, host_rows = found
    turned = lru.flip(1)
    taken = original(plan, selection, *rest, turned, host_rows)
    lru.copy_(turned)
    return taken


@mutant(f"{KERNEL}.claim_slots", bug="own", killed_by=RESIDENT, target=TARGET)
def loaded_after_hits(
    original: Body,
    plan: Any,
    selection: Tensor,
    sought: Tensor,
    found: Tensor,
    tags: Tensor,
    lru: Tensor,
    host_rows: Tensor,
) -> Tensor:
    """Slots just loaded count as used later than the hits of the same step."""
    taken = original(plan, selection, sought, found, tags, lru, host_rows)
    size = tags.shape[1]
    rank = tags.new_zeros((len(tags), size + 1))
    rank.scatter_(1, torch.where(sought & (found < 0), found + size, size), 1)
    rank.scatter_(1, torch.where(taken >= 0, taken, size), 2)
    order = rank.gather(1, lru).argsort(dim=1, stable=True)
    lru.copy_(lru.gather(1, order))
    return taken


@mutant(f"{KERNEL}.claim_slots", bug="own", killed_by=RESIDENT, target=TARGET)
def hit_evicted_by_miss(
    original: Body, plan: Any, selection: Tensor, sought: Tensor, found: Tensor, *tables: Tensor
) -> Tensor:
    """A miss may take the slot of a position that the same step has found there."""
    return original(plan, selection, sought & (found >= 0), found, *tables)


@mutant(f"{KERNEL}.claim_slots", bug="own", killed_by=RESIDENT, target=TARGET)
def missed_tag_not_updated(original: Body, plan: Any, selection: Tensor, *found: Tensor) -> Tensor:
    """A slot keeps the tag of the position that a miss has evicted from it."""
    *rest, tags, lru, host_rows = found
    return original(plan, selection, *rest, tags.clone(), lru, host_rows)


@mutant(f"{KERNEL}.claim_slots", bug="own", killed_by=RESIDENT, target=TARGET)
def duplicate_loaded_twice(
    original: Body, plan: Any, selection: Tensor, sought: Tensor, found: Tensor, *tables: Tensor
) -> Tensor:
    """A position that is selected twice and misses is loaded twice, to two slots."""
    column = torch.arange(found.shape[1]).expand_as(found)
    each = torch.where(found >= 0, column, found)
    return original(plan, selection, sought, each, *tables)


@mutant(f"{STEP}.misses", bug="own", killed_by=RESIDENT, target=TARGET)
def misses_counted_one_too_many(original: Body, self: Any) -> Tensor:
    """Where something misses, one row more is counted than is copied."""
    misses = original(self)
    return misses + (misses > 0)


@mutant(f"{STEP}.locate", bug="own", killed_by=RESIDENT, target=TARGET)
def lru_shared_by_layers(original: Body, self: Any, layer: int, selection: Tensor) -> Any:
    """All layers keep one LRU order for a request, though each has its own tags."""
    plan = original(self, layer, selection)
    self.lru[:, self.slots] = self.lru[layer, self.slots]
    return plan


@mutant(f"{STEP}.locate", bug="own", killed_by=RESIDENT, target=TARGET)
def tags_by_batch_row(original: Body, self: Any, layer: int, selection: Tensor) -> Any:
    """A step keeps its tags and LRU orders by a request's place in the batch, not by its slot."""
    places = torch.arange(1, len(self.slots) + 1)
    step = replace(self, slots=places)
    return original(step, layer, selection)


@mutant(f"{HOT}.begin", bug="sglang#23239", killed_by=RESIDENT, target=TARGET)
def grown_slot_not_tagged(original: Body, self: Any, slots: Ints, *rest: Ints) -> Any:
    """While a buffer fills up its new positions get a slot and a row, and no tag."""
    tags = self.tags.clone()
    step = original(self, slots, *rest)
    self.tags.copy_(tags)
    return step


# what is copied in


def _codes_of(pools: Any, geometry: Geometry) -> int:
    """Bytes of a row, less the scales of a packed one."""
    row_bytes: int = pools.host.shape[2]
    packed = geometry.row_format is RowFormat.FP8_PACKED
    return row_bytes - 4 * -(-row_bytes // (PACKED_BLOCK + 4)) if packed else row_bytes


def without_scales(pools: Any, geometry: Geometry) -> Any:
    """The same pools, in which the rows that are copied end before their scales."""
    short, codes = copy(pools), _codes_of(pools, geometry)
    short.of_layer = lambda layer: tuple(rows[:, :codes] for rows in pools.of_layer(layer))
    return short


@mutant(f"{MEMORY}.decode_rows", bug="own", killed_by=RESIDENT, target=TARGET)
def swapped_in_without_scales(original: Body, self: Any, *batch: Any) -> Any:
    """A packed row is swapped in without its scales: 576 bytes for 656."""
    step = original(self, *batch)
    return replace(step, pools=without_scales(step.pools, self.geometry))


@mutant(f"{MEMORY}.decode_rows", bug="own", killed_by=RESIDENT, target=TARGET)
def host_rows_apart_by_codes(original: Body, self: Any, *batch: Any) -> Any:
    """A packed row is looked for on the host as though those before it had no scales."""
    step = original(self, *batch)
    pools, codes = step.pools, _codes_of(step.pools, self.geometry)
    dense = copy(pools)

    def of_layer(layer: int) -> tuple[Tensor, Tensor]:
        device, host = pools.of_layer(layer)
        return device, host.as_strided(host.shape, (codes, 1))

    dense.of_layer = of_layer
    return replace(step, pools=dense)


@mutant(f"{STEP}.locate", bug="own", killed_by=RESIDENT, target=TARGET)
def swapped_in_first_layer_alone(original: Body, self: Any, layer: int, selection: Tensor) -> Any:
    """What a layer misses is copied in for the first layer alone."""
    if layer == 0:
        return original(self, layer, selection)
    with patch(f"{KERNEL}.replay"):
        return original(self, layer, selection)


@mutant(
    "optimized.hisparse.pools.HotPools.of_layer",
    bug="own",
    killed_by=(*RESIDENT, "containment", "provenance"),
    target=TARGET,
)
def pool_by_layer_of_model(original: Body, self: Any, layer: int) -> Any:
    """Copies take a layer's number in the model, not among the DSA layers, for its row of the
    pools."""
    number = STAMPED_SHAPE.dsa_period * (layer + 1) - 1
    return original(self, number % len(self.device))
