"""The restore oracle's negative controls: an engine that moves prefixes wrongly between the
tiers in one way is told, in a sentence; the same run without the error is clean."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

import systems
from fuzz.outcome import Outcome
from fuzz.run import execute
from fuzz.step import InjectedFailure, InjectedInterrupt
from fuzz.tape import Tape
from fuzz.targets import find
from fuzz.targets.session import KINDS
from fuzz.targets.setup import Payload, Pin, draw_setup
from oracle_tests.tampering import tampered
from reference.contract import Component, OutOfMemory, System

HOST_RESTORE = find("host_restore")
SUBMIT, EXTEND, FINISH, EVICT, BACK_UP, RESTORE = (
    KINDS.index(kind) + 1 for kind in ("submit", "extend", "finish", "evict", "back_up", "restore")
)
PAGE = 8
PIN = Pin(kpool=2, physical_page_size=4, interval_pages=1, max_requests=3, hisparse=False)
# Two pages and a token are cached, and so are two others; the first two go to the host and back.
CACHED = [[SUBMIT, 0, 0, 16, 0], [EXTEND, 0, 0, 0, 0], [FINISH, 0, 0, 0, 0]]
OTHER = [[SUBMIT, 0, 0, 16, 0], [EXTEND, 1, 0, 0, 0], [FINISH, 1, 0, 0, 0]]
BACKED_UP = [*CACHED, [BACK_UP, 0, 0, 0, 0]]
EVICTED = [*BACKED_UP, [EVICT, 1, 0, 0, 0]]
RESTORED = [*EVICTED, [RESTORE, 0, 0, 0, 0]]
HIT = [*RESTORED, [SUBMIT, 1, 0, 17, 17], [EXTEND, 1, 0, 0, 0]]
BOTH = [*BACKED_UP, *OTHER, [BACK_UP, 1, 0, 0, 0]]

Change = Callable[..., Any]


@pytest.fixture(scope="module")
def optimized() -> System:
    return systems.load("optimized")


def run(
    system: System,
    operations: list[list[int]],
    *,
    payload: Payload = "stamped",
    hisparse: bool = False,
) -> Outcome:
    """Operations in the roomiest setup."""
    pin, setup = msgspec.structs.replace(PIN, payload=payload, hisparse=hisparse), Tape()
    draw_setup(setup, HOST_RESTORE.ranges, pin)
    tape = Tape([*setup.values, *itertools.chain.from_iterable(operations)])
    return execute(system, HOST_RESTORE, tape, pin=pin)


def found(outcome: Outcome) -> dict[str, str]:
    return {v.signature: v.sentence for v in outcome.violations}


def spoiling(component: Component, layer: int, part: slice = slice(None)) -> dict[str, Change]:
    """Restores that leave bytes `part` of each row or page of a layer behind."""

    def restore(engine: Any, tokens: Any, **kwargs: Any) -> Any:
        length = engine.restore(tokens, **kwargs)
        raw, seen = engine.raw(component, layer), engine.inspect()
        for node in seen.cached if length else ():
            rows = list(node.checkpoints.values())
            if component is Component.INDEX:
                rows = list(node.pages)
            elif component is Component.KV:
                pages = [seen.hot.backing[page] if seen.hot else page for page in node.pages]
                rows = [page * PAGE + i for page in pages for i in range(PAGE)]
            raw[rows, part] = 0
        return length

    return {"restore": restore}


@pytest.mark.parametrize("payload", ["stamped", "model"])
@pytest.mark.parametrize("hisparse", [False, True], ids=["device", "hisparse"])
def test_what_goes_to_the_host_and_back_is_hit(
    optimized: System, payload: Payload, hisparse: bool
) -> None:
    outcome = run(optimized, HIT, payload=payload, hisparse=hisparse)
    assert outcome.violations == []
    assert outcome.events["restored_after_eviction"] == 1
    assert outcome.events["hit_after_restore"] == 1


@pytest.mark.parametrize("operations", [BACKED_UP, RESTORED])
def test_a_failure_is_let_through_and_leaves_nothing_behind(
    optimized: System, operations: list[list[int]]
) -> None:
    """One run for each allocation and copy of the last operation, and one in which none fails."""
    *before, (kind, who, *_) = operations
    event = "failed_back_up" if kind == BACK_UP else "failed_restore"
    outcomes = [run(optimized, [*before, [kind, who, n, 0, 0], operations[-1]]) for n in range(64)]
    assert not any(outcome.violations for outcome in outcomes)
    failed = [outcome.events.get(event, 0) for outcome in outcomes]
    moves = sum(failed)
    assert moves >= 2 + 2 * 2 + 1, "a page's rows of two components, two pages; a state"
    assert failed == [0, *[1] * moves, *[0] * (63 - moves)]
    done = "backed_up" if kind == BACK_UP else "restored"
    assert all(outcome.events[done] == 1 for outcome in outcomes)


# what is left out shows in the rows


@pytest.mark.parametrize(
    ("component", "part", "sentence"),
    [
        (Component.KV, slice(None), r"KV row \d+ should hold cached prefix \d+'s position 0, "),
        (Component.INDEX, slice(None), r"index slot \d+ should hold .*'s group 0 .* holds zeros"),
        (Component.INDEX, slice(-4, None), r"index slot \d+ should hold .*'s group 3 "),
        (Component.STATE, slice(None), r"state slot \d+ should hold .*'s state after 16 tokens, "),
    ],
    ids=["rows", "index rows", "scales", "state"],
)
@pytest.mark.parametrize("hisparse", [False, True], ids=["device", "hisparse"])
@pytest.mark.parametrize("operations", [RESTORED, EVICTED], ids=["restored", "at the end"])
def test_a_component_left_out_is_found(
    optimized: System,
    component: Component,
    part: slice,
    sentence: str,
    operations: list[list[int]],
    hisparse: bool,
) -> None:
    """Where a run restores nothing, what the tier holds is looked at when it ends."""
    system = tampered(optimized, **spoiling(component, 0, part))
    outcome = run(system, operations, hisparse=hisparse)
    assert re.search(sentence, found(outcome)[f"provenance/{component.value}"])
    owner = "request 0" if operations == RESTORED else "what the tier holds"
    assert re.fullmatch(rf"restore of the first 1\d tokens of {owner}", outcome.operations[-1].text)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("component", [Component.KV, Component.INDEX, Component.STATE])
def test_a_layer_left_out_is_found_by_what_a_model_computes(
    optimized: System, component: Component, layer: int
) -> None:
    outcome = run(tampered(optimized, **spoiling(component, layer)), HIT, payload="model")
    assert outcome.violations[0].oracle in ("numeric", "metamorphic")


# the account of both tiers


def refuse(engine: Any, tokens: Any, **kwargs: Any) -> None:
    raise OutOfMemory("no.")


def swallow(name: str, failure: type[BaseException] = InjectedFailure) -> dict[str, Change]:
    def call(engine: Any, tokens: Any, **kwargs: Any) -> Any:
        try:
            return getattr(engine, name)(tokens, **kwargs)
        except failure:
            return 0

    return {name: call}


def announcing(name: str, *, few: int) -> dict[str, Change]:
    """A call that announces no more than a few of its allocations and copies."""

    def call(engine: Any, tokens: Any, *, before: Callable[[str], None]) -> Any:
        left = iter(range(few))
        return getattr(engine, name)(
            tokens, before=lambda what: None if next(left, None) is None else before(what)
        )

    return {name: call}


def account(change: Callable[[Any], Any]) -> dict[str, Change]:
    """An engine that says something else of its tier, once there is something in it."""

    def inspect(engine: Any) -> Any:
        seen = engine.inspect()
        return replace(seen, tier=change(seen.tier)) if seen.tier.prefixes else seen

    return {"inspect": inspect}


def moved_slots(engine: Any) -> Any:
    """The request sits in another ring row as soon as the tier holds something."""
    seen = engine.inspect()
    if not seen.tier.prefixes:
        return seen
    views = {r: replace(view, slot=view.slot % 3 + 1) for r, view in seen.requests.items()}
    return replace(seen, requests=views)


def evict_first(engine: Any, tokens: Any, **kwargs: Any) -> Any:
    engine.evict(1)
    return engine.restore(tokens, **kwargs)


def evict_after(engine: Any, tokens: Any, **kwargs: Any) -> Any:
    length = engine.back_up(tokens, **kwargs)
    engine.evict(99)
    return length


def drop_oldest(tier: Any) -> Any:
    """The least recently used of two prefixes is gone, though there was room."""
    if len(tier.prefixes) < 2:
        return tier
    gone, *left = tier.prefixes
    return replace(
        tier,
        prefixes=tuple(left),
        free_pages=tier.free_pages | set(gone.pages),
        free_states=tier.free_states | {gone.state},
    )


@pytest.mark.parametrize(
    ("changes", "operations", "signature", "sentence"),
    [
        (
            account(lambda tier: replace(tier, free_pages=tier.free_pages - {15})),
            BACKED_UP,
            "restore/tier",
            "16 pages of the tier should be free or held; 15 are",
        ),
        (
            {"inspect": lambda engine: replace(engine.inspect(), tier=None)},
            CACHED,
            "restore/tier",
            "should say what the host tier holds",
        ),
        (
            account(lambda tier: replace(tier, free_states=frozenset())),
            BACKED_UP,
            "restore/tier",
            "6 states of the tier should be free or held; 1 are",
        ),
        (
            account(lambda tier: replace(tier, prefixes=tier.prefixes[::-1])),
            BOTH,
            "restore/order",
            r"should hold 0 \(16 tokens\), the new one \(16 tokens\); it holds the new one ",
        ),
        (
            account(drop_oldest),
            BOTH,
            "restore/order",
            r"it holds the new one \(16 tokens\)",
        ),
        (
            {"restore": lambda engine, tokens, **kwargs: 16},
            RESTORED,
            "restore/standing",
            "stood on host, should stand on device and host; it stands on host",
        ),
        (
            {"back_up": evict_after},
            BACKED_UP,
            "restore/standing",
            "after a back_up the prefix, .* should stand on device and host; it stands on host",
        ),
        (
            {"back_up": evict_after},
            BOTH,
            "restore/standing",
            "should stand on device and host; it stands on host",
        ),
        (
            {"back_up": lambda engine, tokens, **kwargs: engine.back_up(tokens, **kwargs) - 8},
            BACKED_UP,
            "restore/returned",
            "should return 16, .* it returned 8",
        ),
        (
            swallow("back_up"),
            [*CACHED, [BACK_UP, 0, 3, 0, 0]],
            "restore/returned",
            "should raise what was raised in it",
        ),
        (
            swallow("restore"),
            [*EVICTED, [RESTORE, 0, 3, 0, 0]],
            "restore/returned",
            "should raise what was raised in it",
        ),
        (
            swallow("restore", InjectedInterrupt),
            [*EVICTED, [RESTORE, 0, 4, 0, 0]],
            "restore/returned",
            "should raise what was raised in it",
        ),
        (
            announcing("back_up", few=4),
            BACKED_UP,
            "restore/announced",
            "should announce 5 allocations and copies at least, of pages, .* it announced 4",
        ),
        (
            announcing("restore", few=0),
            RESTORED,
            "restore/announced",
            "should announce 5 allocations and copies at least, of pages, .* it announced 0",
        ),
        (
            {"restore": refuse},
            RESTORED,
            "restore/returned",
            "should succeed: there was room",
        ),
        (
            {"inspect": moved_slots},
            [*CACHED, [SUBMIT, 0, 0, 16, 0], [BACK_UP, 0, 0, 0, 0]],
            "restore/requests",
            "should not touch request 1; it changed",
        ),
        (
            {"restore": evict_first},
            [*EVICTED, *OTHER, [RESTORE, 0, 0, 0, 0]],
            "exact/evict",
            "needed 2 pages and 1 states, .* it evicted until",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    optimized: System,
    changes: dict[str, Change],
    operations: list[list[int]],
    signature: str,
    sentence: str,
) -> None:
    assert run(optimized, operations).violations == []
    outcome = run(tampered(optimized, **changes), operations)
    assert re.search(sentence, found(outcome)[signature])


def test_another_exception_is_a_crash(optimized: System) -> None:
    def restore(engine: Any, tokens: Any, **kwargs: Any) -> Any:
        try:
            return engine.restore(tokens, **kwargs)
        except InjectedFailure as failure:
            raise KeyError from failure

    outcome = run(tampered(optimized, restore=restore), [*EVICTED, [RESTORE, 0, 3, 0, 0]])
    assert outcome.signature == "crash/restore.KeyError"


def test_a_restore_writes_no_row_of_another(optimized: System) -> None:
    """In a model run, where no stamp would tell."""

    def restore(engine: Any, tokens: Any, **kwargs: Any) -> Any:
        page = engine.inspect().requests[1].pages[0]
        engine.raw(Component.KV, 0)[page * PAGE] ^= 1
        return engine.restore(tokens, **kwargs)

    running = [*EVICTED, [SUBMIT, 0, 0, 5, 0], [EXTEND, 1, 0, 0, 0], [RESTORE, 0, 0, 0, 0]]
    assert run(optimized, running, payload="model").violations == []
    outcome = run(tampered(optimized, restore=restore), running, payload="model")
    assert "is request 1's row 0, so it may not change" in found(outcome)["containment/kv"]


def test_an_engine_without_a_tier_is_asked_for_nothing_of_it() -> None:
    outcome = run(systems.load("reference"), RESTORED)
    assert outcome.violations == []
    assert {"back_up", "restore"} < set(outcome.skipped)
    assert [o.text for o in outcome.operations if o.idle] == [
        "back_up: nothing to do",
        "evict: nothing to do",
        "restore: nothing to do",
    ]
