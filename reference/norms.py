"""The two norms of docs/model.md, over the last axis."""

from __future__ import annotations

from torch import Tensor

EPSILON = 1e-6


def rms(x: Tensor, gain: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + 1e-6) * gain."""
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * gain


def layernorm(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-6) * gain + bias, with the biased variance."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + EPSILON).sqrt() * gain + bias
