"""What executions found, saw and cost: of one batch of seeds, or of a campaign so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import msgspec

from fuzz.outcome import Outcome
from fuzz.shrink import cost

Range = tuple[int, int]
"""Seeds [start, stop)."""


class Failure(msgspec.Struct, kw_only=True, frozen=True):
    """All failures of one signature: how many, and the smallest with its seed."""

    signature: str
    count: int
    seed: int
    outcome: Outcome


class Tally(msgspec.Struct, kw_only=True):
    """Totals.

    Fields:
        executions, operations: how many; cpu_seconds: of all workers together.
        events: what was seen how often.
        ratios: largest error by its bound of the model runs, by stage.
        skipped: operations that the engine lacks the capability for.
        failures: by signature.
        guided: executions that began like an earlier one.
        planted: planted faults that were searched for; missed: those that were not found.
        deaths: workers that died at work.
        lost: seeds whose workers died again and again, which count as nothing.
    """

    executions: int = 0
    operations: int = 0
    cpu_seconds: float = 0.0
    events: dict[str, int] = {}
    ratios: dict[str, float] = {}
    skipped: list[str] = []
    failures: dict[str, Failure] = {}
    guided: int = 0
    planted: int = 0
    missed: list[str] = []
    deaths: int = 0
    lost: list[Range] = []

    def add(self, other: Tally) -> None:
        """Count what `other` has counted."""
        self.executions += other.executions
        self.operations += other.operations
        self.cpu_seconds += other.cpu_seconds
        self.events = dict(Counter(self.events) + Counter(other.events))
        self.skipped = other.skipped or self.skipped
        self.guided += other.guided
        self.planted += other.planted
        self.missed += other.missed
        self.deaths += other.deaths
        self.lost += other.lost
        for stage, ratio in other.ratios.items():
            self.ratios[stage] = max(ratio, self.ratios.get(stage, 0.0))
        for failure in other.failures.values():
            self.note(failure)

    def note(self, failure: Failure) -> bool:
        """Count a failure, keeping the smallest of its signature; whether it is that."""
        known = self.failures.get(failure.signature)
        count = failure.count + (known.count if known else 0)
        smaller = known is None or cost(failure.outcome) < cost(known.outcome)
        kept = failure if known is None or smaller else known
        self.failures[failure.signature] = msgspec.structs.replace(kept, count=count)
        return smaller


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The same numbers in as few ranges [start, stop) as there can be, in order."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def gaps(done: Iterable[Range], first: int, last: int) -> list[Range]:
    """What is left of [first, last) without those that are done."""
    edges = [(first, first), *merged(done), (last, last)]
    left = ((a[1], min(b[0], last)) for a, b in pairwise(edges))
    return [(start, stop) for start, stop in left if start < stop]
