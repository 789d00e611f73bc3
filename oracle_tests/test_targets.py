"""The targets on the faithful engine: clean, deterministic, and not vacuous."""

from __future__ import annotations

from collections import Counter

import pytest

import systems
from fuzz import targets
from fuzz.campaign import Plan, run
from fuzz.run import check_deterministic, execute
from fuzz.tape import Tape
from fuzz.targets.session import KINDS, WIDTH
from fuzz.targets.setup import Pin, draw_setup
from reference.geometry import RowFormat

EXECUTIONS = 300
ENGINES = [name for name in targets.names() if targets.find(name).ranges]


@pytest.mark.parametrize("name", targets.names())
def test_a_campaign_over_the_faithful_engine_is_clean_and_sees_everything(name):
    summary = run(Plan(target=name, executions=EXECUTIONS))
    assert [f.outcome.violations for f in summary.failures] == []
    assert summary.missing == []
    assert summary.executions == EXECUTIONS
    if name in ENGINES:
        assert 0 < summary.ratios["logits"] <= 1, "no model run, or one beyond its bound"


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("payload", ["stamped", "model"])
def test_a_tape_replayed_observes_the_same(name, payload):
    system, target, pin = systems.load("optimized"), targets.find(name), Pin(payload=payload)
    for seed in range(3):
        outcome = execute(system, target, Tape(seed=seed), pin=pin)
        assert check_deterministic(system, target, outcome, pin=pin)


def test_a_campaign_does_not_depend_on_its_processes():
    plan = Plan(target="slot_reuse", executions=40, pin=Pin(payload="stamped"))
    alone = run(plan)
    shared = run(Plan(target="slot_reuse", executions=40, pin=plan.pin, processes=2))
    assert (alone.events, alone.operations) == (shared.events, shared.operations)


def test_a_campaign_that_saw_too_little_does_not_pass():
    summary = run(Plan(target="prefix_split", executions=2, pin=Pin(max_tokens=1)))
    assert "hit" in summary.missing
    assert not summary.passed


def test_a_campaign_ends_when_its_time_is_up():
    summary = run(Plan(target="prefix_split", seconds=0.0))
    assert summary.executions == 0


def test_the_setup_covers_geometries_pools_and_payloads():
    target, seen = targets.find("slot_reuse"), Counter()
    for seed in range(400):
        setup = draw_setup(Tape(seed=seed), target.ranges, Pin())
        geometry = setup.geometry
        seen.update(
            [
                ("kpool", geometry.kpool),
                ("page", geometry.physical_page_size),
                ("drafts", geometry.max_drafts),
                ("format", geometry.row_format),
                ("order", setup.options.page_order),
                ("payload", setup.payload),
            ]
        )
    assert {value for kind, value in seen if kind == "kpool"} == {1, 2, 4}
    assert {value for kind, value in seen if kind == "page"} == {4, 8}
    assert {value for kind, value in seen if kind == "drafts"} == {0, 1, 2, 3, 8}
    assert {value for kind, value in seen if kind == "format"} == set(RowFormat)
    assert len([value for kind, value in seen if kind == "order"]) == 3
    assert 0 < seen["payload", "model"] < 25


def test_every_operation_takes_the_same_room_on_the_tape():
    """So that deleting one leaves the others whole."""
    outcome = execute(systems.load("optimized"), targets.find("slot_reuse"), Tape(seed=2))
    spans = [span for span in outcome.spans if span.label == "operation"]
    widths = {span.stop - span.start for span in spans[:-1]}
    assert widths == {WIDTH}


def test_an_operation_that_is_not_possible_does_nothing():
    accept = KINDS.index("accept") + 1
    outcome = execute(
        systems.load("optimized"), targets.find("prefix_split"), Tape([0] * 13 + [accept])
    )
    assert [(o.text, o.idle) for o in outcome.operations] == [("accept: nothing to do", True)]


def test_an_unknown_target_is_told_with_the_known_ones():
    with pytest.raises(targets.UnknownTarget, match="choose one of prefix_split, slot_reuse"):
        targets.find("nope")


def test_an_unknown_system_is_told_with_the_known_ones():
    with pytest.raises(systems.UnknownSystem, match="choose one of reference, optimized"):
        systems.load("nope")
