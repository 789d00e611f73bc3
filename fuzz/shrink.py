"""From any failing tape to the smallest one.

Smaller is a total order (`fuzz.shrinking.case.cost`).  The passes (`fuzz.shrinking.passes`) propose
tapes; one is kept if its run fails as it should and is smaller.  They come in tiers, cheap and
greedy ones first, and whenever a tier has helped the first one has its turn again, until none
helps: so that failures of one fault, whatever their seeds, end in one minimum (tests compare it
with exhaustive enumeration).

A fault may show in more than one way, and the smallest run may show it in another way than the one
that was found.  `shrink` keeps to the signature of the failing run.  `minima` goes wherever it gets
smaller, but tells: each signature that it met is a failure of its own.  A crash is none of those:
any absurd run may crash, and no oracle says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from fuzz.outcome import Outcome
from fuzz.shrinking import passes
from fuzz.shrinking.case import PAYLOAD, Case, case_of, cost, setup_of
from fuzz.shrinking.passes import Pass
from fuzz.tape import trimmed

__all__ = ["Run", "cost", "minima", "shrink"]

Run = Callable[[Sequence[int]], Outcome]


def shrink(run: Run, failing: Outcome, *, executions: int = 1000) -> Outcome:
    """The smallest outcome found with the signature of `failing`, in at most `executions` runs.

    A failure of a model run that a stamped run shows too becomes the stamped one, whose oracles
    name the intruder."""
    shrinker = _Shrinker(run, failing, executions)
    shrinker.descend(passes.TIERS)
    return shrinker.best


def minima(run: Run, failing: Outcome, *, executions: int = 1000) -> dict[str, Outcome]:
    """The smallest outcomes found in at most `executions` runs, by their signatures: that of
    `failing`, and all others that showed on the way to the smallest of all."""
    shrinker = _Shrinker(run, failing, executions)
    shrinker.descend(passes.TIERS[:1])
    shrinker.keep_to = None
    shrinker.descend((*passes.TIERS, passes.AFRESH))
    return shrinker.found


class _OutOfBudget(Exception):
    """All executions are used up."""


class _Shrinker:
    """The state of one search.

    Fields:
        best: the smallest outcome that fails as it should.
        found: the smallest one of each signature.
        keep_to: the signature that `best` must have; None is any that an oracle named.
    """

    def __init__(self, run: Run, failing: Outcome, executions: int) -> None:
        self.best = failing
        self._run, self._left = run, executions
        self._tried = {tuple(trimmed(failing.values))}
        self._plain = 0
        if stamped := self._stamped():
            self.best = stamped
        assert self.best.signature is not None
        self.keep_to: str | None = self.best.signature
        self.found = {self.best.signature: self.best}

    def descend(self, tiers: Sequence[Sequence[Pass]]) -> None:
        """Try the passes of all `tiers` until none helps any more."""
        try:
            self._plain = self._plain or setup_of(self._execute(()))
            while any(self._helped(tier) for tier in tiers):
                pass
        except _OutOfBudget:
            pass

    def _helped(self, tier: Sequence[Pass]) -> bool:
        before = self.best
        for proposals in tier:
            self._each(proposals)
        if tier is passes.TIERS[0]:
            self._lower_each()
        return self.best is not before

    def _each(self, proposals: Pass) -> None:
        """Try all `proposals`; after a success go on with the rest of the better tape's."""
        tried = 0
        while True:
            for values in islice(proposals(self._case()), tried, None):
                tried += 1
                if self._is_better(values):
                    break
            else:
                return

    def _lower_each(self) -> None:
        """Each value to 0, or by bisection to the least that still fails."""
        i = 0
        while i < len(self.best.values):
            passes_at = -1
            while i < len(self.best.values) and self.best.values[i] - passes_at > 1:
                # 0 first, then the middle.
                value = (self.best.values[i] + passes_at) // 2 if passes_at >= 0 else 0
                values = self.best.values
                if not self._is_better([*values[:i], value, *values[i + 1 :]]):
                    passes_at = value
            i += 1

    def _case(self) -> Case:
        return case_of(self.best, self._plain)

    def _is_better(self, values: Sequence[int]) -> bool:
        """Run `values`, and keep what fails and is smaller."""
        key = tuple(trimmed(values))
        if key in self._tried:
            return False
        outcome = self._execute(key)
        self._tried |= {key, tuple(trimmed(outcome.values))}
        signature = outcome.signature
        if signature is None or not (signature == self.keep_to or _is_named(outcome)):
            return False
        if signature not in self.found or cost(outcome) < cost(self.found[signature]):
            self.found[signature] = outcome
        if self.keep_to not in (None, signature) or cost(outcome) >= cost(self.best):
            return False
        self.best = outcome
        return True

    def _execute(self, values: Sequence[int]) -> Outcome:
        if not self._left:
            raise _OutOfBudget
        self._left -= 1
        return self._run(values)

    def _stamped(self) -> Outcome | None:
        """The same tape's stamped run, if it fails by an oracle of its own."""
        if not self._left or not self.best.values or not self.best.values[PAYLOAD]:
            return None
        outcome = self._execute([0, *self.best.values[1:]])
        return outcome if outcome.failed and _is_named(outcome) else None


def _is_named(outcome: Outcome) -> bool:
    return outcome.violations[0].oracle != "crash"
