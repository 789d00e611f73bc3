"""Who has which hot rows, what is in them, and which newest rows the host lacks.

The residency rules are those of SGLang's HiSparse: a request of at most H positions has them all
on the device, position p at slot p; a longer one has its newest position at slot H, and at slots
0 .. H - 1 what its layers last selected.  The device rows of a request serve all DSA layers, each
of which has a pool of its own; what is in them differs by layer.  Three rules hold at every
return.  Positions below the newest are on the host, or ordered to go there.  A device page has one
holder.  A call that finds no memory has changed nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from optimized.addressing import Array
from optimized.hisparse.backups import BackupQueue, Backups, StreamBackups
from optimized.hisparse.pools import HotPools
from optimized.hisparse.step import HotStep
from optimized.kernels import gather, swap_in
from optimized.memory.allocator import Allocator
from reference.contract import EngineOptions, HiSparse, HotBufferView, InvalidCall
from reference.geometry import Geometry


class Coordinator:
    """Hot buffers of all running requests, by request slot.

    Fields:
        size: H, the slots of a hot buffer but for the newest position's.
        hot_pages: device pages of a hot buffer: H rows rounded up, and a page whose first row is
            the newest position's.
        device: hands out device pages; pages: [slots, hot_pages] int64, those of each request.
        slot_rows: [slots, H + 1] int64, device row of each slot and of the newest position.
        tags: [dsa_layers, slots, H] int64, the position in each slot; -1 if none.
        lru: [dsa_layers, slots, H] int64, slots, the least recently used first.
            A layer that follows another has the tags and the order of that one, not its own.
        unsaved: [slots] bool, the requests whose newest row is on the device alone.
    """

    def __init__(
        self,
        sizes: HiSparse,
        geometry: Geometry,
        options: EngineOptions,
        host: Tensor,
        *,
        device: str = "cpu",
    ) -> None:
        """Pools and tables of an engine without requests.

        Args:
            geometry: one with a device_buffer_size.
            host: [dsa_layers, host rows, row_bytes] uint8, pinned if the device is a GPU.

        Raises:
            InvalidCall: the device has no room for one hot buffer.
        """
        assert geometry.device_buffer_size is not None, "the caller has checked the geometry"
        self.size = geometry.device_buffer_size
        self._page_size = geometry.physical_page_size
        self.hot_pages = -(-self.size // self._page_size) + 1
        if sizes.device_pages <= self.hot_pages:
            raise InvalidCall(
                f"device_pages {sizes.device_pages} have no room for a hot buffer and padding: set "
                f"them to at least {self.hot_pages + 1}."
            )
        layers, slots, on = len(host), options.max_requests + 1, torch.device(device)
        self.pools = HotPools(
            host,
            device_pages=sizes.device_pages,
            page_size=self._page_size,
            poison=options.poison,
            device=on,
        )
        self.device = Allocator(
            sizes.device_pages,
            order=options.page_order,
            seed=options.seed + 3,
            scrub=self.pools.scrub_device,
            noun="device pages",
            option="device_pages",
        )
        self._backend = options.backend
        self.backups: Backups = (
            StreamBackups(self.pools, backend=self._backend)
            if on.type == "cuda"
            else BackupQueue(
                self.pools, copies=sizes.copies, seed=options.seed, backend=self._backend
            )
        )
        self.pages = np.zeros((slots, self.hot_pages), dtype=np.int64)
        self.unsaved = np.zeros(slots, dtype=bool)
        self.slot_rows = torch.zeros((slots, self.size + 1), dtype=torch.int64, device=on)
        self.tags = torch.full((layers, slots, self.size), -1, device=on)
        self.lru = torch.arange(self.size, device=on).repeat(layers, slots, 1)

    def require_room(self) -> None:
        """Raises OutOfMemory unless one more hot buffer fits."""
        self.device.require(self.hot_pages)

    def admit(self, slot: int) -> None:
        """Take a hot buffer for a request, with nothing in it; there is room."""
        assert not self.pages[slot].any(), "a request slot holds one request"
        pages = self.device.allocate(self.hot_pages)
        rows = (pages[:, None] * self._page_size + np.arange(self._page_size)).reshape(-1)
        rows[self.size] = pages[-1] * self._page_size
        self.pages[slot] = pages
        self.slot_rows[slot] = torch.from_numpy(rows[: self.size + 1])

    def preload(self, slot: int, length: int, host_rows: Array) -> None:
        """Copy a request's first positions and its newest to the device, from the host, where all
        `length` of them are.  `host_rows` are those of the positions that `preloaded` names."""
        sources = self._on_device(host_rows)
        targets = self.slot_rows[slot, : len(sources)]
        for layer in range(len(self.tags)):
            device, host = self.pools.of_layer(layer)
            swap_in.copy_rows(host, sources, device, targets, backend=self._backend)
        self.reset(slot, resident=min(length, self.size))

    def begin(self, slots: Array, positions: Array, host_rows: Array) -> HotStep:
        """Order the backup of each request's newest position, and make room for a new one.

        Args:
            slots: [batch] distinct requests.
            positions: [batch] the new position of each.
            host_rows: [batch, longest] host row of each position; -1 where there is none.
        """
        self.back_up(slots, positions - 1, host_rows[np.arange(len(slots)), positions - 1])
        self.unsaved[slots] = True
        ids, new = self._on_device(slots), self._on_device(positions)
        early = positions < self.size
        if early.any():
            early_ids, early_new = self._on_device(slots[early]), self._on_device(positions[early])
            self.tags[:, early_ids, early_new] = early_new
        slot_rows = self.slot_rows.index_select(0, ids)
        return HotStep(
            pools=self.pools,
            backups=self.backups,
            tags=self.tags,
            lru=self.lru,
            slots=ids,
            length=new + 1,
            slot_rows=slot_rows,
            host_rows=self._on_device(host_rows),
            newest=slot_rows.gather(1, newest_slot(new, self.size)[:, None])[:, 0],
            backend=self._backend,
        )

    def back_up(self, slots: Array, newest: Array, host_rows: Array) -> None:
        """Order copies of the newest positions that the host does not have, to their host rows.
        One that it has is not written again, since others may read its page."""
        lacking = self.unsaved[slots]
        if lacking.any():
            rows = self.newest_rows(slots[lacking], newest[lacking])
            self.backups.start(rows, self._on_device(host_rows[lacking]))
            self.unsaved[slots] = False

    def newest_rows(self, slots: Array, newest: Array) -> Tensor:
        """[n] int64: the device rows of the newest positions."""
        ids, positions = self._on_device(slots), self._on_device(newest)
        return self.slot_rows[ids, newest_slot(positions, self.size)]

    def read(self, slot: int, layer: int, slots: Array) -> Tensor:
        """[n, row bytes] uint8: what is in these slots of a request's hot buffer."""
        rows = self.slot_rows[slot, self._on_device(slots)]
        return gather.gather_rows(self.pools.device[layer], rows, backend=self._backend)

    def release(self, slot: int) -> None:
        """Free a request's device pages, once no backup reads them."""
        self.backups.drain()
        self.device.release(self.pages[slot])
        self.pages[slot] = self.slot_rows[slot] = 0
        self.unsaved[slot] = False
        self.reset(slot, resident=0)

    def reset(self, slot: int, *, resident: int) -> None:
        """Position p at each slot p below `resident`, the rest empty; slots in their own order."""
        order = torch.arange(self.size, device=self.tags.device)
        self.tags[:, slot] = torch.where(order < resident, order, -1)
        self.lru[:, slot] = order

    def view(self, slot: int, length: int, host_rows: Array) -> HotBufferView:
        """A request's hot buffer, copied."""
        return HotBufferView(
            pages=tuple(self.pages[slot].tolist()),
            rows=tuple(self.slot_rows[slot].tolist()),
            tags=tuple(map(tuple, self.tags[:, slot].tolist())),
            lru=tuple(map(tuple, self.lru[:, slot].tolist())),
            host_rows=tuple(host_rows.tolist()),
            saved=length - int(self.unsaved[slot]),
        )

    def _on_device(self, values: Array) -> Tensor:
        return torch.from_numpy(values).to(self.slot_rows.device)


def newest_slot(newest: Tensor, size: int) -> Tensor:
    """Slot of the newest position: its own, or the one behind the tagged slots."""
    return newest.clamp_max(size)


def preloaded(length: int, size: int) -> Array:
    """[min(length, size + 1)] int64: the position at each slot from 0 on after an admission."""
    positions = np.arange(min(length, size + 1))
    positions[-1] = length - 1
    return positions
