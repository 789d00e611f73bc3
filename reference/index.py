"""The index: which positions a query attends to.

Specifies DeepSeek-V3.2's lightning indexer over pooled keys (SGLang #42178).  The selection
of a position depends on that position's query and on the groups closed by then, on nothing
else: not on chunk borders, on the batch, or on what the cache holds.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from reference.geometry import Geometry, ModelShape
from reference.norms import layernorm
from reference.pooling import rotate
from reference.quant import fp8, round_bf16

SCORE_BLOCK = 1 << 22
"""Most head scores held at once."""


def key_and_gate(y: Tensor, w: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Normed inputs [n, hidden] -> bf16 index keys and gate scores, each [n, index_dim]."""
    key = round_bf16(layernorm(y @ w["wik"].T, w["ln_g"], w["ln_b"]))
    return key, round_bf16(y @ w["wgate"].T)


def index_query(
    c_q: Tensor, y: Tensor, w: Mapping[str, Tensor], shape: ModelShape, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """(e4m3 query values [n, index_heads, index_dim], head weights [n, index_heads]).

    The weights carry the query's scale and both square roots.
    """
    heads = round_bf16(c_q @ w["wiq"].T).view(len(y), shape.index_heads, shape.index_dim)
    values, scale = fp8(rotate(heads), round_scale=geometry.round_scale)
    factor = shape.index_heads**-0.5 * shape.index_dim**-0.5
    return values.to(y.dtype), y @ w["wiw"].T * factor * scale.to(y.dtype)


def scores(iq: Tensor, iw: Tensor, keys: Tensor, scales: Tensor) -> Tensor:
    """[n, groups] scores of queries (iq, iw) against stored keys [groups, dim] and scales."""
    dots = torch.einsum("nhd,gd->nhg", iq, keys).relu()
    return torch.einsum("nh,nhg->ng", iw, dots) * scales


def select(score: Tensor, positions: Tensor, geometry: Geometry) -> Tensor:
    """Selection rows from scores.

    Arguments: score [n, groups], of which a query sees the first (p + 1) // kpool;
    positions [n] int64.
    Returns: [n, selection_width] int64: the topk / kpool best groups (of equal scores the
    lower group) as ascending positions, then the tail, then -1.
    """
    visible = (positions + 1) // geometry.kpool
    group = torch.arange(score.shape[1])
    seen = group < visible[:, None]
    best = geometry.topk_groups
    if score.shape[1] <= best:
        return expand(seen, positions, geometry)
    masked = score.masked_fill(~seen, -torch.inf)
    threshold = masked.topk(best, sorted=True).values[:, -1:]
    above, level = masked > threshold, masked == threshold
    missing = best - above.sum(1, keepdim=True)
    chosen = above | (level & (level.cumsum(1) <= missing))
    return expand(chosen & seen, positions, geometry)


def expand(chosen: Tensor, positions: Tensor, geometry: Geometry) -> Tensor:
    """Selection rows [n, selection_width] of chosen groups [n, groups] (bool), with the tail."""
    kpool = geometry.kpool
    rows = torch.full((len(positions), geometry.selection_width), -1, dtype=torch.int64)
    query, group = chosen.nonzero(as_tuple=True)
    column = chosen.cumsum(1)[query, group] - 1
    for slot in range(kpool):
        rows[query, column * kpool + slot] = group * kpool + slot
    tail = (positions + 1) // kpool * kpool
    column = chosen.sum(1) * kpool
    for slot in range(kpool - 1):
        query = (tail + slot <= positions).nonzero()[:, 0]
        rows[query, column[query] + slot] = tail[query] + slot
    return rows


def selections(
    query: tuple[Tensor, Tensor],
    stored: tuple[Tensor, Tensor],
    positions: Tensor,
    geometry: Geometry,
) -> Tensor:
    """`select` over `scores`, in blocks of queries.

    Arguments: query, as `index_query` gives it; stored, the keys and scales of all groups.
    """
    iq, iw = query
    keys, scales = stored
    block = max(1, SCORE_BLOCK // max(1, iq.shape[1] * len(keys)))
    parts = [
        select(scores(q, h, keys, scales), p, geometry)
        for q, h, p in zip(
            torch.split(iq, block),
            torch.split(iw, block),
            torch.split(positions, block),
            strict=True,
        )
    ]
    return torch.cat(parts)
