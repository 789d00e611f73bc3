"""`kvoracle`: the command line over everything here.

Every subcommand prints tables on standard output, progress on standard error, and with `--json
FILE` writes its whole result.  Exit status: 0 when all holds, 1 when something was found or a
bar was missed, 2 when the input is of no use or the result cannot be written, 130 when Ctrl-C
ended it before anything was found.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cyclopts import App, CycloptsError
from rich.table import Table

import systems
from fuzz import capacity, case, mutants, targets
from fuzz.bench.command import bench
from fuzz.bisect.command import bisect
from fuzz.bugs.command import bugs
from fuzz.bugs.registry import UnknownBug
from fuzz.capacity import Budget, Layers, Ratios
from fuzz.corpus import CorpusError
from fuzz.determinism import digest
from fuzz.explore.command import explore
from fuzz.fuzzing import corpus, fuzz
from fuzz.mutants import report as kill_report
from fuzz.nightly import nightly
from fuzz.report.command import report
from fuzz.report.replaying import replay
from fuzz.stamps import StampError
from fuzz.terminal import (
    EXIT_INTERRUPTED,
    JsonFile,
    Positive,
    Processes,
    UsageError,
    bars,
    check_writable,
    deliver,
    err,
    out,
    printable,
    write_file,
)
from fuzz.trend import NightError
from fuzz.verify.capacity import CapacityError
from fuzz.verify.mooncake import TraceError
from fuzz.verify.report import check_verifiable, left_out, run_verify, tables
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
    mutants.UnknownFunction,
    mutants.UnknownMutant,
    UnknownBug,
    CorpusError,
    NightError,
    systems.UnknownSystem,
    systems.CannotLoad,
)
EXIT_BAD_INPUT = 2


app = App(
    name="kvoracle",
    help="Correctness oracle and fuzzer for the KV-cache paths of LLM serving engines.",
    suppress_keyboard_interrupt=False,
)
app.command(bench)
app.command(digest)
app.command(explore)
app.command(replay)
app.command(report)
app.command(bisect)
app.command(bugs)
app.command(fuzz)
app.command(corpus)
app.command(nightly)


@app.command
def verify(
    *,
    system: str = "optimized",
    trace: Path | None = None,
    quick: bool = False,
    processes: Processes = 2,
    json: JsonFile = None,
) -> int:
    """Run the reference and the optimized engine on the same requests and hold every figure to
    its bar: NIAH, the copy experiment, hit lengths, the capacity model, a request trace.

    Parameters
    ----------
    system
        The engine: optimized, or one that computes no model, sglang==VERSION or sglang@PATH, on
        which the trace is run, cut short.
    trace
        Requests in Mooncake's format, one JSON object a line.  Without it, a trace with the same
        statistics is generated.
    quick
        Small sizes, for a first look.
    processes
        Worker processes.
    """
    check_writable(json)
    check_verifiable(system)
    with bars(err) as tick:
        report = run_verify(trace, quick=quick, system=system, processes=processes, progress=tick)
    deliver(out, [*tables(report), *left_out(system)], json=json, result=report)
    return 0 if report.passed else 1


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


def main() -> None:
    """Entry point of the `kvoracle` command."""
    try:
        status = app(
            sys.argv[1:], result_action="return_value", exit_on_error=False, print_error=False
        )
    except BAD_INPUT as error:
        print(f"kvoracle: {printable(str(error))}", file=sys.stderr)
        status = EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("kvoracle: interrupted before there was a result: run it again.", file=sys.stderr)
        status = EXIT_INTERRUPTED
    sys.exit(status)


if __name__ == "__main__":
    main()
