"""Negative controls of what judges HiSparse: an engine that errs in one way is told, before
anything else, by the oracle and component that it belongs to; untouched it is clean."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

import systems
from fuzz.campaign import Plan
from fuzz.campaign import run as campaign
from fuzz.outcome import Outcome
from fuzz.run import execute
from fuzz.tape import Tape
from fuzz.targets import find
from fuzz.targets.session import KINDS
from fuzz.targets.setup import Payload, Pin
from fuzz.targets.streams import LITTERED, SAME, STALE
from oracle_tests.tampering import tampered
from reference.contract import (
    Capability,
    Component,
    HotBufferView,
    OutOfMemory,
    Snapshot,
    StepOutput,
    System,
)

SETUP = [0] * 18
SUBMIT, EXTEND, DECODE = (KINDS.index(kind) + 1 for kind in ("submit", "extend", "decode"))
# Two requests of 13 and 15 tokens, whose hot buffers have 8 slots; both decode twice, and then
# the first alone.
DECODING = [
    [SUBMIT, 0, 0, 12, 0],
    [EXTEND, 0, 0, 0, 0],
    [SUBMIT, 0, 0, 14, 0],
    [EXTEND, 1, 0, 0, 0],
    [DECODE, 0, 1, 1, 2 * STALE],
    [DECODE, 0, 0, 0, 2 * LITTERED],
]
Tampering = dict[str, Callable[..., Any]]


@pytest.fixture(scope="module")
def optimized() -> System:
    return systems.load("optimized")


def run(system: System, *, payload: Payload = "stamped", operations=DECODING) -> Outcome:
    pin = Pin(payload=payload, kpool=2, physical_page_size=4, interval_pages=1, max_requests=3)
    tape = Tape([*SETUP, *itertools.chain.from_iterable(operations)])
    return execute(system, find("hot_buffer"), tape, pin=pin)


def growing(system: System) -> System:
    """A system of which no hot buffer or host page is asked for ahead of need, and that shows no
    buffer of a request that has nothing stored."""

    def inspect(engine: Any) -> Snapshot:
        snapshot: Snapshot = engine.inspect()
        assert snapshot.hot is not None
        buffers, free = dict(snapshot.hot.buffers), set(snapshot.hot.free_device)
        for request, each in snapshot.hot.buffers.items():
            if not snapshot.requests[request].length:
                buffers[request] = replace(each, pages=(), rows=())
                free.update(each.pages)
        hidden = (len(free) - len(snapshot.hot.free_device)) * engine.geometry.physical_page_size
        occupancy = replace(
            snapshot.hot.occupancy,
            device_free=snapshot.hot.occupancy.device_free + hidden,
            device_hot=snapshot.hot.occupancy.device_hot - hidden,
        )
        seen = {"buffers": buffers, "free_device": frozenset(free), "occupancy": occupancy}
        return replace(snapshot, hot=replace(snapshot.hot, **seen))

    showing = tampered(system, inspect=inspect)

    def factory(*args: Any, **kwargs: Any) -> Any:
        engine = showing.factory(*args, **kwargs)
        engine.capabilities -= {Capability.HOT_AHEAD}
        return engine

    return replace(system, factory=factory)


def first(outcome: Outcome) -> tuple[str, str]:
    """The signature and the sentence of what is told first."""
    assert outcome.violations
    return outcome.violations[0].signature, outcome.violations[0].sentence


def account(change: Callable[[Snapshot], Snapshot]) -> Tampering:
    """Lies about its memory once a request has decoded."""

    def inspect(engine: Any) -> Snapshot:
        snapshot: Snapshot = engine.inspect()
        views = snapshot.hot.buffers if snapshot.hot else {}
        decoded = [r for r, view in views.items() if view.saved < snapshot.requests[r].length]
        return change(snapshot) if decoded else snapshot

    return {"inspect": inspect}


def hot(change: Callable[[Any], dict[str, Any]]) -> Tampering:
    """Lies about what `change` returns of a HotSnapshot."""
    return account(lambda s: replace(s, hot=replace(s.hot, **change(s.hot))))


def buffer(change: Callable[[HotBufferView], dict[str, Any]]) -> Tampering:
    """Lies about what `change` returns of request 0's buffer."""
    return hot(
        lambda h: {"buffers": {**h.buffers, 0: replace(h.buffers[0], **change(h.buffers[0]))}}
    )


