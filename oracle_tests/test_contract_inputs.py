"""What goes into an engine of ours, and what comes out: which calls are refused, in one sentence
with the cure and with nothing changed; which kinds of integers are taken; and that the caller's
tensors and the engine's are never the same memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from oracle_tests.contract_cases import (
    GEOMETRY,
    NOBODY,
    OPTIONS,
    PROMPT,
    SHAPE,
    SYSTEMS,
    A,
    B,
    C,
    build,
    decode,
    prefill,
    rows,
    rows_of,
    start,
    state_of,
    verify,
)
from reference.contract import Chunk, Component, Drafts, Engine, InvalidCall, RequestId, Rows
from reference.weights import random_weights
from systems import load


@pytest.fixture(params=SYSTEMS)
def engine(request: pytest.FixtureRequest) -> Engine:
    return build(request.param)


def chunk(request: RequestId, stop: int) -> Chunk:
    return Chunk(request=request, stop=stop, rows=rows([0], [0], [1]))


def drafts(request: RequestId, count: int) -> Drafts:
    taken = range(count)
    return Drafts(request=request, tokens=taken, rows=rows(taken, taken, taken))


def spoilt(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Rows:
    """Rows of one decode, one tensor of which is not as it should be."""
    good = rows([0], [20], [21])
    return dataclasses.replace(good, **{name: change(getattr(good, name))})


# on an engine where A is prefilled, B is admitted and C waits for `accept` with two drafts
REFUSED: dict[str, Callable[[Engine], object]] = {
    "submit-twice": lambda e: e.submit(A, PROMPT),
    "extend-unknown": lambda e: e.extend([chunk(NOBODY, 1)]),
    "extend-backwards": lambda e: e.extend([chunk(A, len(PROMPT) - 1)]),
    "extend-good-then-unknown": lambda e: e.extend([chunk(B, 1), chunk(NOBODY, 1)]),
    "extend-while-pending": lambda e: e.extend([chunk(C, len(PROMPT) + 1)]),
    "decode-unknown": lambda e: e.decode([A, NOBODY], [0, 0], rows([0, 0], [20, 0], [21, 1])),
    "decode-no-request": lambda e: e.decode([], [1], rows([], [], [])),
    "decode-while-pending": lambda e: e.decode([C], [0], rows([0], [20], [21])),
    "verify-unknown": lambda e: e.verify([drafts(NOBODY, 1)]),
    "verify-too-many": lambda e: e.verify([drafts(A, GEOMETRY.max_drafts + 1)]),
    "verify-while-pending": lambda e: e.verify([drafts(C, 1)]),
    "accept-unknown": lambda e: e.accept(NOBODY, 0),
    "accept-too-many": lambda e: e.accept(C, 3),
    "accept-negative": lambda e: e.accept(C, -1),
    "finish-unknown": lambda e: e.finish(NOBODY),
    "abort-unknown": lambda e: e.abort(NOBODY),
    "retract-unknown": lambda e: e.retract(NOBODY),
    "read-unknown": lambda e: e.read(NOBODY, Component.KV, 0, 0, 1),
}
SPOILT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float64": lambda tensor: tensor.double(),
    "too-narrow": lambda tensor: tensor[..., 1:],
    "too-many": lambda tensor: torch.cat([tensor, tensor]),
}
REFUSED |= {
    f"rows-{name}-{kind}": lambda e, name=name, change=change: e.decode(
        [A], [0], spoilt(name, change)
    )
    for name in ("kv", "key", "gate", "state")
    for kind, change in SPOILT.items()
}
# as one token each, where the call takes one; wrapped or rounded they would all be legal
NO_TOKENS: dict[str, Any] = {
    "none": None,
    "scalar": 3,
    "array-scalar": np.array(3),
    "two-dimensional": np.array([[3]]),
    "nested": [[3]],
    "ragged": [[3], 4],
    "string": "3",
    "digits": ["3"],
    "set": {3},
    "dict": {3: 3},
    "iterator": iter([3]),
    "none-inside": [None],
    "float": [3.0],
    "floats": np.array([3.0]),
    "nan": [float("nan")],
    "bool": [True],
    "bools": np.array([True]),
    "numpy-bool": [np.True_],
    "time-span": [np.timedelta64(3)],
    "time-spans": np.array([3], dtype="m8[s]"),
    "objects": np.array([3], dtype=object),
    "2**63": [2**63],
    "2**70": [2**70],
    "-2**70": [-(2**70)],
    "uint64-item": [np.uint64(2**63)],
    "uint64-beyond": np.array([2**63 + 3], dtype=np.uint64),
}
ONE_ROW = rows([0], [20], [21])
REFUSED |= {
    f"{call}-{kind}": lambda e, use=use, tokens=tokens: use(e, tokens)
    for kind, tokens in NO_TOKENS.items()
    for call, use in {
        "submit": lambda e, tokens: e.submit(NOBODY, tokens),
        "decode": lambda e, tokens: e.decode([A], tokens, ONE_ROW),
        "verify": lambda e, tokens: e.verify([Drafts(request=A, tokens=tokens, rows=ONE_ROW)]),
    }.items()
}
# each stands for 1 where numbers are rounded
REFUSED |= {
    f"{call}-{kind}": lambda e, use=use, count=count: use(e, count)
    for kind, count in {
        "float": 1.0,
        "fraction": 1.5,
        "bool": True,
        "numpy-float": np.float64(1),
        "numpy-bool": np.True_,
        "digit": "1",
    }.items()
    for call, use in {
        "accept": lambda e, count: e.accept(C, count),
        "stop": lambda e, count: e.extend([chunk(B, count)]),
        "outputs_from": lambda e, count: e.extend(
            [dataclasses.replace(chunk(B, 2), outputs_from=count)]
        ),
        "evict": lambda e, count: e.evict(count),
        "read-layer": lambda e, count: e.read(A, Component.KV, count, 0, 1),
        "read-start": lambda e, count: e.read(A, Component.KV, 0, count, 2),
        "read-stop": lambda e, count: e.read(A, Component.KV, 0, 0, count),
    }.items()
}


# what the optimized engine refuses besides, by its type alone
REFUSED_KINDS: dict[str, Callable[[Engine], object]] = {
    f"rows-{name}-{kind}": lambda e, name=name, change=change: e.decode(
        [A], [0], spoilt(name, change)
    )
    for name in ("kv", "key", "gate", "state")
    for kind, change in {
        "none": lambda _: None,
        "list": torch.Tensor.tolist,
        "array": torch.Tensor.numpy,
        "meta": lambda tensor: tensor.to("meta"),
        "sparse": torch.Tensor.to_sparse,
    }.items()
}
REFUSED_KINDS |= {
    f"{call}-{request!r}": lambda e, use=use, request=request: use(e, request)
    for request in (None, "a", [1], 1.0, True)
    for call, use in {
        "submit": lambda e, request: e.submit(request, [1]),
        "decode": lambda e, request: e.decode([request], [0], ONE_ROW),
        "abort": lambda e, request: e.abort(request),
    }.items()
}
REFUSED_KINDS |= {
    f"{call}-{component!r}": lambda e, use=use, component=component: use(e, component)
    for component in (None, "bogus", "kv", "hot")
    for call, use in {
        "read": lambda e, component: e.read(A, component, 0, 0, 1),
        "raw": lambda e, component: e.raw(component, 0),
    }.items()
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_an_invalid_call_says_why_and_changes_nothing(
    engine: Engine, call: Callable[[Engine], object]
) -> None:
    check_refused(engine, call)


@pytest.mark.parametrize("call", REFUSED_KINDS.values(), ids=REFUSED_KINDS)
def test_an_argument_of_another_kind_is_refused(call: Callable[[Engine], object]) -> None:
    check_refused(build("optimized"), call)


def check_refused(engine: Engine, call: Callable[[Engine], object]) -> None:
    start(engine, A)
    engine.submit(B, PROMPT[::-1])
    start(engine, C, PROMPT[5:] + PROMPT[:5])
    verify(engine, C, (7, 8))
    before = state_of(engine)
    with pytest.raises(InvalidCall, match=r"^[^.]+\.$"):
        call(engine)
    after = state_of(engine)
    assert after.snapshot == before.snapshot
    assert all(map(torch.equal, after.buffers, before.buffers))


INTEGERS = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]


@pytest.mark.parametrize("kind", [list, tuple, *INTEGERS], ids=str)
def test_tokens_may_be_lists_tuples_and_arrays_of_any_integer(engine: Engine, kind: Any) -> None:
    def of(*tokens: int) -> Any:
        return np.array(tokens, dtype=kind) if isinstance(kind, np.dtype) else kind(tokens)

    engine.submit(A, of(*PROMPT))
    prefill(engine, A, PROMPT, np.int32(len(PROMPT)))
    decode(engine, [A], of(30))
    verify(engine, A, of(60, 61))
    engine.accept(A, np.uint8(1))
    left = engine.retract(A)
    assert left == (*PROMPT, 30, 60)
    assert {type(token) for token in left} == {int}


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
@pytest.mark.parametrize("name", SYSTEMS)
def test_counts_may_be_integers_of_numpy(name: str, kind: Any) -> None:
    """At the end of the narrowest type's range, where one more would overflow."""
    narrow, long = np.dtype(kind).type, list(range(127))
    options = dataclasses.replace(OPTIONS, pages=40, state_slots=40)
    engine = load(name).factory(GEOMETRY, SHAPE, options)
    for request in (A, B):
        engine.submit(request, [int(request), *long[1:]])
    given = rows(long, long, GEOMETRY.state_positions(0, 127))
    engine.extend(
        [
            Chunk(request=A, stop=narrow(127), rows=given, outputs_from=narrow(126)),
            Chunk(request=B, stop=127, rows=given, outputs_from=126),
        ]
    )
    views = engine.inspect().requests
    assert {type(view.length) for view in views.values()} == {int}
    assert all(map(torch.equal, rows_of(engine, A), rows_of(engine, B)))
    part = engine.read(A, Component.KV, narrow(1), narrow(100), narrow(127))
    assert torch.equal(part, engine.read(B, Component.KV, 1, 100, 127))
    assert engine.evict(narrow(127)) == 0


