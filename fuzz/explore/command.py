"""What `kvoracle explore` does: an exhaustive search, then runs beyond it if time is given."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Literal

import msgspec
from rich.console import RenderableType
from rich.table import Table

import systems
from fuzz import mutants
from fuzz.explore.bounds import bounds as bounds_of
from fuzz.explore.draw import drawn
from fuzz.explore.judged import Court
from fuzz.explore.parallel import explore_all, shares
from fuzz.explore.schedule import Pct, Random, Scheduler, Walk
from fuzz.explore.search import Found, shortest
from fuzz.explore.words import Bounds, Event
from fuzz.explore.world import World
from fuzz.terminal import (
    JsonFile,
    Natural,
    Positive,
    Processes,
    Tick,
    UsageError,
    bars,
    check_writable,
    deliver,
    err,
    out,
)
from reference.drain import Violation
from reference.protocol import Completion


class Walked(msgspec.Struct, frozen=True, kw_only=True):
    """Single runs: how many, how many a second and core, and the first that is bad."""

    scheduler: str
    runs: int
    seconds: float
    events: int
    run: tuple[Event, ...] = ()

    @property
    def a_second(self) -> float:
        """Runs a second, on one core."""
        return self.runs / self.seconds


class Explored(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `kvoracle explore`.

    Fields:
        found: by the exhaustive search, in so many `seconds` on so many `processes`.
        walked: runs beyond it.
        clause, sentence: what is broken, if anything is; `diagram` is a short run to it.
    """

    bounds: Bounds
    found: Found
    seconds: float
    processes: int
    walked: tuple[Walked, ...]
    clause: str | None
    sentence: str
    events: int
    diagram: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Everything within the bounds was looked at, and nothing is broken."""
        return self.clause is None and self.found.fixpoint


def explore(
    protocol: Literal["drain"],
    *,
    ranks: Positive = 2,
    requests: Positive = 2,
    reuse: int = 1,
    components: Positive = 2,
    parts: Positive = 2,
    faults: int = 1,
    aborts: int = 1,
    completion: Literal["notify", "status"] = "status",
    limit: Positive = 5_000_000,
    seconds: Natural = 0,
    seed: int = 0,
    processes: Processes = 2,
    mutant: str | None = None,
    json: JsonFile = None,
) -> int:
    """Look at every run of the drain protocol within bounds: messages, writes, rounds, aborts and
    faults in every order.  Exit status 0 when all were seen and none breaks a clause.

    Parameters
    ----------
    protocol
        What to explore.
    reuse
        So many of the requests take the destination and the room of an earlier one.
    components
        Pieces that a writer sends, its aux row among them.
    parts
        In so many parts a piece of data lands.
    faults
        Messages lost, doubled or too late, writes broken, processes killed: so many in a run.
    aborts
        Requests given up, on either side: so many in a run.
    completion
        One status message a writer, or a notification with each piece.
    limit
        States at which a search stops.
    seconds
        Afterwards walk at random, and by PCT, for so long each.
    mutant
        Plant this fault first.
    """
    check_writable(json)
    if mutant is not None and mutants.find(mutant).target != "drain":
        raise UsageError(
            f"{mutant} is a fault of an engine: plant it with `kvoracle fuzz "
            f"{mutants.find(mutant).target} --mutant {mutant}`."
        )
    try:
        bounds = bounds_of(
            ranks=ranks,
            requests=requests,
            reuse=reuse,
            components=components,
            parts=parts,
            faults=faults,
            aborts=aborts,
            completion=Completion[completion.upper()],
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    with bars(err) as tick:
        result = explored(
            bounds,
            processes=processes,
            limit=limit,
            mutant=mutant,
            seconds=seconds,
            seed=seed,
            tick=tick,
        )
    deliver(out, shown(result), json=json, result=result)
    return 0 if result.passed else 1


def explored(
    bounds: Bounds,
    *,
    processes: int,
    limit: int,
    mutant: str | None,
    seconds: int,
    seed: int,
    tick: Tick,
) -> Explored:
    """Search `bounds` exhaustively, then walk at random and by PCT for so many seconds each."""
    began = time.perf_counter()
    parts = shares(bounds) if mutant is None else [bounds]
    found = explore_all(parts, processes=processes, limit=limit, mutant=mutant, tick=tick)
    took = time.perf_counter() - began
    walked: list[Walked] = []
    clause, run = found.clause, found.run
    with mutants.find(mutant).applied() if mutant else nullcontext():
        court = Court(World(bounds, systems.load_ranks()))
        if seconds and not clause:
            for scheduler in (Random(seed), Pct(seed, depth=3)):
                one, bad = walk(court, scheduler, seconds)
                walked.append(one)
                if bad is not None:
                    clause, run = bad.clause.value, one.run
                    break
        short = shortest(court, run, clause) if clause else None
    bad = short and short.violation
    return Explored(
        bounds=bounds,
        found=found,
        seconds=took,
        processes=processes,
        walked=tuple(walked),
        clause=bad.clause.value if bad else None,
        sentence=bad.sentence if bad else "",
        events=len(short.events) if short else 0,
        diagram=tuple(drawn(court.world, short.events)) if short else (),
    )


def walk(court: Court, scheduler: Scheduler, seconds: int) -> tuple[Walked, Violation | None]:
    """Runs for so many seconds, up to the first that breaks a clause."""
    path, number, events = Walk(court), 0, 0
    began = time.perf_counter()
    bad, run = None, ()
    while bad is None and time.perf_counter() - began < seconds:
        one = path.run(scheduler, number)
        number, events, bad = number + 1, events + len(one.events), one.violation
        run = one.events if bad else ()
    took = time.perf_counter() - began
    name = type(scheduler).__name__.lower()
    return Walked(scheduler=name, runs=number, seconds=took, events=events, run=run), bad


def shown(result: Explored) -> Iterator[RenderableType]:
    """The result for a terminal."""
    bounds, found, topology = result.bounds, result.found, result.bounds.topology
    yield (
        f"{len(topology.writers)} ranks of D, {len(bounds.rooms)} requests for {bounds.slots} "
        f"destinations, {topology.pieces + 1} components, data in {bounds.parts} parts, "
        f"{bounds.completion.name.lower()} completion, faults {bounds.faults}, aborts "
        f"{bounds.aborts}"
    )
    table = Table("states", "transitions", "depth", "fixpoint", "seconds", "processes")
    end = "reached" if found.fixpoint else "no"
    table.add_row(
        f"{found.states:,}",
        f"{found.transitions:,}",
        f"{found.depth}",
        end,
        f"{result.seconds:.1f}",
        f"{result.processes}",
    )
    yield table
    for walked in result.walked:
        yield (
            f"{walked.scheduler}: {walked.runs:,} runs, {walked.events:,} events, "
            f"{walked.a_second:,.0f} runs a second and core"
        )
    if result.clause:
        yield f"{result.clause}: {result.sentence}"
        yield f"in {result.events} events:"
        yield from result.diagram
    elif found.fixpoint:
        yield "No clause breaks in any run, and every fair run comes to rest with nothing left."
    else:
        yield "The search stopped at its limit of states: raise --limit, or lower the bounds."
