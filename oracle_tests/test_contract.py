"""What the contract promises, of every engine of ours: same signatures, same lives, same rows.

Both engines must store the same bytes for the same stamped calls: the exact oracle at its
smallest.  What they refuse and what they copy is in test_contract_inputs.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path
from types import ModuleType

import pytest
import torch

from oracle_tests.contract_cases import (
    PROMPT,
    SHAPE,
    SYSTEMS,
    A,
    B,
    build,
    decode,
    layers_of,
    numbered,
    prefill,
    rows_of,
    start,
    verify,
)
from reference import contract, handover, views
from reference.contract import Component, ContractError, Engine, InvalidCall, OutOfMemory


@pytest.fixture(params=SYSTEMS)
def engine(request: pytest.FixtureRequest) -> Engine:
    return build(request.param)


def test_messages_are_frozen_slotted_and_keyword_only() -> None:
    ours = [c for c in vars(contract).values() if inspect.isclass(c)]
    modules = {contract.__name__, handover.__name__, views.__name__}
    messages = [c for c in ours if dataclasses.is_dataclass(c) and c.__module__ in modules]
    assert {c.__name__ for c in messages} >= {
        "Rows",
        "Chunk",
        "Snapshot",
        "EngineOptions",
        "System",
    }
    for cls in messages:
        assert vars(cls)["__dataclass_params__"].frozen, cls.__name__
        assert "__slots__" in vars(cls), cls.__name__
        kinds = {p.kind for p in inspect.signature(cls).parameters.values()}
        assert kinds == {inspect.Parameter.KEYWORD_ONLY}, cls.__name__


def test_the_contract_depends_on_tensors_and_geometry_alone() -> None:
    """Foreign engines implement the contract: it may drag nothing of ours along."""
    standard = {"__future__", "collections.abc", "dataclasses", "enum", "typing"}
    tensors = {"numpy", "numpy.typing", "torch"}
    ours = {"reference.geometry", "reference.handover", "reference.views"}
    assert _imports(contract) - standard == {"torch", *ours}
    assert _imports(handover) - standard == {*tensors, "reference.views"}
    assert _imports(views) <= standard


def _imports(module: ModuleType) -> set[str | None]:
    tree = ast.parse(Path(inspect.getfile(module)).read_text())
    modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    return modules | {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}


METHODS = [
    name
    for part in (Engine, contract.Handover)
    for name in vars(part)
    if not name.startswith("_") and callable(vars(part)[name])
]


@pytest.mark.parametrize("method", METHODS)
def test_every_engine_has_the_signatures_of_the_protocol(engine: Engine, method: str) -> None:
    wanted = inspect.signature(getattr(Engine, method)).parameters.values()
    found = inspect.signature(getattr(type(engine), method)).parameters.values()
    assert [(p.name, p.kind, p.default) for p in found] == [
        (p.name, p.kind, p.default) for p in wanted
    ]


def test_refusals_have_one_base() -> None:
    assert issubclass(OutOfMemory, ContractError)
    assert issubclass(InvalidCall, ContractError)
    assert not issubclass(InvalidCall, OutOfMemory)


def test_both_engines_store_the_same_rows() -> None:
    """One life of two requests that share a prefix: prefill in chunks, decode, verify with a
    rejected draft, retract and resume; after each step every row of both is equal."""
    engines = [build(name) for name in SYSTEMS]
    fork = (*PROMPT[:18], 50, 51, 52)
    said = {A: list(PROMPT), B: list(fork)}

    def compare() -> None:
        for request, tokens in said.items():
            views = [engine.inspect().requests[request] for engine in engines]
            assert [(v.length, v.state_position) for v in views] == [(len(tokens),) * 2] * 2
            mine, theirs = (rows_of(engine, request) for engine in engines)
            assert all(map(torch.equal, mine, theirs))

    hits = []
    for engine in engines:
        engine.submit(A, PROMPT)
        for stop in (3, 5, 16, 20):
            prefill(engine, A, PROMPT, stop)
        hits.append(start(engine, B, fork))
    assert hits == [0, 16]
    compare()
    for token in (30, 31, 32):
        for engine in engines:
            decode(engine, [A, B], [token, token + 10])
        said[A].append(token)
        said[B].append(token + 10)
        compare()
    for engine in engines:
        verify(engine, A, (60, 61, 62))
        assert engine.inspect().requests[A].pending == 3
        engine.accept(A, 1)
    said[A].append(60)
    compare()
    for engine in engines:
        decode(engine, [A, B], [33, 34])
    said[A].append(33)
    said[B].append(34)
    compare()
    for engine in engines:
        assert list(engine.retract(A)) == said[A]
        assert A not in engine.inspect().requests
        start(engine, A, said[A])
    compare()


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_accept_keeps_the_first_drafts_and_their_state(engine: Engine, count: int) -> None:
    start(engine, A)
    verify(engine, A, (60, 61, 62))
    engine.accept(A, count)
    view = engine.inspect().requests[A]
    assert (view.length, view.state_position, view.pending) == (20 + count, 20 + count, 0)
    # the state after the prompt was numbered by 20, that after draft i by 21 + i
    last = [20 + count]
    expected = numbered(2, last, last, SHAPE.state_width)
    for layer in range(layers_of(Component.STATE)):
        stored = engine.read(A, Component.STATE, layer, 0, 1).view(torch.float32)
        assert torch.equal(stored, expected[layer])


@pytest.mark.parametrize("leave", ["finish", "abort", "retract"])
def test_leaving_with_drafts_pending_rejects_them(engine: Engine, leave: str) -> None:
    start(engine, A)
    verify(engine, A, (60, 61))
    result = getattr(engine, leave)(A)
    assert A not in engine.inspect().requests
    if leave == "retract":
        assert tuple(result) == PROMPT
