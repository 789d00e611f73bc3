"""The store path: new rows into the pools, through the kernels, as the step's plan says."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optimized.kernels import decode_update, kv_store, pool_store
from optimized.kv_rows import KvRows
from optimized.memory.pools import Pools
from optimized.planner import ChunkPlan, DecodePlan
from reference.geometry import Geometry


@dataclass(frozen=True, slots=True)
class Store:
    """Writes a DSA layer's rows of one step.

    `ape` is [dsa_layers, kpool, index_dim] float32.  In both methods `kv` is [rows, latent]
    float32, `key` and `gate` [rows, index_dim] bf16.
    """

    geometry: Geometry
    pools: Pools
    ape: Tensor
    kv_rows: KvRows
    backend: str

    def chunk(self, plan: ChunkPlan, layer: int, kv: Tensor, key: Tensor, gate: Tensor) -> None:
        """Store several positions a request.  The rings are written last: the first group may
        still read what the chunk's own rows replace."""
        self._rows(layer, kv)
        ring, chunk = self.pools.ring[layer].flatten(0, 1), torch.cat((key, gate), dim=1)
        if plan.index_slots.numel():
            pool_store.pool_store(
                self.pools.index[layer],
                plan.index_slots,
                plan.sources,
                ring,
                chunk,
                self.ape[layer],
                index_page_size=self.geometry.index_page_size,
                round_scale=self.geometry.round_scale,
                backend=self.backend,
            )
        if plan.ring_rows.numel():
            ring.index_copy_(0, plan.ring_rows, chunk.index_select(0, plan.ring_sources))

    def decode(self, plan: DecodePlan, layer: int, kv: Tensor, key: Tensor, gate: Tensor) -> None:
        """Store one position a request."""
        self._rows(layer, kv)
        ring_key, ring_gate = self.pools.ring[layer].chunk(2, dim=-1)
        decode_update.decode_update(
            self.pools.index[layer],
            ring_key,
            ring_gate,
            key,
            gate,
            plan.rings,
            plan.positions,
            plan.index_slots,
            self.ape[layer],
            kpool=self.geometry.kpool,
            index_page_size=self.geometry.index_page_size,
            round_scale=self.geometry.round_scale,
            backend=self.backend,
        )

    def _rows(self, layer: int, kv: Tensor) -> None:
        pool, rows = self.kv_rows.targets(layer)
        kv_store.kv_store(pool, rows, kv, row_format=self.geometry.row_format, backend=self.backend)
