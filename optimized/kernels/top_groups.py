"""The groups of the highest scores, ascending, expanded to positions, the tail with them.

One program a request, one launch.  It never looks at most of the scores: `index_scores` has left
the greatest of each PEAK of them, and the top `most` groups lie in the `most` blocks of the
greatest peaks (of equal ones the lower block).  For were a top group in another block, each of
those blocks would hold a group that comes before it.  So the program selects blocks and then
groups in these: at point A it looks at 2,149 peaks and 8,192 scores in place of 34,384.

Both selections search the sort key of the cut with all candidates in registers: a step counts
them, without a histogram, shared-memory atomics, or another program to wait for.  It counts at
the middle of the interval and where interpolation guesses the cut to be, and ends at the first
key that exactly `most` reach: after 5 to 8 steps, of at most 32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.kernels import select
from optimized.kernels.backends import BackendError, use_triton

PEAK = 16
"""Groups a peak stands for: of 65,536 groups 4,096 peaks, which choose 8,192 candidates."""

WARPS = 16
"""8,192 candidates are 16 registers a thread.  On an H200: 8 and 16 took 17.0 and 16.3 us at A."""

MOST_CANDIDATES = 1 << 14
"""64 registers a thread: 262,144 groups, 1,024 of them selected.  Two counts share 32 bits."""

LEAST_KEY = tl.constexpr(-(2**31))
"""The sort key of what is not there."""

NAN_KEY = tl.constexpr(0x7F800001)
"""That of a NaN, just above infinity's."""


