"""SGLang's target verify behind the contract: drafts, of which some are kept."""

from __future__ import annotations

import pytest

from oracle_tests.sglang_world import on

pytestmark = pytest.mark.sglang
EMPTY = {"kv": [], "index": [], "tail": [], "state": []}


@pytest.mark.parametrize("release", ["0.5.20", "0.5.22", "0.5.23"])
def test_every_row_behind_a_verify_is_its_request_s_own(release):
    """Groups closed by drafts that were rejected are written again, and states are kept where a
    page ends in the middle of a verify."""
    seen = on(release, "sglang_draft_cases.drafted_life")
    assert seen["wrong"] == [EMPTY] * len(seen["wrong"])
    assert seen["hit"] == 256
    assert seen["resumed"] == EMPTY
    assert len(seen["states"]) > 1
    assert all(right for _, right in seen["states"])
    assert seen["judged"] == []


def test_a_state_kept_one_draft_late_shows():
    """The control of the test above: a fault that only the cached states tell of."""
    seen = on("0.5.23", "sglang_draft_cases.late_state")
    assert seen["wrong"] == [EMPTY] * len(seen["wrong"])
    # the other request's page ends with its last draft, which no later one can be taken for
    assert seen["states"] == [[256, False], [256, True]]


@pytest.mark.parametrize("release", ["0.5.20", "0.5.23"])
def test_a_batch_commits_of_each_request_its_own(release):
    """Targets accept one request after the other; SGLang's workers, all of a batch at once."""
    assert on(release, "sglang_draft_cases.committed_together") == [
        {"stored": 102, "tokens": [7000, 7001], "last": 1, "cached": -1},
        {"stored": 258, "tokens": [8000, 8001, 8002, 8003, 8004], "last": 4, "cached": 2},
    ]


def test_the_oracles_find_nothing_in_runs_with_drafts():
    """Nor on 0.5.23, where the mutants' runs are the same."""
    assert on("0.5.22", "campaign", "prefix_split", [11, 14], True) == [[]] * 2


def test_refusals_name_the_cure():
    seen = on("0.5.23", "sglang_draft_cases.draft_refusals")
    words = {
        "early": "extend it to the end of its prompt",
        "decode": "verify instead",
        "few": "max_drafts, 6, always",
        "none": "max_drafts, 0, always",
        "nothing pending": "accept one at least",
        "none kept": "accept one at least",
        "twice": "accept what is pending",
    }
    assert seen.keys() == words.keys()
    for what, sentence in words.items():
        assert sentence in seen[what]
