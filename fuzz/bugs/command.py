"""What `kvoracle bugs` does: put every encoding to the test, and say what is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from pathlib import Path

import msgspec
from rich.box import SIMPLE
from rich.table import Column, Table
from rich.text import Text

from fuzz.bugs.check import Checked, check
from fuzz.bugs.registry import find, registered
from fuzz.terminal import (
    JsonFile,
    Positive,
    Processes,
    bars,
    check_writable,
    deliver,
    err,
    out,
    write_file,
)
from fuzz.workers import workers


class BugRow(msgspec.Struct, frozen=True, kw_only=True):
    """A public bug, with each of its encodings put to the test; or what is missing for one."""

    id: str
    sentence: str
    missing: str
    encodings: tuple[Checked, ...]

    @property
    def passed(self) -> bool:
        """Every encoding is caught, with its control; a row without any owes nothing."""
        return all(checked.passed for checked in self.encodings)


def bugs(
    *ids: str,
    processes: Processes = 2,
    seconds: Positive = 60,
    markdown: Path | None = None,
    json: JsonFile = None,
) -> int:
    """Re-create public bugs and report which oracle catches each; exit status 0 when every
    encoded one is caught, and not seen where its fault is taken out.

    Parameters
    ----------
    ids
        Only these, such as sglang#42178; all without ids.
    seconds
        Give a search up after so many.
    markdown
        Write the table of docs/bugs.md to this file.
    """
    check_writable(json)
    check_writable(markdown)
    wanted = [find(name).id for name in ids] or list(registered())
    with bars(err) as tick:
        rows = report(
            wanted,
            processes=processes,
            budget_s=seconds,
            progress=lambda done, total: tick("encodings", done, total),
        )
    try:
        if markdown is not None:
            write_file(markdown, table_of_docs(rows).encode())
    finally:
        parts = [table(rows), lacking(rows), Text(summary(rows))]
        deliver(out, parts, json=json, result=rows)
    return 0 if all(row.passed for row in rows) else 1


def report(
    wanted: Sequence[str],
    *,
    processes: int = 1,
    budget_s: float = 60.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[BugRow]:
    """Put each encoding of the `wanted` bugs to the test, once if it serves several; `progress` is
    told the encodings done and those in all."""
    found = [find(name) for name in wanted]
    names = list(dict.fromkeys(name for bug in found for name in bug.by))
    checked: dict[str, Checked] = {}
    with workers(processes) as pool:
        running = [pool.submit(check, name, budget_s=budget_s) for name in names]
        for done, future in enumerate(as_completed(running), start=1):
            result = future.result()
            checked[result.name] = result
            progress(done, len(names))
    return [
        BugRow(
            id=bug.id,
            sentence=bug.sentence,
            missing=bug.missing,
            encodings=tuple(checked[name] for name in bug.by),
        )
        for bug in found
    ]


def summary(rows: Sequence[BugRow]) -> str:
    """How many rows are encoded and caught, by how many encodings, and how often the busiest of
    those serves."""
    caught = [row for row in rows if row.encodings and row.passed]
    serves = Counter(checked.name for row in caught for checked in row.encodings)
    most = max(serves.values(), default=0)
    return (
        f"{len(caught)} of {len(rows)} bugs encoded and caught, by {len(serves)} encodings, of "
        f"which none serves more than {most}; each passes without its fault."
    )


def table(rows: Sequence[BugRow]) -> Table:
    """What is encoded, for a terminal."""
    printed = Table(
        Column("bug", overflow="fold"),
        Column("encoding", overflow="fold"),
        "caught by",
        Column("CPU s", justify="right"),
        box=SIMPLE,
        padding=0,
    )
    for row in rows:
        for checked in row.encodings:
            printed.add_row(row.id, checked.name, _verdict(checked), f"{checked.seconds:.2f}")
    return printed


def lacking(rows: Sequence[BugRow]) -> Table:
    """What is not encoded, and why."""
    printed = Table(Column("bug", overflow="fold"), "missing", box=SIMPLE, padding=0)
    for row in rows:
        if row.missing:
            printed.add_row(row.id, row.missing)
    return printed


def _verdict(checked: Checked) -> str:
    """The oracle, or what is amiss."""
    if checked.control:
        return f"its control fails: {checked.control}"
    if checked.oracle is None:
        return "nothing"
    return checked.oracle if checked.named else f"{checked.oracle}, which its entry does not name"


def table_of_docs(rows: Sequence[BugRow]) -> str:
    """The tables of docs/bugs.md: what is encoded, and what is missing for the rest."""
    lines = [
        summary(rows),
        "",
        "| bug | mechanism | encoding | caught by | CPU s |",
        "|---|---|---|---|--:|",
    ]
    for row in rows:
        if row.encodings:
            cells = zip(
                *(
                    (f"`{c.name}` ({c.kind})", _verdict(c), f"{c.seconds:.2f}")
                    for c in row.encodings
                ),
                strict=True,
            )
            joined = " | ".join("<br>".join(cell) for cell in cells)
            lines.append(f"| {row.id} | {row.sentence} | {joined} |")
    lines += ["", "| bug | mechanism | what is missing |", "|---|---|---|"]
    lines += [f"| {row.id} | {row.sentence} | {row.missing} |" for row in rows if row.missing]
    return "\n".join(lines) + "\n"
