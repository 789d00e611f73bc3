"""Paged index scores of a decode step: scale_j * sum_h w_h relu(q_h . k_j).

DeepSeek-V3.2's lightning indexer over pooled keys (SGLang #42178).  The stage reads each visible
key once, 132 bytes, and is bound by that.  Groups lie on M of the product and heads on N, so that
32 heads pad nothing and a key goes from memory to the tensor core once.

Keys and query are widened to float16, in which every e4m3 value is exact.  Hopper's FP8 products
keep some 14 bits of a sum (DeepSeek-V3, arXiv 2412.19437, section 3.3.2), which moves a score by
1e-4 of itself and leaves the bound of reference/bounded.py; its float16 products keep float32's.
That takes a third of the tensor cores' time (62 flop a byte at 4.3 TB/s) and moves no more bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.kernels import pooled_key, top_groups
from optimized.kernels.backends import use_triton
from optimized.kernels.top_groups import PEAK

TILE = 64
"""Most groups a step: an index page at the real geometry, and the least M of a wgmma."""

TILES = 8
"""Tiles a program, so that reading the query again for each program adds 6 % of L2 reads."""

FEW_TILES = 2
"""Tiles a program while all programs fit on the GPU together: latency counts then, not reads."""

RESIDENT = 132 * 4
"""Programs that an H200 certainly holds at once, by their registers."""

STAGES = 3
"""Two tiles in flight in each program while it works on a third: 64 KB an SM with 4 programs, where
4.2 TB/s at 800 ns of latency needs 26 KB.  On an H200 point A took 68.5 us with 3, 73.0 with 4 and
82.1 with 5 (docs/evidence/2026-11-30-h200-kernels.md).  Triton copies keys ahead by itself; the
page of the tile after next and the scales of the next one are carried along by hand, since it would
wait for both in each step."""

WARPS = 4


def index_scores(
    q: Tensor,
    w: Tensor,
    index_pool: Tensor,
    table: Tensor,
    visible: Tensor,
    score: Tensor,
    peaks: Tensor,
    *,
    index_page_size: int,
    backend: str,
) -> None:
    """Write the scores of one query a request, and what `top_groups` needs of them.

    Args:
        q: [batch, heads, index_dim] uint8, e4m3 codes.
        w: [batch, heads] float32, the query's scale included.
        index_pool: [pages, index_page_size * (index_dim + 4)] uint8.
        table: [batch, pages of a request] int32, logical pages; entries beyond what a
            request sees may hold anything.
        visible: [batch] int32, groups that each query sees; 0 in rows beyond the batch.
        score: [batch, groups] float32, written whole: -inf from `visible` on.  `groups` is at
            most index_page_size times the table's columns.
        peaks: [batch, at least cdiv(groups, PEAK)] int32, written as far as `visible`: the
            greatest sort key of each PEAK groups.  Rows of a multiple of 16 are read faster.
    """
    batch, heads, dim = q.shape
    groups = score.shape[1]
    if not use_triton(backend, index_scores_kernel, index_pool):
        scores_by_torch(q, w, index_pool, table, visible, score, index_page_size=index_page_size)
        own = top_groups.peaks_of(score)
        peaks[:, : own.shape[1]] = own
        return
    tile = min(TILE, max(16, index_page_size))
    tiles = tiles_per_program(batch * triton.cdiv(groups, tile))
    index_scores_kernel[(triton.cdiv(groups, tile * tiles), batch)](
        q.contiguous(),
        w.contiguous(),
        index_pool,
        table,
        visible,
        score,
        peaks,
        heads,
        groups,
        peaks.stride(0),
        table.stride(0),
        index_pool.shape[1],
        PAGE=index_page_size,
        TILE=tile,
        TILES=tiles,
        HEADS=max(16, triton.next_power_of_2(heads)),
        DIM=dim,
        PEAK=PEAK,
        num_warps=WARPS,
        num_stages=STAGES,
    )


def tiles_per_program(tiles: int) -> int:
    """How many of a batch's tiles a program takes."""
    return FEW_TILES if tiles <= FEW_TILES * RESIDENT else TILES