def outputs(change: Callable[[StepOutput], dict[str, Any]]) -> Tampering:
    """Decodes return something else."""
    return {"decode": lambda engine, *args: [replace(o, **change(o)) for o in engine.decode(*args)]}


def spoiled(change: Callable[[Any], None], *, call: int) -> Tampering:
    """Does something to the engine after its decode number `call`, from 0."""
    calls = itertools.count()

    def decode(engine: Any, *args: Any) -> Any:
        result = engine.decode(*args)
        if next(calls) == call:
            change(engine)
        return result

    return {"decode": decode}


def mirrored(backing: Mapping[int, int]) -> dict[int, int]:
    """One-to-one still, but each logical page has the host page of another."""
    return dict(zip(backing, reversed(backing.values()), strict=True))


def exchanged(values: tuple[Any, ...], i: int, j: int) -> tuple[Any, ...]:
    out = list(values)
    out[i], out[j] = out[j], out[i]
    return tuple(out)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("payload", ["stamped", "model"])
def test_the_untouched_run_is_clean_and_misses(optimized, payload, ahead):
    outcome = run(optimized if ahead else growing(optimized), payload=payload)
    assert outcome.violations == []
    assert outcome.events["most_columns_missed"] >= 5
    assert outcome.events["at_lower_bound"] >= 5


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("payload", ["stamped", "model"])
@pytest.mark.parametrize(
    ("component", "changes", "sentence"),
    [
        (
            "occupancy",
            hot(lambda h: {"occupancy": replace(h.occupancy, host_held=0)}),
            "host tokens should add up to 288; 248 [+] 0 are reported",
        ),
        (
            "occupancy",
            account(lambda s: replace(s, hot=None)),
            "An engine with HiSparse should account for it",
        ),
        (
            "device pages",
            hot(lambda h: {"free_device": h.free_device | {h.buffers[1].pages[0]}}),
            r"device page \d+ should belong to \['request 1'\]; it is free too",
        ),
        (
            "device pages",
            buffer(lambda b: {"pages": b.pages[:-1]}),
            "request 0 should have 3 of them; it has 2",
        ),
        (
            "device pages",
            buffer(lambda b: {"rows": exchanged(b.rows, 2, 8)}),
            r"request 0: the row of slot 2 should be \d+; it is \d+",
        ),
        (
            "host pages",
            hot(lambda h: {"free_host": h.free_host - {min(h.free_host)}}),
            r"host page \d+ should be free or owned; it is leaked",
        ),
        (
            "host pages",
            hot(lambda h: {"backing": dict.fromkeys(h.backing, min(h.backing.values()))}),
            r"host page \d+ should have one owner; it has \['logical page",
        ),
        (
            "backing",
            hot(lambda h: {"backing": dict([*h.backing.items()][1:])}),
            r"logical page \d+ should have a host page; it has none",
        ),
        (
            "backing",
            hot(lambda h: {"backing": mirrored(h.backing)}),
            r"request \d: the host row of position \d+ should be \d+; it is \d+",
        ),
        (
            "backing",
            buffer(lambda b: {"host_rows": exchanged(b.host_rows, 3, 4)}),
            r"request 0: the host row of position 3 should be \d+; it is \d+",
        ),
        (
            "saved",
            buffer(lambda b: {"saved": b.saved + 1}),
            r"request 0 should have saved 14 positions; it has 15",
        ),
        (
            "tags",
            buffer(lambda b: {"tags": (b.tags[0], exchanged(b.tags[1], 0, 5))}),
            r"request 0, layer 3: slot 0 should hold position \d+; its tag is \d+",
        ),
        ("tags", buffer(lambda b: {"tags": b.tags[:1]}), "orders of 2 layers"),
        (
            "lru",
            buffer(lambda b: {"lru": (b.lru[0][::-1], b.lru[1])}),
            r"request 0, layer 1: the slots should be, the least recently used first, \[",
        ),
        (
            "misses",
            outputs(lambda o: {"misses": o.misses + 1}),
            r"request 0, position 13: \[\d, \d\] rows should be swapped in, by layer; it says",
        ),
        ("misses", outputs(lambda o: {"misses": None}), "by layer; it says None"),
    ],
)  # fmt: skip
def test_an_account_that_is_wrong_is_told(optimized, component, changes, sentence, payload, ahead):
    system = optimized if ahead else growing(optimized)
    signature, said = first(run(tampered(system, **changes), payload=payload))
    assert signature == f"residency/{component}"
    assert re.search(sentence, said), said


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            outputs(lambda o: {"attended": o.attended.roll(-1, 2)}),
            r"request 0, position 13, layer 1: cell 0 should hold position \d+; it holds "
            r"request 0's position \d+ of layer 1",
        ),
        (
            outputs(lambda o: {"attended": o.attended.flip(0)}),
            r"cell 0 should hold position (\d+); it holds request 0's position \1 of layer 3",
        ),
        (
            outputs(lambda o: {"attended": o.attended + (o.attended.amax(-1, keepdim=True) == 0)}),
            r"cell \d+ should hold zeros; it holds a row that no request wrote",
        ),
        (
            outputs(lambda o: {"attended": None}),
            r"rows of shape \(2, 9, 32\) should be attended; \(0,\) are given",
        ),
    ],
    ids=["another cell's", "another layer's", "a void cell's", "none"],
)
def test_rows_that_are_attended_by_mistake_are_told(optimized, changes, sentence):
    signature, said = first(run(tampered(optimized, **changes)))
    assert signature == "residency/attended"
    assert re.search(sentence, said), said


