"""Decode's MLA over selected rows, split over the selection (flash-decoding), for tensor cores.

`mla` is the plain twin: float32 products, any latent.  This one reads each stored row once for
all heads and both products, in splits whose results `combine_kernel` puts together.

A warp owns CHANNELS channels of every row.  Both products are batched over these blocks, which is
how Triton deals them out to warps: each keeps its block of the sums in registers and reads no other
warp's channels.  Only the scores, TILE_ROWS x 16, are added up across warps.  Rows are the M of
mma.sync in the first product and heads in the second, 16 of them without padding.  Tiles come by
cp.async, STAGES - 1 of them ahead; e4m3 codes then go through registers into a tile of bf16, once
for both products.

Products are of bf16 numbers, exact for queries, bf16 rows and e4m3 codes.  A weight is the sum of
several, of 8 bits each: one would be a hundred times coarser than what the reference's bound grants
float32.  The bound grows with the root of the width, so a narrow selection takes more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.kernels import casts, mla
from optimized.kernels.backends import BackendError, use_triton
from reference.geometry import PACKED_BLOCK, RowFormat

HEADS = 16
CHANNELS = 128
"""Channels of a warp: 64 sums a thread.  At most PACKED_BLOCK, whose scale they share."""
TILE_ROWS = 32
"""With 32 a thread takes all of its 255 registers; 64 would spill."""
STAGES = {RowFormat.BF16: 3, RowFormat.FP8_RAW: 4, RowFormat.FP8_PACKED: 4}
"""90 to 106 KB of shared memory, so that two programs fit on a multiprocessor, as they do in its
registers.  Together they have 64 KB or more on their way; 32 KB hide the latency."""
PROGRAMS_PER_PROCESSOR = 2
SPLIT_ROWS = 64
"""The least rows of a split: with fewer, more bytes would be written than FP8 rows are read."""
WIDE = 256
"""Columns from which on two bf16 numbers a weight are enough."""
COMBINE_ELEMENTS = 4096
"""What one program of `combine_kernel` loads at once: 32 registers a thread, all on their way."""

E4M3_TO_BF16 = tl.constexpr("""{
    .reg .b16 code<2>, half<4>;
    .reg .b32 pair<2>;
    .reg .f32 value<4>;
    mov.b32 {code0, code1}, $2;
    cvt.rn.f16x2.e4m3x2 pair0, code0; cvt.rn.f16x2.e4m3x2 pair1, code1;
    mov.b32 {half0, half1}, pair0; mov.b32 {half2, half3}, pair1;
    cvt.f32.f16 value0, half0; cvt.f32.f16 value1, half1;
    cvt.f32.f16 value2, half2; cvt.f32.f16 value3, half3;
    cvt.rn.bf16x2.f32 $0, value1, value0; cvt.rn.bf16x2.f32 $1, value3, value2;
}""")
"""Four codes.  Not marked pure, for then Triton would convert on the far side of shared memory,
once for each product, and read it byte by byte."""
LOWEST = tl.constexpr(-3.4028234663852886e38)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def split_count(batch: int, width: int, *, processors: int = 132) -> int:
    """Splits of each request's selection of `width` columns.

    The most for which all programs run at once: an idle multiprocessor costs more than the 32 KB
    that a split writes and reads again.  Point A (48 x 2051): 5 splits of 13 tiles in 240 programs;
    B (8 x 2051): 33 of two in 264.
    """
    pieces = triton.cdiv(width, SPLIT_ROWS)
    most = max(1, PROGRAMS_PER_PROCESSOR * processors // max(1, batch))
    return triton.cdiv(pieces, triton.cdiv(pieces, most))


def make_partials(batch: int, width: int, latent: int, *, device: torch.device) -> Tensor:
    """[batch, splits, latent + 2, 16] float32, uninitialised: `sparse_mla`'s workspace for
    selections of `width` columns, which holds a split's sums [16, latent], then its heads' highest
    scores and normalisers."""
    processors = 132
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    splits = split_count(batch, width, processors=processors)
    return torch.empty(batch, splits, latent + 2, HEADS, dtype=torch.float32, device=device)


def sparse_mla(
    q: Tensor,
    pool: Tensor,
    locs: Tensor,
    out: Tensor,
    partials: Tensor,
    *,
    row_format: RowFormat,
    scale: float,
    backend: str,
) -> None:
    """Write softmax(scale * q . row) @ rows, per head, into `out`.

    Triton allocates nothing and waits for nothing, so it can be captured.  The bits of a result
    depend on `partials.shape[1]` alone, not on the other requests of the batch.

    Args:
        q: [batch, heads, latent] bf16 of at most 16 heads, contiguous.
        pool: [locs, row_format.row_bytes(latent)] uint8.
        locs: [batch, width] int64 or int32, contiguous.  A loc below 1 (void, or padding) is
            masked, and its row, of whatever bytes, is never used; with every column masked the
            output is 0.
        out: [batch, heads, latent] float32, contiguous.
        partials: `make_partials` of the same sizes; its content on entry does not matter.

    Raises:
        BackendError: for more than 16 heads, or a latent that is not 128, 256 or 512.
    """
    batch, heads, latent = q.shape
    if not use_triton(backend, partial_kernel, pool):
        rows = locs.clamp_min(0).long()
        found = mla.mla(q.float(), pool, rows, row_format=row_format, scale=scale, backend="torch")
        out.copy_(found)
        return
    if heads > HEADS or latent not in (128, 256, 512):
        raise BackendError(
            f"sparse_mla takes up to {HEADS} heads of 128, 256 or 512 channels, not {heads} of "
            f"{latent}: call mla, which takes any."
        )
    splits, width = partials.shape[1], locs.shape[1]
    partial_kernel[(splits, batch)](
        q.view(torch.int16),
        pool,
        locs,
        partials,
        scale * 1.4426950408889634,  # log2(e): the weights are powers of 2
        heads,
        width,
        triton.cdiv(triton.cdiv(width, TILE_ROWS), splits) * TILE_ROWS,
        FORMAT=row_format.value,
        ROW_BYTES=pool.shape[1],
        BLOCKS=latent // CHANNELS,
        CHANNELS=CHANNELS,
        PACKED_BLOCK=PACKED_BLOCK,
        ROWS=TILE_ROWS,
        HEADS=HEADS,
        PARTS=2 if width >= WIDE else 3,
        num_warps=latent // CHANNELS,
        num_stages=STAGES[row_format],
    )
    most_splits = triton.next_power_of_2(splits)
    channels = min(latent, COMBINE_ELEMENTS // most_splits)
    combine_kernel[(latent // channels, heads, batch)](
        partials,
        out,
        splits,
        LATENT=latent,
        CHANNELS=channels,
        SPLITS=most_splits,
        HEADS=HEADS,
        num_warps=4,
    )


@triton.jit
def partial_kernel(
    q,
    pool,
    locs,
    partials,
    scale,
    heads,
    width,
    split_columns,
    FORMAT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PACKED_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One program for a split of one request's selection, ROWS rows at a time."""
    LATENT: tl.constexpr = BLOCKS * CHANNELS
    split = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    first = split * split_columns
    last = tl.minimum(first + split_columns, width)
    locs += batch * width
    place = first + tl.arange(0, ROWS)
    loc = tl.load(locs + place, mask=place < last, other=0).to(tl.int64)
    block = tl.arange(0, BLOCKS)[:, None, None]
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    head = tl.arange(0, HEADS)
    own = head[:, None] * LATENT + channel  # [BLOCKS, HEADS, CHANNELS]
    real = (head < heads)[:, None] & (channel >= 0)
    query = bf16_operand(tl.load(q + batch * heads * LATENT + own, mask=real, other=0))
    query = tl.permute(query, (0, 2, 1))
    top = tl.full((HEADS,), LOWEST, tl.float32)
    normaliser = tl.zeros((HEADS,), tl.float32)
    sums = tl.zeros((BLOCKS, HEADS, CHANNELS), tl.float32)
    for _ in range(first, last, ROWS):
        live = loc > 0
        row = (pool + loc * ROW_BYTES)[:, None]
        tile = load_tile(row, live, channel, FORMAT)
        score = tl.dot(tile, query, input_precision="ieee")
        if FORMAT == "fp8_packed":
            scales_at = (row + LATENT).to(tl.pointer_type(tl.float32))
            scales_at += block * CHANNELS // PACKED_BLOCK
            scales = tl.load(scales_at, mask=live[:, None], other=0.0)
            score *= scales
        # the next tile's, so that its rows need no wait for where they are
        place += ROWS
        loc = tl.load(locs + place, mask=place < last, other=0).to(tl.int64)
        score = tl.where(live[:, None], tl.sum(score, axis=0) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=0))
        weight = tl.exp2(score - higher[None, :])
        fade = tl.exp2(top - higher)
        normaliser = normaliser * fade + tl.sum(weight, axis=0)
        top = higher
        sums *= fade[None, :, None]
        share = tl.broadcast_to(weight[None, :, :], (BLOCKS, ROWS, HEADS))
        if FORMAT == "fp8_packed":
            share *= scales
        for _ in tl.static_range(PARTS):
            part = casts.round_bf16(share) if INTERPRETED else share.to(tl.bfloat16)
            sums = tl.dot(tl.permute(part, (0, 2, 1)), tile, sums, input_precision="ieee")
            share -= part.to(tl.float32)
    at = partials + (batch * tl.num_programs(0) + split) * (LATENT + 2) * HEADS
    tl.store(at + own, sums)
    tl.store(at + LATENT * HEADS + head, top)
    tl.store(at + (LATENT + 1) * HEADS + head, normaliser)