def scores_by_torch(
    q: Tensor,
    w: Tensor,
    index_pool: Tensor,
    table: Tensor,
    visible: Tensor,
    score: Tensor,
    *,
    index_page_size: int,
) -> None:
    """`index_scores` in torch: dot products exact, one rounding, then heads in order."""
    group = torch.arange(score.shape[1], device=score.device)
    seen = group < visible[:, None]
    page = table.long().gather(1, (group // index_page_size).expand_as(score))
    slot = page * index_page_size + group % index_page_size
    at = pooled_key.page_rows(slot.masked_fill(~seen, 0), index_page_size=index_page_size)
    keys, scales = pooled_key.page_views(index_pool, index_page_size=index_page_size)
    key, query = (x.view(torch.float8_e4m3fn).double() for x in (keys[at], q))
    dots = torch.bmm(query, key.mT).relu_().float()
    total = dots[:, 0] * w[:, :1]
    for head in range(1, q.shape[1]):
        total += dots[:, head] * w[:, head, None]
    total *= scales[at].view(torch.float32)[..., 0]
    score.copy_(total.masked_fill_(~seen, float("-inf")))


@triton.jit
def index_scores_kernel(
    q,
    w,
    index_pool,
    table,
    visible,
    score,
    peaks,
    heads,
    groups,
    peaks_stride,
    table_stride,
    page_bytes,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PEAK: tl.constexpr,
):
    """One program for TILES tiles of a request's groups."""
    first = tl.program_id(0) * (TILE * TILES)
    request = tl.program_id(1).to(tl.int64)
    seen = tl.minimum(tl.load(visible + request), groups)
    head = tl.arange(0, HEADS)
    channel = tl.arange(0, DIM)
    real = head < heads
    weight = tl.load(w + request * heads + head, mask=real, other=0.0)
    query_at = q + (request * heads + head)[:, None] * DIM + channel
    query = tl.trans(e4m3_half(tl.load(query_at, mask=real[:, None], other=0)))
    table += request * table_stride
    score += request * groups
    peaks += request * peaks_stride
    inside = tl.arange(0, TILE)
    block = tl.arange(0, TILE // PEAK)
    used = tl.cdiv(tl.minimum(tl.maximum(seen - first, 0), TILE * TILES), TILE)
    owner = owners(table, first, seen, groups, PAGE, TILE)
    page = index_pool + owner.to(tl.int64) * page_bytes
    row = (first + inside) % PAGE
    scale = tl.load(scales_at(page, PAGE * DIM) + row, mask=first + inside < seen, other=0.0)
    owner = owners(table, first + TILE, seen, groups, PAGE, TILE)
    for tile in range(used):
        start = first + tile * TILE
        group = start + inside
        # keys of the last page that are not visible yet are read too; nothing of them is kept
        key = e4m3_half(tl.load((page + (group % PAGE) * DIM)[:, None] + channel))
        page = index_pool + owner.to(tl.int64) * page_bytes
        after = group + TILE
        coming = tl.load(scales_at(page, PAGE * DIM) + after % PAGE, mask=after < seen, other=0.0)
        owner = owners(table, start + 2 * TILE, seen, groups, PAGE, TILE)
        dots = tl.dot(key, query)
        # a NaN is not hidden: it is a stored row that should never have been read
        part = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * weight
        total = tl.where(group < seen, tl.sum(part, axis=1) * scale, float("-inf"))
        tl.store(score + group, total, mask=group < groups)
        peak = tl.max(tl.reshape(top_groups.sort_key(total), (TILE // PEAK, PEAK)), axis=1)
        tl.store(peaks + start // PEAK + block, peak, mask=start + block * PEAK < seen)
        scale = coming
    for tile in range(used, TILES):
        group = first + tile * TILE + inside
        tl.store(score + group, float("-inf"), mask=group < groups)


@triton.jit
def e4m3_half(code):
    """float16 of uint8 e4m3 `code`, exactly."""
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def owners(table, start, seen, groups, PAGE: tl.constexpr, TILE: tl.constexpr):
    """The logical page of each group of the tile at `start`: one where the tile lies in one, and
    then it may be a page that is not seen, to be thrown away: waiting for `visible` takes time."""
    if PAGE % TILE == 0:
        owner = tl.load(table + start // PAGE, mask=start < groups, other=0)
    else:
        group = start + tl.arange(0, TILE)
        owner = tl.load(table + group // PAGE, mask=group < seen, other=0)
    return owner


@triton.jit
def scales_at(page, KEY_BYTES: tl.constexpr):
    """Pointers to a page's scales, which lie behind its keys."""
    return (page + KEY_BYTES).to(tl.pointer_type(tl.float32))
