"""How far the chunked gated delta rule is likely to be from the recurrence, counting roundings.

A running error analysis in float64 of what optimized/kernels/kda_chunks.py computes, under the
model of reference/rounding.py: each value carries the deviation of its error, each product or sum
adds its own roundings' in squares, and an error above LAMBDA deviations is none of rounding.
From one chunk to the next it is carried as the norm of each column of the state: what takes one
state's error to the next, the product of (I - beta k k^T) diag(a), lengthens none, for |k| <= 1
and beta <= 1.  Products of two errors are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from reference.kda import Steps
from reference.rounding import LAMBDA, Approx, U, add, root_sum, scale

FACTOR = {"tf32x3": 2.0**-20, "tf32": 2.0**-10, "bf16": 2.0**-8}
"""What a factor of a product on the tensor cores is rounded, or cut, by."""
LEAST = {"tf32x3": 2.0**-25, "tf32": 2.0**-25, "bf16": 2.0**-12.5}
"""The least decay that counts as itself."""
SUM = 2 * U
"""What a tensor core cuts a sum by."""


class Arithmetic(NamedTuple):
    """Fields: factor, what a product's factors are rounded by; stored, what is handed from one
    kernel to the other; least, the least decay that counts as itself."""

    factor: float
    stored: float
    least: float

    def rounded_sum(self, squares: Tensor, total: Tensor, n: int) -> Tensor:
        """Deviation of a sum of n products, from the sum of their squares and the sum itself."""
        return ((2 * self.factor**2 + (n + 2) * SUM**2) * (squares + total.square())).sqrt()

    def product(self, x: Approx, y: Approx) -> Approx:
        """x @ y."""
        x2, y2, mid = x.mid.square(), y.mid.square(), x.mid @ y.mid
        inherited = x2 @ y.dev.square() + x.dev.square() @ y2
        return Approx(mid, root_sum(inherited.sqrt(), self.rounded_sum(x2 @ y2, mid, len(y2[0]))))

    def store(self, x: Approx) -> Approx:
        return Approx(x.mid, root_sum(x.dev, self.stored * x.mid))


def arithmetic(precision: str, *, native: bool) -> Arithmetic:
    """Of the kernels, on a GPU or where all products are float32."""
    return Arithmetic(
        factor=FACTOR[precision] if native else 0.0,
        stored=FACTOR["bf16"] if precision == "bf16" else 0.0,
        least=LEAST[precision],
    )


def pieces(borders: list[int], chunk: int) -> Iterator[tuple[int, int]]:
    """The chunks of a request that passes of borders[i] to borders[i + 1] tokens take."""
    return pairwise(sorted({*borders, *range(0, borders[-1], chunk)}))


def bounds(
    steps: Steps, states: dict[int, Tensor], borders: list[int], chunk: int, kind: Arithmetic
) -> tuple[Tensor, dict[int, Tensor]]:
    """Of one request from an empty state on: bounds of the outputs' errors [n, heads, value],
    and after each piece those of the norms of the errors of the state's columns [heads, value].

    Arguments: states, the exact one [heads, key, value] at each end of a piece.
    """
    drift = torch.zeros_like(steps.v[0])
    outs, drifts = [], {}
    for start, stop in pieces(borders, chunk):
        out, state = _piece(_aligned(steps, start, stop, chunk), states[start], chunk, kind)
        reach = steps.q[start:stop].norm(dim=-1, keepdim=True)
        outs.append(root_sum(out[:, start - stop :].transpose(0, 1), reach * drift))
        drift = root_sum(drift, state.norm(dim=1))
        drifts[stop] = LAMBDA * drift
    return LAMBDA * torch.cat(outs), drifts


def _aligned(steps: Steps, start: int, stop: int, chunk: int) -> Steps:
    """Positions start to stop, each [heads, n, ...], behind the rows without a token that the
    chunk begins with."""
    lead = start % chunk
    q, k, v, a, beta = (
        torch.cat((x.new_zeros(lead, *x.shape[1:]), x[start:stop])).transpose(0, 1) for x in steps
    )
    a[:, :lead] = 1.0
    return Steps(q=q, k=k, v=v, a=a, beta=beta)


def _piece(part: Steps, state: Tensor, chunk: int, kind: Arithmetic) -> tuple[Tensor, Tensor]:
    """Deviations of a chunk's outputs [heads, n, value] and of the state after it [heads, key,
    value], as far as its own roundings cause them."""
    q, k, v, a, _ = part
    beta = part.beta[..., None]
    log = a.clamp(min=1e-300).log().cumsum(1)
    # at most a product of `chunk` decays, a quotient of two such, and two products more
    rounded = (2 * chunk + 8) ** 0.5 * U
    clamped = kind.least * (a < kind.least).any(1, keepdim=True)

    def faded(x: Tensor, fade: Tensor) -> Approx:
        return kind.store(Approx(x * fade, root_sum(rounded * x * fade, clamped * x)))

    def pairs(x: Tensor, y: Tensor, least: int) -> Approx:
        """x_t . d(s, t) y_s for s <= t - least."""
        below = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(-least)
        each = x[:, :, None] * y[:, None] * below[..., None]
        part = each * torch.exp((log[:, :, None] - log[:, None]).clamp(max=0))
        mid, squares = part.sum(-1), part.square().sum(-1)
        lost = (each * clamped[:, None]).square().sum(-1) + rounded**2 * squares
        return Approx(mid, root_sum(lost.sqrt(), kind.rounded_sum(squares, mid, x.shape[-1])))

    before, after = log.exp(), (log[:, -1:] - log).exp()
    inverse = _inverse(scale(pairs(k, k, 1), beta), kind)
    w = kind.store(kind.product(inverse, scale(faded(k, before), beta)))
    u = kind.store(kind.product(inverse, scale(Approx.exact(v), beta)))
    matrix = Approx.exact(state)
    found = kind.product(w, matrix)
    fresh = add(u, Approx(-found.mid, found.dev))
    mixed = kind.product(kind.store(pairs(q, k, 0)), fresh)
    read = add(kind.product(faded(q, before), matrix), mixed)
    whole = before[:, -1, :, None]
    lost = root_sum((rounded + U) * whole * state, clamped[:, 0, :, None] * state)
    late = faded(k, after)
    written = kind.product(Approx(late.mid.mT, late.dev.mT), fresh)
    return read.dev, add(Approx(whole * state, lost), written).dev


def _inverse(links: Approx, kind: Arithmetic) -> Approx:
    """(I + L)^-1 by doubling blocks."""
    n = links.mid.shape[-1]
    row, half = torch.arange(n), 1
    inverse = Approx.exact(torch.eye(n, dtype=torch.float64).expand_as(links.mid))
    while half < n:
        upper = (row & half) != 0
        meet = ((row[:, None] ^ row) < 2 * half) & upper[:, None] & ~upper
        between = Approx(links.mid * meet, links.dev * meet)
        between = kind.product(inverse, kind.product(between, inverse))
        inverse = add(inverse, Approx(-between.mid, between.dev))
        half *= 2
    return inverse
