"""Whether an encoding is caught by an oracle that it names, and its control passes.

The control is the very case with the fault taken out: the faithful engine on the tape that found
a mutant, the faithful protocol under the run that did, a scenario without its faults.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache

import msgspec
import torch

import systems
from fuzz import targets
from fuzz.bugs.registry import Scenario, encoding
from fuzz.explore.bounds import NAMED
from fuzz.explore.judged import Court
from fuzz.explore.schedule import replay
from fuzz.explore.world import World
from fuzz.mutants.exploring import explore
from fuzz.mutants.registry import Mutant
from fuzz.mutants.report import kill
from fuzz.run import execute
from fuzz.tape import Tape

MOST_RUNS = 1 << 20
"""Of one search of the drain protocol."""


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """One encoding, with its fault and without it.

    Fields:
        kind: "mutant" or "scenario".
        oracle: the first to object to the fault; None where none did.
        sentence: what it says.
        named: whether the encoding names that oracle.
        control: what is wrong without the fault; empty as it must be.
        seconds: of CPU, up to the objection.
    """

    name: str
    kind: str
    oracle: str | None = None
    sentence: str = ""
    named: bool = False
    control: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Caught by an oracle that the encoding names, and by none without the fault."""
        return self.named and not self.control


def check(name: str, *, budget_s: float = 60.0) -> Checked:
    """Put the encoding called `name` to the test; a search ends after so many seconds of CPU."""
    _warm_up()
    found = encoding(name)
    if isinstance(found, Scenario):
        return _scenario(found)
    return _protocol(found, budget_s) if found.target == "drain" else _mutant(found, budget_s)


def _scenario(scene: Scenario) -> Checked:
    began = time.process_time()
    with scene.applied():
        violations = scene.play()
    seconds = time.process_time() - began
    first = violations[0] if violations else None
    return Checked(
        name=scene.name,
        kind="scenario",
        oracle=first.oracle if first else None,
        sentence=first.sentence if first else "",
        named=first is not None and first.oracle in scene.caught_by,
        control="; ".join(violation.sentence for violation in scene.play()),
        seconds=seconds,
    )


def _mutant(mutant: Mutant, budget_s: float) -> Checked:
    found = kill(mutant, seed=0, budget_s=budget_s)
    control = ""
    if found.outcome is not None:
        tape, target = Tape(found.outcome.values), targets.find(mutant.target)
        clean = execute(systems.load("optimized"), target, tape, pin=mutant.pin)
        control = "; ".join(violation.sentence for violation in clean.violations)
    elif mutant.needs == "address":
        # its search has no tape: the same addresses, computed without the fault
        control = kill(replace(mutant, patches={}), seed=0).sentence
    return Checked(
        name=mutant.name,
        kind="mutant",
        oracle=found.oracle,
        sentence=found.sentence,
        named=found.oracle in mutant.killed_by,
        control=control,
        seconds=found.cpu_seconds,
    )


def _protocol(mutant: Mutant, budget_s: float) -> Checked:
    found = explore(mutant, seed=0, runs=MOST_RUNS, budget_s=budget_s, shrink=False)
    if found.bad is None or found.bad.violation is None:
        return Checked(name=mutant.name, kind="mutant", seconds=found.cpu_seconds)
    court = Court(World(NAMED[mutant.bounds], systems.load_ranks()))
    clean = replay(court, found.bad.events, to_rest=True).violation
    return Checked(
        name=mutant.name,
        kind="mutant",
        oracle=found.bad.violation.clause.value,
        sentence=found.bad.violation.sentence,
        named=found.bad.violation.clause.value in mutant.killed_by,
        control=clean.sentence if clean else "",
        seconds=found.cpu_seconds,
    )


@cache
def _warm_up() -> None:
    """What a process pays once is no part of a search."""
    torch.set_num_threads(1)
    execute(systems.load("optimized"), targets.find("prefix_split"), Tape(seed=0))
