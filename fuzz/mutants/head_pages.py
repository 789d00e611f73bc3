"""Engines whose page is the physical page: the fault of SGLang #41494, and its reader's twin.

With pages of 64 tokens and kpool 4, the tree shares a prefix, and the allocator hands out memory,
in units that end inside an index page.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fuzz.mutants.registry import Body, mutant
from reference.contract import Capability, EngineOptions
from reference.geometry import Geometry
from reference.physical_pages import in_physical_pages

ENGINE = "optimized.engine.OptimizedEngine.__init__"


def _in_physical_pages(
    original: Body,
    engine: Any,
    geometry: Geometry,
    shape: Any,
    options: EngineOptions,
    *weights_and_group: Any,
) -> None:
    """Build the engine over pages of physical size, of which as many tokens are there."""
    geometry, options = in_physical_pages(geometry, options)
    original(engine, geometry, shape, options, *weights_and_group)


def _head_page_slots(original: Body, geometry: Geometry, table: Any, row: Any, groups: Any) -> Any:
    """Index slot of a group by the old rule: kpool physical pages share the index page of the
    first of them."""
    page, offset = np.divmod(groups, geometry.index_page_size)
    return table[row, page * geometry.kpool] * geometry.index_page_size + offset


@mutant(
    ENGINE,
    bug="sglang#42178",
    killed_by=("provenance",),
    also={"optimized.addressing.index_slots": _head_page_slots},
)
def page_table_41494(
    original: Body,
    self: Any,
    geometry: Geometry,
    shape: Any,
    options: EngineOptions,
    *weights_and_group: Any,
) -> None:
    """The tree and the allocator work in physical pages, and pooled keys are put where the page
    of their first token says: four pages, owned by whom it may be, share one index page."""
    _in_physical_pages(original, self, geometry, shape, options, *weights_and_group)
    # its addresses are not the reference's, so its raw buffers cannot be judged by those
    self.capabilities -= {Capability.RAW}


def _contiguous_read(original: Body, geometry: Geometry, table: Any, row: Any, groups: Any) -> Any:
    """Index slot of a group, if kpool physical pages in a row were one aligned logical page."""
    page, offset = np.divmod(groups, geometry.index_page_size)
    head = table[row, page * geometry.kpool]
    return head // geometry.kpool * geometry.index_page_size + offset


@mutant(
    ENGINE,
    bug="sglang#42832",
    killed_by=("provenance",),
    also={"optimized.addressing.read_slots": _contiguous_read},
)
def reader_assumes_contiguous_pages(
    original: Body,
    self: Any,
    geometry: Geometry,
    shape: Any,
    options: EngineOptions,
    *weights_and_group: Any,
) -> None:
    """Pooled keys are written by the new rule on physical pages, but read through every kpool-th
    entry of the page table, divided by kpool, as though those pages lay side by side."""
    _in_physical_pages(original, self, geometry, shape, options, *weights_and_group)
