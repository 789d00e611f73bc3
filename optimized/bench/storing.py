"""What a decode step stores of a DSA layer."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from optimized.bench.stage import Point, Stage, relative_error
from optimized.kernels import pooled_key
from optimized.kernels.store_step import store_step
from reference.geometry import RowFormat

LATENT, INDEX_DIM, KPOOL, RING, PAGE = 512, 128, 4, 4, 64
ROWS = 1 << 20


def store_stage(point: Point, generator: torch.Generator) -> Stage:
    """The step at which every request closes a group: a KV row in FP8, and an index key."""
    batch = point.batch

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    ids = torch.randperm(ROWS // PAGE - 1, device="cuda", generator=generator)[:batch] + 1
    index_pool = torch.zeros(ROWS // PAGE, PAGE * (INDEX_DIM + 4), dtype=torch.uint8, device="cuda")
    kv_pool = torch.zeros(ROWS, LATENT, dtype=torch.uint8, device="cuda")
    ring_key, ring_gate = (normal(batch + 1, RING, INDEX_DIM).bfloat16() for _ in range(2))
    key, gate = (normal(batch, INDEX_DIM).bfloat16() for _ in range(2))
    position = torch.full((batch,), point.length // KPOOL * KPOOL - 1, device="cuda")
    ape, row = normal(KPOOL, INDEX_DIM), normal(batch, LATENT)
    rows = (ring_key, ring_gate, key, gate, torch.arange(batch, device="cuda") + 1, position)
    index_slot = ids * PAGE

    def store(index: Tensor, kv: Tensor, backend: str) -> None:
        store_step(
            index,
            *rows,
            index_slot,
            ape,
            kv,
            index_slot,
            row,
            kpool=KPOOL,
            index_page_size=PAGE,
            round_scale=True,
            row_format=RowFormat.FP8_RAW,
            backend=backend,
        )

    def error() -> float:
        """Of the index keys; the KV rows must be as torch leaves them."""
        should = [torch.zeros_like(pool) for pool in (index_pool, kv_pool)]
        store(*should, "torch")
        store(index_pool, kv_pool, "triton")
        found, wanted = (_keys(pool, index_slot) for pool in (index_pool, should[0]))
        return relative_error(found, wanted) if torch.equal(kv_pool, should[1]) else math.nan

    moved = batch * (LATENT + 4 * LATENT + KPOOL * INDEX_DIM * 4 + INDEX_DIM + 4)
    return Stage(
        at=point.name,
        floor_us=0.8,
        target_us=1.5,
        bytes=moved,
        launches=[lambda: store(index_pool, kv_pool, "triton")],
        error=error,
    )


def _keys(index_pool: Tensor, slots: Tensor) -> Tensor:
    """[slots, INDEX_DIM] float64: index keys, dequantised."""
    at = pooled_key.page_rows(slots, index_page_size=PAGE)
    keys, scales = pooled_key.page_views(index_pool, index_page_size=PAGE)
    return keys[at].view(torch.float8_e4m3fn).double() * scales[at].view(torch.float32).double()
