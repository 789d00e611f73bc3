"""Rows as SGLang finds them when it computes, and its buffers as they lie."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from reference.contract import Component
from reference.geometry import Geometry, ModelShape
from systems.sglang.accounts import Running
from systems.sglang.pools import Pools


class Reading:
    """The read path of one engine."""

    def __init__(self, geometry: Geometry, shape: ModelShape, pools: Pools, backend: Any) -> None:
        self._geometry, self._shape, self._pools = geometry, shape, pools
        self._backend = backend
        self._kernels = import_module("sglang.srt.layers.attention.dsa.kpool_fp8_index")
        self._whole = {
            (component, layer): self._gathered(component, layer)
            for component, layers in (
                (Component.TAIL, shape.dsa_layers),
                (Component.STATE, shape.kda_layers),
            )
            for layer in range(len(layers))
        }

    def read(
        self, each: Running, component: Component, layer: int, start: int, stop: int
    ) -> Tensor:
        """`Engine.read`."""
        if not each.started:
            return self._paged(component, layer, each.prefix(self._pools.tree), start, stop)
        row = each.req.kv.req_pool_idx
        if component is Component.TAIL:
            ring = self._whole[component, layer][row]
            return ring[torch.arange(start, stop) % len(ring)]
        if component is Component.STATE:
            slot = self._pools.requests.get_mamba_indices(torch.tensor([row]))
            return self._whole[component, layer][slot][start:stop]
        return self._paged(component, layer, self._pools.requests.req_to_token[row], start, stop)

    def _paged(
        self, component: Component, layer: int, locs: Tensor, start: int, stop: int
    ) -> Tensor:
        number = self._shape.dsa_layers[layer]
        if component is Component.KV:
            rows: Tensor = self._pools.kv.get_key_buffer(number)[locs[start:stop].long()]
            return rows.flatten(1).view(torch.uint8)
        tokens = locs[None, : stop * self._geometry.kpool]
        pages = self._kernels.build_pooled_page_table_64(
            self._backend._transform_table_1_to_real(tokens), self._geometry.kpool
        )
        keys = torch.empty(stop, self._shape.index_dim, dtype=torch.uint8)
        scales = torch.empty(stop)
        self._kernels.gather_index_k_scale_prefix_into(
            self._pools.kv.full_kv_pool,
            self._pools.kv.get_index_k_with_scale_buffer(number),
            pages[0].contiguous(),
            stop,
            keys,
            scales,
        )
        return torch.cat([keys, scales[:, None].view(torch.uint8)], dim=1)[start:stop]

    def raw(self, component: Component, layer: int) -> Tensor:
        """`Engine.raw`.  What SGLang keeps in several buffers is a copy of them side by side,
        which every call of the engine brings up to date."""
        if component in (Component.TAIL, Component.STATE):
            return self._whole[component, layer]
        (buffer,) = self._pools.parts(component, layer)
        return buffer.flatten(1).view(torch.uint8)

    def refresh(self) -> None:
        """Bring the copies up to date."""
        for (component, layer), whole in self._whole.items():
            whole.copy_(self._gathered(component, layer))

    def _gathered(self, component: Component, layer: int) -> Tensor:
        """uint8: the parts of a layer's rows side by side: [request slots, ring_size, bytes] of
        tails, [slots, bytes] of states."""
        keep = 2 if component is Component.TAIL else 1
        parts = [part.view(torch.uint8) for part in self._pools.parts(component, layer)]
        return torch.cat([part.flatten(keep) for part in parts], dim=keep)
