"""One sequence of integers decides everything in a run.

A tape is read by drawing integers below a bound.  It is *generated* from a seed, *replayed* from
recorded values, or both: values first, and a seed from where they end.  Replaying is total: a
value too large for the bound that meets it is clipped, and a tape that has ended yields 0.  So
every edited tape is a run, and the shrinker need not know what the values mean.  0 is always the
simplest choice.

What only steers generation (weights, favoured values, swarm) is never recorded, so a saved tape
outlives changes to it.  The generator is splitmix64 in plain integers: a seed means the same
run under every version of Python and of any library.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

MASK = (1 << 64) - 1
LIMIT = 1 << 16
"""Most values of one tape; a run that draws more gets zeros."""


class SplitMix:
    """splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""

    def __init__(self, seed: int) -> None:
        self._state = seed & MASK

    def next(self) -> int:
        """The next 64 random bits."""
        self._state = z = (self._state + 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def below(self, bound: int) -> int:
        """A uniform integer in 0 .. bound - 1."""
        return self.next() * bound >> 64


@dataclass(frozen=True, slots=True)
class Span:
    """A run of draws that belong together, values[start:stop]: an operation, for example."""

    label: str
    start: int
    stop: int


class Tape:
    """A run's choices.  `Tape(seed=...)` generates them, `Tape(values)` replays them, and
    `Tape(values, seed=...)` replays the values and then generates.

    Fields:
        values: what was drawn so far, each below its bound: the normal form of this run.
        bounds: the bound that each value met.
        spans: finished spans, in the order in which they ended.
    """

    def __init__(self, values: Sequence[int] = (), *, seed: int | None = None) -> None:
        self.values: list[int] = []
        self.bounds: list[int] = []
        self.spans: list[Span] = []
        self._source = values
        self._random = None if seed is None else SplitMix(seed)
        # Swarm weights must not shift the choices when an operation is added, hence the fork.
        self._swarm = None if seed is None else SplitMix(seed ^ 0x5DEECE66D)

    @property
    def generating(self) -> bool:
        """Whether the next value comes from a seed."""
        at = len(self.values)
        return self._random is not None and len(self._source) <= at < LIMIT

    @property
    def exhausted(self) -> bool:
        """Whether a replay has read all its values; only zeros can follow."""
        return self._random is None and len(self.values) >= len(self._source)

    def draw(self, bound: int, *, favour: Sequence[int] = ()) -> int:
        """An integer in 0 .. bound - 1; generation takes three in four from `favour`, as far
        as its values are below the bound."""
        if self._random is not None and bound > 1 and self.generating:
            chosen = [v for v in favour if 0 <= v < bound]
            if chosen and self._random.below(4):
                value = chosen[self._random.below(len(chosen))]
            else:
                value = self._random.below(bound)
        else:
            value = self._replayed(bound)
        return self._record(value, bound)

    def choose(self, weights: Sequence[float]) -> int:
        """An index into `weights`; generation takes i with probability weights[i] / sum."""
        if self._random is None or not self.generating:
            return self._record(self._replayed(len(weights)), len(weights))
        at = self._random.next() / 2**64 * sum(weights)
        value = 0
        while value < len(weights) - 1 and (at := at - weights[value]) >= 0:
            value += 1
        return self._record(value, len(weights))

    def swarm(self, count: int) -> list[float]:
        """`count` weights of this seed, a quarter of them 0 and the others far apart, so that
        seeds differ in what they do much of and in what they leave out (swarm testing, Groce
        et al., ISSTA 2012).  All 1 without a seed."""
        if self._swarm is None:
            return [1.0] * count
        return [(0.0, 1.0, 2.0, 6.0)[self._swarm.below(4)] for _ in range(count)]

    @contextmanager
    def span(self, label: str) -> Iterator[None]:
        """Mark the draws made inside as belonging together."""
        start = len(self.values)
        yield
        self.spans.append(Span(label, start, len(self.values)))

    def _replayed(self, bound: int) -> int:
        at = len(self.values)
        value = self._source[at] if at < len(self._source) else 0
        return min(max(value, 0), bound - 1)

    def _record(self, value: int, bound: int) -> int:
        self.values.append(value)
        self.bounds.append(bound)
        return value


def trimmed(values: Sequence[int]) -> list[int]:
    """The same run without the zeros at its end."""
    end = len(values)
    while end and values[end - 1] == 0:
        end -= 1
    return list(values[:end])
