"""The shrinker ends, from ten seeds, in the one minimum that exhaustive enumeration proves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec
import pytest

import systems
from fuzz import mutants, targets
from fuzz.enumerate import outcomes
from fuzz.outcome import Outcome
from fuzz.run import execute
from fuzz.shrink import cost, shrink
from fuzz.tape import Tape, trimmed
from fuzz.targets.setup import Pin
from reference.contract import System
from reference.geometry import RowFormat

SEEDS = range(10)
SEARCH_S, SHRINK_S = 1.0, 2.0
"""Bars: median search, and each shrink.  In seconds of CPU, since tests run side by side."""
SHRUNK, TRIES = 400, 3
"""Executions of each shrink at most, which a loaded machine does not change.  Its seconds are the
least of so many tries: the work is the same in each, and the rest is what else the core did."""
ONE_LIFE = {"submit": 1, "extend": 4, "decode": 4, "verify": 2, "accept": 4}
"""Operations of a request that never ends, so that with one at a time nothing is shared."""
TINY = Pin(
    payload="stamped",
    kpool=2,
    physical_page_size=2,
    interval_pages=1,
    max_drafts=0,
    row_format=RowFormat.BF16,
    round_scale=True,
    page_order="reuse",
    seed=0,
    pages=12,
    max_requests=3,
    spare_states=8,
    max_tokens=8,
)


@pytest.fixture
def faulty() -> Iterator[System]:
    """The optimized engine with the fault of SGLang #41494."""
    with mutants.find("page_table_41494").applied():
        yield systems.load("optimized")


def search(system: System, seed: int, pin: Pin) -> Outcome:
    """The first failure from an empty corpus."""
    target = targets.find("prefix_split")
    for i in range(500):
        outcome = execute(system, target, Tape(seed=seed * 10_000 + i), pin=pin)
        if outcome.failed:
            return outcome
    raise AssertionError(f"no failure in 500 executions from seed {seed}")


def minimum(system: System, failing: Outcome, pin: Pin, *, executions: int = 1000) -> Outcome:
    target = targets.find("prefix_split")

    def run(values: Sequence[int]) -> Outcome:
        return execute(system, target, Tape(values), pin=pin)

    return shrink(run, failing, executions=executions)


def test_41494_is_found_and_shrunk_to_one_minimum_from_ten_seeds(faulty):
    search_s, minima = [], set()
    for seed in SEEDS:
        began = time.process_time()
        failing = search(faulty, seed, Pin())
        search_s.append(time.process_time() - began)
        shrink_s = []
        while len(shrink_s) < TRIES and min(shrink_s, default=SHRINK_S) >= SHRINK_S:
            began = time.process_time()
            shrunk = minimum(faulty, failing, Pin(), executions=SHRUNK)
            shrink_s.append(time.process_time() - began)
        assert min(shrink_s) < SHRINK_S
        minima.add((tuple(trimmed(shrunk.values)), shrunk.signature))
    assert statistics.median(search_s) < SEARCH_S
    assert len(minima) == 1
    assert minima.pop()[1] == "provenance/index"


@pytest.mark.timeout(900)  # a minute of CPU, and a busy machine gives it little
def test_the_minimum_of_41494_is_the_least_failing_run_of_a_tiny_geometry(faulty):
    """Every run of up to three operations on prompts of a page and a half, in all ways to share
    and to chunk; and every longer run of two operations."""
    target = targets.find("prefix_split")

    def run(operations: int) -> Callable[[Sequence[int]], Outcome]:
        pin = msgspec.structs.replace(TINY, operations=operations)
        return lambda values: execute(faulty, target, Tape(values), pin=pin)

    assert not any(outcome.failed for outcome in outcomes(run(2), tokens=12))
    failing = [outcome for outcome in outcomes(run(3), tokens=6) if outcome.failed]
    least = min(failing, key=cost)
    assert [operation.text for operation in least.operations] == [
        "submit request 0 with 2 tokens",
        "submit request 1 with 4 tokens, the first 2 as in request 0",
        "extend request 0 to 2, request 1 to 4",
    ]
    for seed in SEEDS:
        shrunk = minimum(faulty, search(faulty, seed, TINY), TINY)
        assert cost(shrunk) == cost(least)


def test_the_faithful_engine_passes_the_minimum():
    with mutants.find("page_table_41494").applied():
        system = systems.load("optimized")
        shrunk = minimum(system, search(system, 0, Pin()), Pin())
    target = targets.find("prefix_split")
    again = execute(systems.load("optimized"), target, Tape(shrunk.values))
    assert again.violations == []
    assert [o.text for o in again.operations[:3]] == [o.text for o in shrunk.operations]


def test_with_the_fault_and_nothing_shared_all_is_right():
    """The control: submissions without a parent, so that no page has two readers."""
    with mutants.find("page_table_41494").applied():
        system, target = systems.load("optimized"), targets.find("prefix_split")
        alone = Pin(payload="stamped", max_requests=1, pages=40)
        for seed in range(60):
            tape = Tape(seed=seed)
            outcome = execute(system, replace(target, weights=ONE_LIFE), tape, pin=alone)
            assert outcome.violations == []


def test_a_budget_is_kept(faulty):
    runs = []

    def run(values: Sequence[int]) -> Outcome:
        runs.append(values)
        return execute(faulty, targets.find("prefix_split"), Tape(values))

    failing = search(faulty, 0, Pin())
    shrunk = shrink(run, failing, executions=20)
    assert len(runs) <= 20
    assert cost(shrunk) <= cost(failing)
    assert shrunk.signature == failing.signature
