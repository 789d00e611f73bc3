"""The parts of `kvoracle verify`: each runs one experiment and holds its figures to the bars.

A part is a function of the plan alone, so that it can run in a process of its own.  Faithful
and faulty engines go through the same code.
"""

from __future__ import annotations

import math
import os
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import msgspec
import numpy as np
import torch

from fuzz.mutants import find
from fuzz.verify import capacity, copying, niah, numeric
from fuzz.verify.client import Client
from fuzz.verify.mooncake import generate_trace
from fuzz.verify.part import SEED, Check, Part, PartFunction, Plan, Tick, peak_mib
from fuzz.verify.trace import PAGES, TraceCounts, TraceRunner
from reference.contract import EngineFactory, EngineOptions, Weights
from reference.geometry import Geometry, ModelShape
from reference.weights import random_weights, retrieval_weights
from systems import load

LOGIT_SCALE = 8.0
"""One scale for all arms of the NIAH and copy experiments."""
PAGE = Geometry().logical_page_size
REFERENCE_SAMPLES = 3
TRACE_LIMIT_S = 300
FAULTY_REQUESTS = 60
"""Requests that the faulty engine serves, to show that its fault would be seen."""


def run(name: str, plan: Plan, tick: Tick) -> Part:
    """Run the part called `name` (a key of PARTS).  One that breaks down has failed."""
    began, cpu = time.perf_counter(), time.process_time()
    try:
        part = PARTS[name](plan, tick)
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


@contextmanager
def _engine(faulty: bool) -> Iterator[EngineFactory]:
    """The optimized engine; with the fault of #41494 for as long as the context lasts."""
    with find("page_table_41494").applied() if faulty else nullcontext():
        yield load("optimized").factory


