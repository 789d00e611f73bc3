"""A production trace, stamped: serve every request and read back every row that is reused.

The loop is a serving engine's: requests are admitted in order of arrival, prefilled in chunks
of 8,192 tokens shared by several requests, and decoded in one batch; when memory runs out the
youngest is retracted and resumes later.  The rows carry stamps (`fuzz.stamps`), so a row that
any other request wrote, or the same request at another position, is seen.

Read back are, through the engine's own read path: at admission every KV row, index row and
the KDA checkpoint of the hit; at the end all rows of the request, its tail and its state.

Addresses are the production ones (physical page 64, kpool 4, logical page 256, a checkpoint
every 256 tokens); rows are narrow, since only who wrote them matters.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fuzz.stamps import Registry, Stamper
from fuzz.verify.mooncake import TraceError, TraceRequest, output_tokens, prompt_tokens
from reference.contract import (
    Chunk,
    Component,
    Engine,
    EngineFactory,
    EngineOptions,
    OutOfMemory,
    RequestId,
    Rows,
)
from reference.geometry import Geometry, ModelShape

GEOMETRY = Geometry()
SHAPE = ModelShape(
    layers=2,
    dsa_period=2,
    vocab=151_552,
    latent=16,
    index_dim=16,
    kda_heads=1,
    kda_key_dim=2,
    kda_value_dim=2,
)
PAGES = 16_384
"""4.2 M tokens: room for 64 running requests and some of the conversations that pause."""
BATCH = 64
PREFILL_TOKENS = 8192
ROUND_STEPS = 64
"""Most decode steps whose rows are stamped at once."""


class PoolTooSmall(TraceError):
    """A request alone does not fit; the message names its line and the cure."""


def check_fits(trace: Sequence[TraceRequest], *, pages: int, geometry: Geometry = GEOMETRY) -> None:
    """Refuse a request that a pool of `pages` pages (padding included) cannot hold even alone.

    Raises:
        PoolTooSmall: with one sentence.
    """
    room = (pages - 1) * geometry.logical_page_size
    for line, request in enumerate(trace, start=1):
        stored = request.input_length + request.output_length - 1
        if stored > room:
            raise PoolTooSmall(
                f"The trace's line {line} needs room for {stored:,} tokens, and the pool has "
                f"{room:,}: shorten the request, or drop the line."
            )


@dataclass(slots=True, kw_only=True)
class TraceCounts:
    """What a run did.

    Fields:
        hits, hit_tokens: admissions that found a prefix, and its tokens.
        hit_remainders: hit lengths modulo the declared logical page (256 tokens), counted.
        computed_tokens: prompt tokens written by prefill.
        output_tokens: tokens written by decode.
        rows_read: rows read back and compared, by component.
        mismatches: rows read back that were not the expected ones.
        first_mismatch: one sentence for the first of them.
        evicted_pages, reused_pages: the engine's own totals.
        wall_s, cpu_s: seconds on the clock, and of this process's CPU.
        leaked: pages and state slots that were free at the start and are not after everything
            was evicted at the end.
    """

    requests: int = 0
    hits: int = 0
    hit_tokens: int = 0
    hit_remainders: Counter[int] = field(default_factory=Counter)
    computed_tokens: int = 0
    output_tokens: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    retractions: int = 0
    rows_read: Counter[str] = field(default_factory=Counter)
    mismatches: int = 0
    first_mismatch: str | None = None
    evicted_pages: int = 0
    reused_pages: int = 0
    leaked: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Job:
    """One request: all its tokens (prompt, then answer), and how many are stored.

    The last token of the answer is never fed back, so it is not among them.
    """

    request: RequestId
    tokens: NDArray[np.int64]
    chain: NDArray[np.uint64]
    prefill_stop: int
    length: int = 0

    @property
    def left(self) -> int:
        """Positions still to be stored."""
        return len(self.tokens) - self.length


class TraceRunner:
    """Serves `trace` on one stamped engine."""

    def __init__(
        self,
        factory: EngineFactory,
        trace: Sequence[TraceRequest],
        *,
        geometry: Geometry = GEOMETRY,
        shape: ModelShape = SHAPE,
        pages: int = PAGES,
        batch: int = BATCH,
        states_of_hits: bool = True,
        progress: Callable[[int], None] = lambda done: None,
    ) -> None:
        """Args:
        pages: logical pages of the pool, padding page included.
        batch: most requests that run at once.
        states_of_hits: whether a request has its state before its first chunk.
        progress: called with the number of finished requests.

        Raises:
            PoolTooSmall: when a request alone does not fit into the pool.
        """
        check_fits(trace, pages=pages, geometry=geometry)
        options = EngineOptions(
            pages=pages,
            state_slots=pages + batch + 1,
            max_requests=batch,
            ape=Stamper(geometry, shape).ape,
        )
        self.engine: Engine = factory(geometry, shape, options)
        # the engine's own geometry: a faulty one may checkpoint at other lengths
        self.stamper = Stamper(self.engine.geometry, shape)
        self.shape, self.states_of_hits = shape, states_of_hits
        self.free_at_start = _free(self.engine)
        self.page = geometry.logical_page_size
        self.pages, self.batch, self.progress = pages, batch, progress
        self.arrivals = deque(enumerate(trace))
        self.retracted: deque[_Job] = deque()
        self.prefilling: list[_Job] = []
        self.decoding: list[_Job] = []
        self.finished: deque[_Job] = deque(maxlen=batch)
        self.crowded = False
        self.counts = TraceCounts()

    def run(self) -> TraceCounts:
        """Serve all requests, then evict everything and look for leaks.

        Raises:
            OutOfMemory: when the engine refuses a request that runs alone.
        """
        wall, cpu = time.perf_counter(), time.process_time()
        while self._admit() or self.decoding:
            while self.prefilling:
                self._prefill()
            self._decode()
        while self.engine.evict(self.pages):
            pass
        end = self.engine.inspect()
        self.counts.leaked = self.free_at_start - _free(self.engine)
        self.counts.evicted_pages = end.evicted_pages
        self.counts.reused_pages = end.reused_pages
        self.counts.wall_s = time.perf_counter() - wall
        self.counts.cpu_s = time.process_time() - cpu
        return self.counts

    def _admit(self) -> bool:
        """Fill the batch, the retracted first; nobody enters between a retraction and the next
        finish, or the two would take turns.  True when somebody entered."""
        while not self.crowded and len(self.prefilling) + len(self.decoding) < self.batch:
            job = self._next()
            if job is None:
                break
            try:
                hit = self.engine.submit(job.request, job.tokens[: job.prefill_stop]).hit
            except OutOfMemory:
                if not self.prefilling and not self.decoding:
                    raise _refused_alone(job) from None
                self.retracted.appendleft(job)
                break
            job.length = hit
            self.prefilling.append(job)
            if hit:
                self.counts.hits += 1
                self.counts.hit_tokens += hit
                self.counts.hit_remainders[hit % self.page] += 1
                self._read_back(job, f"after a hit of {hit} tokens", state=self.states_of_hits)
        return bool(self.prefilling)

    def _next(self) -> _Job | None:
        if self.retracted:
            return self.retracted.popleft()
        if not self.arrivals:
            return None
        number, request = self.arrivals.popleft()
        answer = output_tokens(number, request.output_length - 1, vocab=self.shape.vocab)
        tokens = np.concatenate([prompt_tokens(request, vocab=self.shape.vocab), answer])
        return _Job(
            request=RequestId(number),
            tokens=tokens,
            chain=self.stamper.chain(tokens),
            prefill_stop=request.input_length,
        )

    def _prefill(self) -> None:
        """One chunk of up to PREFILL_TOKENS over the requests that wait for prefill."""
        budget = PREFILL_TOKENS
        chunks = []
        for job in self.prefilling:
            stop = min(job.prefill_stop, job.length + budget)
            rows = self.stamper.extend_rows(job.chain, job.length, stop)
            chunks.append(Chunk(request=job.request, stop=stop, rows=rows))
            budget -= stop - job.length
            if not budget:
                break
        try:
            self.engine.extend(chunks)
        except OutOfMemory:
            self._retract_youngest()
            return
        self.counts.prefill_steps += 1
        self.counts.computed_tokens += PREFILL_TOKENS - budget
        for job, chunk in zip(self.prefilling, chunks, strict=False):
            job.length = chunk.stop
        ready = [job for job in self.prefilling if job.length == job.prefill_stop]
        self.prefilling = self.prefilling[len(ready) :]
        self.decoding += ready
        self._finish_complete()

    def _decode(self) -> None:
        """Decode the whole batch until its first request is complete."""
        jobs = self.decoding
        if not jobs:
            return
        steps = min(ROUND_STEPS, *(job.left for job in jobs))
        spans = [slice(job.length, job.length + steps) for job in jobs]
        tokens = np.stack([job.tokens[span] for job, span in zip(jobs, spans, strict=True)], 1)
        chain = np.stack([job.chain[span] for job, span in zip(jobs, spans, strict=True)], 1)
        rows = self.stamper.step_rows(chain.reshape(-1))
        requests = [job.request for job in jobs]
        done = 0
        while done < steps:
            span = slice(done * len(jobs), (done + 1) * len(jobs))
            try:
                self.engine.decode(requests, tokens[done], _part(rows, span))
            except OutOfMemory:
                break
            done += 1
        for job in jobs:
            job.length += done
        self.counts.decode_steps += done
        self.counts.output_tokens += done * len(jobs)
        if done < steps:
            self._retract_youngest()
        self._finish_complete()

    def _finish_complete(self) -> None:
        complete = [job for job in self.decoding if not job.left]
        if not complete:
            return
        for job in complete:
            self._read_back(job, "when complete")
            self.engine.finish(job.request)
            self.finished.append(job)
        self.decoding = [job for job in self.decoding if job.left]
        self.crowded = False
        self.counts.requests += len(complete)
        self.progress(self.counts.requests)

    def _retract_youngest(self) -> None:
        queue = self.prefilling or self.decoding
        if len(self.prefilling) + len(self.decoding) == 1:
            raise _refused_alone(queue[0])
        job = queue.pop()
        self.engine.retract(job.request)
        job.prefill_stop = max(job.prefill_stop, job.length)
        self.retracted.append(job)
        self.crowded = True
        self.counts.retractions += 1

    def _read_back(self, job: _Job, when: str, *, state: bool = True) -> None:
        """Read all rows that `job` has stored, its `state` among them, and compare them with its
        own stamps."""
        stamper, kpool = self.stamper, self.engine.geometry.kpool
        groups = job.length // kpool
        for layer in range(len(self.shape.dsa_layers)):
            kv = stamper.expected_kv(job.chain, 0, job.length, layer)
            self._compare(job, Component.KV, layer, 0, kv, when)
            index = stamper.expected_index(job.chain, 0, groups, layer)
            self._compare(job, Component.INDEX, layer, 0, index, when)
            if groups * kpool < job.length:
                tail = stamper.expected_tail(job.chain, groups * kpool, job.length, layer)
                self._compare(job, Component.TAIL, layer, groups * kpool, tail, when)
        for layer in range(len(self.shape.kda_layers) if state else 0):
            expected = stamper.expected_state(job.chain, np.array([job.length]), layer)
            self._compare(job, Component.STATE, layer, 0, expected, when)

    def _compare(
        self,
        job: _Job,
        component: Component,
        layer: int,
        start: int,
        expected: NDArray[np.uint8],
        when: str,
    ) -> None:
        stop = start + len(expected)
        stored = self.engine.read(job.request, component, layer, start, stop).numpy()
        self.counts.rows_read[component.value] += len(expected)
        if np.array_equal(stored, expected):
            return
        wrong = np.flatnonzero((stored != expected).any(axis=1))
        self.counts.mismatches += len(wrong)
        if self.counts.first_mismatch is None:
            first = int(wrong[0])
            # of several writers of equal rows the last is named: this request, where it is one
            others = [*self.finished, *self.prefilling, *self.decoding]
            known = [*(other for other in others if other is not job), job]
            registry = Registry(self.stamper, {f"request {j.request}": j.chain for j in known})
            self.counts.first_mismatch = (
                f"request {job.request} {when}: {component.value} row {start + first} of layer "
                f"{layer} should hold {registry.writer(component, expected[first])}, holds "
                f"{registry.writer(component, stored[first])}."
            )


def _refused_alone(job: _Job) -> OutOfMemory:
    return OutOfMemory(
        f"Request {job.request} of {len(job.tokens)} tokens is refused memory though it runs alone "
        "and an empty pool holds it: look for pages or states that leak."
    )


def _part(rows: Rows, span: slice) -> Rows:
    """The rows of one decode step of those stamped together."""
    return Rows(
        kv=rows.kv[:, span], key=rows.key[:, span], gate=rows.gate[:, span], state=rows.state[span]
    )


def _free(engine: Engine) -> int:
    """Pages and state slots that nobody owns."""
    snapshot = engine.inspect()
    return len(snapshot.free_pages) + len(snapshot.free_states)
