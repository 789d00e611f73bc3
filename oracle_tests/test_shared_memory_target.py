"""Transfers through shared memory by the tape: who shares, what waits for what, and what is left
behind."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from fuzz import handover, mutants
from fuzz.handover import Handover
from fuzz.mutants.report import kill, shrunk
from fuzz.oracles.transfers import Transfers
from fuzz.tape import Tape
from fuzz.targets.shared_memory import (
    SHARED_BY,
    SHARED_MEMORY,
    Forgery,
    Hostility,
    SharedSetup,
    draw_shared_setup,
)
from oracle_tests.shm_cases import footprint
from reference.protocol import Phase, Side

TWO_RANKS = [0] * 6 + [0, 0, 1]
"""A tape of two ranks a side."""


def execute(values=(), *, seed=None):
    tape = Tape(values, seed=seed) if seed is not None else Tape(values)
    return handover.execute(SHARED_MEMORY, tape, most=SHARED_MEMORY.operations)


def setup_of(hostility=Hostility.NONE, forgery=Forgery.NONE, values=TWO_RANKS):
    shared = SharedSetup(hostility=hostility, forgery=forgery, device_faults=0)
    return replace(draw_shared_setup(Tape(values)), shared=shared)


@contextmanager
def started(setup):
    with torch.inference_mode(False):
        run = Handover(setup, Tape())
        run.begin()
        try:
            yield run
        finally:
            run.close()


def in_flight(run, tokens=6):
    """A request whose first copies wait to be made."""
    router = run.router
    asked = router.submit(range(1, tokens + 1), room=0)
    router.compute(asked, tokens, first_token=99)
    for side in (Side.DECODE, Side.PREFILL):
        run._do("tick", lambda side=side: run._ticked((side,)))
        run._do("network", lambda: str(run._steps(100, 0)))
    run._do("tick", lambda: run._ticked((Side.PREFILL,)))
    assert router.copies()
    assert run.violations == []
    return asked


def test_a_tape_replayed_observes_the_same():
    for seed in range(12):
        outcome = execute(seed=seed)
        again = execute(outcome.values)
        assert again.digest == outcome.digest
        assert again.values == outcome.values


def test_the_setup_covers_all_that_ends_may_try():
    drawn = [draw_shared_setup(Tape(seed=seed)) for seed in range(300)]
    seen = Counter(setup.shared.hostility for setup in drawn)
    assert set(seen) == set(Hostility)
    assert {setup.shared.forgery for setup in drawn} == set(Forgery)
    assert {setup.shared.device_faults for setup in drawn} == {0, 1}
    for setup in drawn:
        counts = setup.wiring.ranks.values()
        assert len(set(counts)) == 1, "both ends need as many ranks to share"
        assert setup.shared.hostility is not Hostility.MISROUTED or set(counts) == {2}
        assert setup.shared.is_shared or setup.shared.forgery is Forgery.NONE


def test_nothing_is_left_behind():
    """Descriptors, mappings, segments and threads; engines are collected as cycles."""
    execute(seed=0)
    gc.collect()
    before, threads = footprint(), threading.active_count()
    for seed in range(15):
        execute(seed=seed)
    gc.collect()
    assert footprint() == before
    assert threading.active_count() == threads


@pytest.mark.parametrize("hostility", Hostility)
def test_memory_is_shared_by_both_or_by_neither(hostility):
    with started(setup_of(hostility)) as run:
        assert run.violations == []
        for writer, reader in run.router.pairs():
            shares = hostility in SHARED_BY
            assert (writer.transport.why_not(reader.me) is None) is shares
            assert (reader.transport.why_not(writer.me) is None) is shares


@pytest.mark.parametrize("hostility", Hostility)
def test_the_opposite_is_named(hostility):
    """The control of the handshake oracle: it is told that the ends must do the other thing."""
    other = Hostility.D_OPTS_OUT if hostility in SHARED_BY else Hostility.NONE
    with started(setup_of(hostility)) as run:
        shared = setup_of(other).shared
        run.router.setup = replace(run.router.setup, shared=shared)
        found = list(Transfers(run.router).handshake())
        assert {wrong.signature for wrong in found} == {"exact/handshake"}
        assert len(found) == 4, "both ends of both ranks"


def test_a_copy_waits_for_the_device_that_stores_its_source():
    with started(setup_of()) as run:
        asked = in_flight(run)
        (first, *_) = run.router.copies()
        device = run.router.sharing.devices[first]
        assert run.router.behind()
        assert device.waits == 0
        run.router.copy(first, fails=False)
        assert device.waits == 1
        assert first not in run.router.behind()
        run.rest()
        assert run.violations == []
        assert asked.was_live


def test_a_copy_that_fails_leaves_its_outcome_unknown():
    with started(setup_of()) as run:
        asked = in_flight(run)
        run._copied(run.router.copies()[0], fails=True)
        run.rest()
        assert run.violations == []
        assert not asked.was_live
        rank = run.router.lives[Side.DECODE].nodes[0].rank
        assert [t.phase for t in rank.transfers] == [Phase.QUARANTINED]


@pytest.mark.parametrize("forgery", [Forgery.OUTSIDE, Forgery.TWICE])
def test_a_forged_offer_gets_nothing_written(forgery):
    one_rank = [0] * 24
    with started(setup_of(forgery=forgery, values=one_rank)) as run:
        size = run.setup.wiring.geometries[Side.DECODE].logical_page_size
        asked = run.router.submit(range(1, 2 * size + 2), room=0)
        run.rest()
        assert run.violations == []
        assert not asked.was_live
        assert run.events.seen["forged"]


def test_copies_to_a_former_life_find_it_mapped():
    with started(setup_of()) as run:
        in_flight(run)
        run.router.restart(Side.DECODE)
        run._oracles.excused = True
        run.router.tick(Side.PREFILL)
        _, mapped = run.router.copy(run.router.copies()[0], fails=False)
        assert mapped
        run.rest()
        assert run.violations == []


def test_memory_of_a_dead_writer_is_never_used_again():
    """Its copies may still be made, since nobody can reap this process."""
    with started(setup_of()) as run:
        in_flight(run)
        run._oracles.excused = True
        run.router.restart(Side.PREFILL)
        later = run.router.submit(range(50, 56), room=1)
        run.rest()
        assert run.violations == []
        assert later.was_live
        dead = run.router.lives[Side.DECODE].nodes[0].rank.transfers
        assert [t.phase for t in dead] == [Phase.QUARANTINED]


@pytest.mark.parametrize("name", ["notified_before_the_event", "mapped_without_its_nonce"])
def test_a_fault_is_found_and_made_short(name):
    mutant = mutants.find(name)
    found = kill(mutant, seed=1, executions=300)
    assert found.oracle in mutant.killed_by
    small = shrunk(mutant, found.outcome)
    assert small.signature == found.outcome.signature
    assert len(small.operations) <= len(found.outcome.operations)
    assert not execute(small.values).failed, "the faithful transport passes the same tape"


def test_ends_that_cannot_be_built_are_a_crash():
    """Of an engine whose page is another one than the memory was made for, for example."""
    with mutants.find("page_table_41494").applied():
        outcome = handover.execute(SHARED_MEMORY, Tape(seed=0), most=SHARED_MEMORY.operations)
    assert outcome.signature == "crash/build.InvalidCall"
    assert not outcome.operations
