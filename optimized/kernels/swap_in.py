"""HiSparse: selected positions to rows of the hot buffer; what misses is copied from the host.

Residency as in SGLang's HiSparse coordinator, with the faults of its swap-in kernel designed out:
every output cell is written, a position that is selected twice is loaded once, and a host row of
-1 is never read.  Rows are copied as bytes, so row formats differ in `row_bytes` alone.  In this
file -1 stands for nothing wherever an id is expected; all tensors are contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.kernels.backends import use_triton

BLOCK_ROWS = 16
BLOCK_BYTES = 256
SOUGHT = tl.constexpr(2**31 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapPlan:
    """Where the selected positions are once the misses are copied, and which those were.

    Fields:
        rows: [batch, width] int64, device row of each cell; -1 for a void or absent one.
        misses: [batch] int64, positions that are loaded.
        absent: [batch] int64, positions that should be and cannot: without a host row or, which
            no legal geometry allows, without a slot left.
        miss_position, miss_slot: [batch, width] int64, the loaded positions in the order of
            their first cells, and the slots that they take; then -1.
    """

    rows: Tensor
    misses: Tensor
    absent: Tensor
    miss_position: Tensor
    miss_slot: Tensor


def swap_in(
    selection: Tensor,
    length: Tensor,
    tags: Tensor,
    lru: Tensor,
    slot_rows: Tensor,
    host_rows: Tensor,
    host_pool: Tensor,
    device_pool: Tensor,
    *,
    backend: str,
) -> SwapPlan:
    """Make the selected positions of each request resident in one layer, and say where they are.

    A request of at most H positions has position p at slot p, and neither its tags nor its LRU
    order are touched.  A longer one has its newest position at slot H and looks the others up by
    tag; misses take the slots least recently used that are no hit.

    Args:
        selection: [batch, width] int64 positions; a cell outside [0, length) is void.
        length: [batch] int64, the newest position included.
        tags: [batch, H] int64, position at each slot; updated in place.
        lru: [batch, H] int64, slots, the least recently used first; updated in place.
        slot_rows: [batch, H + 1] int64, device row of each slot and of the newest position.
        host_rows: [batch, positions] int64, host row of each position; at least as many
            positions as any request has.
        host_pool: [host rows, row_bytes] uint8; on a GPU pinned memory of the host may be used.
        device_pool: [device rows, row_bytes] uint8; updated in place.
        backend: "torch", "triton", or "tilelang" (compiled to C, on the CPU).
    """
    plan = SwapPlan(
        rows=torch.empty_like(selection),
        misses=torch.empty_like(length),
        absent=torch.empty_like(length),
        miss_position=torch.empty_like(selection),
        miss_slot=torch.empty_like(selection),
    )
    tables = (selection, length, tags, lru, slot_rows, host_rows)
    if backend == "tilelang":
        from optimized.kernels import swap_in_tilelang  # tilelang takes seconds to import

        swap_in_tilelang.plan_misses(plan, *tables)
    elif use_triton(backend, plan_kernel, device_pool):
        launch_plan(plan, *tables)
    else:
        plan_misses(plan, *tables)
    replay(plan, slot_rows, host_rows, host_pool, device_pool, backend=backend)
    return plan


def replay(
    plan: SwapPlan,
    slot_rows: Tensor,
    host_rows: Tensor,
    host_pool: Tensor,
    device_pool: Tensor,
    *,
    backend: str,
) -> None:
    """Copy a plan's misses in the pools of a layer that shares the index of the planned one;
    arguments as for `swap_in`.  The plan's rows are this layer's rows too."""
    sources = entries(host_rows, plan.miss_position).view(-1)
    targets = entries(slot_rows, plan.miss_slot).view(-1)
    copy_rows(host_pool, sources, device_pool, targets, backend=backend)


def backup(
    device_pool: Tensor, host_pool: Tensor, device_rows: Tensor, host_rows: Tensor, *, backend: str
) -> None:
    """Copy device rows [n] int64 to host rows [n] int64; a pair with a -1 is skipped, and 0 is a
    row like any other.  Pools as for `swap_in`."""
    copy_rows(device_pool, device_rows, host_pool, host_rows, backend=backend)


def copy_rows(
    source: Tensor, sources: Tensor, target: Tensor, targets: Tensor, *, backend: str
) -> None:
    """Copy row sources[i] of one pool to row targets[i] of another unless either is -1."""
    if backend == "tilelang":
        from optimized.kernels import swap_in_tilelang

        swap_in_tilelang.copy_rows(source, sources, target, targets)
    elif use_triton(backend, copy_kernel, sources):
        count, row_bytes = len(sources), source.shape[1]
        grid = (triton.cdiv(count, BLOCK_ROWS), triton.cdiv(row_bytes, BLOCK_BYTES))
        copy_kernel[grid](
            source, sources, target, targets, count, row_bytes, ROWS=BLOCK_ROWS, BYTES=BLOCK_BYTES
        )
    else:
        kept = (torch.minimum(sources, targets) >= 0).nonzero().view(-1)
        # index_copy_ moves one element at a time
        word = torch.int32 if source.shape[1] % 4 == 0 else torch.uint8
        rows = source.view(word).index_select(0, sources[kept].to(source.device))
        target.view(word).index_copy_(0, targets[kept].to(target.device), rows.to(target.device))


def entries(table: Tensor, index: Tensor) -> Tensor:
    """[batch, n] int64: entry index[b, i] of table[b], -1 where the index is negative."""
    return table.gather(1, index.clamp_min(0)).masked_fill_(index < 0, -1)


def plan_misses(
    plan: SwapPlan,
    selection: Tensor,
    length: Tensor,
    tags: Tensor,
    lru: Tensor,
    slot_rows: Tensor,
    host_rows: Tensor,
) -> None:
    """Write the plan, and update tags and LRU order; nothing is copied yet."""
    width, size = selection.shape[1], tags.shape[1]
    for counts in (plan.misses, plan.absent):
        counts.zero_()
    for columns in (plan.miss_position, plan.miss_slot):
        columns.fill_(-1)
    newest = length[:, None] - 1
    known = (selection >= 0) & (selection <= newest)
    slot = torch.where(known, selection, -1)
    if int(length.max()) > size:
        # of what a longer request knows, all but the newest position is sought by its tag
        sought = known & (newest >= size) & (selection < newest)
        found = look_up(selection, sought, tags, positions=host_rows.shape[1])
        taken = claim_slots(plan, selection, sought, found, tags, lru, host_rows)
        missed = taken.gather(1, found.clamp(0, width - 1))
        swapped = torch.where(found < 0, found + size, missed)
        slot = torch.where(sought, swapped, slot.clamp_max_(size))
    plan.rows.copy_(entries(slot_rows, slot))


def look_up(selection: Tensor, sought: Tensor, tags: Tensor, *, positions: int) -> Tensor:
    """[batch, width] int64: for each sought cell its position's slot less H, which is negative,
    or the first column that holds the position if no slot does."""
    (batch, size), width = tags.shape, selection.shape[1]
    column = torch.arange(width, device=tags.device).expand_as(selection)
    # entry p + 1 is position p's; each is set before it is read, so the table needs no clearing
    at = torch.where(sought, selection + 1, 0)
    entry = tags.new_empty((batch, positions + 1))
    entry.scatter_(1, at, width)
    entry.scatter_(1, tags + 1, torch.arange(-size, 0, device=tags.device).expand_as(tags))
    return entry.scatter_reduce_(1, at, column, "amin").gather(1, at)


def claim_slots(
    plan: SwapPlan,
    selection: Tensor,
    sought: Tensor,
    found: Tensor,
    tags: Tensor,
    lru: Tensor,
    host_rows: Tensor,
) -> Tensor:
    """Give slots to the misses, in the plan, the tags and the LRU order; [batch, width] int64:
    the slot taken for each cell that is the first of a loaded position, else -1."""
    (batch, size), width = tags.shape, selection.shape[1]
    hit = torch.where(sought & (found < 0), found + size, size)
    stays = tags.new_zeros((batch, size + 1), dtype=torch.bool).scatter_(1, hit, True)
    evictable = ~stays.gather(1, lru)
    room = evictable.sum(dim=1)
    first = sought & (found == torch.arange(width, device=tags.device))
    loaded = entries(host_rows, torch.where(first, selection, -1)) >= 0
    rank = loaded.cumsum(dim=1) - 1
    loaded &= rank < room[:, None]
    torch.sum(loaded, dim=1, out=plan.misses)
    torch.sub(first.sum(dim=1), plan.misses, out=plan.absent)
    touch(lru, evictable, room[:, None], plan.misses[:, None])

    cell = loaded.view(-1).nonzero().view(-1)
    request = cell // width
    order, position = rank.take(cell), selection.take(cell)
    slot = lru.take(request * size + (room - plan.misses).take(request) + order)
    tags.put_(request * size + slot, position)
    plan.miss_position.put_(request * width + order, position)
    plan.miss_slot.put_(request * width + order, slot)
    return torch.full_like(selection, -1).put_(cell, slot)


def touch(lru: Tensor, evictable: Tensor, room: Tensor, misses: Tensor) -> None:
    """Reorder slots in place: the evictable ones but for the first `misses`, then those, then the
    hits.  `evictable` is in the order of `lru`."""
    place = evictable.cumsum(dim=1)
    hits = torch.arange(lru.shape[1], device=lru.device) - place + room
    place -= misses + 1
    place += room * (place < 0)
    lru.copy_(torch.empty_like(lru).scatter_(1, torch.where(evictable, place, hits), lru))


def launch_plan(
    plan: SwapPlan,
    selection: Tensor,
    length: Tensor,
    tags: Tensor,
    lru: Tensor,
    slot_rows: Tensor,
    host_rows: Tensor,
) -> None:
    """As `plan_misses`, by Triton."""
    (batch, width), size, positions = selection.shape, tags.shape[1], host_rows.shape[1]
    plan_kernel[(batch,)](
        selection,
        length,
        tags,
        lru,
        slot_rows,
        host_rows,
        selection.new_empty((batch, positions), dtype=torch.int32),
        plan.rows,
        plan.misses,
        plan.absent,
        plan.miss_position,
        plan.miss_slot,
        width,
        size,
        positions,
        WIDTH=triton.next_power_of_2(width),
        SLOTS=triton.next_power_of_2(size),
        num_warps=8,
    )


@triton.jit
def plan_kernel(
    selection,
    length,
    tags,
    lru,
    slot_rows,
    host_rows,
    entry,
    rows,
    misses,
    absent,
    miss_position,
    miss_slot,
    width,
    size,
    positions,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """One program for one request.  Barriers part the accesses of different threads to one entry
    of the scratch `entry` [batch, positions] int32, or to one slot."""
    request = tl.program_id(0).to(tl.int64)
    tags, lru, entry = tags + request * size, lru + request * size, entry + request * positions
    column, age = tl.arange(0, WIDTH), tl.arange(0, SLOTS)
    inside, out = column < width, request * width + column
    position = tl.load(selection + out, mask=inside, other=-1)
    newest = tl.load(length + request) - 1
    known = (position >= 0) & (position <= newest)
    sought = known & (newest >= size) & (position < newest)
    held = (age < size) & (newest >= size)
    found = look_up_entries(entry, position, sought, column, tags, age, held, size)
    hit, first = sought & (found < 0), sought & (found == column)

    slot = tl.load(lru + age, mask=held, other=0)
    tag = tl.load(tags + slot, mask=held, other=-1)
    evictable = held & (tl.load(entry + tag, mask=tag >= 0, other=0) != SOUGHT)
    room = tl.sum(evictable.to(tl.int32))
    host_row = tl.load(host_rows + request * positions + position, mask=first, other=-1)
    rank = tl.cumsum((host_row >= 0).to(tl.int32)) - 1
    loaded = (host_row >= 0) & (rank < room)
    count = tl.sum(loaded.to(tl.int32))
    tl.debug_barrier()
    place = tl.cumsum(evictable.to(tl.int32)) - 1
    evicted_place = tl.where(place < count, place + room, place) - count
    tl.store(lru + tl.where(evictable, evicted_place, room + age - place - 1), slot, mask=held)
    tl.debug_barrier()
    taken = tl.load(lru + room - count + rank, mask=loaded, other=-1)
    tl.store(tags + taken, position, mask=loaded)
    tl.store(entry + position, taken.to(tl.int32), mask=first)
    tl.debug_barrier()

    swapped = tl.load(entry + position, mask=sought & (found >= 0), other=0)
    swapped = tl.where(hit, found + size, swapped)
    # where nothing swaps, positions are slots; else what is known and not sought is the newest
    resident = tl.where(sought, swapped, tl.minimum(position, size))
    resident = tl.where(known, resident, -1)
    row = tl.load(slot_rows + request * (size + 1) + resident, mask=resident >= 0, other=-1)
    tl.store(rows + out, row, mask=inside)
    tl.store(misses + request, count)
    tl.store(absent + request, tl.sum(first.to(tl.int32)) - count)
    planned, beyond = request * width + rank, inside & (column >= count)
    tl.store(miss_position + planned, position, mask=loaded)
    tl.store(miss_slot + planned, taken, mask=loaded)
    tl.store(miss_position + out, -1, mask=beyond)
    tl.store(miss_slot + out, -1, mask=beyond)


@triton.jit
def look_up_entries(entry, position, sought, column, tags, age, held, size):
    """[columns] int32: for each sought cell its position's slot less `size`, which is negative,
    or the first column that holds the position.  Entries of hits are SOUGHT afterwards."""
    tag = tl.load(tags + age, mask=held, other=-1)
    tl.store(entry + position, SOUGHT, mask=sought)
    tl.debug_barrier()
    tl.store(entry + tag, age - size, mask=tag >= 0)
    tl.debug_barrier()
    tl.atomic_min(entry + position, column, mask=sought, sem="relaxed", scope="cta")
    tl.debug_barrier()
    found = tl.load(entry + position, mask=sought, other=0)
    tl.debug_barrier()
    tl.store(entry + position, SOUGHT, mask=sought & (found < 0))
    tl.debug_barrier()
    return found


@triton.jit
def copy_kernel(
    source, sources, target, targets, count, row_bytes, ROWS: tl.constexpr, BYTES: tl.constexpr
):
    """One program for ROWS rows and BYTES of their bytes."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)
    origin = tl.load(sources + row, mask=row < count, other=-1)
    goal = tl.load(targets + row, mask=row < count, other=-1)
    live = ((origin >= 0) & (goal >= 0))[:, None] & (byte < row_bytes)[None, :]
    stored = tl.load(source + origin[:, None] * row_bytes + byte, mask=live)
    tl.store(target + goal[:, None] * row_bytes + byte, stored, mask=live)
