"""The kill report: by which oracle each mutant is found, how soon, and in how small a case.

A search runs a mutant's target from an empty corpus until an oracle objects.  A crash of the
engine is not a kill: the search goes on, and counts it.
"""

from __future__ import annotations

import math
import pkgutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from functools import cache
from typing import Literal

import msgspec
import numpy as np
import torch
from rich.box import SIMPLE
from rich.table import Column, Table

import systems
from fuzz import targets
from fuzz.mutants.exploring import explore
from fuzz.mutants.registry import Mutant, find, names
from fuzz.outcome import Outcome
from fuzz.rarity import Rarity
from fuzz.run import execute
from fuzz.shrink import cost, minima
from fuzz.tape import SplitMix, Tape
from fuzz.workers import workers
from reference.addressing import locs_at
from reference.geometry import Geometry

SEARCHES_APART = 1 << 20
"""Executions of one search at most, so that no two searches share a tape."""
SHRINKING = 1000
"""Executions spent on the shrunk case."""
EQUIVALENT = 100
"""Executions in which a mutant that is proved equivalent must not be found."""

Verdict = Literal["killed", "survived", "equivalent", "contradicts its proof"]


class Kill(msgspec.Struct, frozen=True, kw_only=True):
    """One search.

    Fields:
        oracle, component: of the first violation; None of a survivor.
        executions, cpu_seconds: up to the violation, or of the whole search.
        crashes: executions in which the engine raised what it may not.
        sentence: the oracle's.
        outcome: the failing run, None of a survivor or an address.
        error: largest error / bound of the run, where the numeric oracle objected.
    """

    oracle: str | None = None
    component: str | None = None
    executions: int
    cpu_seconds: float
    crashes: int = 0
    sentence: str = ""
    outcome: Outcome | None = None
    error: float | None = None


class KillRow(msgspec.Struct, frozen=True, kw_only=True):
    """One mutant's line of the report.

    Fields:
        oracles: which oracle found it, in how many searches.
        executions, cpu_seconds: medians over the searches that found it.
        between: what the mean executions to a find lie between, with 95 %.
        clean: so many executions without a find would say with 95 % that it is gone
            (`fuzz.rarity`); None of a survivor.
        worst_cpu_seconds: of the search that took longest.
        operations, tokens: of the shrunk cases, medians; 0 where there is none.
        setup, case: of the shrunk case that most searches end in, readable; violation: what the
            oracle says of it.
        canonical: how many searches end in it; others: what the rest end in, each with its setup.
        survived: searches that found nothing; crashes: executions that crashed.
        error: smallest of the searches' largest error / bound, where the numeric oracle objected:
            how far the mutant stays from the clean runs, which are below 1.
    """

    name: str
    bug: str
    sentence: str
    target: str
    payload: str
    verdict: Verdict
    proof: str | None
    oracles: dict[str, int]
    executions: float
    cpu_seconds: float
    between: tuple[float, float]
    clean: int | None
    worst_cpu_seconds: float
    operations: int
    tokens: int
    setup: str
    case: list[str]
    violation: str
    canonical: int
    others: list[list[str]]
    survived: int
    crashes: int
    error: float | None

    @property
    def differing(self) -> bool:
        """Whether fewer than nine in ten of its cases end in one minimum."""
        return bool(self.case) and self.canonical < math.floor(0.9 * sum(self.oracles.values()))

    @property
    def passed(self) -> bool:
        """Found in every search, by an oracle that was named; or equivalent, and not found."""
        if self.verdict == "killed":
            return not self.survived and self.oracles.keys() <= set(find(self.name).killed_by)
        return self.verdict == "equivalent"


class _Search(msgspec.Struct, frozen=True, kw_only=True):
    """A search and its shrunk case: of an engine, or `steps` of the protocol with the judge's
    sentence."""

    name: str
    kill: Kill
    shrunk: Outcome | None = None
    steps: tuple[str, ...] = ()

    @property
    def case(self) -> tuple[str, list[str]]:
        """The shrunk case, readable: its setup, and what happens; empty where there is none."""
        if self.shrunk is None:
            return "", list(self.steps)
        return self.shrunk.setup, [operation.text for operation in self.shrunk.operations]

    @property
    def violation(self) -> str:
        """What the oracle, or the judge, says of it."""
        return self.shrunk.violations[0].sentence if self.shrunk else self.kill.sentence


