"""`kvoracle`: the command line over everything here.

Every subcommand prints tables on standard output, progress on standard error, and with `--json
FILE` writes its whole result.  Exit status: 0 when all holds, 1 when something was found or a
bar was missed, 2 when the input is of no use or the result cannot be written, 130 when Ctrl-C
ended it before anything was found.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from cyclopts import App, CycloptsError
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

import systems
from fuzz import campaign, capacity, case, mutants, targets
from fuzz.capacity import Budget, Layers, Ratios
from fuzz.explore.command import explore
from fuzz.mutants import report as kill_report
from fuzz.outcome import Outcome
from fuzz.run import execute
from fuzz.stamps import StampError
from fuzz.tape import Tape
from fuzz.targets.setup import KPool, Payload, PhysicalPageSize, Pin
from fuzz.terminal import (
    JsonFile,
    Positive,
    Processes,
    UsageError,
    bars,
    check_writable,
    check_writable_folder,
    deliver,
    err,
    out,
    write_file,
)
from fuzz.verify.capacity import CapacityError
from fuzz.verify.mooncake import TraceError
from fuzz.verify.report import run_verify, tables
from reference.contract import ContractError
from reference.geometry import Geometry, GeometryError, ModelShape, RowFormat

BAD_INPUT = (
    CycloptsError,
    UsageError,
    GeometryError,
    StampError,
    TraceError,
    CapacityError,
    ContractError,
    case.CaseError,
    targets.UnknownTarget,
    mutants.UnknownMutant,
    systems.UnknownSystem,
)
EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


app = App(
    name="kvoracle",
    help="Correctness oracle and fuzzer for the KV-cache paths of LLM serving engines.",
    suppress_keyboard_interrupt=False,
)
app.command(explore)


@app.command
def verify(
    *,
    trace: Path | None = None,
    quick: bool = False,
    processes: Processes = 2,
    json: JsonFile = None,
) -> int:
    """Run the reference and the optimized engine on the same requests and hold every figure to
    its bar: NIAH, the copy experiment, hit lengths, the capacity model, a request trace.

    Parameters
    ----------
    trace
        Requests in Mooncake's format, one JSON object a line.  Without it, a trace with the same
        statistics is generated.
    quick
        Small sizes, for a first look.
    processes
        Worker processes.
    """
    check_writable(json)
    with bars(err) as tick:
        report = run_verify(trace, quick=quick, processes=processes, progress=tick)
    deliver(out, tables(report), json=json, result=report)
    return 0 if report.passed else 1


@app.command
def fuzz(
    target: str,
    *,
    executions: Positive | None = None,
    seconds: Positive | None = None,
    seed: int = 0,
    processes: Processes = 1,
    system: str = "optimized",
    mutant: str | None = None,
    payload: Payload | None = None,
    kpool: KPool | None = None,
    physical_page_size: PhysicalPageSize | None = None,
    row_format: RowFormat | None = None,
    cases: Path = Path("out/cases"),
    json: JsonFile = None,
) -> int:
    """Search for a failure.  Each is shrunk and saved as a case that `kvoracle replay` runs.

    Parameters
    ----------
    target
        What to do to the engine; an unknown name lists those that there are.
    executions
        Stop after so many (1,000 if `seconds` is not given either).
    seconds
        Stop after so many.
    seed
        The first seed; they count up from it.
    mutant
        Plant this fault first.
    payload
        Only stamped runs, or only runs of a model.
    kpool, physical_page_size, row_format
        Fix this part of the geometry, which the tape would draw.
    cases
        Folder for the cases.
    """
    check_writable(json)
    pin = Pin(
        payload=payload,
        kpool=kpool,
        physical_page_size=physical_page_size,
        row_format=row_format,
    )
    systems.load(system)
    _check_ranks(targets.find(target), system, pin)
    _check_plantable(mutant, system)
    check_writable_folder(cases)
    if executions is None and seconds is None:
        executions = 1000
    plan = campaign.Plan(
        target=target,
        system=system,
        mutant=mutant,
        pin=pin,
        executions=executions,
        seconds=seconds,
        seed=seed,
        processes=processes,
    )
    began = time.monotonic()
    with bars(err) as tick:

        def progress(done: int, _: int) -> None:
            if seconds is None:
                tick(target, done, executions or done)
            else:
                tick(f"{target}, seconds", min(int(time.monotonic() - began), seconds), seconds)

        summary = campaign.run(plan, progress=progress)
    saved = [
        (case.case_of(f.outcome, system=system, path=path, pin=pin, mutant=mutant), path)
        for f in summary.failures
        for path in [cases / f"{target}-{f.signature.replace('/', '-')}-{f.seed}.json"]
    ]
    try:
        for found, path in saved:
            case.save(found, path)
    finally:
        lines = _campaign(summary, [found.replay for found, _ in saved])
        deliver(out, lines, json=json, result=summary)
    if summary.interrupted and not summary.failures:
        return EXIT_INTERRUPTED
    return 0 if summary.passed else 1


@app.command
def replay(file: Path, *, json: JsonFile = None) -> int:
    """Run a saved case again, up to its first violation.  Exit status 1 if it still fails.

    Parameters
    ----------
    file
        A case that `kvoracle fuzz` saved.
    """
    check_writable(json)
    saved = case.load(file)
    system, target = systems.load(saved.system), targets.find(saved.target)
    _check_plantable(saved.mutant, saved.system)
    with mutants.find(saved.mutant).applied() if saved.mutant else nullcontext():
        outcome = execute(system, target, Tape(saved.values), pin=saved.pin)
    lines = _outcome(outcome)
    if outcome.skipped:
        lines.append(Text(f"skipped, since the system lacks it: {', '.join(outcome.skipped)}"))
    if not outcome.failed:
        case.check_same_run(saved, outcome, file)
        lines.append(Text("This case no longer fails."))
    deliver(out, lines, json=json, result=outcome)
    return 1 if outcome.failed else 0


@app.command(name="mutants")
def kill(
    *names: str,
    seeds: Positive = 10,
    processes: Processes = 2,
    seconds: Positive = 60,
    markdown: Path | None = None,
    json: JsonFile = None,
) -> int:
    """Plant each fault and report how the harness finds it: the kill report.

    Parameters
    ----------
    names
        Only these; all without names.
    seeds
        Searches for each, of which the medians are shown.
    seconds
        Give a search up after so many.
    markdown
        Write the table of docs/mutants.md to this file.
    """
    check_writable(json)
    check_writable(markdown)
    for name in names:
        mutants.find(name)
    with bars(err) as tick:
        rows = kill_report.report(
            names or mutants.names(),
            seeds=seeds,
            processes=processes,
            budget_s=seconds,
            progress=lambda done, total: tick("mutants", done, total),
        )
    try:
        if markdown is not None:
            write_file(markdown, kill_report.markdown(rows).encode())
    finally:
        deliver(out, [kill_report.table(rows)], json=json, result=rows)
    return 0 if all(row.passed for row in rows) else 1


@app.command
def geometry(
    *,
    kpool: int = 4,
    physical_page_size: int = 64,
    topk: int = 2048,
    mamba_track_interval: int = 256,
    max_drafts: int = 0,
    dcp_size: int = 1,
    index_dim: int = 128,
    device_buffer_size: int | None = None,
    json: JsonFile = None,
) -> int:
    """Check a geometry as a server must at start-up, and print the sizes that follow from it."""
    check_writable(json)
    checked = Geometry(
        kpool=kpool,
        physical_page_size=physical_page_size,
        topk=topk,
        mamba_track_interval=mamba_track_interval,
        max_drafts=max_drafts,
        dcp_size=dcp_size,
        device_buffer_size=device_buffer_size,
    )
    sizes = {
        "logical page, tokens": checked.logical_page_size,
        "physical pages of a logical page": checked.kpool,
        "index page, slots": checked.index_page_size,
        "index page, bytes": checked.index_page_bytes(ModelShape(index_dim=index_dim).index_dim),
        "tail ring, rows": checked.ring_size,
        "selected groups": checked.topk_groups,
        "selection width, columns": checked.selection_width,
    }
    table = Table("size", "value")
    for name, value in sizes.items():
        table.add_row(name, str(value))
    deliver(out, [table], json=json, result=sizes)
    return 0


@app.command(name="capacity")
def fit_tokens(
    *,
    device_budget: Budget,
    host_budget: Budget,
    ratios: Ratios = (1, 2, 4, 8),
    kpool: int = 4,
    physical_page_size: int = 64,
    row_format: RowFormat = RowFormat.BF16,
    layers: Layers = 45,
    dsa_period: int = 4,
    latent: int = 512,
    index_dim: int = 128,
    chart: Path | None = None,
    json: JsonFile = None,
) -> int:
    """How many tokens fit into a device and a host budget, with HiSparse at each ratio and
    without it, and which budget limits them.

    Parameters
    ----------
    device_budget
        Bytes of one device for KV rows and index keys, such as 28GB or 26GiB.
    host_budget
        Bytes of host memory for KV rows, for one device.
    ratios
        Logical tokens a device token; repeat the option for several.
    layers, dsa_period
        Of so many layers, every dsa_period-th has KV rows and index keys.
    latent, index_dim
        Channels of a KV row, and of an index key.
    chart
        Write a bar chart of tokens against ratio to this .png or .svg file.
    """
    check_writable(json)
    check_writable(chart)
    if json is not None and chart is not None and json.absolute() == chart.absolute():
        raise UsageError(f"{json} is both --json and --chart: name two files.")
    capacity.check_chart(chart)
    # no other size of a geometry counts here: the least that its rules allow
    checked = Geometry(
        kpool=kpool,
        physical_page_size=physical_page_size,
        topk=kpool,
        mamba_track_interval=kpool * physical_page_size,
        row_format=row_format,
    )
    shape = ModelShape(layers=layers, dsa_period=dsa_period, latent=latent, index_dim=index_dim)
    found = capacity.report(
        checked, shape, device_budget=device_budget, host_budget=host_budget, ratios=ratios
    )
    try:
        if chart is not None:
            write_file(chart, capacity.chart(found, file_format=chart.suffix[1:].lower()))
    finally:
        deliver(out, capacity.parts(found), json=json, result=found)
    return 0


def _check_ranks(target: targets.Target, system: str, pin: Pin) -> None:
    """A target with a driver of its own draws its geometry itself, and only one system has what
    it drives."""
    if target.ranges is None and (system != "optimized" or pin != Pin()):
        raise UsageError(
            f"{target.name} drives ranks of the optimized engine, as its tape says: leave out "
            "--system, --payload, --kpool, --physical-page-size and --row-format."
        )


def _check_plantable(mutant: str | None, system: str) -> None:
    """Mutants patch the optimized engine; on any other a campaign would be in vain."""
    if mutant is None:
        return
    mutants.find(mutant)
    if system != "optimized":
        raise UsageError(
            f"mutant {mutant!r} is a fault of the optimized engine and plants nothing in "
            f"{system!r}: choose the system 'optimized', or no mutant."
        )


def _campaign(summary: campaign.Summary, replays: Sequence[str]) -> Iterator[RenderableType]:
    """What a campaign did, then each failure with the command that replays it."""
    table = Table("campaign", summary.plan.target)
    table.add_row("executions", f"{summary.executions:,}")
    table.add_row("operations", f"{summary.operations:,}")
    table.add_row("executions a second and core", f"{summary.executions_per_second_and_core:.0f}")
    table.add_row("seconds", f"{summary.seconds:.1f}")
    for stage, ratio in sorted(summary.ratios.items()):
        table.add_row(f"largest error / bound, {stage}", f"{ratio:.3g}")
    for event, count in summary.events.items():
        table.add_row(f"seen: {event}", f"{count:,}")
    cure = f"{summary.plan.system} may lack it" if summary.skipped else "run more executions"
    for event in summary.missing:
        table.add_row(Text(f"never seen: {event}", "bold red"), cure)
    for operation in summary.skipped:
        table.add_row(f"skipped: {operation}", f"{summary.plan.system} cannot")
    table.add_row("failures", str(sum(failure.count for failure in summary.failures)))
    if summary.interrupted:
        table.add_row(Text("interrupted", "bold red"), "this is what was done until then")
    yield table
    for number, (failure, replay_command) in enumerate(
        zip(summary.failures, replays, strict=True), start=1
    ):
        title = Text(f"\nfailure {number}", "bold")
        yield title.append(f": {failure.signature}, {failure.count} times", "not bold")
        yield from _outcome(failure.outcome)
        yield Text(replay_command)


def _outcome(outcome: Outcome) -> list[Text]:
    """A run in words, and what was wrong with its end."""
    return [
        Text(outcome.setup),
        *(Text(f"  {n}. {op.text}") for n, op in enumerate(outcome.operations, start=1)),
        *(
            Text.assemble("  ", (violation.oracle, "red"), f": {violation.sentence}")
            for violation in outcome.violations
        ),
    ]


def main() -> None:
    """Entry point of the `kvoracle` command."""
    try:
        status = app(
            sys.argv[1:], result_action="return_value", exit_on_error=False, print_error=False
        )
    except BAD_INPUT as error:
        print(f"kvoracle: {error}", file=sys.stderr)
        status = EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("kvoracle: interrupted before there was a result: run it again.", file=sys.stderr)
        status = EXIT_INTERRUPTED
    sys.exit(status)


if __name__ == "__main__":
    main()
