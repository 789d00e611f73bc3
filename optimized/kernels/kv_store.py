"""Store KV rows in one of the three row formats, and read them back.

docs/model.md, "KV rows".  Row formats as in SGLang's MLA pools: bf16, raw FP8 (TileLang's) and
packed FP8 with a scale for every 128 channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.kernels import casts
from optimized.kernels.backends import use_triton
from reference.geometry import PACKED_BLOCK, RowFormat

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max
LEAST_ABSMAX = 1e-4
BLOCK_ROWS = 16


def kv_store(
    pool: Tensor, locs: Tensor, rows: Tensor, *, row_format: RowFormat, backend: str
) -> None:
    """Write `rows` into `pool` at `locs`; padding rows go to a loc of logical page 0.

    Args:
        pool: [locs, row_format.row_bytes(latent)] uint8.
        locs: [n] int64.
        rows: [n, latent] float32.
    """
    if not use_triton(backend, kv_store_kernel, pool):
        pool.index_copy_(0, locs, encode_rows(rows, row_format=row_format))
        return
    count, latent = rows.shape
    grid = (triton.cdiv(count, BLOCK_ROWS), triton.cdiv(latent, PACKED_BLOCK))
    kv_store_kernel[grid](
        pool,
        locs,
        rows,
        count,
        latent,
        pool.shape[1],
        FORMAT=row_format.value,
        ROWS=BLOCK_ROWS,
        BLOCK=PACKED_BLOCK,
    )


@triton.jit
def kv_store_kernel(
    pool,
    locs,
    rows,
    count,
    latent,
    row_bytes,
    FORMAT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for ROWS rows and BLOCK channels, which share a scale when packed."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = (row < count)[:, None] & (channel < latent)[None, :]
    loc = tl.load(locs + row, mask=row < count, other=0)
    value = tl.load(rows + row.to(tl.int64)[:, None] * latent + channel, mask=live, other=0.0)
    at = pool + loc * row_bytes
    if FORMAT == "bf16":
        bits = casts.bf16_bits(value)
        tl.store(at.to(tl.pointer_type(tl.int16))[:, None] + channel, bits, mask=live)
    else:
        if FORMAT == "fp8_packed":
            scale = casts.fp8_scale(value)
            value = tl.div_rn(value, tl.broadcast_to(scale[:, None], (ROWS, BLOCK)))
            scale_at = (at + latent).to(tl.pointer_type(tl.float32)) + tl.program_id(1)
            tl.store(scale_at, scale, mask=row < count)
        tl.store(at[:, None] + channel, casts.e4m3_code(value), mask=live)


def load_rows(pool: Tensor, locs: Tensor, *, row_format: RowFormat, latent: int) -> Tensor:
    """[n, latent] float32: the rows at `locs` [n], dequantised."""
    return decode_rows(pool.index_select(0, locs), row_format=row_format, latent=latent)


def encode_rows(rows: Tensor, *, row_format: RowFormat) -> Tensor:
    """[n, row bytes] uint8 of `rows` [n, latent] float32."""
    if row_format is RowFormat.BF16:
        return rows.bfloat16().view(torch.uint8)
    if row_format is RowFormat.FP8_RAW:
        return encode_e4m3(rows)
    blocks = rows.split(PACKED_BLOCK, dim=1)
    scales = [fp8_scale(block) for block in blocks]
    codes = [encode_e4m3(block / scale) for block, scale in zip(blocks, scales, strict=True)]
    return torch.cat((*codes, *(scale.view(torch.uint8) for scale in scales)), dim=1)


def decode_rows(stored: Tensor, *, row_format: RowFormat, latent: int) -> Tensor:
    """[n, latent] float32 of stored rows [n, row bytes] uint8."""
    if row_format is RowFormat.BF16:
        return stored.view(torch.bfloat16).float()
    values = stored[:, :latent].view(torch.float8_e4m3fn).float()
    if row_format is RowFormat.FP8_RAW:
        return values
    scale = stored[:, latent:].clone().view(torch.float32)
    return values * scale.repeat_interleave(PACKED_BLOCK, dim=1)[:, :latent]


def fp8_scale(values: Tensor) -> Tensor:
    """[..., 1] float32: the scale of the last dimension of `values` [..., channels]."""
    absmax = values.abs().amax(dim=-1, keepdim=True).clamp_min_(LEAST_ABSMAX)
    # by a tensor: CUDA divides by a number as a product with its reciprocal, which rounds twice
    return absmax.div_(absmax.new_full((), E4M3_MAX))


def encode_e4m3(values: Tensor) -> Tensor:
    """uint8 e4m3 codes of `values` float32, saturated, rounded to nearest even."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
