"""Properties of `reference.addressing`: the vectorised forms, the bytes, the groups seen.

That no two owners meet is proved for all geometries in test_address_lemmas.py; here are the
numpy forms that the oracles use, checked against the scalar ones and against plain counting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import addressing
from reference.geometry import Geometry, Group, IndexSlot, LogicalPage, Position

KPOOLS = (1, 2, 4, 8)


def geometry_of(kpool: int, groups_a_page: int, drafts: int = 0) -> Geometry:
    page = kpool * groups_a_page
    return Geometry(
        kpool=kpool,
        physical_page_size=page,
        topk=4 * kpool,
        mamba_track_interval=page * kpool,
        max_drafts=drafts,
    )


geometries = st.builds(
    geometry_of, st.sampled_from(KPOOLS), st.integers(1, 5), drafts=st.integers(0, 3)
)


@dataclass(frozen=True)
class Case:
    """A geometry and a page table of distinct pages in any order, none of them padding."""

    geometry: Geometry
    pages: tuple[LogicalPage, ...]

    @property
    def positions(self) -> int:
        return len(self.pages) * self.geometry.logical_page_size

    @property
    def groups(self) -> int:
        return self.positions // self.geometry.kpool

    def locs(self) -> list[int]:
        return [
            addressing.loc_of(self.pages, Position(p), self.geometry) for p in range(self.positions)
        ]

    def slots(self) -> list[int]:
        return [
            addressing.index_slot_of(self.pages, Group(j), self.geometry)
            for j in range(self.groups)
        ]


tables = st.lists(st.integers(1, 40).map(LogicalPage), min_size=1, max_size=4, unique=True).map(
    tuple
)
cases = st.builds(Case, geometries, tables)
quick = settings(max_examples=60, deadline=None)


@quick
@given(cases, st.data())
def test_vectorised_locs_and_slots_equal_the_scalar_ones(case: Case, data: st.DataObject) -> None:
    locs, slots = np.array(case.locs()), np.array(case.slots())
    start = data.draw(st.integers(0, case.positions))
    stop = data.draw(st.integers(start, case.positions))
    found = addressing.locs(case.pages, start, stop, case.geometry)
    assert found.dtype == np.int64
    assert np.array_equal(found, locs[start:stop])
    some = np.array(data.draw(st.lists(st.integers(0, case.positions - 1), max_size=8)), np.int64)
    assert np.array_equal(addressing.locs_at(case.pages, some, case.geometry), locs[some])
    # page tables come as tuples from a snapshot, and as arrays from a caller's model
    array = np.array(case.pages)
    start = data.draw(st.integers(0, case.groups))
    found = addressing.index_slots(array, start, case.groups, case.geometry)
    assert found.dtype == np.int64
    assert np.array_equal(found, slots[start:])


@quick
@given(cases)
def test_rows_and_slots_of_a_table_are_exactly_those_of_its_pages(case: Case) -> None:
    """Counted out: live positions fill the rows of their pages once, live groups the index
    pages of the same ids."""
    size, index_size = case.geometry.logical_page_size, case.geometry.index_page_size
    rows = [page * size + offset for page in case.pages for offset in range(size)]
    assert case.locs() == rows
    slots = [page * index_size + row for page in case.pages for row in range(index_size)]
    assert case.slots() == slots
    homes = [addressing.index_page_of(IndexSlot(s), case.geometry) for s in slots]
    assert homes == [page for page in case.pages for _ in range(index_size)]


@quick
@given(cases)
def test_every_token_of_a_group_leads_to_its_slot(case: Case) -> None:
    kpool, slots = case.geometry.kpool, case.slots()
    assert [loc // kpool for loc in case.locs()] == [s for s in slots for _ in range(kpool)]


@quick
@given(cases)
def test_physical_pages_are_the_runs_of_the_logical_ones(case: Case) -> None:
    """An attention kernel that knows physical pages alone reads the same rows."""
    page = case.geometry.physical_page_size
    table = addressing.physical_pages(case.pages, case.geometry)
    assert len(table) == len(case.pages) * case.geometry.kpool
    assert case.locs() == [table[p // page] * page + p % page for p in range(case.positions)]


@quick
@given(st.integers(1, 64), tables)
def test_kpool_1_is_unpooled_addressing(page: int, pages: tuple[LogicalPage, ...]) -> None:
    case = Case(geometry_of(1, page), pages)
    assert case.slots() == case.locs()
    assert addressing.physical_pages(pages, case.geometry) == pages
    for position in range(case.positions):
        assert addressing.visible_groups(Position(position), case.geometry) == position + 1
        assert addressing.tail_start(position, case.geometry) == position
        assert addressing.ring_row_of(Position(position), case.geometry) == 0


@quick
@given(geometries, st.integers(0, 300))
def test_tail_and_closed_groups_partition_the_positions(geometry: Geometry, length: int) -> None:
    kpool = geometry.kpool
    start = addressing.tail_start(length, geometry)
    closed = [p for j in range(start // kpool) for p in range(j * kpool, (j + 1) * kpool)]
    assert closed + list(range(start, length)) == list(range(length))
    assert length - start < kpool


@quick
@given(geometries, st.integers(0, 300))
def test_a_position_sees_the_groups_that_end_by_then(geometry: Geometry, position: int) -> None:
    ends = range(geometry.kpool - 1, 400, geometry.kpool)
    seen = sum(end <= position for end in ends)
    assert addressing.visible_groups(Position(position), geometry) == seen
    # what is seen and what waits meet without a gap: selection loses no position
    assert seen * geometry.kpool == addressing.tail_start(position + 1, geometry)


@quick
@given(geometries, st.integers(0, 300))
def test_what_waits_has_ring_rows_of_its_own(geometry: Geometry, length: int) -> None:
    """The tail, and the new token or the drafts of a verify."""
    new = max(geometry.max_drafts, 1)
    waiting = range(addressing.tail_start(length, geometry), length + new)
    rows = {addressing.ring_row_of(Position(p), geometry) for p in waiting}
    assert len(rows) == len(waiting)
    assert rows <= set(range(geometry.ring_size))


@quick
@given(geometries, st.integers(0, 500))
def test_pages_for_is_the_least_number_that_holds_the_tokens(
    geometry: Geometry, length: int
) -> None:
    count, size = addressing.pages_for(length, geometry), geometry.logical_page_size
    assert (count - 1) * size < length <= count * size


@quick
@given(geometries, st.integers(1, 3), st.sampled_from((1, 16, 128)))
def test_keys_and_scales_fill_an_index_page_without_overlap(
    geometry: Geometry, page: int, index_dim: int
) -> None:
    slots = np.arange(geometry.index_page_size) + page * geometry.index_page_size
    offsets = addressing.index_byte_offsets(slots, geometry, index_dim)
    size = geometry.index_page_bytes(index_dim)
    assert offsets.shape == (geometry.index_page_size, index_dim + 4)
    assert np.array_equal(np.sort(offsets, axis=None), np.arange(page * size, (page + 1) * size))


@quick
@given(geometries, st.lists(st.integers(0, 200), max_size=6), st.sampled_from((1, 16, 128)))
def test_vectorised_byte_offsets_equal_the_scalar_ones(
    geometry: Geometry, slots: list[int], index_dim: int
) -> None:
    offsets = addressing.index_byte_offsets(np.array(slots, np.int64), geometry, index_dim)
    for slot, row in zip(slots, offsets, strict=True):
        key = addressing.key_offset(IndexSlot(slot), geometry, index_dim)
        scale = addressing.scale_offset(IndexSlot(slot), geometry, index_dim)
        assert row.tolist() == [*range(key, key + index_dim), *range(scale, scale + 4)]


@pytest.mark.parametrize("page", [0, 1, 2, 1000])
def test_glm_scale_words_lie_where_sglang_reads_them(page: int) -> None:
    """64 keys of 128 bytes, then 64 float32: scale word = page * 2112 + 2048 + row."""
    geometry = Geometry()
    for row in range(64):
        slot = IndexSlot(page * 64 + row)
        assert addressing.scale_offset(slot, geometry, 128) == 4 * (page * 2112 + 2048 + row)
        assert addressing.key_offset(slot, geometry, 128) == page * 8448 + row * 128


def test_offsets_pass_the_reach_of_32_bits() -> None:
    """A pool of a million index pages has 8 GB: byte offsets need 64 bits."""
    slots = np.array([1_000_000 * 64 + 63], np.int64)
    offsets = addressing.index_byte_offsets(slots, Geometry(), 128)
    assert offsets[0, -1] == 1_000_001 * 8448 - 1
