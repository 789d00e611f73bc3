"""HiSparse's swap-in in TileLang, compiled to C for the CPU: a plan by loops, and byte copies.

Rows are bytes here, as raw FP8 rows are; the copy serves every other format as well.
"""

# no postponed annotations here: TileLang evaluates those of a program where it stands

from functools import lru_cache

import tilelang
import tilelang.language as T
import torch
from tilelang.contrib.cc import get_cplus_compiler
from torch import Tensor

from optimized.kernels.backends import BackendError
from optimized.kernels.swap_in import SwapPlan


def plan_misses(
    plan: SwapPlan,
    selection: Tensor,
    length: Tensor,
    tags: Tensor,
    lru: Tensor,
    slot_rows: Tensor,
    host_rows: Tensor,
) -> None:
    """As `kernels.swap_in.plan_misses`, on the CPU.

    Raises:
        BackendError: without a C++ compiler, or for tensors on a GPU.
    """
    require_cpu(tags)
    compiled_plan()(
        selection,
        length,
        tags,
        lru,
        slot_rows,
        host_rows,
        torch.empty_like(host_rows),
        torch.empty_like(tags),
        torch.empty_like(tags),
        plan.rows,
        plan.misses,
        plan.absent,
        plan.miss_position,
        plan.miss_slot,
    )


def copy_rows(source: Tensor, sources: Tensor, target: Tensor, targets: Tensor) -> None:
    """As `kernels.swap_in.copy_rows`, on the CPU.

    Raises:
        BackendError: without a C++ compiler, or for tensors on a GPU.
    """
    require_cpu(target)
    compiled_copy(source.shape[1])(source, sources, target, targets)


def require_cpu(tensor: Tensor) -> None:
    """Raise BackendError unless a program compiled to C can be built and can reach `tensor`."""
    if tensor.is_cuda:
        raise BackendError(
            "the tilelang backend compiles to C for the CPU: choose backend triton on a GPU."
        )
    if get_cplus_compiler() is None:
        raise BackendError(
            "the tilelang backend found no C++ compiler: install one (on Debian or Ubuntu, "
            "apt-get install g++), or choose another backend."
        )


@lru_cache
def compiled_plan() -> tilelang.JITKernel:
    """The plan for any sizes."""
    return tilelang.compile(plan_program(), target="c", execution_backend="cython")


@lru_cache
def compiled_copy(row_bytes: int) -> tilelang.JITKernel:
    """The copy of rows of this size, between any pools."""
    return tilelang.compile(copy_program(row_bytes), target="c", execution_backend="cython")


def plan_program():
    """Each request by itself.  Of a position that is sought or tagged, `entry` holds its slot, or
    `missing`, or `lost` once it could not be loaded.  `used` says which slots are hits; `free`
    lists the others in LRU order."""
    missing, lost = -1, -2
    batch, width, positions = T.dynamic("batch"), T.dynamic("width"), T.dynamic("positions")
    size, places = T.dynamic("size"), T.dynamic("places")

    @T.prim_func
    def program(
        selection: T.Tensor((batch, width), "int64"),
        length: T.Tensor((batch,), "int64"),
        tags: T.Tensor((batch, size), "int64"),
        lru: T.Tensor((batch, size), "int64"),
        slot_rows: T.Tensor((batch, places), "int64"),
        host_rows: T.Tensor((batch, positions), "int64"),
        entry: T.Tensor((batch, positions), "int64"),
        used: T.Tensor((batch, size), "int64"),
        free: T.Tensor((batch, size), "int64"),
        rows: T.Tensor((batch, width), "int64"),
        misses: T.Tensor((batch,), "int64"),
        absent: T.Tensor((batch,), "int64"),
        miss_position: T.Tensor((batch, width), "int64"),
        miss_slot: T.Tensor((batch, width), "int64"),
    ):
        with T.Kernel(batch) as b:
            newest = T.alloc_var("int64")
            position = T.alloc_var("int64")
            slot = T.alloc_var("int64")
            room = T.alloc_var("int64")
            last = T.alloc_var("int64")
            count = T.alloc_var("int64")
            newest = length[b] - 1
            room = 0
            count = 0
            last = size - 1
            absent[b] = 0
            for c in T.serial(width):
                miss_position[b, c] = -1
                miss_slot[b, c] = -1
                rows[b, c] = -1
            if newest < size:
                for c in T.serial(width):
                    position = selection[b, c]
                    if position >= 0 and position <= newest:
                        rows[b, c] = slot_rows[b, position]
            else:
                for c in T.serial(width):
                    position = selection[b, c]
                    if position >= 0 and position < newest:
                        entry[b, position] = missing
                for s in T.serial(size):
                    used[b, s] = 0
                    if tags[b, s] >= 0:
                        entry[b, tags[b, s]] = s
                for c in T.serial(width):
                    position = selection[b, c]
                    if position >= 0 and position < newest:
                        slot = entry[b, position]
                        if slot >= 0:
                            used[b, slot] = 1
                for a in T.serial(size):
                    slot = lru[b, a]
                    if used[b, slot] == 0:
                        free[b, room] = slot
                        room += 1
                # the hits move to the end, the last one first, so that none is overwritten unread
                for a in T.serial(size):
                    slot = lru[b, size - 1 - a]
                    if used[b, slot] == 1:
                        lru[b, last] = slot
                        last -= 1
                for c in T.serial(width):
                    position = selection[b, c]
                    if position == newest:
                        rows[b, c] = slot_rows[b, size]
                    elif position >= 0 and position < newest:
                        if entry[b, position] == missing:
                            if count < room and host_rows[b, position] >= 0:
                                slot = free[b, count]
                                entry[b, position] = slot
                                tags[b, slot] = position
                                miss_position[b, count] = position
                                miss_slot[b, count] = slot
                                count += 1
                            else:
                                entry[b, position] = lost
                                absent[b] += 1
                        if entry[b, position] >= 0:
                            rows[b, c] = slot_rows[b, entry[b, position]]
                for a in T.serial(room):
                    if a < room - count:
                        lru[b, a] = free[b, count + a]
                    else:
                        lru[b, a] = free[b, a - (room - count)]
            misses[b] = count

    return program


def copy_program(row_bytes: int):
    """One row after another."""
    count = T.dynamic("count")
    source_rows, target_rows = T.dynamic("source_rows"), T.dynamic("target_rows")

    @T.prim_func
    def program(
        source: T.Tensor((source_rows, row_bytes), "uint8"),
        sources: T.Tensor((count,), "int64"),
        target: T.Tensor((target_rows, row_bytes), "uint8"),
        targets: T.Tensor((count,), "int64"),
    ):
        with T.Kernel(count) as i:
            # in variables: C must read an id anew after each byte, which may alias it
            origin = T.alloc_var("int64")
            goal = T.alloc_var("int64")
            origin = sources[i]
            goal = targets[i]
            if origin >= 0 and goal >= 0:
                for byte in T.serial(row_bytes):
                    target[goal, byte] = source[origin, byte]

    return program
