"""Plans against the same plans made position by position."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optimized import planner
from reference.geometry import Geometry

Span = tuple[int, int]


def geometry(kpool: int) -> Geometry:
    return Geometry(
        kpool=kpool,
        physical_page_size=4,
        topk=8,
        mamba_track_interval=4 * kpool,
        max_drafts=3,
    )


def page_table(rows: int, pages: int) -> np.ndarray:
    """Pages in no order, none of them padding, none used twice."""
    shuffled = np.random.default_rng(5).permutation(rows * pages) + 1
    return shuffled.reshape(rows, pages)


def loc(g: Geometry, pages: np.ndarray, position: int) -> int:
    return int(pages[position // g.logical_page_size]) * g.logical_page_size + (
        position % g.logical_page_size
    )


def slow_plan(
    g: Geometry, table: np.ndarray, rings: list[int], spans: list[Span], ring_slots: int
) -> dict[str, list]:
    """The groups that close in each span, with the place of each of their members."""
    out: dict[str, list] = {"locs": [], "index_slots": [], "sources": []}
    chunk_row = ring_slots * g.ring_size
    for row, (ring, (start, stop)) in enumerate(zip(rings, spans, strict=True)):
        for p in range(start, stop):
            out["locs"].append(loc(g, table[row], p))
            if p % g.kpool == g.kpool - 1:
                members = range(p - g.kpool + 1, p + 1)
                out["index_slots"].append(loc(g, table[row], members[0]) // g.kpool)
                out["sources"].append(
                    [
                        chunk_row + m - start
                        if m >= start
                        else ring * g.ring_size + m % g.ring_size
                        for m in members
                    ]
                )
        chunk_row += stop - start
    return out


def slow_ring(g: Geometry, ring: int, span: Span, keep_from: int, first_row: int) -> dict[int, int]:
    """Ring row to chunk row, of the positions that the ring keeps."""
    start, stop = span
    return {
        ring * g.ring_size + p % g.ring_size: first_row + p - start
        for p in range(max(start, keep_from), stop)
    }


spans = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 25)).map(lambda s: (s[0], s[0] + s[1])),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=150)
@given(kpool=st.sampled_from([1, 2, 4]), spans=spans)
def test_an_extend_plan_closes_each_group_from_its_members(kpool: int, spans: list[Span]) -> None:
    g = geometry(kpool)
    starts, stops = (np.array(ends) for ends in zip(*spans, strict=True))
    table, rings = page_table(len(spans), 20), [3, 1, 4, 2][: len(spans)]
    keep_from = stops // kpool * kpool
    plan = planner.plan_chunk(
        g,
        table,
        np.arange(len(spans)),
        np.array(rings),
        starts,
        stops,
        ring_slots=5,
        keep_from=keep_from,
    )
    wanted = slow_plan(g, table, rings, spans, ring_slots=5)
    assert plan.locs.tolist() == wanted["locs"]
    assert plan.index_slots.tolist() == wanted["index_slots"]
    assert plan.sources.tolist() == wanted["sources"]
    ring, first = {}, 0
    for slot, span, keep in zip(rings, spans, keep_from, strict=True):
        ring |= slow_ring(g, slot, span, int(keep), first)
        first += span[1] - span[0]
    found = zip(plan.ring_rows.tolist(), plan.ring_sources.tolist(), strict=True)
    assert dict(found) == ring
    assert plan.positions.tolist() == [p for span in spans for p in range(*span)]
    assert plan.owner.tolist() == [i for i, span in enumerate(spans) for _ in range(*span)]


def test_a_first_group_may_mix_ring_and_chunk() -> None:
    g = geometry(4)
    one = np.array([0])
    plan = planner.plan_chunk(
        g, np.array([[1]]), one, one + 1, one + 6, one + 9, ring_slots=2, keep_from=one + 8
    )
    # positions 4 and 5 wait in rows 4 and 5 of ring 1, 6 and 7 come with the chunk
    assert plan.sources.tolist() == [[7 + 4, 7 + 5, 14, 15]]
    assert plan.index_slots.tolist() == [(16 + 4) // 4]
    assert plan.ring_rows.tolist() == [7 + 8 % 7]
    assert plan.ring_sources.tolist() == [2]


@settings(deadline=None, max_examples=100)
@given(
    kpool=st.sampled_from([1, 2, 4]),
    batches=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_a_decode_plan_is_refreshed_in_place(kpool: int, batches: list[list[int]]) -> None:
    """Each refresh, whatever the batch before, leaves nothing stale in any buffer."""
    g = geometry(kpool)
    plan = planner.DecodePlan(g, capacity=4, width=20)
    address = plan.locs.data_ptr(), plan.table.pages.ctypes.data
    for turn, batch in enumerate(batches):
        table = page_table(6, 20) + 120 * turn
        rings = np.array([4, 2, 5, 1])[: len(batch)]
        plan.refresh(table, rings, np.array(batch), rings * 10)
        assert (plan.locs.data_ptr(), plan.table.pages.ctypes.data) == address
        wanted = []
        for ring, p in zip(rings, batch, strict=True):
            closes = p % kpool == kpool - 1
            slot = loc(g, table[ring], p - kpool + 1) // kpool if closes else 0
            wanted.append((ring, p, loc(g, table[ring], p), slot, ring * 10))
        fields = (plan.rings, plan.positions, plan.locs, plan.index_slots, plan.states)
        assert torch.stack(fields).T.tolist() == [list(row) for row in wanted]


def test_rows_beyond_the_batch_point_at_padding() -> None:
    """A graph replays all rows; those that no request fills may write to padding alone."""
    g = geometry(2)
    plan = planner.DecodePlan(g, capacity=3, width=4)
    table = page_table(4, 4)
    plan.refresh(table, np.array([1, 2, 3]), np.array([3, 5, 7]), np.array([1, 2, 3]))
    whole = [plan.locs, plan.index_slots, plan.rings, plan.states]
    assert all(buffer.all() for buffer in whole)
    plan.refresh(table, np.array([2]), np.array([3]), np.array([2]))
    assert all(buffer[0] > 0 and not buffer[1:].any() for buffer in whole)


@settings(deadline=None, max_examples=100)
@given(
    kpool=st.sampled_from([1, 2, 4]),
    batches=st.lists(
        st.lists(st.tuples(st.integers(0, 40), st.integers(1, 3)), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    ),
)
def test_a_verify_plan_is_refreshed_in_place(kpool: int, batches: list[list[Span]]) -> None:
    g = geometry(kpool)
    plan = planner.VerifyPlan(g, capacity=3, width=20)
    address = plan.chunk.locs.data_ptr()
    for turn, batch in enumerate(batches):
        table = page_table(5, 20) + 100 * turn
        rings = [4, 2, 1][: len(batch)]
        spans = [(start, start + count) for start, count in batch]
        starts, stops = (np.array(ends) for ends in zip(*spans, strict=True))
        plan.refresh(table, np.array(rings), starts, stops, ring_slots=5)
        wanted = slow_plan(g, table[rings], rings, spans, ring_slots=5)
        assert plan.chunk.locs.data_ptr() == address
        assert plan.chunk.locs.tolist() == wanted["locs"]
        assert plan.chunk.index_slots.tolist() == wanted["index_slots"]
        assert plan.chunk.sources.tolist() == wanted["sources"]
        # any draft may become the last accepted one, so the ring takes them all
        assert len(plan.chunk.ring_rows) == len(wanted["locs"])


@pytest.mark.parametrize("kpool", [1, 2, 4])
def test_a_verify_plan_has_room_for_all_groups_that_drafts_can_close(kpool: int) -> None:
    g = geometry(kpool)
    plan = planner.VerifyPlan(g, capacity=2, width=20)
    closing = max(range(kpool), key=lambda s: (s + g.max_drafts) // kpool)
    starts = np.array([closing, closing])
    plan.refresh(page_table(3, 20), np.array([1, 2]), starts, starts + g.max_drafts, ring_slots=3)
    each = (closing + g.max_drafts) // kpool
    assert len(plan.chunk.index_slots) == 2 * each
