"""Runs a saved case again while somebody looks on, and makes the parts of its report."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Protocol

import systems
from fuzz import mutants, targets
from fuzz.case import Case
from fuzz.outcome import Outcome
from fuzz.report.engine import EngineRecording
from fuzz.report.parts import Recorded
from fuzz.report.ranks import RanksRecording
from fuzz.report.transfer import TransferRecording
from fuzz.run import execute
from fuzz.tape import Tape
from fuzz.watch import Watch


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
    watch = DRIVEN.get(target.name, EngineRecording)()
    with mutants.find(saved.mutant).applied() if saved.mutant else nullcontext():
        outcome = execute(system, target, Tape(saved.values), pin=saved.pin, watch=watch)
        return outcome, watch.recorded(outcome)
