"""Faults of HiSparse's rows on the host: backups, preloads, and the page behind each page."""

from __future__ import annotations

import pkgutil
from copy import copy
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from fuzz.mutants.hisparse import HOT, MEMORY, RESIDENT, STEP, TARGET, Ints, without_scales
from fuzz.mutants.registry import Body, mutant

QUEUE = "optimized.hisparse.backups.BackupQueue"
PAGES = "optimized.hisparse.pages.BackedPages"
PLAIN = "optimized.memory.manager.Memory"
SAVED = ("residency", "provenance", "containment")
PROOFS = "oracle_tests/test_mutant_equivalence.py"
RUNS = f"{PROOFS}::test_all_runs_of_a_tiny_hot_buffer_are_the_same"


# backups


@mutant(f"{STEP}.targets", bug="sglang#24585", killed_by=SAVED, target=TARGET)
def backup_not_waited_for(original: Body, self: Any, layer: int) -> tuple[Tensor, Tensor]:
    """A step stores its new rows without a wait for the backup of what they replace."""
    self.backups.progress()
    return self.pools.device[layer], self.newest


@mutant(f"{QUEUE}.start", bug="own", killed_by=SAVED, target=TARGET)
def first_layer_backed_up(
    original: Body, self: Any, device_rows: Tensor, host_rows: Tensor
) -> None:
    """A newest row is backed up in the first layer alone."""
    with patch.object(self._pools, "device", self._pools.device[:1]):
        original(self, device_rows, host_rows)


@mutant(f"{QUEUE}.copy_oldest", bug="vllm#57019", killed_by=SAVED, target=TARGET)
def backup_to_next_layer(original: Body, self: Any) -> None:
    """A backup copies a layer's row to the host's rows of the layer behind it."""
    pools = self._pools

    def crossed(layer: int) -> tuple[Tensor, Tensor]:
        return pools.device[layer], pools.host[(layer + 1) % len(pools.host)]

    with patch.object(pools, "of_layer", crossed):
        original(self)


@mutant(f"{HOT}.__init__", bug="own", killed_by=SAVED, target=TARGET)
def backed_up_without_scales(
    original: Body, self: Any, sizes: Any, geometry: Any, *rest: Any
) -> None:
    """A packed row is backed up without its scales."""
    original(self, sizes, geometry, *rest)
    self.backups._pools = without_scales(self.pools, geometry)


@mutant(f"{HOT}.back_up", bug="vllm#56158", killed_by=SAVED, target=TARGET)
def decoded_row_never_backed_up(original: Body, self: Any, slots: Ints, *rest: Ints) -> None:
    """What is decoded counts as saved, and is never copied to the host."""
    self.unsaved[slots] = False


def _noted_as_fresh(original: Body, self: Any, slot: int, *prompt: Any) -> None:
    vars(self).setdefault("fresh", set()).add(slot)
    original(self, slot, *prompt)


@mutant(
    f"{HOT}.back_up",
    bug="own",
    killed_by=SAVED,
    target=TARGET,
    also={f"{HOT}.preload": _noted_as_fresh},
)
def first_backup_skipped(original: Body, self: Any, slots: Ints, *rest: Ints) -> None:
    """The first row that a request decodes is never backed up: the step after the prompt has
    nothing to save, and the one behind it takes itself for that step."""
    fresh = vars(self).get("fresh", set())
    for slot in fresh.intersection(slots[self.unsaved[slots]].tolist()):
        self.unsaved[slot] = False
        fresh.discard(slot)
    original(self, slots, *rest)


@mutant(f"{HOT}.newest_rows", bug="own", killed_by=SAVED, target=TARGET)
def backup_slot_not_clamped(original: Body, self: Any, slots: Ints, newest: Ints) -> Tensor:
    """A backup takes a position for its slot, behind the end of the buffer as well."""
    rows = self.slot_rows.view(-1)
    at = slots * self.slot_rows.shape[1] + newest
    return rows[torch.from_numpy(at % len(rows))]


