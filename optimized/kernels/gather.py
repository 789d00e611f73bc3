"""Copy stored rows out of a pool, byte for byte."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.kernels import pooled_key
from optimized.kernels.backends import use_triton

BLOCK_ROWS = 16
BLOCK_BYTES = 256


def gather_rows(pool: Tensor, locs: Tensor, *, backend: str) -> Tensor:
    """[n, row bytes] uint8: the rows of `pool` [locs, row bytes] at `locs` [n] int64."""
    if not use_triton(backend, gather_rows_kernel, pool):
        return pool.index_select(0, locs)
    count, row_bytes = len(locs), pool.shape[1]
    out = pool.new_empty((count, row_bytes))
    grid = (triton.cdiv(count, BLOCK_ROWS), triton.cdiv(row_bytes, BLOCK_BYTES))
    gather_rows_kernel[grid](pool, locs, out, count, row_bytes, ROWS=BLOCK_ROWS, BYTES=BLOCK_BYTES)
    return out


def gather_index(
    index_pool: Tensor, slots: Tensor, *, index_page_size: int, backend: str
) -> Tensor:
    """[n, index_dim + 4] uint8: key bytes and scale bytes of the index rows at `slots` [n] int64
    of `index_pool` [pages, index_page_size * (index_dim + 4)]."""
    if use_triton(backend, gather_index_kernel, index_pool):
        dim = index_pool.shape[1] // index_page_size - pooled_key.SCALE_BYTES
        out = index_pool.new_empty((len(slots), dim + pooled_key.SCALE_BYTES))
        gather_index_kernel[(triton.cdiv(len(slots), BLOCK_ROWS),)](
            index_pool,
            slots,
            out,
            len(slots),
            index_pool.shape[1],
            PAGE=index_page_size,
            ROWS=BLOCK_ROWS,
            DIM=dim,
            SCALE=pooled_key.SCALE_BYTES,
        )
        return out
    at = pooled_key.page_rows(slots, index_page_size=index_page_size)
    keys, scales = pooled_key.page_views(index_pool, index_page_size=index_page_size)
    return torch.cat((keys[at], scales[at]), dim=1)


@triton.jit
def gather_rows_kernel(pool, locs, out, count, row_bytes, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """One program for ROWS rows and BYTES of their bytes."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    live = (row < count)[:, None] & (byte < row_bytes)[None, :]
    loc = tl.load(locs + row, mask=row < count, other=0)
    stored = tl.load(pool + loc[:, None] * row_bytes + byte, mask=live)
    tl.store(out + row.to(tl.int64)[:, None] * row_bytes + byte, stored, mask=live)


@triton.jit
def gather_index_kernel(
    index_pool,
    slots,
    out,
    count,
    page_bytes,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    SCALE: tl.constexpr,
):
    """One program for ROWS index rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < count
    slot = tl.load(slots + row, mask=live, other=0)
    page = index_pool + slot // PAGE * page_bytes
    to = out + row.to(tl.int64)[:, None] * (DIM + SCALE)
    channel = tl.arange(0, DIM)
    key_at = page + slot % PAGE * DIM
    tl.store(to + channel, tl.load(key_at[:, None] + channel, mask=live[:, None]), live[:, None])
    byte = tl.arange(0, SCALE)
    scale_at = page + PAGE * DIM + slot % PAGE * SCALE
    scale = tl.load(scale_at[:, None] + byte, mask=live[:, None])
    tl.store(to + DIM + byte, scale, mask=live[:, None])
