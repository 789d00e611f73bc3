"""What `kvoracle bench` does; `bench hypothesis`: KVOracle beside another tool."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import get_args

from cyclopts import App
from rich.box import SIMPLE
from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from fuzz.bench.kernels import kernels
from fuzz.bench.race import BAR, Arm, Comparison, Race, compare, contenders
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

bench = App(name="bench", help="Measure KVOracle beside other tools, and its kernels.")
bench.command(kernels)


@bench.command
def hypothesis(
    *mutants: str,
    every: Positive = 1,
    seeds: Positive = 3,
    limit_s: Positive = 60,
    processes: Processes = 2,
    json: JsonFile = None,
) -> int:
    """Find and shrink planted faults, with KVOracle and with Hypothesis's stock state machine over
    the same engine, operations and oracles.  Exit status 1 where KVOracle takes more than a tenth
    of the seconds, in the geometric mean.

    Parameters
    ----------
    mutants
        Only these; all of prefix_split and slot_reuse without names.
    every
        Only every so many-th of those.
    seeds
        Races for each.
    limit_s
        CPU seconds after which a tool has to give up; such a run counts as that long.
    processes
        Worker processes; each race runs in one of them.
    """
    check_writable(json)
    if find_spec("hypothesis") is None:
        raise UsageError(
            "Hypothesis is not installed, and is what this measures against: "
            "pip install 'kvoracle[bench]'."
        )
    names = contenders(mutants, every)
    with bars(err) as tick:
        found = compare(
            names,
            seeds=seeds,
            limit_s=limit_s,
            processes=processes,
            progress=lambda done, total: tick("races", done, total),
        )
    deliver(out, _parts(found), json=json, result=found)
    return 0 if found.passed else 1


def _parts(found: Comparison) -> Iterator[RenderableType]:
    """A line for each mutant, and the geometric means over all races."""
    yield _by_mutant(found)
    yield _means(found)
    yield Text(
        f"Hypothesis {found.hypothesis}, Python {found.python}, limit {found.limit_s:g} CPU s, "
        f"{found.settings}; tuned: no explain phase, one bug"
    )
    verdict = "holds" if found.passed else "is missed"
    yield Text(
        f"{found.ratio('stock'):.1f} times fewer seconds to a shrunk case than Hypothesis "
        f"with its defaults ({found.ratio('tuned'):.1f} tuned): the bar of {BAR:g} {verdict}.",
        "bold" if found.passed else "bold red",
    )


def _by_mutant(found: Comparison) -> Table:
    columns = (name for arm in get_args(Arm) for name in (f"{arm}\nfind", "\nshrink"))
    table = Table(
        Column("mutant", overflow="fold"),
        *(Column(name, justify="right") for name in columns),
        *(Column(f"{arm}\nratio", justify="right") for arm in ("stock", "tuned")),
        *(Column(f"ops\n{arm}", justify="right") for arm in ("ours", "stock")),
        box=SIMPLE,
        padding=0,
        caption="CPU s, geometric means; ops: of the shrunk case, medians; > where the limit hit",
    )
    for name in dict.fromkeys(race.mutant for race in found.races):
        races = [race for race in found.races if race.mutant == name]
        times = [cell for arm in get_args(Arm) for cell in _times(found, arm, races)]
        table.add_row(
            name,
            *times,
            f"{found.ratio('stock', races):.1f}",
            f"{found.ratio('tuned', races):.1f}",
            _size(races, "kvoracle"),
            _size(races, "stock"),
        )
    return table


def _times(found: Comparison, arm: Arm, races: Sequence[Race]) -> Iterator[str]:
    """Seconds to find and to shrink."""
    unfound = any(race.arms[arm].find_s is None for race in races)
    unshrunk = any(race.arms[arm].total_s is None for race in races)
    spent = found.shrinking(arm, races)
    yield f"{'>' * unfound}{found.finding(arm, races):.2f}"
    yield "" if spent is None else f"{'>' * unshrunk}{spent:.2f}"


def _size(races: Sequence[Race], arm: Arm) -> str:
    sizes = [race.arms[arm].operations for race in races if race.arms[arm].operations]
    return f"{statistics.median(sizes):g}" if sizes else ""


def _means(found: Comparison) -> Table:
    table = Table(
        "geometric means",
        *(Column(name, justify="right") for name in ("find", "shrink", "at the limit", "ratio")),
        box=SIMPLE,
    )
    for arm in get_args(Arm):
        spent = found.shrinking(arm)
        table.add_row(
            arm,
            f"{found.finding(arm):.3f}",
            "" if spent is None else f"{spent:.3f}",
            f"{found.limited(arm)} of {len(found.races)}",
            f"{found.ratio(arm):.1f}",
        )
    return table