@mutant(f"{MEMORY}.share", bug="own", killed_by=SAVED, target=TARGET)
def shared_before_backup(original: Body, self: Any, record: Any) -> None:
    """A request's pages are cached although its newest row is not on the host."""
    pkgutil.resolve_name(f"{PLAIN}.share")(self, record)


@mutant(
    f"{MEMORY}.share",
    f"{MEMORY}.release",
    bug="sglang#28468",
    killed_by=SAVED,
    target=TARGET,
)
def backup_in_flight_at_release(original: Body, self: Any, record: Any) -> None:
    """A request's device pages and host pages are freed while its last backup is under way."""
    with patch.object(self.hot.backups, "drain"):
        original(self, record)


@mutant(f"{MEMORY}.read_kv", bug="own", killed_by=("residency", "provenance"), target=TARGET)
def newest_read_from_host(original: Body, self: Any, *rows: Any) -> Tensor:
    """The newest row of a request is read on the host, where it is not yet."""
    read: Tensor = pkgutil.resolve_name(f"{PLAIN}.read_kv")(self, *rows)
    return read


# preload


@mutant(f"{HOT}.preload", bug="own", killed_by=RESIDENT, target=TARGET)
def short_preload_one_less(
    original: Body, self: Any, slot: int, length: int, host_rows: Ints
) -> None:
    """A prompt that fits into the buffer is preloaded but for its last position."""
    if length <= self.size:
        host_rows = np.append(host_rows[:-1], -1)
    original(self, slot, length, host_rows)


@mutant("optimized.hisparse.memory.preloaded", bug="own", killed_by=RESIDENT, target=TARGET)
def next_preloaded_for_newest(original: Body, length: int, size: int) -> Ints:
    """A prompt longer than the buffer has its position H preloaded for its newest."""
    return np.arange(min(length, size + 1))


@mutant(f"{HOT}.preload", bug="own", killed_by=RESIDENT, target=TARGET)
def admission_tags_every_slot(original: Body, self: Any, slot: int, *prompt: Any) -> None:
    """An admission tags all slots in order, those too in which the prompt has no position."""
    original(self, slot, *prompt)
    self.tags[:, slot] = torch.arange(self.size)


@mutant(f"{MEMORY}.complete", bug="sglang#31471", killed_by=RESIDENT, target=TARGET)
def preloaded_by_logical_page(original: Body, self: Any, record: Any) -> None:
    """A preload takes logical pages for the host pages that back them."""
    last = self.pools.kv.shape[1] - 1
    with patch.object(self, "kv_rows", lambda locs: np.minimum(locs, last)):
        original(self, record)


# host pages


def _not_zeroed(original: Body, self: Any, freed: Ints) -> None:
    backing = self.backing.copy()
    original(self, freed)
    self.backing[freed] = backing[freed]


def _not_zeroed_out_of_step(original: Body, self: Any, freed: Ints) -> None:
    """Host pages are freed in another order than their logical pages: in the same one, either
    allocator has the same rank for both, and a page gets its old host page anyway."""
    release = self.hosts.release
    with patch.object(self.hosts, "release", lambda ids: release(ids[::-1])):
        _not_zeroed(original, self, freed)


@mutant(
    f"{PAGES}.allocate",
    bug="own",
    killed_by=RESIDENT,
    target=TARGET,
    also={f"{PAGES}._return": _not_zeroed_out_of_step},
)
def backing_stale_after_reuse(original: Body, self: Any, count: int) -> Ints:
    """A logical page that is handed out again is found at the host page that it had before."""
    before = self.backing.copy()
    pages = original(self, count)
    self.backing[pages] = np.where(before[pages] > 0, before[pages], self.backing[pages])
    return pages


