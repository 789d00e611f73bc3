"""Bisecting over versions: halving, posterior, skips, and what the ends must be."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from fuzz.bisect.posterior import Posterior, narrow
from fuzz.bisect.running import Unusable
from fuzz.bisect.search import Run, Trial, Verdict, halve
from fuzz.bisect.versions import END_RUNS, Bisected, first_bad, shown
from fuzz.terminal import Terminal, UsageError

COMMITS = 200
MOST_RUNS = 9
"""Of a history of 200 commits: the bad end, and 8 probes or 7 and the good end."""


class Toy:
    """Versions in memory; `answer` is what a run of one says."""

    def __init__(self, versions: int, answer: Callable[[int], Verdict]) -> None:
        self.names = [f"v{at}" for at in range(versions)]
        self.titles = [""] * versions
        self.answer = answer

    def place(self, at: int) -> Path:
        return Path(str(at))

    def bisect(self, *, flaky: bool = False, checks: int = 1, confidence: float = 0.99) -> Bisected:
        return first_bad(
            self,
            lambda folder: (self.answer(int(folder.name)), "broken"),
            flaky=flaky,
            confidence=confidence,
            checks=checks,
            tell=lambda name, verdict, why: None,
        )


def steady(first: int, broken: frozenset[int] = frozenset()) -> Callable[[int], Verdict]:
    """Bad from `first` on."""
    return lambda at: "skip" if at in broken else "bad" if at >= first else "good"


def unsteady(first: int, *, rate: float, noise: float, seed: int) -> Callable[[int], Verdict]:
    """From `first` on bad at this rate; before it, at the rate `noise`."""
    draws = random.Random(seed)
    return lambda at: "bad" if draws.random() < (rate if at >= first else noise) else "good"


@pytest.mark.parametrize("commits", [2, 3, 4, 9, 64, 65, COMMITS, COMMITS + 1])
def test_halving_finds_every_commit_and_no_run_is_in_vain(commits):
    most = 0
    for first in range(1, commits):
        result = Toy(commits, steady(first)).bisect()
        assert result.decided
        assert result.suspects[0].names == [f"v{first}"]
        # what it says was seen: the commit failed, and the one before it passed
        seen = {run.at: run.verdict for run in result.runs}
        assert (seen[first - 1], seen[first]) == ("good", "bad")
        assert len(seen) == len(result.runs)
        most = max(most, len(result.runs))
    assert most <= (commits - 1).bit_length() + 1
    assert commits != COMMITS or most == MOST_RUNS


def test_versions_that_cannot_be_run_are_passed_over():
    draws = random.Random(5)
    undecided = 0
    for _ in range(300):
        first = draws.randrange(1, COMMITS)
        start = draws.randrange(1, COMMITS - 1)
        broken = frozenset(range(start, min(start + draws.randrange(1, 40), COMMITS - 1)))
        result = Toy(COMMITS, steady(first, broken)).bisect()
        names = result.suspects[0].names
        assert f"v{first}" in names
        assert {int(name[1:]) for name in names[:-1]} <= broken
        assert result.decided == (not {first - 1, first} & broken)
        undecided += not result.decided
        assert result.verdicts <= MOST_RUNS + 2
    assert undecided > 10


def test_all_versions_between_may_be_broken():
    result = Toy(10, steady(5, frozenset(range(1, 9)))).bisect()
    assert not result.decided
    assert result.suspects[0].names == [f"v{at}" for at in range(1, 10)]
    assert "is one of 9:" in text(result)


@pytest.mark.parametrize(
    ("rate", "noise"),
    [
        pytest.param(0.7, 0.0, id="passes 3 times of 10"),
        pytest.param(0.3, 0.0, id="fails 3 times of 10"),
        pytest.param(0.7, 0.3, id="3 of 10 answers are wrong"),
    ],
)
def test_a_flaky_case_leads_to_its_commit(rate, noise):
    right = 0
    for seed in range(20):
        first = random.Random(seed).randrange(1, COMMITS)
        toy = Toy(COMMITS, unsteady(first, rate=rate, noise=noise, seed=seed))
        result = toy.bisect(flaky=True)
        right += result.decided and result.suspects[0].names == [f"v{first}"]
    assert right >= 19


def test_halving_a_flaky_case_misleads():
    """The negative control of the posterior: the same trials, each run believed."""
    right = 0
    for seed in range(20):
        first = random.Random(seed).randrange(1, COMMITS)
        trial = Trial(COMMITS - 1, as_runs(unsteady(first, rate=0.7, noise=0.0, seed=seed)))
        halve(trial)
        right += trial.bracket == (first - 1, first)
    assert right <= 10


def test_the_posterior_is_as_sure_as_it_says():
    """Of many short searches that end at 0.8, about so many are right."""
    trials, right, claimed = 80, 0, 0.0
    for seed in range(trials):
        first = random.Random(seed).randrange(1, 30)
        trial = Trial(29, as_runs(unsteady(first, rate=0.7, noise=0.1, seed=seed)))
        narrow(trial, confidence=0.8)
        chance, span = Posterior(trial).ranked[0]
        claimed += chance
        right += first in span
    assert abs(right - claimed) < 4 * (trials * 0.8 * 0.2) ** 0.5


def test_the_posterior_takes_what_cannot_be_run_together_with_the_next():
    broken = frozenset({11, 12, 13})
    draws = unsteady(12, rate=0.7, noise=0.0, seed=3)
    result = Toy(30, lambda at: "skip" if at in broken else draws(at)).bisect(flaky=True)
    assert not result.decided
    assert result.suspects[0].names == ["v11", "v12", "v13", "v14"]
    assert result.suspects[0].chance >= 0.99
    assert "one of the 3 before it, which cannot be run" in text(result)


def test_a_bad_end_that_sometimes_passes_is_found_flaky():
    answers = iter(["bad", "good", "bad"])
    draws = unsteady(7, rate=0.7, noise=0.0, seed=1)
    toy = Toy(20, lambda at: next(answers, None) or draws(at))
    result = toy.bisect(checks=3)
    assert result.flaky
    assert result.suspects[0].names == ["v7"]
    assert not Toy(20, steady(7)).bisect(checks=3).flaky


@pytest.mark.parametrize(
    ("answer", "flaky", "sentence"),
    [
        (steady(10), False, "does not fail at the bad end v9, in 2 runs"),
        (steady(10), True, f"does not fail at the bad end v9, in {END_RUNS} runs"),
        (steady(0), False, "fails at the good end v0"),
        (steady(0), True, "fails at the good end v0"),
        (steady(5, frozenset({9})), False, "the bad end v9 cannot be run \\(broken\\)"),
        (steady(1, frozenset({0})), False, "the good end v0 cannot be run \\(broken\\)"),
        (steady(5, frozenset({0})), True, "the good end v0 cannot be run \\(broken\\)"),
    ],
)
def test_ends_that_are_not_what_they_are_given_for(answer, flaky, sentence):
    with pytest.raises(UsageError, match=sentence):
        Toy(10, answer).bisect(flaky=flaky, checks=2)


def test_a_good_end_that_nobody_needs_is_not_run():
    toy = Toy(COMMITS, steady(150, frozenset({0})))
    assert toy.bisect().suspects[0].names == ["v150"]


def test_an_interrupted_search_tells_what_is_left():
    steps = iter(range(4))

    def answer(at: int) -> Verdict:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return steady(60)(at)

    result = Toy(COMMITS, answer).bisect()
    assert result.interrupted
    assert not result.decided
    assert len(result.runs) == 4
    assert "v60" in result.suspects[0].names
    assert len(result.suspects[0].names) == 25
    assert "... and those up to v" in text(result)


def test_a_version_without_a_folder_is_skipped():
    class Gaps(Toy):
        def place(self, at: int) -> Path:
            if at == 5:
                raise Unusable("its build exited with 2")
            return super().place(at)

    result = Gaps(10, steady(7)).bisect()
    assert result.suspects[0].names == ["v7"]
    assert [run.why for run in result.runs if run.at == 5] in ([], ["its build exited with 2"])


def as_runs(answer: Callable[[int], Verdict]) -> Callable[[int], Run]:
    return lambda at: Run(at=at, verdict=answer(at))


def text(result: Bisected) -> str:
    """What a terminal shows of a result."""
    terminal = Terminal()
    with terminal.capture() as captured:
        terminal.show(shown(result))
    return captured.get()
