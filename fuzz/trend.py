"""What a night of campaigns found, beside the last one: new failures, and how figures moved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fuzz.files import Unreadable, read_plain
from fuzz.mutants.report import KillRow
from fuzz.summary import Summary

SCHEMA = "kvoracle-night"
MOST_BYTES = 16 << 20
SLOWER = 2.0
"""A mutant found so many times later than last night is listed."""
NOTICEABLE_S = 1.0
"""Seconds to the kill below which that is noise."""
INTERRUPTED = "Interrupted: this is what was done until then, without a kill report."


class NightError(ValueError):
    """A file that is no record of a night; the message names the cure."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A campaign in figures: executions, those a second and core, features of its corpus, and
    resident bytes of the largest worker, first and last."""

    executions: int
    rate: float
    features: int
    resident_start: int
    resident_end: int


class Night(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a night leaves for the next one.

    Fields:
        date, revision: when (UTC), and of what.
        campaigns: by target.
        kills: median CPU seconds to the kill, by mutant.
        failures: signature to the sentence of its smallest case, of this night.
        known: signatures of this night and of all before it.
        interrupted: it ended early, without a kill report.
    """

    schema: str = SCHEMA
    date: str
    revision: str
    campaigns: dict[str, Figures]
    kills: dict[str, float]
    failures: dict[str, str]
    known: list[str]
    interrupted: bool = False

    def new(self, last: Night | None) -> list[str]:
        """Signatures that no night before had."""
        return sorted(self.failures.keys() - set(last.known if last else ()))


def night_of(
    summaries: Iterable[Summary],
    rows: Iterable[KillRow] | None,
    *,
    date: str,
    revision: str,
    last: Night | None,
) -> Night:
    """The record of a night; an interrupted one has no `rows`."""
    interrupted = rows is None
    summaries, rows = list(summaries), list(rows or ())
    failures = dict(_amiss(summaries, rows))
    return Night(
        date=date,
        revision=revision,
        campaigns={
            each.plan.target: Figures(
                executions=each.executions,
                rate=each.executions_per_second_and_core,
                features=each.features,
                resident_start=each.memory.worker_start,
                resident_end=each.memory.worker_end,
            )
            for each in summaries
        },
        kills={row.name: row.cpu_seconds for row in rows if row.verdict == "killed"},
        failures=failures,
        known=sorted(failures.keys() | set(last.known if last else ())),
        interrupted=interrupted,
    )


def _amiss(summaries: list[Summary], rows: list[KillRow]) -> Iterator[tuple[str, str]]:
    """What counts as a failure, by its signature: of an engine, or of the harness itself."""
    for each in summaries:
        target = each.plan.target
        for failure in each.failures:
            yield f"{target} {failure.signature}", failure.outcome.violations[0].sentence
        # a campaign that ended early need not have seen everything yet
        for event in [] if each.interrupted else each.missing:
            yield f"{target} never saw {event}", f"No execution of {target} showed {event}."
        for name in each.missed:
            yield f"{target} missed {name}", f"The planted fault {name} was not found."
        for start, stop in each.lost:
            sentence = f"Two workers died of the seeds {start} to {stop - 1}."
            yield f"{target} lost seeds", sentence
    for row in rows:
        if not row.passed:
            sentence = f"The mutant {row.name} ({row.sentence}) did not pass: {row.verdict}."
            yield f"mutant {row.name} {row.verdict}", sentence


def load(path: Path) -> Night | None:
    """The record of the last night; None where there is none yet.

    Raises:
        NightError: with one sentence, where the file is something else.
    """
    try:
        night = msgspec.json.decode(read_plain(path, most_bytes=MOST_BYTES), type=Night)
    except FileNotFoundError:
        return None
    except Unreadable as error:
        raise NightError(f"{path} {error}: name a record that `kvoracle nightly` wrote.") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NightError(
            f"{path} is no record of a night ({error}): name one that `kvoracle nightly` wrote, or "
            "a file that is not there, to begin anew."
        ) from error
    if night.schema != SCHEMA:
        raise NightError(f"{path} is a {night.schema!r}, no {SCHEMA!r}: name another file.")
    return night