@mutant(f"{PAGES}.release", bug="LMCache#2772", killed_by=RESIDENT, target=TARGET)
def host_page_freed_with_first_holder(original: Body, self: Any, ids: Any) -> None:
    """A host page is freed when the first of its logical page's holders lets go."""
    ids = np.asarray(ids, dtype=np.int64)
    shared = self.backing[ids[self.counts[ids] > 1]]
    original(self, ids)
    self.hosts.release(shared[self.hosts.counts[shared] > 0])


@mutant(f"{PAGES}._return", bug="own", killed_by=RESIDENT, target=TARGET)
def host_page_never_freed(original: Body, self: Any, freed: Ints) -> None:
    """A host page stays taken when its logical page is freed."""
    self.hosts.retain(self.backing[freed])
    original(self, freed)


@mutant(f"{PAGES}._return", bug="own", killed_by=RESIDENT, target=TARGET)
def host_page_freed_late(original: Body, self: Any, freed: Ints) -> None:
    """Host pages are freed with the next logical pages that are, not with their own."""
    late = vars(self).setdefault("late", [])
    own = self.backing[freed]
    self.hosts.retain(own)
    original(self, freed)
    self.hosts.release(late)
    late[:] = own.tolist()


def _freed_again(original: Body, self: Any, freed: Ints) -> None:
    vars(self).setdefault("twice", set()).update(self.backing[freed].tolist())
    original(self, freed)


@mutant(
    f"{PAGES}.allocate",
    bug="vllm#24268",
    killed_by=RESIDENT,
    target=TARGET,
    also={f"{PAGES}._return": _freed_again},
)
def host_page_freed_twice(original: Body, self: Any, count: int) -> Ints:
    """A host page is freed twice, and so handed out twice."""
    pages = original(self, count)
    twice = vars(self).setdefault("twice", set())
    for page in pages:
        again = [host for host in twice if self.hosts.counts[host] and host != self.backing[page]]
        if again:
            self.hosts.release([self.backing[page]])
            self.hosts.retain(again[:1])
            self.backing[page] = again[0]
            twice.discard(again[0])
    return pages


def _wrapped(original: Body, index_pool: Any, slots: Any, *rows: Any, **options: Any) -> None:
    slots = slots % (len(index_pool) * options["index_page_size"])
    original(index_pool, slots, *rows, **options)


@mutant(
    "optimized.steps.Steps._store",
    bug="sglang#40743",
    killed_by=SAVED,
    target=TARGET,
    also={"optimized.kernels.pooled_key.store_groups": _wrapped},
)
def index_pool_of_device_tokens(original: Body, self: Any, kv_rows: Any) -> Any:
    """The index pool has room for the tokens of the device, not for all logical ones: what is
    stored behind its end wraps."""
    store = original(self, kv_rows)
    pools, pages = copy(store.pools), len(self.memory.hot.device.counts) - 1
    tokens = pages * self.geometry.physical_page_size
    pools.index = pools.index[:, : 1 + tokens // self.geometry.logical_page_size]
    return replace(store, pools=pools)


# without effect


@mutant(
    f"{MEMORY}.host_rows",
    bug="own",
    killed_by=(),
    target=TARGET,
    equivalence=f"{PROOFS}::test_host_rows_beyond_the_length_are_not_read",
)
def host_rows_not_filtered(original: Body, self: Any, slots: Ints | int, positions: Ints) -> Ints:
    """A position beyond a request's pages has a host row all the same, in the padding page."""
    rows = original(self, slots, positions)
    return np.where(rows < 0, positions % self.geometry.logical_page_size, rows)


@mutant(f"{PAGES}._return", bug="own", killed_by=(), target=TARGET, equivalence=RUNS)
def backing_not_zeroed(original: Body, self: Any, freed: Ints) -> None:
    """A free logical page still names the host page that it had."""
    _not_zeroed(original, self, freed)


@mutant(f"{QUEUE}.copy_oldest", bug="own", killed_by=(), target=TARGET, equivalence=RUNS)
def copies_in_reverse(original: Body, self: Any) -> None:
    """Of the copies on the side stream the one ordered last is made first."""
    self.pending.reverse()
    original(self)
    self.pending.reverse()
