"""Which of many versions is the first bad one, when a bad one fails only sometimes.

Every version may be the first bad one, with equal chance at first.  Runs fail at one unknown rate
from it on and at another before it, both with Jeffreys's prior, so that a good version may fail
now and then as well.  Each run is made where it is expected to leave the least entropy.  The
arithmetic is that of git-bayesect (https://github.com/hauntsaninja/git_bayesect).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fuzz.bisect.search import Trial
from fuzz.terminal import UsageError

if TYPE_CHECKING:
    from git_bayesect import Bisector

MOST_RUNS = 2000


class Posterior:
    """What the runs of a trial say of each version.

    Versions that cannot be run are taken together with the next one that can: no run could tell
    which of them is the first bad one.
    """

    def __init__(self, trial: Trial) -> None:
        skipped = trial.skipped
        ends = [at for at in range(1, trial.last + 1) if at not in skipped]
        starts = [0, *ends[:-1]]
        # the library counts from the newest on, and the good end is never the first bad one
        self._versions = [*reversed(ends), *([] if 0 in skipped else [0])]
        self._spans = [range(a + 1, b + 1) for a, b in zip(starts, ends, strict=True)][::-1]
        weights = np.zeros(len(self._versions))
        weights[: len(ends)] = [len(span) for span in self._spans]
        self._bisector = _library()(weights)
        place = {at: index for index, at in enumerate(self._versions)}
        for run in trial.runs:
            if run.verdict != "skip":
                self._bisector.record(place[run.at], run.verdict == "bad")

    @property
    def ranked(self) -> list[tuple[float, range]]:
        """Probability and versions, the most probable first; together they sum up to 1."""
        with np.errstate(divide="ignore", invalid="ignore"):
            chances = self._bisector.distribution[: len(self._spans)].tolist()
        return sorted(zip(chances, self._spans, strict=True), key=lambda pair: -pair[0])

    @property
    def next(self) -> int:
        """The version of which a run is expected to tell most."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self._versions[self._bisector.select()]


def narrow(trial: Trial, *, confidence: float, most: int = MOST_RUNS) -> None:
    """Run versions until one first bad one has the probability `confidence`, or `most` runs are
    made."""
    while len(trial.runs) < most:
        posterior = Posterior(trial)
        if posterior.ranked[0][0] >= confidence:
            return
        trial.run(posterior.next)


def require_library() -> None:
    """Refuse a search that could not be made, before anything is built.

    Raises:
        UsageError: git-bayesect is not installed.
    """
    _library()


def _library() -> type[Bisector]:
    try:
        from git_bayesect import Bisector
    except ImportError as error:
        raise UsageError(
            "a flaky case is searched for with git-bayesect, which is not installed: "
            "run `pip install 'kvoracle[bisect]'`."
        ) from error
    return Bisector
