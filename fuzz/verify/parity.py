"""HiSparse on against off: two engines serve the same requests, bit for bit the same.

Both are given the same calls, drawn at random: prompts that share prefixes, chunks, batches of
decode steps with random tokens, and all ways to leave.  On the path that is batch-invariant each
token id and logprob must be equal, whatever a hot buffer has swapped in meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from fuzz.targets.setup import MODEL_SHAPE
from reference.contract import (
    Chunk,
    Engine,
    EngineFactory,
    EngineOptions,
    HiSparse,
    RequestId,
    StepOutput,
    Weights,
)
from reference.geometry import Geometry, RowFormat

GEOMETRY = Geometry(
    kpool=4, physical_page_size=4, topk=16, mamba_track_interval=16, device_buffer_size=18
)
"""`device_buffer_size` is at its lower bound: topk and a tail of three, less the newest."""
SIZES = (18, 32)
REQUESTS = 4
PROMPT = (20, 90)
"""Shortest and longest prompt: some fit into a hot buffer, most do not."""
LENGTH = 150
"""Positions at which a request leaves at the latest."""
WARM_UP = 4
"""Decode steps of a request until its misses count: by then nothing preloaded is left over."""
PAGES = 64
"""Logical pages, so few that cached prefixes are evicted all the time."""


@dataclass(slots=True)
class Counts:
    """What one arm did.

    Fields:
        steps: decode steps in which a request was past its hot buffer and its warm-up; `tokens`
            are the tokens that such requests decoded in them.
        columns, misses: of those, the selected positions in all layers, and those that were
            swapped in.
        different: outputs with another token id, logprob or selection.
        first: the first such, in words.
    """

    steps: int = 0
    tokens: int = 0
    columns: int = 0
    misses: int = 0
    hits: int = 0
    evicted_pages: int = 0
    different: int = 0
    first: str = ""

    @property
    def missing(self) -> float:
        """Share of the selected columns that was not on the device."""
        return self.misses / max(1, self.columns)


@dataclass(slots=True)
class _Life:
    """One running request: its tokens, how many are stored, and its decode steps so far."""

    tokens: list[int]
    length: int
    decoded: int = 0


@dataclass(slots=True)
class _Pair:
    """Both engines, the requests that run on them, and the random choices."""

    on: Engine
    off: Engine
    size: int
    rng: random.Random
    counts: Counts = field(default_factory=Counts)
    running: dict[RequestId, _Life] = field(default_factory=dict)
    prompts: list[list[int]] = field(default_factory=list)

    def step(self) -> None:
        """Admit, prefill, decode or end something."""
        unfilled = [r for r, life in self.running.items() if life.length < len(life.tokens)]
        if not self.running or (len(self.running) < REQUESTS and self.rng.random() < 0.1):
            self._submit()
        elif unfilled:
            self._extend(unfilled)
        else:
            count = self.rng.randint(1, len(self.running))
            self._decode(self.rng.sample(sorted(self.running), count))
        old = [r for r, life in self.running.items() if life.length >= LENGTH]
        for request in old or (sorted(self.running) if self.rng.random() < 0.01 else ()):
            self._end(request)

    def _submit(self) -> None:
        request = RequestId(len(self.prompts))
        before = self.rng.choice(self.prompts) if self.prompts else []
        shared = before[: self.rng.randint(0, len(before))]
        total = max(len(shared) + 1, self.rng.randint(*PROMPT))
        tokens = shared + [self._token() for _ in range(total - len(shared))]
        hits = [engine.submit(request, tokens).hit for engine in (self.on, self.off)]
        self._judge(hits[0] == hits[1], f"request {request} hit {hits[0]} and {hits[1]} tokens")
        self.counts.hits += hits[0] > 0
        self.prompts.append(tokens)
        self.running[request] = _Life(list(tokens), hits[0])

    def _extend(self, requests: list[RequestId]) -> None:
        chunks = []
        for request in requests:
            life = self.running[request]
            life.length = self.rng.randint(life.length + 1, len(life.tokens))
            chunks.append(Chunk(request=request, stop=life.length))
        self._compare(self.on.extend(chunks), self.off.extend(chunks))

    def _decode(self, requests: list[RequestId]) -> None:
        tokens = [self._token() for _ in requests]
        outputs = self.on.decode(requests, tokens)
        self._compare(outputs, self.off.decode(requests, tokens))
        counted = 0
        for request, token, output in zip(requests, tokens, outputs, strict=True):
            life = self.running[request]
            life.tokens.append(token)
            life.length, life.decoded = life.length + 1, life.decoded + 1
            if life.length > self.size + 1 and life.decoded > WARM_UP and output.misses is not None:
                counted += 1
                self.counts.columns += int((output.selected >= 0).sum())
                self.counts.misses += int(output.misses.sum())
        self.counts.tokens += counted
        self.counts.steps += counted > 0

    def _end(self, request: RequestId) -> None:
        name = self.rng.choice(["finish", "finish", "abort", "retract"])
        for engine in (self.on, self.off):
            getattr(engine, name)(request)
        del self.running[request]

    def _compare(self, ours: list[StepOutput], theirs: list[StepOutput]) -> None:
        for a, b in zip(ours, theirs, strict=True):
            logprobs = [torch.log_softmax(output.logits, -1) for output in (a, b)]
            equal = (
                torch.equal(a.logits.argmax(-1), b.logits.argmax(-1))
                and torch.equal(*logprobs)
                and torch.equal(a.selected, b.selected)
            )
            self._judge(equal, f"position {a.start} of request {a.request} differs")

    def _judge(self, equal: bool, sentence: str) -> None:
        self.counts.different += not equal
        self.counts.first = self.counts.first or ("" if equal else sentence)

    def _token(self) -> int:
        return self.rng.randrange(MODEL_SHAPE.vocab)


def run_arm(
    factory: EngineFactory,
    *,
    weights: Weights,
    row_format: RowFormat,
    size: int,
    steps: int,
    seed: int,
    progress: Callable[[int], None] = lambda steps: None,
) -> Counts:
    """Serve until `steps` decode steps are counted, with hot buffers of `size` rows.

    `weights` are those of GEOMETRY and MODEL_SHAPE; `progress` is told the steps so far.
    """
    geometry = replace(GEOMETRY, row_format=row_format, device_buffer_size=size)
    hot_pages = -(-size // geometry.physical_page_size) + 1
    plain = EngineOptions(
        pages=PAGES, state_slots=PAGES, max_requests=REQUESTS, page_order="permuted", seed=seed
    )
    sizes = HiSparse(device_pages=REQUESTS * hot_pages + 1, host_pages=PAGES, copies="random")
    on, off = (
        factory(geometry, MODEL_SHAPE, options, weights)
        for options in (replace(plain, hisparse=sizes), plain)
    )
    pair = _Pair(on, off, size, random.Random(seed))
    while pair.counts.steps < steps and not pair.counts.different:
        pair.step()
        progress(pair.counts.steps)
    pair.counts.evicted_pages = on.inspect().evicted_pages
    return pair.counts
