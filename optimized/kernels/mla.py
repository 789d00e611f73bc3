"""MLA over the selected rows: absorbed form, no RoPE, rows dequantised as they are read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.kernels import casts, kv_store
from optimized.kernels.backends import use_triton
from reference.geometry import PACKED_BLOCK, RowFormat

BLOCK_HEADS = 16
BLOCK_ROWS = 32


def mla(
    q: Tensor, pool: Tensor, locs: Tensor, *, row_format: RowFormat, scale: float, backend: str
) -> Tensor:
    """[batch, heads, latent] float32: per head, softmax(scale * q . row) @ rows.

    Args:
        q: [batch, heads, latent] float32.
        pool: [locs, row_format.row_bytes(latent)] uint8.
        locs: [batch, width] int64; 0 is masked, and its row, of whatever bytes, is never used.
            With every column masked the output is 0.
        backend: "torch", "triton", or "tilelang" (compiled to C, on the CPU).
    """
    if backend == "tilelang":
        from optimized.kernels import mla_tilelang  # tilelang takes seconds to import

        return mla_tilelang.mla(q, pool, locs, row_format=row_format, scale=scale)
    batch, heads, latent = q.shape
    width = locs.shape[1]
    if use_triton(backend, mla_kernel, pool):
        out = torch.empty_like(q)
        mla_kernel[(batch, triton.cdiv(heads, BLOCK_HEADS))](
            q.contiguous(),
            pool,
            locs.contiguous(),
            out,
            scale,
            heads,
            latent,
            width,
            pool.shape[1],
            FORMAT=row_format.value,
            HEADS=BLOCK_HEADS,
            ROWS=BLOCK_ROWS,
            LATENT=max(16, triton.next_power_of_2(latent)),
            BLOCK=PACKED_BLOCK,
        )
        return out
    flat = locs.reshape(-1)
    masked = flat == 0
    stored = pool.index_select(0, flat)
    # the row too, not only its score: a weight of 0 times NaN is NaN
    stored.index_fill_(0, masked.nonzero().view(-1), 0)
    rows = kv_store.decode_rows(stored, row_format=row_format, latent=latent)
    rows = rows.view(batch, width, latent)
    # one matrix product a request, whose shape no batch changes
    score = torch.bmm(q, rows.mT).mul_(scale)
    score.masked_fill_(masked.view(batch, 1, width), float("-inf"))
    top = score.amax(dim=-1, keepdim=True).clamp_min_(torch.finfo(score.dtype).min)
    weight = score.sub_(top).exp_()
    total = torch.bmm(weight, weight.new_ones(()).expand(batch, width, 1))
    return torch.bmm(weight, rows).div_(total.clamp_min_(torch.finfo(score.dtype).tiny))


@triton.jit
def mla_kernel(
    q,
    pool,
    locs,
    out,
    scale,
    heads,
    latent,
    width,
    row_bytes,
    FORMAT: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for HEADS heads of a query, over its rows ROWS at a time (online softmax)."""
    batch = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channel = tl.arange(0, LATENT)
    own = (batch * heads + head)[:, None] * latent + channel
    inside = (head < heads)[:, None] & (channel < latent)[None, :]
    query = tl.load(q + own, mask=inside, other=0.0) * scale
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    normaliser = tl.zeros((HEADS,), tl.float32)
    total = tl.zeros((HEADS, LATENT), tl.float32)
    for first in range(0, width, ROWS):
        column = first + tl.arange(0, ROWS)
        loc = tl.load(locs + batch * width + column, mask=column < width, other=0)
        live = loc > 0
        rows = load_rows(pool, loc, live, latent, row_bytes, FORMAT, LATENT, BLOCK)
        score = tl.dot(query, tl.trans(rows), input_precision="ieee")
        score = tl.where(live[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        # where nothing is selected yet the top is -inf, and -inf less itself is NaN
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(score - base[:, None])
        rescale = tl.exp(top - base)
        normaliser = normaliser * rescale + tl.sum(weight, axis=1)
        total = total * rescale[:, None] + tl.dot(weight, rows, input_precision="ieee")
        top = higher
    mean = total / tl.where(normaliser == 0.0, 1.0, normaliser)[:, None]
    tl.store(out + own, mean, mask=inside)


@triton.jit
def load_rows(
    pool,
    loc,
    live,
    latent,
    row_bytes,
    FORMAT: tl.constexpr,
    LATENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[rows, LATENT] float32: the rows at `loc`, dequantised; 0 where not `live`."""
    channel = tl.arange(0, LATENT)
    mask = live[:, None] & (channel < latent)[None, :]
    row = pool + loc * row_bytes
    if FORMAT == "bf16":
        bits = tl.load(row.to(tl.pointer_type(tl.int16))[:, None] + channel, mask=mask, other=0)
        return casts.bf16_value(bits)
    value = casts.e4m3_value(tl.load(row[:, None] + channel, mask=mask, other=0))
    if FORMAT == "fp8_packed":
        scale_at = (row + latent).to(tl.pointer_type(tl.float32))[:, None] + channel // BLOCK
        value *= tl.load(scale_at, mask=mask, other=0.0)
    return value
