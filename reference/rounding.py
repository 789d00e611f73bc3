"""Running error analysis: a float64 value, and how far a float32 engine's is likely to be off.

Every entry carries the deviation of its error under the usual model of rounding: errors of
different operations are independent, of mean zero and at most u = 2**-24 relative (Higham and
Mary, "A new approach to probabilistic rounding error analysis", 2019).  First-order
propagation then adds in squares, and by Hoeffding's inequality an error exceeds LAMBDA
deviations with a chance below 2 exp(-LAMBDA^2 / 2).  The worst-case bound in place of this
doubles or worse at each layer and says nothing after a few; the price is that errors which a
shared ancestor correlates are taken for independent, and LAMBDA is chosen to leave room for
that: the ratio of error to bound is published for clean engines, and has to stay well below 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

U = 2.0**-24
LAMBDA = 16.0
ELEMENTARY = 4 * U
"""Granted to an elementary function besides the rounding of its argument: a GPU's are fast."""
UNDERFLOW = 2.0**-120
"""Granted to every entry: float32 results may be flushed to zero."""

Elementwise = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Approx:
    """Fields: mid, what the reference computes; dev, the deviation of each entry's error."""

    mid: Tensor
    dev: Tensor

    @classmethod
    def exact(cls, mid: Tensor) -> Approx:
        return cls(mid, torch.zeros_like(mid))

    @classmethod
    def within(cls, mid: Tensor, bound: Tensor) -> Approx:
        """For an error that is 0 or `bound`, by a rounding that may have gone the other way.
        Counted twice, since where several of them meet they need not cancel."""
        return cls(mid, 2 * bound / LAMBDA)

    def __getitem__(self, key: slice | Tensor | tuple[slice, slice]) -> Approx:
        return Approx(self.mid[key], self.dev[key])

    @property
    def bound(self) -> Tensor:
        """What the error of each entry may be."""
        return LAMBDA * self.dev

    @property
    def size(self) -> Tensor:
        """The largest size of each entry."""
        return self.mid.abs() + self.bound

    def view(self, *shape: int) -> Approx:
        return Approx(self.mid.reshape(shape), self.dev.reshape(shape))

    def flatten(self) -> Approx:
        """[n, heads, d] -> [n, heads * d]."""
        return Approx(self.mid.flatten(1), self.dev.flatten(1))


def concat(parts: list[Approx], dim: int = 0) -> Approx:
    return Approx(torch.cat([x.mid for x in parts], dim), torch.cat([x.dev for x in parts], dim))


def root_sum(*terms: Tensor) -> Tensor:
    """Deviation of a sum of independent errors."""
    total = torch.zeros_like(terms[0])
    for term in terms:
        total = total + term.square()
    return total.sqrt() + UNDERFLOW


def dot_variance(products: Tensor, total: Tensor, n: int) -> Tensor:
    """Variance of the rounding of a sum of n products, in any order, from the sum of their
    squares and the sum itself: partial sums are as large as a random walk, or the total."""
    return (n + 2) * U**2 * (products + total.square())


def add(x: Approx, y: Approx) -> Approx:
    mid = x.mid + y.mid
    return Approx(mid, root_sum(x.dev, y.dev, U * mid))


def scale(x: Approx, gain: Tensor | float) -> Approx:
    """x * gain, for an exact gain."""
    mid = x.mid * gain
    return Approx(mid, root_sum(x.dev * gain, 2 * U * mid))


def multiply(x: Approx, y: Approx) -> Approx:
    """Entry by entry."""
    mid = x.mid * y.mid
    dev = root_sum(x.mid * y.dev, y.mid * x.dev, x.dev * y.dev * LAMBDA, 2 * U * mid)
    return Approx(mid, dev)


def linear(x: Approx, weight: Tensor) -> Approx:
    """x @ weight.T for x [n, in] and weight [out, in]."""
    n = weight.shape[-1]
    mid = x.mid @ weight.T
    squares = weight.square().T
    variance = x.dev.square() @ squares + dot_variance(x.mid.square() @ squares, mid, n)
    return Approx(mid, variance.sqrt() + UNDERFLOW)


def smooth(x: Approx, f: Elementwise, slope: Elementwise, *, bend: float) -> Approx:
    """f(x) entry by entry, where |f''| <= bend everywhere."""
    mid = f(x.mid)
    steep = slope(x.mid).abs() + bend / 2 * x.bound
    return Approx(mid, root_sum(steep * x.dev, (ELEMENTARY + 2 * U * x.mid.abs()) * mid))


def sigmoid(x: Approx) -> Approx:
    return smooth(x, torch.sigmoid, lambda z: torch.sigmoid(z) * torch.sigmoid(-z), bend=0.1)


def silu(x: Approx) -> Approx:
    def slope(z: Tensor) -> Tensor:
        return torch.sigmoid(z) * (1 + z * torch.sigmoid(-z))

    return smooth(x, torch.nn.functional.silu, slope, bend=0.5)


def softplus(x: Approx) -> Approx:
    y = smooth(x, torch.nn.functional.softplus, torch.sigmoid, bend=0.25)
    # 1 + exp(x) may have been rounded
    return Approx(y.mid, root_sum(y.dev, torch.full_like(y.dev, U)))


def decay_exp(x: Approx) -> Approx:
    """exp(x) for x <= 0."""
    return smooth(x, torch.exp, torch.exp, bend=1.0)


def unit(x: Approx, epsilon: float) -> Approx:
    """x / sqrt(sum x^2 + epsilon)."""
    root = (x.mid.square().sum(-1, keepdim=True) + epsilon).sqrt()
    mid = x.mid / root
    of_root = (mid * x.dev).norm(dim=-1, keepdim=True) / root
    own = U * x.mid.shape[-1] ** 0.5 + ELEMENTARY
    return Approx(mid, root_sum(x.dev / root, mid * of_root, own * mid))


def rms(x: Approx, gain: Tensor, epsilon: float) -> Approx:
    width = x.mid.shape[-1]
    return scale(unit(x, width * epsilon), gain * width**0.5)


def layernorm(x: Approx, gain: Tensor, bias: Tensor, epsilon: float) -> Approx:
    width = x.mid.shape[-1]
    mid = x.mid - x.mid.mean(-1, keepdim=True)
    of_mean = x.dev.norm(dim=-1, keepdim=True) / width
    own = U * x.mid.square().mean(-1, keepdim=True).sqrt()
    dev = root_sum(x.dev, of_mean.expand_as(mid), own.expand_as(mid), U * mid)
    return add(rms(Approx(mid, dev), gain, epsilon), Approx.exact(bias.expand_as(mid)))


def rounded(x: Approx, rounding: Elementwise) -> Approx:
    """x after a rounding to a coarse grid, at both ends: an entry near no boundary is exact."""
    mid = rounding(x.mid)
    up, down = rounding(x.mid + x.bound) - mid, mid - rounding(x.mid - x.bound)
    return Approx.within(mid, torch.maximum(up, down))
