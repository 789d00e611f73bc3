"""What SGLang says of its memory under HiSparse, in the contract's words, and what is left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference.contract import EngineOptions, OutOfMemory
from reference.hisparse import EMPTY
from reference.views import (
    HotBufferView,
    HotSnapshot,
    Occupancy,
    RequestId,
    RequestView,
    Snapshot,
)
from systems.sglang.hisparse import PAGE, HotMemory


@dataclass(slots=True, kw_only=True)
class Running:
    """A request that runs.

    Fields:
        slot: its row in SGLang's tables.
        tokens: prompt and what was decoded; length: positions stored.
    """

    slot: int
    tokens: list[int]
    length: int = 0


class HotAccounts:
    """Reads the tables of one engine."""

    def __init__(self, memory: HotMemory, options: EngineOptions) -> None:
        hisparse = options.hisparse
        assert hisparse is not None, "an engine with hot buffers has host rows"
        self._memory, self._options, self._hisparse = memory, options, hisparse
        self._logical = memory.allocator.logical_attn_allocator
        self._device = memory.allocator.hisparse_attn_allocator
        self._size = memory.kernel.size
        self._order()
        self._free = self._free_rows()

    def _order(self) -> None:
        """How the free lists lie at the start, and how long they are.  Those of the device and the
        host are always permuted: ids that belong together shall not be the same."""
        options, random = self._options, np.random.default_rng(self._options.seed)
        shuffled = random.permutation(self._hisparse.device_pages - 1) + 1
        self._device.free_pages = torch.from_numpy(shuffled)
        host = torch.from_numpy(random.permutation(self._hisparse.host_pages - 1) + 1)
        self._memory.host.free_slots = (host[:, None] * PAGE + torch.arange(PAGE)).flatten()
        pages = torch.arange(1, options.pages)
        if options.page_order == "high":
            pages = pages.flip(0)
        elif options.page_order == "permuted":
            pages = pages[torch.from_numpy(random.permutation(len(pages)))]
        self._logical.free_pages = pages

    # what is left

    def require_prompts(self, lengths: Sequence[int]) -> None:
        """Raises OutOfMemory unless whole prompts find room: as many pages in each memory, and on
        the device those of a hot buffer if they are more."""
        pages = [-(-length // PAGE) for length in lengths]
        self._require(
            logical=sum(pages),
            host=sum(pages),
            device=sum(
                max(there, self._capacity(length) // PAGE)
                for there, length in zip(pages, lengths, strict=True)
            ),
        )

    def require_step(self, running: Sequence[Running]) -> None:
        """Raises OutOfMemory unless one more position of each of these finds room, and the last
        one a row on the host."""
        coordinator = self._memory.coordinator
        logical = host = device = 0
        for each in running:
            logical += each.length % PAGE == 0
            backed = int(coordinator.req_to_host_pool_allocated_len[each.slot])
            host += self.saved(each) < each.length and backed < each.length
            grown = self._capacity(each.length + 1)
            device += max(0, grown - self._rows(each)) // PAGE
        self._require(logical=logical, host=host, device=device)

    def _capacity(self, length: int) -> int:
        """Device rows that SGLang gives to a request of so many positions."""
        rows = min(-(-length // PAGE) * PAGE, self._size)
        return rows + PAGE if rows == self._size else rows

    def _rows(self, each: Running) -> int:
        return int(self._memory.coordinator.req_device_buffer_size[each.slot])

    def _require(self, *, logical: int, host: int, device: int) -> None:
        for what, wanted, there in (
            ("logical", logical, self._logical.available_size()),
            ("host", host, self._memory.host.available_size()),
            ("device", device, self._device.available_size()),
        ):
            if wanted * PAGE > there:
                raise OutOfMemory(
                    f"{wanted} {what} pages are needed and {there // PAGE} are free: finish, "
                    "abort or retract a request first."
                )

    def freed(self) -> Iterator[tuple[Any, list[int]]]:
        """Of each pool the pages that have become free since this was asked last."""
        before, self._free = self._free, self._free_rows()
        if self._options.poison:
            pools = (self._memory.device, self._memory.host)
            for pool, was, is_ in zip(pools, before, self._free, strict=True):
                yield pool, sorted(is_ - was)

    def _free_rows(self) -> tuple[frozenset[int], frozenset[int]]:
        """Free pages of the device and of the host."""
        host = self._memory.host
        rows = torch.cat([host.free_slots, *host.release_slots])
        return _ids(self._device), frozenset((rows // PAGE).tolist())

    # what is where

    def saved(self, each: Running) -> int:
        """How many positions the host has: all of a prompt, and all but a newest one."""
        if not each.length or self._memory.coordinator._skip_first_backup[each.slot]:
            return each.length
        return each.length - 1

    def snapshot(self, running: Mapping[RequestId, Running]) -> Snapshot:
        """SGLang counts no references to pages: here they follow from who holds what."""
        views = {request: self._view(each) for request, each in running.items()}
        buffers = {request: self._buffer(each) for request, each in running.items()}
        backing = {
            page: row // PAGE
            for request, view in views.items()
            for page, row in zip(view.pages, buffers[request].host_rows[::PAGE], strict=False)
        }
        free_device, free_host = self._free_rows()
        free_pages = _ids(self._logical)
        owned = sum(len(view.pages) for view in views.values())
        hot = HotSnapshot(
            buffers=buffers,
            backing=backing,
            free_device=free_device,
            free_host=free_host,
            occupancy=Occupancy(
                device_free=self._device.available_size(),
                device_hot=sum(self._rows(each) for each in running.values()),
                device_total=(self._hisparse.device_pages - 1) * PAGE,
                host_free=self._memory.host.available_size(),
                host_held=len(backing) * PAGE,
                host_total=(self._hisparse.host_pages - 1) * PAGE,
                logical_free=self._logical.available_size(),
                logical_owned=owned * PAGE,
                logical_cached=0,
                logical_total=(self._options.pages - 1) * PAGE,
            ),
        )
        return Snapshot(
            requests=views,
            cached=(),
            free_pages=free_pages,
            free_states=frozenset(),
            ref_counts={page: 1 for view in views.values() for page in view.pages},
            hot=hot,
        )

    def _view(self, each: Running) -> RequestView:
        locs = self._memory.table.req_to_token[each.slot, : each.length : PAGE]
        return RequestView(
            length=each.length,
            pages=tuple((locs // PAGE).tolist()),
            shared=0,
            slot=None,
            state_slot=None,
            state_position=each.length,
        )

    def _buffer(self, each: Running) -> HotBufferView:
        """A tag of SGLang's that names a position still to come names none here."""
        coordinator, slot, size = self._memory.coordinator, each.slot, self._size
        rows = coordinator.req_to_device_buffer[slot, : self._rows(each)]
        backed = int(coordinator.req_to_host_pool_allocated_len[slot])
        tags = coordinator.req_device_buffer_tokens[:, slot, :size]
        return HotBufferView(
            pages=tuple((rows[::PAGE] // PAGE).tolist()),
            rows=tuple(rows[: size + 1].tolist()),
            tags=_rows_of(torch.where(tags < each.length, tags, EMPTY)),
            lru=_rows_of(coordinator.lru_slots[:, slot]),
            host_rows=tuple(coordinator.req_to_host_pool[slot, :backed].tolist()),
            saved=self.saved(each),
        )


def _ids(allocator: Any) -> frozenset[int]:
    """Pages that a paged allocator would hand out."""
    return frozenset(allocator.get_all_free_pages().tolist())


def _rows_of(table: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in table.tolist())
