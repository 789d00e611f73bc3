"""The race against Hypothesis: a fair opponent, and honest sums."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import systems
from fuzz import targets
from fuzz.bench import command, machine, race
from fuzz.bench.machine import DEFAULTS, TUNED, DrawnTape
from fuzz.bench.race import Comparison, Race, Searched, contenders
from fuzz.cli import app
from fuzz.mutants.registry import find
from fuzz.targets.session import KINDS
from fuzz.targets.setup import Pin
from fuzz.terminal import UsageError

STAMPED = Pin(payload="stamped")


def by_hypothesis(*, mutant, limit_s, options=TUNED):
    """What Hypothesis finds of a mutant, or of the faithful engine."""
    torch.set_num_threads(1)
    system, target = systems.load("optimized"), targets.find("prefix_split")
    with find(mutant).applied() if mutant else nullcontext():
        return machine.search(
            system, target, pin=STAMPED, settings=options, first_seed=1, limit_s=limit_s
        )


def test_hypothesis_finds_and_shrinks_a_fault():
    found = by_hypothesis(mutant="gather_by_loc", limit_s=60)
    assert found.find_s is not None
    assert found.total_s is not None
    assert found.find_s < found.total_s
    # no fewer: a request has to be there, and something of it
    assert found.operations == 2
    assert found.tokens <= 4


def test_it_finds_nothing_in_the_faithful_engine():
    """The control: no rule of the machine is illegal, and no run of it ends without a rule."""
    found = by_hypothesis(mutant=None, limit_s=2)
    assert found.find_s is None
    assert found.total_s is None
    assert found.executions > 10
    assert not found.operations


def test_a_search_that_meets_the_limit_says_so():
    found = by_hypothesis(mutant="page_table_41494", limit_s=1.5, options=DEFAULTS)
    assert found.total_s is None


def test_the_defaults_are_those_of_hypothesis():
    stock = settings.get_profile("default")
    for name in ("max_examples", "stateful_step_count", "phases", "report_multiple_bugs"):
        assert getattr(DEFAULTS, name) == getattr(stock, name), name
    assert DEFAULTS.database is None
    assert set(DEFAULTS.phases) - set(TUNED.phases) == {type(DEFAULTS.phases[0]).explain}


def test_draws_without_a_choice_cost_hypothesis_none():
    tape = DrawnTape()  # which has nobody to ask
    assert tape.draw(1) == 0
    assert tape.choose([0.0, 3.0, 0.0]) == 1
    assert (tape.values, tape.bounds) == ([0, 1], [1, 3])


@given(st.data())
def test_other_draws_keep_to_what_a_tape_may_draw(data):
    tape = DrawnTape()
    tape.data = data
    assert tape.draw(3, favour=(2, 5)) in (0, 1, 2)
    assert tape.choose([1.0, 0.0, 2.0]) in (0, 2)
    assert tape.bounds == [3, 3]


def test_the_rules_are_the_kinds_of_the_target():
    target = targets.find("prefix_split")
    made = machine._machine(systems.load("optimized"), target, STAMPED, Searched(), lambda: 0.0)
    assert {rule.function.__name__ for rule in made.setup_state().rules} == set(target.weights)
    assert set(target.weights) <= set(KINDS)


def searched(find_s, total_s):
    return Searched(find_s=find_s, total_s=total_s, operations=3 if find_s else 0)


def compared(*arms):
    """A comparison of races in which KVOracle needs 0.5 s to find and as much to shrink."""
    ours = searched(0.5, 1.0)
    races = [
        Race(mutant="m", seed=seed, arms={"kvoracle": ours, "stock": arm, "tuned": arm})
        for seed, arm in enumerate(arms)
    ]
    return Comparison(limit_s=64, python="", hypothesis="", settings="", races=races)


def test_a_run_at_the_limit_counts_as_the_limit():
    found = compared(searched(None, None), searched(2.0, None), searched(1.0, 8.0))
    assert found.ratio("stock") == pytest.approx((64 * 64 * 8) ** (1 / 3))
    assert found.finding("stock") == pytest.approx((64 * 2 * 1) ** (1 / 3))
    # where nothing was found there was nothing to shrink
    assert found.shrinking("stock") == pytest.approx((62 * 7) ** (1 / 2))
    assert found.limited("stock") == 2
    assert found.ratio("kvoracle") == 1
    assert found.passed


def test_the_bar_is_missed_below_ten():
    assert not compared(searched(1.0, 9.9)).passed
    assert compared(searched(1.0, 10.1)).passed


def test_the_mutants_are_not_picked_by_hand():
    names = contenders((), 1)
    assert len(names) > 80
    assert {find(name).target for name in names} == set(race.TARGETS)
    assert contenders((), 7) == names[::7]


@pytest.mark.parametrize("name", ["ack_on_receipt_of_abort", "loc_in_32_bits"])
def test_mutants_that_no_machine_over_one_engine_shows_get_a_sentence(name):
    with pytest.raises(UsageError, match="nothing that a state machine over one engine can show"):
        contenders((name,), 1)


def test_without_hypothesis_there_is_a_sentence(monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'kvoracle\[bench\]'"):
        app(["bench", "hypothesis"], result_action="return_value", exit_on_error=False)
