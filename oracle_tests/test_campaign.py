"""Campaigns: nothing that was found is lost, whatever ends or breaks them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace

import msgspec
import pytest

import systems
from fuzz import campaign, targets
from fuzz.campaign import BATCH, Plan, run
from fuzz.targets.setup import Pin

FAULTY = Plan(
    target="prefix_split",
    mutant="page_table_41494",
    pin=Pin(payload="stamped"),
    executions=2000,
)


def ctrl_c():
    """As a terminal sends it: to this process and all its children."""
    for child in multiprocessing.active_children():
        os.kill(child.pid, signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_keeps_what_was_found():
    def progress(news):
        if news.failures:
            ctrl_c()

    summary = run(FAULTY, progress=progress)
    assert summary.interrupted
    assert not summary.passed
    assert summary.executions < FAULTY.executions
    assert summary.failures
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_the_workers(times):
    left = times

    def progress(news):
        nonlocal left
        while left:
            left -= 1
            ctrl_c()

    plan = Plan(target="slot_reuse", pin=Pin(payload="stamped"), executions=10_000, processes=2)
    summary = run(plan, progress=progress)
    assert summary.interrupted
    assert BATCH <= summary.executions < plan.executions
    assert not multiprocessing.active_children()


def test_ctrl_c_while_shrinking_keeps_the_failure(monkeypatch):
    def shrink(*_):
        ctrl_c()
        ctrl_c()

    monkeypatch.setattr(campaign, "shrink", shrink)
    plan = msgspec.structs.replace(FAULTY, executions=200)
    summary = run(plan)
    assert summary.interrupted
    assert summary.executions == plan.executions
    assert all(failure.outcome.failed for failure in summary.failures)
    assert summary.failures


class Breaking:
    """An engine whose prefill breaks down."""

    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def extend(self, chunks):
        raise KeyError("page")


def test_a_crash_of_the_fresh_engine_is_a_finding_of_its_run(monkeypatch):
    """The metamorphic oracle's own engine, which runs each context once more, alone."""
    sound = systems.load("optimized")

    def factory(geometry, shape, options, weights=None):
        engine = sound.factory(geometry, shape, options, weights)
        fresh = (options.pages, options.state_slots, options.max_requests) == (64, 64, 1)
        return Breaking(engine) if fresh else engine

    monkeypatch.setattr(systems, "load", lambda name: replace(sound, factory=factory))
    monkeypatch.setattr(campaign, "shrink", lambda run, failing: failing)
    plan = Plan(target="slot_reuse", pin=Pin(payload="model"), executions=3)
    summary = run(plan)
    assert summary.executions == plan.executions
    assert [failure.signature for failure in summary.failures] == ["crash/extend.KeyError"]


@pytest.mark.parametrize(
    ("pin", "owed"),
    [
        (Pin(), {"tail_selected", "duplicate_selected", "capacity_ratio_1"}),
        (Pin(kpool=1), {"duplicate_selected", "capacity_ratio_1"}),
        (
            Pin(kpool=2, physical_page_size=8),
            {"tail_selected", "duplicate_selected", "capacity_ratio_1"},
        ),
        (Pin(kpool=1, physical_page_size=64, payload="model"), set()),
    ],
)
def test_a_campaign_owes_what_its_pins_let_it_show(pin, owed):
    asked = {"tail_selected", "duplicate_selected", "capacity_ratio_1"}
    missing = targets.find("hot_buffer").missing({}, pin)
    assert set(missing) & asked == owed
    assert "swapped_in" in missing


def test_what_a_system_lacks_is_skipped_and_still_owed():
    """A campaign that shows nothing is no victory, whatever the reason."""
    summary = run(Plan(target="host_restore", system="reference", executions=3))
    assert {"back_up", "restore", "hisparse"} <= set(summary.skipped)
    assert {"backed_up", "restored"} <= set(summary.missing)
    assert run(Plan(target="host_restore", executions=1)).missing


def test_a_failure_is_called_by_what_its_smallest_case_shows():
    """Model runs fail by other oracles than the stamped runs that they shrink to."""
    found = run(Plan(target="prefix_split", mutant="tail_one_short", executions=600))
    assert [failure.signature for failure in found.failures] == ["provenance/tail"]
    assert found.failures[0].outcome.signature == "provenance/tail"
    stamped = run(
        Plan(
            target="prefix_split",
            mutant="tail_one_short",
            executions=600,
            pin=Pin(payload="stamped"),
        )
    )
    assert found.failures[0].outcome.values == stamped.failures[0].outcome.values
