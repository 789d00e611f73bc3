"""`kvoracle verify`: run all experiments, hold each figure against its bar, and report.

Parts are independent and run in worker processes of one thread each.  The report is plain
data (msgspec) for `--json`, and `tables` renders it for a terminal.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.table import Table
from rich.text import Text

from fuzz.terminal import UsageError
from fuzz.verify import parts
from fuzz.verify.part import Part, Plan, peak_mib
from fuzz.verify.trace import check_fits
from fuzz.workers import workers
from systems import foreign, load

Progress = Callable[[str, int, int], None]
"""Called with a part's name, the units done and the units in all."""

_POLL_S = 0.2


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All parts, in the order of the experiments.

    Fields:
        seconds: wall-clock time.
        peak_mib: the most memory that the processes can have held together: for each worker
            its own peak, and this process's.
    """

    passed: bool
    seconds: float
    peak_mib: int
    quick: bool
    trace: str
    parts: tuple[Part, ...]


def run_verify(
    trace: Path | None,
    *,
    quick: bool = False,
    system: str = "optimized",
    only: Sequence[str] | None = None,
    processes: int = 2,
    progress: Progress = lambda part, done, total: None,
) -> Report:
    """Run every part and judge it.

    Args:
        trace: a file in Mooncake's format; None generates one with the same statistics.
        quick: small sizes, for a first look; the bars that need the full size shrink with it.
        system: the engine to judge.
        only: the parts to run, keys of `parts.PARTS`, or for a foreign engine of `parts.FOREIGN`;
            without it, all.
        processes: worker processes.

    Raises:
        TraceError: when `trace` cannot be used, or one of its requests does not fit into the
            pool; found before anything runs.
    """
    began = time.perf_counter()
    plan = Plan(trace=str(trace) if trace else None, quick=quick, system=system)
    known = parts.FOREIGN if foreign(system) else parts.PARTS
    if trace is not None and known is parts.PARTS:
        check_fits(plan.requests(), pages=parts.trace_pages(plan))
    done = dict(_run(plan, tuple(known) if only is None else only, processes, progress))
    ordered = tuple(done[name] for name in known if name in done)
    workers: dict[int, int] = {}
    for part in ordered:
        workers[part.worker] = max(part.peak_mib, workers.get(part.worker, 0))
    return Report(
        passed=all(check.passed for part in ordered for check in part.checks),
        seconds=time.perf_counter() - began,
        peak_mib=peak_mib() + sum(workers.values()),
        quick=quick,
        trace=str(trace) if trace else "generated",
        parts=ordered,
    )


def check_verifiable(system: str) -> None:
    """Refuse, before anything runs, an engine that there is nothing to judge of.

    Raises:
        UsageError, UnknownSystem, CannotLoad: with one sentence.
    """
    if system == "reference":
        raise UsageError("verify judges by the reference: leave out --system, or name another one.")
    load(system)


def left_out(system: str) -> Iterator[Text]:
    """What is not run of a foreign engine, and why."""
    if foreign(system):
        names = "; ".join(parts.PARTS)
        yield Text(f"Not run, since {system} computes no model here, or too slowly: {names}.")


def tables(report: Report) -> Iterator[Table]:
    """One table of checks, then the figures of each part that has some to show."""
    checks = Table(title="kvoracle verify", title_justify="left")
    for column in ("part", "figure", "measured", "bar", ""):
        checks.add_column(column)
    for part in report.parts:
        for check in part.checks:
            verdict = Text("pass", "green") if check.passed else Text("FAIL", "bold red")
            checks.add_row(part.name, check.name, check.measured, check.bar, verdict)
    yield checks
    for part in report.parts:
        if part.rows:
            table = Table(title=part.name, title_justify="left")
            for column in part.columns:
                table.add_column(column)
            for row in part.rows:
                table.add_row(*row)
            yield table
    costs = Table(title="cost", title_justify="left")
    for column in ("part", "seconds", "CPU seconds", "peak MiB of its worker"):
        costs.add_column(column, justify="left" if column == "part" else "right")
    for part in report.parts:
        costs.add_row(part.name, f"{part.seconds:.1f}", f"{part.cpu_s:.1f}", str(part.peak_mib))
    costs.add_row("all", f"{report.seconds:.1f}", "", f"at most {report.peak_mib}")
    yield costs


def _run(
    plan: Plan, only: Sequence[str], processes: int, progress: Progress
) -> Iterator[tuple[str, Part]]:
    ticks: Queue[tuple[str, int, int]] = multiprocessing.get_context("spawn").Queue()
    with workers(processes, initializer=_start, initargs=(ticks,)) as pool:
        ordered = sorted(only, key=lambda name: name not in parts.LONGEST_FIRST)
        waiting: set[Future[Part]] = {pool.submit(_run_part, name, plan) for name in ordered}
        while waiting:
            finished, waiting = wait(waiting, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            _drain(ticks, progress)
            for future in finished:
                part = future.result()
                yield part.name, part


def _drain(ticks: Queue[tuple[str, int, int]], progress: Progress) -> None:
    while True:
        try:
            progress(*ticks.get_nowait())
        except queue.Empty:
            return


_ticks: Any = None
"""This worker's end of the progress queue."""


def _start(ticks: Queue[tuple[str, int, int]]) -> None:
    global _ticks
    _ticks = ticks
    torch.set_num_threads(1)


def _run_part(name: str, plan: Plan) -> Part:
    last = 0.0

    def tick(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done == total or now - last > _POLL_S:
            last = now
            _ticks.put((name, done, total))

    return parts.run(name, plan, tick)
