"""What the contract promises, of every engine of ours: same signatures, same refusals, same rows.

Each call that is refused must leave the engine as it was, and both engines must store the same
bytes for the same stamped calls: the exact oracle at its smallest.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from reference import contract
from reference.contract import (
    Capability,
    Chunk,
    Component,
    ContractError,
    Drafts,
    Engine,
    EngineOptions,
    InvalidCall,
    OutOfMemory,
    RequestId,
    Rows,
)
from reference.geometry import Geometry, ModelShape
from systems import load

GEOMETRY = Geometry(
    kpool=2, physical_page_size=4, topk=8, mamba_track_interval=8, max_drafts=3, round_scale=True
)
SHAPE = ModelShape(
    layers=4,
    dsa_period=2,
    vocab=64,
    hidden=16,
    heads=2,
    latent=16,
    q_lora=8,
    index_heads=2,
    index_dim=16,
    kda_heads=1,
    kda_key_dim=4,
    kda_value_dim=4,
    conv_width=2,
)
OPTIONS = EngineOptions(pages=12, state_slots=16, max_requests=4)
SYSTEMS = ("reference", "optimized")
A, B, NOBODY = RequestId(1), RequestId(2), RequestId(99)
PROMPT = tuple(range(20))


def build(name: str) -> Engine:
    return load(name).factory(GEOMETRY, SHAPE, OPTIONS)


@pytest.fixture(params=SYSTEMS)
def engine(request: pytest.FixtureRequest) -> Engine:
    return build(request.param)


def numbered(
    layers: int, tokens: Sequence[int], positions: Sequence[int], width: int
) -> torch.Tensor:
    """[layers, n, width]: whole numbers below 128 that token, position and layer decide."""
    seed = torch.tensor([31 * t + 7 * p for t, p in zip(tokens, positions, strict=True)])
    spread = torch.arange(layers)[:, None, None] * 13 + torch.arange(width) * 5
    return ((seed[None, :, None] + spread) % 127).float()


def rows(tokens: Sequence[int], positions: Sequence[int], states: Sequence[int]) -> Rows:
    """Rows of `tokens` at `positions`; `states` are the lengths whose state is handed in.  Gates
    are equal or far apart, so that float32 pools exactly what float64 pools."""
    dsa, kda = len(SHAPE.dsa_layers), len(SHAPE.kda_layers)
    state = numbered(kda, states, states, SHAPE.state_width)
    return Rows(
        kv=numbered(dsa, tokens, positions, SHAPE.latent),
        key=numbered(dsa, tokens, positions, SHAPE.index_dim) - 64,
        gate=numbered(dsa, tokens, positions, SHAPE.index_dim) % 2 * 128,
        state=state.transpose(0, 1).contiguous(),
    )


def prefill(engine: Engine, request: RequestId, tokens: Sequence[int], stop: int) -> None:
    start = engine.inspect().requests[request].length
    stamped = rows(tokens[start:stop], range(start, stop), GEOMETRY.state_positions(start, stop))
    engine.extend([Chunk(request=request, stop=stop, rows=stamped)])


def start(engine: Engine, request: RequestId, tokens: Sequence[int] = PROMPT) -> int:
    """Admit and prefill all of `tokens`; returns the hit."""
    hit = engine.submit(request, tokens).hit
    prefill(engine, request, tokens, len(tokens))
    return hit


def decode(engine: Engine, requests: Sequence[RequestId], tokens: Sequence[int]) -> None:
    lengths = [engine.inspect().requests[r].length for r in requests]
    engine.decode(requests, tokens, rows(tokens, lengths, [n + 1 for n in lengths]))


def verify(engine: Engine, request: RequestId, tokens: Sequence[int]) -> None:
    length = engine.inspect().requests[request].length
    positions = range(length, length + len(tokens))
    stamped = rows(tokens, positions, [p + 1 for p in positions])
    engine.verify([Drafts(request=request, tokens=tokens, rows=stamped)])


def test_messages_are_frozen_slotted_and_keyword_only() -> None:
    ours = [c for c in vars(contract).values() if inspect.isclass(c)]
    messages = [
        c for c in ours if dataclasses.is_dataclass(c) and c.__module__ == contract.__name__
    ]
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


def test_the_contract_depends_on_torch_and_geometry_alone() -> None:
    """Foreign engines implement the contract: it may drag nothing of ours along."""
    tree = ast.parse(Path(contract.__file__).read_text())
    modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    modules |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    standard = {"__future__", "collections.abc", "dataclasses", "enum", "typing"}
    assert modules - standard == {"torch", "reference.geometry"}


METHODS = [
    name for name in vars(Engine) if not name.startswith("_") and callable(vars(Engine)[name])
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


def chunk(request: RequestId, stop: int) -> Chunk:
    return Chunk(request=request, stop=stop, rows=rows([0], [0], [1]))


def drafts(request: RequestId, count: int) -> Drafts:
    taken = range(count)
    return Drafts(request=request, tokens=taken, rows=rows(taken, taken, taken))


# on an engine where A is prefilled, B is admitted and C waits for `accept` with two drafts
C = RequestId(3)
REFUSED: dict[str, Callable[[Engine], object]] = {
    "submit-twice": lambda e: e.submit(A, PROMPT),
    "extend-unknown": lambda e: e.extend([chunk(NOBODY, 1)]),
    "extend-backwards": lambda e: e.extend([chunk(A, len(PROMPT) - 1)]),
    "extend-good-then-unknown": lambda e: e.extend([chunk(B, 1), chunk(NOBODY, 1)]),
    "extend-while-pending": lambda e: e.extend([chunk(C, len(PROMPT) + 1)]),
    "decode-unknown": lambda e: e.decode([A, NOBODY], [0, 0], rows([0, 0], [20, 0], [21, 1])),
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


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_an_invalid_call_says_why_and_changes_nothing(
    engine: Engine, call: Callable[[Engine], object]
) -> None:
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


@dataclasses.dataclass(frozen=True)
class State:
    """All that can be seen of an engine: its snapshot, and its buffers or running rows."""

    snapshot: contract.Snapshot
    buffers: list[torch.Tensor]


def layers_of(component: Component) -> int:
    return len(SHAPE.kda_layers if component is Component.STATE else SHAPE.dsa_layers)


def rows_of(engine: Engine, request: RequestId) -> list[torch.Tensor]:
    """All readable rows of a request, by the engine's own read path."""
    length = engine.inspect().requests[request].length
    closed = length // GEOMETRY.kpool
    spans = {
        Component.KV: (0, length),
        Component.INDEX: (0, closed),
        Component.TAIL: (closed * GEOMETRY.kpool, length),
        Component.STATE: (0, 1),
    }
    return [
        engine.read(request, component, layer, first, last)
        for component, (first, last) in spans.items()
        for layer in range(layers_of(component))
    ]


def state_of(engine: Engine) -> State:
    snapshot = engine.inspect()
    if Capability.RAW in engine.capabilities:
        buffers = [engine.raw(c, n).clone() for c in Component for n in range(layers_of(c))]
    else:
        idle = [r for r, view in snapshot.requests.items() if view.length and not view.pending]
        buffers = [row for r in idle for row in rows_of(engine, r)]
    return State(snapshot, buffers)


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
