"""The cacheless engine through the contract: model run, stamped run, drafts, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from reference.contract import (
    Capability,
    Chunk,
    Component,
    Drafts,
    EngineOptions,
    InvalidCall,
    OutOfMemory,
    RequestId,
    Rows,
)
from reference.engine import ReferenceEngine, factory
from reference.geometry import Geometry, ModelShape
from reference.model import forward
from reference.pooling import pooled_rows
from reference.prefix import judge_snapshot
from reference.quant import bf16_values, f32_values
from reference.weights import random_weights

GEOMETRY = Geometry(kpool=2, physical_page_size=4, topk=8, mamba_track_interval=8, max_drafts=3)
SHAPE = ModelShape(
    layers=2,
    dsa_period=2,
    vocab=31,
    hidden=16,
    heads=2,
    latent=8,
    q_lora=8,
    index_heads=2,
    index_dim=8,
    kda_heads=1,
    kda_key_dim=4,
    kda_value_dim=4,
)
WEIGHTS = random_weights(SHAPE, GEOMETRY, 0)
OPTIONS = EngineOptions(pages=20, state_slots=8, max_requests=2)
ONE, TWO, THREE = RequestId(1), RequestId(2), RequestId(3)
PROMPT = [7, 3, 3, 9, 30, 1, 0, 4, 4, 12, 8, 2, 5, 17, 21, 6, 6]


def model_engine() -> ReferenceEngine:
    return factory(GEOMETRY, SHAPE, OPTIONS, WEIGHTS)


def rows(start: int, count: int, states: int) -> Rows:
    """Rows whose values tell the position."""

    def ramp(*size: int) -> torch.Tensor:
        values = torch.arange(start, start + size[1 if len(size) == 3 else 0]).float()
        return values[:, None].expand(size).clone() if len(size) == 3 else values

    return Rows(
        kv=ramp(1, count, SHAPE.latent),
        key=ramp(1, count, SHAPE.index_dim),
        gate=ramp(1, count, SHAPE.index_dim) / 100,
        state=torch.arange(states)[:, None, None].expand(states, 1, SHAPE.state_width)
        + 100.0 * start,
    )


def test_steps_equal_one_forward_whatever_the_chunks() -> None:
    engine = model_engine()
    assert engine.submit(ONE, PROMPT).hit == 0
    engine.submit(TWO, PROMPT[:5])
    steps = engine.extend([Chunk(request=ONE, stop=6, outputs_from=0), Chunk(request=TWO, stop=5)])[
        :1
    ]
    steps += engine.extend([Chunk(request=ONE, stop=len(PROMPT), outputs_from=6)])
    steps += engine.decode([TWO, ONE], [9, 11])[1:]
    steps += engine.verify([Drafts(request=ONE, tokens=[13, 14, 15])])
    engine.accept(ONE, 2)
    steps += engine.decode([ONE], [16])
    tokens = [*PROMPT, 11, 13, 14, 16]
    whole = forward(WEIGHTS, SHAPE, GEOMETRY, tokens, outputs_from=0, state_at=(len(tokens),))
    drafts = steps.pop(3)
    assert drafts.start == len(PROMPT) + 1
    accepted = slice(drafts.start, drafts.start + 2)
    torch.testing.assert_close(drafts.logits[:2], whole.logits[accepted].float())
    for step in steps:
        at = slice(step.start, step.start + len(step.logits))
        torch.testing.assert_close(step.logits, whole.logits[at].float())
        assert torch.equal(step.selected, whole.selected[:, at])
    n = len(tokens)
    assert torch.equal(engine.read(ONE, Component.KV, 0, 3, n), whole.kv[0][3:])
    assert torch.equal(engine.read(ONE, Component.INDEX, 0, 1, n // 2), whole.index[0][1:])
    assert torch.equal(engine.read(ONE, Component.TAIL, 0, n - 1, n), whole.tail[0][n - 1 :])
    state = f32_values(engine.read(ONE, Component.STATE, 0, 0, 1))
    torch.testing.assert_close(state, whole.states[n], rtol=1e-6, atol=1e-6)


def test_stamped_rows_come_back_and_rejected_drafts_do_not() -> None:
    engine = factory(GEOMETRY, SHAPE, OPTIONS)
    assert Capability.STAMPED in engine.capabilities
    engine.submit(ONE, PROMPT)
    engine.extend([Chunk(request=ONE, stop=5, rows=rows(0, 5, 1))])
    engine.extend([Chunk(request=ONE, stop=17, rows=rows(5, 12, 3))])  # checkpoints 8, 16; end
    engine.verify([Drafts(request=ONE, tokens=[1, 2, 3], rows=rows(500, 3, 3))])
    engine.accept(ONE, 1)
    assert f32_values(engine.read(ONE, Component.STATE, 0, 0, 1))[0, 0] == 50_000
    step = engine.decode([ONE], [4], rows(18, 1, 1))[0]
    assert (len(step.logits), step.selected.shape[1]) == (0, 0)
    kv = bf16_values(engine.read(ONE, Component.KV, 0, 0, 19))
    assert kv[:, 0].tolist() == [*range(17), 500, 18]
    whole = torch.tensor([*range(17), 500.0, 18])[:, None].expand(19, SHAPE.index_dim)
    expected = pooled_rows(whole, whole / 100, torch.zeros(2, SHAPE.index_dim), GEOMETRY)
    assert torch.equal(engine.read(ONE, Component.INDEX, 0, 0, 9), expected)
    tail = bf16_values(engine.read(ONE, Component.TAIL, 0, 18, 19))
    assert tail[0, 0] == 18
    assert f32_values(engine.read(ONE, Component.STATE, 0, 0, 1))[0, 0] == 1_800


def test_snapshots_are_consistent_and_end_empty() -> None:
    engine = model_engine()
    engine.submit(ONE, PROMPT)
    engine.extend([Chunk(request=ONE, stop=len(PROMPT))])
    engine.submit(TWO, PROMPT[:3])
    engine.verify([Drafts(request=ONE, tokens=[1, 2])])
    view = engine.inspect().requests[ONE]
    assert (view.length, view.pending, view.shared) == (len(PROMPT), 2, 0)
    assert judge_snapshot(engine.inspect(), GEOMETRY, pages=20, state_slots=8) == []
    assert engine.retract(ONE) == tuple(PROMPT)
    engine.abort(TWO)
    after = engine.inspect()
    assert len(after.free_pages) == 19
    assert after.requests == {}
    assert engine.evict(3) == 0


@pytest.mark.parametrize(
    ("call", "cure"),
    [
        (lambda e: e.submit(ONE, PROMPT), "choose another id"),
        (lambda e: e.submit(TWO, []), "at least one"),
        (lambda e: e.extend([Chunk(request=ONE, stop=99)]), "in between"),
        (lambda e: e.extend([Chunk(request=ONE, stop=9, outputs_from=9)]), "position of the chunk"),
        (lambda e: e.extend([Chunk(request=ONE, stop=9)] * 2), "once"),
        (lambda e: e.decode([ONE], [1]), "to its end first"),
        (lambda e: e.decode([THREE], [1]), "submit it first"),
        (lambda e: e.accept(ONE, 1), "verify first"),
        (lambda e: e.extend([Chunk(request=ONE, stop=17, rows=rows(5, 12, 3))]), "stamped run"),
        (lambda e: e.read(ONE, Component.KV, 0, 0, 6), "read within"),
        (lambda e: e.read(ONE, Component.KV, 1, 0, 1), "counted from 0"),
        (lambda e: e.raw(Component.KV, 0), "Capability.RAW"),
    ],
)
def test_invalid_calls_name_the_cure_and_change_nothing(
    call: Callable[[ReferenceEngine], object], cure: str
) -> None:
    engine = model_engine()
    engine.submit(ONE, PROMPT)
    engine.extend([Chunk(request=ONE, stop=5)])
    before = engine.inspect()
    with pytest.raises(InvalidCall, match=cure):
        call(engine)
    assert engine.inspect() == before


def test_drafts_in_flight_refuse_other_steps() -> None:
    engine = model_engine()
    engine.submit(ONE, PROMPT)
    engine.extend([Chunk(request=ONE, stop=len(PROMPT))])
    with pytest.raises(InvalidCall, match="max_drafts"):
        engine.verify([Drafts(request=ONE, tokens=[1, 2, 3, 4])])
    engine.verify([Drafts(request=ONE, tokens=[1])])
    with pytest.raises(InvalidCall, match="accept or reject"):
        engine.decode([ONE], [1])
    with pytest.raises(InvalidCall, match="at most as many"):
        engine.accept(ONE, 2)
    engine.accept(ONE, 0)
    engine.decode([ONE], [1])


def test_request_slots_run_out() -> None:
    engine = model_engine()
    engine.submit(ONE, PROMPT)
    engine.submit(TWO, PROMPT)
    with pytest.raises(OutOfMemory, match="retract a request"):
        engine.submit(THREE, PROMPT)
