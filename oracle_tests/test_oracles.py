"""Each oracle's negative control: an engine that errs in one way is told by that oracle, in a
sentence that names the row and its owners; the same run without the error is clean."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import systems
from fuzz.outcome import Outcome
from fuzz.run import check_deterministic, execute
from fuzz.tape import Tape
from fuzz.targets import find
from fuzz.targets.session import KINDS
from fuzz.targets.setup import Payload, Pin
from oracle_tests.tampering import tampered
from reference.contract import Admission, Component, InvalidCall, System

SETUP = [0] * 13
SUBMIT, EXTEND, DECODE, FINISH, EVICT = (
    KINDS.index(kind) + 1 for kind in ("submit", "extend", "decode", "finish", "evict")
)
# Two requests that share a logical page of 8 tokens; the second diverges inside the next page.
SHARING = [
    [SUBMIT, 0, 0, 12, 0],
    [EXTEND, 0, 0, 0, 0],
    [SUBMIT, 1, 0, 14, 10],
    [EXTEND, 1, 0, 0, 0],
    [DECODE, 0, 1, 1, 0],
    [FINISH, 0, 0, 0, 0],
]


def run(system: System, *, payload: Payload = "stamped", operations=SHARING) -> Outcome:
    pin = Pin(payload=payload, kpool=2, physical_page_size=4, interval_pages=1, max_requests=3)
    values = [*SETUP, *itertools.chain.from_iterable(operations)]
    return execute(system, find("prefix_split"), Tape(values), pin=pin)


def after(name: str, change: Callable[[Any], None]) -> dict[str, Callable[..., Any]]:
    """Call the engine's method, then do something to the engine, the second time only."""
    calls = itertools.count()

    def method(engine: Any, *args: Any, **kwargs: Any) -> Any:
        result = getattr(engine, name)(*args, **kwargs)
        if next(calls) == 1:
            change(engine)
        return result

    return {name: method}


def found(outcome: Outcome) -> dict[str, str]:
    return {v.signature: v.sentence for v in outcome.violations}


@pytest.fixture(scope="module")
def optimized() -> System:
    return systems.load("optimized")


@pytest.mark.parametrize("payload", ["stamped", "model"])
def test_the_untouched_run_is_clean_and_shares(optimized, payload):
    outcome = run(optimized, payload=payload)
    assert outcome.violations == []
    assert outcome.events["hit_then_diverged_inside_logical_page"] == 1
    assert outcome.events["page_shared_by_running_requests"] >= 1


def test_the_reference_engine_is_clean_and_what_it_lacks_is_said(optimized):
    outcome = run(systems.load("reference"))
    assert outcome.violations == []
    assert outcome.skipped == ["evict"]


@pytest.mark.parametrize("component", [Component.KV, Component.STATE])
def test_provenance_names_an_intruder(optimized, component):
    """Another request's row over one's own: which row, who should own it, who does."""

    def overwrite(engine: Any) -> None:
        raw, view = engine.raw(component, 0), engine.inspect().requests
        if component is Component.KV:
            size = engine.geometry.logical_page_size
            raw[view[0].pages[1] * size + 1] = raw[view[1].pages[1] * size + 2]
        else:
            raw[view[0].state_slot] = raw[view[1].state_slot]

    outcome = run(tampered(optimized, **after("extend", overwrite)))
    sentence = found(outcome)[f"provenance/{component.value}"]
    assert re.search(r"should hold request 0's .*, holds request 1's ", sentence), sentence


def test_provenance_names_a_pooled_key_of_another(optimized):
    def overwrite(engine: Any) -> None:
        view, size = engine.inspect().requests, engine.geometry.index_page_size
        raw = engine.raw(Component.INDEX, 0)
        dim = engine.shape.index_dim
        mine, theirs = view[0].pages[1], view[1].pages[1]
        raw[mine, :dim] = raw[theirs, dim : 2 * dim]
        raw[mine, size * dim : size * dim + 4] = raw[theirs, size * dim + 4 : size * dim + 8]

    outcome = run(tampered(optimized, **after("extend", overwrite)))
    sentence = found(outcome)["provenance/index"]
    assert re.fullmatch(
        r"index slot \d+ should hold request 0's group 4 \(positions 8\.\.9\), "
        r"holds request 1's group 5 \(positions 10\.\.11\)\.",
        sentence,
    )


def test_provenance_reads_by_the_engines_own_path(optimized):
    def read(engine: Any, request, component, layer, start, stop):
        rows = engine.read(request, component, layer, start, stop)
        return rows.roll(1, 0) if component is Component.INDEX and stop - start > 4 else rows

    sentence = found(run(tampered(optimized, read=read)))["provenance/index"]
    assert sentence.startswith("What request 0 reads as index row 0 should hold request 0's group")


