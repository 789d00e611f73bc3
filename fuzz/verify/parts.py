"""The parts of `kvoracle verify`: each runs one experiment and holds its figures to the bars.

A part is a function of the plan alone, so that it can run in a process of its own.  Faithful
and faulty engines go through the same code.
"""

from __future__ import annotations

import math
import os
import time
import traceback
from functools import partial

import msgspec
import numpy as np

from fuzz.targets.setup import MODEL_SHAPE
from fuzz.verify import capacity, copying, foreign, numeric, parity, recall
from fuzz.verify.mooncake import generate_trace
from fuzz.verify.part import (
    FAULT,
    PAGE,
    SEED,
    Check,
    Part,
    PartFunction,
    Plan,
    Tick,
    engine_with,
    peak_mib,
    plain,
)
from fuzz.verify.trace import PAGES, TraceCounts, TraceRunner
from reference.geometry import RowFormat
from reference.weights import random_weights
from systems import load

TRACE_LIMIT_S = 300
PARITY_STEPS = 10_000
FAULTY_REQUESTS = 60
"""Requests that the faulty engine serves, to show that its fault would be seen."""


def run(name: str, plan: Plan, tick: Tick) -> Part:
    """Run the part called `name` (a key of PARTS or FOREIGN).  One that breaks down has failed."""
    began, cpu = time.perf_counter(), time.process_time()
    try:
        part = (PARTS | FOREIGN)[name](plan, tick)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        check = Check(name="runs to its end", measured=what, bar="no exception", passed=False)
        part = Part(checks=(check,), figures={"traceback": traceback.format_exc()})
    return msgspec.structs.replace(
        part,
        name=name,
        seconds=time.perf_counter() - began,
        cpu_s=time.process_time() - cpu,
        worker=os.getpid(),
        peak_mib=peak_mib(),
    )


def _capacity(plan: Plan, tick: Tick) -> Part:
    """(d): the capacity model, fitted and predicted figures told apart."""
    pairs = capacity.predictions()
    tick(1, 1)
    return Part(
        checks=tuple(Check.at_most(f"tokens off, {pair.name}", pair.error, PAGE) for pair in pairs),
        columns=("pair", "fitted", "predicted", "or, by rounding", "published", "available GB"),
        rows=tuple(
            (
                pair.name,
                f"{pair.fitted:,}",
                f"{pair.predicted:,}",
                f"{pair.neighbour:,}",
                f"{pair.published:,}",
                f"{pair.available[0] / 1e9:.2f} (fitted)",
            )
            for pair in pairs
        ),
        figures={
            pair.name: {
                "fitted": pair.fitted,
                "fitted_available_bytes": [pair.available[0], pair.available[-1]],
                "predicted": pair.predicted,
                "neighbour": pair.neighbour,
                "published": pair.published,
            }
            for pair in pairs
        },
    )


def trace_pages(plan: Plan) -> int:
    """Pages of the pool that serves the trace."""
    return PAGES // 4 if plan.quick else PAGES


def _trace(plan: Plan, tick: Tick) -> Part:
    """(c) and (e): the whole trace, stamped."""
    requests = plan.requests()
    counts = TraceRunner(
        load("optimized").factory,
        requests,
        pages=trace_pages(plan),
        progress=lambda done: tick(done, len(requests)),
    ).run()
    # the bars of the published trace, in proportion for a shorter one
    share = min(1.0, len(requests) / 12_000)
    checks = (
        Check.exactly("requests served", counts.requests, len(requests)),
        Check.exactly("rows read back and wrong", counts.mismatches, 0),
        Check.exactly("pages and states leaked", counts.leaked, 0),
        Check.at_least("hits", counts.hits, int(1000 * share)),
        Check.at_least("pages evicted", counts.evicted_pages, int(1000 * share)),
        Check.at_least("pages reused", counts.reused_pages, int(500 * share)),
        Check.exactly(
            "hits that are no multiple of 256 tokens",
            counts.hits - counts.hit_remainders[0],
            0,
        ),
        Check.at_most("wall seconds", math.ceil(counts.wall_s), TRACE_LIMIT_S),
    )
    return Part(checks=checks, columns=("counted", ""), rows=_rows(counts), figures=plain(counts))


def _rows(counts: TraceCounts) -> tuple[tuple[str, str], ...]:
    figures = plain(counts)
    remainders = figures.pop("hit_remainders")
    read = figures.pop("rows_read")
    rows = [
        ("wall seconds", f"{figures.pop('wall_s'):,.1f}"),
        ("CPU seconds", f"{figures.pop('cpu_s'):,.1f}"),
    ]
    rows += [
        (name.replace("_", " "), value if isinstance(value, str) else f"{value:,}")
        for name, value in figures.items()
        if value
    ]
    rows += [(f"{name} rows read back", f"{value:,}") for name, value in read.items()]
    rows += [(f"hits of length {rest} mod {PAGE}", f"{n:,}") for rest, n in remainders.items()]
    return tuple(rows)


