"""Hypothesis's stock state machine over the very engine, operations and oracles of a target.

What differs from a campaign is what is compared: Hypothesis generates and Hypothesis shrinks.  Each
kind of operation is a rule, with the precondition that there is something to do; an initialize rule
draws the setup.  Arguments are drawn inside the rules, below the bounds and with the favoured
values and weights that a tape would use, so that both tools search the same space.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, Verbosity, reject, seed
from hypothesis import settings as Settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyStrategyDefinition
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from fuzz.bench.race import Searched
from fuzz.run import Run
from fuzz.step import Violation
from fuzz.tape import Tape
from fuzz.targets import Target
from fuzz.targets.session import KINDS
from fuzz.targets.setup import Pin, draw_setup
from reference.contract import System

DEFAULTS = Settings(
    Settings.get_profile("default"),
    max_examples=100,
    stateful_step_count=50,
    phases=tuple(Phase),
    report_multiple_bugs=True,
    derandomize=False,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    verbosity=Verbosity.quiet,
)
"""Hypothesis's defaults, spelt out; but without an example database, which would carry one run's
finds into the next, and without deadline and health checks, which would fail runs for being slow;
and quiet.
"""
TUNED = Settings(
    DEFAULTS,
    phases=[phase for phase in Phase if phase is not Phase.explain],
    report_multiple_bugs=False,
)
"""Without the explain phase, whose tracing slows every run after the first failure, and content
with one bug."""


class Violated(Exception):
    """An oracle objected."""


class OutOfTime(BaseException):
    """The limit has passed; no Exception, so that Hypothesis takes it for no failure."""


@torch.inference_mode()
def search(
    system: System,
    target: Target,
    *,
    pin: Pin,
    settings: Settings,
    first_seed: int,
    limit_s: float,
) -> Searched:
    """Let Hypothesis search and shrink, starting it anew with the next seed whenever its examples
    are used up, until the limit."""
    found, began = Searched(), time.process_time()

    def clock() -> float:
        passed = time.process_time() - began
        if passed > limit_s:
            raise OutOfTime
        return passed

    machine = _machine(system, target, pin, found, clock)
    try:
        while True:
            try:
                run_state_machine_as_test(seed(first_seed)(machine), settings=settings)
            except Violated:
                found.total_s = clock()
                return found
            first_seed += 1
    except (OutOfTime, FlakyStrategyDefinition):
        # Hypothesis may take a test that was broken off for one that draws differently
        if time.process_time() - began <= limit_s:
            raise
        return found


class DrawnTape(Tape):
    """A tape that asks Hypothesis.  `data` is that of the rule at work."""

    data: st.DataObject

    def draw(self, bound: int, *, favour: Sequence[int] = ()) -> int:
        """An integer in 0 .. bound - 1, a favoured one as often as any."""
        return self._record(self._drawn(_below(bound, tuple(favour))), bound)

    def choose(self, weights: Sequence[float]) -> int:
        """An index into `weights`, whole numbers, with as many chances as its weight."""
        return self._record(self._drawn(_weighted(tuple(weights))), len(weights))

    def _drawn(self, among: st.SearchStrategy[int] | int) -> int:
        return among if isinstance(among, int) else self.data.draw(among)


@lru_cache(maxsize=10_000)
def _below(bound: int, favour: tuple[int, ...]) -> st.SearchStrategy[int] | int:
    """A strategy, or the only value that there is."""
    if bound == 1:
        return 0
    favoured = sorted({value for value in favour if 0 <= value < bound})
    anything = st.integers(0, bound - 1)
    return anything | st.sampled_from(favoured) if favoured else anything


@lru_cache(maxsize=10_000)
def _weighted(weights: tuple[float, ...]) -> st.SearchStrategy[int] | int:
    chances = [i for i, weight in enumerate(weights) for _ in range(int(weight))]
    return st.sampled_from(chances) if len(set(chances)) > 1 else chances[0]


def _machine(
    system: System, target: Target, pin: Pin, found: Searched, clock: Callable[[], float]
) -> type[RuleBasedStateMachine]:
    """The state machine of a target, which enters what it finds."""
    ranges = target.ranges
    assert ranges is not None, f"{target.name} drives no single engine"

    class Machine(RuleBasedStateMachine):
        run: Run
        whole = False
        """Whether the last operation came to its end."""

        @initialize(data=st.data())
        def build(self, data: st.DataObject) -> None:
            clock()
            found.executions += found.find_s is None
            self.tape = DrawnTape()
            self.tape.data = data
            self.run = Run(system, draw_setup(self.tape, ranges, pin), self.tape)
            self.whole = True

        def operate(self, kind: str, data: st.DataObject) -> None:
            """Do an operation of that kind."""
            clock()
            self.whole, self.tape.data = False, data
            weights = [0.0, *(float(kind == each) for each in KINDS)]
            self._judge(self.run.operate(weights) or [])
            self.whole = True

        def can(self, kind: str) -> bool:
            # one rule has to be possible always: a submit too many does nothing
            return kind == "submit" or self.run.session.possible(kind)

        def teardown(self) -> None:
            if self.whole:
                self._judge(self.run.end())

        def _judge(self, violations: list[Violation]) -> None:
            if not violations:
                return
            if violations[0].oracle == "crash":
                reject()  # no kill, as in the kill report
            if found.find_s is None:
                found.find_s = clock()
            found.operations, found.tokens = len(self.run.done), self.run.session.tokens
            raise Violated(violations[0].sentence)

    for kind in target.weights:
        setattr(Machine, kind, _rule(kind))
    return Machine


def _rule(kind: str) -> Any:
    """The rule of one kind of operation."""

    def operate(self: Any, data: st.DataObject) -> None:
        self.operate(kind, data)

    operate.__name__ = operate.__qualname__ = kind
    return precondition(lambda self: self.can(kind))(rule(data=st.data())(operate))
