"""The allocator against a plain dict of holders."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from optimized.memory.allocator import Allocator

SIZE = 9
ORDERS = ("reuse", "high", "permuted")


class Holders(RuleBasedStateMachine):
    """Every id is free or has as many holders as were told, never both."""

    @initialize(order=st.sampled_from(ORDERS))
    def build(self, order: str) -> None:
        self.scrubbed: list[int] = []
        self.allocator = Allocator(SIZE, order=order, scrub=lambda ids: self.scrubbed.extend(ids))
        self.held: Counter[int] = Counter()
        self.freed: set[int] = set()
        self.reused = 0

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        count = min(count, self.allocator.available)
        ids = self.allocator.allocate(count).tolist()
        assert len(set(ids)) == count
        assert not set(ids) & set(self.held)
        self.held.update(ids)
        self.reused += len(self.freed & set(ids))

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        ids = self.choose(data)
        self.allocator.retain(ids)
        self.held.update(ids)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        ids = self.choose(data)
        self.scrubbed.clear()
        self.allocator.release(ids)
        self.held -= Counter(ids)
        gone = {i for i in ids if not self.held[i]}
        assert sorted(self.scrubbed) == sorted(gone)
        self.freed |= gone
        self.held += Counter()

    def choose(self, data: st.DataObject) -> list[int]:
        return (
            data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
            if self.held
            else []
        )

    @invariant()
    def every_id_is_free_or_held(self) -> None:
        if not hasattr(self, "allocator"):
            return
        free = self.allocator.free_ids()
        assert free | set(self.held) == set(range(1, SIZE))
        assert not free & set(self.held)
        assert len(free) == self.allocator.available
        assert {i: int(n) for i, n in enumerate(self.allocator.counts) if n} == dict(self.held)
        assert self.allocator.reused == self.reused


Holders.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestHolders = Holders.TestCase


def test_reuse_hands_out_the_id_freed_last() -> None:
    allocator = Allocator(6, order="reuse")
    assert allocator.allocate(3).tolist() == [1, 2, 3]
    allocator.release([1])
    allocator.release([3])
    assert allocator.allocate(3).tolist() == [3, 1, 4]


def test_high_hands_out_the_highest_id() -> None:
    allocator = Allocator(6, order="high")
    assert allocator.allocate(2).tolist() == [5, 4]
    allocator.release([5])
    assert allocator.allocate(2).tolist() == [5, 3]


def test_permuted_follows_one_fixed_order_of_its_seed() -> None:
    orders = [Allocator(40, order="permuted", seed=s).allocate(39).tolist() for s in (1, 1, 2)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert sorted(orders[0]) == list(range(1, 40))
    allocator = Allocator(40, order="permuted", seed=1)
    allocator.allocate(39)
    allocator.release(orders[0][5:8])
    assert allocator.allocate(3).tolist() == orders[0][5:8]


@pytest.mark.parametrize(
    ("ids", "message"),
    [([2, 2], "released twice"), ([3], "released twice"), ([0], "padding")],
)
def test_a_release_without_a_hold_is_caught(ids: list[int], message: str) -> None:
    allocator = Allocator(6)
    allocator.allocate(2)
    with pytest.raises(AssertionError, match=message):
        allocator.release(ids)


def test_an_id_outside_the_pool_is_caught() -> None:
    with pytest.raises(IndexError):
        Allocator(6).release([6])


def test_a_free_id_cannot_be_shared() -> None:
    with pytest.raises(AssertionError, match="nobody holds"):
        Allocator(6).retain(np.array([4]))
