"""The optimized engine's memory over a request's life: who owns what, and what a refusal leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from oracle_tests.tiny_engine import GEOMETRY, SHAPE, build, chunk, prefill, rows
from reference.contract import (
    Chunk,
    Component,
    Drafts,
    Engine,
    InvalidCall,
    OutOfMemory,
    RequestId,
    Snapshot,
)
from reference.weights import random_weights

A, B, C = RequestId(1), RequestId(2), RequestId(3)
PROMPT = list(range(20))


def buffers(engine: Engine) -> list[torch.Tensor]:
    paged = (Component.KV, Component.INDEX, Component.TAIL)
    layers = dict.fromkeys(paged, SHAPE.dsa_layers) | {Component.STATE: SHAPE.kda_layers}
    return [engine.raw(c, i).clone() for c, ids in layers.items() for i in range(len(ids))]


def owners(snapshot: Snapshot) -> Counter[int]:
    """How many hold each page, counted from the page tables and the tree."""
    held = Counter(page for node in snapshot.cached for page in node.pages)
    for view in snapshot.requests.values():
        held.update(view.pages)
    return held


def states_held(snapshot: Snapshot) -> list[int]:
    """State slots of running requests and of all checkpoints."""
    views = snapshot.requests.values()
    checkpoints = [item.checkpoints for item in (*snapshot.cached, *views)]
    running = [view.state_slot for view in views]
    return running + [slot for slots in checkpoints for slot in slots.values()]


def test_memory_is_conserved_through_a_life() -> None:
    engine = build(pages=12, state_slots=12)

    def check() -> None:
        seen = engine.inspect()
        assert owners(seen) == Counter(seen.ref_counts)
        assert seen.free_pages | set(seen.ref_counts) == set(range(1, 12))
        assert not seen.free_pages & set(seen.ref_counts)
        slots = states_held(seen)
        assert len(set(slots)) == len(slots)
        assert set(slots) | seen.free_states == set(range(1, 12))
        assert not set(slots) & seen.free_states

    prefill(engine, A, PROMPT)
    check()
    assert prefill(engine, B, [*PROMPT[:17], 50, 51]) == 16
    check()
    for step in range(6):
        engine.decode([A, B], [step, step], rows(2, 2))
        check()
    engine.verify([Drafts(request=A, tokens=[1, 2, 3], rows=rows(3, 3))])
    check()
    engine.accept(A, 1)
    check()
    engine.retract(A)
    check()
    engine.abort(B)
    check()
    engine.evict(12)
    seen = engine.inspect()
    assert len(seen.free_pages) == 11
    assert len(seen.free_states) == 11
    # everything is poisoned again; the first row of each buffer is padding, a sink
    assert all((buffer[1:] == 0xFF).all() for buffer in buffers(engine))


def test_a_finished_prompt_is_shared_while_its_request_runs() -> None:
    engine = build()
    engine.submit(A, PROMPT)
    engine.extend([chunk(engine, A, 19)])
    assert not engine.inspect().cached
    engine.extend([chunk(engine, A, 20)])
    view = engine.inspect().requests[A]
    assert (view.shared, len(view.pages)) == (2, 3)
    assert engine.submit(B, PROMPT).hit == 16
    assert engine.inspect().requests[B].pages == view.pages[:2]


def test_twins_end_up_on_the_same_pages() -> None:
    """Two requests with one prompt, prefilled side by side: the second to finish switches to the
    pages of the first and frees its own, checkpoints included."""
    engine = build()
    for request in (A, B):
        engine.submit(request, PROMPT)
    engine.extend([chunk(engine, A, 10), chunk(engine, B, 10)])
    before = engine.inspect()
    assert not set(before.requests[A].pages) & set(before.requests[B].pages)
    engine.extend([chunk(engine, A, 20), chunk(engine, B, 20)])
    seen = engine.inspect()
    assert seen.requests[A].pages[:2] == seen.requests[B].pages[:2]
    assert len(seen.ref_counts) == 4
    assert len(states_held(seen)) == 4


def test_a_running_state_is_never_the_trees() -> None:
    """What a decode does to the state of a sharer leaves the checkpoint as it was."""
    engine = build()
    prefill(engine, A, PROMPT)
    (kept,) = (n.checkpoints[16] for n in engine.inspect().cached if 16 in n.checkpoints)
    before = engine.raw(Component.STATE, 0)[kept].clone()
    prefill(engine, B, [*PROMPT[:16], 40])
    engine.decode([A, B], [1, 2], rows(2, 2, seed=9))
    assert torch.equal(engine.raw(Component.STATE, 0)[kept], before)
    assert kept not in {view.state_slot for view in engine.inspect().requests.values()}


def test_an_abort_leaves_what_was_shared_and_frees_the_rest() -> None:
    engine = build()
    prefill(engine, A, PROMPT)
    engine.abort(A)
    seen = engine.inspect()
    assert set(seen.ref_counts.values()) == {1}
    assert engine.submit(B, PROMPT).hit == 16
    engine.submit(C, [9] * 30)
    engine.extend([chunk(engine, C, 29)])
    engine.abort(C)
    assert engine.submit(C, [9] * 30).hit == 0


def test_a_retracted_prefill_resumes_from_its_last_checkpoint() -> None:
    engine = build()
    engine.submit(A, PROMPT)
    engine.extend([chunk(engine, A, 11)])
    assert engine.retract(A) == tuple(PROMPT)
    assert engine.submit(A, PROMPT).hit == 8


def test_finish_caches_what_decode_added() -> None:
    engine = build()
    prefill(engine, A, PROMPT)
    for token in range(20, 26):
        engine.decode([A], [token], rows(1, 1))
    engine.finish(A)
    assert engine.submit(B, [*range(26), 0]).hit == 24


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_accept_keeps_the_checkpoint_that_a_draft_reaches(count: int) -> None:
    """Drafts 22, 23 and 24 of a request of 22 tokens: position 24 is a checkpoint."""
    engine = build()
    prefill(engine, A, list(range(22)))
    drafts = rows(3, 3, seed=4)
    engine.verify([Drafts(request=A, tokens=[22, 23, 24], rows=drafts)])
    engine.accept(A, count)
    engine.finish(A)
    hit = engine.submit(B, list(range(25))).hit
    assert hit == (24 if count >= 2 else 16)
    if count >= 2:
        state = engine.read(B, Component.STATE, 0, 0, 1).view(torch.float32)[0]
        assert torch.equal(state, drafts.state[1, 0])


def test_pending_drafts_are_readable_and_then_rejected_by_a_retraction() -> None:
    engine = build()
    prefill(engine, A, PROMPT)
    drafts = rows(3, 3, seed=4)
    engine.verify([Drafts(request=A, tokens=[1, 2, 3], rows=drafts)])
    assert engine.inspect().requests[A].length == 20
    stored = engine.read(A, Component.KV, 0, 20, 23).view(torch.bfloat16)
    assert torch.equal(stored, drafts.kv[0].bfloat16())
    assert engine.retract(A) == tuple(PROMPT)


@pytest.mark.parametrize("order", ["reuse", "high", "permuted"])
def test_eviction_makes_room_and_counts_what_it_reused(order: str) -> None:
    engine = build(pages=8, page_order=order)
    for first in range(6):
        prefill(engine, A, [first] * 20)
        engine.finish(A)
    seen = engine.inspect()
    # six prompts of three pages over seven: each caches two and gives one back
    assert seen.evicted_pages >= 4
    assert seen.reused_pages >= 8
    assert len(owners(seen)) + len(seen.free_pages) == 7


def refuse_ring(engine: Engine) -> None:
    engine.submit(C, [7] * 3)


def refuse_pages(engine: Engine) -> None:
    engine.extend([chunk(engine, B, 40)])


def refuse_decode(engine: Engine) -> None:
    engine.decode([A], [1], rows(1, 1))


@pytest.mark.parametrize(
    ("options", "tokens", "refused"),
    [
        ({"max_requests": 2}, 20, refuse_ring),
        ({"state_slots": 5}, 20, refuse_ring),
        ({"pages": 6}, 20, refuse_pages),
        ({"state_slots": 7}, 20, refuse_pages),
        ({"pages": 4}, 24, refuse_decode),
        ({"state_slots": 5}, 23, refuse_decode),
    ],
    ids=["slots", "submit-states", "pages", "extend-states", "decode-pages", "decode-states"],
)
def test_out_of_memory_changes_nothing(
    options: dict[str, int], tokens: int, refused: Callable[[Engine], None]
) -> None:
    """A holds all that is cached, so that nothing can be evicted either."""
    engine = build(**options)
    prefill(engine, A, list(range(tokens)))
    engine.submit(B, [60] * 40)
    before, bytes_before = engine.inspect(), buffers(engine)
    with pytest.raises(OutOfMemory, match=r"^[^.]+: finish, abort or retract [^.]+\.$"):
        refused(engine)
    assert engine.inspect() == before
    assert all(map(torch.equal, buffers(engine), bytes_before))
    engine.abort(B)


def test_the_refused_call_succeeds_once_there_is_room() -> None:
    engine = build(pages=6)
    prefill(engine, A, PROMPT)
    engine.submit(B, [60] * 24)
    with pytest.raises(OutOfMemory):
        engine.extend([chunk(engine, B, 24)])
    engine.finish(A)
    engine.extend([chunk(engine, B, 24)])
    assert engine.inspect().requests[B].length == 24


INVALID: dict[str, Callable[[Engine], object]] = {
    "empty prompt": lambda e: e.submit(C, []),
    "extend twice": lambda e: e.extend([chunk(e, B, 1), chunk(e, B, 2)]),
    "extend beyond the prompt": lambda e: e.extend([Chunk(request=B, stop=21, rows=rows(21, 3))]),
    "no outputs there": lambda e: e.extend(
        [Chunk(request=B, stop=8, rows=rows(8, 1), outputs_from=8)]
    ),
    "no rows": lambda e: e.extend([Chunk(request=B, stop=8)]),
    "rows of another length": lambda e: e.extend([Chunk(request=B, stop=8, rows=rows(7, 1))]),
    "states of another count": lambda e: e.extend([Chunk(request=B, stop=9, rows=rows(9, 1))]),
    "decode twice": lambda e: e.decode([A, A], [1, 2], rows(2, 2)),
    "decode before the prompt": lambda e: e.decode([A, B], [1, 2], rows(2, 2)),
    "decode without tokens": lambda e: e.decode([A], [], rows(1, 1)),
    "verify nothing": lambda e: e.verify([Drafts(request=A, tokens=[], rows=rows(0, 0))]),
    "accept without verify": lambda e: e.accept(A, 0),
    "no such layer": lambda e: e.read(A, Component.STATE, 2, 0, 1),
    "no such raw layer": lambda e: e.raw(Component.KV, -1),
    "raw layer in part": lambda e: e.raw(Component.KV, 0.5),  # type: ignore[arg-type]
    "rows beyond the length": lambda e: e.read(A, Component.KV, 0, 0, 21),
    "groups not closed": lambda e: e.read(A, Component.INDEX, 0, 0, 11),
    "tail of closed groups": lambda e: e.read(A, Component.TAIL, 0, 19, 20),
}


@pytest.mark.parametrize("call", INVALID.values(), ids=INVALID)
def test_an_invalid_call_names_the_cure_and_changes_nothing(
    call: Callable[[Engine], object],
) -> None:
    engine = build()
    prefill(engine, A, PROMPT)
    engine.submit(B, [30] * 20)
    before, bytes_before = engine.inspect(), buffers(engine)
    with pytest.raises(InvalidCall, match=r"^[^.:]+: [^.]+\.$"):
        call(engine)
    assert engine.inspect() == before
    assert all(map(torch.equal, buffers(engine), bytes_before))


def test_a_model_takes_no_rows_and_no_foreign_tokens() -> None:
    engine = build(weights=random_weights(SHAPE, GEOMETRY, 0))
    with pytest.raises(InvalidCall, match=r"vocabulary: give ids from 0 to 63\.$"):
        engine.submit(A, [64])
    engine.submit(A, PROMPT)
    with pytest.raises(InvalidCall, match="pass rows to the former and none to the latter"):
        engine.extend([Chunk(request=A, stop=20, rows=rows(20, 3))])
    engine.extend([Chunk(request=A, stop=20)])
    with pytest.raises(InvalidCall, match="vocabulary"):
        engine.decode([A], [-1])
