"""Faults of HiSparse's admission and release: what is counted, who is refused, what is left."""

from __future__ import annotations

import heapq
import pkgutil
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor

from fuzz.mutants.hisparse import HOT, MEMORY, RESIDENT, TARGET, Ints
from fuzz.mutants.host_rows import PAGES, PLAIN, RUNS
from fuzz.mutants.registry import Body, mutant
from reference.contract import OutOfMemory, Snapshot

ENGINE = "optimized.engine.OptimizedEngine"
ALLOCATOR = "optimized.memory.allocator.Allocator"
PADDING = 0


def _overdrawn(original: Body, self: Any, count: int) -> Ints:
    """Logical pages, those with a host page for which there is one."""
    pages: Ints = pkgutil.resolve_name(f"{ALLOCATOR}.allocate")(self, count)
    backed = pages[: self.hosts.available]
    self.backing[backed] = self.hosts.allocate(len(backed))
    return pages


@mutant(
    f"{PAGES}.require",
    bug="sglang#23704",
    killed_by=RESIDENT,
    target=TARGET,
    also={f"{PAGES}.allocate": _overdrawn},
)
def host_rows_not_counted(original: Body, self: Any, count: int) -> None:
    """Logical pages and hot buffers are counted before a step, host pages are not."""
    if count > len(self._free):
        original(self, count)


def _admitted_anyway(original: Body, self: Any, slot: int) -> None:
    """A hot buffer over the device pages of others where too few are free."""
    if self.device.available >= self.hot_pages:
        original(self, slot)
        return
    taken = np.flatnonzero(self.device.counts)[: self.hot_pages]
    self.device.retain(taken)
    with patch.object(self.device, "allocate", return_value=taken):
        original(self, slot)


@mutant(
    f"{HOT}.require_room",
    bug="own",
    killed_by=RESIDENT,
    target=TARGET,
    also={f"{HOT}.admit": _admitted_anyway},
)
def hot_buffers_not_counted(original: Body, self: Any) -> None:
    """Requests are admitted without a look at the device pages that are left."""


@mutant(f"{MEMORY}.admit", bug="sglang#28753", killed_by=("exact",), target=TARGET)
def capacity_of_device_pool(original: Body, self: Any, request: Any, tokens: Ints) -> Any:
    """A prompt is refused that is longer than the device has rows, though the host has room."""
    if len(tokens) > self.hot.pools.device.shape[1]:
        raise OutOfMemory("the device has too few rows: finish a request, or raise device_pages.")
    return original(self, request, tokens)


@mutant(f"{MEMORY}.admit", bug="own", killed_by=("exact",), target=TARGET)
def refused_half_way(original: Body, self: Any, request: Any, tokens: Ints) -> Any:
    """A request for which no hot buffer is left is refused after it has been entered."""
    record = pkgutil.resolve_name(f"{PLAIN}.admit")(self, request, tokens)
    self.hot.require_room()
    self.hot.admit(record.slot)
    return record


def _keep_hot_pages(engine: Any, request: Any) -> None:
    hot = engine.memory.hot
    hot.device.retain(hot.pages[engine._find(request).slot])


@mutant(f"{ENGINE}.abort", bug="TensorRT-LLM#12314", killed_by=RESIDENT, target=TARGET)
def hot_buffer_left_at_abort(original: Body, self: Any, request: Any) -> None:
    """An aborted request keeps its hot buffer for ever."""
    _keep_hot_pages(self, request)
    original(self, request)


@mutant(f"{ENGINE}.retract", bug="sglang#37103", killed_by=RESIDENT, target=TARGET)
def hot_buffer_left_at_retract(original: Body, self: Any, request: Any) -> Any:
    """A retracted request keeps its hot buffer for ever."""
    _keep_hot_pages(self, request)
    return original(self, request)


@mutant(f"{MEMORY}.release", bug="own", killed_by=RESIDENT, target=TARGET)
def released_by_length(original: Body, self: Any, record: Any) -> None:
    """A request frees as many device pages as its length fills, not as many as it took."""
    hot, length = self.hot, int(self.table.length[record.slot])
    filled = -(-min(length, hot.size + 1) // self.geometry.physical_page_size)
    hot.device.retain(hot.pages[record.slot, filled:])
    original(self, record)


@mutant(f"{HOT}.release", bug="own", killed_by=RESIDENT, target=TARGET)
def padding_page_freed(original: Body, self: Any, slot: int) -> None:
    """A release frees the device's padding page along with a request's own."""
    original(self, slot)
    if PADDING not in self.device.free_ids():
        heapq.heappush(self.device._free, (self.device._rank(PADDING), PADDING))


@mutant(f"{HOT}.reset", bug="own", killed_by=RESIDENT, target=TARGET)
def tags_left_at_release(original: Body, self: Any, slot: int, *, resident: int) -> None:
    """A request that is admitted finds the tags of its slot's last owner until it has its own."""
    tags = self.tags[:, slot].clone()
    original(self, slot, resident=resident)
    if not resident:
        self.tags[:, slot] = tags


@mutant(f"{HOT}.reset", bug="own", killed_by=RESIDENT, target=TARGET)
def lru_not_reset(original: Body, self: Any, slot: int, *, resident: int) -> None:
    """A request begins with the LRU order that its slot's last owner left."""
    order = self.lru[:, slot].clone()
    original(self, slot, resident=resident)
    self.lru[:, slot] = order


@mutant("optimized.hisparse.memory.occupancy", bug="own", killed_by=RESIDENT, target=TARGET)
def occupancy_least_of_both(original: Body, *pools: Any, **counts: Any) -> Any:
    """The logical tokens that are reported are no more than those of the device."""
    found = original(*pools, **counts)
    return replace(
        found,
        logical_free=min(found.logical_free, found.device_free),
        logical_total=min(found.logical_total, found.device_total),
    )


@mutant(f"{HOT}.release", bug="sglang#28468", killed_by=(), target=TARGET, equivalence=RUNS)
def hot_buffer_freed_undrained(original: Body, self: Any, slot: int) -> None:
    """A hot buffer is freed without a wait for copies, of which a step has left none."""
    with patch.object(self.backups, "drain"):
        original(self, slot)


# what is left, and what is handed out


@mutant(
    "optimized.hisparse.pools.HotPools.scrub_device",
    bug="own",
    killed_by=("containment",),
    target=TARGET,
)
def freed_hot_rows_not_poisoned(original: Body, self: Any, ids: Ints) -> None:
    """The rows of freed device pages keep what they held."""


@mutant(f"{HOT}.read", bug="own", killed_by=("containment", "residency"), target=TARGET)
def hot_rows_read_as_a_view(
    original: Body, self: Any, slot: int, layer: int, slots: Ints
) -> Tensor:
    """Hot rows that lie together are read as a view of the pool, and not as a copy."""
    copied: Tensor = original(self, slot, layer, slots)
    first = int(self.slot_rows[slot, 0])
    view: Tensor = self.pools.device[layer, first : first + len(copied)]
    return view if view.equal(copied) else copied


@mutant(f"{MEMORY}.snapshot", bug="own", killed_by=("exact",), target=TARGET)
def snapshot_shows_live_host_pages(original: Body, self: Any) -> Snapshot:
    """Snapshots share one map of host pages, which goes on changing."""
    account: Snapshot = original(self)
    live = vars(self).setdefault("live", {})
    assert account.hot is not None, "this memory has host pages"
    live.clear()
    live.update(account.hot.backing)
    return replace(account, hot=replace(account.hot, backing=live))