@pytest.mark.parametrize("token", [-1, SHAPE.vocab, 2**40])
@pytest.mark.parametrize("name", SYSTEMS)
def test_a_model_refuses_what_is_not_in_its_vocabulary(name: str, token: int) -> None:
    """In each call that takes tokens; the ids at its ends are taken, and a stamped run, which
    looks nothing up, takes any."""
    engine = build(name, random_weights(SHAPE, GEOMETRY, 0))
    ends = [0, SHAPE.vocab - 1]
    engine.submit(A, ends)
    engine.extend([Chunk(request=A, stop=2)])
    before = state_of(engine)
    calls: list[Callable[[], object]] = [
        lambda: engine.submit(B, [0, token]),
        lambda: engine.decode([A], np.array([token])),
        lambda: engine.verify([Drafts(request=A, tokens=[0, token])]),
    ]
    for call in calls:
        with pytest.raises(InvalidCall, match=rf"give [^.]+ from 0 to {SHAPE.vocab - 1}\.$"):
            call()
    after = state_of(engine)
    assert after.snapshot == before.snapshot
    assert all(map(torch.equal, after.buffers, before.buffers))
    engine.decode([A], ends[1:])
    engine.verify([Drafts(request=A, tokens=ends)])
    engine.accept(A, 2)
    assert engine.retract(A) == (*ends, ends[1], *ends)
    assert build(name).submit(A, [0, token]).hit == 0


