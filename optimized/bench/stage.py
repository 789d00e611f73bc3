"""A stage of the model's step, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from optimized.bench.timing import Launch

DEVICE_RATE, HOST_RATE = 4.3e6, 55e3
"""Bytes a microsecond of the floors: 4.3 TB/s of device memory, 55 GB/s over PCIe."""
L2_BYTES = 60 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Fields:
    name: A is a full server, B a small one.
    batch: requests; length: tokens of each.
    """

    name: str
    batch: int
    length: int


A = Point(name="A", batch=48, length=137_500)
B = Point(name="B", batch=8, length=32_768)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Fields:
    at: the sizes.
    floor_us: the time that its bytes take at least.
    target_us: what we aim at.
    bytes: moved by one launch.
    launches: the same on different memory, larger than the L2 cache together.
    error: after a launch, how far the first output is from the reference's, as a relative norm; NaN
        where something was not written.
    """

    at: str
    floor_us: float
    target_us: float
    bytes: int
    launches: Sequence[Launch]
    error: Callable[[], float]


def sets(bytes_each: int, *, most: int = 64) -> int:
    """How many sets of inputs it takes until the L2 cache holds less than a third of them."""
    return min(most, max(2, -(-3 * L2_BYTES // bytes_each)))


def relative_error(out: Tensor, reference: Tensor) -> float:
    """The norm of the difference over that of the reference; NaN where `out` is one."""
    return float((out.double() - reference).norm() / reference.norm())
