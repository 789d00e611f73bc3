"""SGLang's own caches behind the contract, release by release."""

from __future__ import annotations

import pytest

from oracle_tests.sglang_world import on

pytestmark = pytest.mark.sglang
PHYSICAL, LOGICAL = ("0.5.20", "0.5.21"), ("0.5.22", "0.5.23")
EMPTY = {"kv": [], "index": [], "tail": [], "state": []}


@pytest.mark.parametrize("release", LOGICAL)
def test_every_row_that_a_request_reads_is_its_own(release):
    seen = on(release, "life")
    assert seen["hits"] == [0, 256, 256]
    assert seen["wrong"] == [EMPTY] * 3
    assert seen["kept"]
    assert seen["again"] == 256
    assert seen["resumed"] == EMPTY
    assert seen["judged"] == []
    assert seen["evicted"]
    assert seen["conserved"]


@pytest.mark.parametrize("release", PHYSICAL)
def test_what_a_release_before_41494_keeps_apart_is_right_too(release):
    """All but the pooled keys, which that fault is about."""
    seen = on(release, "life")
    # the first sharer finds no KDA state where the prompts part, and leaves one there
    assert seen["hits"] == [0, 0, 320]
    assert [dict(wrong, index=[]) for wrong in seen["wrong"]] == [EMPTY] * 3
    assert seen["kept"]
    assert dict(seen["resumed"], index=[]) == EMPTY
    assert seen["judged"] == []
    assert seen["evicted"]
    assert seen["conserved"]


@pytest.mark.parametrize("release", ["0.5.20", "0.5.23"])
def test_a_request_that_is_retracted_before_it_has_begun_again_is_right(release):
    """A campaign found the adapter take a token from it that had been given."""
    assert on(release, "retracted_twice") == EMPTY


@pytest.mark.parametrize("release", ["0.5.21", "0.5.23"])
def test_refusals_name_the_cure_and_change_nothing(release):
    seen = on(release, "refusals")
    assert seen["unchanged"]
    words = {
        "another page": "physical page of 64 tokens",
        "a model": "model runs",
        "twice": "runs already",
        "nobody": "submit it first",
        "too long": "finish, abort or retract a request",
        "too early": "extend it first",
    }
    for what, sentence in words.items():
        assert sentence in seen["said"][what]


@pytest.mark.parametrize("target", ["prefix_split", "slot_reuse"])
def test_the_oracles_find_nothing_in_the_latest_release(target):
    assert on("0.5.23", "campaign", target, [3, 11]) == [[]] * 2