def fill(given: Rows) -> None:
    for name in ("kv", "key", "gate", "state"):
        getattr(given, name).fill_(9)


def test_what_the_caller_hands_in_stays_the_callers(engine: Engine) -> None:
    """Rows and tokens overwritten after each call change nothing that the engine keeps, drafts
    that wait included."""
    untouched = build("reference")
    start(untouched, A)
    decode(untouched, [A], [30])
    verify(untouched, A, [60, 61])
    untouched.accept(A, 2)

    tokens, given = np.array(PROMPT), rows(PROMPT, range(20), [8, 16, 20])
    engine.submit(A, tokens)
    tokens[:] = 9
    engine.extend([Chunk(request=A, stop=20, rows=given)])
    fill(given)
    token, given = np.array([30]), rows([30], [20], [21])
    engine.decode([A], token, given)
    token[:] = 9
    fill(given)
    asked, given = np.array([60, 61]), rows([60, 61], [21, 22], [22, 23])
    engine.verify([Drafts(request=A, tokens=asked, rows=given)])
    asked[:] = 9
    fill(given)
    engine.accept(A, 2)
    assert all(map(torch.equal, rows_of(engine, A), rows_of(untouched, A)))
    assert engine.retract(A) == untouched.retract(A)


def test_gradients_stay_outside() -> None:
    """Tensors that record them are stored as others are, and the pools record none."""

    def recording(given: Rows) -> Rows:
        names = ("kv", "key", "gate", "state")
        return dataclasses.replace(
            given, **{name: torch.nn.Parameter(getattr(given, name)) for name in names}
        )

    untouched = build("optimized")
    ape = torch.zeros(len(SHAPE.dsa_layers), GEOMETRY.kpool, SHAPE.index_dim)
    options = dataclasses.replace(OPTIONS, ape=torch.nn.Parameter(ape))
    engine = load("optimized").factory(GEOMETRY, SHAPE, options)
    for each, change in ((untouched, lambda given: given), (engine, recording)):
        each.submit(A, PROMPT)
        prompt = change(rows(PROMPT, range(20), [8, 16, 20]))
        each.extend([Chunk(request=A, stop=20, rows=prompt)])
        each.decode([A], [30], change(rows([30], [20], [21])))
        drafted = change(rows([60, 61], [21, 22], [22, 23]))
        each.verify([Drafts(request=A, tokens=[60, 61], rows=drafted)])
        each.accept(A, 1)
    buffers = state_of(engine).buffers
    assert not any(buffer.requires_grad for buffer in buffers)
    assert all(map(torch.equal, buffers, state_of(untouched).buffers))


