"""Requests handed over between engines: memory is reserved, bytes are copied by hand, and the
other engine goes on as if it had prefilled them itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from optimized.transfer.plan import Plan
from oracle_tests.hisparse_life import PAGE, A, B, C
from oracle_tests.tiny_engine import SHAPE, build, prefill, rows
from oracle_tests.transfer_cases import PLAIN, PLAN, copy, drafting, hot, plain, send, sound
from reference.contract import (
    Capability,
    Chunk,
    Component,
    Engine,
    Places,
    StepOutput,
    Weights,
)
from reference.transfer import places_of
from reference.weights import random_weights

LENGTHS = [1, 3, 4, 15, 16, 17, 32, 39]
"""Below a group, in a tail, at the end of groups, pages and checkpoints, and behind them."""
STEPS = 6


@lru_cache
def weights() -> Weights:
    return random_weights(SHAPE, PLAIN, 5)


Maker = Callable[..., Engine]
ENDS = [(plain, drafting), (drafting, plain), (drafting, hot), (hot, drafting), (hot, hot)]
ends = pytest.mark.parametrize(("at_p", "at_d"), ENDS, ids=lambda maker: maker.__name__)


def occupy(engine: Engine) -> None:
    """Let another request run first, so that no place is the same at both ends."""
    engine.submit(B, range(40, 58))
    stored = None
    if Capability.STAMPED in engine.capabilities:
        stored = rows(18, len(PLAIN.state_positions(0, 18)), seed=9)
    engine.extend([Chunk(request=B, stop=18, rows=stored)])


def hand_over(source: Engine, target: Engine, tokens: list[int]) -> None:
    """Move request A, which the source has prefilled."""
    here, there = source.places(A), target.reserve(A, tokens)
    send(PLAN, source, target, here=here, there=there)
    target.adopt(A)


def same(ours: list[StepOutput], theirs: list[StepOutput]) -> bool:
    return all(
        torch.equal(our.logits, their.logits) and torch.equal(our.selected, their.selected)
        for our, their in zip(ours, theirs, strict=True)
    )


def all_rows(engine: Engine) -> list[Tensor]:
    """Everything that can be read of request A."""
    length, kpool = engine.inspect().requests[A].length, engine.geometry.kpool
    spans = {
        Component.KV: (0, length),
        Component.INDEX: (0, length // kpool),
        Component.TAIL: (length // kpool * kpool, length),
    }
    found = [
        engine.read(A, component, layer, *span)
        for component, span in spans.items()
        for layer in range(len(SHAPE.dsa_layers))
    ]
    return [
        *found,
        *(engine.read(A, Component.STATE, layer, 0, 1) for layer in range(len(SHAPE.kda_layers))),
    ]


@ends
@pytest.mark.parametrize("length", LENGTHS)
def test_d_goes_on_as_p_would(at_p: Maker, at_d: Maker, length: int) -> None:
    """Bitwise equal logits and selections in every step; all memory adds up at either end."""
    source, target = (maker(weights=weights()) for maker in (at_p, at_d))
    occupy(target)
    tokens = [(7 * position) % 61 for position in range(length)]
    source.submit(A, tokens)
    source.extend([Chunk(request=A, stop=length)])
    hand_over(source, target, tokens)
    assert target.inspect().requests[A].length == length
    for step in range(STEPS):
        ours, theirs = (engine.decode([A], [step]) for engine in (source, target))
        assert same(ours, theirs)
        for engine in (source, target):
            sound(engine)


@ends
@pytest.mark.parametrize("length", LENGTHS)
def test_d_reads_what_p_stored(at_p: Maker, at_d: Maker, length: int) -> None:
    """All rows of a stamped run, each of which is another; a piece left out is noticed."""
    source, target, lacking = at_p(), at_d(), at_d()
    tokens = list(range(length))
    prefill(source, A, tokens)
    hand_over(source, target, tokens)
    here, there = source.places(A), lacking.reserve(A, tokens)
    copy(PLAN.runs(0, here, there), source, lacking)
    lacking.adopt(A)
    wanted = all_rows(source)
    assert all(map(torch.equal, all_rows(target), wanted))
    assert not all(map(torch.equal, all_rows(lacking), wanted))


@ends
def test_places_are_those_of_the_reference(at_p: Maker, at_d: Maker) -> None:
    source, target = at_p(), at_d()
    occupy(target)
    for length in LENGTHS:
        prefill(source, A, range(length))
        there = target.reserve(A, range(length))
        for engine, places in ((source, source.places(A)), (target, there)):
            assert places == places_of(engine.inspect(), A, length, engine.geometry)
        source.abort(A)
        target.drop(A)
        sound(target)


def test_regions_pair_up_whatever_the_ends_are() -> None:
    """By name, order and item size; their numbers of items differ."""
    engines = [plain(), drafting(), hot()]
    regions = [engine.regions() for engine in engines]
    layouts = [[(name, view.shape[1]) for name, view in each.items()] for each in regions]
    assert layouts[0] == layouts[1] == layouts[2]
    assert [name for name, _ in layouts[0]][:3] == ["kv 0", "index 0", "tail 0"]
    assert len(layouts[0]) == PLAN.aux_region
    for engine, each in zip(engines, regions, strict=True):
        assert each["kv 0"].data_ptr() == engine.raw(Component.KV, 0).data_ptr()
        for view in each.values():
            assert view.is_contiguous()
            assert view.dtype is torch.uint8


@pytest.mark.parametrize("at_d", [drafting, hot], ids=["drafting", "hot"])
def test_a_prompt_that_ends_on_a_checkpoint_is_shared(at_d: Maker) -> None:
    """At once, and the next request resumes from its state; a prompt that does not is not."""
    source, target = (maker(weights=weights()) for maker in (plain, at_d))
    tokens = list(range(2 * PAGE))
    for length, hit in ((2 * PAGE - 1, 0), (2 * PAGE, 2 * PAGE)):
        source.submit(A, tokens[:length])
        source.extend([Chunk(request=A, stop=length)])
        hand_over(source, target, tokens[:length])
        for engine in (source, target):
            engine.finish(A)
        sound(target)
        assert target.submit(C, [*tokens, 3]).hit == hit
        target.abort(C)
    source.submit(A, [*tokens, 3])
    target.submit(C, [*tokens, 3])
    outputs = [
        engine.extend([Chunk(request=request, stop=2 * PAGE + 1)])
        for engine, request in ((source, A), (target, C))
    ]
    assert same(*outputs)


@pytest.mark.parametrize("at_d", [drafting, hot], ids=["drafting", "hot"])
def test_what_is_cached_already_is_switched_to_at_the_end(at_d: Maker) -> None:
    """Two requests of one prompt: the second one's transfer holds its own pages until it leaves."""
    source, target = plain(), at_d()
    tokens = list(range(2 * PAGE))
    prefill(source, A, tokens)
    prefill(target, C, tokens)
    here, there = source.places(A), target.reserve(A, tokens)
    assert not set(there.index) & set(target.places(C).index)
    send(PLAN, source, target, here=here, there=there)
    target.adopt(A)
    assert target.places(A).index == there.index
    sound(target)
    target.finish(A)
    assert set(there.index) <= target.inspect().free_pages
    sound(target)