def test_rows_that_are_attended_are_the_callers_own(optimized):
    """Cells that hold what they held in the decode before are taken from what that returned."""
    kept: dict[int, Any] = {}

    def decode(engine: Any, *args: Any) -> list[StepOutput]:
        results: list[StepOutput] = engine.decode(*args)
        for output in results:
            now = output.attended
            returned, copied = kept.get(output.request, (now, now))
            same = (copied == now).all(dim=-1)
            now = now.clone()
            kept[output.request] = output.attended, now
            output.attended[same] = returned[same]
        return results

    operations = [*DECODING[:4], *[[DECODE, 0, 0, 0, 2 * SAME]] * 3]
    assert run(optimized, operations=operations).violations == []
    outcome = run(tampered(optimized, decode=decode), operations=operations)
    signature, said = first(outcome)
    assert signature == "residency/attended"
    assert "it holds a row that no request wrote" in said


def test_a_map_of_host_pages_that_goes_on_changing_is_told(optimized):
    live: dict[int, int] = {}

    def inspect(engine: Any) -> Snapshot:
        snapshot: Snapshot = engine.inspect()
        live.clear()
        live.update(snapshot.hot.backing)
        return replace(snapshot, hot=replace(snapshot.hot, backing=live))

    signature, said = first(run(tampered(optimized, inspect=inspect)))
    assert signature == "exact/copies"
    assert "should be a copy; one has changed" in said