def test_provenance_sees_a_tail_key_of_the_wrong_place(optimized):
    """Each request's ring moved to the next one's, in the live buffer."""

    def roll(engine: Any) -> None:
        rings = engine.raw(Component.TAIL, 0)
        rings.copy_(rings.roll(1, 0))

    sentence = found(run(tampered(optimized, **after("extend", roll))))["provenance/tail"]
    assert "should hold request 1's position 14, holds request 0's position 12" in sentence


def test_containment_forbids_writes_to_nobodys_rows(optimized):
    def scribble(engine: Any) -> None:
        free = min(engine.inspect().free_pages)
        engine.raw(Component.KV, 0)[free * engine.geometry.logical_page_size] = 1

    outcome = run(tampered(optimized, **after("extend", scribble)))
    assert "it is nobody's, so it may only become poison" in found(outcome)["containment/kv"]


def test_containment_forbids_changes_to_the_rows_of_others(optimized):
    """In a model run too, where no stamp would tell."""

    def flip(engine: Any) -> None:
        page = engine.inspect().requests[0].pages[0]
        engine.raw(Component.KV, 1)[page * engine.geometry.logical_page_size] ^= 1

    outcome = run(tampered(optimized, **after("extend", flip)), payload="model")
    sentence = found(outcome)["containment/kv"]
    assert re.search(r"'extend request 1 to 15', but it is .*'s row 0, so it may not", sentence)


@pytest.mark.parametrize("component", [Component.KV, Component.INDEX, Component.STATE])
@pytest.mark.parametrize("payload", ["stamped", "model"])
def test_containment_wants_poison_where_memory_is_free(optimized, component, payload):
    """From the start, and from the step on that frees it."""

    def fresh(engine: Any, asked: Component, layer: int) -> Any:
        buffer = engine.raw(asked, layer)
        if asked is component:
            buffer[-1] = 1
        return buffer

    outcome = run(tampered(optimized, raw=fresh), payload=payload)
    assert "it should be poison, and is not" in found(outcome)[f"containment/{component.value}"]

    def keep(engine: Any, *args: Any) -> Any:
        raw, before = engine.raw(component, 0), engine.raw(component, 0).clone()
        result = engine.finish(*args)
        raw.copy_(before)
        return result

    outcome = run(tampered(optimized, finish=keep), payload=payload)
    sentence = found(outcome)[f"containment/{component.value}"]
    assert re.search(
        "is free after 'finish request 0 .*': it should be poison, and is not", sentence
    )


@pytest.mark.parametrize("component", [Component.KV, Component.STATE, Component.TAIL])
def test_what_is_read_is_the_callers_own(optimized, component):
    """KV rows are read in every step, the others at the end."""

    def read(engine: Any, request, asked, layer, start, stop):
        rows = engine.read(request, asked, layer, start, stop)
        if asked is not component:
            return rows
        raw = engine.raw(asked, layer).view(-1, rows.shape[-1])
        first = int((raw == rows[0]).all(dim=1).nonzero()[0])
        view = raw[first : first + len(rows)]
        return view if view.equal(rows) else rows

    (signature, sentence), *_ = found(run(tampered(optimized, read=read))).items()
    if component is Component.KV:
        assert signature == "provenance/kv"
        assert sentence.endswith("holds a row that no request wrote.")
    else:
        assert signature == f"containment/{component.value}"
        assert "what a read returns should be the caller's own" in sentence


def test_provenance_reads_parts_too(optimized):
    def read(engine: Any, request, component, layer, start, stop):
        rows = engine.read(request, component, layer, start, stop)
        last = engine.inspect().requests[request].length - 1
        return rows.flip(0) if component is Component.KV and start and stop <= last else rows

    sentence = found(run(tampered(optimized, read=read)))["provenance/kv"]
    assert re.search(r"reads as kv row [1-9]\d* should hold request \d's position", sentence)


LIVE: dict[int, int] = {}
"""Counts of an engine that hands out views of its memory."""


def _one_state_lost(engine: Any) -> Any:
    account = engine.inspect()
    lost = {max(account.free_states)} if account.requests else set()
    return replace(account, free_states=account.free_states - lost)


def _live_counts(engine: Any) -> Any:
    account = engine.inspect()
    LIVE.clear()
    LIVE.update(account.ref_counts)
    return replace(account, ref_counts=LIVE)


