"""How a mutant of the drain protocol is searched for: runs at random within its bounds."""

from __future__ import annotations

import time
from typing import NamedTuple

import systems
from fuzz.explore.bounds import NAMED
from fuzz.explore.draw import sentence
from fuzz.explore.judged import Court
from fuzz.explore.schedule import Random, Run, Walk
from fuzz.explore.search import shortest
from fuzz.explore.world import World
from fuzz.mutants.registry import Mutant


class Explored(NamedTuple):
    """One search: the runs made, the CPU time, the clause that the first bad one broke, and the run
    that it was made into, which may break another clause of the same fault."""

    runs: int
    cpu_seconds: float
    clause: str | None = None
    bad: Run | None = None
    steps: tuple[str, ...] = ()


def explore(mutant: Mutant, *, seed: int, runs: int, budget_s: float, shrink: bool) -> Explored:
    """Search for a mutant of the protocol with fresh runs, at most so many; `shrink` looks for the
    shortest run to what was found."""
    with mutant.applied():
        court = Court(World(NAMED[mutant.bounds], systems.load_ranks()))
        walk, scheduler = Walk(court), Random(seed)
        began, done = time.process_time(), 0
        while done < runs and time.process_time() - began < budget_s:
            one = walk.run(scheduler, done)
            done += 1
            if one.violation is not None:
                took = time.process_time() - began
                clause = one.violation.clause.value
                short = shortest(court, one.events, clause) if shrink else one
                steps = tuple(sentence(court.world, event) for event in short.events)
                return Explored(done, took, clause, short, steps)
    return Explored(done, time.process_time() - began)
