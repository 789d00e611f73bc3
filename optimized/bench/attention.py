"""MLA of a decode step, over what a request selects."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from optimized.bench.stage import DEVICE_RATE, Point, Stage, relative_error, sets
from optimized.kernels import kv_store, sparse_mla
from reference.geometry import RowFormat

HEADS, LATENT, WIDTH = 16, 512, 2051
ROWS = 1 << 20
CHECKED = 2


def mla_stage(point: Point, row_format: RowFormat, generator: torch.Generator) -> Stage:
    """Random rows of a large pool, a selection of WIDTH for each request."""
    row_bytes = row_format.row_bytes(LATENT)
    moved = point.batch * WIDTH * row_bytes
    pool = torch.cat(
        [
            kv_store.encode_rows(
                torch.randn(ROWS // 16, LATENT, device="cuda", generator=generator),
                row_format=row_format,
            )
            for _ in range(16)
        ]
    )
    q = torch.randn(point.batch, HEADS, LATENT, device="cuda", generator=generator).bfloat16()
    selections = [
        torch.randint(1, ROWS, (point.batch, WIDTH), device="cuda", generator=generator).int()
        for _ in range(sets(moved))
    ]
    out = torch.full((point.batch, HEADS, LATENT), math.nan, device="cuda")
    partials = sparse_mla.make_partials(point.batch, WIDTH, LATENT, device=out.device)

    def launch(locs: Tensor) -> None:
        sparse_mla.sparse_mla(
            q,
            pool,
            locs,
            out,
            partials,
            row_format=row_format,
            scale=LATENT**-0.5,
            backend="triton",
        )

    def error() -> float:
        launch(selections[0])
        rows = [
            kv_store.load_rows(pool, locs.long(), row_format=row_format, latent=LATENT).double()
            for locs in selections[0][:CHECKED]
        ]
        should = [
            (some.double() @ found.T * LATENT**-0.5).softmax(dim=1) @ found
            for some, found in zip(q, rows, strict=False)
        ]
        return relative_error(out[:CHECKED], torch.stack(should))

    fp8 = row_format is not RowFormat.BF16
    targets = {"A": 21 if fp8 else 36, "B": 7 if fp8 else 11}
    return Stage(
        at=f"{point.name} {row_format.value}",
        floor_us=moved / DEVICE_RATE,
        target_us=targets[point.name],
        bytes=moved,
        launches=[lambda locs=locs: launch(locs) for locs in selections],
        error=error,
    )