@triton.jit
def load_tile(row, live, channel, FORMAT: tl.constexpr):
    """[BLOCKS, rows, CHANNELS]: the rows at `row` [rows, 1], codes without their scales; 0 where
    not `live`."""
    mask = live[:, None] & (channel >= 0)
    if FORMAT == "bf16":
        at = row.to(tl.pointer_type(tl.int16)) + channel
        tile = bf16_operand(tl.load(at, mask=mask, other=0))
    else:
        code = tl.load(row + channel, mask=mask, other=0)
        if INTERPRETED:
            tile = casts.e4m3_value(code)
        else:
            tile = tl.inline_asm_elementwise(E4M3_TO_BF16, "=r,=r,r", [code], tl.bfloat16, False, 4)
    return tile


@triton.jit
def bf16_operand(bits):
    """int16 bf16 `bits` as an operand of a product; in float32 for the interpreter, which would
    multiply bf16 numbers as the integers that it keeps them in."""
    return casts.bf16_value(bits) if INTERPRETED else bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def combine_kernel(
    partials,
    out,
    splits,
    LATENT: tl.constexpr,
    CHANNELS: tl.constexpr,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """One program for CHANNELS channels of a request's head, over all its splits at once."""
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    split = tl.arange(0, SPLITS)
    found = split < splits
    at = partials + (batch * splits + split) * ((LATENT + 2) * HEADS)
    top = tl.load(at + LATENT * HEADS + head, mask=found, other=LOWEST)
    normaliser = tl.load(at + (LATENT + 1) * HEADS + head, mask=found, other=0.0)
    at = (at + head * LATENT)[:, None] + channel
    sums = tl.load(at, mask=found[:, None], other=0.0)
    weight = tl.exp2(top - tl.max(top, axis=0))
    normaliser = tl.sum(normaliser * weight, axis=0)
    total = tl.sum(sums * weight[:, None], axis=0)
    own = (batch * tl.num_programs(1) + head) * LATENT + channel
    tl.store(out + own, total / tl.where(normaliser == 0.0, 1.0, normaliser))
