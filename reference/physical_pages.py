"""Engines that allocate, share and keep checkpoints in physical pages, although they pool keys.

So SGLang did before #42178 (up to release 0.5.21): with pages of 64 tokens and kpool 4, tree and
allocator hand out units that end inside an index page (#41494).  Their hits and owners are judged
by this geometry; that index pages are shared is then what goes wrong.
"""

from __future__ import annotations

from dataclasses import fields, replace

from reference.contract import EngineOptions
from reference.geometry import Geometry


class PhysicalPages(Geometry):
    """A geometry whose logical page is one physical page."""

    @property
    def logical_page_size(self) -> int:
        return self.physical_page_size


def in_physical_pages(
    geometry: Geometry, options: EngineOptions
) -> tuple[PhysicalPages, EngineOptions]:
    """The same memory, counted in physical pages: kpool times as many pages and states, besides the
    padding."""
    sizes = {field.name: getattr(geometry, field.name) for field in fields(geometry)}
    sizes["mamba_track_interval"] //= geometry.kpool
    pages, states = (
        (count - 1) * geometry.kpool + 1 for count in (options.pages, options.state_slots)
    )
    return PhysicalPages(**sizes), replace(options, pages=pages, state_slots=states)