@pytest.mark.parametrize("name", SYSTEMS)
def test_position_weights_are_copied(name: str) -> None:
    ape = torch.zeros(len(SHAPE.dsa_layers), GEOMETRY.kpool, SHAPE.index_dim)
    options = dataclasses.replace(OPTIONS, ape=ape)
    engine = load(name).factory(GEOMETRY, SHAPE, options)
    ape[:, 0] = 500
    untouched = build(name)
    for each in (engine, untouched):
        start(each, A)
    assert all(map(torch.equal, rows_of(engine, A), rows_of(untouched, A)))


@pytest.mark.parametrize("payload", ["stamped", "model"])
@pytest.mark.parametrize("name", SYSTEMS)
def test_what_a_call_returns_is_the_callers(name: str, payload: str) -> None:
    """Overwriting it changes neither what is read later nor a later step's output."""
    engine = build(name, random_weights(SHAPE, GEOMETRY, 0) if payload == "model" else None)
    stamped = rows(PROMPT, range(20), [8, 16, 20]) if payload == "stamped" else None

    def whole() -> list[torch.Tensor]:
        engine.submit(A, PROMPT)
        (out,) = engine.extend([Chunk(request=A, stop=20, rows=stamped)])
        return [out.selected, out.logits, *rows_of(engine, A)]

    first = whole()
    kept = [tensor.clone() for tensor in first]
    for tensor in first:
        tensor.fill_(9)
    assert all(map(torch.equal, rows_of(engine, A), kept[2:]))
    engine.abort(A)
    engine.evict(OPTIONS.pages)
    assert all(map(torch.equal, whole(), kept))