def kill(
    mutant: Mutant, *, seed: int, executions: int = SEARCHES_APART, budget_s: float = 60.0
) -> Kill:
    """Search for the mutant with fresh tapes, at most so many and so many seconds of CPU."""
    if mutant.needs == "address":
        with mutant.applied():
            return _wrong_address(seed)
    target, crashes = targets.find(mutant.target), 0
    most = min(executions, EQUIVALENT if mutant.equivalence else SEARCHES_APART)
    with mutant.applied():
        system = systems.load("optimized")
        began, i = time.process_time(), 0
        while i < most and time.process_time() - began < budget_s:
            outcome = execute(system, target, Tape(seed=seed * SEARCHES_APART + i), pin=mutant.pin)
            i += 1
            if not outcome.failed:
                continue
            first = outcome.violations[0]
            if first.oracle == "crash":
                crashes += 1
                continue
            return Kill(
                oracle=first.oracle,
                component=first.component,
                executions=i,
                cpu_seconds=time.process_time() - began,
                crashes=crashes,
                sentence=first.sentence,
                outcome=outcome,
                error=max(outcome.ratios.values()) if first.oracle == "numeric" else None,
            )
    return Kill(executions=i, cpu_seconds=time.process_time() - began, crashes=crashes)


def _wrong_address(seed: int) -> Kill:
    """Compare the locs that the engine computes with the reference's, for page ids of up to 32
    bits, which no pool in memory has."""
    began, random, geometry = time.process_time(), SplitMix(seed), Geometry()
    locs = pkgutil.resolve_name("optimized.addressing.locs")
    positions = np.arange(geometry.logical_page_size)
    for i in range(1000):
        pages = (1 + random.below(1 << random.below(33)),)
        computed = locs(geometry, np.array([pages]), 0, positions)
        expected = locs_at(pages, positions, geometry)
        wrong = np.flatnonzero(computed != expected)
        if wrong.size:
            at = int(wrong[0])
            return Kill(
                oracle="exact",
                component="address",
                executions=i + 1,
                cpu_seconds=time.process_time() - began,
                sentence=(
                    f"Position {at} of page {pages[0]} should be at loc {expected[at]}; it is at "
                    f"{computed[at]}."
                ),
            )
    return Kill(executions=1000, cpu_seconds=time.process_time() - began)


def shrunk(mutant: Mutant, failing: Outcome) -> Outcome:
    """The smallest case of the failure that SHRINKING executions find."""
    target = targets.find(mutant.target)
    with mutant.applied():
        system = systems.load("optimized")

        def run(values: Sequence[int]) -> Outcome:
            return execute(system, target, Tape(values), pin=mutant.pin)

        return min(minima(run, failing, executions=SHRINKING).values(), key=cost)


