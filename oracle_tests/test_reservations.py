"""Memory of requests that are still to come: who may touch it, and that none of it is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from oracle_tests.hisparse_life import PAGE, A, B, C, hisparse
from oracle_tests.tiny_engine import SHAPE, prefill, rows
from oracle_tests.transfer_cases import PLAIN, PLAN, drafting, hot, plain, send, sound
from reference.contract import (
    Capability,
    Chunk,
    Component,
    Drafts,
    Engine,
    EngineOptions,
    InvalidCall,
    OutOfMemory,
    RequestId,
)
from systems import load


def refusals(engine: Engine) -> list[Callable[[], object]]:
    """All calls that are about one running request."""
    one = rows(1, 1)
    return [
        lambda: engine.extend([Chunk(request=A, stop=1, rows=one)]),
        lambda: engine.decode([A], [1], one),
        lambda: engine.verify([Drafts(request=A, tokens=[1], rows=one)]),
        lambda: engine.accept(A, 0),
        lambda: engine.finish(A),
        lambda: engine.abort(A),
        lambda: engine.retract(A),
        lambda: engine.places(A),
        lambda: engine.read(A, Component.KV, 0, 0, 0),
    ]


def test_nothing_is_done_with_a_reserved_request() -> None:
    """It neither runs nor ends, is not found in the cache, and no eviction takes its pages."""
    engine = drafting()
    there = engine.reserve(A, range(2 * PAGE))
    before = engine.inspect()
    assert before.requests == {}
    assert set(before.reserved) == {A}
    for call in refusals(engine):
        with pytest.raises(InvalidCall, match="reserved for a transfer whose bytes may land"):
            call()
    for again in (engine.submit, engine.reserve):
        with pytest.raises(InvalidCall, match="runs already"):
            again(A, [1])
    assert engine.evict(9) == 0
    assert engine.inspect() == before
    assert engine.submit(B, range(2 * PAGE + 1)).hit == 0
    engine.abort(B)
    engine.drop(A)
    assert not set(there.index) - engine.inspect().free_pages


def test_only_reserved_requests_are_adopted_or_dropped() -> None:
    engine = plain()
    prefill(engine, B, range(5))
    for request in (A, B):
        for call in (engine.adopt, engine.drop):
            with pytest.raises(InvalidCall, match="is not reserved: reserve it first"):
                call(request)
    engine.reserve(A, [1])
    engine.adopt(A)
    with pytest.raises(InvalidCall, match="is not reserved"):
        engine.drop(A)
    with pytest.raises(InvalidCall, match="has no tokens"):
        engine.reserve(C, [])


@pytest.mark.parametrize("at_d", [plain, hot], ids=["plain", "hot"])
def test_a_dropped_request_leaves_nothing(at_d: Callable[..., Engine]) -> None:
    """Its memory is free and poison again, whatever has landed in it."""
    source, target = plain(), at_d()
    free = target.inspect()
    buffers = [view.clone() for view in target.regions().values()]
    prefill(source, A, range(39))
    here, there = source.places(A), target.reserve(A, range(39))
    sound(target)
    send(PLAN, source, target, here=here, there=there)
    assert not all(map(torch.equal, target.regions().values(), buffers))
    target.drop(A)
    after = target.inspect()
    assert (after.free_pages, after.free_states) == (free.free_pages, free.free_states)
    assert after.hot == free.hot
    assert all(map(torch.equal, target.regions().values(), buffers))


@pytest.mark.parametrize(
    ("short", "cure"),
    [
        ({"pages": 4}, "pages"),
        ({"state_slots": 4}, "state_slots"),
        ({"max_requests": 1}, "max_requests"),
        ({"buffers": 1}, "device_pages"),
        ({"host_pages": 4}, "host_pages"),
    ],
)
def test_a_refused_reservation_takes_nothing(short: dict[str, int], cure: str) -> None:
    """Of anything that is short; what just fits is taken, and adopting it needs no more."""
    engine = hisparse(**short)
    prefill(engine, B, range(PAGE + 2))
    before = engine.inspect()
    with pytest.raises(OutOfMemory, match=rf"{cure}\.$"):
        engine.reserve(A, range(2 * PAGE))
    assert engine.inspect() == before
    engine.abort(B)
    engine.evict(9)
    engine.reserve(A, range(2 * PAGE))
    engine.adopt(A)
    assert engine.inspect().requests[A].length == 2 * PAGE


def test_cached_prefixes_make_room_for_a_reservation() -> None:
    engine = plain(pages=4)
    prefill(engine, B, range(2 * PAGE))
    engine.finish(B)
    engine.reserve(A, range(100, 100 + 3 * PAGE))
    assert engine.inspect().evicted_pages == 2


def test_the_reference_moves_nothing() -> None:
    engine = load("reference").factory(
        PLAIN, SHAPE, EngineOptions(pages=4, state_slots=4, max_requests=2)
    )
    assert Capability.TRANSFER not in engine.capabilities
    request = RequestId(1)
    for call in (
        lambda: engine.places(request),
        lambda: engine.reserve(request, [1]),
        lambda: engine.adopt(request),
        lambda: engine.drop(request),
        engine.regions,
    ):
        with pytest.raises(InvalidCall, match="check for TRANSFER first"):
            call()
    assert Capability.TRANSFER in plain().capabilities


@pytest.mark.parametrize("at_d", [plain, hot], ids=["plain", "hot"])
def test_rows_are_kept_in_the_memory_that_is_given(at_d: Callable[..., Engine]) -> None:
    """Every byte of the pool, at its place; of another size it is refused, with the right one."""
    size = sum(at_d().raw(Component.KV, layer).numel() for layer in range(len(SHAPE.dsa_layers)))
    memory = torch.zeros(size, dtype=torch.uint8)
    engine = at_d(kv_memory=memory)
    assert (memory == 0xFF).all()
    prefill(engine, A, range(PAGE + 3))
    own = at_d()
    prefill(own, A, range(PAGE + 3))
    for layer, part in enumerate(memory.chunk(len(SHAPE.dsa_layers))):
        assert torch.equal(part, own.raw(Component.KV, layer).flatten())
    with pytest.raises(InvalidCall, match=rf"kv_memory .* of shape \({size},\)\.$"):
        at_d(kv_memory=memory[1:])
    with pytest.raises(InvalidCall, match="pass a contiguous tensor"):
        at_d(kv_memory=torch.zeros(2 * size, dtype=torch.uint8)[::2])
