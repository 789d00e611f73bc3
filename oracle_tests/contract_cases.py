"""Stamped engines of both kinds, calls that are legal on them, and all that they show."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from reference import contract
from reference.contract import (
    Capability,
    Chunk,
    Component,
    Drafts,
    Engine,
    EngineOptions,
    RequestId,
    Rows,
    Weights,
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
A, B, C, NOBODY = RequestId(1), RequestId(2), RequestId(3), RequestId(99)
PROMPT = tuple(range(20))


def build(name: str, weights: Weights | None = None) -> Engine:
    return load(name).factory(GEOMETRY, SHAPE, OPTIONS, weights)


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
    stamped = rows([int(t) for t in tokens], lengths, [n + 1 for n in lengths])
    engine.decode(requests, tokens, stamped)


def verify(engine: Engine, request: RequestId, tokens: Sequence[int]) -> None:
    length = engine.inspect().requests[request].length
    positions = range(length, length + len(tokens))
    stamped = rows([int(t) for t in tokens], positions, [p + 1 for p in positions])
    engine.verify([Drafts(request=request, tokens=tokens, rows=stamped)])


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
        stored = [c for c in Component if c is not Component.HOT]
        buffers = [engine.raw(c, n).clone() for c in stored for n in range(layers_of(c))]
    else:
        idle = [r for r, view in snapshot.requests.items() if view.length and not view.pending]
        buffers = [row for r in idle for row in rows_of(engine, r)]
    return State(snapshot, buffers)
