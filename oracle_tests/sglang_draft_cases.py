"""What the tests do with SGLang's engine and drafts; see `sglang_cases`."""

from __future__ import annotations

from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from oracle_tests.sglang_cases import Caller, judged, refused
from reference.contract import Drafts, InvalidCall, RequestId, System

KEPT = ((1, 6), (2, 3), (5, 1), (6, 6), (1, 2), (4, 5))
"""Of six drafts, step by step, of two requests; each way to reject some that closed a group, and
to close two."""


def late_state(system: System) -> dict[str, Any]:
    """`drafted_life`, if the state that a verify leaves for the cache is one draft too late."""
    kernels = import_module("sglang.kernels.ops.mamba.mamba_state_scatter_triton")
    choose = kernels.fused_commit_track_indices

    def faulty(*arguments: Any) -> Any:
        last, cached = choose(*arguments)
        return last, torch.where((cached >= 0) & (cached < last), cached + 1, cached)

    with patch.object(kernels, choose.__name__, faulty):
        return drafted_life(system)


def drafted_life(system: System) -> dict[str, Any]:
    """Two requests of a batch that verify over the end of their first page, one in the middle of a
    step and one with its last draft; a third then resumes what the first has left."""
    caller = Caller(system, drafts=True, page_order="permuted")
    engine = caller.engine
    fresh = engine.inspect()
    for name in range(2):
        caller.submit(name, range(1000 * name + 1, 1000 * name + 247 + 4 * name))
    caller.extend(0, 1)
    wrong = []
    for step, kept in enumerate(KEPT):
        caller.verify(dict(enumerate(kept)), token=5000 + 10 * step)
        wrong += [caller.wrong(name) for name in range(2)]
    running = engine.inspect()
    chains = [caller.stamper.chain(caller.tokens[name]) for name in range(2)]
    engine.finish(RequestId(0))
    hit = caller.submit(2, [*caller.tokens[0], 7, 8, 9])
    caller.extend(2)
    caller.verify({2: 3, 1: 1}, token=8000)
    resumed = caller.wrong(2)
    engine.finish(RequestId(1))
    engine.abort(RequestId(2))
    left = engine.inspect()
    return {
        "wrong": wrong,
        "hit": hit,
        "resumed": resumed,
        "states": caller.states(chains),
        "judged": [*judged(caller, fresh, running), *judged(caller, fresh, left)],
    }


def committed_together(system: System) -> list[dict[str, Any]]:
    """What a batch of two commits of six drafts each, two of the one and five of the other, which
    then pass a page's end."""
    caller = Caller(system, drafts=True)
    lengths, kept = (100, 253), (2, 5)
    for name, length in enumerate(lengths):
        caller.submit(name, range(1000 * name + 1, 1000 * name + 1 + length))
    caller.extend(0, 1)
    caller.draft({0: 7000, 1: 8000})
    running = [caller.engine._running[RequestId(name)] for name in range(2)]
    requests = [each.req for each in running]
    chosen = [each.drafts[:count] for each, count in zip(running, kept, strict=True)]
    _, last, cached = caller.engine._scheduler.accepted(requests, chosen)
    return [
        {
            "stored": request.kv.kv_committed_len,
            "tokens": list(request.output_ids)[:-1],
            "last": last[place],
            "cached": cached[place],
        }
        for place, request in enumerate(requests)
    ]


def draft_refusals(system: System) -> dict[str, str]:
    """What an engine with drafts, and one without, refuse in words."""
    caller, plain = Caller(system, drafts=True), Caller(system)
    for each in (caller, plain):
        each.submit(0, range(1, 9))
    early = refused(InvalidCall, lambda: caller.verify({0: 1}, token=50))
    for each in (caller, plain):
        each.extend(0)
    few = Drafts(
        request=RequestId(0), tokens=[50], rows=caller.stamper.step_rows(np.zeros(1, np.uint64))
    )
    said = {
        "early": early,
        "decode": refused(InvalidCall, lambda: caller.decode(0, token=50)),
        "few": refused(InvalidCall, lambda: caller.engine.verify([few])),
        "none": refused(InvalidCall, lambda: plain.engine.verify([few])),
        "nothing pending": refused(InvalidCall, lambda: caller.engine.accept(RequestId(0), 1)),
    }
    caller.tokens[0] = list(range(1, 9))
    said["none kept"] = refused(InvalidCall, lambda: caller.verify({0: 0}, token=60))
    said["twice"] = refused(InvalidCall, lambda: caller.verify({0: 1}, token=70))
    return said