def test_a_hot_row_that_is_not_selected_is_looked_at(optimized):
    def overwrite(engine: Any) -> None:
        views, raw = engine.inspect().hot.buffers, engine.raw(Component.HOT, 1)
        raw[views[0].rows[views[0].lru[1][0]]] = raw[views[1].rows[8]]

    signature, said = first(run(tampered(optimized, **spoiled(overwrite, call=1))))
    assert signature == "residency/hot rows"
    expected = (
        r"request 0, layer 3: slot \d should hold position \d+; it holds request 1's position"
    )
    assert re.search(expected, said), said


def test_a_host_row_that_is_wrong_is_attended_once_it_is_swapped_in(optimized):
    def overwrite(engine: Any) -> None:
        view, raw = engine.inspect().hot.buffers[0], engine.raw(Component.KV, 0)
        raw[[*view.host_rows[:13]]] = raw[view.host_rows[0]].clone()

    signature, said = first(run(tampered(optimized, **spoiled(overwrite, call=0))))
    assert signature == "residency/attended"
    assert "it holds request 0's position 0 of layer 1" in said


@pytest.mark.parametrize("component", [Component.HOT, Component.KV])
def test_in_the_end_the_engine_reads_its_hot_rows_itself(optimized, component):
    """Of KV rows provenance reads those on the host: not the newest."""

    def read(engine: Any, request: Any, asked: Component, layer: int, start: int, stop: int) -> Any:
        rows = engine.read(request, asked, layer, start, stop)
        newest = start == engine.inspect().requests[request].length - 1
        wrong = asked is component and (newest or asked is Component.HOT)
        return rows.roll(1, 1) if wrong else rows

    signature, said = first(run(tampered(optimized, read=read)))
    assert signature == "residency/hot rows"
    assert ("as its newest position 15" in said) == (component is Component.KV)


@pytest.mark.parametrize("payload", ["stamped", "model"])
@pytest.mark.parametrize(
    ("component", "place", "sentence"),
    [
        (Component.HOT, lambda s: s.hot.buffers[0].rows[3], "it is request 0's slot 3, so it may"),
        (Component.HOT, lambda s: 4 * min(s.hot.free_device), "nobody's, so it may only become"),
        (Component.KV, lambda s: 8 * min(s.hot.free_host), "nobody's, so it may only become"),
        (Component.KV, lambda s: s.hot.buffers[0].host_rows[2], "it is request 0's row 2, so it"),
        (Component.KV, lambda s: s.hot.buffers[0].host_rows[13], "nobody's, so it may only become"),
    ],
    ids=["another's slot", "free device page", "free host page", "saved", "not yet saved"],
)
def test_containment_knows_device_rows_and_host_rows(
    optimized, component, place, sentence, payload
):
    """The decode that does it is request 1's."""

    def scribble(engine: Any) -> None:
        engine.raw(component, 1)[place(engine.inspect())] = 1

    operations = [*DECODING[:4], [DECODE, 0, 0, 0, 0], [DECODE, 1, 0, 0, 0]]
    changes = spoiled(scribble, call=1)
    outcome = run(tampered(optimized, **changes), payload=payload, operations=operations)
    said = [v.sentence for v in outcome.violations if v.signature == f"containment/{component}"]
    assert said
    assert sentence in said[0]


@pytest.mark.parametrize("call", ["submit", "extend", "decode"])
def test_memory_that_is_not_short_is_no_reason_to_refuse(optimized, call):
    def refuse(*_: Any) -> Any:
        raise OutOfMemory("no.")

    signature, said = first(run(tampered(optimized, **{call: refuse})))
    assert signature == "exact/refusal"
    assert "should succeed" in said


@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
def test_short_device_pages_or_host_pages_are_a_reason_to_refuse(optimized, ratio):
    pin = Pin(capacity_ratio=ratio, hot_buffers=1)
    summary = campaign(Plan(target="hot_buffer", executions=40, pin=pin, seed=ratio))
    assert [f.outcome.violations for f in summary.failures] == []
    assert summary.events["refused_for_device"] > 0
    assert summary.events["swapped_in"] > 0
    assert ratio > 1 or summary.events["refused_for_host"] > 0
