"""Who has which hot rows, what is in them, and when the host has a copy.

The residency rules are those of SGLang's HiSparse: a request of at most H positions has them all
on the device, position p at slot p; a longer one has its newest position at slot H, and at slots
0 .. H - 1 what its layers last selected.  The device rows of a request serve all DSA layers, each
of which has a pool of its own; what is in them differs by layer.  Three rules hold at every
return.  Positions below the newest are on the host, or ordered to go there.  A device page has one
holder.  A call that finds no memory has changed nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from optimized.hisparse.backups import open_backups
from optimized.hisparse.pools import HostPages, HotPools, rows_of_pages
from optimized.kernels import swap_in
from optimized.kernels.swap_in import SwapPlan
from optimized.memory.allocator import Allocator, Ids
from reference.contract import Occupancy, OutOfMemory
from reference.geometry import Geometry, GeometryError, ModelShape


@dataclass(slots=True)
class Holding:
    """What a request holds: logical pages in the order of its positions, host pages with them,
    and device pages; all of it whatever its present length."""

    pages: Ids
    device_pages: Ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The requests of one decode step, each with a new position whose row is still to be written.

    Fields:
        slots: [batch] int64, request slots; 0 is padding and selects nothing.
        length: [batch] int64, positions, the new one included.
        slot_rows: [batch, H + 1] int64, device row of each slot and of the newest position.
        host_rows: [batch, longest] int64, host row of each position; -1 where there is none.
    """

    slots: Tensor
    length: Tensor
    slot_rows: Tensor
    host_rows: Tensor


