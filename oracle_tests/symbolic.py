"""Symbolic integers and page tables, on which `reference.addressing` runs unchanged for z3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import z3

from reference.geometry import Geometry

PAGE_OF = z3.Function("page_of", z3.IntSort(), z3.IntSort(), z3.IntSort())
"""(request, ordinal) -> page: any page table of any request."""


@dataclass(frozen=True)
class Int:
    """A z3 integer with Python's operators.  z3's division rounds down for positive divisors,
    as Python's does, and every divisor here is positive."""

    term: z3.ArithRef

    def __add__(self, other: Any) -> Int:
        return Int(self.term + term(other))

    def __mul__(self, other: Any) -> Int:
        return Int(self.term * term(other))

    def __floordiv__(self, other: Any) -> Int:
        return Int(self.term / term(other))

    def __mod__(self, other: Any) -> Int:
        return Int(self.term % term(other))

    __radd__ = __add__
    __rmul__ = __mul__


def term(value: Any) -> z3.ArithRef:
    return value.term if isinstance(value, Int) else z3.IntVal(value)


class Table:
    """The page table of a symbolic request."""

    def __init__(self, request: z3.ArithRef) -> None:
        self.request = request

    def __getitem__(self, ordinal: Int) -> Int:
        return Int(PAGE_OF(self.request, term(ordinal)))


class AnyPageGeometry:
    """The sizes of a geometry, with a physical page that may be a symbol.  The formulas are
    Geometry's own; only its checks, which need numbers, are left out."""

    logical_page_size = Geometry.logical_page_size
    index_page_size = Geometry.index_page_size
    ring_size = Geometry.ring_size

    def __init__(self, *, kpool: int, physical_page_size: Any, max_drafts: int = 0) -> None:
        self.kpool = kpool
        self.physical_page_size = physical_page_size
        self.max_drafts = max_drafts


def solve(*assumptions: z3.BoolRef) -> z3.ModelRef | None:
    """A model of all assumptions, None if there is none.  Restarts, since the search through
    nonlinear terms is short or endless by luck of the seed; an answer of any seed is one."""
    for seed in range(30):
        solver = z3.Solver()
        solver.set("rlimit", 2_000_000)
        solver.set("random_seed", seed)
        solver.add(*assumptions)
        answer = solver.check()
        if answer != z3.unknown:
            return solver.model() if answer == z3.sat else None
    raise AssertionError(f"z3 gave up 30 times on {z3.And(assumptions)}")
