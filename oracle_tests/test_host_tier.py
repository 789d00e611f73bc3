"""The optimized engine's host tier: what is backed up comes back, the oldest makes room."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from oracle_tests import tier_cases
from oracle_tests.contract_cases import GEOMETRY, SHAPE, layers_of, rows_of
from oracle_tests.tier_cases import (
    KINDS,
    PAGE,
    A,
    B,
    Build,
    P,
    Q,
    U,
    buffers,
    cache,
    check_conserved,
    contents,
    hit_of,
    part_of,
    prefill,
    tiered,
    truth,
)
from reference.contract import (
    Chunk,
    Component,
    Engine,
    InvalidCall,
    OutOfMemory,
    RequestId,
    StepOutput,
)
from reference.weights import random_weights


@pytest.fixture(params=KINDS)
def build(request: pytest.FixtureRequest) -> Build:
    return partial(tier_cases.build, request.param)


# what comes back


@pytest.mark.parametrize("order", ["reuse", "high", "permuted"])
def test_a_restored_prefix_is_hit_and_has_all_its_bytes(build: Build, order: str) -> None:
    engine = build(page_order=order)
    cache(engine, P)
    stored = contents(engine)
    prefill(engine, B, [*P, 1])
    read = rows_of(engine, B)
    engine.abort(B)
    assert engine.back_up(P) == 24
    engine.evict(40)
    assert not contents(engine)
    assert hit_of(engine, P) == 0
    # the padding at the start of a buffer is anyone's
    assert all((buffer[PAGE:] == 0xFF).all() for buffer in buffers(engine))
    prefill(engine, B, U[:20])
    assert engine.restore(P) == 24
    engine.abort(B)
    assert part_of(contents(engine), P) == part_of(stored, P)
    assert prefill(engine, B, [*P, 1]) == 24
    assert all(map(torch.equal, rows_of(engine, B), read))
    check_conserved(engine)


def test_a_model_goes_on_as_if_nothing_had_been_evicted(build: Build) -> None:
    """Logits and selections after a restore are those of an engine that evicted nothing, bit by
    bit, over five times as many positions as are selected."""
    weights = random_weights(SHAPE, GEOMETRY, 1)
    prompt = torch.randint(64, (45,), generator=torch.Generator().manual_seed(2)).tolist()
    engines = [build(weights=weights) for _ in range(2)]
    for engine in engines:
        run(engine, A, prompt, 0)
        engine.finish(A)
    kept, gone = engines
    assert gone.back_up(prompt) == 40
    gone.evict(40)
    run(gone, A, prompt[::-1], 0)
    assert gone.restore(prompt) == 40
    gone.finish(A)
    (hit, outputs), (hit_again, outputs_again) = (run(e, B, prompt, 12) for e in engines)
    assert hit == hit_again == 40
    for output, again in zip(outputs, outputs_again, strict=True):
        assert torch.equal(output.selected, again.selected)
        assert torch.equal(output.logits, again.logits)
    assert kept.inspect().requests[B].pages != gone.inspect().requests[B].pages


def run(
    engine: Engine, request: RequestId, prompt: Sequence[int], steps: int
) -> tuple[int, list[StepOutput]]:
    """Prefill and some decodes of a model run; the hit and what was computed."""
    hit = engine.submit(request, prompt).hit
    outputs = engine.extend([Chunk(request=request, stop=len(prompt), outputs_from=hit)])
    for token in range(steps):
        outputs += engine.decode([request], [token])
    return hit, outputs


def test_a_restore_copies_only_what_the_device_lacks(build: Build) -> None:
    """Q keeps the first page of P on the device, and a running request reads it."""
    engine = build()
    cache(engine, P)
    engine.back_up(P)
    engine.evict(40)
    prefill(engine, B, [*Q, 1])
    stored = contents(engine) | part_of(truth(build, P), P)
    read = rows_of(engine, B)
    words: list[str] = []
    assert engine.restore(P, before=words.append) == 24
    (shared,) = (n.pages for n in engine.inspect().cached if n.tokens == P[:8])
    assert shared == engine.inspect().requests[B].pages[:1]
    assert "allocate 2 logical pages" in words
    assert sum("rows of page" in word for word in words) == 2 * 2 * layers_of(Component.KV)
    assert not any(f"page {shared[0]} " in word for word in words)
    assert contents(engine) == stored
    assert all(map(torch.equal, rows_of(engine, B), read))
    engine.finish(B)
    check_conserved(engine)


def test_pages_without_a_checkpoint_are_kept_too(build: Build) -> None:
    """Checkpoints every two pages: P and Q share one page, at whose end neither can resume."""
    engine = build(interval=16)
    cache(engine, P[:16])
    assert engine.back_up(P[:15]) == 0
    assert engine.back_up(P) == 16
    engine.evict(40)
    cache(engine, Q[:16])
    words: list[str] = []
    assert engine.restore(P, before=words.append) == 16
    assert words[0] == "allocate 1 logical pages"
    assert contents(engine) == truth(build, P[:16], Q[:16], interval=16)


def test_what_stands_already_is_not_copied_but_used(build: Build) -> None:
    engine = build()
    cache(engine, P, U)
    before = [engine.back_up(P), engine.back_up(U)]
    assert before == [24, 24]
    copies: list[str] = []
    assert engine.back_up(P, before=copies.append) == 24
    assert tiered(engine) == [U, P]
    assert engine.restore(U, before=copies.append) == 24
    assert tiered(engine) == [P, U]
    assert engine.restore(P, before=copies.append) == 24
    assert not copies
    engine.evict(1)
    assert hit_of(engine, P) == 24
    assert hit_of(engine, U) == 0


@pytest.mark.parametrize("longer_first", [True, False])
def test_a_prefix_and_its_beginning_share_their_pages(build: Build, longer_first: bool) -> None:
    engine = build()
    cache(engine, P, Q)
    words: list[str] = []
    for tokens in [P, P[:17]] if longer_first else [P[:17], P]:
        assert engine.back_up(tokens, before=words.append) == len(tokens) // PAGE * PAGE
    engine.back_up(Q, before=words.append)
    taken = [word for word in words if "pages" in word]
    counts = (3, 2) if longer_first else (2, 1, 2)
    assert taken == [f"allocate {count} pages of the host tier" for count in counts]
    tier = engine.inspect().tier
    assert tier is not None
    pages = {prefix.tokens: prefix.pages for prefix in tier.prefixes}
    assert pages[P][:2] == pages[P[:16]]
    assert pages[P][:1] == pages[Q][:1]
    check_conserved(engine)
    engine.evict(40)
    whole = truth(build, P, Q)
    for tokens, length in ((P, 24), (Q, 24), (P[:23], 16), (Q[:23], 0)):
        assert engine.restore(tokens) == length
    prefixes = (P, Q, P[:16])
    assert contents(engine) == {k: v for p in prefixes for k, v in part_of(whole, p).items()}


# room


def test_the_least_recently_used_prefix_makes_room(build: Build) -> None:
    engine = build(tier=(20, 2))
    cache(engine, P, Q, U)
    for tokens in (P, Q, P, U):
        assert engine.back_up(tokens) == 24
    assert tiered(engine) == [P, U]
    engine.evict(40)
    assert engine.restore(Q) == 0
    assert engine.restore(P) == 24
    assert engine.back_up(Q) == 0
    check_conserved(engine, (20, 2))


def test_what_a_new_prefix_shares_stays_when_its_owner_goes(build: Build) -> None:
    """The tier has one state and three pages: the longer prefix takes over those of its
    beginning, which goes."""
    engine = build(tier=(3, 1))
    cache(engine, P)
    engine.back_up(P[:16])
    words: list[str] = []
    assert engine.back_up(P, before=words.append) == 24
    assert words[0] == "allocate 1 pages of the host tier"
    assert tiered(engine) == [P]
    engine.evict(40)
    assert engine.restore(P) == 24
    assert contents(engine) == part_of(truth(build, P), P)
    check_conserved(engine, (3, 1))


@pytest.mark.parametrize("tier", [(2, 9), (9, 0)])
def test_a_prefix_that_cannot_fit_drives_nothing_out(build: Build, tier: tuple[int, int]) -> None:
    engine = build(tier=tier)
    cache(engine, P, U)
    engine.back_up(U[:16])
    before = engine.inspect()
    assert engine.back_up(P, before=refuse) == 0
    assert engine.inspect() == before


def refuse(what: str) -> None:
    raise AssertionError(f"nothing was to be done, yet: {what}")


def test_a_restore_makes_room_for_its_state(build: Build) -> None:
    """Pages are free, but Q, U and B have all state slots; Q, of which the first page is P's
    too, was used before U."""
    engine = build(state_slots=8)
    cache(engine, P)
    engine.back_up(P)
    engine.evict(40)
    cache(engine, Q, U)
    engine.submit(B, [5])
    assert not engine.inspect().free_states
    assert engine.restore(P) == 24
    whole = truth(build, P, Q, U)
    assert contents(engine) == part_of(whole, P) | part_of(whole, P[:8]) | truth(build, U)
    check_conserved(engine)


def test_a_restore_without_room_changes_nothing(build: Build) -> None:
    engine = build(pages=6)
    cache(engine, P)
    engine.back_up(P)
    engine.evict(8)
    prefill(engine, A, [*Q, 1])
    prefill(engine, B, [*Q, 2, 3])
    assert hit_of(engine, P) == 8  # cuts the edge where P leaves Q, as the restore will
    before, bytes_before = engine.inspect(), buffers(engine)
    with pytest.raises(OutOfMemory, match=r"^[^.]+: finish, abort or retract [^.]+\.$"):
        engine.restore(P, before=refuse)
    assert engine.inspect() == before
    assert all(map(torch.equal, buffers(engine), bytes_before))
    engine.finish(A)
    engine.finish(B)
    assert engine.restore(P) == 24
    check_conserved(engine)


# legal calls only


def test_an_engine_without_a_tier_says_how_to_get_one(build: Build) -> None:
    engine = build(tier=None)
    assert engine.inspect().tier is None
    for call in (engine.back_up, engine.restore):
        with pytest.raises(InvalidCall, match=r"build it with the option host_tier\.$"):
            call(P)


@pytest.mark.parametrize("before", [None, 3, "copy"])
def test_before_is_called(build: Build, before: Any) -> None:
    engine = build()
    cache(engine, P)
    seen = engine.inspect()
    for call in (engine.back_up, engine.restore):
        with pytest.raises(InvalidCall, match="before cannot be called"):
            call(P, before=before)
    assert engine.inspect() == seen


@pytest.mark.parametrize("tokens", [[0.5] * 8, [True] * 8, "01234567", [[0] * 8]])
def test_tokens_are_integers(build: Build, tokens: Any) -> None:
    engine = build()
    for call in (engine.back_up, engine.restore):
        with pytest.raises(InvalidCall, match="tokens are no flat sequence of 64-bit integers"):
            call(tokens)


def test_a_model_knows_its_vocabulary(build: Build) -> None:
    engine = build(weights=random_weights(SHAPE, GEOMETRY, 0))
    for call in (engine.back_up, engine.restore):
        with pytest.raises(InvalidCall, match=r"give ids from 0 to 63\.$"):
            call([64] * 8)
        assert call([]) == call(P) == 0
