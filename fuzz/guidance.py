"""Which recorded tapes new executions start from, and how they are changed.

A tape is kept if it shows a feature (`fuzz.coverage`) that no shorter one shows.  An execution
that is guided takes one up to where it shows a rare feature, changes it perhaps, and goes on from
there as any other seed would.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from fuzz.outcome import Outcome
from fuzz.tape import SplitMix, Tape

SALT = 0x6A09E667F3BCC909
"""Keeps what a seed changes apart from what it generates."""
ROUNDS = 4
"""Features drawn for each choice of a tape; the rarest of them counts."""


class Grown(msgspec.Struct, kw_only=True, frozen=True):
    """A tape with what it shows.

    Fields:
        values: the tape; starts: where its operations begin, and where the last one ends.
        features: each with the place by which it is shown (`fuzz.coverage`).
    """

    values: list[int]
    starts: list[int]
    features: dict[str, int]

    @property
    def setup(self) -> list[int]:
        """The part before the operations."""
        return self.values[: self.starts[0]] if self.starts else self.values

    @property
    def operations(self) -> list[list[int]]:
        """The values of each operation."""
        ends = self.starts[1:]
        return [self.values[a:b] for a, b in zip(self.starts, ends, strict=False)]


def grown(outcome: Outcome) -> Grown:
    """The tape of an outcome, up to where it drew its end."""
    values = outcome.values
    spans = [s for s in outcome.spans if s.label == "operation" and values[s.start]]
    starts = [span.start for span in spans] + [span.stop for span in spans[-1:]]
    end = starts[-1] if starts else len(values)
    return Grown(values=values[:end], starts=starts, features=outcome.features)


class Garden:
    """The tapes to start from, and how often each feature was seen.

    Fields:
        counts: executions of this campaign that showed a feature.
    """

    def __init__(self, tapes: Iterable[Grown] = ()) -> None:
        self.counts: Counter[str] = Counter()
        self._shortest: dict[str, Grown] = {}
        self._features: list[str] = []
        for tape in tapes:
            self.add(tape)

    def __len__(self) -> int:
        return len(self._features)

    def __iter__(self) -> Iterator[Grown]:
        """The tapes that are kept."""
        return iter({id(tape): tape for tape in self._shortest.values()}.values())

    def add(self, tape: Grown) -> bool:
        """Keep a tape for what it alone shows, or shows in fewer operations; whether there is
        anything."""
        kept = False
        for feature in tape.features:
            known = self._shortest.get(feature)
            if known is None:
                self._features.append(feature)
            if known is None or _size(tape) < _size(known):
                self._shortest[feature] = tape
                kept = True
        return kept

    def parents(self, seed: int, *, share: int = 100) -> tuple[Grown, Grown] | None:
        """What a seed begins like, and what it may take from; None for all but `share` seeds in a
        hundred, and while there is nothing."""
        # salted: the seed's own first draws must not decide which seeds are left out
        random = SplitMix(seed ^ SALT)
        if random.below(100) >= share or not self._features:
            return None
        return self._rare(random), self._rare(random)

    def _rare(self, random: SplitMix) -> Grown:
        """A tape up to where it shows something rare."""
        drawn = [self._features[random.below(len(self._features))] for _ in range(ROUNDS)]
        feature = min(drawn, key=self.counts.__getitem__)
        tape = self._shortest[feature]
        shown = tape.features[feature]
        starts = tape.starts[: 1 + bisect_left(tape.starts, shown)]
        return Grown(values=tape.values[: (starts or [shown])[-1]], starts=starts, features={})


def bred(seed: int, parents: tuple[Grown, Grown]) -> Tape:
    """A tape that begins like the first of its parents: as it is, without one of its operations,
    with one value changed, or with some of the other's operations behind it; and that goes on
    from its seed."""
    random = SplitMix(~seed ^ SALT)
    first, second = parents
    kept = first.operations
    how = random.below(4)
    if how == 1 and kept:
        del kept[random.below(len(kept))]
    elif how == 2 and kept:
        _change(kept[random.below(len(kept))], random)
    elif how == 3:
        kept += second.operations[random.below(len(second.operations) + 1) :]
    return Tape([*first.setup, *(value for each in kept for value in each)], seed=seed)


def _change(values: list[int], random: SplitMix) -> None:
    """One value, to its neighbour or to any; the tape clips it to its bound."""
    place = random.below(len(values))
    value = values[place]
    values[place] = (value + 1, max(0, value - 1), random.below(2 * value + 16))[random.below(3)]


def _size(tape: Grown) -> tuple[int, Sequence[int]]:
    return len(tape.starts), tape.values
