"""`kvoracle nightly`: campaigns over all targets, the kill report, and what is new since the last.

The folder keeps everything that a night leaves: `night.json`, which the next one compares itself
with, `summary.md`, and for each failure its case and its report.  What earlier nights found lies in
the corpus, which campaigns start from.  All of it is told in docs/nightly.md.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fuzz import campaign, case, mutants, targets
from fuzz.corpus import Corpus
from fuzz.files import write_whole
from fuzz.mutants import report as kill_report
from fuzz.mutants.report import KillRow
from fuzz.rarity import Rarity
from fuzz.report.command import write_report
from fuzz.summary import Plan, Summary
from fuzz.terminal import (
    EXIT_INTERRUPTED,
    JsonFile,
    Natural,
    Positive,
    Processes,
    Tick,
    UsageError,
    bars,
    check_writable,
    check_writable_folder,
    deliver,
    err,
    json_of,
    out,
    write_file,
)
from fuzz.trend import Night, load, markdown, night_of, parts

SEEDS_A_NIGHT = 1 << 32
RECORD, SUMMARY = "night.json", "summary.md"


def nightly(
    *,
    target: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    mutant: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None,
    seconds: Positive = 600,
    executions: Positive | None = None,
    seed: Natural | None = None,
    seeds: Positive = 3,
    processes: Processes = 2,
    folder: Path = Path("out/nightly"),
    corpus: Path = Path("out/corpus"),
    last: Path | None = None,
    json: JsonFile = None,
) -> int:
    """Run a night: campaigns, the kill report, and what is new since the last one.  Exit status 1
    only for a failure that no night before had.  Ctrl-C ends it early, with what was done so far.

    Parameters
    ----------
    target, mutant
        Only these; all without.
    seconds
        Of each campaign.
    executions
        Of each campaign at most.
    seed
        The first of each campaign; every day has its own, if this is not given.
    seeds
        Searches for each mutant.
    folder
        Where the record, the summary, cases and reports go.
    corpus
        Folder of tapes to start from, and for what is found.
    last
        The record of the last night; the one in the folder, if this is not given.
    """
    check_writable(json)
    names = list(dict.fromkeys(target or targets.names()))
    for name in names:
        targets.find(name)
    for name in mutant or ():
        mutants.find(name)
    check_writable_folder(folder)
    check_writable_folder(corpus)
    check_writable_folder(folder / "reports")
    before, now = load(last or folder / RECORD), datetime.now(UTC)
    first = now.toordinal() * SEEDS_A_NIGHT if seed is None else seed
    plans = [
        Plan(target=name, seconds=seconds, executions=executions, seed=first, processes=processes)
        for name in names
    ]
    with bars(err) as tick:
        summaries, saved, ended = _campaigns(plans, corpus, folder, tick)
        rows = _kills(mutant or mutants.names(), seeds, processes, tick) if ended else None
    if not summaries:
        raise KeyboardInterrupt
    date = now.isoformat(timespec="seconds")
    night = night_of(summaries, rows, date=date, revision=_revision(), last=before)
    _keep(night, before, saved, folder)
    replays = {
        signature: case.replay_command(path, plans[0].system) for signature, path in saved.items()
    }
    deliver(out, parts(night, before, replays), json=json, result=night)
    if night.new(before):
        return 1
    return EXIT_INTERRUPTED if night.interrupted else 0


def _campaigns(
    plans: Sequence[Plan], corpus: Path, folder: Path, tick: Tick
) -> tuple[list[Summary], dict[str, Path], bool]:
    """Run them, saving what each finds as it ends: what they did, the case of each signature, and
    whether all came to their end before Ctrl-C did."""
    summaries: list[Summary] = []
    saved: dict[str, Path] = {}
    with suppress(KeyboardInterrupt):
        for plan in plans:
            summaries.append(_campaign(plan, corpus, tick))
            saved.update(_artefacts(summaries[-1], folder))
            if summaries[-1].interrupted:
                break
        else:
            return summaries, saved, True
    return summaries, saved, False


def _kills(names: Sequence[str], seeds: int, processes: int, tick: Tick) -> list[KillRow] | None:
    """The kill report; None where Ctrl-C came before it was done."""
    with suppress(KeyboardInterrupt):
        return kill_report.report(
            names,
            seeds=seeds,
            processes=processes,
            progress=lambda done, total: tick("mutants", done, total),
        )
    return None


def _campaign(plan: Plan, corpus: Path, tick: Tick) -> Summary:
    """A campaign that begins where the last night's has ended."""

    def progress(news: campaign.News) -> None:
        assert plan.seconds is not None
        tick(plan.target, min(int(news.seconds), int(plan.seconds)), int(plan.seconds))

    return campaign.run(plan, corpus=Corpus(corpus), progress=progress)


def _artefacts(summary: Summary, folder: Path) -> Iterator[tuple[str, Path]]:
    """Save each failure and its report; yields its signature and the path of its case."""
    plan = summary.plan
    for failure in summary.failures:
        name = f"{plan.target}-{failure.signature.replace('/', '-')}"
        path = folder / "cases" / f"{name}.json"
        found = case.case_of(
            failure.outcome,
            system=plan.system,
            path=path,
            pin=plan.pin,
            seen=Rarity(failure.count, summary.executions),
        )
        case.save(found, path)
        yield f"{plan.target} {failure.signature}", path
        page = _page(path)
        page.unlink(missing_ok=True)
        try:
            write_report(path, page)
        except case.CaseError as error:
            # a run that does not repeat is a finding too, and ends no night
            print(f"{page} was not written: {error}", file=sys.stderr)


def _page(path: Path) -> Path:
    """Where the report of the case at `path` goes."""
    return path.parent.parent / "reports" / f"{path.stem}.html"


def _keep(night: Night, last: Night | None, saved: dict[str, Path], folder: Path) -> None:
    """Write the summary and then the record: what the record knows of, somebody could read."""
    pages = {signature: _page(path) for signature, path in saved.items()}
    written = {
        signature: str(page.relative_to(folder))
        for signature, page in pages.items()
        if page.exists()
    }
    write_file(folder / SUMMARY, markdown(night, last, written).encode())
    try:
        write_whole(folder / RECORD, json_of(night))
    except OSError as error:
        raise UsageError(
            f"{folder / RECORD} cannot be written ({error.strerror}): name a folder on a disk with "
            "room by --folder."
        ) from error


def _revision() -> str:
    """Of the checkout that this runs from; "unknown" outside of one."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
