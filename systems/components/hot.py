"""HiSparse: hot buffers as the reference keeps them, request by request."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from optimized.hisparse.coordinator import Coordinator
from optimized.hisparse.pages import BackedPages
from optimized.hisparse.step import HotStep
from optimized.kernels import swap_in
from optimized.memory.allocator import Allocator
from reference import hisparse
from reference.hisparse import HotBuffer
from systems.components.component import Component

Array = NDArray[np.int64]
SWAP_IN = Component("kernels.swap_in", "which selected rows miss, and where they go")
COORDINATOR = Component("hisparse.coordinator", "what a hot buffer begins with, what is backed up")
PAGES = Component("hisparse.pages", "the host page of each logical page")


@PAGES.by("BackedPages.require")
def require(self: BackedPages, count: int) -> None:
    self.hosts.require(count)
    Allocator.require(self, count)


@PAGES.by("BackedPages.allocate")
def allocate(self: BackedPages, count: int) -> Array:
    pages = Allocator.allocate(self, count)
    for page in pages:
        self.backing[page] = self.hosts.allocate(1)[0]
    return pages


@PAGES.by("BackedPages.release")
def release_pages(self: BackedPages, ids: Any) -> None:
    Allocator.release(self, ids)


@PAGES.by("BackedPages._return")
def give_back(self: BackedPages, freed: Array) -> None:
    for page in freed:
        self.hosts.release([int(self.backing[page])])
        self.backing[page] = 0
    Allocator._return(self, freed)


@COORDINATOR.by("Coordinator.require_room")
def require_room(self: Coordinator) -> None:
    self.device.require(self.hot_pages)


@COORDINATOR.by("Coordinator.admit")
def admit(self: Coordinator, slot: int) -> None:
    """Slot after slot, and the newest position at the beginning of the last page."""
    pages = self.device.allocate(self.hot_pages)
    self.pages[slot] = pages
    for at in range(self.size):
        page, row = divmod(at, self._page_size)
        self.slot_rows[slot, at] = int(pages[page]) * self._page_size + row
    self.slot_rows[slot, self.size] = int(pages[-1]) * self._page_size


@COORDINATOR.by("Coordinator.begin")
def begin(self: Coordinator, slots: Array, positions: Array, host_rows: Array) -> HotStep:
    newest = np.array([host_rows[i, at - 1] for i, at in enumerate(positions.tolist())])
    back_up(self, slots, positions - 1, newest)
    for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
        self.unsaved[slot] = True
        if position < self.size:
            self.tags[:, slot, position] = position
    return HotStep(
        pools=self.pools,
        backups=self.backups,
        tags=self.tags,
        lru=self.lru,
        slots=torch.from_numpy(slots),
        length=torch.from_numpy(positions + 1),
        slot_rows=self.slot_rows[torch.from_numpy(slots)],
        host_rows=torch.from_numpy(host_rows),
        newest=newest_rows(self, slots, positions),
        backend=self._backend,
    )


@COORDINATOR.by("Coordinator.release")
def release(self: Coordinator, slot: int) -> None:
    self.backups.drain()
    self.device.release(self.pages[slot])
    self.pages[slot] = 0
    self.slot_rows[slot] = 0
    self.unsaved[slot] = False
    reset(self, slot, resident=0)


def reset(self: Coordinator, slot: int, *, resident: int) -> None:
    buffer = HotBuffer(self.size)
    buffer.admit(resident)
    self.tags[:, slot], self.lru[:, slot] = torch.tensor(buffer.tags), torch.tensor(buffer.lru)


@COORDINATOR.by("Coordinator.preload")
def preload(self: Coordinator, slot: int, length: int, host_rows: Array) -> None:
    for layer in range(len(self.tags)):
        device, host = self.pools.of_layer(layer)
        for place, row in enumerate(host_rows.tolist()):
            device[self.slot_rows[slot, place]] = host[row]
    reset(self, slot, resident=min(length, self.size))


def newest_rows(self: Coordinator, slots: Array, newest: Array) -> Tensor:
    rows = [
        self.slot_rows[slot, hisparse.newest_slot(position + 1, self.size)]
        for slot, position in zip(slots.tolist(), newest.tolist(), strict=True)
    ]
    return torch.stack(rows)


@COORDINATOR.by("Coordinator.back_up")
def back_up(self: Coordinator, slots: Array, newest: Array, host_rows: Array) -> None:
    for one in range(len(slots)):
        slot = slots[one : one + 1]
        if self.unsaved[slot[0]]:
            rows = newest_rows(self, slot, newest[one : one + 1])
            self.backups.start(rows, torch.from_numpy(host_rows[one : one + 1].copy()))
            self.unsaved[slot[0]] = False


@COORDINATOR.by("Coordinator.read")
def read(self: Coordinator, slot: int, layer: int, slots: Array) -> Tensor:
    rows = [self.pools.device[layer][self.slot_rows[slot, at]] for at in slots.tolist()]
    return torch.stack(rows) if rows else self.pools.device[layer][:0].clone()


@SWAP_IN.by("swap_in")
def swap(
    selection: Tensor,
    length: Tensor,
    tags: Tensor,
    lru: Tensor,
    slot_rows: Tensor,
    host_rows: Tensor,
    host_pool: Tensor,
    device_pool: Tensor,
    *,
    backend: str,
) -> swap_in.SwapPlan:
    plan = swap_in.SwapPlan(
        rows=torch.full_like(selection, -1),
        misses=torch.zeros_like(length),
        absent=torch.zeros_like(length),
        miss_position=torch.full_like(selection, -1),
        miss_slot=torch.full_like(selection, -1),
    )
    for request, hosted in enumerate(host_rows.tolist()):
        buffer = HotBuffer(tags.shape[1])
        buffer.tags, buffer.lru = tags[request].tolist(), lru[request].tolist()
        present = {position for position, row in enumerate(hosted) if row >= 0}
        done = buffer.swap_in(selection[request].tolist(), int(length[request]), present)
        tags[request], lru[request] = torch.tensor(buffer.tags), torch.tensor(buffer.lru)
        for cell, slot in enumerate(done.slots):
            if slot >= 0:
                plan.rows[request, cell] = slot_rows[request, slot]
        plan.misses[request], plan.absent[request] = len(done.misses), len(done.absent)
        for place, (position, slot) in enumerate(done.misses):
            plan.miss_position[request, place] = position
            plan.miss_slot[request, place] = slot
            device_pool[slot_rows[request, slot]] = host_pool[host_rows[request, position]]
    return plan


@SWAP_IN.by("copy_rows")
def copy_rows(
    source: Tensor, sources: Tensor, target: Tensor, targets: Tensor, *, backend: str
) -> None:
    for here, there in zip(sources.tolist(), targets.tolist(), strict=True):
        if here >= 0 and there >= 0:
            target[there] = source[here]
