"""KV rows under HiSparse: hot rows on the device, every row on the host, and the map between.

Only DSA layers have rows here; index pages and KDA states stay where they are (memory.pools).
Page 0 of either side is padding.  With poison, memory that nobody owns is all 0xFF.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from optimized.memory.allocator import Allocator, Ids
from optimized.memory.pools import POISON
from reference.contract import OutOfMemory
from reference.geometry import Geometry, ModelShape


class HotPools:
    """The rows of one engine.

    Fields:
        device: [dsa_layers, device_pages * physical_page_size, row_bytes] uint8.
        host: [dsa_layers, host_pages * logical_page_size, row_bytes] uint8, in the memory of the
            host; pinned when the device is a GPU, whose kernels then read and write it.
    """

    def __init__(
        self,
        geometry: Geometry,
        shape: ModelShape,
        *,
        device_pages: int,
        host_pages: int,
        poison: bool,
        device: torch.device,
    ) -> None:
        layers, row_bytes = len(shape.dsa_layers), geometry.row_format.row_bytes(shape.latent)
        device_rows = device_pages * geometry.physical_page_size
        host_rows = host_pages * geometry.logical_page_size
        fresh, pinned = POISON if poison else 0, device.type == "cuda"
        self.device = torch.full(
            (layers, device_rows, row_bytes), fresh, dtype=torch.uint8, device=device
        )
        self.host = torch.full(
            (layers, host_rows, row_bytes), fresh, dtype=torch.uint8, pin_memory=pinned
        )
        self._pages = (device_pages, host_pages)
        self._poison = poison

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """The device rows and the host rows of a DSA layer, counted among DSA layers from 0."""
        return self.device[layer], self.host[layer]

    def scrub_device(self, ids: Ids) -> None:
        """Poison the rows of freed device pages."""
        self._scrub(self.device, self._pages[0], ids)

    def scrub_host(self, ids: Ids) -> None:
        """Poison the rows of freed host pages."""
        self._scrub(self.host, self._pages[1], ids)

    def _scrub(self, pool: Tensor, pages: int, ids: Ids) -> None:
        if self._poison:
            by_page = pool.view(len(pool), pages, -1)
            by_page.index_fill_(1, torch.from_numpy(ids).to(pool.device), POISON)


class HostPages:
    """Which host page backs a logical page, and for how many holders.

    A running request holds the host pages of all its logical pages, and so does the prefix tree
    for those that it caches; the first holder takes a host page, the last one frees it.

    Fields:
        backing: [logical pages] int64, host page of each; 0 where there is none.
    """

    def __init__(self, allocator: Allocator, *, logical_pages: int, page_size: int) -> None:
        self.allocator = allocator
        self.page_size = page_size
        self.backing = np.zeros(logical_pages, dtype=np.int64)

    def hold(self, pages: Sequence[int] | Ids) -> None:
        """One more holder for each of these logical pages.

        Raises:
            OutOfMemory: too few host pages are free for those that have none; nothing changed.
        """
        pages = np.asarray(pages, dtype=np.int64)
        backed = self.backing[pages] > 0
        fresh = pages[~backed]
        if len(fresh) > self.allocator.available:
            raise OutOfMemory(
                f"the step needs {len(fresh)} free host pages and {self.allocator.available} are "
                "left: finish, abort or retract a request, evict cached pages, or raise host_pages."
            )
        self.allocator.retain(self.backing[pages[backed]])
        self.backing[fresh] = self.allocator.allocate(len(fresh))

    def drop(self, pages: Sequence[int] | Ids) -> None:
        """One holder less for each of these logical pages."""
        pages = np.asarray(pages, dtype=np.int64)
        held = self.backing[pages]
        self.allocator.release(held)
        self.backing[pages[self.allocator.counts[held] == 0]] = 0

    def rows(self, pages: Sequence[int] | Ids) -> Ids:
        """[len(pages) * page_size] int64: the host row of every position on these pages."""
        return rows_of_pages(self.backing[np.asarray(pages, dtype=np.int64)], self.page_size)


def rows_of_pages(pages: Ids, page_size: int) -> Ids:
    """[len(pages) * page_size] int64: the rows of these pages, in order."""
    return (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)
