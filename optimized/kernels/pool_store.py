"""Prefill's write of pooled keys: groups that close in a chunk, some with slots in the ring."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.kernels import casts, pooled_key
from optimized.kernels.backends import use_triton


def pool_store(
    index_pool: Tensor,
    slots: Tensor,
    src: Tensor,
    ring: Tensor,
    chunk: Tensor,
    ape: Tensor,
    *,
    index_page_size: int,
    round_scale: bool,
    backend: str,
) -> None:
    """Pool each group and store its index row.

    Args:
        index_pool: [pages, index_page_size * (index_dim + 4)] uint8.
        slots: [groups] int64, where each group goes; slots of page 0 are padding.
        src: [groups, kpool] int64, a row of the ring if below its number of rows, else (less
            that number) of the chunk.
        ring, chunk: [ring rows, 2 * index_dim] and [positions, 2 * index_dim] bf16, contiguous:
            in each row a key, then its gate.
        ape: [kpool, index_dim] float32.
    """
    if not use_triton(backend, pool_store_kernel, index_pool):
        keys_and_gates = torch.cat((ring, chunk))[src.t()].chunk(2, dim=2)
        pooled_key.store_groups(
            index_pool,
            slots,
            *keys_and_gates,
            ape,
            index_page_size=index_page_size,
            round_scale=round_scale,
        )
        return
    groups, kpool = src.shape
    pool_store_kernel[(triton.cdiv(groups, pooled_key.BLOCK_ROWS),)](
        index_pool,
        slots,
        src.contiguous(),
        ring.view(torch.int16),
        chunk.view(torch.int16),
        ape,
        groups,
        ring.shape[0],
        index_pool.shape[1],
        KPOOL=kpool,
        PAGE=index_page_size,
        ROWS=pooled_key.BLOCK_ROWS,
        DIM=ring.shape[1] // 2,
        ROUND_SCALE=round_scale,
    )


@triton.jit
def pool_store_kernel(
    index_pool,
    slots,
    src,
    ring,
    chunk,
    ape,
    groups,
    ring_rows,
    page_bytes,
    KPOOL: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    ROUND_SCALE: tl.constexpr,
):
    """One program for ROWS groups."""
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = group < groups
    channel = tl.arange(0, DIM)
    top = tl.full((ROWS, DIM), float("-inf"), tl.float32)
    normaliser = tl.zeros((ROWS, DIM), tl.float32)
    total = tl.zeros((ROWS, DIM), tl.float32)
    for s in tl.static_range(KPOOL):
        row = tl.load(src + group * KPOOL + s, mask=live, other=0)
        key = load_source(ring, chunk, row, ring_rows, live, DIM)
        gate = load_source(ring + DIM, chunk + DIM, row, ring_rows, live, DIM)
        gate += tl.load(ape + s * DIM + channel)
        top, normaliser, total = pooled_key.fold(top, normaliser, total, gate, key)
    slot = tl.load(slots + group, mask=live, other=0)
    pooled_key.store_rows(
        index_pool, slot, live, normaliser, total, page_bytes, PAGE, ROWS, DIM, ROUND_SCALE
    )


@triton.jit
def load_source(ring, chunk, row, ring_rows, live, DIM: tl.constexpr):
    """[rows, DIM] float32: the first half of row `row` of the ring, or of the chunk from ring_rows
    on."""
    channel = tl.arange(0, DIM)
    in_ring = row < ring_rows
    from_ring = ring + row[:, None] * (2 * DIM) + channel
    from_chunk = chunk + (row - ring_rows)[:, None] * (2 * DIM) + channel
    ring_bits = tl.load(from_ring, mask=(live & in_ring)[:, None], other=0)
    chunk_bits = tl.load(from_chunk, mask=(live & ~in_ring)[:, None], other=0)
    return casts.bf16_value(ring_bits | chunk_bits)
