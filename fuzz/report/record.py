"""Runs a saved case again while somebody looks on, and makes the parts of its report."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Protocol

import systems
from fuzz import mutants, targets
from fuzz.case import Case
from fuzz.isolation import Teller, forked
from fuzz.outcome import Outcome
from fuzz.report.engine import EngineRecording
from fuzz.report.parts import Deed, Recorded, Timeline
from fuzz.report.ranks import RanksRecording
from fuzz.report.transfer import TransferRecording
from fuzz.run import execute, execute_here
from fuzz.tape import Tape
from fuzz.targets import Target
from fuzz.watch import Watch
from reference.contract import System


class Recording(Watch, Protocol):
    """A `Watch` that makes a report of what it saw."""

    def recorded(self, outcome: Outcome) -> Recorded:
        """All that the report shows of the run; called while the run's mutant is still planted."""
        ...


DRIVEN: dict[str, type[Recording]] = {
    "multi_rank": RanksRecording,
    "transfer": TransferRecording,
    "shared_memory": TransferRecording,
}
"""How targets are recorded that drive no single engine."""


def record(saved: Case) -> tuple[Outcome, Recorded]:
    """Run a case up to its first violation.

    Raises:
        UnknownSystem, UnknownTarget, UnknownMutant: for what this version does not know.
    """
    system, target = systems.load(saved.system), targets.find(saved.target)
    with mutants.find(saved.mutant).applied() if saved.mutant else nullcontext():
        if system.isolated:
            return _isolated(system, target, saved)
        watch = DRIVEN.get(target.name, EngineRecording)()
        outcome = execute(system, target, Tape(saved.values), pin=saved.pin, watch=watch)
        return outcome, watch.recorded(outcome)


def _isolated(system: System, target: Target, saved: Case) -> tuple[Outcome, Recorded]:
    """Run a case in a process of its own, and make the parts of its report there."""

    def work(_: Teller) -> tuple[Outcome, Recorded]:
        watch, tape = EngineRecording(), Tape(saved.values)
        outcome = execute_here(system, target, tape, pin=saved.pin, watch=watch)
        return outcome, watch.recorded(outcome)

    if made := forked(work, tuple[Outcome, Recorded]).result:
        return made
    # all that the recording saw died with the engine; what it did it told on the way
    outcome = execute(system, target, Tape(saved.values), pin=saved.pin)
    deeds = [Deed(operation.text) for operation in outcome.operations]
    deeds += [Deed(violation.sentence) for violation in outcome.violations]
    return outcome, Recorded(
        deeds=tuple(deeds), blamed=len(deeds), timeline=Timeline(), pools=(), tables=()
    )
