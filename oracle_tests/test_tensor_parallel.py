"""R tensor-parallel ranks compute the bits that one rank computes, and store its states by heads.

The control of each comparison is the engine of a single rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from optimized import kda
from optimized.cluster import Instance, RanksDisagree
from optimized.groups import GlooGroup, RankLost, ThreadGroup
from optimized.heads import rank_shape, rank_state, whole_state
from oracle_tests import rank_processes
from oracle_tests.conftest import CUDA
from oracle_tests.tiny_engine import GEOMETRY, SHAPE, build, rows
from reference.bounds import Stored, audit
from reference.contract import (
    Chunk,
    Component,
    Drafts,
    Engine,
    EngineOptions,
    HiSparse,
    InvalidCall,
    OutOfMemory,
    RequestId,
    StepOutput,
)
from reference.geometry import Geometry, ModelShape
from reference.weights import random_weights
from systems import load

A, B = RequestId(1), RequestId(2)
TOKENS = torch.randint(0, SHAPE.vocab, (60,), generator=torch.Generator().manual_seed(3)).tolist()
SHAPES = {
    "4x4x8": replace(SHAPE, kda_heads=4),
    # no vector of any width divides the columns of a head
    "4x3x5": replace(SHAPE, kda_heads=4, kda_key_dim=3, kda_value_dim=5),
    "12x8x16": replace(SHAPE, kda_heads=12, kda_key_dim=8, kda_value_dim=16),
    # four threads of MKL share out the columns of its products in another way than those of half
    "4x8x4": replace(SHAPE, hidden=256, kda_heads=4, kda_key_dim=8, kda_value_dim=4),
}
SHAPE4 = SHAPES["4x4x8"]
OPTIONS = EngineOptions(pages=64, state_slots=64, max_requests=6, page_order="permuted")
SPARSE = replace(OPTIONS, hisparse=HiSparse(device_pages=40, host_pages=64))
SPARSE_GEOMETRY = replace(GEOMETRY, device_buffer_size=12, max_drafts=0)


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def shape(request: pytest.FixtureRequest) -> ModelShape:
    return request.param


@pytest.fixture
def several_threads() -> Iterator[None]:
    """Torch and its BLAS may use four threads."""
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(1)


def single(
    shape: ModelShape, options: EngineOptions = OPTIONS, geometry: Geometry = GEOMETRY
) -> Engine:
    weights = random_weights(shape, GEOMETRY, seed=7)
    return load("optimized").factory(geometry, shape, options, weights)


def ranks(
    shape: ModelShape, size: int, options: EngineOptions = OPTIONS, geometry: Geometry = GEOMETRY
) -> Any:
    """An instance of so many ranks, to be closed."""
    weights = random_weights(shape, GEOMETRY, seed=7)
    return closing(Instance(geometry, shape, [options] * size, weights))


def life(engine: Engine | Instance, *, verifies: bool = True) -> list[StepOutput]:
    """Prefill in chunks, a hit beside it, decode in a batch, drafts of which one is rejected, and
    a retraction that resumes from a checkpoint."""
    engine.submit(A, TOKENS[:37])
    outputs = engine.extend([Chunk(request=A, stop=21, outputs_from=0)])
    outputs += engine.extend([Chunk(request=A, stop=37, outputs_from=21)])
    assert engine.submit(B, [*TOKENS[:33], 5, 6, 7]).hit == 32
    outputs += engine.extend([Chunk(request=B, stop=36, outputs_from=32)])
    for step, token in enumerate(TOKENS[37:45]):
        outputs += engine.decode([B, A], [step, token])
    if verifies:
        outputs += engine.verify([Drafts(request=A, tokens=TOKENS[45:48])])
        engine.accept(A, 2)
    tokens = engine.retract(A)
    hit = engine.submit(A, [*tokens, 3]).hit
    assert hit == 40
    outputs += engine.extend([Chunk(request=A, stop=len(tokens) + 1, outputs_from=hit)])
    return outputs


def stored(engine: Engine | Instance, shape: ModelShape) -> list[Tensor]:
    """All rows of both requests."""
    out = []
    for request, view in engine.inspect().requests.items():
        kpool = engine.geometry.kpool
        spans = {
            Component.KV: (0, view.length),
            Component.INDEX: (0, view.length // kpool),
            Component.TAIL: (view.length // kpool * kpool, view.length),
            Component.STATE: (0, 1),
        }
        for component, span in spans.items():
            layers = shape.kda_layers if component is Component.STATE else shape.dsa_layers
            out += [engine.read(request, component, i, *span) for i in range(len(layers))]
    return out


def same(some: list[StepOutput], others: list[StepOutput]) -> bool:
    """Whether two runs computed the same bits."""
    for one, two in zip(some, others, strict=True):
        for field in fields(one):
            mine, theirs = getattr(one, field.name), getattr(two, field.name)
            equal = torch.equal if isinstance(mine, Tensor) else lambda a, b: a == b
            if not equal(mine, theirs):
                return False
    return True


def must_equal_one_rank(shape: ModelShape, size: int) -> None:
    engine = single(shape)
    control = life(engine)
    with ranks(shape, size) as instance:
        assert same(life(instance), control)
        assert instance.inspect() == engine.inspect()
        assert all(map(torch.equal, stored(instance, shape), stored(engine, shape)))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_number_of_ranks_does_not_show(shape: ModelShape, size: int) -> None:
    must_equal_one_rank(shape, size)


@pytest.mark.parametrize("size", [3, 6, 12])
def test_no_number_of_ranks_that_divides_the_heads_shows(size: int) -> None:
    must_equal_one_rank(SHAPES["12x8x16"], size)


@pytest.mark.usefixtures("several_threads")
@pytest.mark.parametrize("size", [2, 4])
def test_threads_of_the_blas_do_not_make_it_show(size: int) -> None:
    must_equal_one_rank(SHAPES["4x8x4"], size)


def test_under_hisparse_it_does_not_show_either() -> None:
    control = life(single(SHAPE4, SPARSE, SPARSE_GEOMETRY), verifies=False)
    assert any(output.misses is not None and output.misses.any() for output in control)
    with ranks(SHAPE4, 2, SPARSE, SPARSE_GEOMETRY) as instance:
        assert same(life(instance, verifies=False), control)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_stores_its_heads_of_every_state(shape: ModelShape, size: int) -> None:
    """Of running requests, of checkpoints and, as poison, of nobody."""
    engine = single(shape)
    life(engine)
    with ranks(shape, size) as instance:
        life(instance)
        for layer in range(len(shape.kda_layers)):
            whole = engine.raw(Component.STATE, layer).view(torch.float32)
            for rank, of_rank in enumerate(instance.engines):
                own = rank_state(shape, whole, rank, size).view(torch.uint8)
                assert torch.equal(of_rank.raw(Component.STATE, layer), own)
                assert own.shape[1] == 4 * rank_shape(shape, size).state_width
        # and the replicated rows whole
        for component in (Component.KV, Component.INDEX, Component.TAIL):
            for of_rank in instance.engines:
                assert torch.equal(of_rank.raw(component, 0), engine.raw(component, 0))


def test_a_states_parts_are_those_of_its_heads(shape: ModelShape) -> None:
    """Each word of a numbered state, looked up by the layout that docs/model.md gives."""
    heads, key, value = shape.kda_heads, shape.kda_key_dim, shape.kda_value_dim
    state = torch.arange(shape.state_width)[None]
    channels = [heads * key, heads * key, heads * value]
    window = state[0, heads * key * value :].view(shape.conv_width - 1, -1)
    for size in (1, 2, 4):
        own, parts = heads // size, []
        for rank in range(size):
            first, stop = rank * own, (rank + 1) * own
            words = state[0, first * key * value : stop * key * value].tolist()
            for taps in window:
                for inputs, width in zip(taps.split(channels), (key, key, value), strict=True):
                    words += inputs[first * width : stop * width].tolist()
            part = rank_state(shape, state, rank, size)
            assert part[0].tolist() == words
            parts.append(part)
        assert torch.equal(whole_state(shape, parts), state)


def test_four_ranks_are_within_the_references_bounds() -> None:
    with ranks(SHAPE4, 4) as instance:
        instance.submit(A, TOKENS[:40])
        outputs = instance.extend([Chunk(request=A, stop=40, outputs_from=0)])
        for token in TOKENS[40:]:
            outputs += instance.decode([A], [token])
        dsa, kda_layers = (range(len(ids)) for ids in (SHAPE4.dsa_layers, SHAPE4.kda_layers))
        groups = len(TOKENS) // GEOMETRY.kpool
        rows_of = Stored(
            kv=[instance.read(A, Component.KV, i, 0, len(TOKENS)) for i in dsa],
            index=[instance.read(A, Component.INDEX, i, 0, groups) for i in dsa],
            state=[instance.read(A, Component.STATE, i, 0, 1) for i in kda_layers],
        )
    weights = random_weights(SHAPE4, GEOMETRY, seed=7)
    assert audit(weights, SHAPE4, GEOMETRY, TOKENS, rows_of, outputs).violations == []
    # another run of heads is far outside of what rounding explains
    swapped = [row.view(2, -1).flip(0).view(1, -1) for row in rows_of.state]
    wrong = replace(rows_of, state=swapped)
    assert audit(weights, SHAPE4, GEOMETRY, TOKENS, wrong, outputs).violations


def test_stamped_ranks_keep_their_heads_of_the_rows() -> None:
    shape = SHAPE
    control = build(page_order="permuted")
    with closing(Instance(GEOMETRY, shape, [OPTIONS] * 2)) as instance:
        for engine in (control, instance):
            engine.submit(A, TOKENS[:20])
            engine.extend([Chunk(request=A, stop=20, rows=rows(20, 3, seed=1))])
            engine.decode([A], [4], rows(1, 1, seed=2))
            engine.verify([Drafts(request=A, tokens=[1, 2], rows=rows(2, 2, seed=3))])
            engine.accept(A, 1)
        assert all(map(torch.equal, stored(instance, shape), stored(control, shape)))
        before = instance.inspect()
        narrow = rows(1, 1)
        narrow = replace(narrow, state=narrow.state[..., :-1])
        with pytest.raises(InvalidCall, match=r": give all heads, \d+ words a state\.$"):
            instance.decode([A], [4], narrow)
        assert instance.inspect() == before


def in_a_process(group: GlooGroup, backend: str) -> tuple[list[StepOutput], list[Tensor]]:
    """A life as one rank over gloo, and its states."""
    options = replace(OPTIONS, backend=backend)
    engine = load("optimized").factory(
        GEOMETRY, SHAPE4, options, random_weights(SHAPE4, GEOMETRY, seed=7), group=group
    )
    outputs = life(engine)
    layers = range(len(SHAPE4.kda_layers))
    return outputs, [engine.raw(Component.STATE, layer) for layer in layers]


@pytest.mark.parametrize("backend", ["torch", *([] if CUDA else ["triton"])])
def test_ranks_in_processes_compute_the_same_bits(backend: str) -> None:
    engine = single(SHAPE4, replace(OPTIONS, backend=backend))
    control = life(engine)
    for rank, (outputs, states) in enumerate(
        rank_processes.run(2, partial(in_a_process, backend=backend))
    ):
        assert same(outputs, control)
        for layer, state in enumerate(states):
            whole = engine.raw(Component.STATE, layer).view(torch.float32)
            assert torch.equal(
                state.view(torch.float32).view(torch.int32),
                rank_state(SHAPE4, whole, rank, 2).view(torch.int32),
            )


# Controls: what the comparisons above would see if ranks went wrong.


def test_another_order_of_ranks_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    control = life(single(SHAPE4))
    gather = ThreadGroup.gather
    monkeypatch.setattr(ThreadGroup, "gather", lambda self, tensor: gather(self, tensor)[::-1])
    with ranks(SHAPE4, 2) as instance:
        assert not same(life(instance), control)


def test_another_order_on_one_rank_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gather = ThreadGroup.gather
    monkeypatch.setattr(
        ThreadGroup,
        "gather",
        lambda self, tensor: gather(self, tensor)[:: -1 if self.rank else 1],
    )
    with ranks(SHAPE4, 2) as instance:
        named = r"^ranks 0 and 1 of 2 returned other (selected|logits) of request 1 from position "
        with pytest.raises(RanksDisagree, match=named):
            life(instance)


def test_a_rank_with_anothers_heads_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = single(SHAPE4)
    control = life(engine)
    own = kda.own_rows
    monkeypatch.setattr(kda, "own_rows", lambda weight, rank, size: own(weight, 0, size))
    with ranks(SHAPE4, 2) as instance:
        assert not same(life(instance), control)
        ours, theirs = (stored(each, SHAPE4)[-1] for each in (instance, engine))
        assert not torch.equal(ours, theirs)


# Failures.


@pytest.mark.parametrize("size", [3, 8])
def test_heads_that_cannot_be_shared_out_are_refused(size: int) -> None:
    sentence = f"^4 KDA heads cannot be shared out to {size} ranks: choose a number of ranks that"
    with pytest.raises(InvalidCall, match=sentence):
        Instance(GEOMETRY, SHAPE4, [OPTIONS] * size)


@pytest.mark.skipif(CUDA, reason="kernels are compiled here, which any thread may launch")
def test_threads_of_interpreted_kernels_are_refused() -> None:
    """Triton's interpreter patches its language while a kernel runs."""
    with pytest.raises(InvalidCall, match=r"^Triton's interpreter .*: make each rank a process"):
        Instance(GEOMETRY, SHAPE4, [replace(OPTIONS, backend="triton")] * 2)


