"""KV rows under HiSparse: every row on the host, the hot ones on the device too.

Only DSA layers have rows here; index pages and KDA states stay where they are (memory.pools).
Page 0 of either side is padding.  With poison, device rows that nobody owns are all 0xFF.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimized.memory.allocator import Ids
from optimized.memory.pools import POISON


class HotPools:
    """The rows of one engine.

    Fields:
        device: [dsa_layers, device_pages * page_size, row_bytes] uint8.
        host: [dsa_layers, host rows, row_bytes] uint8, in the memory of the host; pinned when the
            device is a GPU, whose kernels then read and write it.
    """

    def __init__(
        self, host: Tensor, *, device_pages: int, page_size: int, poison: bool, device: torch.device
    ) -> None:
        layers, _, row_bytes = host.shape
        self.host = host
        self.device = torch.full(
            (layers, device_pages * page_size, row_bytes),
            POISON if poison else 0,
            dtype=torch.uint8,
            device=device,
        )
        self._poison = poison
        self._by_page = self.device.view(layers, device_pages, -1)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """The device rows and the host rows of a DSA layer, counted among DSA layers from 0."""
        return self.device[layer], self.host[layer]

    def scrub_device(self, ids: Ids) -> None:
        """Poison the rows of freed device pages."""
        if self._poison:
            self._by_page.index_fill_(1, torch.from_numpy(ids).to(self.device.device), POISON)
