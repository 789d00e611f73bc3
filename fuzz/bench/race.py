"""KVOracle and Hypothesis against the same planted faults, in CPU seconds to a shrunk case.

One race is one mutant and one seed.  All arms run in the same process, one after the other, and
each has the limit to itself.  Hypothesis runs twice: *stock*, with its defaults, which is what the
bar is held to, and *tuned*, with the two of them changed that cost it most here.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from functools import cache
from importlib.metadata import version
from typing import Literal

import msgspec
import torch

import systems
from fuzz import targets
from fuzz.mutants import report
from fuzz.mutants.registry import Mutant, find, registered
from fuzz.run import execute
from fuzz.tape import Tape
from fuzz.terminal import UsageError
from fuzz.workers import workers

Arm = Literal["kvoracle", "stock", "tuned"]
BAR = 10.0
"""So many times fewer seconds than Hypothesis with its defaults, in the geometric mean."""
TARGETS = ("prefix_split", "slot_reuse")


class Searched(msgspec.Struct, kw_only=True):
    """What one arm has come to.

    Fields:
        find_s: CPU seconds to the first failing run; total_s: to the shrunk case that the tool
            hands over.  None where the limit came first.
        executions: up to the first failing run, or all.
        operations, tokens: of the shrunk case, or of the smallest so far; 0 of none.
    """

    find_s: float | None = None
    total_s: float | None = None
    executions: int = 0
    operations: int = 0
    tokens: int = 0


class Race(msgspec.Struct, kw_only=True, frozen=True):
    """One mutant and one seed."""

    mutant: str
    seed: int
    arms: dict[Arm, Searched]


class Comparison(msgspec.Struct, kw_only=True, frozen=True):
    """All races, and what they were run with; a run that hit `limit_s` counts at the limit."""

    limit_s: float
    python: str
    hypothesis: str
    settings: str
    races: list[Race]

    def seconds(self, race: Race, arm: Arm) -> float:
        """To the shrunk case."""
        return _at_most(self.limit_s, race.arms[arm].total_s)

    def ratio(self, arm: Arm, races: Sequence[Race] | None = None) -> float:
        """Geometric mean of that arm's seconds to a shrunk case over KVOracle's."""
        return statistics.geometric_mean(
            self.seconds(race, arm) / self.seconds(race, "kvoracle")
            for race in (self.races if races is None else races)
        )

    def finding(self, arm: Arm, races: Sequence[Race] | None = None) -> float:
        """Geometric mean of the seconds to the first failing run."""
        chosen = self.races if races is None else races
        return statistics.geometric_mean(
            _at_most(self.limit_s, race.arms[arm].find_s) for race in chosen
        )

    def shrinking(self, arm: Arm, races: Sequence[Race] | None = None) -> float | None:
        """Geometric mean of the seconds from there to the shrunk case, over the runs that found
        any; None of none."""
        chosen = self.races if races is None else races
        spent = [
            max(self.seconds(race, arm) - found, 1e-3)
            for race in chosen
            if (found := race.arms[arm].find_s) is not None
        ]
        return statistics.geometric_mean(spent) if spent else None

    def limited(self, arm: Arm) -> int:
        """Runs that hit the limit."""
        return sum(race.arms[arm].total_s is None for race in self.races)

    @property
    def passed(self) -> bool:
        return self.ratio("stock") >= BAR


def _at_most(limit_s: float, seconds: float | None) -> float:
    return limit_s if seconds is None else min(seconds, limit_s)


def contenders(wanted: Sequence[str], every: int) -> list[str]:
    """The `wanted` mutants; without any, every so many-th of those of the two plainest targets.

    Raises:
        UsageError: with one sentence, where one of them is not for engines to show.
        UnknownMutant: where a name is none.
    """
    for name in wanted:
        if not _fit(find(name)):
            raise UsageError(
                f"mutant {name!r} is nothing that a state machine over one engine can show: name "
                f"one of target {' or '.join(TARGETS)} that is to be killed by running it."
            )
    plain = [m.name for m in registered().values() if m.target in TARGETS and _fit(m)]
    return list(dict.fromkeys(wanted)) or plain[::every]


def _fit(mutant: Mutant) -> bool:
    has_engine = mutant.target in targets.names() and targets.find(mutant.target).ranges
    return bool(has_engine) and not mutant.needs and not mutant.equivalence


def compare(
    names: Sequence[str],
    *,
    seeds: int,
    limit_s: float,
    processes: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Run all races; `progress` is told those done and those in all."""
    from fuzz.bench.machine import DEFAULTS

    jobs = [(name, seed, limit_s) for seed in range(seeds) for name in names]
    races = []
    with workers(processes) as pool:
        running = [pool.submit(_race, *job) for job in jobs]
        for done, future in enumerate(as_completed(running), start=1):
            races.append(future.result())
            progress(done, len(jobs))
    return Comparison(
        limit_s=limit_s,
        python=platform.python_version(),
        hypothesis=version("hypothesis"),
        settings=repr(DEFAULTS),
        races=sorted(races, key=lambda race: (names.index(race.mutant), race.seed)),
    )


def _race(name: str, seed: int, limit_s: float) -> Race:
    """One race, in this process."""
    from fuzz.bench.machine import DEFAULTS, TUNED, search

    mutant = find(name)
    _warm_up()
    arms: dict[Arm, Searched] = {"kvoracle": _by_kvoracle(mutant, seed, limit_s)}
    system, target = systems.load("optimized"), targets.find(mutant.target)
    for arm, settings in (("stock", DEFAULTS), ("tuned", TUNED)):
        with mutant.applied():
            arms[arm] = search(
                system,
                target,
                pin=mutant.pin,
                settings=settings,
                first_seed=seed * report.SEARCHES_APART,
                limit_s=limit_s,
            )
    return Race(mutant=name, seed=seed, arms=arms)


def _by_kvoracle(mutant: Mutant, seed: int, limit_s: float) -> Searched:
    """What the kill report does."""
    began = time.process_time()
    kill = report.kill(mutant, seed=seed, budget_s=limit_s)
    if kill.outcome is None:
        return Searched(executions=kill.executions)
    found = time.process_time() - began
    case = report.shrunk(mutant, kill.outcome)
    total = time.process_time() - began
    return Searched(
        find_s=found,
        total_s=total if total <= limit_s else None,
        executions=kill.executions,
        operations=len(case.operations),
        tokens=case.tokens,
    )


@cache
def _warm_up() -> None:
    """What a process pays once is no part of a race: both tools look at the clean engine."""
    from fuzz.bench.machine import DEFAULTS, search

    torch.set_num_threads(1)
    system, target = systems.load("optimized"), targets.find("prefix_split")
    for seed in range(3):
        execute(system, target, Tape(seed=seed))
    search(
        system,
        target,
        pin=find("page_table_41494").pin,
        settings=DEFAULTS,
        first_seed=0,
        limit_s=1.0,
    )
