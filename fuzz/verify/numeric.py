"""A sample of a trace, computed: the engine's rows, states, selections and logits against the
reference's bounds.

Real token chains in order of arrival, so that prompts share prefixes as in production: small
groups of requests are prefilled together in chunks and decoded in one batch, on a model with
random weights.  What the engine stored and returned is then audited (`reference.bounds`):
nothing may be off by more than rounding explains.

The model has three KDA layers below one DSA layer, GLM-5.3-Flash's pattern once.  With a further
DSA layer above, the audit would need the selection of every position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fuzz.verify.mooncake import TraceRequest, output_tokens, prompt_tokens
from reference.bounds import Stored, audit
from reference.contract import (
    Chunk,
    Component,
    Engine,
    EngineFactory,
    EngineOptions,
    RequestId,
    StepOutput,
    Weights,
)
from reference.geometry import Geometry, ModelShape

GEOMETRY = Geometry(topk=128)
SHAPE = ModelShape(
    layers=4,
    dsa_period=4,
    vocab=211,
    hidden=64,
    heads=2,
    latent=32,
    q_lora=32,
    index_heads=2,
    index_dim=32,
    kda_heads=2,
    kda_key_dim=16,
    kda_value_dim=16,
)
SAMPLE = 48
LONGEST = 16_000
"""Prompt tokens of the longest request in a sample: three in four of the trace are shorter."""
PAGES = 288
"""Room for the longest requests together, and for a part of the prefixes that they leave."""
TOGETHER = 4
"""Requests that run at once."""
CHUNK = 1000
"""Prompt tokens of a prefill step: chunks end anywhere in a group and a page."""
JUDGED = 32
"""Prompt positions, the last ones, whose selection and logits are judged."""
ANSWER = 16
"""Most tokens decoded for a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One request as the engine served it.

    Fields:
        tokens: [n] all that is stored: the prompt and the forced answer.
        hit: prompt tokens found in the cache.
        outputs: every step's, each position at most once.
    """

    number: int
    tokens: NDArray[np.int64]
    hit: int
    outputs: list[StepOutput]
    stored: Stored


@dataclass(slots=True, kw_only=True)
class NumericCounts:
    """What was audited.

    Fields:
        lengths: tokens of each request.
        judged: positions whose selection and logits were judged.
        max_ratio: for each stage the largest error / bound; above 1 is wrong.
        violations: sentences.
    """

    lengths: list[int] = field(default_factory=list)
    hits: int = 0
    hit_tokens: int = 0
    judged: int = 0
    max_ratio: dict[str, float] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> int:
        """Violations in all."""
        return len(self.violations)


def sample(
    trace: Sequence[TraceRequest], *, count: int, longest: int = LONGEST
) -> list[tuple[int, TraceRequest]]:
    """`count` requests with their places in the trace, in order of arrival, none longer than
    `longest` tokens: half of them from conversations of several turns (or as many as there
    are), the rest as they come."""
    short = [(i, r) for i, r in enumerate(trace) if r.input_length <= longest]
    # all prompts open with the same block; the second one tells conversations apart
    talks: dict[int, list[tuple[int, TraceRequest]]] = {}
    for number, request in short:
        if len(request.hash_ids) > 1:
            talks.setdefault(request.hash_ids[1], []).append((number, request))
    several = [entry for talk in talks.values() if len(talk) > 1 for entry in talk]
    picked = dict(several[: count // 2])
    for number, request in short:
        if len(picked) == count:
            break
        picked.setdefault(number, request)
    return sorted(picked.items())


def run(
    factory: EngineFactory,
    requests: Sequence[tuple[int, TraceRequest]],
    *,
    weights: Weights,
    pages: int = PAGES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> NumericCounts:
    """Serve `requests` and audit each of them."""
    options = EngineOptions(pages=pages, state_slots=pages + TOGETHER, max_requests=TOGETHER)
    engine = factory(GEOMETRY, SHAPE, options, weights)
    counts = NumericCounts()
    for first in range(0, len(requests), TOGETHER):
        for served in _serve(engine, requests[first : first + TOGETHER]):
            verdict = audit(
                weights, SHAPE, GEOMETRY, served.tokens.tolist(), served.stored, served.outputs
            )
            counts.lengths.append(len(served.tokens))
            counts.hits += served.hit > 0
            counts.hit_tokens += served.hit
            counts.judged += sum(len(output.logits) for output in served.outputs)
            for stage, ratio in verdict.max_ratio.items():
                counts.max_ratio[stage] = max(ratio, counts.max_ratio.get(stage, 0.0))
            counts.violations += [f"request {served.number}: {s}" for s in verdict.violations]
            progress(len(counts.lengths), len(requests))
    return counts


def _serve(engine: Engine, requests: Sequence[tuple[int, TraceRequest]]) -> Iterator[Served]:
    """Run some requests together; yields them when all are done."""
    tokens: dict[RequestId, NDArray[np.int64]] = {}
    prompt: dict[RequestId, int] = {}
    length: dict[RequestId, int] = {}
    outputs: dict[RequestId, list[StepOutput]] = {}
    for number, traced in requests:
        request = RequestId(number)
        answer = output_tokens(number, min(traced.output_length - 1, ANSWER), vocab=SHAPE.vocab)
        prompt[request] = traced.input_length
        tokens[request] = np.concatenate([prompt_tokens(traced, vocab=SHAPE.vocab), answer])
        length[request] = engine.submit(request, tokens[request][: prompt[request]]).hit
        outputs[request] = []
    hits = dict(length)
    while waiting := [r for r in tokens if length[r] < prompt[r]]:
        chunks = []
        for r in waiting:
            stop = min(length[r] + CHUNK, prompt[r])
            judged = max(length[r], prompt[r] - JUDGED)
            chunks.append(
                Chunk(request=r, stop=stop, outputs_from=judged if judged < stop else None)
            )
            length[r] = stop
        for output in engine.extend(chunks):
            outputs[output.request].append(output)
    while running := [r for r in tokens if length[r] < len(tokens[r])]:
        for output in engine.decode(running, [int(tokens[r][length[r]]) for r in running]):
            outputs[output.request].append(output)
            length[output.request] += 1
    for r in tokens:
        yield Served(
            number=r,
            tokens=tokens[r],
            hit=hits[r],
            outputs=outputs[r],
            stored=_stored(engine, r, len(tokens[r])),
        )
        engine.finish(r)


def _stored(engine: Engine, request: RequestId, length: int) -> Stored:
    groups = length // GEOMETRY.kpool

    def rows(component: Component, layers: Sequence[int], start: int, stop: int) -> list[Tensor]:
        return [engine.read(request, component, i, start, stop) for i in range(len(layers))]

    return Stored(
        kv=rows(Component.KV, SHAPE.dsa_layers, 0, length),
        index=rows(Component.INDEX, SHAPE.dsa_layers, 0, groups),
        tail=rows(Component.TAIL, SHAPE.dsa_layers, groups * GEOMETRY.kpool, length),
        state=rows(Component.STATE, SHAPE.kda_layers, 0, 1),
    )