def test_pages_leave_while_the_prompt_is_computed() -> None:
    """The first piece of a long prompt is on its way when a twin of it completes at P: the pages
    that are being read stay what they are.  Control: where nobody reads them they are freed."""
    plan = replace(PLAN, chunks=2)
    source, target = (maker(weights=weights()) for maker in (plain, drafting))
    tokens = [(5 * position) % 59 for position in range(4 * PAGE)]
    assert plan.required(0, len(tokens)) == 2 * PAGE
    there = target.reserve(A, tokens)
    for request in (A, B):
        source.submit(request, tokens)
        source.extend([Chunk(request=request, stop=2 * PAGE)])
    early, unread = source.places(A), source.inspect().requests[B].pages
    source.submit(C, tokens)
    for request in (C, A, B):
        source.extend([Chunk(request=request, stop=len(tokens))])
    assert set(unread) <= source.inspect().free_pages
    whole = source.places(A)
    assert whole.kv[:2] == early.kv
    copy(plan.runs(0, early, there), source, target)
    for piece in (1, 2):
        copy(plan.runs(piece, whole, there), source, target)
    target.adopt(A)
    for step in range(STEPS):
        assert same(source.decode([A], [step]), target.decode([A], [step]))
    for request in (A, B, C):
        source.finish(request)
    sound(source)
    assert len(source.inspect().ref_counts) == 4


