"""One search spread over processes, by the first thing that goes wrong.

Each share takes the runs whose first fault is of one kind, and those without any; together they
are all runs.  Shares know nothing of each other, so a state may be counted in several.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from concurrent.futures import as_completed
from contextlib import nullcontext

import msgspec

import systems
from fuzz import mutants
from fuzz.explore.search import Found, Search
from fuzz.explore.words import Bounds
from fuzz.explore.world import World
from fuzz.terminal import Tick
from fuzz.workers import workers


def shares(bounds: Bounds) -> list[Bounds]:
    """The parts into which a search falls."""
    if not bounds.faults:
        return [bounds]
    return [msgspec.structs.replace(bounds, first=(kind,)) for kind in bounds.first]


def explore(bounds: Bounds, *, limit: int, mutant: str | None = None) -> Found:
    """Search one share in this process, with a mutant's fault in the protocol if one is named."""
    gc.disable()  # millions of tuples, of which none is garbage before the end
    try:
        with mutants.find(mutant).applied() if mutant else nullcontext():
            return Search(World(bounds, systems.load_ranks())).run(limit=limit)
    finally:
        gc.enable()
        gc.collect()  # the next share may need the memory


def explore_all(
    parts: Iterable[Bounds], *, processes: int, limit: int, mutant: str | None, tick: Tick
) -> Found:
    """Search all parts, and add up what they found; the shortest run of a violation stands."""
    parts = list(parts)
    found: list[Found] = []
    with workers(min(processes, len(parts))) as pool:
        jobs = [pool.submit(explore, part, limit=limit, mutant=mutant) for part in parts]
        for done, job in enumerate(as_completed(jobs), start=1):
            found.append(job.result())
            tick("searches", done, len(parts))
    return added(found)


def added(found: list[Found]) -> Found:
    """What several searches found together."""
    bad = min((f for f in found if f.clause), key=lambda f: len(f.run), default=None)
    return Found(
        states=sum(f.states for f in found),
        transitions=sum(f.transitions for f in found),
        depth=max(f.depth for f in found),
        fixpoint=all(f.fixpoint for f in found),
        clause=bad.clause if bad else None,
        sentence=bad.sentence if bad else "",
        run=bad.run if bad else (),
    )
