"""Same context, other history: selections, logits and stored bytes are the same bits.

The control of each comparison is one request alone, prefilled in one chunk on a fresh engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle_tests.tiny_engine import SHAPE, build
from reference.contract import Chunk, Component, Drafts, Engine, RequestId, StepOutput
from reference.geometry import Geometry, RowFormat
from reference.weights import random_weights

GEOMETRIES = {
    f"kpool{kpool}-{row_format.value}": Geometry(
        kpool=kpool,
        physical_page_size=4,
        topk=8,
        mamba_track_interval=16,
        max_drafts=3,
        row_format=row_format,
    )
    for kpool, row_format in [
        (1, RowFormat.BF16),
        (2, RowFormat.FP8_RAW),
        (4, RowFormat.BF16),
        (4, RowFormat.FP8_PACKED),
    ]
}
A, B = RequestId(1), RequestId(2)
TOKENS = torch.randint(0, SHAPE.vocab, (90,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(params=GEOMETRIES.values(), ids=GEOMETRIES, scope="module")
def geometry(request: pytest.FixtureRequest) -> Geometry:
    return request.param


def engine_for(geometry: Geometry) -> Engine:
    weights = random_weights(SHAPE, geometry, seed=7)
    return build(geometry=geometry, weights=weights, page_order="permuted", pages=150)


@dataclass(frozen=True)
class Seen:
    """What an engine computed for some positions, and all that it stored for a request."""

    selected: torch.Tensor
    logits: torch.Tensor
    stored: list[torch.Tensor]

    def must_equal(self, other: Seen) -> None:
        assert torch.equal(self.selected, other.selected)
        assert torch.equal(self.logits, other.logits)
        assert all(map(torch.equal, self.stored, other.stored))


def seen(engine: Engine, request: RequestId, outputs: Sequence[StepOutput], first: int) -> Seen:
    """Outputs from position `first` on, joined, and the stored rows, tail and state."""
    mine = [out for out in outputs if out.request == request]
    start, length = mine[0].start, engine.inspect().requests[request].length
    kpool = engine.geometry.kpool
    spans = {
        Component.KV: (0, length),
        Component.INDEX: (0, length // kpool),
        Component.TAIL: (length // kpool * kpool, length),
        Component.STATE: (0, 1),
    }
    return Seen(
        torch.cat([out.selected for out in mine], dim=1)[:, first - start :],
        torch.cat([out.logits for out in mine])[first - start :],
        [engine.read(request, c, layer, *span) for c, span in spans.items() for layer in (0, 1)],
    )


def run(engine: Engine, request: RequestId, tokens: Sequence[int], stops: Sequence[int]) -> list:
    """Submit and prefill in chunks, with the outputs of all positions that are computed."""
    start, outputs = engine.submit(request, tokens).hit, []
    for stop in [*(s for s in stops if s > start), len(tokens)]:
        outputs += engine.extend([Chunk(request=request, stop=stop, outputs_from=start)])
        start = stop
    return outputs


def alone(geometry: Geometry, tokens: Sequence[int], first: int = 0) -> Seen:
    engine = engine_for(geometry)
    return seen(engine, A, run(engine, A, tokens, []), first)


@settings(max_examples=10, deadline=None)
@given(stops=st.sets(st.integers(1, len(TOKENS) - 1), max_size=6))
def test_chunk_borders_do_not_show(stops: set[int]) -> None:
    geometry = GEOMETRIES["kpool4-bf16"]
    engine = engine_for(geometry)
    outputs = run(engine, A, TOKENS, sorted(stops))
    seen(engine, A, outputs, 0).must_equal(alone(geometry, TOKENS))


def test_single_tokens_equal_one_chunk(geometry: Geometry) -> None:
    """Prefill one by one, and the same tokens by decode."""
    control = alone(geometry, TOKENS)
    engine = engine_for(geometry)
    outputs = run(engine, A, TOKENS, range(1, len(TOKENS)))
    seen(engine, A, outputs, 0).must_equal(control)
    engine = engine_for(geometry)
    outputs = run(engine, A, TOKENS[:40], [])
    for token in TOKENS[40:]:
        outputs += engine.decode([A], [token])
    seen(engine, A, outputs, 0).must_equal(control)


def test_the_batch_does_not_show(geometry: Geometry) -> None:
    """Five requests of other lengths beside A, in prefill and in decode, A never first."""
    engine = engine_for(geometry)
    others = [RequestId(10 + i) for i in range(5)]
    engine.submit(A, TOKENS[:70])
    for i, other in enumerate(others):
        engine.submit(other, TOKENS[i + 1 : 60 - 7 * i])
    outputs = []
    for part in (0.3, 1.0):
        chunks, views = [], engine.inspect().requests
        for request in (*others[:3], A, *others[3:]):
            length = 70 if request == A else 59 - 8 * others.index(request)
            stop = max(int(length * part), views[request].length + 1)
            chunks.append(Chunk(request=request, stop=stop, outputs_from=views[request].length))
        outputs += engine.extend(chunks)
    for step, token in enumerate(TOKENS[70:]):
        outputs += engine.decode([*others[step % 4 :], A], [*range(step % 4, 5), token])
    seen(engine, A, outputs, 0).must_equal(alone(geometry, TOKENS))


def test_a_hit_equals_a_cold_start(geometry: Geometry) -> None:
    engine = engine_for(geometry)
    run(engine, B, [*TOKENS[:50], 1, 2, 3], [])
    outputs = run(engine, A, TOKENS, [61])
    hit = outputs[0].start
    assert hit == 48
    seen(engine, A, outputs, hit).must_equal(alone(geometry, TOKENS, hit))


def test_retraction_and_resumption_do_not_show(geometry: Geometry) -> None:
    engine = engine_for(geometry)
    run(engine, A, TOKENS[:53], [])
    for token in TOKENS[53:80]:
        engine.decode([A], [token])
    tokens = engine.retract(A)
    assert list(tokens) == TOKENS[:80]
    outputs = run(engine, A, tokens, [])
    hit = outputs[0].start
    assert hit == 64
    for token in TOKENS[80:]:
        outputs += engine.decode([A], [token])
    seen(engine, A, outputs, hit).must_equal(alone(geometry, TOKENS, hit))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_verify_equals_decode_and_rejection_leaves_no_trace(geometry: Geometry, count: int) -> None:
    engine = engine_for(geometry)
    outputs = run(engine, A, TOKENS[:62], [])
    drafts = [*TOKENS[62 : 62 + count], *([5] * (3 - count))]
    (verified,) = engine.verify([Drafts(request=A, tokens=drafts)])
    engine.accept(A, count)
    outputs.append(
        StepOutput(
            request=A,
            start=62,
            selected=verified.selected[:, :count],
            logits=verified.logits[:count],
        )
    )
    for token in TOKENS[62 + count :]:
        outputs += engine.decode([A], [token])
    seen(engine, A, outputs, 0).must_equal(alone(geometry, TOKENS))


def test_a_different_context_shows() -> None:
    """The comparison can fail: one token changed moves the logits behind it, and only those."""
    geometry = GEOMETRIES["kpool4-bf16"]
    other = [*TOKENS[:30], (TOKENS[30] + 1) % SHAPE.vocab, *TOKENS[31:]]
    one, two = alone(geometry, TOKENS), alone(geometry, other)
    assert torch.equal(one.logits[:30], two.logits[:30])
    assert not (one.logits[30:] == two.logits[30:]).all(dim=1).any()