def report(
    wanted: Sequence[str] = (),
    *,
    seeds: int = 10,
    processes: int = 1,
    budget_s: float = 60.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[KillRow]:
    """Search `seeds` times for each of the `wanted` mutants, all without any, and shrink each
    case; `progress` is told the searches done and those in all.

    Raises:
        UnknownMutant: where a name is none.
    """
    mutants = [find(name) for name in wanted or names()]
    jobs = [(mutant.name, seed, budget_s) for mutant in mutants for seed in range(seeds)]
    found: dict[str, list[_Search]] = {mutant.name: [] for mutant in mutants}
    with workers(processes) as pool:
        running = [pool.submit(_search, *job) for job in jobs]
        for done, future in enumerate(as_completed(running), start=1):
            search = future.result()
            found[search.name].append(search)
            progress(done, len(jobs))
    return [_row(mutant, found[mutant.name]) for mutant in mutants]


def _search(name: str, seed: int, budget_s: float) -> _Search:
    """One search, in this process."""
    mutant = find(name)
    if mutant.target == "drain":
        return _explored(mutant, seed, budget_s)
    _warm_up()
    found = kill(mutant, seed=seed, budget_s=budget_s)
    case = shrunk(mutant, found.outcome) if found.outcome else None
    return _Search(name=name, kill=msgspec.structs.replace(found, outcome=None), shrunk=case)


def _explored(mutant: Mutant, seed: int, budget_s: float) -> _Search:
    """One search of the protocol, for which a run is an execution and a clause an oracle."""
    found = explore(mutant, seed=seed, runs=SEARCHES_APART, budget_s=budget_s, shrink=True)
    violation = found.bad and found.bad.violation
    kill = Kill(
        oracle=found.clause,
        component="drain" if violation else None,
        executions=found.runs,
        cpu_seconds=found.cpu_seconds,
        sentence=violation.sentence if violation else "",
    )
    return _Search(name=mutant.name, kill=kill, steps=found.steps)


@cache
def _warm_up() -> None:
    """What a process pays once is no part of a search."""
    torch.set_num_threads(1)
    execute(systems.load("optimized"), targets.find("prefix_split"), Tape(seed=0))


def _row(mutant: Mutant, searches: Sequence[_Search]) -> KillRow:
    kills = [search.kill for search in searches if search.kill.oracle]
    shrunken = [search for search in searches if search.case[1]]
    alike = _alike(shrunken)
    most = alike[0] if alike else []
    setup, texts = most[0].case if most else ("", [])
    timed = kills or [search.kill for search in searches]
    rarity = Rarity.of([search.kill.executions for search in searches], finds=len(kills))
    if mutant.equivalence:
        verdict: Verdict = "contradicts its proof" if kills else "equivalent"
    else:
        verdict = "killed" if kills else "survived"
    return KillRow(
        name=mutant.name,
        bug=mutant.bug,
        sentence=mutant.sentence,
        target=mutant.target,
        payload=mutant.payload,
        verdict=verdict,
        proof=mutant.equivalence,
        oracles=dict(Counter(kill.oracle for kill in kills if kill.oracle)),
        executions=statistics.median(kill.executions for kill in timed),
        cpu_seconds=statistics.median(kill.cpu_seconds for kill in timed),
        between=rarity.between(),
        clean=rarity.clean(),
        worst_cpu_seconds=max(kill.cpu_seconds for kill in timed),
        operations=_median([len(search.case[1]) for search in shrunken]),
        tokens=_median([search.shrunk.tokens for search in shrunken if search.shrunk]),
        setup=setup,
        case=texts,
        violation=most[0].violation if most else "",
        canonical=len(most),
        others=[[other[0].case[0], *other[0].case[1]] for other in alike[1:]],
        survived=len(searches) - len(kills),
        crashes=sum(search.kill.crashes for search in searches),
        error=min((kill.error for kill in kills if kill.error is not None), default=None),
    )


def _alike(searches: Sequence[_Search]) -> list[list[_Search]]:
    """Searches by the case that they end in, the most frequent one first; of two that are as
    frequent the shorter one."""
    groups: dict[tuple[str, ...], list[_Search]] = {}
    for search in searches:
        groups.setdefault((search.case[0], *search.case[1]), []).append(search)
    return [groups[case] for case in sorted(groups, key=lambda c: (-len(groups[c]), len(c), c))]


def _median(sizes: Sequence[int]) -> int:
    return statistics.median_low(sizes) if sizes else 0


COLUMNS = ("runs", "CPU s", "worst", "clean", "ops", "tokens", "same")


def table(rows: Sequence[KillRow]) -> Table:
    """The report for a terminal."""
    out = Table(
        Column("mutant", no_wrap=True),
        Column("verdict", no_wrap=True),
        "by",
        *(Column(name, justify="right") for name in COLUMNS),
        box=SIMPLE,
        padding=0,
        caption="runs and CPU s: medians to the first kill; clean: runs without a kill that would "
        "say with 95 % that it is gone; ops and tokens: of the shrunk cases, medians; same: how "
        "many of those are one case",
    )
    for row in rows:
        by = ", ".join(sorted(row.oracles, key=row.oracles.__getitem__, reverse=True))
        crashes = f"{row.crashes} crashes, which count for nothing" if row.crashes else ""
        out.add_row(
            row.name,
            ", ".join((row.verdict, *_amiss(row))),
            by or ("a proof" if row.proof else crashes),
            f"{row.executions:g}",
            f"{row.cpu_seconds:.2f}",
            f"{row.worst_cpu_seconds:.2f}",
            str(row.clean or ""),
            str(row.operations or ""),
            str(row.tokens or ""),
            _same(row),
        )
    return out


def _amiss(row: KillRow) -> Iterator[str]:
    """Why a kill does not pass."""
    if row.verdict == "killed" and row.survived:
        yield f"but not {row.survived} times"
    if others := row.oracles.keys() - set(find(row.name).killed_by):
        yield f"but its entry does not name {', '.join(sorted(others))}"


def markdown(rows: Sequence[KillRow]) -> str:
    """The report as the table of docs/mutants.md."""
    lines = [
        "| mutant | what the faulty engine does | bug | found by | executions | seconds | at worst "
        "| clean | err/B | case | same |",
        "|---|---|---|---|--:|--:|--:|--:|--:|---|---|",
    ]
    for row in rows:
        by = ", ".join(sorted(row.oracles)) or ("none: " + row.verdict)
        size = f"operations {row.operations}, tokens {row.tokens}" if row.operations else "-"
        error = "" if row.error is None else f"{row.error:.3g}"
        lines.append(
            f"| `{row.name}` | {row.sentence} | {row.bug} | {by} | {row.executions:g} "
            f"| {row.cpu_seconds:.2f} | {row.worst_cpu_seconds:.2f} | {row.clean or ''} | {error} "
            f"| {size} | {_same(row)} |"
        )
    return "\n".join([*lines, *_differences(rows)]) + "\n"


def _same(row: KillRow) -> str:
    """How many of the found cases are shrunk to one."""
    return f"{row.canonical}/{sum(row.oracles.values())}" if row.case else ""


def _differences(rows: Sequence[KillRow]) -> Iterator[str]:
    """The cases of mutants of which fewer than nine in ten are shrunk to one."""
    if differing := [row for row in rows if row.differing]:
        yield ""
        yield "Fewer than nine in ten of the cases of these end in one:"
        yield ""
    for row in differing:
        yield f"- `{row.name}`: {_same(row)} in the first of"
        for case in ([row.setup, *row.case], *row.others):
            yield f"  - {'; '.join(filter(None, case))}"
