"""The hybrid model of docs/model.md in float32, over paged memory.

Batch-invariant bit by bit: what a position computes depends neither on its chunk nor on the
batch, on where its prefix came from or on how many ranks compute it.  Row-local work runs in
tiles of one fixed shape; KDA takes the same recurrent step in prefill and decode, and the same
products for each head; index scores are sums of e4m3 products, which float64 holds exactly, so
no order of summation shows in them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimized.dsa import DsaLayer
from optimized.groups import Group
from optimized.kda import KdaLayer
from optimized.memory.pools import Pools
from optimized.step import Batch
from optimized.tiles import by_tiles, rms
from reference.contract import Weights
from reference.geometry import Geometry, ModelShape


class Model:
    """Runs batches; all that it keeps between them is in the pools.  `shape` is the rank's."""

    def __init__(
        self,
        geometry: Geometry,
        shape: ModelShape,
        weights: Weights,
        pools: Pools,
        group: Group,
        backend: str,
    ) -> None:
        self.geometry = geometry
        self.embed = weights["embed"]
        self.final_norm = weights["final_norm"]
        self.unembed = weights["unembed"].t().contiguous()
        self.logit_scale = weights["logit_scale"]
        dsa = {layer: i for i, layer in enumerate(shape.dsa_layers)}
        kda = {layer: i for i, layer in enumerate(shape.kda_layers)}
        self.layers: list[DsaLayer | KdaLayer] = [
            DsaLayer(geometry, shape, weights, pools, layer, dsa[layer], backend)
            if layer in dsa
            else KdaLayer(shape, weights, layer, kda[layer], group, backend)
            for layer in range(shape.layers)
        ]

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Selections [dsa_layers, outputs, selection_width] int64 and logits [outputs, vocab] of
        the wanted rows."""
        x = self.embed[batch.tokens]
        every = torch.arange(len(x))
        selections = []
        for layer in self.layers:
            if isinstance(layer, KdaLayer):
                x = layer.forward(x, batch)
            elif layer is self.layers[-1]:
                # nothing reads the other rows any more
                x, selected = layer.forward(x, batch, batch.wanted)
                selections.append(selected)
            else:
                x, selected = layer.forward(x, batch, every)
                selections.append(selected[batch.wanted])
        if not isinstance(self.layers[-1], DsaLayer):
            x = x[batch.wanted]
        width = self.geometry.selection_width
        empty = torch.zeros(0, len(batch.wanted), width, dtype=torch.int64)
        selected = torch.stack(selections) if selections else empty
        return selected, by_tiles(self._logits, x)[0]

    def _logits(self, x: Tensor) -> tuple[Tensor]:
        return (rms(x, self.final_norm) @ self.unembed * self.logit_scale,)