class Coordinator:
    """Hot buffers of all running requests, by request slot; slot 0 is padding.

    A step is `append`, then for each DSA layer: a store to `rows_to_write`, and `locate` or,
    where the layer uses the index of another, `follow`.

    Fields:
        slot_rows: [slots, H + 1] int64, device row of each slot and of the newest position.
        host_rows: [slots, positions] int64, host row of each position; -1 where there is none.
        tags: [dsa_layers, slots, H] int64, the position in each slot; -1 if none.
        lru: [dsa_layers, slots, H] int64, slots, the least recently used first.
            A layer that follows another has the tags and the order of that one, not its own.
        length: [slots] int64; saved: [slots] int64, positions that are on the host, or ordered
            to go there: all of them, or all but the newest.
    """

    def __init__(
        self,
        geometry: Geometry,
        shape: ModelShape,
        *,
        logical: Allocator,
        device_pages: int,
        host_pages: int,
        max_requests: int,
        page_order: Literal["reuse", "high", "permuted"] = "reuse",
        seed: int = 0,
        poison: bool = True,
        backend: str = "torch",
        device: str = "cpu",
        leaders: Sequence[int] | None = None,
    ) -> None:
        """Pools and tables of an engine without requests.

        Args:
            logical: hands out the logical pages of the engine.
            device_pages: physical pages of hot rows, padding page 0 included.
            host_pages: logical pages of host rows, padding page 0 included.
            leaders: for each DSA layer the one whose index it uses; None for its own.

        Raises:
            GeometryError: the geometry has no hot buffer.
        """
        if geometry.device_buffer_size is None:
            raise GeometryError(
                "device_buffer_size is None: set it to the rows of a hot buffer, or run without "
                "HiSparse."
            )
        self.geometry = geometry
        self.size = geometry.device_buffer_size
        self.hot_pages = -(-self.size // geometry.physical_page_size) + 1
        layers, slots = len(shape.dsa_layers), max_requests + 1
        self.leaders = tuple(range(layers) if leaders is None else leaders)
        on = torch.device(device)
        self.pools = HotPools(
            geometry,
            shape,
            device_pages=device_pages,
            host_pages=host_pages,
            poison=poison,
            device=on,
        )
        self.logical = logical
        self.device = Allocator(
            device_pages, order=page_order, seed=seed + 1, scrub=self.pools.scrub_device
        )
        self.hosts = HostPages(
            Allocator(host_pages, order=page_order, seed=seed + 2, scrub=self.pools.scrub_host),
            logical_pages=len(logical.counts),
            page_size=geometry.logical_page_size,
        )
        self.backups = open_backups(self.pools, backend=backend)
        self.running: dict[int, Holding] = {}
        self.length = np.zeros(slots, dtype=np.int64)
        self.saved = np.zeros(slots, dtype=np.int64)
        self.slot_rows = torch.zeros((slots, self.size + 1), dtype=torch.int64, device=on)
        self.host_rows = torch.full((slots, geometry.logical_page_size), -1, device=on)
        self.tags = torch.full((layers, slots, self.size), -1, device=on)
        self.lru = torch.arange(self.size, device=on).repeat(layers, slots, 1)
        self._backend = backend

    def admit(self, slot: int, pages: Sequence[int] | Ids, length: int) -> None:
        """Direct admission of a request whose `length` positions are on the host already.

        Args:
            slot: its request slot, free so far.
            pages: its logical pages, at least those of its positions.

        Raises:
            OutOfMemory: too few device or host pages are free; nothing changed.
        """
        self.reserve(slot, pages)
        self.preload(slot, length)

    def reserve(self, slot: int, pages: Sequence[int] | Ids) -> None:
        """Take a hot buffer, and hold the host pages of these logical pages, for rows that are
        yet to land on the host; then `preload`.

        Raises:
            OutOfMemory: too few device or host pages are free; nothing changed.
        """
        assert slot > 0, "request slot 0 is padding"
        assert slot not in self.running, "a request slot holds one request"
        if self.hot_pages > self.device.available:
            raise OutOfMemory(
                f"a hot buffer takes {self.hot_pages} device pages and {self.device.available} "
                "are free: finish, abort or retract a request, or raise device_pages."
            )
        pages = np.array(pages, dtype=np.int64)
        self.hosts.hold(pages)
        device_pages = self.device.allocate(self.hot_pages)
        rows = rows_of_pages(device_pages, self.geometry.physical_page_size)
        rows[self.size] = rows[-self.geometry.physical_page_size]
        self.slot_rows[slot] = torch.from_numpy(rows[: self.size + 1])
        self.running[slot] = Holding(pages, device_pages)
        self._map_positions(slot)

    def preload(self, slot: int, length: int) -> None:
        """Copy a request's first positions and its newest to the device, from the host, where all
        `length` of them are."""
        positions = preloaded(length, self.size)
        sources = self.host_rows[slot, positions.to(self.host_rows.device)]
        targets = self.slot_rows[slot, : len(positions)]
        for layer in range(len(self.tags)):
            device, host = self.pools.of_layer(layer)
            swap_in.copy_rows(host, sources, device, targets, backend=self._backend)
        self.length[slot] = self.saved[slot] = length
        self.reset(slot, resident=min(length, self.size))

    def grow(self, slot: int, pages: Sequence[int] | Ids) -> None:
        """Give a request further logical pages, with their host pages.

        Raises:
            OutOfMemory: too few host pages are free; nothing changed.
        """
        self.hosts.hold(pages)
        holding = self.running[slot]
        holding.pages = np.append(holding.pages, np.asarray(pages, dtype=np.int64))
        self._map_positions(slot)

    def append(self, slots: Sequence[int] | Ids) -> Batch:
        """Count one new position of each request, and order the backup of the one before.

        Args:
            slots: [batch] distinct requests, whose pages reach the new position; 0 pads.
        """
        slots = np.asarray(slots, dtype=np.int64)
        live = slots[slots > 0]
        newest = self.length[live]
        room = [len(self.running[slot].pages) for slot in live.tolist()]
        assert (newest < np.array(room) * self.geometry.logical_page_size).all(), "grow comes first"
        self.back_up(live)
        self.length[live] += 1
        early = newest < self.size
        slot, position = self._ids(live[early]), self._ids(newest[early])
        self.tags[:, slot, position] = position
        return self.batch(slots)

    def batch(self, slots: Ids) -> Batch:
        """What a step needs of its requests, gathered once for all layers."""
        length, ids = self.length[slots], self._ids(slots)
        longest = max(1, int(length.max(initial=0)))
        return Batch(
            slots=ids,
            length=self._ids(length),
            slot_rows=self.slot_rows.index_select(0, ids),
            host_rows=self.host_rows[:, :longest].index_select(0, ids),
        )

    def back_up(self, slots: Ids) -> None:
        """Order copies of the newest positions that the host does not have."""
        slots = self.unsaved(slots)
        if slots.size:
            self.backups.start(*self.newest_copies(slots))
            self.saved[slots] = self.length[slots]

    def unsaved(self, slots: Ids) -> Ids:
        """Those of the requests whose newest position the host does not have.  One that it has
        is not written again, since others may read its page."""
        return slots[self.saved[slots] < self.length[slots]]

    def newest_copies(self, slots: Ids) -> tuple[Tensor, Tensor]:
        """[n] int64 each: the device rows of the newest positions, and their host rows."""
        ids, newest = self._ids(slots), self._ids(self.length[slots] - 1)
        return self.slot_rows[ids, newest.clamp_max(self.size)], self.host_rows[ids, newest]

    def rows_to_write(self, batch: Batch) -> Tensor:
        """[batch] int64: the device row of each new position, 0 for padding, once no backup needs
        what is there."""
        self.backups.wait()
        return batch.slot_rows.gather(1, newest_slot(batch.length, self.size)[:, None])[:, 0]

    def locate(self, layer: int, batch: Batch, selection: Tensor) -> SwapPlan:
        """Make what a layer selected resident; [batch, width] int64 positions.  The plan's rows
        are device rows of the layer, -1 for void cells."""
        assert self.leaders[layer] == layer, "this layer uses the index of another: follow it"
        tags, lru = (table[layer].index_select(0, batch.slots) for table in (self.tags, self.lru))
        device, host = self.pools.of_layer(layer)
        plan = swap_in.swap_in(
            selection,
            batch.length,
            tags,
            lru,
            batch.slot_rows,
            batch.host_rows,
            host,
            device,
            backend=self._backend,
        )
        self.tags[layer].index_copy_(0, batch.slots, tags)
        self.lru[layer].index_copy_(0, batch.slots, lru)
        return plan

    def follow(self, layer: int, batch: Batch, plan: SwapPlan) -> None:
        """Make what its leader selected resident in a layer; the plan's rows are its rows too."""
        assert self.leaders[layer] != layer, "this layer has an index of its own: locate"
        device, host = self.pools.of_layer(layer)
        swap_in.replay(plan, batch.slot_rows, batch.host_rows, host, device, backend=self._backend)

    def release(self, slot: int) -> None:
        """Free a request's device pages, and its host pages that no one else holds.

        Its newest position goes to the host before, since a cached prefix may end on it.
        """
        self.back_up(np.array([slot]))
        self.backups.drain()
        holding = self.running.pop(slot)
        self.device.release(holding.device_pages)
        self.hosts.drop(holding.pages)
        self.length[slot] = self.saved[slot] = 0
        self.slot_rows[slot] = 0
        self.host_rows[slot] = -1
        self.reset(slot, resident=0)

    def reset(self, slot: int, *, resident: int) -> None:
        """Position p at each slot p below `resident`, the rest empty; slots in their own order."""
        order = torch.arange(self.size, device=self.tags.device)
        self.tags[:, slot] = torch.where(order < resident, order, -1)
        self.lru[:, slot] = order

    def occupancy(self, *, cached: Collection[int]) -> Occupancy:
        """Tokens in use, each memory counted by itself.

        Args:
            cached: the logical pages that the prefix tree holds.
        """
        hot, host = self.geometry.physical_page_size, self.geometry.logical_page_size
        backed = self.hosts.backing.nonzero()[0]
        hot_pages = sum(len(holding.device_pages) for holding in self.running.values())
        return Occupancy(
            device_free=self.device.available * hot,
            device_hot=hot_pages * hot,
            device_total=(len(self.device.counts) - 1) * hot,
            host_free=self.hosts.allocator.available * host,
            host_held=len(np.unique(self.hosts.backing[backed])) * host,
            host_total=(len(self.hosts.allocator.counts) - 1) * host,
            logical_free=self.logical.available * host,
            logical_owned=len(set(backed.tolist()) - set(cached)) * host,
            logical_cached=len(cached) * host,
            logical_total=(len(self.logical.counts) - 1) * host,
        )

    def _map_positions(self, slot: int) -> None:
        """Note the host row of every position on the request's pages."""
        rows = self.hosts.rows(self.running[slot].pages)
        lack = len(rows) - self.host_rows.shape[1]
        if lack > 0:
            wider = self.host_rows.new_full((len(self.host_rows), max(lack, len(rows))), -1)
            self.host_rows = torch.cat((self.host_rows, wider), dim=1)
        self.host_rows[slot, : len(rows)] = self._ids(rows)

    def _ids(self, ids: Ids) -> Tensor:
        return torch.from_numpy(ids).to(self.slot_rows.device)


def newest_slot(length: Tensor, size: int) -> Tensor:
    """Slot of the newest position: its own, or the one behind the tagged slots."""
    return (length - 1).clamp(0, size)


def preloaded(length: int, size: int) -> Tensor:
    """[min(length, size + 1)] int64: the position at each slot from 0 on after an admission."""
    positions = torch.arange(min(length, size + 1))
    positions[-1] = length - 1
    return positions
