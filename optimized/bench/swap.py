"""HiSparse: swap-in from pinned host memory into hot buffers."""

from __future__ import annotations

import math

import torch

from optimized.bench.stage import DEVICE_RATE, HOST_RATE, Stage
from optimized.kernels.swap_in import SwapPlan, swap_in

SLOTS, WIDTH, ROW_BYTES, PAGE, GROUP = 4096, 2048, 512, 64, 4
POSITIONS = 131_072
HOST_ROWS = 1 << 22
STEPS = 24
"""Selections, one after the other; together they hold more positions than a buffer has slots, so
that what comes again has been evicted."""


def swap_stage(batch: int, missed: int, target_us: float, generator: torch.Generator) -> Stage:
    """Each step selects `missed` positions, whole groups, that are not in the hot buffer, and WIDTH
    - `missed` of the step before."""
    pages = torch.randint(
        1, HOST_ROWS // PAGE, (batch, POSITIONS // PAGE), device="cuda", generator=generator
    )
    inside = torch.arange(POSITIONS, device="cuda")
    host_rows = pages[:, inside // PAGE] * PAGE + inside % PAGE
    host_pool = torch.empty(HOST_ROWS, ROW_BYTES, dtype=torch.uint8, pin_memory=True)
    host_pool.view(torch.int64).random_()
    device_rows = SLOTS + PAGE
    device_pool = torch.zeros(batch * device_rows, ROW_BYTES, dtype=torch.uint8, device="cuda")
    slot_rows = torch.arange(batch, device="cuda")[:, None] * device_rows + torch.arange(
        SLOTS + 1, device="cuda"
    )
    groups = torch.randperm(POSITIONS // GROUP, device="cuda", generator=generator)
    ring = (groups[:, None] * GROUP + torch.arange(GROUP, device="cuda")).flatten()
    ring = ring[: max(SLOTS, STEPS * missed)]
    tags = ring[-SLOTS:].repeat(batch, 1)
    for slots, rows in zip(slot_rows[:, :SLOTS], host_rows[:, tags[0]], strict=True):
        device_pool[slots] = host_pool[rows.cpu()].cuda()
    lru = torch.arange(SLOTS, device="cuda").repeat(batch, 1)
    length = torch.full((batch,), POSITIONS, device="cuda")
    window = torch.arange(WIDTH, device="cuda")
    selections = [
        ring[(step * missed + window) % len(ring)].repeat(batch, 1).contiguous()
        for step in range(STEPS)
    ]

    def launch(selection: torch.Tensor) -> SwapPlan:
        tables = (selection, length, tags, lru, slot_rows, host_rows)
        return swap_in(*tables, host_pool, device_pool, backend="triton")

    def error() -> float:
        for _ in range(2):
            for selection in selections:
                plan = launch(selection)
        right = bool((plan.misses == missed).all()) and not bool(plan.absent.any())
        found = device_pool[plan.rows[0]].cpu()
        should = host_pool[host_rows[0, selections[-1][0]].cpu()]
        return 0.0 if right and torch.equal(found, should) else math.nan

    moved = batch * missed * ROW_BYTES
    return Stage(
        at=f"B={batch}, {missed} misses",
        floor_us=moved / HOST_RATE if missed else batch * WIDTH * 8 * 3 / DEVICE_RATE,
        target_us=target_us,
        bytes=moved,
        launches=[lambda selection=selection: launch(selection) for selection in selections],
        error=error,
    )
