"""Which of many versions is the first bad one, when every version gives one answer.

Versions are numbered from 0, which is the good end, to `last`, the bad end.  All that a search
knows is the runs that were made, so one that is interrupted still says what they prove.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Literal

import msgspec

Verdict = Literal["good", "bad", "skip"]
"""Of one run: the case passes, it fails, or it could not be run, which says nothing."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the case on one version; `why` tells a skip's reason."""

    at: int
    verdict: Verdict
    why: str = ""


class Trial:
    """Runs the case on versions 0 .. `last`, and keeps the runs in order."""

    def __init__(self, last: int, run: Callable[[int], Run]) -> None:
        assert last > 0, "there is a version behind the good one"
        self.last = last
        self.runs: list[Run] = []
        self._run = run

    def run(self, at: int) -> Verdict:
        """Run the case on a version once more."""
        self.runs.append(self._run(at))
        return self.runs[-1].verdict

    def verdicts(self, at: int) -> list[Verdict]:
        """What the runs of one version have said so far."""
        return [run.verdict for run in self.runs if run.at == at]

    @property
    def skipped(self) -> set[int]:
        """Versions that could not be run."""
        return {run.at for run in self.runs if run.verdict == "skip"}

    @property
    def bracket(self) -> tuple[int, int]:
        """The last version that passed below the first that failed, and that one; the ends
        stand for what was not seen."""
        bad = min((run.at for run in self.runs if run.verdict == "bad"), default=self.last)
        good = (run.at for run in self.runs if run.verdict == "good" and run.at < bad)
        return max(good, default=0), bad


def halve(trial: Trial) -> None:
    """Run versions until the first bad one stands beside a good one, or only versions that
    cannot be run lie between.

    Of n versions behind the good one that takes at most ceil(log2(n)) runs, skips not counted.
    Where all of them failed it takes floor(log2(n)), which leaves one for the good end.
    """
    while (at := halfway(trial)) is not None:
        trial.run(at)


def halfway(trial: Trial) -> int | None:
    """The version to run next; None if nothing more can be found out.

    After each skip in a row it is twice as far from the middle, on alternate sides: a version that
    does not build has neighbours that do not either.
    """
    good, bad = trial.bracket
    skipped = trial.skipped
    left = [at for at in range(good + 1, bad) if at not in skipped]
    if not left:
        return None
    streak = sum(1 for _ in takewhile(lambda run: run.verdict == "skip", reversed(trial.runs)))
    doublings = (streak + 1) // 2 % max(1, (bad - good).bit_length() - 1)
    away = 2**doublings // 2 * (1 if streak % 2 else -1)
    return min(left, key=lambda at: abs(at - (good + bad) // 2 - away))
