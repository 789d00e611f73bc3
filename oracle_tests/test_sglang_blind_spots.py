"""Three ways in which a test of SGLang's kernels sees nothing, each with a fault that only the
measure against it shows."""

from __future__ import annotations

import pytest

from oracle_tests.sglang_world import on

pytestmark = pytest.mark.sglang
RELEASE = "0.5.23"


@pytest.mark.parametrize(("together", "wrong"), [(True, [0]), (False, [])])
def test_a_batch_of_one_hides_that_rows_are_mixed_up(together, wrong):
    assert on(RELEASE, "first_row_for_all", together)["index"] == wrong


@pytest.mark.parametrize(("page_order", "wrong"), [("permuted", True), ("reuse", False)])
def test_pages_in_their_natural_order_hide_who_takes_them_for_neighbours(page_order, wrong):
    assert bool(on(RELEASE, "neighbouring_pages", page_order)["index"]) == wrong


@pytest.mark.parametrize(("whole_buffers", "seen"), [(True, ["containment/index"]), (False, [])])
def test_reading_back_hides_what_is_written_beside(whole_buffers, seen):
    assert on(RELEASE, "stray_row", whole_buffers) == seen