def test_what_all_ranks_refuse_passes_through_and_changes_nothing() -> None:
    with ranks(SHAPE4, 2, replace(OPTIONS, pages=3)) as instance:
        with pytest.raises(InvalidCall, match="request 1 is not running"):
            instance.decode([A], [3])
        instance.submit(A, TOKENS)
        before = instance.inspect()
        with pytest.raises(OutOfMemory):
            instance.extend([Chunk(request=A, stop=len(TOKENS))])
        assert instance.inspect() == before
        instance.extend([Chunk(request=A, stop=10)])


def test_a_rank_that_fails_alone_is_named_and_ends_the_instance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no rows")

    with ranks(SHAPE4, 4) as instance:
        instance.submit(A, TOKENS[:20])
        monkeypatch.setattr(instance.engines[2], "extend", fail)
        with pytest.raises(RankLost, match=r"^rank 2 of 4 failed where .*no rows.* anew\.$"):
            instance.extend([Chunk(request=A, stop=20)])
        with pytest.raises(RankLost, match=r"has failed: build the instance anew\.$"):
            instance.submit(B, TOKENS)


def test_a_rank_that_missed_a_call_is_named() -> None:
    with ranks(SHAPE4, 2) as instance:
        instance.submit(A, TOKENS[:20])
        instance.engines[1].submit(B, [1])
        with pytest.raises(RanksDisagree, match=r"^ranks 0 and 1 of 2 returned other results: "):
            instance.inspect()
