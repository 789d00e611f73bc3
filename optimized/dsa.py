"""A DSA layer: pooled lightning indexer, selection, and MLA over the selected rows.

docs/model.md, "DSA layer"; DeepSeek-V3.2's indexer pooled as in SGLang #42178.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from optimized import addressing
from optimized.kernels import gather, mla, pooled_key, select
from optimized.memory.pools import Pools
from optimized.step import Batch
from optimized.tiles import by_tiles, layer_norm, rms
from reference.contract import Weights
from reference.geometry import Geometry, ModelShape

QUERIES = 16
"""Queries that are scored or attend at once: bounds memory, changes no result."""


class DsaLayer:
    """Layer `layer` of the model, the `index`-th of the DSA layers."""

    def __init__(
        self,
        geometry: Geometry,
        shape: ModelShape,
        weights: Weights,
        pools: Pools,
        layer: int,
        index: int,
        backend: str,
    ) -> None:
        def weight(name: str) -> Tensor:
            return weights[f"layers.{layer}.{name}"]

        def transposed(*names: str) -> Tensor:
            return torch.cat([weight(name) for name in names]).t().contiguous()

        self.geometry = geometry
        self.shape = shape
        self.pools = pools
        self.index = index
        self.backend = backend
        self.norm, self.q_norm, self.kv_norm = weight("norm"), weight("q_norm"), weight("kv_norm")
        self.ln = weight("ln_g"), weight("ln_b")
        self.w_row = transposed("wkv", "wik", "wgate")
        self.w_query = transposed("wqa", "wiw")
        self.w_heads = transposed("wqb", "wiq")
        self.w_out = transposed("wo")

    def forward(self, x: Tensor, batch: Batch, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Store all rows of `x` [rows, hidden], and let those at `queries` attend: their
        outputs [queries, hidden] and selections [queries, selection_width]."""
        kv, key, gate = by_tiles(self._rows, x)
        batch.write(self.index, kv, key, gate)
        x = x[queries]
        q, index_q, index_w = by_tiles(self._queries, x)
        positions, owner = batch.positions[queries], batch.owner[queries]
        groups = self._select(batch, positions, owner, index_q, index_w)
        selected = select.expand(
            groups,
            positions,
            kpool=self.geometry.kpool,
            width=self.geometry.selection_width,
            backend=self.backend,
        )
        attended = self._attend(batch, q, owner, selected)
        return by_tiles(self._output, x, attended)[0], selected

    def _rows(self, x: Tensor) -> tuple[Tensor, ...]:
        """KV row in float32, index key and gate in bf16."""
        dim = self.shape.index_dim
        kv, key, gate = (rms(x, self.norm) @ self.w_row).split([self.shape.latent, dim, dim], dim=1)
        return rms(kv, self.kv_norm), layer_norm(key, *self.ln).bfloat16(), gate.bfloat16()

    def _queries(self, x: Tensor) -> tuple[Tensor, ...]:
        """MLA queries [rows, heads, latent], index queries [rows, index_heads, index_dim] (e4m3
        values) and their weights [rows, index_heads]."""
        shape = self.shape
        c_q, w = (rms(x, self.norm) @ self.w_query).split([shape.q_lora, shape.index_heads], dim=1)
        q, index_q = (rms(c_q, self.q_norm) @ self.w_heads).split(
            [shape.heads * shape.latent, shape.index_heads * shape.index_dim], dim=1
        )
        index_q = index_q.reshape(-1, shape.index_dim).bfloat16()
        codes, scale = pooled_key.quantise(
            pooled_key.rotate(index_q), round_scale=self.geometry.round_scale
        )
        values = codes.view(torch.float8_e4m3fn).float()
        w = w * (shape.index_heads**-0.5 * shape.index_dim**-0.5) * scale.view_as(w)
        return q.reshape(-1, shape.heads, shape.latent), values.view(len(x), -1, shape.index_dim), w

    def _select(
        self, batch: Batch, positions: Tensor, owner: Tensor, q: Tensor, w: Tensor
    ) -> Tensor:
        """[queries, topk_groups] int64: the selected groups, ascending, then -1."""
        most = self.geometry.topk_groups
        visible = torch.from_numpy(addressing.visible_groups(self.geometry, positions.numpy()))
        requests, counts = owner.unique_consecutive(return_counts=True)
        shares = (tensor.split(counts.tolist()) for tensor in (visible, q, w))
        out = [visible.new_zeros(0, most)]
        for request, sees, q_rows, w_rows in zip(requests.tolist(), *shares, strict=True):
            groups = int(sees.max())
            if self.skips_scores(groups):
                out.append(first_groups(sees, most))
                continue
            keys, scale = self._keys(batch, request, groups)
            parts = (tensor.split(QUERIES) for tensor in (sees, q_rows, w_rows))
            for can_see, some_q, some_w in zip(*parts, strict=True):
                score = index_scores(some_q, some_w, keys, scale)
                out.append(highest_groups(score, can_see, most))
        return torch.cat(out)

    def skips_scores(self, groups: int) -> bool:
        """Whether all of the `groups` that a request's last query sees are selected anyway."""
        return groups <= self.geometry.topk_groups

    def _keys(self, batch: Batch, request: int, groups: int) -> tuple[Tensor, Tensor]:
        """Stored keys [groups, index_dim] as float64 and their scales [groups] float32."""
        slots = addressing.read_slots(
            self.geometry, batch.table, batch.table_rows[request], np.arange(groups)
        )
        stored = gather.gather_index(
            self.pools.index[self.index],
            torch.from_numpy(slots),
            index_page_size=self.geometry.index_page_size,
            backend=self.backend,
        )
        codes, scale = stored.split([self.shape.index_dim, 4], dim=1)
        return codes.view(torch.float8_e4m3fn).double(), scale.clone().view(torch.float32)[:, 0]

    def _attend(self, batch: Batch, q: Tensor, owner: Tensor, selected: Tensor) -> Tensor:
        """[queries, heads * latent]: MLA over the rows at the selected positions."""
        pool, where = batch.kv_rows.sources(self.index, owner, selected)
        parts = [
            mla.mla(
                q[at : at + QUERIES],
                pool,
                where[at : at + QUERIES],
                row_format=self.geometry.row_format,
                scale=self.shape.latent**-0.5,
                backend=self.backend,
            )
            for at in range(0, len(q), QUERIES)
        ]
        return torch.cat(parts).flatten(1) if parts else q.flatten(1)

    def _output(self, x: Tensor, attended: Tensor) -> tuple[Tensor]:
        return (x + attended @ self.w_out,)


