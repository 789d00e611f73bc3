"""Kimi delta attention, strictly recurrent, with its short convolution.

Specifies the KDA layer of docs/model.md (Kimi Linear, arXiv 2510.26692): the gated delta rule
with a decay for every key channel.  The state of a prefix is the matrix S and the last
conv_width - 1 inputs of the convolution.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from reference.geometry import ModelShape
from reference.norms import EPSILON


class Steps(NamedTuple):
    """What drives the recurrence, token by token."""

    q: Tensor  # [n, heads, key]
    k: Tensor  # [n, heads, key], of norm 1
    v: Tensor  # [n, heads, value]
    a: Tensor  # [n, heads, key], decay in (0, 1)
    beta: Tensor  # [n, heads], in (0, 1)


def kda(
    y: Tensor, w: Mapping[str, Tensor], shape: ModelShape, state_at: Collection[int] = ()
) -> tuple[Tensor, dict[int, Tensor]]:
    """A whole KDA layer over n positions from the start of a request.

    Returns: mix [n, hidden], and for each prefix length of `state_at` its state, flattened
    to [state_width] as docs/model.md lays it out.
    """
    u = convolution_inputs(y, w)
    out, matrices = recur(steps(u, y, w, shape), state_at)
    gate = torch.sigmoid(y @ w["wg"].T).view_as(out)
    states = {
        length: torch.cat([matrix.flatten(), window(u, length, shape).flatten()])
        for length, matrix in matrices.items()
    }
    return (out * gate).flatten(1) @ w["wo"].T, states


def convolution_inputs(y: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    """[n, conv_channels]: u_q, u_k and u_v side by side."""
    return torch.cat([y @ w[name].T for name in ("wq", "wk", "wv")], -1)


def window(u: Tensor, length: int, shape: ModelShape) -> Tensor:
    """[conv_width - 1, conv_channels] inputs before position `length`, oldest first."""
    reach = shape.conv_width - 1
    return pad(u[max(0, length - reach) : length], (0, 0, max(0, reach - length), 0))


def convolve(u: Tensor, taps: Tensor) -> Tensor:
    """silu of the causal convolution of u [n, channels] with taps [channels, width], the
    last tap on the present input, zeros before the start."""
    width = taps.shape[1]
    padded = pad(u, (0, 0, width - 1, 0))
    total = sum((padded[j : j + len(u)] * taps[:, j] for j in range(width)), torch.zeros_like(u))
    return silu(total)


def steps(u: Tensor, y: Tensor, w: Mapping[str, Tensor], shape: ModelShape) -> Steps:
    """Queries, keys, values, decays and write strengths of n positions."""
    n, heads = len(y), shape.kda_heads
    dk, dv = shape.kda_key_dim, shape.kda_value_dim
    taps = torch.cat([w["conv_q"], w["conv_k"], w["conv_v"]])
    c_q, c_k, c_v = torch.split(convolve(u, taps), [heads * dk, heads * dk, heads * dv], -1)
    decay = softplus(y @ w["wf"].T + w["dt_bias"]).reshape(n, heads, dk)
    return Steps(
        q=_unit(c_q.reshape(n, heads, dk)) * dk**-0.5,
        k=_unit(c_k.reshape(n, heads, dk)),
        v=c_v.reshape(n, heads, dv),
        a=torch.exp(-torch.exp(w["a_log"])[:, None] * decay),
        beta=torch.sigmoid(y @ w["wb"].T),
    )


def _unit(c: Tensor) -> Tensor:
    return c / (c.square().sum(-1, keepdim=True) + EPSILON).sqrt()


def recur(steps: Steps, state_at: Collection[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
    """Run the recurrence from an empty state.

    Returns: o [n, heads, value], and the matrix [heads, key, value] after each prefix length
    of `state_at`.
    """
    n, heads, dk = steps.k.shape
    state = steps.v.new_zeros(heads, dk, steps.v.shape[-1])
    out = torch.empty_like(steps.v)
    kept = {0: state} if 0 in state_at else {}
    for t in range(n):
        state = steps.a[t, :, :, None] * state
        key = steps.k[t, :, :, None]
        wanted = steps.v[t, :, None] - key.mT @ state
        state = state + (steps.beta[t, :, None, None] * key) * wanted
        out[t] = (steps.q[t, :, None] @ state)[:, 0]
        if t + 1 in state_at:
            kept[t + 1] = state
    return out, kept
