"""`kvoracle replay`: a saved case once more, and what is wrong with its last operation."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

import systems
from fuzz import case, mutants, targets
from fuzz.checks import check_runnable, run_on
from fuzz.report.story import CLAUSES, ORACLES, asks, owners
from fuzz.run import execute
from fuzz.step import Violation
from fuzz.tape import Tape
from fuzz.terminal import JsonFile, check_kept, check_writable, deliver, out, outcome_lines


def replay(file: Path, *, system: str | None = None, json: JsonFile = None) -> int:
    """Run a saved case again, up to its first violation.  Exit status 1 if it still fails.

    Parameters
    ----------
    file
        A case that `kvoracle fuzz` saved.
    system
        Run it on this one instead of the one that it was found on.  A case of a checkout needs it.
    """
    check_writable(json)
    check_kept(file, json)
    saved = run_on(case.load(file), file, system)
    loaded, target = systems.load(saved.system), targets.find(saved.target)
    check_runnable(saved)
    with mutants.find(saved.mutant).applied() if saved.mutant else nullcontext():
        outcome = execute(loaded, target, Tape(saved.values), pin=saved.pin)
    lines: list[RenderableType] = [*outcome_lines(outcome)]
    if outcome.skipped:
        lines.append(Text(f"skipped, since the system lacks it: {', '.join(outcome.skipped)}"))
    if outcome.failed:
        lines += [_found(outcome.violations[0]), _further(file, saved.system)]
    else:
        case.check_same_run(saved, outcome, file)
        seen = f" {saved.seen}" if saved.seen else ""
        lines.append(Text(f"This case no longer fails.{seen}"))
    deliver(out, lines, json=json, result=outcome)
    return 1 if outcome.failed else 0


def _found(violation: Violation) -> Table:
    """The first violation: the row, its owners, and who objects."""
    table = Table("violation", f"{violation.oracle}/{violation.component}")
    for name, said in owners(violation):
        table.add_row(name, Text(said))
    clause = CLAUSES.get(violation.component) if violation.oracle == "drain" else None
    if clause:
        table.add_row(f"clause {violation.component}", clause)
    elif violation.oracle in ORACLES:
        table.add_row("the oracle asks that", asks(violation))
    return table


def _further(file: Path, system: str) -> Text:
    return Text(case.replay_command(file, system).replace("replay", "report", 1))
