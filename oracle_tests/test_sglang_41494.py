"""SGLang #41494: found in the releases that have it, shrunk, and gone from those that have not."""

from __future__ import annotations

import pytest

from oracle_tests.sglang_world import on

pytestmark = pytest.mark.sglang
SIGNATURE = "provenance/index"


@pytest.mark.parametrize("release", ["0.5.20", "0.5.21"])
def test_pooled_keys_of_a_shared_page_are_overwritten(release):
    """Three requests share 320 tokens, in releases whose page is of 64."""
    assert any(wrong["index"] for wrong in on(release, "life")["wrong"])


@pytest.mark.timeout(900)  # minutes of CPU, in an interpreter
def test_prefix_split_finds_it_and_shrinks_it_to_three_requests():
    found = on("0.5.21", "hunt", 60)
    assert found["signatures"] == [SIGNATURE]
    assert found["requests"] <= 3
    (sentence,) = found["sentences"]
    assert "reads as index row" in sentence
    for fixed in ("0.5.22", "0.5.23"):
        assert on(fixed, "replayed", found["values"])["signatures"] == []


@pytest.mark.parametrize("release", ["0.5.22", "0.5.23"])
def test_what_fails_before_the_fix_is_clean_after_it(release):
    """By seeds of which each fails on 0.5.21."""
    seeds = [0, 3]
    assert on("0.5.21", "campaign", "prefix_split", seeds) == [[SIGNATURE]] * len(seeds)
    assert on(release, "campaign", "prefix_split", seeds) == [[]] * len(seeds)
