"""What a campaign is asked to do, and what it did."""

from __future__ import annotations

import msgspec

from fuzz.tally import Failure
from fuzz.targets.setup import Pin

GUIDED = 5
"""Seeds in a hundred that begin like an earlier one: docs/decisions/0013."""


class Plan(msgspec.Struct, kw_only=True, frozen=True):
    """What to run.  `executions` or `seconds` bounds it, whichever comes first; seeds count up
    from `seed`.

    Fields:
        guided: seeds in a hundred that begin like an earlier one.
    """

    target: str
    system: str = "optimized"
    mutant: str | None = None
    pin: Pin = Pin()
    executions: int | None = None
    seconds: float | None = None
    seed: int = 0
    processes: int = 1
    guided: int = GUIDED

    @property
    def identity(self) -> tuple[object, ...]:
        """What a campaign that goes on has to have in common with the former one."""
        return self.target, self.system, self.mutant, self.pin, self.seed

    @property
    def plants(self) -> bool:
        """Whether it plants faults of its own."""
        return self.mutant is None and self.system == "optimized"


class Memory(msgspec.Struct, kw_only=True):
    """Resident bytes of this process, and of the largest of the workers: first and last."""

    start: int
    end: int = 0
    worker_start: int = 0
    worker_end: int = 0


class Summary(msgspec.Struct, kw_only=True, frozen=True):
    """What a campaign did, in all its calls.

    Fields:
        executions, operations, cpu_seconds, events, ratios, skipped, guided, planted, deaths:
            see `fuzz.tally`; seconds: of the clock.
        missing: required events that never were.
        failures: by signature, the smallest case first.
        features: that this campaign and its corpus know; tapes: that show all of them.
        missed: planted faults that were not found; lost: seeds whose workers died again and again.
        resumed: executions that an earlier call had done.
        memory: of this call.
        unsaved: why the corpus could no longer be written, which ended it; empty if it could.
        interrupted: Ctrl-C ended it early.
    """

    plan: Plan
    executions: int
    operations: int
    seconds: float
    cpu_seconds: float
    events: dict[str, int]
    missing: list[str]
    failures: list[Failure]
    ratios: dict[str, float]
    skipped: list[str]
    features: int
    tapes: int
    guided: int
    planted: int
    missed: list[str]
    deaths: int
    lost: list[tuple[int, int]]
    resumed: int
    memory: Memory
    unsaved: str = ""
    interrupted: bool = False

    @property
    def executions_per_second_and_core(self) -> float:
        return self.executions / max(self.cpu_seconds, 1e-9)

    @property
    def passed(self) -> bool:
        """It ran to its end, nothing was found, and nothing that must be seen was missed."""
        amiss = self.failures or self.missing or self.missed or self.lost or self.unsaved
        return not amiss and not self.interrupted
