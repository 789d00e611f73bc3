"""The engine's memory under HiSparse: rows on the host, and hot buffers of what runs.

A request has its hot buffer from its admission to its release.  Prefill works on the host rows;
when the prompt is complete its first positions and its newest come to the device, and from there
on new rows are stored there and go to the host one step later.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from optimized import addressing
from optimized.addressing import Array
from optimized.hisparse.coordinator import Coordinator, preloaded
from optimized.hisparse.pages import BackedPages
from optimized.hisparse.step import HotStep
from optimized.memory.allocator import Allocator
from optimized.memory.manager import Memory
from optimized.memory.requests import Request
from optimized.planner import DecodePlan
from reference.contract import (
    EngineOptions,
    HiSparse,
    HotSnapshot,
    Occupancy,
    PageOrder,
    RequestId,
    Snapshot,
)
from reference.geometry import Geometry, GeometryError, ModelShape

OTHER_ORDER: dict[PageOrder, PageOrder] = {
    "reuse": "high",
    "high": "permuted",
    "permuted": "reuse",
}
"""The order of host pages by that of logical ones: in the same order a logical page would always
get the same host page, and a map that went stale at its reuse would be right by chance."""


class HiSparseMemory(Memory):
    """Memory whose KV pool is the host's: a loc's row is on the host page that backs its logical
    page."""

    pages: BackedPages

    def __init__(
        self, sizes: HiSparse, geometry: Geometry, shape: ModelShape, options: EngineOptions
    ) -> None:
        """Raises GeometryError where no hot buffer can serve the geometry."""
        if geometry.device_buffer_size is None:
            raise GeometryError(
                "device_buffer_size is None: set it to the rows of a hot buffer, or run without "
                "HiSparse."
            )
        if geometry.max_drafts:
            raise GeometryError(
                f"max_drafts is {geometry.max_drafts} and a hot buffer has one newest row: set "
                "max_drafts to 0, or run without HiSparse."
            )
        self._sizes = sizes
        super().__init__(geometry, shape, options)
        self.hot = Coordinator(sizes, geometry, options, self.pools.kv)

    def open_pages(self, options: EngineOptions) -> BackedPages:
        hosts = Allocator(
            self._sizes.host_pages,
            order=OTHER_ORDER[options.page_order],
            seed=options.seed + 4,
            scrub=self.pools.scrub_kv,
            noun="host pages",
            option="host_pages",
        )
        return BackedPages(options, hosts, scrub=self.pools.scrub_index)

    def admit(self, request: RequestId, tokens: Array, *, share: bool = True) -> Request:
        self.hot.require_room()
        record = super().admit(request, tokens, share=share)
        self.hot.admit(record.slot)
        return record

    def complete(self, record: Request) -> None:
        super().complete(record)
        slot = record.slot
        length = int(self.table.length[slot])
        positions = preloaded(length, self.hot.size)
        self.hot.preload(slot, length, self.host_rows(slot, positions))

    def share(self, record: Request) -> None:
        """As without HiSparse, once the host has the newest row: a page that is cached is never
        written again, and one that is freed as a duplicate may be another's next."""
        self.settle(record)
        super().share(record)

    def settle(self, record: Request) -> None:
        slots = np.array([record.slot])
        newest = self.table.length[slots] - 1
        self.hot.back_up(slots, newest, self.host_rows(slots, newest))
        self.hot.backups.drain()

    def release(self, record: Request) -> None:
        self.hot.release(record.slot)
        super().release(record)

    def kv_rows(self, locs: Array) -> Array:
        # by host page a loc is found as a position is by logical page
        return addressing.locs(self.geometry, self.pages.backing[None], 0, locs)

    def host_rows(self, slots: Array | int, positions: Array) -> Array:
        """Host row of each position of the requests in these slots; -1 beyond their pages."""
        rows = self.kv_rows(addressing.locs(self.geometry, self.table.pages, slots, positions))
        return np.where(rows < self.geometry.logical_page_size, -1, rows)

    def decode_rows(self, plan: DecodePlan, slots: Array) -> HotStep:
        positions = self.table.length[slots]
        every = np.arange(positions.max() + 1)
        return self.hot.begin(slots, positions, self.host_rows(slots[:, None], every))

    def read_kv(self, slot: int, layer: int, positions: Array) -> Tensor:
        rows = super().read_kv(slot, layer, positions)
        newest = int(self.table.length[slot]) - 1
        if self.hot.unsaved[slot] and newest in positions:
            last = np.array([min(newest, self.hot.size)])
            rows[-1:] = self.hot.read(slot, layer, last)
        return rows

    def snapshot(self) -> Snapshot:
        plain = super().snapshot()
        cached = sum(len(node.pages) for node in plain.cached)
        backing = {page: int(self.pages.backing[page]) for page in plain.ref_counts}
        buffers = {}
        for record in self.table.by_id.values():
            slot, size = record.slot, self.geometry.logical_page_size
            every = np.arange(int(self.table.pages_held[slot]) * size)
            rows = self.host_rows(slot, every)
            buffers[record.id] = self.hot.view(slot, int(self.table.length[slot]), rows)
        hot = HotSnapshot(
            buffers=buffers,
            backing=backing,
            free_device=self.hot.device.free_ids(),
            free_host=self.pages.hosts.free_ids(),
            occupancy=occupancy(self.geometry, self.hot.device, self.pages, cached=cached),
        )
        return replace(plain, hot=hot)


def occupancy(
    geometry: Geometry, device: Allocator, pages: BackedPages, *, cached: int
) -> Occupancy:
    """Tokens in use, each memory counted by itself; the prefix tree has `cached` pages."""
    row_page, page = geometry.physical_page_size, geometry.logical_page_size
    device_held, host_held, held = (
        int((pool.counts > 0).sum()) for pool in (device, pages.hosts, pages)
    )
    return Occupancy(
        device_free=device.available * row_page,
        device_hot=device_held * row_page,
        device_total=(len(device.counts) - 1) * row_page,
        host_free=pages.hosts.available * page,
        host_held=host_held * page,
        host_total=(len(pages.hosts.counts) - 1) * page,
        logical_free=len(pages.free_ids()) * page,
        logical_owned=(held - cached) * page,
        logical_cached=cached * page,
        logical_total=(len(pages.counts) - 1) * page,
    )
