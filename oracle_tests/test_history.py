"""The account of what was used when, and what an engine may leave free in it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import systems
from optimized.memory.prefix_tree import Node, PrefixTree
from oracle_tests.test_oracles import EVICT, EXTEND, FINISH, SUBMIT, run
from reference.contract import Capability, System


def keeping_no_age() -> System:
    system = systems.load("optimized")

    def build(*args: Any, **kwargs: Any) -> Any:
        engine = system.factory(*args, **kwargs)
        engine.capabilities -= {Capability.KEEPS_AGE}
        return engine

    return replace(system, factory=build)


def signatures(system: System) -> set[str]:
    """Two prefixes are cached; a third shares the first page of the older one; one is evicted."""
    life = [[EXTEND, 0, 0, 0, 0], [FINISH, 0, 0, 0, 0]]
    submits = [[SUBMIT, 0, 0, 16, 0], [SUBMIT, 0, 0, 16, 0], [SUBMIT, 1, 0, 16, 10]]
    operations = [step for submit in submits for step in (submit, *life)] + [[EVICT, 0, 0, 0, 0]]
    outcome = run(system, operations=operations)
    return {violation.signature for violation in outcome.violations}


def test_the_rest_of_a_cut_prefix_stays_old_or_is_said_not_to(monkeypatch: pytest.MonkeyPatch):
    split = PrefixTree.split

    def renewed(self: PrefixTree, node: Node, depth: int) -> Node:
        upper = split(self, node, depth)
        self._touch(node)
        return upper

    monkeypatch.setattr(PrefixTree, "split", renewed)
    assert signatures(systems.load("optimized")) == {"exact/evict"}
    assert signatures(keeping_no_age()) == set()
