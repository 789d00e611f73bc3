"""How rare a fault is, and how many clean executions say that it is gone.

Each execution shows a fault with some unknown chance, whatever the others did, so the executions up
to each find are geometric, and nearly exponential.  For exponential ones the chance to see nothing
in n further executions, after k finds in N of them, is (1 + n / N) ** -k exactly, whatever the rate
(next find over mean of the past ones: an F distribution).  Executions are whole, which only makes
it smaller.  So n = N * ((1 / 0.05) ** (1 / k) - 1) clean ones say with 95 % that the fault is gone:
19 N after one find; 3.5 times the mean after ten; 3.0 if the rate were known (the rule of three).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec

CONFIDENCE = 0.95


class Rarity(msgspec.Struct, frozen=True):
    """A fault was found `finds` times in `executions`, searches that gave up included."""

    finds: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    executions: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]

    @classmethod
    def of(cls, executions: Sequence[int], *, finds: int | None = None) -> Rarity:
        """From the executions of each search; all of them found it, or only `finds`."""
        return cls(len(executions) if finds is None else finds, sum(executions))

    @property
    def mean(self) -> float:
        """Executions to a find; infinite if there was none."""
        return self.executions / self.finds if self.finds else math.inf

    def between(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """What the mean lies between, with that confidence."""
        if not self.finds:
            return 0.0, math.inf
        tail = (1 - confidence) / 2
        low, high = (_erlang(1 - tail, self.finds), _erlang(tail, self.finds))
        return self.executions / low, self.executions / high

    def clean(self, confidence: float = CONFIDENCE) -> int | None:
        """So many executions without a find say with that confidence that it is gone; None if it
        was never found, and nothing can be said."""
        if not self.finds:
            return None
        return math.ceil(self.executions * ((1 - confidence) ** (-1 / self.finds) - 1))

    def __str__(self) -> str:
        """In a sentence, for a fault that is not found any more."""
        times = "once" if self.finds == 1 else f"{self.finds:,} times"
        found = f"It was found {times} in {self.executions:,} executions"
        if (clean := self.clean()) is None:
            return f"{found}, which does not say how rare it is."
        return (
            f"{found}: {clean:,} clean executions would say with {CONFIDENCE:.0%} that a fault as "
            "rare is gone."
        )


def clean_executions(
    executions: Sequence[int], *, finds: int | None = None, confidence: float = CONFIDENCE
) -> int | None:
    """How many clean executions say with that confidence that a fault is gone which took each
    search so many, of which `finds` found it (all if None); None if none did."""
    return Rarity.of(executions, finds=finds).clean(confidence)


def _erlang(chance: float, finds: int) -> float:
    """The value that the sum of so many unit exponentials is below with that chance."""

    def below(value: float) -> float:
        terms = (i * math.log(value) - math.lgamma(i + 1) - value for i in range(finds))
        return 1 - math.fsum(map(math.exp, terms))

    low, high = 0.0, finds + 10 * math.sqrt(finds) + 30
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < chance else (low, middle)
    return high