def _pools(tokens: int) -> EngineOptions:
    """Pools for `tokens` tokens in all and a few requests at once."""
    pages = -(-tokens // PAGE) + 1
    return EngineOptions(pages=pages, state_slots=pages + 4, max_requests=4)


def _plain(figures: object) -> dict[str, Any]:
    """A dataclass as plain data, whatever the keys of its mappings."""
    plain: dict[str, Any] = msgspec.to_builtins(figures, str_keys=True)
    return plain


def _remainders(hits: Iterable[int]) -> dict[str, int]:
    """Hit lengths modulo the logical page, counted."""
    return {str(rest): n for rest, n in sorted(Counter(hit % PAGE for hit in hits).items())}


def _retrieval(topk: int) -> tuple[Geometry, ModelShape, Weights]:
    geometry = Geometry(topk=topk)
    return geometry, *retrieval_weights(geometry, SEED, LOGIT_SCALE)


def _haystacks(plan: Plan, order: niah.Order, *, shared: bool) -> list[niah.Sample]:
    length = niah.LENGTH // 4 if plan.quick else niah.LENGTH
    return niah.samples(order=order, shared=shared, seed=SEED, length=length)


def _niah(order: niah.Order, *, faulty: bool, shared: bool = True) -> PartFunction:
    """(a): one arm of the needle experiment."""

    def part(plan: Plan, tick: Tick) -> Part:
        geometry, shape, weights = _retrieval(niah.TOPK)
        samples = _haystacks(plan, order, shared=shared)
        tokens = sum(len(sample.question) + PAGE for sample in samples)
        with _engine(faulty) as factory:
            arm = niah.run_arm(
                factory,
                geometry=geometry,
                shape=shape,
                weights=weights,
                options=_pools(tokens),
                samples=samples,
                progress=tick,
            )
        name = f"needles found of {len(samples)}, {len(samples[0].document):,} tokens"
        if faulty and shared:
            check = Check.at_most(name, arm.score, len(samples) * 3 // 4)
        else:
            check = Check.exactly(name, arm.score, len(samples))
        remainders = _remainders(arm.hits)
        figures = {
            "found": arm.found,
            "depths": [sample.needle.depth for sample in samples],
            "hit_remainders": remainders,
        }
        return Part(
            checks=(check,),
            columns=("hit length mod 256", *remainders),
            rows=(("prompts", *(str(n) for n in remainders.values())),),
            figures=figures,
        )

    return part


def _niah_reference(plan: Plan, tick: Tick) -> Part:
    """(a): the reference answers some of the questions, from the same selection."""
    geometry, shape, weights = _retrieval(niah.TOPK)
    samples = _haystacks(plan, "random", shared=True)[:REFERENCE_SAMPLES]
    options = _pools(len(samples) * (len(samples[0].question) + PAGE))
    slow, fast = (
        Client(load(name).factory(geometry, shape, options, weights))
        for name in ("reference", "optimized")
    )
    found = same = 0
    for number, sample in enumerate(samples):
        outputs = []
        for client in (slow, fast):
            request, output = client.prefill(sample.question)
            client.engine.finish(request)
            outputs.append(output)
        found += all(int(o.logits[-1].argmax()) == sample.needle.value for o in outputs)
        same += torch.equal(outputs[0].selected[:, -1], outputs[1].selected[:, -1])
        tick(number + 1, len(samples))
    return Part(
        checks=(
            Check.exactly("needles found by reference and engine", found, len(samples)),
            Check.exactly("equal selections", same, len(samples)),
        )
    )


def _copying(plan: Plan, tick: Tick) -> Part:
    """(b): the copy experiment, faithful and faulty."""
    geometry, shape, weights = _retrieval(copying.TOPK)
    cases = copying.cases(geometry=geometry, seed=SEED, vocab=shape.vocab)
    arms: dict[str, list[copying.Copy]] = {}
    for done, (name, faulty) in enumerate((("faithful", False), ("with the fault", True))):
        with _engine(faulty) as factory:
            arms[name] = copying.run_arm(
                factory,
                geometry=geometry,
                shape=shape,
                weights=weights,
                options=_pools(2 * len(cases) * copying.CONTEXT),
                cases=cases,
            )
        tick(done + 1, 2)
    before = [copy.before for arm in arms.values() for copy in arm]
    change = max(abs(copy.fall) for copy in arms["faithful"])
    fall = min(copy.fall for copy in arms["with the fault"])
    return Part(
        checks=(
            Check(
                name="mean logprob before, all spans",
                measured=f"{min(before):.3f} .. {max(before):.3f} nats",
                bar="-0.5 .. -0.1",
                passed=-0.5 <= min(before) <= max(before) <= -0.1,
            ),
            Check(
                name="largest change, faithful",
                measured=f"{change:.4f} nats",
                bar="below 0.05",
                passed=change < 0.05,
            ),
            Check(
                name="smallest fall, with the fault",
                measured=f"{fall:.2f} nats",
                bar="at least 5",
                passed=fall >= 5,
            ),
        ),
        columns=("engine", "span", "before (nats)", "after (nats)", "rival's hit (tokens)"),
        rows=tuple(
            (name, str(i), f"{copy.before:.3f}", f"{copy.after:.3f}", str(copy.rival_hit))
            for name, arm in arms.items()
            for i, copy in enumerate(arm)
        ),
        figures={name: [_plain(copy) for copy in arm] for name, arm in arms.items()},
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
    return Part(checks=checks, columns=("counted", ""), rows=_rows(counts), figures=_plain(counts))


def _rows(counts: TraceCounts) -> tuple[tuple[str, str], ...]:
    figures = _plain(counts)
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
    with _engine(True) as factory:
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
        figures=_plain(counts),
    )


def _numeric(*, faulty: bool) -> PartFunction:
    """(e): a sample of the trace, computed and audited; its control has the fault of #41494."""

    def part(plan: Plan, tick: Tick) -> Part:
        # a control does not hang on how much the given trace shares
        trace = generate_trace(FAULTY_REQUESTS, seed=SEED) if faulty else plan.requests()
        count = 8 if plan.quick or faulty else numeric.SAMPLE
        requests = numeric.sample(trace, count=count)
        weights = random_weights(numeric.SHAPE, numeric.GEOMETRY, SEED)
        with _engine(faulty) as factory:
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
        return Part(
            checks=checks, columns=("audited", ""), rows=tuple(rows), figures=_plain(counts)
        )

    return part


PARTS: dict[str, PartFunction] = {
    "(a) niah, random order": _niah("random", faulty=False),
    "(a) niah, increasing depth": _niah("increasing", faulty=False),
    "(a) niah, random order, #41494": _niah("random", faulty=True),
    "(a) niah, increasing depth, #41494": _niah("increasing", faulty=True),
    "(a) niah, nothing shared, #41494": _niah("random", faulty=True, shared=False),
    "(a) niah, reference": _niah_reference,
    "(b) copying": _copying,
    "(d) capacity": _capacity,
    "(c, e) trace": _trace,
    "(e) trace, #41494": _trace_faulty,
    "(e) numeric": _numeric(faulty=False),
    "(e) numeric, #41494": _numeric(faulty=True),
}
"""All parts, in the order of the report."""

LONGEST_FIRST = ("(c, e) trace", "(e) numeric")
"""The parts to start with, so that all workers end at about the same time."""
