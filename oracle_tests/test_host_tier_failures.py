"""The host tier when any of its allocations and copies fails: all of a prefix, or none of it.

First one failure at each place, then random histories with failures among them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from oracle_tests import tier_cases
from oracle_tests.contract_cases import layers_of, rows
from oracle_tests.tier_cases import (
    KINDS,
    PAGE,
    A,
    B,
    Build,
    Contents,
    P,
    Prefix,
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
from reference.contract import Chunk, Component, Drafts, Engine, InvalidCall


@pytest.fixture(params=KINDS)
def build(request: pytest.FixtureRequest) -> Build:
    return partial(tier_cases.build, request.param)


class Injected(BaseException):
    """Not an Exception, as an interrupt is none."""


def fail_at(call: int) -> Callable[[str], None]:
    calls = iter(range(call, -1, -1))

    def before(what: str) -> None:
        if not next(calls):
            raise Injected(what)

    return before


def before_back_up(build: Build, tight: bool) -> Engine:
    """P is to join Q, of which it shares a page, and U; Q must go if the tier is tight."""
    engine = build(tier=(6, 2) if tight else (20, 20))
    cache(engine, P, Q, U)
    assert engine.back_up(Q) == engine.back_up(U) == 24
    return engine


def before_restore(build: Build, tight: bool) -> Engine:
    """P is to return; part of Q, with which it shares a page, must go if the device is tight."""
    engine = build(**({"pages": 7, "state_slots": 8} if tight else {}))
    cache(engine, P)
    assert engine.back_up(P) == 24
    engine.evict(40)
    cache(engine, Q, U)
    return engine


@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("prepare", [before_back_up, before_restore])
def test_a_failure_leaves_all_or_nothing(
    build: Build, prepare: Callable[[Build, bool], Engine], tight: bool
) -> None:
    """One run for each allocation and copy, which fails in it."""
    whole, name = truth(build, P, Q, U), prepare.__name__.removeprefix("before_")
    engine, words = prepare(build, tight), list[str]()
    assert getattr(engine, name)(P, before=words.append) == 24
    layers = layers_of(Component.KV)
    assert len(words) == 2 + 2 * 2 * layers + layers_of(Component.STATE)
    for call, what in enumerate(words):
        engine = prepare(build, tight)
        sizes = (6, 2) if tight and name == "back_up" else (20, 20)
        hit = hit_of(engine, P)  # cuts the edge where P leaves Q
        seen, stored, held = engine.inspect(), contents(engine), buffers(engine)
        with pytest.raises(Injected, match=what):
            getattr(engine, name)(P, before=fail_at(call))
        after = check_conserved(engine, sizes)
        if not tight or name == "back_up":
            assert all(map(torch.equal, buffers(engine), held))
            assert replace(after, tier=None, reused_pages=0) == replace(
                seen, tier=None, reused_pages=0
            )
        if not tight or name == "restore":
            assert after.tier == seen.tier
        assert contents(engine).items() <= stored.items()
        assert set(tiered(engine)) <= {Q, U} if name == "back_up" else {P}
        assert hit_of(engine, P) == hit
        assert getattr(engine, name)(P) == 24
        check_conserved(engine, sizes)
        assert contents(engine).items() <= whole.items()
        for tokens in tiered(engine):
            engine.evict(40)
            assert engine.restore(tokens) == 24
            assert contents(engine) == part_of(whole, tokens)


def test_no_prefix_is_seen_half_there(build: Build) -> None:
    """At each allocation and copy somebody looks for P in the tier, and then in the cache."""
    engine = build()
    cache(engine, P)
    found: list[int] = []
    engine.back_up(P, before=lambda _: found.append(len(tiered(engine))))
    assert found == [0] * len(found)
    engine.evict(40)
    engine.restore(P, before=lambda _: found.append(len(engine.inspect().cached)))
    assert len(found) == 2 * (2 + 3 * 2 * 2 + 2)
    assert not any(found)
    assert hit_of(engine, P) == 24


def test_what_is_being_copied_is_locked(build: Build) -> None:
    """All of P while it is backed up, and while it comes back the page that was there."""
    engine = build()
    cache(engine, P, Q)
    locked: list[set[Prefix]] = []
    assert engine.back_up(P, before=lambda _: locked.append(locked_paths(engine))) == 24
    assert locked == [{P[:8], P}] * len(locked)
    engine.evict(40)
    cache(engine, Q)
    hit_of(engine, P)
    locked.clear()
    assert engine.restore(P, before=lambda _: locked.append(locked_paths(engine))) == 24
    assert locked
    assert all(path[:8] == P[:8] for paths in locked for path in paths)
    assert all(locked)
    whole = truth(build, P, Q)
    assert part_of(contents(engine), P) == part_of(whole, P)
    assert contents(engine).items() <= whole.items()
    assert not any(node.locks for node in check_conserved(engine).cached)


def locked_paths(engine: Engine) -> set[Prefix]:
    """The cached prefixes that are locked, by their tokens."""
    paths: dict[int | None, Prefix] = {None: ()}
    nodes = engine.inspect().cached
    for node in nodes:
        paths[node.node] = paths[node.parent] + node.tokens
    return {paths[node.node] for node in nodes if node.locks}


STAMPED = rows([1], [24], [25])
INSIDE: dict[str, Callable[[Engine], object]] = {
    "submit": lambda e: e.submit(A, [*P, 1]),
    "extend": lambda e: e.extend([Chunk(request=B, stop=1, rows=STAMPED)]),
    "extend-nothing": lambda e: e.extend([]),
    "decode": lambda e: e.decode([B], [1], STAMPED),
    "verify": lambda e: e.verify([Drafts(request=B, tokens=[1], rows=STAMPED)]),
    "accept": lambda e: e.accept(B, 0),
    "finish": lambda e: e.finish(B),
    "abort": lambda e: e.abort(B),
    "retract": lambda e: e.retract(B),
    "evict": lambda e: e.evict(40),
    "back_up": lambda e: e.back_up(P),
    "back_up-another": lambda e: e.back_up(U),
    "restore": lambda e: e.restore(P),
    "restore-another": lambda e: e.restore(U),
    "read": lambda e: e.read(B, Component.KV, 0, 0, 1),
}


@pytest.mark.parametrize("call", INSIDE.values(), ids=INSIDE)
@pytest.mark.parametrize("prepare", [before_back_up, before_restore])
def test_before_only_looks_on(
    build: Build, prepare: Callable[[Build, bool], Engine], call: Callable[[Engine], object]
) -> None:
    """Its call is refused at each allocation and copy and the copying goes on, or is undone if
    the refusal passes through it."""
    engine, name = prepare(build, False), prepare.__name__.removeprefix("before_")
    prefill(engine, B, [*U, 1])
    hit_of(engine, P)  # cuts the edge where P leaves Q
    move, seen = getattr(engine, name), engine.inspect()
    with pytest.raises(InvalidCall):
        move(P, before=lambda _: call(engine))
    assert replace(engine.inspect(), reused_pages=0) == replace(seen, reused_pages=0)
    copied: list[str] = []

    def before(what: str) -> None:
        looked = engine.inspect()
        with pytest.raises(InvalidCall, match=r"has called before|not offered with HiSparse"):
            call(engine)
        assert engine.inspect() == looked
        copied.append(what)

    assert move(P, before=before) == 24
    assert len(copied) == 2 + 2 * 2 * layers_of(Component.KV) + layers_of(Component.STATE)
    engine.finish(B)
    check_conserved(engine)


@pytest.mark.parametrize("seed", range(4))
def test_random_histories(build: Build, seed: int) -> None:
    """Against a model of the tier: which prefixes it holds, in which order, in how many pages.
    What is cached under a prefix has the same bytes whenever it is there."""
    draw, seen = random.Random(seed), Counter[str]()
    tier = (5, 3)
    engine = build(tier=tier, pages=14, state_slots=12, seed=seed)
    known, held = Contents(), list[Prefix]()
    for _ in range(500):
        tokens = tuple(t for _ in range(draw.randint(1, 4)) for t in draw.choice(PIECES))
        name = draw.choice(("back_up", "restore", "back_up", "restore", "evict", "cache", "run"))
        if name == "evict":
            engine.evict(draw.randint(1, 6))
        elif name == "cache":
            cache(engine, (*tokens, 9))
        elif name == "run":
            if B in engine.inspect().requests:
                engine.finish(B)
            else:
                prefill(engine, B, (*tokens, 9))
        else:
            want = expected(name, tokens, contents(engine), held, tier)
            failing = fail_at(draw.randrange(12) if draw.random() < 0.3 else 1000)
            try:
                assert getattr(engine, name)(tokens, before=failing) == len(want)
            except Injected:
                assert set(tiered(engine)) <= set(held)
                held = tiered(engine)
                name += " failed"
            else:
                seen["driven out"] += enter(held, want, tier) if want else 0
            seen[name] += bool(want)
        assert tiered(engine) == held
        check_conserved(engine, tier)
        for key, stored in contents(engine).items():
            assert known.setdefault(key, stored) == stored
    events = ("back_up", "back_up failed", "restore", "restore failed", "driven out")
    assert all(seen[event] > 2 for event in events)


PIECES = (tuple(range(PAGE)), tuple(range(20, 20 + PAGE)))


def expected(
    name: str,
    tokens: Sequence[int],
    cached: Contents,
    held: Sequence[Prefix],
    tier: tuple[int, int],
) -> Prefix:
    """The prefix of `tokens` that a call should copy."""
    prefixes = [tuple(tokens[:end]) for end in range(len(tokens), 0, -PAGE)]
    if name == "restore":
        return next((p for p in prefixes if p in held), ())
    found = next((p for p in prefixes if (*p, -1) in cached), ())
    return found if len(found) <= tier[0] * PAGE else ()


def enter(held: list[Prefix], prefix: Prefix, tier: tuple[int, int]) -> int:
    """Make `prefix` the last to go, and let the first go until all that stay fit; how many
    went."""
    if prefix in held:
        held.remove(prefix)
    held.append(prefix)
    before = len(held)
    while len(held) > tier[1] or len(pages_of(held)) > tier[0]:
        del held[0]
    return before - len(held)


def pages_of(held: Sequence[Prefix]) -> set[Prefix]:
    return {p[:end] for p in held for end in range(PAGE, len(p) + 1, PAGE)}
