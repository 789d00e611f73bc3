"""`kvoracle nightly`: campaigns over all targets, the kill report, and what is new since the last.

The folder keeps everything that a night leaves: `night.json`, which the next one compares itself
with, `summary.md`, and for each failure its case and its report.  What earlier nights found lies in
the corpus, which campaigns start from.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from fuzz import campaign, case, mutants, targets
from fuzz.corpus import Corpus
from fuzz.mutants import report as kill_report
from fuzz.rarity import Rarity
from fuzz.report.command import write_report
from fuzz.summary import Plan, Summary
from fuzz.terminal import (
    JsonFile,
    Natural,
    Positive,
    Processes,
    Tick,
    bars,
    check_writable,
    check_writable_folder,
    deliver,
    err,
    out,
    write_file,
)
from fuzz.trend import load, markdown, night_of

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
    only for a failure that no night before had.

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
    names = target or list(targets.names())
    for name in names:
        targets.find(name)
    for name in mutant or ():
        mutants.find(name)
    check_writable_folder(folder)
    check_writable_folder(corpus)
    before, now = load(last or folder / RECORD), datetime.now(UTC)
    first = now.toordinal() * SEEDS_A_NIGHT if seed is None else seed
    with bars(err) as tick:
        summaries: list[Summary] = []
        for name in names:
            plan = Plan(
                target=name,
                seconds=seconds,
                executions=executions,
                seed=first,
                processes=processes,
            )
            summaries.append(_campaign(plan, corpus, tick))
            if summaries[-1].interrupted:
                raise KeyboardInterrupt
        rows = kill_report.report(
            mutant or mutants.names(),
            seeds=seeds,
            processes=processes,
            progress=lambda done, total: tick("mutants", done, total),
        )
    date = now.isoformat(timespec="seconds")
    night = night_of(summaries, rows, date=date, revision=_revision(), last=before)
    text = markdown(night, before, _artefacts(summaries, folder))
    write_file(folder / SUMMARY, text.encode())
    deliver(out, [Text(text)], json=json, result=night)
    deliver(out, [], json=folder / RECORD, result=night)
    return 1 if night.new(before) else 0


def _campaign(plan: Plan, corpus: Path, tick: Tick) -> Summary:
    """A campaign that begins where the last night's has ended."""

    def progress(news: campaign.News) -> None:
        assert plan.seconds is not None
        tick(plan.target, min(int(news.seconds), int(plan.seconds)), int(plan.seconds))

    return campaign.run(plan, corpus=Corpus(corpus), progress=progress)


def _artefacts(summaries: Sequence[Summary], folder: Path) -> dict[str, str]:
    """Save each failure with its report; returns the report's name by signature."""
    written = {}
    for summary in summaries:
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
            page = folder / "reports" / f"{name}.html"
            page.parent.mkdir(exist_ok=True)
            write_report(path, page)
            written[f"{plan.target} {failure.signature}"] = str(page.relative_to(folder))
    return written


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
