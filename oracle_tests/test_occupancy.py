"""Tokens and rows under HiSparse: conservation, and the owners of rows in every tiny case."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest

from reference.contract import InvalidCall, Occupancy
from reference.geometry import Geometry
from reference.occupancy import admits, hot_rows, judge_occupancy, judge_owners

BALANCED = Occupancy(
    device_free=24,
    device_hot=16,
    device_total=40,
    host_free=8,
    host_held=72,
    host_total=80,
    logical_free=16,
    logical_owned=32,
    logical_cached=32,
    logical_total=80,
)


def test_occupancy_is_conserved_in_each_memory_apart() -> None:
    assert not judge_occupancy(BALANCED, running=2, rows_each=8)
    for field in BALANCED.__slots__:
        off = replace(BALANCED, **{field: getattr(BALANCED, field) + 1})
        found = judge_occupancy(off, running=2, rows_each=8)
        assert found[0].startswith(f"{field.split('_')[0]} tokens should add up")
    hidden = replace(BALANCED, device_free=32, device_hot=8)
    assert judge_occupancy(hidden, running=2, rows_each=8) == [
        "2 hot buffers should take 16 device tokens; 8 are reported."
    ]
    negative = replace(BALANCED, host_free=-1, host_held=81)
    assert judge_occupancy(negative, running=2, rows_each=8)


def test_admission_counts_whole_hot_buffers_and_whole_pages() -> None:
    geometry = Geometry(
        kpool=2, physical_page_size=4, topk=4, mamba_track_interval=8, device_buffer_size=5
    )
    assert [hot_rows(5, 4), hot_rows(4, 4)] == [12, 8]
    room = replace(BALANCED, device_free=12, host_free=16)
    assert admits(room, 16, geometry, page_size=4)
    assert not admits(room, 17, geometry, page_size=4)
    assert admits(room, 17, geometry, page_size=4, shared=8)
    assert not admits(replace(room, device_free=11), 1, geometry, page_size=4)
    with pytest.raises(InvalidCall, match="set device_buffer_size"):
        admits(room, 1, replace(geometry, device_buffer_size=None), page_size=4)


@pytest.mark.parametrize("shared", [frozenset[int](), frozenset({2})])
def test_owners_are_judged_right_in_every_tiny_case(shared: frozenset[int]) -> None:
    """Two owners and the free rows, each any subset of padding row 0 and rows 1 and 2."""
    subsets = [c for n in range(4) for c in combinations(range(3), n)]
    for a, b, free in product(subsets, repeat=3):
        holders = [(row in a) + (row in b) + (row in free) for row in range(3)]
        legal = holders[0] == 0 and holders[1] == 1
        legal &= (2 not in free) if shared else holders[2] == 1
        found = judge_owners("host row", {"a": a, "b": b}, free, range(1, 3), shared=shared)
        assert (not found) == legal
    assert judge_owners("device row", {"a": [1, 1]}, [2, 2], range(1, 4)) == [
        "device row 1 should have one owner; it has ['a'], 2 times.",
        "device row 2 should be free once; it is free 2 times.",
        "device row 3 should be free or owned; it is leaked.",
    ]
