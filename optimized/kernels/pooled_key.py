"""The pooled key of a closed group: pool, rotate, quantise, store.

docs/model.md, "Pooled key"; SGLang #42178.  `pool_store` and `decode_update` differ only in
where the kpool keys and gates come from.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.kernels import casts, kv_store

SCALE_BYTES = 4
BLOCK_ROWS = 8


def store_groups(
    index_pool: Tensor,
    slots: Tensor,
    keys: Tensor,
    gates: Tensor,
    ape: Tensor,
    *,
    index_page_size: int,
    round_scale: bool,
) -> None:
    """Write one index row for each group, at `slots` [groups] int64.

    `keys` and `gates` are [kpool, groups, index_dim] bf16, `ape` [kpool, index_dim] float32.
    """
    codes, scale = quantise(rotate(pool(keys, gates, ape)), round_scale=round_scale)
    at = page_rows(slots, index_page_size=index_page_size)
    key_rows, scale_rows = page_views(index_pool, index_page_size=index_page_size)
    key_rows.index_put_(at, codes)
    scale_rows.index_put_(at, scale.view(torch.uint8))


def pool(keys: Tensor, gates: Tensor, ape: Tensor) -> Tensor:
    """[groups, index_dim] bf16: per channel, the keys' mean under softmax(gate + ape), summed in
    slot order, which no batch changes."""
    # converted first: operators on two types at once are slow on a CPU
    weight = gates.float() + ape[:, None]
    weight = weight.sub_(weight.amax(dim=0)).exp_()
    total, *others = torch.stack((weight, weight * keys.float()), dim=1).unbind()
    for other in others:
        total += other
    normaliser, mean = total.unbind()
    return mean.div_(normaliser).bfloat16()


def rotate(rows: Tensor) -> Tensor:
    """[groups, index_dim] float32: `rows` (bf16) times the normalised Hadamard matrix, rounded
    to bf16."""
    # in float64 such sums are exact, so neither their order nor the batch can show
    dim = rows.shape[1]
    return (rows.double() @ hadamard(dim, rows.device)).mul_(dim**-0.5).bfloat16().float()


@lru_cache
def hadamard(dim: int, device: torch.device) -> Tensor:
    """[dim, dim] float64 of +-1: the Hadamard matrix in Sylvester's order."""
    matrix = torch.ones(1, 1, dtype=torch.float64, device=device)
    while len(matrix) < dim:
        matrix = torch.kron(torch.tensor([[1, 1], [1, -1]]).to(matrix), matrix)
    return matrix


def quantise(rows: Tensor, *, round_scale: bool) -> tuple[Tensor, Tensor]:
    """e4m3 codes [groups, index_dim] uint8 and scales [groups, 1] float32 of `rows`."""
    scale = kv_store.fp8_scale(rows)
    if round_scale:
        scale = next_power_of_two(scale)
    return kv_store.encode_e4m3(rows / scale), scale


def next_power_of_two(scale: Tensor) -> Tensor:
    """The least power of two that is not below `scale` (positive, normal float32)."""
    # a carry out of the mantissa steps the exponent, unless the mantissa is zero
    bits = scale.view(torch.int32) + 0x7FFFFF
    return bits.bitwise_and_(0x7F800000).view(torch.float32)


def page_rows(slots: Tensor, *, index_page_size: int) -> tuple[Tensor, Tensor]:
    """Page, and row in it, of index slots [n] int64."""
    return torch.floor_divide(slots, index_page_size), torch.remainder(slots, index_page_size)


def page_views(index_pool: Tensor, *, index_page_size: int) -> tuple[Tensor, Tensor]:
    """Views of `index_pool` [pages, page bytes]: its keys [pages, index_page_size, index_dim]
    and, behind all the keys of a page, its scales [pages, index_page_size, 4]."""
    pages, page_bytes = index_pool.shape
    scale_bytes = SCALE_BYTES * index_page_size
    key_bytes = page_bytes - scale_bytes
    shape = (pages, index_page_size, -1)
    keys, scales = index_pool.narrow(1, 0, key_bytes), index_pool.narrow(1, key_bytes, scale_bytes)
    return keys.view(shape), scales.view(shape)


@triton.jit
def fold(top, normaliser, total, gate, key):
    """Take one more slot into a softmax-weighted sum that is scaled by exp(-top): Milakov and
    Gimelshein's online softmax.  Returns the new top, normaliser and total."""
    higher = tl.maximum(top, gate)
    rescale = tl.exp(top - higher)
    weight = tl.exp(gate - higher)
    return higher, normaliser * rescale + weight, total * rescale + weight * key


@triton.constexpr_function
def log2(power_of_two):
    return power_of_two.bit_length() - 1


@triton.jit
def store_rows(
    index_pool,
    slot,
    live,
    normaliser,
    total,
    page_bytes,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    ROUND_SCALE: tl.constexpr,
):
    """Finish, rotate, quantise and store pooled keys [ROWS, DIM] at index slots `slot`, where
    `live`."""
    key = rotate_rows(casts.round_bf16(tl.div_rn(total, normaliser)), ROWS, DIM)
    scale = casts.fp8_scale(key)
    if ROUND_SCALE:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    code = casts.e4m3_code(tl.div_rn(key, tl.broadcast_to(scale[:, None], (ROWS, DIM))))
    page = index_pool + slot // PAGE * page_bytes
    key_at = page + slot % PAGE * DIM
    scale_at = (page + PAGE * DIM).to(tl.pointer_type(tl.float32)) + slot % PAGE
    tl.store(key_at[:, None] + tl.arange(0, DIM), code, mask=live[:, None])
    tl.store(scale_at, scale, mask=live)


@triton.jit
def rotate_rows(x, ROWS: tl.constexpr, DIM: tl.constexpr):
    """`rotate` of `x` [ROWS, DIM], float32 that hold bf16 values.

    A butterfly: each stage takes the highest bit of the channel off and puts it back as the
    lowest, so that after log2(DIM) stages every bit is in its place again.
    """
    x = x.to(tl.float64)
    for _ in tl.static_range(log2(DIM)):
        low, high = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, DIM // 2)), (0, 2, 1)))
        x = tl.reshape(tl.join(low + high, low - high), (ROWS, DIM))
    return casts.round_bf16((x * DIM**-0.5).to(tl.float32))
