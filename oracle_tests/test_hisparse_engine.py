"""HiSparse in the optimized engine: nothing that it computes shows it, and all its rows add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from oracle_tests.hisparse_life import (
    HOT_PAGES,
    LAYERS,
    LEAST,
    PAGE,
    ROOMY,
    WIDTH,
    A,
    B,
    C,
    Copies,
    Life,
    hisparse,
)
from oracle_tests.tiny_engine import SHAPE, build, rows
from reference.contract import (
    Capability,
    Chunk,
    Component,
    Drafts,
    Engine,
    HiSparse,
    InvalidCall,
    OutOfMemory,
    RequestId,
    Snapshot,
    StepOutput,
    Weights,
)
from reference.geometry import Geometry, GeometryError, RowFormat
from reference.weights import random_weights

LONG = 80


@lru_cache
def weights() -> Weights:
    return random_weights(SHAPE, LEAST, 3)


def play(engine: Engine) -> list[StepOutput]:
    """The outputs of three requests, two of which hit what another left; the last LONG are of
    decodes of long requests."""
    outputs: list[StepOutput] = []
    shared = list(range(34))
    for request, prompt, stops in (
        (A, shared, (9, 34)),
        (B, [*shared[:32], 7, 8, 9], (35,)),
        (C, [5, 6, 7], (3,)),
    ):
        hit = engine.submit(request, prompt).hit
        assert hit == (32 if request == B else 0)
        for stop in stops:
            outputs += engine.extend([Chunk(request=request, stop=stop, outputs_from=stop - 2)])
    for step in range(14):
        outputs += engine.decode([A, B, C], [step, step + 1, step + 2])
    # the newest position ends a page, which the next request reads
    assert engine.inspect().requests[A].length == 48
    engine.finish(A)
    engine.abort(C)
    again = [*shared, *range(14), 60, 61]
    assert engine.submit(A, again).hit == 48
    outputs += engine.extend([Chunk(request=A, stop=50)])
    for step in range(LONG // 2):
        outputs += engine.decode([B, A], [step + 3, step % 5])
    assert engine.retract(B)[:32] == tuple(shared[:32])
    return outputs


@lru_cache
def plain(row_format: RowFormat) -> list[StepOutput]:
    """What the engine computes without HiSparse."""
    return play(build(geometry=replace(LEAST, row_format=row_format), weights=weights()))


@pytest.mark.parametrize("copies", ["early", "late", "random"])
@pytest.mark.parametrize("geometry", [LEAST, ROOMY], ids=["least", "roomy"])
@pytest.mark.parametrize("row_format", list(RowFormat))
def test_nothing_computed_shows_it(
    row_format: RowFormat, geometry: Geometry, copies: Copies
) -> None:
    """Selections and logits, and so tokens and logprobs, are bitwise those without HiSparse,
    while at least 30 % of what is selected has to be swapped in."""
    own = replace(geometry, row_format=row_format)
    sizes = HiSparse(device_pages=4 * HOT_PAGES[geometry] + 1, host_pages=30, copies=copies)
    engine = build(geometry=own, weights=weights(), hisparse=sizes, page_order="permuted", seed=6)
    outputs = play(engine)
    assert len(outputs) == 4 + 3 * 14 + 1 + LONG
    for on, off in zip(outputs, plain(row_format), strict=True):
        assert (on.request, on.start) == (off.request, off.start)
        assert torch.equal(on.selected, off.selected)
        assert torch.equal(on.logits, off.logits)
        assert off.misses is None
    missed = sum(int(output.misses.sum()) for output in outputs[-LONG:])
    selected = sum(int((output.selected >= 0).sum()) for output in outputs[-LONG:])
    assert missed >= 0.3 * selected
    apart(engine.inspect())


def test_kpool_1_has_no_tail_to_select() -> None:
    """The least hot buffer is topk then, and every page ends on a group."""
    geometry = Geometry(
        kpool=1, physical_page_size=8, topk=6, mamba_track_interval=16, device_buffer_size=6
    )
    drawn = random_weights(SHAPE, geometry, 5)
    off, on = (
        play(build(geometry=geometry, weights=drawn, hisparse=sizes))
        for sizes in (None, HiSparse(device_pages=7, host_pages=40))
    )
    for one, other in zip(off, on, strict=True):
        assert torch.equal(one.logits, other.logits)


def apart(snapshot: Snapshot) -> None:
    """No position has one number for its loc, its host row and its device row."""
    hot = snapshot.hot
    assert hot.buffers
    for request, buffer in hot.buffers.items():
        view = snapshot.requests[request]
        locs = [page * PAGE + offset for page in view.pages for offset in range(PAGE)]
        assert all(loc != row for loc, row in zip(locs, buffer.host_rows, strict=True))
        for tags in buffer.tags:
            for slot, position in enumerate(tags):
                row = buffer.rows[slot]
                assert position < 0 or row not in (locs[position], buffer.host_rows[position])


@pytest.mark.parametrize("copies", ["early", "late", "random"])
@pytest.mark.parametrize("order", ["reuse", "high", "permuted"])
def test_all_rows_add_up_after_every_call(order: str, copies: Copies) -> None:
    """Random lives of four requests in device memory for three and host memory for fewer."""
    seen: dict[str, int] = {}
    for seed in range(3):
        life = Life(seed, order, copies)
        life.wander(120)
        seen = {event: seen.get(event, 0) + count for event, count in life.seen.items()}
    assert all(seen.values()), seen


def shown(engine: Engine) -> tuple[Snapshot, list[Tensor]]:
    """All that can be seen of an engine, but for what a refused call may evict."""
    states = len(SHAPE.kda_layers)
    buffers = [
        engine.raw(component, layer).clone()
        for component in Component
        for layer in range(states if component is Component.STATE else LAYERS)
    ]
    return engine.inspect(), buffers


def refused(engine: Engine, call: Callable[[], object], cure: str) -> None:
    """The call finds no memory and changes nothing."""
    before, buffers = shown(engine)
    with pytest.raises(OutOfMemory, match=cure):
        call()
    after, left = shown(engine)
    assert after == before
    assert all(map(torch.equal, left, buffers))


def prefill(engine: Engine, request: RequestId, tokens: Sequence[int]) -> int:
    """Admit and prefill a stamped request; returns its hit."""
    hit = engine.submit(request, tokens).hit
    given = rows(len(tokens) - hit, len(LEAST.state_positions(hit, len(tokens))))
    engine.extend([Chunk(request=request, stop=len(tokens), rows=given)])
    return hit


def decode(engine: Engine, *requests: RequestId, seed: int = 0) -> list[StepOutput]:
    """Append a token 9 to each of some stamped requests."""
    count = len(requests)
    selected = torch.arange(WIDTH).expand(LAYERS, count, WIDTH).contiguous()
    given = replace(rows(count, count, seed=seed), selected=selected)
    return engine.decode(requests, [9] * count, given)


def test_short_device_pages_refuse_an_admission() -> None:
    """At once, with pages and states to spare, and until a hot buffer is free again."""
    engine = hisparse(buffers=2, copies="random")
    for request in (A, B):
        prefill(engine, request, range(10 * request, 10 * request + 20))
        decode(engine, request)
    cure = r"needs 4 free device pages and 0 are left: .*device_pages\.$"
    refused(engine, lambda: engine.submit(C, range(5)), cure)
    held = engine.inspect().hot.buffers[A].pages
    engine.abort(A)
    prefill(engine, C, range(20))
    assert set(engine.inspect().hot.buffers[C].pages) == set(held)
    decode(engine, B, C)


def test_an_admission_refused_for_anything_else_takes_no_hot_buffer() -> None:
    for short, cure in (({"max_requests": 1}, "max_requests"), ({"state_slots": 2}, "state_slots")):
        engine = hisparse(**short)
        engine.submit(A, range(5))
        refused(engine, lambda engine=engine: engine.submit(B, range(5)), cure)
        engine.abort(A)
        engine.submit(B, range(5))


def test_twins_end_on_a_page_that_is_cached_already() -> None:
    """The newest row of the second reaches neither the cached page nor its own, freed one."""
    engine = hisparse()
    for request in (A, B):
        prefill(engine, request, range(31))
        decode(engine, request, seed=request)
    first = [engine.read(A, Component.KV, layer, 31, 32) for layer in range(LAYERS)]
    engine.finish(A)
    engine.finish(B)
    for layer in range(LAYERS):
        for page in engine.inspect().hot.free_host:
            assert (engine.raw(Component.KV, layer).view(-1, PAGE, 32)[page] == 0xFF).all()
    assert prefill(engine, C, [*range(31), 9, 9]) == 32
    for layer, row in enumerate(first):
        assert torch.equal(engine.read(C, Component.KV, layer, 31, 32), row)


def test_short_host_pages_evict_and_then_refuse() -> None:
    """As short logical pages do: cached prefixes go first, and running requests stay."""
    engine = hisparse(host_pages=5)
    prefill(engine, A, range(2 * PAGE))
    engine.finish(A)
    prefill(engine, B, range(100, 100 + 2 * PAGE + 1))
    assert engine.inspect().evicted_pages == 2
    prefill(engine, A, range(200, 200 + PAGE))
    engine.submit(C, range(300, 305))
    cure = r"needs 1 free host pages and 0 are left: .*host_pages\.$"
    chunk = Chunk(request=C, stop=5, rows=rows(5, 1))
    refused(engine, lambda: engine.extend([chunk]), cure)
    refused(engine, lambda: decode(engine, B, A), cure)
    decode(engine, B)
    engine.abort(B)
    engine.extend([chunk])
    decode(engine, A)


def test_refused_growth_leaves_the_newest_row_unsaved() -> None:
    """The step that finds no host page has ordered no backup."""
    engine = hisparse(host_pages=3)
    prefill(engine, A, range(31))
    decode(engine, A)
    assert engine.inspect().hot.buffers[A].saved == 31
    refused(engine, lambda: decode(engine, A), "host_pages")
    assert engine.inspect().hot.buffers[A].saved == 31


def test_retracted_and_aborted_requests_free_the_same() -> None:
    """All hot rows, and all host rows but those of what stays cached; they are poison again."""
    engine = hisparse(page_order="permuted", seed=2)
    free, _ = shown(engine)
    for end in (engine.abort, engine.retract, engine.finish):
        prefill(engine, A, range(40))
        for _ in range(9):
            decode(engine, A)
        end(A)
        left = engine.inspect().hot
        assert left.free_device == free.hot.free_device
        assert set(left.backing) == {p for n in engine.inspect().cached for p in n.pages}
        engine.evict(9)
        assert engine.inspect().hot == free.hot
        for component in (Component.KV, Component.HOT):
            for layer in range(LAYERS):
                assert (engine.raw(component, layer)[PAGE:] == 0xFF).all()


def test_device_buffer_size_alone_changes_nothing() -> None:
    engine = build(geometry=LEAST)
    assert engine.inspect().hot is None
    assert Capability.VERIFY in engine.capabilities
    engine.submit(A, [1])
    for call in (
        lambda: engine.raw(Component.HOT, 0),
        lambda: engine.read(A, Component.HOT, 0, 0, 1),
    ):
        with pytest.raises(InvalidCall, match="build it with the option hisparse"):
            call()


def test_capabilities() -> None:
    """An engine can HiSparse or verify, one at a time."""
    assert Capability.HISPARSE in build().capabilities
    capabilities = hisparse().capabilities
    assert Capability.HISPARSE in capabilities
    assert Capability.VERIFY not in capabilities


@pytest.mark.parametrize(
    ("changed", "cure"),
    [
        ({"device_buffer_size": None}, "set it to the rows of a hot buffer"),
        ({"max_drafts": 2}, "set max_drafts to 0"),
    ],
)
def test_geometries_without_hisparse(changed: dict[str, Any], cure: str) -> None:
    with pytest.raises(GeometryError, match=cure):
        build(geometry=replace(LEAST, **changed), hisparse=HiSparse(device_pages=9, host_pages=9))


@pytest.mark.parametrize("geometry", [LEAST, ROOMY], ids=["least", "roomy"])
def test_the_device_has_room_for_a_hot_buffer(geometry: Geometry) -> None:
    """And for the padding page; one fewer is refused when the engine is built."""
    least = HOT_PAGES[geometry] + 1
    sizes = HiSparse(device_pages=least, host_pages=2)
    assert build(geometry=geometry, hisparse=sizes).submit(A, [1, 2, 3]).hit == 0
    for fewer in range(2, least):
        with pytest.raises(InvalidCall, match=rf"set them to at least {least}\.$"):
            build(geometry=geometry, hisparse=replace(sizes, device_pages=fewer))


def test_nothing_is_verified() -> None:
    engine = hisparse()
    prefill(engine, A, range(20))
    for drafts in ([], [Drafts(request=A, tokens=[1], rows=rows(1, 1))]):
        before, buffers = shown(engine)
        with pytest.raises(InvalidCall, match="verify is not offered with HiSparse"):
            engine.verify(drafts)
        after, left = shown(engine)
        assert after == before
        assert all(map(torch.equal, left, buffers))


def test_a_stamped_decode_is_told_what_to_select() -> None:
    """And nothing else is; a refusal has changed nothing."""
    engine = hisparse()
    prefill(engine, A, range(20))
    before = engine.inspect()
    selected = torch.zeros(LAYERS, 1, WIDTH, dtype=torch.int64)
    others = (selected.tolist(), selected.numpy(), selected.to("meta"))
    for wrong in (None, selected.int(), selected[:, :, 1:], *others):
        with pytest.raises(InvalidCall, match=r"selected.*(to that alone|make it a dense int64)"):
            engine.decode([A], [1], replace(rows(1, 1), selected=wrong))
    engine.submit(B, [1])
    with pytest.raises(InvalidCall, match="to that alone"):
        engine.extend([Chunk(request=B, stop=1, rows=replace(rows(1, 1), selected=selected))])
    engine.abort(B)
    assert replace(engine.inspect(), reused_pages=0) == replace(before, reused_pages=0)
    assert engine.decode([], [], replace(rows(0, 0), selected=selected[:, :0])) == []


def test_rows_of_a_hot_buffer_have_bounds() -> None:
    engine = hisparse()
    prefill(engine, A, range(20))
    assert len(engine.read(A, Component.HOT, 0, 0, 11)) == 11
    with pytest.raises(InvalidCall, match="hot rows 0 to 11, not 0 to 12"):
        engine.read(A, Component.HOT, 0, 0, 12)
