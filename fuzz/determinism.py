"""What `kvoracle digest` does: run tapes, and show in few bytes what they observed.

One machine writes its digests to a file, another is held to them: a tape has to mean the same run
under another version of Python, another hash seed, and with other numbers of threads and workers.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

import systems
from fuzz import mutants, targets
from fuzz.digest import combined
from fuzz.files import Unreadable, read_plain
from fuzz.run import execute
from fuzz.tape import Tape
from fuzz.targets.setup import Payload, Pin
from fuzz.terminal import (
    JsonFile,
    Positive,
    Processes,
    UsageError,
    bars,
    check_writable,
    deliver,
    err,
    out,
)
from fuzz.workers import workers

MOST_BYTES = 1 << 26
SHOWN = 16
"""Letters of a digest that the table has room for."""
MODEL_RUNS = 4
"""One tape in so many of those targets that have a model's runs is one."""
Hex = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class Observed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run: of which tape, and both its digests (`fuzz.digest`)."""

    target: str
    payload: Payload
    seed: int
    exact: Hex
    full: Hex


class Digests(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Runs, and what they were run with."""

    python: str
    torch: str
    mutant: str | None
    runs: list[Observed]


class Differing(msgspec.Struct, frozen=True, kw_only=True):
    """A run that observed something else on the other machine, in which tier."""

    run: Observed
    tier: str


def digest(
    *names: str,
    executions: Positive = 20,
    seed: int = 0,
    mutant: str | None = None,
    processes: Processes = 1,
    against: Annotated[Path | None, Parameter(name="--against")] = None,
    json: JsonFile = None,
) -> int:
    """Run tapes and show digests of what they observed, in two tiers: exact, and with a model's
    floats.  Exit status 1 where they are not those of another machine.

    Parameters
    ----------
    names
        Targets; all without names.
    executions
        Tapes for each.
    seed
        The first of them.
    mutant
        Plant this fault first, so that violations are compared as well.
    against
        Compare with this file, which `kvoracle digest --json` wrote.  Floats are compared only if
        it was with the same version of torch.
    """
    check_writable(json)
    for name in names:
        targets.find(name)
    expected = None if against is None else _load(against)
    found = digests(
        names or targets.names(),
        seeds=range(seed, seed + executions),
        mutant=mutant,
        processes=processes,
    )
    differing = [] if expected is None else compared(found, expected, against=str(against))
    deliver(out, _parts(found, differing, expected), json=json, result=found)
    return 1 if differing else 0


def digests(
    names: Sequence[str], *, seeds: range, mutant: str | None = None, processes: int = 1
) -> Digests:
    """Run those tapes of those targets.

    Raises:
        UnknownMutant: where there is no such mutant.
    """
    if mutant is not None:
        mutants.find(mutant)
    jobs = [(name, _payload(name, each), each, mutant) for name in names for each in seeds]
    runs = []
    with bars(err) as tick, workers(processes) if processes > 1 else nullcontext() as pool:
        observed = pool.map(_observed, jobs, chunksize=4) if pool else map(_observed, jobs)
        for done, run in enumerate(observed, start=1):
            runs.append(run)
            tick("digests", done, len(jobs))
    return Digests(
        python=platform.python_version(), torch=version("torch"), mutant=mutant, runs=runs
    )


def compared(found: Digests, expected: Digests, *, against: str) -> list[Differing]:
    """The runs that observed something else.

    Raises:
        UsageError: with one sentence, where the two are not of the same tapes.
    """
    names = [
        [(run.target, run.payload, run.seed) for run in each.runs] for each in (found, expected)
    ]
    if names[0] != names[1] or found.mutant != expected.mutant:
        raise UsageError(
            f"{against} holds digests of other tapes: name the targets, --executions, --seed and "
            "--mutant that it was made with."
        )
    floats = found.torch == expected.torch
    return [
        Differing(run=here, tier="exact" if here.exact != there.exact else "full")
        for here, there in zip(found.runs, expected.runs, strict=True)
        if here.exact != there.exact or (floats and here.full != there.full)
    ]


def _payload(name: str, seed: int) -> Payload:
    has_model = targets.find(name).ranges is not None
    return "model" if has_model and seed % MODEL_RUNS == MODEL_RUNS - 1 else "stamped"


def _observed(job: tuple[str, Payload, int, str | None]) -> Observed:
    """One run, in this process; how many threads it has is the user's choice."""
    name, payload, seed, mutant = job
    system, target = systems.load("optimized"), targets.find(name)
    pin = Pin(payload=payload) if target.ranges else Pin()
    with mutants.find(mutant).applied() if mutant else nullcontext():
        outcome = execute(system, target, Tape(seed=seed), pin=pin)
    return Observed(
        target=name, payload=payload, seed=seed, exact=outcome.exact, full=outcome.digest
    )


def _load(path: Path) -> Digests:
    """Read digests.

    Raises:
        UsageError: with one sentence, where the file is of no use.
    """
    try:
        return msgspec.json.decode(read_plain(path, most_bytes=MOST_BYTES), type=Digests)
    except FileNotFoundError as error:
        raise UsageError(f"There is no {path}: write it with `kvoracle digest --json`.") from error
    except (Unreadable, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"{path} holds no digests ({error}): write it with `kvoracle digest --json`."
        ) from error


def _parts(
    found: Digests, differing: Sequence[Differing], expected: Digests | None
) -> Iterator[RenderableType]:
    """A line for each target and payload, then what differs."""
    table = Table("target", "payload", "runs", "exact tier", "with floats")
    for name, payload in dict.fromkeys((run.target, run.payload) for run in found.runs):
        runs = [run for run in found.runs if (run.target, run.payload) == (name, payload)]
        tiers = ("exact", "full") if payload == "model" else ("exact",)
        shown = (combined(getattr(run, tier) for run in runs)[:SHOWN] for tier in tiers)
        table.add_row(name, payload, str(len(runs)), *shown)
    yield table
    for each in differing:
        run = each.run
        yield Text(f"{run.target}, {run.payload}, seed {run.seed}: the {each.tier} tier differs")
    if expected is not None:
        floats = "floats, too" if found.torch == expected.torch else "floats not compared"
        yield Text(
            f"{len(found.runs) - len(differing)} of {len(found.runs)} runs observed the same under "
            f"Python {found.python} and torch {found.torch} as under Python {expected.python} and "
            f"torch {expected.torch} ({floats})."
        )
