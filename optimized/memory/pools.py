"""The stored bytes: token rows, index pages, KDA states and tail rings.

Layouts are those that kernels see (SGLang #42178): an index page holds all its
key bytes and then all its float32 scales; logical page, state slot and ring row
0 are padding.  With poison, memory that nobody owns is all 0xFF, which is a NaN
in bf16, e4m3 and float32 alike.
"""

from __future__ import annotations

import torch

from optimized.memory.allocator import Ids
from reference.contract import EngineOptions, kv_bytes
from reference.geometry import Geometry, ModelShape

POISON = 0xFF


class Pools:
    """Memory of one engine, on one device.

    Fields:
        kv: [dsa_layers, kv_pages * logical_page_size, row_bytes] uint8, where kv_pages are the
            logical pages, or under HiSparse the host's.
        index: [dsa_layers, pages, index_page_bytes] uint8.
        state: [state_slots, kda_layers, state_width] float32.
        ring: [dsa_layers, max_requests + 1, ring_size, 2 * index_dim] bf16, of which
        ring_key, ring_gate: [dsa_layers, max_requests + 1, ring_size, index_dim] are views.
    """

    def __init__(self, geometry: Geometry, shape: ModelShape, options: EngineOptions) -> None:
        layers, rings = len(shape.dsa_layers), options.max_requests + 1
        kv = options.kv_memory
        if kv is None:
            kv = torch.zeros(kv_bytes(geometry, shape, options), dtype=torch.uint8)
        row_bytes = geometry.row_format.row_bytes(shape.latent)
        page_bytes = geometry.index_page_bytes(shape.index_dim)
        self._poison = options.poison
        self._page_size = geometry.logical_page_size
        self.kv = kv.view(layers, -1, row_bytes)
        self.index = torch.zeros(layers, options.pages, page_bytes, dtype=torch.uint8)
        self.state = torch.zeros(options.state_slots, len(shape.kda_layers), shape.state_width)
        self.ring = torch.zeros(
            layers, rings, geometry.ring_size, 2 * shape.index_dim, dtype=torch.bfloat16
        )
        self.ring_key, self.ring_gate = self.ring.chunk(2, dim=-1)
        if self._poison:
            for buffer in (self.kv, self.index, self.state, self.ring):
                buffer.view(torch.uint8).fill_(POISON)

    def scrub_pages(self, ids: Ids) -> None:
        """Poison the token rows and index pages of freed logical pages."""
        self.scrub_kv(ids)
        self.scrub_index(ids)

    def scrub_kv(self, ids: Ids) -> None:
        """Poison the token rows of freed pages."""
        if self._poison:
            by_page = self.kv.view(len(self.kv), -1, self._page_size * self.kv.shape[2])
            by_page.index_fill_(1, torch.from_numpy(ids), POISON)

    def scrub_index(self, ids: Ids) -> None:
        """Poison freed index pages."""
        if self._poison:
            self.index.index_fill_(1, torch.from_numpy(ids), POISON)

    def scrub_states(self, ids: Ids) -> None:
        """Poison freed state slots."""
        if self._poison:
            self.state.view(torch.uint8).index_fill_(0, torch.from_numpy(ids), POISON)

    def scrub_rings(self, ids: Ids) -> None:
        """Poison freed ring rows."""
        if self._poison:
            self.ring.view(torch.uint8).index_fill_(1, torch.from_numpy(ids), POISON)

    def copy_state(self, source: int, target: int) -> None:
        """Copy one KDA state; a running state is copied, never handed over."""
        self.state[target] = self.state[source]
