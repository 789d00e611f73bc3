"""Needle in a haystack: does a cached document still answer after its relatives came in?

A document of 16,384 tokens hides a needle, a key token followed by a value token, at some
depth; the key occurs nowhere else.  All documents share one haystack, so two of them are
equal up to the shallower needle, and the prefix tree lets them share those pages.  As in
document question answering, all are ingested first and then asked: the question is the key
at the end of the document, the answer the model's next token.  Weights in closed form
(`reference.weights.retrieval_weights`) make the model continue whatever followed the same
token earlier, so it finds the value iff the index still selects the needle's group.

Where pages are shared in physical units (SGLang #41494), a later document with a deeper
needle writes its pooled keys over those of an earlier one, right behind the point where they
part, which is the earlier one's needle.  SGLang #42178 reports 11 of 20 found there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fuzz.verify.client import Client
from reference.contract import EngineFactory, EngineOptions, Weights
from reference.geometry import Geometry, ModelShape

LENGTH = 16_384
TOPK = 512
VOCAB = 512
DEPTHS = 10
NEEDLES_PER_DEPTH = 2
SAMPLES = DEPTHS * NEEDLES_PER_DEPTH
PHYSICAL_PAGE = Geometry().physical_page_size
PAGE = Geometry().logical_page_size
RESERVED = 2 * SAMPLES
"""Tokens that occur in needles alone: a key and a value for each sample."""

Order = Literal["random", "increasing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needle:
    """`key` stands at position `depth`, `value` right behind it."""

    depth: int
    key: int
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A document of [length] tokens with its needle in place."""

    needle: Needle
    document: NDArray[np.int64]

    @property
    def question(self) -> NDArray[np.int64]:
        """[length + 1]: the document, then the key."""
        return np.append(self.document, self.needle.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What one engine found.

    Fields:
        found: for each sample, in order of ingestion, whether the value was the argmax.
        hits: cached tokens of every prompt: first the documents, then the questions.
    """

    found: tuple[bool, ...]
    hits: tuple[int, ...]

    @property
    def score(self) -> int:
        """Samples found."""
        return sum(self.found)


def samples(*, order: Order, shared: bool, seed: int, length: int = LENGTH) -> list[Sample]:
    """The samples in order of ingestion: two needles at each of ten depths.

    Args:
        shared: one haystack for all; otherwise each sample has its own.
    """
    rng = np.random.default_rng(seed)
    # not at the very ends, and nowhere that a page of any unit begins
    places = [p for p in range(PAGE, length - PAGE) if p % PHYSICAL_PAGE]
    depths = np.sort(rng.choice(places, DEPTHS, replace=False)).repeat(NEEDLES_PER_DEPTH)
    needles = [
        Needle(depth=int(depth), key=2 * i, value=2 * i + 1) for i, depth in enumerate(depths)
    ]
    if order == "random":
        rng.shuffle(needles)
    haystack = rng.integers(RESERVED, VOCAB, length)
    made = []
    for needle in needles:
        document = haystack.copy() if shared else rng.integers(RESERVED, VOCAB, length)
        document[needle.depth : needle.depth + 2] = needle.key, needle.value
        made.append(Sample(needle=needle, document=document))
    return made


def run_arm(
    factory: EngineFactory,
    *,
    geometry: Geometry,
    shape: ModelShape,
    weights: Weights,
    options: EngineOptions,
    samples: Sequence[Sample],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Arm:
    """Ingest all documents, then ask about each."""
    client = Client(factory(geometry, shape, options, weights))
    for number, sample in enumerate(samples):
        client.ingest(sample.document)
        progress(number + 1, 2 * len(samples))
    found = []
    for sample in samples:
        request, output = client.prefill(sample.question)
        found.append(int(output.logits[-1].argmax()) == sample.needle.value)
        client.engine.finish(request)
        progress(len(samples) + len(found), 2 * len(samples))
    return Arm(found=tuple(found), hits=tuple(client.hits))