@pytest.mark.parametrize(
    ("changes", "signature", "sentence"),
    [
        (
            {"submit": lambda e, *a: Admission(hit=e.submit(*a).hit // 2)},
            "exact/hit",
            "request 1 should hit 8 tokens, .* it hit 4",
        ),
        (
            {"inspect": _one_state_lost},
            "exact/states",
            "state slot .* should be free or held; it is leaked",
        ),
        (
            {
                "inspect": lambda e: replace(
                    e.inspect(), ref_counts=dict.fromkeys(e.inspect().ref_counts, 1)
                )
            },
            "exact/pages",
            r"page \d+ should have 2 references; it has 1",
        ),
        (
            {"finish": lambda e, r: e.abort(r)},
            "exact/insert",
            "request 0 should leave 8 tokens in the cache; 0 are there",
        ),
        (
            {"inspect": lambda e: replace(e.inspect(), hits=2 * e.inspect().hits)},
            "exact/totals",
            r"'submit request 1 .*' should count 1 hits; it counted 2",
        ),
        (
            {"inspect": lambda e: replace(e.inspect(), reused_pages=1)},
            "exact/totals",
            r"pages were handed out, .* 0 should count as reused; 1 do",
        ),
        (
            {"inspect": _live_counts},
            "exact/copies",
            "A snapshot should be a copy; one has changed",
        ),
        (
            {"evict": lambda e, pages: e.evict(99)},
            "exact/evict",
            r"'evict 1 pages \(2 went\)' needed .* it evicted until \d+ and \d+ were left over",
        ),
    ],
)  # fmt: skip
def test_exact_names_what_is_wrong(optimized, changes, signature, sentence):
    operations = SHARING
    if signature == "exact/insert":
        operations = [SHARING[0], [EXTEND, 0, 0, 2, 0], SHARING[-1]]
    if signature == "exact/evict":
        operations = [[SUBMIT, 0, 0, 9, 0], [EXTEND, 0, 0, 0, 0], [FINISH, 0, 0, 0, 0]]
        operations = [*operations, *operations, [EVICT, 0, 0, 0, 0]]
    outcome = run(tampered(optimized, **changes), operations=operations)
    assert re.search(sentence, found(outcome)[signature])


def test_exact_has_a_refusal_of_a_legal_call(optimized):
    def decode(engine: Any, *args: Any) -> Any:
        raise InvalidCall("no.")

    assert found(run(tampered(optimized, decode=decode))) == {
        "exact/refused": "The engine refused a legal call: no."
    }


def test_exact_sees_outputs_of_other_positions(optimized):
    def extend(engine: Any, chunks: Any) -> Any:
        return engine.extend([replace(chunk, outputs_from=chunk.stop - 1) for chunk in chunks])

    sentence = found(run(tampered(optimized, extend=extend), payload="model"))["exact/outputs"]
    assert "should give outputs of request 0 from position 0" in sentence
    assert "it gave those of request 0 from 12" in sentence


def test_metamorphic_sees_batch_dependence(optimized):
    def decode(engine: Any, *args: Any) -> Any:
        outputs = engine.decode(*args)
        return [replace(output, logits=output.logits * (1 + 1e-7)) for output in outputs]

    sentence = found(run(tampered(optimized, decode=decode), payload="model"))["metamorphic/logits"]
    assert "'decode 2 tokens of request 0, request 1'" in sentence
    assert "a cold run in one chunk" in sentence


def test_numeric_sees_what_depends_on_the_tokens_alone(optimized):
    def off(name: str) -> Callable[..., Any]:
        def step(engine: Any, *args: Any) -> Any:
            outputs = getattr(engine, name)(*args)
            return [replace(output, logits=output.logits * 1.01) for output in outputs]

        return step

    outcome = run(tampered(optimized, extend=off("extend"), decode=off("decode")), payload="model")
    assert {signature.partition("/")[0] for signature in found(outcome)} == {"numeric"}


def test_a_crash_is_a_finding_of_no_oracle(optimized):
    def decode(engine: Any, *args: Any) -> Any:
        return 1 / 0

    outcome = run(tampered(optimized, decode=decode))
    assert outcome.signature == "crash/decode.ZeroDivisionError"


def test_a_run_that_differs_from_itself_is_noticed(optimized):
    totals = itertools.count()

    def inspect(engine: Any) -> Any:
        return replace(engine.inspect(), reused_pages=next(totals))

    def outputs_differ(engine: Any, *args: Any) -> Any:
        shift = next(totals)
        return [replace(o, logits=o.logits + shift) for o in engine.decode(*args)]

    pin = Pin(payload="model", kpool=2, physical_page_size=4, interval_pages=1, max_requests=3)
    steady, unsteady = run(optimized, payload="model"), tampered(optimized, decode=outputs_differ)
    target = find("prefix_split")
    assert check_deterministic(optimized, target, steady, pin=pin)
    assert not check_deterministic(unsteady, target, steady, pin=pin)
