"""Where SGLang's scheduler ends chunks, and of which position the KDA states are that it caches."""

from __future__ import annotations

import pytest

from oracle_tests.sglang_world import on

pytestmark = pytest.mark.sglang
RELEASES = {
    "0.5.21": ([512, 1024, 1536, 1600], {1408, 1536}),
    "0.5.23": ([512, 1024, 1536], {1024}),
}
"""The prefixes with a state when nobody decodes, and with five decoding those whose state is that
of a later position."""


@pytest.mark.parametrize("release", RELEASES)
def test_chunks_of_whole_pages_keep_the_states_of_their_ends(release):
    seen = on(release, "mixed_chunks", 0)
    assert seen["ends"] == [512, 1024, 1536, 1600]
    prefixes, _ = RELEASES[release]
    assert seen["right"] == [[length, True] for length in prefixes]


@pytest.mark.parametrize("release", RELEASES)
def test_a_chunk_that_ends_inside_a_page_leaves_the_state_of_a_later_position(release):
    seen = on(release, "mixed_chunks", 5)
    assert seen["ends"] == [512, 1019, 1526, 1600]
    _, wrong = RELEASES[release]
    assert {length for length, right in seen["right"] if not right} == wrong
