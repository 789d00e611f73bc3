"""Geometries of the tests of HiSparse's coordinator, and what they build."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from optimized.hisparse.coordinator import Coordinator
from optimized.hisparse.pages import BackedPages
from optimized.memory.allocator import Allocator, Ids
from oracle_tests.kernel_cases import POISON
from reference.contract import EngineOptions, HiSparse
from reference.geometry import Geometry, ModelShape

SHAPE = ModelShape(layers=12, latent=8, index_dim=16, heads=1, kda_heads=1, hidden=8, vocab=8)
LEADERS = (0, 0, 2)
"""Of the three DSA layers the second uses the index of the first."""
LEAST = Geometry(
    kpool=4, physical_page_size=4, topk=8, mamba_track_interval=16, device_buffer_size=10
)
"""The hot buffer is as small as topk and kpool allow, and no whole number of device pages."""
ROOMY = Geometry(
    kpool=2, physical_page_size=4, topk=4, mamba_track_interval=8, device_buffer_size=16
)
UNPOOLED = Geometry(
    kpool=1, physical_page_size=8, topk=6, mamba_track_interval=8, device_buffer_size=6
)
GEOMETRIES = {"least": LEAST, "roomy": ROOMY, "unpooled": UNPOOLED}


def build(
    geometry: Geometry, sizes: HiSparse, options: EngineOptions, *, device: str = "cpu"
) -> tuple[BackedPages, Coordinator]:
    """A coordinator over poisoned host rows of three DSA layers, and the logical pages that they
    back."""
    page, row_bytes = geometry.logical_page_size, geometry.row_format.row_bytes(SHAPE.latent)
    host = torch.full(
        (len(LEADERS), sizes.host_pages * page, row_bytes),
        POISON,
        dtype=torch.uint8,
        pin_memory=device == "cuda",
    )

    def scrub(ids: Ids) -> None:
        host[:, rows_of(ids.tolist(), page)] = POISON

    hosts = Allocator(
        sizes.host_pages,
        order=options.page_order,
        seed=options.seed + 1,
        scrub=scrub,
        noun="host pages",
        option="host_pages",
    )
    pages = BackedPages(options, hosts, scrub=lambda ids: None)
    return pages, Coordinator(sizes, geometry, options, host, device=device)


def as_bytes(rows: Tensor) -> list[bytes]:
    return [row.numpy().tobytes() for row in rows]


def rows_of(pages: Iterable[int], page_size: int) -> list[int]:
    return [page * page_size + i for page in pages for i in range(page_size)]