def markdown(night: Night, last: Night | None, artefacts: dict[str, str]) -> str:
    """The summary of a night; `artefacts` names the report of a signature."""
    since = f", compared with {last.date} ({last.revision})" if last else ", the first one"
    lines = [f"# Night of {night.date}", "", f"Revision {night.revision}{since}.", ""]
    new = night.new(last)
    verdict = _verdict(night, new)
    lines += [f"**{verdict}**" if new else verdict, ""]
    if night.interrupted:
        lines += [INTERRUPTED, ""]
    if night.failures:
        lines += ["| failure | new | what was seen | report |", "|---|---|---|---|"]
        for signature, sentence in sorted(night.failures.items()):
            fresh = "**new**" if signature in new else "known"
            report = artefacts.get(signature, "")
            lines.append(f"| {_cell(signature)} | {fresh} | {_cell(sentence)} | {_cell(report)} |")
        lines.append("")
    lines += ["| target | executions | a second and core | features | worker MiB, first and last |"]
    lines += ["|---|--:|--:|--:|--:|"]
    for target, now in night.campaigns.items():
        then = last.campaigns.get(target) if last else None
        lines.append(
            f"| {target} | {now.executions:,} | {_moved(now.rate, then and then.rate)} "
            f"| {_moved(now.features, then and then.features)} "
            f"| {now.resident_start >> 20}, {now.resident_end >> 20} |"
        )
    slower = list(_slower(night, last))
    if not night.interrupted:
        lines += ["", f"{len(night.kills)} mutants killed."]
    if slower:
        lines += ["", "| found much later | CPU s | last night |", "|---|--:|--:|"]
        lines += [f"| {name} | {now:.2f} | {then:.2f} |" for name, now, then in slower]
    return "\n".join(lines) + "\n"


def parts(night: Night, last: Night | None, replays: Mapping[str, str]) -> Iterator[RenderableType]:
    """The same for a terminal; `replays` has the command that replays a signature."""
    new = night.new(last)
    table = Table("target", "executions", "a second and core", "features")
    for target, now in night.campaigns.items():
        then = last.campaigns.get(target) if last else None
        rate = _moved(now.rate, then and then.rate)
        features = _moved(now.features, then and then.features)
        table.add_row(target, f"{now.executions:,}", rate, features)
    yield table
    if not night.interrupted:
        yield Text(f"{len(night.kills)} mutants killed.")
    for name, seconds, before in _slower(night, last):
        yield Text(f"{name} was found after {seconds:.2f} CPU s; last night after {before:.2f}.")
    for signature, sentence in sorted(night.failures.items()):
        fresh = signature in new
        yield Text.assemble(("new", "bold red") if fresh else "known", f": {signature}")
        yield Text(f"  {sentence}")
        if fresh and signature in replays:
            yield Text(f"  {replays[signature]}")
    if night.interrupted:
        yield Text(INTERRUPTED)
    yield Text(_verdict(night, new), "bold red" if new else "")


def _verdict(night: Night, new: list[str]) -> str:
    known = len(night.failures) - len(new)
    if new:
        return f"New failures: {len(new)}. Known ones that are still there: {known}."
    return f"No new failure. Known ones that are still there: {known}."


def _moved(now: float, then: float | None) -> str:
    """A figure, and by how many percent it moved."""
    shown = f"{now:,.0f}"
    return shown if not then else f"{shown} ({(now / then - 1) * 100:+.0f} %)"


def _slower(night: Night, last: Night | None) -> Iterator[tuple[str, float, float]]:
    """Mutants that were found much later than last night."""
    for name, now in night.kills.items():
        then = last.kills.get(name) if last else None
        if then is not None and now > max(SLOWER * then, NOTICEABLE_S):
            yield name, now, then


def _cell(text: str) -> str:
    """Text of a table's cell, in which nothing is taken for markup."""
    for sign in "\\`*_[]<>|":
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.split())