def test_a_placed_request_still_shares_what_is_new() -> None:
    """With no twin in the cache it is shared at once, as ever."""
    source = plain()
    source.submit(A, range(2 * PAGE))
    places = source.places(A)
    assert places == Places(kv=(), index=(), tail=(), state=places.state, length=0)
    source.extend([Chunk(request=A, stop=2 * PAGE, rows=rows(2 * PAGE, 2))])
    assert source.submit(B, range(2 * PAGE + 1)).hit == 2 * PAGE


def test_under_hisparse_a_decoded_row_is_on_the_host_when_its_place_is_told() -> None:
    """The newest row of a decode is on the device alone until the next step, or until then."""
    source, target = (maker(weights=weights()) for maker in (hot, drafting))
    tokens = list(range(20))
    source.submit(A, tokens)
    source.extend([Chunk(request=A, stop=20)])
    source.decode([A], [20])
    assert source.inspect().hot.buffers[A].saved == 20
    hand_over(source, target, [*tokens, 20])
    assert source.inspect().hot.buffers[A].saved == 21
    for step in range(STEPS):
        assert same(source.decode([A], [step]), target.decode([A], [step]))


@pytest.mark.parametrize("prefilled", [(1, 2), (2, 1), (2, 2)], ids=["1 to 2", "2 to 1", "2 to 2"])
def test_ranks_get_the_states_of_their_heads(prefilled: tuple[int, int]) -> None:
    """A rank is an engine with some of the heads; stamped states say which came from where."""
    count, counts = prefilled
    whole = rows(20, 2)
    sources, targets = (
        [
            build(geometry=PLAIN, shape=replace(SHAPE, kda_heads=SHAPE.kda_heads // ranks))
            for _ in range(ranks)
        ]
        for ranks in (count, counts)
    )
    for rank, source in enumerate(sources):
        source.submit(A, range(20))
        own = replace(whole, state=share_of(whole.state, rank, count))
        source.extend([Chunk(request=A, stop=20, rows=own)])
    for rank, target in enumerate(targets):
        there = target.reserve(A, range(20))
        for writer in range(count):
            if count == counts and writer != rank:
                continue
            plan = Plan.between(PLAIN, SHAPE, prefill=(writer, count), decode=(rank, counts))
            here = sources[writer].places(A)
            send(plan, sources[writer], target, here=here, there=there)
        target.adopt(A)
        for layer in range(len(SHAPE.kda_layers)):
            found = target.read(A, Component.STATE, layer, 0, 1).view(torch.float32)[0]
            assert torch.equal(found, share_of(whole.state, rank, counts)[-1, layer])
        for layer in range(len(SHAPE.dsa_layers)):
            span = A, Component.KV, layer, 0, 20
            assert torch.equal(target.read(*span), sources[0].read(*span))


def share_of(states: Tensor, rank: int, ranks: int) -> Tensor:
    """[n, layers, width of a rank]: a rank's part of states [n, layers, state_width]."""
    matrix = SHAPE.kda_heads * SHAPE.kda_key_dim * SHAPE.kda_value_dim
    widths = [SHAPE.kda_heads * w for w in (SHAPE.kda_key_dim, SHAPE.kda_key_dim)]
    widths.append(SHAPE.kda_heads * SHAPE.kda_value_dim)
    parts = states.split([matrix, *widths * (SHAPE.conv_width - 1)], -1)
    return torch.cat([part.chunk(ranks, -1)[rank] for part in parts], -1)
