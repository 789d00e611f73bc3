"""An engine that ends its process ends one execution, and is a finding."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import systems
from fuzz import isolation, targets
from fuzz.case import case_of, load, save
from fuzz.isolation import ChildFailed, cpu_seconds, forked
from fuzz.report.command import write_report
from fuzz.report.record import record
from fuzz.run import execute
from fuzz.shrink import shrink
from fuzz.tape import Tape
from fuzz.targets.setup import Pin, draw_setup
from oracle_tests.report_cases import PLANTED, case_in
from reference.contract import Sizes, System
from reference.geometry import Geometry, ModelShape

TARGET = targets.find("prefix_split")
STAMPED = Pin(payload="stamped")


@pytest.fixture(scope="module")
def optimized() -> System:
    return systems.load("optimized")


class Dying:
    """The optimized engine, of which the second extend dies by `death`."""

    def __init__(self, engine: Any, death: Callable[[], Any]) -> None:
        self._engine, self._death, self._extends = engine, death, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def extend(self, *args: Any) -> Any:
        self._extends += 1
        return self._death() if self._extends == 2 else self._engine.extend(*args)


def dying(system: System, death: Callable[[], Any]) -> System:
    return replace(system, isolated=True, factory=lambda *args: Dying(system.factory(*args), death))


def segfault() -> None:
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_process_of_its_own_changes_no_outcome(optimized):
    apart = replace(optimized, isolated=True)
    for seed in range(12):
        here = execute(optimized, TARGET, Tape(seed=seed))
        assert execute(apart, TARGET, Tape(seed=seed)) == here
        assert execute(apart, TARGET, Tape(here.values)).digest == here.digest


def test_a_crash_is_a_violation_whose_tape_repeats_it(optimized):
    system = dying(optimized, segfault)
    found = (execute(system, TARGET, Tape(seed=seed), pin=STAMPED) for seed in range(100))
    outcome = next(each for each in found if each.failed)
    assert outcome.signature == "crash/SIGSEGV"
    assert "ended its process (SIGSEGV)" in outcome.violations[0].sentence
    assert outcome.operations
    assert not execute(optimized, TARGET, Tape(outcome.values), pin=STAMPED).failed
    small = shrink(
        lambda values: execute(system, TARGET, Tape(values), pin=STAMPED), outcome, executions=200
    )
    assert small.signature == "crash/SIGSEGV"
    # the extend that it dies of is not done
    assert len(small.operations) <= min(3, len(outcome.operations))
    assert small.operations[-1].text.startswith("extend")
    assert small.setup == str(draw_setup(Tape(small.values), TARGET.ranges, STAMPED))


@pytest.mark.parametrize(
    ("death", "end"), [(lambda: os._exit(0), "exit 0"), (lambda: exit(7), "exit 1")]
)
def test_an_engine_that_exits_is_no_clean_run(optimized, death, end):
    system = dying(optimized, death)
    found = (execute(system, TARGET, Tape(seed=seed), pin=STAMPED) for seed in range(100))
    assert next(each for each in found if each.failed).signature == f"crash/{end}"


def test_an_engine_that_never_returns_is_ended(optimized, monkeypatch):
    monkeypatch.setattr(isolation, "TIMEOUT_S", 1)
    system = dying(optimized, signal.pause)
    found = (execute(system, TARGET, Tape(seed=seed), pin=STAMPED) for seed in range(100))
    outcome = next(each for each in found if each.failed)
    assert outcome.signature == "crash/SIGALRM"
    assert "did not come back within 1 seconds" in outcome.violations[0].sentence


def test_a_mistake_of_the_harness_is_none_of_the_engine():
    def work(_: object) -> int:
        raise KeyError("mine")

    with pytest.raises(ChildFailed, match=r"KeyError: 'mine'"):
        forked(work, int)


def test_no_child_outlives_an_interrupt(monkeypatch):
    children: list[int] = []
    fork = os.fork

    def counted() -> int:
        children.append(pid := fork())
        return pid

    def interrupted(pipe: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fork", counted)
    monkeypatch.setattr(isolation, "_heard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        forked(lambda _: signal.pause(), int)
    with pytest.raises(ProcessLookupError):
        os.kill(children[0], 0)


@pytest.fixture
def isolated(optimized, monkeypatch) -> None:
    """`systems.load` gives the optimized engine a process of its own."""
    known = {"optimized": replace(optimized, isolated=True), "reference": systems.load("reference")}
    monkeypatch.setattr(systems, "load", known.__getitem__)


@pytest.mark.parametrize("planted", PLANTED[:3], ids=lambda planted: planted.mutant)
def test_a_report_made_there_is_the_same(planted, tmp_path, request):
    saved = load(case_in(tmp_path, planted))
    here = record(saved)
    request.getfixturevalue("isolated")
    assert record(saved) == here


def test_a_crash_has_a_report(optimized, tmp_path, monkeypatch):
    system, path = dying(optimized, segfault), tmp_path / "case.json"
    found = (execute(system, TARGET, Tape(seed=seed), pin=STAMPED) for seed in range(100))
    outcome = next(each for each in found if each.failed)
    save(case_of(outcome, system="optimized", path=path, pin=STAMPED), path)
    monkeypatch.setattr(systems, "load", lambda name: system)
    said = write_report(path, tmp_path / "report.html")
    assert "The engine ended its process (SIGSEGV)" in said
    assert outcome.operations[0].text in (tmp_path / "report.html").read_text()


def test_a_system_of_few_sizes_gets_one_of_them():
    sizes = tuple(
        Sizes(geometry=Geometry(kpool=4, mamba_track_interval=interval), shape=ModelShape())
        for interval in (256, 512)
    )
    setups = [draw_setup(Tape(seed=seed), TARGET.ranges, STAMPED, sizes) for seed in range(40)]
    drawn = {(setup.geometry, setup.shape) for setup in setups}
    assert drawn == {(each.geometry, each.shape) for each in sizes}
    plainest = draw_setup(Tape(()), TARGET.ranges, STAMPED, sizes)
    assert plainest.geometry == sizes[0].geometry
    assert plainest.max_tokens == 768, "two intervals and a page"
    free = draw_setup(Tape(()), TARGET.ranges, STAMPED)
    assert plainest.options == free.options, "the pools are drawn as ever"


def test_what_a_child_computes_is_counted():
    def work(_: Any) -> float:
        while time.process_time() < 0.2:
            pass
        return time.process_time()

    before = cpu_seconds()
    child = forked(work, float)
    assert child.result is not None
    # a process's times are counted in hundredths
    assert cpu_seconds() - before > child.result - 0.03
