"""KDA: a decode step, and prompts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.bench.stage import DEVICE_RATE, Point, Stage, relative_error, sets
from optimized.kernels import kda_prefill
from optimized.kernels.kda_decode import kda_decode

HEADS, DIM, CHUNK = 16, 128, 64


def inputs(rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """q, k, v, decay and beta of `rows` tokens, as a layer makes them: keys of norm 1."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    q, k = (F.normalize(normal(rows, HEADS, DIM), dim=-1) for _ in range(2))
    decay = torch.exp(-F.softplus(normal(rows, HEADS, DIM)))
    return q * DIM**-0.5, k, normal(rows, HEADS, DIM), decay, normal(rows, HEADS).sigmoid()


def decode_stage(point: Point, generator: torch.Generator) -> Stage:
    moved = 2 * point.batch * HEADS * DIM * DIM * 4
    count = sets(moved)
    states = [
        torch.randn(point.batch + 1, HEADS, DIM, DIM, device="cuda", generator=generator)
        for _ in range(count)
    ]
    slots = torch.randperm(point.batch, device="cuda", generator=generator) + 1
    rows = inputs(point.batch, generator)

    out = torch.full_like(rows[2], math.nan)

    def launch(state: Tensor) -> Tensor:
        return kda_decode(state, slots, *rows, out=out, backend="triton")

    def error() -> float:
        before = states[0][slots[0]].double()
        out = launch(states[0])[0]
        first = (x[:1].double() for x in rows)
        (read,), state = recurred(*first, state=before)
        return max(relative_error(out, read), relative_error(states[0][slots[0]], state))

    return Stage(
        at=point.name,
        floor_us=moved / DEVICE_RATE,
        target_us={"A": 26, "B": 5.5}[point.name],
        bytes=moved,
        launches=[lambda state=state: launch(state) for state in states],
        error=error,
    )


def prefill_stage(
    tokens: int, sequences: int, target_us: float, generator: torch.Generator
) -> Stage:
    """Prompts of equal length, in bfloat16, from empty states."""
    q, k, v, decay, beta = inputs(tokens, generator)
    rows = (*(x.bfloat16() for x in (q, k, v, decay)), beta)
    state = torch.zeros(sequences + 1, HEADS, DIM, DIM, device="cuda")
    slots = torch.arange(sequences, device="cuda") + 1
    ends = torch.arange(sequences + 1, device="cuda") * (tokens // sequences)
    starts = torch.zeros(sequences, dtype=torch.int64, device="cuda")
    out = torch.full_like(rows[2], math.nan)
    memory = kda_prefill.workspace(
        tokens=tokens,
        sequences=sequences,
        heads=HEADS,
        key=DIM,
        value=DIM,
        chunk=CHUNK,
        precision="bf16",
        device="cuda",
    )

    def launch() -> None:
        kda_prefill.kda_prefill(
            state, slots, *rows, ends, starts, out=out, memory=memory, backend="triton"
        )

    def error() -> float:
        """Of the first sequence."""
        state.zero_()
        launch()
        length = tokens // sequences
        first = [x[:length].double() for x in rows]
        should, final = recurred(*first, state=torch.zeros_like(state[1]).double())
        return max(relative_error(out[:length], should), relative_error(state[1], final))

    # each row is read once and written once, in the formats of a server's activations
    moved = tokens * HEADS * DIM * 5 * 2 + 2 * sequences * HEADS * DIM * DIM * 4
    return Stage(
        at=f"T={tokens}, N={sequences}",
        floor_us=moved / DEVICE_RATE,
        target_us=target_us,
        bytes=moved,
        launches=[launch],
        error=error,
    )


def recurred(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, *, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [tokens, heads, value] and the last state, token by token."""
    outs = []
    for token in range(len(q)):
        state = state * decay[token][..., None]
        correction = (v[token] - torch.einsum("hk,hkv->hv", k[token], state)) * beta[token][:, None]
        state = state + k[token][..., None] * correction[:, None]
        outs.append(torch.einsum("hk,hkv->hv", q[token], state))
    return torch.stack(outs), state
