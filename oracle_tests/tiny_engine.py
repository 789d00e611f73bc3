"""A small optimized engine, and rows to feed it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from reference.contract import Chunk, Engine, EngineOptions, RequestId, Rows, Weights
from reference.geometry import Geometry, ModelShape
from systems import load

GEOMETRY = Geometry(
    kpool=2, physical_page_size=4, topk=8, mamba_track_interval=8, max_drafts=3, round_scale=True
)
SHAPE = ModelShape(
    layers=4,
    dsa_period=2,
    vocab=64,
    hidden=32,
    heads=2,
    latent=16,
    q_lora=16,
    index_heads=2,
    index_dim=16,
    kda_heads=2,
    kda_key_dim=4,
    kda_value_dim=8,
    conv_width=4,
)


def build(
    *,
    geometry: Geometry = GEOMETRY,
    shape: ModelShape = SHAPE,
    weights: Weights | None = None,
    **options: Any,
) -> Engine:
    """The optimized engine; `options` override those of a roomy one."""
    sizes = {"pages": 64, "state_slots": 64, "max_requests": 6} | options
    return load("optimized").factory(geometry, shape, EngineOptions(**sizes), weights)


def rows(positions: int, states: int, *, seed: int = 0) -> Rows:
    """Random rows for so many positions and states."""
    draw = torch.Generator().manual_seed(seed)
    dsa, kda = len(SHAPE.dsa_layers), len(SHAPE.kda_layers)
    return Rows(
        kv=torch.randn(dsa, positions, SHAPE.latent, generator=draw),
        key=torch.randn(dsa, positions, SHAPE.index_dim, generator=draw),
        gate=torch.randn(dsa, positions, SHAPE.index_dim, generator=draw),
        state=torch.randn(states, kda, SHAPE.state_width, generator=draw),
    )


def chunk(engine: Engine, request: RequestId, stop: int) -> Chunk:
    """The chunk up to `stop` of a stamped engine, whose rows depend on the positions alone: as
    if all requests had the same tokens."""
    start = engine.inspect().requests[request].length
    states = engine.geometry.state_positions(start, stop)
    every = rows(stop, stop + 1)
    return Chunk(
        request=request,
        stop=stop,
        rows=Rows(
            kv=every.kv[:, start:],
            key=every.key[:, start:],
            gate=every.gate[:, start:],
            state=every.state[list(states)],
        ),
    )


def prefill(engine: Engine, request: RequestId, tokens: Sequence[int]) -> int:
    """Admit and prefill a stamped request; returns its hit."""
    hit = engine.submit(request, tokens).hit
    engine.extend([chunk(engine, request, len(tokens))])
    return hit
