"""The prefix tree against a dict from each cached prefix to its page."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from optimized.memory.allocator import Allocator
from optimized.memory.prefix_tree import Node, PrefixTree

PAGE = 2
Prefix = tuple[int, ...]
prefixes = st.lists(st.sampled_from([(0, 0), (0, 1), (1, 0)]), min_size=1, max_size=6).map(
    lambda pages: tuple(token for page in pages for token in page)
)


def array(tokens: Prefix) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def pages_of(tokens: Prefix) -> list[Prefix]:
    """The prefixes of `tokens` that end with a page."""
    return [tokens[:stop] for stop in range(PAGE, len(tokens) + 1, PAGE)]


class Cached(RuleBasedStateMachine):
    """Model: `pages` and `states` map a prefix to the page and the checkpoint at its end; `held`
    lists the locked prefixes with their nodes."""

    @initialize()
    def build(self) -> None:
        self.page_ids = Allocator(200, order="permuted", seed=1)
        self.state_ids = Allocator(200, order="permuted", seed=2)
        self.tree = PrefixTree(page_size=PAGE, pages=self.page_ids, states=self.state_ids)
        self.pages: dict[Prefix, int] = {}
        self.states: dict[Prefix, int] = {}
        self.held: list[tuple[Prefix, Node]] = []

    @rule(tokens=prefixes, kept=st.integers(0, 63))
    def insert(self, tokens: Prefix, kept: int) -> None:
        """As a request does: with its own pages, a checkpoint at the end, perhaps others."""
        path = pages_of(tokens)
        own = self.page_ids.allocate(len(path))
        ends = [p for i, p in enumerate(path) if kept >> i & 1 or p == tokens]
        slots = dict(zip(ends, self.state_ids.allocate(len(ends)).tolist(), strict=True))
        done = self.tree.insert(array(tokens), own, {len(p): s for p, s in slots.items()})
        assert sorted(done.surplus) == sorted(s for p, s in slots.items() if p in self.states)
        for prefix, page in zip(path, own.tolist(), strict=True):
            self.pages.setdefault(prefix, page)
        for prefix, slot in slots.items():
            self.states.setdefault(prefix, slot)
        assert done.pages.tolist() == [self.pages[prefix] for prefix in path]
        assert done.node.depth == len(tokens)
        self.page_ids.release(own)
        self.state_ids.release(done.surplus)

    @rule(tokens=prefixes, last=st.integers(0, 1), lock=st.booleans())
    def match(self, tokens: Prefix, last: int, lock: bool) -> None:
        """`last` also tries requests whose length is no whole number of pages."""
        tokens = (*tokens, last)[: len(tokens) + last]
        found = self.tree.match(array(tokens))
        resumable = [p for p in pages_of(tokens) if p in self.states and len(p) < len(tokens)]
        hit = resumable[-1] if resumable else ()
        assert found.hit == len(hit)
        assert found.state_slot == self.states.get(hit, 0)
        assert found.node.depth == len(hit)
        path = self.tree.path_pages(found.node).tolist()
        assert path == [self.pages[p] for p in pages_of(hit)]
        if lock:
            self.tree.lock(found.node)
            self.held.append((hit, found.node))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.held) - 1))
        self.tree.unlock(self.held.pop(at)[1])

    @rule(pages=st.integers(0, 3), states=st.integers(0, 2))
    def evict(self, pages: int, states: int) -> None:
        before = set(self.pages), set(self.states)
        gone_pages = self.tree.evict(pages=pages, states=states)
        left = {prefix for prefix, _ in self.spelled()}
        gone = before[0] - left
        self.pages = {p: page for p, page in self.pages.items() if p in left}
        self.states = {p: slot for p, slot in self.states.items() if p in left}
        assert gone_pages == len(gone)
        locked = {p for held, _ in self.held for p in pages_of(held)}
        assert not gone & locked
        enough = len(gone) >= pages and len(before[1]) - len(self.states) >= states
        assert enough or set(self.pages) == locked

    def spelled(self) -> list[tuple[Prefix, int]]:
        """Each cached prefix with its page, as the tree has it."""
        spelling: dict[int, Prefix] = {self.tree.root.id: ()}
        out = []
        for node in self.tree.nodes():
            assert node.parent is not None
            spelling[node.id] = spelling[node.parent.id] + tuple(node.tokens.tolist())
            path = pages_of(spelling[node.id])[-len(node.pages) :]
            out += zip(path, node.pages.tolist(), strict=True)
        return out

    @invariant()
    def tree_and_model_agree(self) -> None:
        if not hasattr(self, "tree"):
            return
        found = self.spelled()
        assert len(found) == len(dict(found)), "a prefix is cached once"
        assert dict(found) == self.pages
        held = {int(i): int(n) for i, n in enumerate(self.page_ids.counts) if n}
        assert held == dict.fromkeys(self.pages.values(), 1)
        assert self.state_ids.available == 199 - len(self.states)
        spelling: dict[int, Prefix] = {self.tree.root.id: ()}
        checkpoints = {}
        for node in self.tree.nodes():
            assert node.parent is not None
            spelling[node.id] = spelling[node.parent.id] + tuple(node.tokens.tolist())
            assert all(node.start < at <= node.depth for at in node.checkpoints)
            checkpoints |= {spelling[node.id][:at]: s for at, s in node.checkpoints.items()}
            below = [p for p, _ in self.held if p[: node.depth] == spelling[node.id]]
            assert node.locks == len(below)
        assert checkpoints == self.states


Cached.TestCase.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
TestCached = Cached.TestCase


@pytest.fixture
def tree() -> PrefixTree:
    return PrefixTree(page_size=PAGE, pages=Allocator(40), states=Allocator(40))


def cache(tree: PrefixTree, tokens: Prefix) -> None:
    """Insert `tokens` with one checkpoint, at their end."""
    pages = tree.pages.allocate(len(tokens) // PAGE)
    done = tree.insert(array(tokens), pages, {len(tokens): int(tree.states.allocate(1)[0])})
    tree.pages.release(pages)
    tree.states.release(done.surplus)


def hit(tree: PrefixTree, tokens: Prefix) -> int:
    return tree.match(array((*tokens, 9))).hit


def test_the_least_recently_used_leaf_goes_first(tree: PrefixTree) -> None:
    for first in (1, 2, 3):
        cache(tree, (first, first))
    assert hit(tree, (1, 1)) == 2
    assert tree.evict(pages=1) == 1
    assert [hit(tree, (first, first)) for first in (1, 2, 3)] == [2, 0, 2]


def test_a_parent_goes_after_its_children(tree: PrefixTree) -> None:
    cache(tree, (1, 1, 2, 2))
    cache(tree, (1, 1))
    assert tree.evict(pages=2) == 2
    assert tree.evict(pages=1) == 0


def test_a_lock_on_a_child_keeps_the_whole_path(tree: PrefixTree) -> None:
    cache(tree, (1, 1))
    cache(tree, (1, 1, 2, 2))
    node = tree.match(array((1, 1, 2, 2, 9))).node
    tree.lock(node)
    assert tree.evict(pages=9) == 0
    tree.unlock(node)
    assert tree.evict(pages=9) == 2


def test_states_are_evicted_on_their_own_account(tree: PrefixTree) -> None:
    for first in (1, 2):
        cache(tree, (first, first, first, first))
    free = tree.states.available
    assert tree.evict(states=1) == 2
    assert tree.states.available == free + 1


def test_a_match_leaves_a_token_to_compute(tree: PrefixTree) -> None:
    cache(tree, (1, 1))
    cache(tree, (1, 1, 2, 2))
    assert tree.match(array((1, 1, 2, 2))).hit == 2


def test_a_page_is_no_prefix_at_another_depth(tree: PrefixTree) -> None:
    """The third page hangs below an edge that the request leaves after its first."""
    cache(tree, (1, 1, 2, 2))
    cache(tree, (1, 1, 2, 2, 3, 3))
    assert hit(tree, (1, 1, 3, 3)) == 0
    cache(tree, (1, 1))
    assert hit(tree, (1, 1, 3, 3)) == 2


def test_an_insert_of_part_pages_is_caught(tree: PrefixTree) -> None:
    with pytest.raises(AssertionError, match="whole pages"):
        tree.insert(array((1, 1, 2)), tree.pages.allocate(1), {})