def _trace_faulty(plan: Plan, tick: Tick) -> Part:
    """(e), its control: the fault of #41494 shows as wrong rows."""
    requests = generate_trace(FAULTY_REQUESTS, seed=SEED)
    with engine_with(FAULT) as factory:
        counts = TraceRunner(
            factory,
            requests,
            pages=PAGES // 4,
            progress=lambda done: tick(done, len(requests)),
        ).run()
    return Part(
        checks=(Check.at_least("rows read back and wrong", counts.mismatches, 1),),
        columns=("first wrong row",),
        rows=((counts.first_mismatch or "none",),),
        figures=plain(counts),
    )


def _numeric(*, faulty: bool) -> PartFunction:
    """(e): a sample of the trace, computed and audited; its control has the fault of #41494."""

    def part(plan: Plan, tick: Tick) -> Part:
        # a control does not hang on how much the given trace shares
        trace = generate_trace(FAULTY_REQUESTS, seed=SEED) if faulty else plan.requests()
        count = 8 if plan.quick or faulty else numeric.SAMPLE
        requests = numeric.sample(trace, count=count)
        weights = random_weights(numeric.SHAPE, numeric.GEOMETRY, SEED)
        with engine_with(FAULT if faulty else None) as factory:
            counts = numeric.run(factory, requests, weights=weights, progress=tick)
        if faulty:
            checks: tuple[Check, ...] = (
                Check.at_least("rows, selections or logits out of bounds", counts.wrong, 1),
            )
        else:
            checks = (
                Check.at_least(
                    "requests audited", len(counts.lengths), min(count, len(trace) // 4)
                ),
                Check.at_least("of them with a hit", counts.hits, len(requests) // 4),
                Check.exactly("rows, selections or logits out of bounds", counts.wrong, 0),
            )
        quartiles = np.percentile(counts.lengths or [0], (0, 25, 50, 75, 100)).astype(int)
        rows = [(f"max err / B, {stage}", f"{x:.3g}") for stage, x in counts.max_ratio.items()]
        rows.append(("tokens of a request (quartiles)", " / ".join(map(str, quartiles))))
        rows.append(("positions judged in full", f"{counts.judged:,}"))
        rows += [("", sentence) for sentence in counts.violations[:3]]
        return Part(checks=checks, columns=("audited", ""), rows=tuple(rows), figures=plain(counts))

    return part


def _parity(plan: Plan, tick: Tick) -> Part:
    """(f): HiSparse on against off, in all row formats, at the least hot buffer and above."""
    arms = [(row_format, size) for row_format in RowFormat for size in parity.SIZES]
    steps = (300 if plan.quick else PARITY_STEPS) // len(arms) + 1
    weights = random_weights(MODEL_SHAPE, parity.GEOMETRY, SEED)
    counts = {
        f"{row_format.value}, {size} rows": parity.run_arm(
            load("optimized").factory,
            weights=weights,
            row_format=row_format,
            size=size,
            steps=steps,
            seed=SEED,
            progress=partial(lambda before, now: tick(before + now, len(arms) * steps), i * steps),
        )
        for i, (row_format, size) in enumerate(arms)
    }
    least = min(arm.missing for arm in counts.values())
    return Part(
        checks=(
            Check.at_least(
                "decode steps past the hot buffer",
                sum(arm.steps for arm in counts.values()),
                len(arms) * steps,
            ),
            Check(
                name="selected columns swapped in, least of all arms",
                measured=f"{least:.1%}",
                bar="at least 30 %",
                passed=least >= 0.3,
            ),
            Check.exactly("outputs that differ", sum(arm.different for arm in counts.values()), 0),
        ),
        columns=("hot buffer", "steps", "tokens", "columns missing", "hits", "pages evicted"),
        rows=tuple(
            (
                name,
                f"{arm.steps:,}",
                f"{arm.tokens:,}",
                f"{arm.missing:.1%}",
                f"{arm.hits:,}",
                f"{arm.evicted_pages:,}",
            )
            for name, arm in counts.items()
        ),
        figures={name: plain(arm) for name, arm in counts.items()},
    )


PARTS: dict[str, PartFunction] = {
    "(a) niah, random order": recall.needles("random", faulty=False),
    "(a) niah, increasing depth": recall.needles("increasing", faulty=False),
    "(a) niah, random order, #41494": recall.needles("random", faulty=True),
    "(a) niah, increasing depth, #41494": recall.needles("increasing", faulty=True),
    "(a) niah, nothing shared, #41494": recall.needles("random", faulty=True, shared=False),
    "(a) niah, reference": recall.needles_by_reference,
    "(b) copying": recall.copied_span(copying.rival, fault=FAULT),
    "(b) copying, host restore": recall.copied_span(
        copying.round_trip, fault="restore_without_index"
    ),
    "(d) capacity": _capacity,
    "(c, e) trace": _trace,
    "(e) trace, #41494": _trace_faulty,
    "(e) numeric": _numeric(faulty=False),
    "(e) numeric, #41494": _numeric(faulty=True),
    "(f) HiSparse on and off": _parity,
}
"""All parts, in the order of the report."""

FOREIGN: dict[str, PartFunction] = {"(c, e) trace, cut short": foreign.trace}
"""The parts of an engine that computes no model."""

LONGEST_FIRST = ("(c, e) trace", "(f) HiSparse on and off", "(e) numeric")
"""The parts to start with, so that all workers end at about the same time."""
