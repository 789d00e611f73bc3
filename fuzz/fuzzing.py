"""`kvoracle fuzz` and `kvoracle corpus`: campaigns, and what they have gathered."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

import systems
from fuzz import campaign, case, targets
from fuzz.checks import check_plantable, check_ranks, check_sizes
from fuzz.corpus import Corpus
from fuzz.fleet import fleet
from fuzz.rarity import Rarity
from fuzz.run import for_target
from fuzz.summary import Plan, Summary
from fuzz.targets.setup import KPool, Payload, PhysicalPageSize, Pin
from fuzz.terminal import (
    EXIT_INTERRUPTED,
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
    outcome_lines,
)
from fuzz.workers import Crew
from reference.geometry import RowFormat

MIB = 1 << 20

Folder = Annotated[Path, Parameter(env_var="KVORACLE_CORPUS")]


def fuzz(
    *target: str,
    executions: Positive | None = None,
    seconds: Positive | None = None,
    seed: int = 0,
    processes: Processes = 1,
    ray: str | None = None,
    system: str = "optimized",
    mutant: str | None = None,
    payload: Payload | None = None,
    kpool: KPool | None = None,
    physical_page_size: PhysicalPageSize | None = None,
    row_format: RowFormat | None = None,
    cases: Path = Path("out/cases"),
    corpus: Folder = Path("out/corpus"),
    resume: bool = False,
    json: JsonFile = None,
) -> int:
    """Search for a failure.  Each is shrunk and saved as a case that `kvoracle replay` runs.

    Parameters
    ----------
    target
        What to do to the engine, or several, one after the other; `all`, or an unknown name,
        which lists those that there are.
    executions
        Stop each after so many (1,000 if `seconds` is not given either).
    seconds
        Stop each after so many.
    seed
        The first seed; they count up from it.
    system
        The engine: optimized, reference, sglang==VERSION or sglang@PATH of a checkout.
    ray
        Spread the work over the Ray cluster at this address; `local` starts one here.
    mutant
        Plant this fault first.
    payload
        Only stamped runs, or only runs of a model.
    kpool, physical_page_size, row_format
        Fix this part of the geometry, which the tape would draw.
    cases
        Folder for the cases.
    corpus
        Folder of tapes to start from, and for what is found; campaigns may share it.
    resume
        Go on where a campaign of the same target, system, mutant, pins and seed has stopped.
    """
    check_writable(json)
    pin = Pin(
        payload=payload,
        kpool=kpool,
        physical_page_size=physical_page_size,
        row_format=row_format,
    )
    names = targets.names() if target == ("all",) else tuple(dict.fromkeys(target))
    if not names:
        raise UsageError(f"There is no target: name some of {', '.join(targets.names())}, or all.")
    loaded = systems.load(system)
    system = loaded.name
    for name in names:
        check_sizes(for_target(loaded, targets.find(name)), pin)
        check_ranks(targets.find(name), system, pin)
        check_plantable(mutant, system, name)
    check_writable_folder(cases)
    check_writable_folder(corpus)
    if executions is None and seconds is None:
        executions = 1000
    plans = [
        Plan(
            target=name,
            system=system,
            mutant=mutant,
            pin=pin,
            executions=executions,
            seconds=seconds,
            seed=seed,
            processes=processes,
        )
        for name in names
    ]
    summaries: list[Summary] = []
    lines: list[RenderableType] = []
    try:
        with fleet(ray, processes=processes) if ray else nullcontext() as crew:
            for plan in plans:
                summaries.append(_run(plan, Corpus(corpus), resume=resume, crew=crew))
                found = _cases(summaries[-1], cases)
                lines += _campaign(summaries[-1], [each.replay for each in found.values()])
                for path, each in found.items():
                    case.save(each, path)
                if summaries[-1].interrupted:
                    break
    finally:
        if summaries:
            result = summaries[0] if len(plans) == 1 else summaries
            verdicts = [Text(""), *map(_verdict, summaries)]
            deliver(out, [*lines, *verdicts], json=json, result=result)
    if summaries[-1].interrupted and not any(summary.failures for summary in summaries):
        return EXIT_INTERRUPTED
    return 0 if all(summary.passed for summary in summaries) else 1


def _verdict(summary: Summary) -> Text:
    """What a campaign came to, in a line."""
    amiss = [
        *(f"failed by {failure.signature}" for failure in summary.failures),
        *(
            [f"never saw {', '.join(summary.missing)}: run more executions"]
            if summary.missing
            else []
        ),
        *(f"missed the planted {name}" for name in dict.fromkeys(summary.missed)),
        *(["lost seeds to workers that died"] if summary.lost else []),
        *(["was interrupted"] if summary.interrupted else []),
        *([f"ended early: {summary.unsaved.removesuffix('.')}"] if summary.unsaved else []),
    ]
    done = f"{summary.executions:,} executions"
    if summary.executions and summary.executions == summary.resumed:
        done += ", all by earlier calls (raise --seconds or --executions to go on)"
    said = "; ".join(amiss) or "nothing was found"
    return Text(f"{summary.plan.target}: {done}; {said}.", "bold red" if amiss else "bold")


def _run(plan: Plan, corpus: Corpus, *, resume: bool, crew: Crew | None) -> Summary:
    """Run a campaign, with its progress on the terminal."""
    began = time.monotonic()
    with bars(err) as tick:

        def progress(news: campaign.News) -> None:
            rate = news.fresh / max(time.monotonic() - began, 1e-9)
            note = f"{rate:.0f} a second, {news.features:,} features, {news.failures} failures"
            if plan.seconds is None:
                tick(plan.target, news.executions, plan.executions or news.executions, note)
            else:
                tick(
                    f"{plan.target}, seconds",
                    min(int(news.seconds), int(plan.seconds)),
                    int(plan.seconds),
                    note,
                )

        return campaign.run(plan, corpus=corpus, resume=resume, crew=crew, progress=progress)


def _cases(summary: Summary, folder: Path) -> dict[Path, case.Case]:
    """The cases of a campaign, by where they go."""
    plan = summary.plan
    of = f"{plan.target}-{plan.mutant}" if plan.mutant else plan.target
    paths = [
        folder / f"{of}-{failure.signature.replace('/', '-')}-{failure.seed}.json"
        for failure in summary.failures
    ]
    return {
        path: case.case_of(
            failure.outcome,
            system=plan.system,
            path=path,
            pin=plan.pin,
            mutant=plan.mutant,
            seen=Rarity(failure.count, summary.executions),
        )
        for path, failure in zip(paths, summary.failures, strict=True)
    }


def _campaign(summary: Summary, replays: Sequence[str]) -> Iterator[RenderableType]:
    """What a campaign did, then each failure with the command that replays it."""
    table = Table("campaign", summary.plan.target)
    for name, value in _figures(summary):
        table.add_row(name, value)
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
    yield from _broken(summary)
    for number, (failure, replay_command) in enumerate(
        zip(summary.failures, replays, strict=True), start=1
    ):
        title = Text(f"\nfailure {number}", "bold")
        yield title.append(f": {failure.signature}, {failure.count} times", "not bold")
        yield from outcome_lines(failure.outcome)
        yield Text(replay_command)


def _figures(summary: Summary) -> Iterator[tuple[str, str]]:
    """The counts of a campaign, by name."""
    memory = summary.memory
    yield "executions", f"{summary.executions:,}"
    if summary.resumed:
        yield "of them by earlier calls", f"{summary.resumed:,}"
    yield "of them guided", f"{summary.guided:,}"
    yield "operations", f"{summary.operations:,}"
    yield "executions a second and core", f"{summary.executions_per_second_and_core:.0f}"
    yield "seconds", f"{summary.seconds:.1f}"
    yield "features", f"{summary.features:,}, shown by {summary.tapes:,} tapes"
    yield "planted faults found", f"{summary.planted - len(summary.missed)} of {summary.planted}"
    for name, start, end in (
        ("this process", memory.start, memory.end),
        ("largest worker", memory.worker_start, memory.worker_end),
    ):
        yield f"resident MiB of {name}, start and end", f"{start / MIB:.0f}, {end / MIB:.0f}"
    if summary.deaths:
        yield "workers that died at work", f"{summary.deaths}, and their batches were run again"


def _broken(summary: Summary) -> Iterator[Text]:
    """Why a campaign that found nothing shows nothing."""
    for name, count in Counter(summary.missed).items():
        yield Text(
            f"This campaign is broken: it planted {name} and did not find it, {count} times. "
            "Nothing that it says of sound engines counts until it does.",
            "bold red",
        )
    for start, stop in summary.lost:
        yield Text(
            f"Worker after worker died of the seeds {start} to {stop - 1}, which do not count: "
            f"run them alone with --seed {start} --executions {stop - start}.",
            "bold red",
        )


corpus = App(name="corpus", help="Look at what campaigns have gathered, unite it, thin it out.")


@corpus.command
def show(folder: Folder = Path("out/corpus"), *, json: JsonFile = None) -> int:
    """What lies in a corpus: tapes and features of each target, and failures, the smallest first.

    Parameters
    ----------
    folder
        A corpus that `kvoracle fuzz` has made.
    """
    check_writable(json)
    found = _opened(folder)
    tapes, features = Counter[str](), dict[str, set[str]]()
    for _, saved in found.tapes():
        tapes[saved.target] += 1
        features.setdefault(saved.target, set()).update(saved.features)
    table = Table("target", "tapes", "features")
    for target, count in sorted(tapes.items()):
        table.add_row(target, f"{count:,}", f"{len(features[target]):,}")
    failures = found.failures()
    lines: list[RenderableType] = [table]
    for path, each in failures:
        lines.append(Text(f"{_named(each)}, {len(each.operations)} operations"))
        lines.append(Text(f"  {case.replay_command(path, each.system)}"))
    result = {
        "tapes": tapes,
        "features": {target: len(shown) for target, shown in features.items()},
        "failures": {str(path): _named(each) for path, each in failures},
        "ignored": {str(path): why for path, why in found.ignored.items()},
    }
    deliver(out, [*lines, *_ignored(found)], json=json, result=result)
    return 0


@corpus.command
def merge(into: Path, *others: Path) -> int:
    """Add to a corpus what others have; they stay as they are.

    Parameters
    ----------
    into
        The corpus that grows; made if it is not there.
    others
        Corpora to take from.
    """
    check_writable_folder(into)
    grown = Corpus(into)
    for folder in others:
        other = _opened(folder)
        came = grown.merge(other)
        out.show([Text(f"{came:,} files of {folder} came to {into}."), *_ignored(other)])
    return 0


@corpus.command
def minimise(folder: Folder = Path("out/corpus")) -> int:
    """Drop from a corpus the tapes that show nothing that smaller ones do not, and all but the
    smallest case of each failure.

    Parameters
    ----------
    folder
        A corpus that `kvoracle fuzz` has made.
    """
    found = _opened(folder)
    gone = found.minimise()
    left = sum(1 for _ in found.tapes())
    out.show([Text(f"{gone:,} files went; {left:,} tapes are left."), *_ignored(found)])
    return 0


def _opened(folder: Path) -> Corpus:
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: name a corpus that `kvoracle fuzz` has made.")
    return Corpus(folder)


def _named(found: case.Case) -> str:
    """A failure by what it is one of."""
    planted = f" with {found.mutant}" if found.mutant else ""
    return f"{found.violations[0].signature} of {found.target} on {found.system}{planted}"


def _ignored(found: Corpus) -> list[Text]:
    """What was met and left alone."""
    return [Text(f"{path} was left alone: {why}.") for path, why in sorted(found.ignored.items())]
