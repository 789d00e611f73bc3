"""`kvoracle report`: a saved case as a page to read, and as a timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from fuzz import case
from fuzz.checks import check_runnable, run_on
from fuzz.report.page import page
from fuzz.report.perfetto import trace
from fuzz.report.record import record
from fuzz.terminal import UsageError, check_kept, check_writable, deliver, out, write_file


def report(
    file: Path,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("report.html"),
    perfetto: Path | None = None,
    system: str | None = None,
) -> int:
    """Run a saved case again and write a page about it: the story, a space-time diagram, the page
    map before and after, and what differs.  Exit status 0 once it is written, whether or not the
    case still fails.

    Parameters
    ----------
    file
        A case that `kvoracle fuzz` saved.
    output
        The page: one file, which needs no network and runs no script.
    perfetto
        Write the timeline to this file, which ui.perfetto.dev opens; one step is 1 ms.
    system
        Run it on this one instead of the one that it was found on.  A case of a checkout needs it.
    """
    for path in (output, perfetto):
        check_writable(path)
    check_kept(file, output, perfetto)
    if perfetto is not None and perfetto.absolute() == output.absolute():
        raise UsageError(f"{output} is both --output and --perfetto: name two files.")
    said = write_report(file, output, perfetto=perfetto, system=system)
    deliver(out, [Text(said)], json=None, result=None)
    return 0


def write_report(
    file: Path, output: Path, *, perfetto: Path | None = None, system: str | None = None
) -> str:
    """Write the page of the case in `file`, run on `system` or its own, to `output`, and its
    timeline; what was found, in a sentence.

    Raises:
        CaseError, UsageError: with one sentence, where the case is of no use or a file cannot be
            written.
    """
    data = case.read(file)
    saved = run_on(case.decode(data, file), file, system)
    check_runnable(saved)
    outcome, recorded = record(saved)
    if not outcome.failed:
        case.check_same_run(saved, outcome, file)
    write_file(output, page(saved, data, file, outcome, recorded, timed=perfetto is not None))
    if perfetto is not None:
        title = f"{outcome.signature or 'no failure'} in {outcome.target}"
        write_file(perfetto, trace(recorded.timeline, title=title))
    found = outcome.violations[0].sentence if outcome.failed else "This case no longer fails."
    also = f" The timeline is in {perfetto}." if perfetto is not None else ""
    return f"{output}: {found}{also}"