def top_groups(
    score: Tensor,
    peaks: Tensor,
    position: Tensor,
    table: Tensor,
    groups: Tensor,
    blocks: Tensor,
    selected: Tensor,
    locs: Tensor | None,
    *,
    kpool: int,
    index_page_size: int,
    backend: str,
) -> None:
    """Select each query's groups, and write them and what they expand to.

    Of equal scores the lower group is selected first.  A NaN counts as the highest.

    Args:
        score: [batch, n] float32, of which a query sees the first (position + 1) // kpool;
            the others, of whatever bits, change nothing.
        peaks: [batch, at least cdiv(n, PEAK)] int32, as `index_scores` writes them.
        position: [batch] int64, the newest position; -1 in rows beyond the batch.
        table: [batch, pages of a request] int32, logical pages of index_page_size * kpool locs.
        groups: [batch, most] int32, written: ascending, then -1.
        blocks: [batch, most] int32, scratch.
        selected: [batch, at least most * kpool + kpool - 1] int32 or int64, written: positions
            of the groups, the tail, then -1.
        locs: the same shape, written: their locs, 0 for -1.

    Raises:
        BackendError: for more groups than a program holds.
    """
    batch, most = groups.shape
    if not use_triton(backend, top_groups_kernel, score):
        select_by_torch(score, position, groups, selected, kpool=kpool)
        if locs is not None:
            size = index_page_size * kpool
            at = selected.long().clamp(min=0)
            loc = table.long().gather(1, at // size) * size + at % size
            locs.copy_(loc.masked_fill_(selected < 0, 0))
        return
    blocks_of_all = triton.next_power_of_2(triton.cdiv(score.shape[1], PEAK))
    kept = triton.next_power_of_2(most)
    if max(blocks_of_all, kept * PEAK) > MOST_CANDIDATES:
        raise BackendError(
            f"the Triton selection takes {MOST_CANDIDATES // PEAK} of {MOST_CANDIDATES * PEAK} "
            f"groups at most and was asked for {most} of {score.shape[1]}: choose backend torch, "
            "or a smaller topk or maximum context."
        )
    top_groups_kernel[(batch,)](
        score,
        peaks,
        position,
        table,
        groups,
        blocks,
        selected,
        selected if locs is None else locs,
        score.shape[1],
        peaks.stride(0),
        table.stride(0),
        selected.shape[1],
        KPOOL=kpool,
        PAGE=index_page_size,
        PEAK=PEAK,
        MOST=most,
        BLOCKS=blocks_of_all,
        KEPT=kept,
        INSIDE=triton.next_power_of_2(most * kpool),
        REST=triton.next_power_of_2(max(1, selected.shape[1] - most * kpool)),
        LOCS=locs is not None,
        num_warps=WARPS,
    )


def select_by_torch(
    score: Tensor, position: Tensor, groups: Tensor, selected: Tensor, *, kpool: int
) -> None:
    """`top_groups` in torch, without locs."""
    most = groups.shape[1]
    seen = torch.arange(score.shape[1], device=score.device) < (position[:, None] + 1) // kpool
    # on CUDA a sort puts NaNs with a sign last
    unsigned = score.masked_fill(score.isnan(), float("nan"))
    hidden = unsigned.masked_fill(~seen, float("-inf"))
    # stable: of equal scores the lower group stays before, a visible one before the invisible
    best = hidden.sort(dim=1, descending=True, stable=True).indices[:, :most]
    found = seen.gather(1, best)
    best = best.masked_fill(~found, score.shape[1]).sort(dim=1).values
    groups.fill_(-1)
    groups[:, : best.shape[1]] = best.masked_fill(best == score.shape[1], -1)
    selected.copy_(
        select.expand(
            groups.long(), position, kpool=kpool, width=selected.shape[1], backend="torch"
        )
    )


def peaks_of(score: Tensor) -> Tensor:
    """[batch, cdiv(n, PEAK)] int32: the greatest sort key of each PEAK of `score` [batch, n]."""
    bits = score.view(torch.int32)
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = key.masked_fill(score == 0, 0).masked_fill(score.isnan(), NAN_KEY.value)
    pad = -score.shape[1] % PEAK
    key = torch.nn.functional.pad(key, (0, pad), value=LEAST_KEY.value)
    return key.unflatten(1, (-1, PEAK)).amax(dim=2)


@triton.jit
def top_groups_kernel(
    score,
    peaks,
    position,
    table,
    groups,
    blocks,
    selected,
    locs,
    n,
    peaks_stride,
    table_stride,
    width,
    KPOOL: tl.constexpr,
    PAGE: tl.constexpr,
    PEAK: tl.constexpr,
    MOST: tl.constexpr,
    BLOCKS: tl.constexpr,
    KEPT: tl.constexpr,
    INSIDE: tl.constexpr,
    REST: tl.constexpr,
    LOCS: tl.constexpr,
):
    """One program for one request."""
    request = tl.program_id(0).to(tl.int64)
    newest = tl.load(position + request).to(tl.int32)
    seen = tl.minimum((newest + 1) // KPOOL, n)
    score += request * n
    groups += request * MOST
    floor = LEAST_KEY + 1
    # what is not seen is loaded with the rest, to wait for `position` later, and then dropped
    if BLOCKS > KEPT:
        block = tl.arange(0, BLOCKS)
        peak_at = peaks + request * peaks_stride + block
        peak = tl.load(peak_at, mask=block < peaks_stride, other=0)
        peak = tl.where(block * PEAK < seen, peak, LEAST_KEY)
        chosen, rank, floor = highest(peak, floor, MOST)
        blocks += request * MOST
        tl.store(blocks + rank, block, mask=chosen)
        kept = tl.minimum(tl.cdiv(seen, PEAK), MOST)
        tl.debug_barrier()
        place = tl.arange(0, KEPT * PEAK)
        block = tl.load(blocks + place // PEAK, mask=place < kept * PEAK, other=n)
        group = block * PEAK + place % PEAK
    else:
        group = tl.arange(0, BLOCKS * PEAK)
    found = tl.load(score + group, mask=group < n, other=0.0)
    key = tl.where(group < seen, sort_key(found), LEAST_KEY)
    chosen, rank, _ = highest(key, floor, MOST)
    tl.store(groups + rank, group, mask=chosen)
    count = tl.minimum(seen, MOST)
    place = tl.arange(0, KEPT)
    tl.store(groups + place, -1, mask=(place >= count) & (place < MOST))
    tl.debug_barrier()
    table += request * table_stride
    selected += request * width
    locs += request * width
    column = tl.arange(0, INSIDE)
    own = tl.load(groups + column // KPOOL, mask=column < count * KPOOL, other=0)
    own = own * KPOOL + column % KPOOL
    end = MOST * KPOOL
    put(selected, locs, table, own, column, end, count, newest, KPOOL, PAGE, LOCS)
    column = end + tl.arange(0, REST)
    put(selected, locs, table, column, column, width, count, newest, KPOOL, PAGE, LOCS)


@triton.jit
def put(
    selected,
    locs,
    table,
    own,
    column,
    end,
    count,
    newest,
    KPOOL: tl.constexpr,
    PAGE: tl.constexpr,
    LOCS: tl.constexpr,
):
    """Write the columns before `end` of a request's row: positions `own` of its `count` groups,
    then the tail, then -1."""
    tail = (newest + 1) // KPOOL * KPOOL + column - count * KPOOL
    at = tl.where(column < count * KPOOL, own, tl.where(tail <= newest, tail, -1))
    tl.store(selected + column, at, mask=column < end)
    if LOCS:
        real = (at >= 0) & (column < end)
        owner = tl.load(table + at // (PAGE * KPOOL), mask=real, other=0)
        loc = owner.to(tl.int64) * (PAGE * KPOOL) + at % (PAGE * KPOOL)
        tl.store(locs + column, tl.where(real, loc, 0), mask=column < end)


@triton.jit
def highest(key, floor, MOST: tl.constexpr):
    """(chosen, rank, cut): the MOST highest sort keys of `key` [n], or all if there are fewer; of
    equal ones the first.

    Keys below `floor`, which at least MOST reach or which is LEAST_KEY + 1, are not looked at.
    `rank` counts the chosen; `cut` is a floor for what they stand for.
    """
    there = key >= floor
    low = tl.min(tl.where(there, key, NAN_KEY))
    high = tl.max(key) + 1
    from_low = tl.sum(there.to(tl.int32))
    from_high = from_low * 0
    # from_low keys reach `low`, at least MOST; from_high, fewer than MOST, reach `high`
    while (from_low > MOST) & (low + 1 < high):
        share = (from_low - MOST).to(tl.float32) / (from_low - from_high).to(tl.float32)
        guess = low.to(tl.float32) + (high.to(tl.float32) - low.to(tl.float32)) * share
        guess = tl.minimum(tl.maximum(guess.to(tl.int32), low + 1), high - 1)
        middle = (low & high) + ((low ^ high) >> 1)
        lower, upper = tl.minimum(guess, middle), tl.maximum(guess, middle)
        # two counts in one sum
        reached = tl.sum((key >= lower).to(tl.int32) + ((key >= upper).to(tl.int32) << 16))
        from_lower, from_upper = reached & 0xFFFF, reached >> 16
        if from_upper >= MOST:
            low, from_low = upper, from_upper
        elif from_lower >= MOST:
            low, from_low = lower, from_lower
            high, from_high = upper, from_upper
        else:
            high, from_high = lower, from_lower
    chosen = key >= low
    if from_low > MOST:
        # more keys equal the cut than there is room for
        equal = key == low
        chosen = (key > low) | (equal & (so_far(equal) <= MOST - from_high))
    cut = tl.where(from_low >= MOST, low, LEAST_KEY + 1)
    return chosen, so_far(chosen) - 1, cut


@triton.jit
def so_far(chosen):
    """[n] int32: how many are chosen up to each place.

    Rows of what one warp holds are summed by themselves: a scan over the whole block would add
    every warp's every row to every thread's.
    """
    ROW: tl.constexpr = 128 if chosen.shape[0] >= 128 else chosen.shape[0]
    rows = tl.reshape(chosen.to(tl.int32), (chosen.shape[0] // ROW, ROW))
    total = tl.sum(rows, axis=1)
    before = tl.cumsum(total, axis=0) - total
    return tl.reshape(tl.cumsum(rows, axis=1) + before[:, None], chosen.shape)


@triton.jit
def sort_key(x):
    """int32 in the order of float32 `x`: -0 and 0 are one, NaNs the highest, none LEAST_KEY."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x == x, key, NAN_KEY)
