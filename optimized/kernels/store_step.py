"""All that a decode step stores of one DSA layer, in one launch.

A request's new key and gate, the group that they may close, and its KV row: `decode_update` and
`kv_store` side by side in one grid, so bitwise what the two leave.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.kernels import decode_update, kv_store
from optimized.kernels.backends import use_triton
from reference.geometry import PACKED_BLOCK, RowFormat

WARPS = 2
"""Of a program.  On an H200: 1, 2 and 4 took 2.5, 2.2 and 2.3 us."""


def store_step(
    index_pool: Tensor,
    ring_key: Tensor,
    ring_gate: Tensor,
    key: Tensor,
    gate: Tensor,
    ring_slot: Tensor,
    position: Tensor,
    index_slot: Tensor,
    ape: Tensor,
    kv_pool: Tensor,
    loc: Tensor,
    row: Tensor,
    *,
    kpool: int,
    index_page_size: int,
    round_scale: bool,
    row_format: RowFormat,
    backend: str,
) -> None:
    """`decode_update` of the first nine, and `kv_store` of `row` into `kv_pool` at `loc`.

    Triton allocates nothing and waits for nothing, so it can be captured.

    Args:
        index_pool: [pages, index_page_size * (index_dim + 4)] uint8.
        ring_key, ring_gate: [ring slots, ring_size, index_dim] bf16, of equal strides, a row's
            channels side by side and the rows evenly spaced.
        key, gate: [batch, index_dim] bf16.
        ring_slot, position: [batch] int64.
        index_slot: [batch] int64, 0 where the position closes no group.
        ape: [kpool, index_dim] float32.
        kv_pool: [locs, row_format.row_bytes(latent)] uint8.
        loc: [batch] int64; padding requests have a loc of logical page 0.
        row: [batch, latent] float32.
    """
    if not use_triton(backend, store_step_kernel, index_pool):
        decode_update.decode_update(
            index_pool,
            ring_key,
            ring_gate,
            key,
            gate,
            ring_slot,
            position,
            index_slot,
            ape,
            kpool=kpool,
            index_page_size=index_page_size,
            round_scale=round_scale,
            backend=backend,
        )
        kv_store.kv_store(kv_pool, loc, row, row_format=row_format, backend=backend)
        return
    batch, latent = row.shape
    blocks = triton.cdiv(latent, PACKED_BLOCK)
    store_step_kernel[(batch, blocks + 1)](
        index_pool,
        *(rows.view(torch.int16) for rows in (ring_key, ring_gate, key, gate)),
        ring_slot,
        position,
        index_slot,
        ape,
        kv_pool,
        loc,
        row,
        batch,
        RING_SIZE=ring_key.shape[1],
        RING_STRIDE=ring_key.stride(1),
        PAGE_BYTES=index_pool.shape[1],
        LATENT=latent,
        ROW_BYTES=kv_pool.shape[1],
        KPOOL=kpool,
        PAGE=index_page_size,
        DIM=key.shape[1],
        ROUND_SCALE=round_scale,
        FORMAT=row_format.value,
        BLOCK=PACKED_BLOCK,
        BLOCKS=blocks,
        num_warps=WARPS,
    )


@triton.jit
def store_step_kernel(
    index_pool,
    ring_key,
    ring_gate,
    key,
    gate,
    ring_slot,
    position,
    index_slot,
    ape,
    kv_pool,
    loc,
    row,
    batch,
    RING_SIZE: tl.constexpr,
    RING_STRIDE: tl.constexpr,
    PAGE_BYTES: tl.constexpr,
    LATENT: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    KPOOL: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    ROUND_SCALE: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """A program for each BLOCK channels of a request's KV row, and one for its index key.

    At 48 requests that is 240 programs on 132 multiprocessors: all start at once, so the step
    takes as long as its longest chain, ids to ring rows to the stored key.  Hence the sizes are
    constants: position % RING_SIZE by a number known only at launch would be a 64-bit division
    of some hundred instructions, kpool times.
    """
    if tl.program_id(1) < BLOCKS:
        kv_store.kv_store_kernel(kv_pool, loc, row, batch, LATENT, ROW_BYTES, FORMAT, 1, BLOCK)
    else:
        decode_update.decode_update_kernel(
            index_pool,
            ring_key,
            ring_gate,
            key,
            gate,
            ring_slot,
            position,
            index_slot,
            ape,
            batch,
            RING_SIZE,
            RING_STRIDE,
            PAGE_BYTES,
            KPOOL,
            PAGE,
            1,
            DIM,
            ROUND_SCALE,
        )
