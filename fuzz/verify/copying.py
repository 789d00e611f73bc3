"""The copy experiment: does a span that was cached stay copyable once another request
extends the same prefix from inside it, or once it has been to the host and back?

A context holds a span of tokens that occur nowhere else.  A client gives the context and
the span's first token and forces the rest of the span: the mean logprob says how well the
model copies.  Then another request shares the context up to the span, mid-group and
mid-page, goes on otherwise, and the first client asks again.  Or the context is backed up,
evicted and restored.  The context is far longer than topk, so the span is seen only through
its pooled index keys.

Source: SGLang #42178, whose copied spans fell from -0.33 .. -0.18 to -8.16 .. -7.94 nats
with the fault of #41494, and from -0.28 to -11.8 when a host restore left out the index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fuzz.verify.client import Client
from reference.contract import EngineFactory, EngineOptions, Weights
from reference.geometry import Geometry, ModelShape

SPANS = 4
SPAN = 48
CONTEXT = 4096
REPLY = 512
TOPK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One context with a span, and the request that shares it up to the span.

    Fields:
        context: [CONTEXT] tokens.
        span: [SPAN] tokens, all different, found once in the context.
        rival: tokens equal to the context up to the span's first.
    """

    context: NDArray[np.int64]
    span: NDArray[np.int64]
    rival: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Mean logprob (nats) of one span before and after what happened to its context, and the
    tokens of it that were reused or restored then."""

    before: float
    after: float
    reused: int

    @property
    def fall(self) -> float:
        """Nats lost."""
        return self.before - self.after


Meanwhile = Callable[[Client, Case], int]
"""What happens to a case's context between the two measures; returns the tokens reused."""


def cases(*, geometry: Geometry, seed: int, vocab: int) -> list[Case]:
    """SPANS cases, each with a context of its own.

    A span starts two tokens into a group and into the second physical page of its logical
    page, and ends inside that logical page.
    """
    rng = np.random.default_rng(seed)
    made = []
    pages = rng.choice(np.arange(1, CONTEXT // geometry.logical_page_size - 1), SPANS)
    for page in pages:
        start = int(page) * geometry.logical_page_size + geometry.physical_page_size + 2
        context = rng.integers(SPAN, vocab, CONTEXT)
        span = rng.permutation(SPAN)
        context[start : start + SPAN] = span
        rival = np.concatenate([context[:start], rng.integers(SPAN, vocab, REPLY)])
        made.append(Case(context=context, span=span, rival=rival))
    return made


def rival(client: Client, case: Case) -> int:
    """Another request extends the context; returns its hit."""
    client.ingest(case.rival)
    return client.hits[-1]


def round_trip(client: Client, case: Case) -> int:
    """The context goes to the host, all that is cached is evicted, and it comes back; returns
    the tokens that did."""
    engine = client.engine
    engine.back_up(case.context)
    engine.evict(len(engine.inspect().ref_counts))
    return engine.restore(case.context)


def run_arm(
    factory: EngineFactory,
    *,
    geometry: Geometry,
    shape: ModelShape,
    weights: Weights,
    options: EngineOptions,
    cases: Sequence[Case],
    meanwhile: Meanwhile = rival,
) -> list[Copy]:
    """Measure every case before and after what happens `meanwhile`."""
    client = Client(factory(geometry, shape, options, weights))
    copies = []
    for case in cases:
        client.ingest(case.context)
        question = np.append(case.context, case.span[0])
        before = client.forced_logprob(question, case.span[1:])
        reused = meanwhile(client, case)
        after = client.forced_logprob(question, case.span[1:])
        copies.append(Copy(before=before, after=after, reused=reused))
    return copies
