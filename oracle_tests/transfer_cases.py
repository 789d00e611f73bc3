"""Two ends of a transfer drawn at random, and copies made by hand between engines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from optimized.transfer.plan import Array, Plan
from oracle_tests.hisparse_life import HOT_PAGES, LEAST, hisparse
from oracle_tests.tiny_engine import SHAPE, build
from reference.addressing import pages_for, ring_row_of, tail_start
from reference.contract import Engine, Places
from reference.geometry import Geometry, ModelShape, Position
from reference.occupancy import judge_occupancy
from reference.prefix import judge_snapshot

WIDE = ModelShape(
    layers=4, dsa_period=2, kda_heads=12, kda_key_dim=2, kda_value_dim=4, index_dim=4, conv_width=3
)
"""Its heads can be shared out to 1, 2, 3 or 4 ranks."""


def geometry_of(kpool: int, groups: int, drafts: int = 0) -> Geometry:
    page = kpool * groups
    return Geometry(
        kpool=kpool,
        physical_page_size=page,
        topk=kpool,
        mamba_track_interval=page * kpool,
        max_drafts=drafts,
    )


geometries = st.builds(geometry_of, st.sampled_from([1, 2, 4, 8]), st.integers(1, 2))
pages = st.lists(st.integers(1, 40), min_size=4, max_size=4, unique=True)


def places_at(
    geometry: Geometry, length: int, *, kv: list[int], index: list[int], slot: int, state: int
) -> Places:
    """The places of a request of `length` positions in a request slot, from lists of pages."""
    count = pages_for(length, geometry)
    tail = range(tail_start(length, geometry), length)
    rows = (ring_row_of(Position(position), geometry) for position in tail)
    return Places(
        kv=tuple(kv[:count]),
        index=tuple(index[:count]),
        tail=tuple(slot * geometry.ring_size + row for row in rows),
        state=state,
        length=length,
    )


@st.composite
def places(draw: st.DrawFn, geometry: Geometry, length: int) -> Places:
    """Places of one end, whose KV pages are its index pages (no HiSparse) or others."""
    index = draw(pages)
    return places_at(
        geometry,
        length,
        kv=draw(st.just(index) | pages),
        index=index,
        slot=draw(st.integers(1, 5)),
        state=draw(st.integers(1, 5)),
    )


def copy(runs: Array, source: Engine, target: Engine) -> None:
    """Make the copies of a plan's piece."""
    here, there = (list(engine.regions().values()) for engine in (source, target))
    for region, first, at, items in runs.tolist():
        there[region][at : at + items] = here[region][first : first + items]


def send(plan: Plan, source: Engine, target: Engine, *, here: Places, there: Places) -> None:
    """Make the copies of all pieces of data."""
    for piece in range(plan.pieces):
        copy(plan.runs(piece, here, there), source, target)


def targets(runs: Iterable[Array]) -> list[tuple[int, int]]:
    """Every (region, item there) that some runs write, as often as they do."""
    return [
        (region, at + item)
        for some in runs
        for region, _, at, items in some.tolist()
        for item in range(items)
    ]


PLAIN = replace(LEAST, device_buffer_size=None)
DRAFTING = replace(PLAIN, max_drafts=3)
PLAN = Plan.between(PLAIN, SHAPE, prefill=(0, 1), decode=(0, 1))
PAGES = 40


def plain(*, pages: int = PAGES, **options: Any) -> Engine:
    return build(geometry=PLAIN, pages=pages, page_order="permuted", seed=3, **options)


def drafting(**options: Any) -> Engine:
    """Its tail rings are the larger ones."""
    return build(geometry=DRAFTING, pages=PAGES, page_order="high", max_requests=4, **options)


def hot(**options: Any) -> Engine:
    return hisparse(page_order="permuted", seed=8, pages=PAGES, max_requests=4, **options)


def sound(engine: Engine) -> None:
    """All memory adds up, reserved memory too."""
    snapshot = engine.inspect()
    assert not judge_snapshot(snapshot, engine.geometry, pages=PAGES, state_slots=64)
    if snapshot.hot:
        running, each = len(snapshot.holders), HOT_PAGES[LEAST] * LEAST.physical_page_size
        found = judge_occupancy(snapshot.hot.occupancy, running=running, rows_each=each)
        assert not found
