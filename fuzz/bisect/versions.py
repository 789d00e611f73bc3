"""The first bad one of many versions: runs the case on them until that is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fuzz.bisect.posterior import Posterior, narrow
from fuzz.bisect.running import Runner, Unusable
from fuzz.bisect.search import Run, Trial, Verdict, halve
from fuzz.terminal import UsageError

END_RUNS = 20
"""A bad end that passes so often is not bad, nor a good one good that fails so often: of a case
that fails 3 times of 10, that is wrong once in a thousand searches."""
GOOD_RUNS = 3
"""Of the good end of a flaky case, before the search."""
SHOWN = 5
MOST_LISTED = 20


class Versions(Protocol):
    """Versions by number, the good end first: what each is called, and where it lies."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def titles(self) -> Sequence[str]: ...

    def place(self, at: int) -> Path:
        """Its folder, ready to run.  Raises Unusable if there can be none."""
        ...


class Suspects(msgspec.Struct, frozen=True, kw_only=True):
    """Versions of which one is the first bad one with this probability; several only where no
    run can tell them apart, since all but the last cannot be run."""

    names: list[str]
    titles: list[str]
    chance: float


class Bisected(msgspec.Struct, frozen=True, kw_only=True):
    """What a search over versions found.

    Fields:
        flaky: whether a bad version fails only sometimes.
        decided: whether one version is the first bad one, with the confidence asked for.
        suspects: the most probable first; without `flaky` one entry, of probability 1.
        names: all versions, the good end first, which the `runs` count from 0.
        interrupted: whether Ctrl-C ended it, so that `suspects` is what is left.
        mended: of a search back in time that is decided, the version that came after the bad one.
    """

    flaky: bool
    decided: bool
    suspects: list[Suspects]
    names: list[str]
    runs: list[Run]
    interrupted: bool
    mended: str | None = None

    @property
    def verdicts(self) -> int:
        """Runs that said anything."""
        return sum(run.verdict != "skip" for run in self.runs)


def first_bad(
    versions: Versions,
    run: Runner,
    *,
    flaky: bool,
    confidence: float,
    checks: int,
    tell: Callable[[str, Verdict, str], None],
) -> Bisected:
    """Search for the first version on which the case fails.

    Args:
        flaky: whether it fails only sometimes, so that the posterior is to decide; found out too
            where the `checks` first runs of the bad end differ.
        tell: called with the name, the verdict and a skip's reason of each run.

    Raises:
        UsageError: the bad end passes, the good end fails, or one of them cannot be run.
    """

    def once(at: int) -> Run:
        try:
            verdict, why = run(versions.place(at))
        except Unusable as error:
            verdict, why = "skip", str(error)
        tell(versions.names[at], verdict, why)
        return Run(at=at, verdict=verdict, why=why)

    trial = Trial(len(versions.names) - 1, once)
    interrupted = False
    try:
        _check_bad(trial, versions.names[-1], most=END_RUNS if flaky else checks, once=flaky)
        flaky = flaky or len(set(trial.verdicts(trial.last))) > 1
        if flaky:
            _check_good(trial, versions.names[0], least=GOOD_RUNS, most=END_RUNS)
            narrow(trial, confidence=confidence)
        else:
            halve(trial)
            # one that passed stands in for the good end
            if all(run.verdict != "good" for run in trial.runs):
                _check_good(trial, versions.names[0], least=1, most=1)
    except KeyboardInterrupt:
        interrupted = True
    suspects = [
        Suspects(
            names=[versions.names[at] for at in span],
            titles=[versions.titles[at] for at in span],
            chance=chance,
        )
        for chance, span in _ranked(trial, flaky=flaky)
    ]
    found = suspects[0]
    return Bisected(
        flaky=flaky,
        decided=len(found.names) == 1 and found.chance >= confidence and not interrupted,
        suspects=suspects[:SHOWN],
        names=list(versions.names),
        runs=trial.runs,
        interrupted=interrupted,
    )


def _ranked(trial: Trial, *, flaky: bool) -> list[tuple[float, range]]:
    """Probability and versions of each group that runs can tell from the others."""
    if flaky:
        return Posterior(trial).ranked
    good, bad = trial.bracket
    return [(1.0, range(good + 1, bad + 1))]


def _check_bad(trial: Trial, name: str, *, most: int, once: bool) -> None:
    """Run the bad end `most` times, or until it fails `once`."""
    for _ in range(most):
        verdict = trial.run(trial.last)
        if verdict == "skip":
            raise UsageError(
                f"the bad end {name} cannot be run ({trial.runs[-1].why}): give a --bad "
                "that builds and fails, and check --build and --run."
            )
        if once and verdict == "bad":
            return
    if "bad" not in trial.verdicts(trial.last):
        raise UsageError(
            f"the case does not fail at the bad end {name}, in {most} run{'s' * (most > 1)}: give "
            "--bad a version that fails, or --flaky if it fails now and then."
        )


def _check_good(trial: Trial, name: str, *, least: int, most: int) -> None:
    """Run the good end `least` times, and until it passes once, but not more than `most` times."""
    verdicts: list[Verdict] = []
    while len(verdicts) < least or ("good" not in verdicts and len(verdicts) < most):
        verdicts.append(trial.run(0))
        if verdicts[-1] == "skip":
            break
    if "good" in verdicts:
        return
    if "bad" in verdicts:
        raise UsageError(f"the case fails at the good end {name}: give --good an older version.")
    raise UsageError(
        f"the good end {name} cannot be run ({trial.runs[-1].why}): give a --good that builds and "
        "passes, and check --build and --run."
    )


def shown(result: Bisected) -> Iterator[RenderableType]:
    """The result for a terminal."""
    table = Table("bisect", f"{len(result.names) - 1:,} versions behind the good one")
    table.add_row("runs", f"{result.verdicts:,}")
    table.add_row("could not be run", f"{len(result.runs) - result.verdicts:,}")
    table.add_row("search", "by posterior, flaky" if result.flaky else "by halving")
    if result.interrupted:
        table.add_row(Text("interrupted", "bold red"), "this is what the runs until then say")
    yield table
    first = result.suspects[0]
    if result.flaky:
        chances = Table("probability", "first bad version")
        for suspects in result.suspects:
            chances.add_row(f"{suspects.chance:.4f}", _named(suspects))
        yield chances
    if result.decided:
        chance = f", with probability {first.chance:.4f}" if result.flaky else ""
        yield Text.assemble("first bad: ", (_named(first), "bold"), chance)
        if result.mended:
            yield Text.assemble("going back in time; first good: ", (result.mended, "bold"))
    elif len(first.names) > 1:
        yield f"The first bad version is one of {len(first.names):,}:"
        pairs = zip(first.names[:MOST_LISTED], first.titles, strict=False)
        yield from (Text(f"  {name} {title}") for name, title in pairs)
        if len(first.names) > MOST_LISTED:
            yield f"  ... and those up to {first.names[-1]}"
    else:
        yield (
            "The runs do not say which version is the first bad one: lower --confidence, or give "
            "ends that are nearer to each other."
        )


def _named(suspects: Suspects) -> str:
    """The versions in a few words."""
    named = f"{suspects.names[-1]} {suspects.titles[-1]}".strip()
    more = len(suspects.names) - 1
    return f"{named}, or one of the {more} before it, which cannot be run" if more else named