def index_scores(q: Tensor, w: Tensor, keys: Tensor, scale: Tensor) -> Tensor:
    """[queries, groups] float32: scale * sum_h w_h relu(q_h . key).

    Args:
        q: [queries, index_heads, index_dim] float32, e4m3 values.
        w: [queries, index_heads] float32.
        keys: [groups, index_dim] float64, e4m3 values; scale: [groups] float32.
    """
    # products of e4m3 values and their sums are exact in float64: one rounding, in any order
    dots = (q.double().flatten(0, 1) @ keys.t()).relu_().float().view(*q.shape[:2], -1)
    score = dots[:, 0] * w[:, :1]
    for head in range(1, q.shape[1]):
        score += dots[:, head] * w[:, head, None]
    return score * scale


def first_groups(visible: Tensor, most: int) -> Tensor:
    """[queries, most] int64: all visible groups, then -1."""
    groups = torch.arange(most).expand(len(visible), most)
    return groups.masked_fill(groups >= visible[:, None], -1)


def highest_groups(score: Tensor, visible: Tensor, most: int) -> Tensor:
    """[queries, most] int64: the visible groups of the highest scores, ascending, then -1; of
    equal scores the lower group first."""
    can_see = torch.arange(score.shape[1]) < visible[:, None]
    score = score.masked_fill(~can_see, float("-inf"))
    least = score.topk(most, dim=1).values[:, -1:]
    above, equal = score > least, score == least
    room = most - above.sum(1, keepdim=True)
    chosen = (above | (equal & (equal.cumsum(1) <= room))) & can_see
    query, group = chosen.nonzero(as_tuple=True)
    out = visible.new_full((len(score), most), -1)
    out[query, chosen.cumsum(1)[query, group] - 1] = group
    return out
