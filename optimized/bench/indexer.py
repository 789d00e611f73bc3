"""The lightning indexer of a decode step: paged scores, and the groups that they select."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from optimized.bench.stage import DEVICE_RATE, Point, Stage, sets
from optimized.kernels import pooled_key, top_groups
from optimized.kernels.index_scores import index_scores, scores_by_torch

HEADS, DIM, KPOOL, PAGE, TOPK_GROUPS = 32, 128, 4, 64, 512
CHECKED = 2
"""Requests whose outputs are compared."""


class Batch:
    """One query of each request, over keys of its own, and what the kernels write."""

    def __init__(self, point: Point, generator: torch.Generator) -> None:
        groups = point.length // KPOOL
        pages = -(-groups // PAGE)
        count = point.batch * pages + 1
        device = torch.device("cuda")

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, generator=generator)

        def codes(*shape: int) -> Tensor:
            return normal(*shape).to(torch.float8_e4m3fn).view(torch.uint8)

        self.q, self.w = codes(point.batch, HEADS, DIM), normal(point.batch, HEADS)
        self.pool = torch.empty(count, PAGE * (DIM + 4), dtype=torch.uint8, device=device)
        keys, scales = pooled_key.page_views(self.pool, index_page_size=PAGE)
        keys.copy_(codes(*keys.shape))
        scales.view(torch.float32).copy_(normal(*scales.shape[:-1], 1).abs())
        order = torch.randperm(count - 1, device=device, generator=generator) + 1
        self.table = order.view(point.batch, pages).int()
        self.position = torch.full((point.batch,), point.length - 1, device=device)
        self.visible = ((self.position + 1) // KPOOL).int()
        columns = _aligned(groups)
        self.score = torch.full((point.batch, columns), math.nan, device=device)
        peaks = _aligned(-(-columns // top_groups.PEAK))
        self.peaks = torch.empty(point.batch, peaks, dtype=torch.int32, device=device)
        self.groups = torch.empty(point.batch, TOPK_GROUPS, dtype=torch.int32, device=device)
        self.blocks = torch.empty_like(self.groups)
        width = TOPK_GROUPS * KPOOL + KPOOL - 1
        self.selected = torch.empty(point.batch, width, dtype=torch.int32, device=device)
        self.locs = torch.empty_like(self.selected)

    def scores(self) -> None:
        index_scores(
            self.q,
            self.w,
            self.pool,
            self.table,
            self.visible,
            self.score,
            self.peaks,
            index_page_size=PAGE,
            backend="triton",
        )

    def select(self) -> None:
        top_groups.top_groups(
            self.score,
            self.peaks,
            self.position,
            self.table,
            self.groups,
            self.blocks,
            self.selected,
            self.locs,
            kpool=KPOOL,
            index_page_size=PAGE,
            backend="triton",
        )

    def both(self) -> None:
        self.scores()
        self.select()

    def score_error(self) -> float:
        self.scores()
        score = torch.empty_like(self.score[:CHECKED])
        some = (x[:CHECKED] for x in (self.q, self.w))
        tables = self.table[:CHECKED], self.visible[:CHECKED]
        scores_by_torch(*some, self.pool, *tables, score, index_page_size=PAGE)
        seen = score > -math.inf
        same = torch.equal(seen, self.score[:CHECKED] > -math.inf)
        difference = (self.score[:CHECKED] - score)[seen].norm()
        return float(difference / score[seen].norm()) if same else math.nan

    def selection_error(self) -> float:
        """0 where the groups are the highest of the scores that were written, else NaN."""
        self.both()
        groups = torch.empty_like(self.groups[:CHECKED])
        selected = torch.empty_like(self.selected[:CHECKED])
        top_groups.select_by_torch(
            self.score[:CHECKED], self.position[:CHECKED], groups, selected, kpool=KPOOL
        )
        same = torch.equal(groups, self.groups[:CHECKED])
        return 0.0 if same and torch.equal(selected, self.selected[:CHECKED]) else math.nan


def scores_stage(point: Point, generator: torch.Generator) -> Stage:
    batches = _batches(point, generator)
    return Stage(
        at=point.name,
        floor_us=_bytes(point) / DEVICE_RATE,
        target_us={"A": 55, "B": 3.5}[point.name],
        bytes=_bytes(point),
        launches=[batch.scores for batch in batches],
        error=batches[0].score_error,
    )


def selection_stage(point: Point, generator: torch.Generator) -> Stage:
    """Scores and selection together."""
    batches = _batches(point, generator)
    return Stage(
        at=point.name,
        floor_us=_bytes(point) / DEVICE_RATE,
        target_us={"A": 59, "B": 6}[point.name],
        bytes=_bytes(point),
        launches=[batch.both for batch in batches],
        error=batches[0].selection_error,
    )


def _aligned(columns: int) -> int:
    """As many that rows of 4-byte numbers begin where a vector load can."""
    return -(-columns // 16) * 16


def _bytes(point: Point) -> int:
    return point.batch * (point.length // KPOOL) * (DIM + 4)


def _batches(point: Point, generator: torch.Generator) -> list[Batch]:
    return [Batch(point, generator) for _ in range(sets(_bytes(point)))]
