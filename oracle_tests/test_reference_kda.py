"""KDA against the formulas of docs/model.md in high precision, and its state."""

from __future__ import annotations

import mpmath as mp
import pytest
import torch

from reference import kda
from reference.geometry import Geometry, ModelShape
from reference.model import layer_weights
from reference.weights import random_weights

SHAPE = ModelShape(
    layers=1, dsa_period=2, vocab=11, hidden=12, kda_heads=2, kda_key_dim=3, kda_value_dim=4
)


@pytest.fixture(scope="module")
def w() -> dict[str, torch.Tensor]:
    return layer_weights(random_weights(SHAPE, Geometry(), 0), 0, torch.float64)


@pytest.fixture(scope="module")
def y() -> torch.Tensor:
    return torch.randn(9, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def silu(x: mp.mpf) -> mp.mpf:
    return x / (1 + mp.exp(-x))


def exact_layer(y: torch.Tensor, w: dict[str, torch.Tensor]) -> list[list[float]]:
    """docs/model.md, one number at a time."""
    m = {name: mp.matrix(value.tolist()) for name, value in w.items()}
    inputs = [mp.matrix(row) for row in y.tolist()]
    heads, dk, dv, width = 2, 3, 4, SHAPE.conv_width
    state = [mp.zeros(dk, dv) for _ in range(heads)]
    mixes = []
    for t, row in enumerate(inputs):
        c = {}
        for name, size in (("q", heads * dk), ("k", heads * dk), ("v", heads * dv)):
            u = {s: m[f"w{name}"] * inputs[s] for s in range(max(0, t - width + 1), t + 1)}
            c[name] = [
                silu(sum(m[f"conv_{name}"][i, width - 1 - (t - s)] * u[s][i] for s in u))
                for i in range(size)
            ]
        f, b, g = m["wf"] * row, m["wb"] * row, m["wg"] * row
        gated = []
        for h in range(heads):
            q, k = (
                mp.matrix(c["q"][h * dk : (h + 1) * dk]),
                mp.matrix(c["k"][h * dk : (h + 1) * dk]),
            )
            q /= mp.sqrt(sum(x**2 for x in q) + mp.mpf(1e-6)) * mp.sqrt(dk)
            k /= mp.sqrt(sum(x**2 for x in k) + mp.mpf(1e-6))
            v = mp.matrix(c["v"][h * dv : (h + 1) * dv])
            for i in range(dk):
                soft = mp.log(1 + mp.exp(f[h * dk + i] + m["dt_bias"][h * dk + i]))
                state[h][i, :] *= mp.exp(-mp.exp(m["a_log"][h]) * soft)
            state[h] += k * (v - state[h].T * k).T / (1 + mp.exp(-b[h]))
            out = state[h].T * q
            gated += [out[i] / (1 + mp.exp(-g[h * dv + i])) for i in range(dv)]
        mixes.append([float(x) for x in m["wo"] * mp.matrix(gated)])
    return mixes


def test_layer_from_the_formulas(y: torch.Tensor, w: dict[str, torch.Tensor]) -> None:
    mix, _ = kda.kda(y, w, SHAPE)
    with mp.workdps(40):
        exact = exact_layer(y, w)
    torch.testing.assert_close(
        mix, torch.tensor(exact, dtype=torch.float64), rtol=1e-12, atol=1e-13
    )


def test_state_of_a_prefix_is_that_of_the_prefix_alone(
    y: torch.Tensor, w: dict[str, torch.Tensor]
) -> None:
    mix, states = kda.kda(y, w, SHAPE, (0, 2, 5, 9))
    for length, state in states.items():
        part, alone = kda.kda(y[:length], w, SHAPE, (length,))
        torch.testing.assert_close(alone[length], state, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(part, mix[:length], rtol=1e-12, atol=1e-13)
        assert state.shape == (SHAPE.state_width,)


def test_state_layout(y: torch.Tensor, w: dict[str, torch.Tensor]) -> None:
    _, states = kda.kda(y, w, SHAPE, (0, 2, 9))
    u = kda.convolution_inputs(y, w)
    window = {n: s[2 * 3 * 4 :].view(3, SHAPE.conv_channels) for n, s in states.items()}
    assert torch.equal(window[9], u[6:9])
    assert torch.equal(window[2], torch.cat([torch.zeros(1, u.shape[1]), u[:2]]))
    assert not states[0].any()
