"""What one part of `kvoracle verify` is given, and what it hands back."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec

from fuzz.mutants import find
from fuzz.verify.mooncake import TraceRequest, generate_trace, read_trace
from reference.contract import EngineFactory
from reference.geometry import Geometry
from systems import load

SEED = 0
PAGE = Geometry().logical_page_size
FAULT = "page_table_41494"
"""The mutant whose engine is the control of most parts."""
PUBLISHED_REQUESTS = 12_031
QUICK_REQUESTS = 400

Tick = Callable[[int, int], None]
"""Called with the units done and the units in all."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run.

    Fields:
        trace: a file in Mooncake's format; None generates one with the same statistics.
        quick: small sizes, for a first look.
        system: the engine that stands in the place of the optimized one.
    """

    trace: str | None = None
    quick: bool = False
    system: str = "optimized"

    def requests(self) -> list[TraceRequest]:
        """The trace's requests, in order of arrival."""
        if self.trace is None:
            requests = generate_trace(PUBLISHED_REQUESTS, seed=SEED)
        else:
            requests = read_trace(Path(self.trace))
        return requests[:QUICK_REQUESTS] if self.quick else requests


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One figure against its bar."""

    name: str
    measured: str
    bar: str
    passed: bool

    @classmethod
    def exactly(cls, name: str, measured: int, wanted: int) -> Check:
        return cls(
            name=name, measured=f"{measured:,}", bar=f"{wanted:,}", passed=measured == wanted
        )

    @classmethod
    def at_least(cls, name: str, measured: int, least: int) -> Check:
        return cls(
            name=name,
            measured=f"{measured:,}",
            bar=f"at least {least:,}",
            passed=measured >= least,
        )

    @classmethod
    def at_most(cls, name: str, measured: int, most: int) -> Check:
        return cls(
            name=name, measured=f"{measured:,}", bar=f"at most {most:,}", passed=measured <= most
        )


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One experiment's outcome.

    Fields:
        columns, rows: a table for the reader.
        figures: everything measured, as plain data.
        worker: id of the process that ran it; peak_mib: the most memory it had held by then.
    """

    checks: tuple[Check, ...]
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    figures: dict[str, Any] = {}
    name: str = ""
    seconds: float = 0.0
    cpu_s: float = 0.0
    worker: int = 0
    peak_mib: int = 0


PartFunction = Callable[[Plan, Tick], Part]


@contextmanager
def engine_with(fault: str | None) -> Iterator[EngineFactory]:
    """The optimized engine; with the mutant called `fault` for as long as the context lasts."""
    with find(fault).applied() if fault else nullcontext():
        yield load("optimized").factory


def plain(figures: object) -> dict[str, Any]:
    """A dataclass as plain data, whatever the keys of its mappings."""
    data: dict[str, Any] = msgspec.to_builtins(figures, str_keys=True)
    return data


def peak_mib() -> int:
    """The most resident memory that this process has held, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
