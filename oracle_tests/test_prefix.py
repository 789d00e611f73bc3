"""Prefix sharing: the hits of `reference.prefix` against brute force on a binary alphabet."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import prefix
from reference.contract import CachedNode
from reference.geometry import Geometry
from reference.prefix import CachedPrefix

PAIRS = Geometry(kpool=1, physical_page_size=2, topk=1, mamba_track_interval=2)
QUERIES = [query for length in range(1, 8) for query in product((0, 1), repeat=length)]


def binary_prefixes() -> st.SearchStrategy[CachedPrefix]:
    """Up to three pages of two binary tokens, with checkpoints anywhere, page ends or not."""
    return st.integers(1, 3).flatmap(
        lambda pages: st.builds(
            CachedPrefix,
            tokens=st.tuples(*[st.integers(0, 1)] * (2 * pages)),
            pages=st.just(tuple(range(1, pages + 1))),
            checkpoints=st.frozensets(st.integers(1, 2 * pages)),
        )
    )


def is_legal(query: tuple[int, ...], hit: int, prefixes: list[CachedPrefix]) -> bool:
    """The rule of sharing, read out: nothing, or whole pages of a cached prefix with a KDA
    state at their end, and at least one token left to compute."""
    return hit == 0 or (
        hit < len(query)
        and hit % PAIRS.logical_page_size == 0
        and any(p.tokens[:hit] == query[:hit] and hit in p.checkpoints for p in prefixes)
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(binary_prefixes(), max_size=4))
def test_hits_are_those_of_brute_force(prefixes: list[CachedPrefix]) -> None:
    for query in QUERIES:
        legal = {hit for hit in range(len(query) + 1) if is_legal(query, hit, prefixes)}
        assert prefix.legal_hits(query, prefixes, PAIRS) == legal
        assert prefix.longest_hit(query, prefixes, PAIRS) == max(legal)


@settings(max_examples=60, deadline=None)
@given(st.lists(binary_prefixes(), max_size=3), binary_prefixes(), st.sampled_from(QUERIES))
def test_more_cache_and_more_tokens_never_shorten_a_hit(
    prefixes: list[CachedPrefix], more: CachedPrefix, query: tuple[int, ...]
) -> None:
    hit = prefix.longest_hit(query, prefixes, PAIRS)
    assert prefix.longest_hit(query, [*prefixes, more], PAIRS) >= hit
    assert prefix.longest_hit((*query, 0), prefixes, PAIRS) >= hit


def test_a_hit_leaves_a_token_to_compute() -> None:
    cached = [CachedPrefix(tokens=(0, 1, 0, 1), pages=(1, 2), checkpoints=frozenset((2, 4)))]
    assert prefix.longest_hit((0, 1, 0, 1), cached, PAIRS) == 2
    assert prefix.longest_hit((0, 1, 0, 1, 1), cached, PAIRS) == 4


def test_a_hit_ends_on_a_checkpoint_however_long_the_match() -> None:
    cached = [CachedPrefix(tokens=(0,) * 6, pages=(1, 2, 3), checkpoints=frozenset((2,)))]
    assert prefix.longest_hit((0,) * 7, cached, PAIRS) == 2
    assert prefix.longest_hit((0,) * 7, [replace(cached[0], checkpoints=frozenset())], PAIRS) == 0


def node(number: int, parent: int | None, tokens: tuple[int, ...], **fields: Any) -> CachedNode:
    pages = tuple(10 * number + i for i in range(len(tokens) // 2))
    return CachedNode(
        node=number,
        parent=parent,
        tokens=tokens,
        pages=pages,
        checkpoints=fields.get("checkpoints", {}),
        locks=0,
    )


def test_the_prefix_of_a_node_is_its_path_from_the_root() -> None:
    tree = [
        node(3, 2, (5, 6), checkpoints={8: 1}),
        node(1, None, (0, 1, 2, 3), checkpoints={2: 2}),
        node(2, 1, (4, 4), checkpoints={6: 3}),
        node(4, 1, (9, 9)),
    ]
    paths = prefix.cached_prefixes(tree)
    assert paths[3] == CachedPrefix(
        tokens=(0, 1, 2, 3, 4, 4, 5, 6), pages=(10, 11, 20, 30), checkpoints=frozenset((2, 6, 8))
    )
    assert paths[4].pages == (10, 11, 40)
    assert paths[1].checkpoints == {2}


@pytest.mark.parametrize(("parent", "lost"), [(7, {2, 3}), (3, {2, 3}), (2, {2, 3})])
def test_a_node_cut_off_from_the_root_spells_no_prefix(parent: int, lost: set[int]) -> None:
    """Its parent is unknown, or it hangs on its own child, or on itself."""
    tree = [node(1, None, (0, 0)), node(2, parent, (1, 1)), node(3, 2, (2, 2))]
    assert prefix.cached_prefixes(tree).keys() == {1, 2, 3} - lost


@settings(max_examples=60, deadline=None)
@given(binary_prefixes(), st.integers(1, 2), st.sampled_from(QUERIES))
def test_splitting_a_node_changes_no_hit(
    cached: CachedPrefix, pages: int, query: tuple[int, ...]
) -> None:
    cut = min(2 * pages, len(cached.tokens) - 2)
    whole = node(1, None, cached.tokens, checkpoints=dict.fromkeys(cached.checkpoints, 1))
    upper, lower = cached.tokens[:cut], cached.tokens[cut:]
    halves = [
        node(1, None, upper, checkpoints={m: 1 for m in cached.checkpoints if m <= cut}),
        node(2, 1, lower, checkpoints={m: 1 for m in cached.checkpoints if m > cut}),
    ]
    before, after = (
        prefix.legal_hits(query, prefix.cached_prefixes(tree).values(), PAIRS)
        for tree in ([whole], halves if cut else [whole])
    )
    assert before == after
