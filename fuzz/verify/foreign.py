"""`kvoracle verify` of somebody else's engine: the trace, cut short and stamped.

Such an engine computes no model here, so of the experiments those that need one are left out; and
its kernels may be interpreted, so of the trace there is as much as takes minutes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from fuzz.isolation import Teller, forked
from fuzz.verify.mooncake import TraceRequest
from fuzz.verify.part import PAGE, Check, Part, Plan, Tick, plain
from fuzz.verify.trace import SHAPE, TraceRunner
from reference.contract import System
from systems import load

REQUESTS, QUICK_REQUESTS = 24, 8
PROMPT_TOKENS, OUTPUT_TOKENS = 700, 8
"""Most of a request: the first block that all share, and some of its own, from which prefixes
diverge inside a page."""
PAGES, BATCH = 24, 3
TIMEOUT_S = 3600


def short(plan: Plan) -> list[TraceRequest]:
    """The first requests of the trace, none of them long."""
    return [
        msgspec.structs.replace(
            request,
            input_length=min(request.input_length, PROMPT_TOKENS),
            output_length=min(request.output_length, OUTPUT_TOKENS),
        )
        for request in plan.requests()[: QUICK_REQUESTS if plan.quick else REQUESTS]
    ]


def trace(plan: Plan, tick: Tick) -> Part:
    """The short trace on the engine of `plan.system`, in a process of its own."""
    requests, system = short(plan), load(plan.system)

    def work(_: Teller) -> dict[str, Any]:
        return plain(_runner(system, requests, tick).run())

    child = forked(work, dict[str, Any], timeout_s=TIMEOUT_S)
    if child.result is None:
        died = Check(name="runs to its end", measured=child.end, bar="exit", passed=False)
        return Part(checks=(died,))
    figures = child.result
    checks = (
        Check.exactly("requests served", figures["requests"], len(requests)),
        Check.exactly("rows read back and wrong", figures["mismatches"], 0),
        Check.exactly("pages and states leaked", figures["leaked"], 0),
        Check.at_least("hits", figures["hits"], len(requests) // 2),
        Check.at_least("pages reused", figures["reused_pages"], 1),
        Check.exactly(
            f"hits that are no multiple of {PAGE} tokens",
            figures["hits"] - figures["hit_remainders"].get("0", 0),
            0,
        ),
    )
    first = figures["first_mismatch"]
    return Part(
        checks=checks,
        columns=("first wrong row",) if first else (),
        rows=((first,),) if first else (),
        figures=figures,
    )


def _runner(system: System, requests: list[TraceRequest], tick: Tick) -> TraceRunner:
    sizes = system.sizes[0]
    return TraceRunner(
        system.factory,
        requests,
        geometry=sizes.geometry,
        shape=replace(sizes.shape, vocab=SHAPE.vocab),
        pages=PAGES,
        batch=BATCH,
        # SGLang copies it when the first chunk is planned
        states_of_hits=False,
        progress=lambda done: tick(done, len(requests)),
    )
