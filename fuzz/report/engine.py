"""What a run of a single engine leaves behind for its report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from fuzz.outcome import Outcome
from fuzz.report.blame import mark
from fuzz.report.contents import Contents
from fuzz.report.differences import changed_rows, outputs, wrong_table
from fuzz.report.moment import Moment
from fuzz.report.page_map import PageMap
from fuzz.report.parts import Arrow, Deed, Lane, Life, Mark, Recorded, Table, Timeline
from fuzz.report.wrong import Wrong, wrong_reads, wrong_rows
from fuzz.step import Step, World
from reference.contract import RequestId, Snapshot
from reference.protocol import Observation
from reference.restore import Step as TierStep

WHOSE = re.compile(r"Request (?P<request>\d+)'s .*?\boperation (?P<operation>\d+), '")
"""How a sentence of `fuzz.oracles.metamorphic` names a request, and its operation."""
CACHE, TIER = Lane("prefix cache", "memory"), Lane("host tier", "memory")
HOST = Lane("host rows", "memory")


class EngineRecording:
    """Looks on at a run of an engine."""

    def begin(self, run: World) -> None:
        self._world = run
        self._steps: list[Step] = []
        now = Moment.of(run.engine, run)
        self._moments = now, now

    def after(self, operation: Step, seen: Sequence[Observation] = ()) -> None:
        self._steps.append(operation)
        self._moments = self._moments[1], Moment.of(self._world.engine, self._world)

    def recorded(self, outcome: Outcome) -> Recorded:
        """All that the report shows of the run."""
        world, after = self._world, self._moments[1]
        stamper = world.stamper if world.stamped else None
        contents = Contents(stamper, world.clients.values(), _stored(self._steps))
        wrong = list(wrong_rows(world, after, contents)) if stamper else []
        if stamper and not wrong:
            wrong += wrong_reads(world.engine, world, after.snapshot, contents)
        tables: list[Table] = []
        if stamper:
            tables.append(wrong_table(wrong))
        else:
            tables += outputs(world, self._steps, outcome)
        tables.append(changed_rows(world, self._moments, contents))
        deeds = [Deed(step.text, tuple(_effects(step))) for step in self._steps]
        signature = outcome.signature or ""
        raised = signature.startswith("crash/") or signature == "exact/refused"
        timeline = _timeline(world, self._steps)
        accused, audited = _accused(outcome), signature.startswith("numeric/")
        if accused:
            _accuse(timeline, *accused, outcome)
        elif audited:
            mark(timeline, outcome.violations[0].sentence, len(timeline.rows) - 1)
        elif outcome.failed and not raised and self._steps:
            _blame(timeline, self._steps, wrong)
        if raised:  # and so there is no step
            deeds.append(Deed(outcome.violations[0].sentence))
            row = timeline.row(outcome.violations[0].sentence)
            timeline.marks.append(Mark((timeline.lane(CACHE), row), "the engine raises", "bad"))
        return Recorded(
            deeds=tuple(deeds),
            blamed=accused[1] + 1 if accused else None if audited else len(deeds),
            timeline=timeline,
            pools=tuple(PageMap(world, self._moments, contents, wrong).pools()),
            tables=tuple(tables),
        )


def _stored(steps: Sequence[Step]) -> dict[RequestId, set[int]]:
    """The positions that each request has stored itself."""
    stored: dict[RequestId, set[int]] = {}
    for step in steps:
        for request, (start, stop) in step.wrote.items():
            stored.setdefault(request, set()).update(range(start, stop))
    return stored


def _effects(step: Step) -> Iterator[str]:
    """What came of an operation, by the engine's own account."""
    before, after = step.before, step.after
    if step.submitted:
        yield (
            f"{step.hit} of its tokens are in the cache already."
            if step.hit
            else ("None of its tokens are in the cache.")
        )
    for request, view in after.requests.items():
        had = before.requests[request].pages if request in before.requests else ()
        if fresh := [page for page in view.pages if page not in had]:
            cached = _cached(before)
            for pages, verb in (
                ([page for page in fresh if page in cached], "reads the cached"),
                ([page for page in fresh if page not in cached], "is given"),
            ):
                if pages:
                    yield f"Request {request} {verb} {_pages(pages)}."
    if news := sorted(_cached(after) - _cached(before)):
        yield f"The cache takes {_pages(news)}."
    if gone := after.evicted_pages - before.evicted_pages:
        yield f"{gone} cached {'page is' if gone == 1 else 'pages are'} evicted."
    if free := sorted(after.free_pages - before.free_pages):
        yield f"{_pages(free).capitalize()} {'is' if len(free) == 1 else 'are'} free again."
    if misses := _misses(step):
        yield f"{misses} rows are swapped in from the host."
    if step.tier and step.tier.returned is not None:
        yield f"{step.tier.moves} moves; {step.tier.returned} tokens stand there now."


def _pages(pages: Sequence[int]) -> str:
    return f"{'page' if len(pages) == 1 else 'pages'} {', '.join(map(str, pages))}"


def _cached(snapshot: Snapshot) -> set[int]:
    return {page for node in snapshot.cached for page in node.pages}


def _misses(step: Step) -> int:
    counts = (output.misses for _, output in step.outputs)
    return sum(int(count.sum()) for count in counts if count is not None)


def _timeline(world: World, steps: Sequence[Step]) -> Timeline:
    """A row for each operation, and a lane for each request and each memory that they share."""
    timeline = Timeline()
    lanes = {request: timeline.lane(_lane(request)) for request in world.clients}
    cache = timeline.lane(CACHE)
    tier = timeline.lane(TIER) if world.options.host_tier else cache
    host = timeline.lane(HOST) if world.options.hisparse else cache
    for step in steps:
        row = timeline.row(step.text)
        kind = "idle" if step.idle or step.refused else "done"
        timeline.marks += [Mark((lanes[r], row), step.text, kind) for r in sorted(step.calls)]
        timeline.arrows += _flows(step, row, lanes, cache, tier)
        timeline.arrows += _copies(step, row, lanes, host)
        if step.evicted or step.after.evicted_pages > step.before.evicted_pages:
            went = step.after.evicted_pages - step.before.evicted_pages
            timeline.marks.append(Mark((cache, row), f"{went} pages evicted"))
        for name, figure in (
            ("free pages", len(step.after.free_pages)),
            ("cached pages", len(_cached(step.after))),
        ):
            timeline.counters.setdefault(name, []).append((row, figure))
    timeline.lives += _lives(steps, lanes)
    return timeline


def _lane(request: RequestId | int) -> Lane:
    return Lane(f"request {request}", "requests", int(request))


def _flows(
    step: Step, row: int, lanes: dict[RequestId, int], cache: int, tier: int
) -> Iterator[Arrow]:
    """What an operation moves between requests, cache and host tier."""
    if step.submitted and step.hit:
        lane = lanes[step.submitted.request]
        yield Arrow((cache, row), (lane, row), f"hit of {step.hit} tokens", "data")
    if grown := len(_cached(step.after) - _cached(step.before)):
        for client in step.inserted:
            text = f"leaves {grown} pages in the cache"
            yield Arrow((lanes[client.request], row), (cache, row), text, "data")
    if step.tier:
        ends = (cache, row), (tier, row)
        start, stop = ends if step.tier.step is TierStep.BACK_UP else ends[::-1]
        yield Arrow(start, None if step.tier.failed_at else stop, step.text, "data")


def _copies(step: Step, row: int, lanes: dict[RequestId, int], host: int) -> Iterator[Arrow]:
    """Rows that a step brings from the host to hot buffers, and from there to the host."""
    missed: Counter[RequestId] = Counter()
    for _, output in step.outputs:
        missed[output.request] += 0 if output.misses is None else int(output.misses.sum())
    for request, count in missed.items():
        if count:
            text = f"{count} rows are swapped in"
            yield Arrow((host, row), (lanes[request], row), text, "data")
    was, now = step.before.hot, step.after.hot
    for request, view in now.buffers.items() if now else ():
        before = was.buffers.get(request) if was else None
        if saved := view.saved - (before.saved if before else 0):
            text = f"{saved} positions are saved on the host"
            yield Arrow((lanes[request], row), (host, row), text, "data")


def _lives(steps: Sequence[Step], lanes: dict[RequestId, int]) -> Iterator[Life]:
    """From an admission to the end."""
    for request, lane in lanes.items():
        runs = [row for row, step in enumerate(steps) if request in step.after.requests]
        starts = [row for row in runs if row - 1 not in runs]
        for start in starts:
            stop = next((row for row in range(start, len(steps)) if row not in runs), len(steps))
            yield Life(lane, start, min(stop + 1, len(steps)), f"request {request} runs")


def _accused(outcome: Outcome) -> tuple[RequestId, int] | None:
    """The request whose outputs differ, and the row of the operation that computed them."""
    told = WHOSE.match(outcome.violations[0].sentence) if outcome.failed else None
    return (RequestId(int(told["request"])), int(told["operation"]) - 1) if told else None


def _accuse(timeline: Timeline, request: RequestId, row: int, outcome: Outcome) -> None:
    place = timeline.lane(_lane(request)), row
    timeline.marks.append(Mark(place, outcome.violations[0].sentence, "bad"))


def _blame(timeline: Timeline, steps: Sequence[Step], wrong: Sequence[Wrong]) -> None:
    """Mark where it went wrong: at whoever reads what another wrote, if that shows; else at
    whoever the last operation was about."""
    last, cache = len(steps) - 1, timeline.lane(CACHE)
    if not wrong:
        about = sorted(timeline.lane(_lane(r)) for r in steps[-1].about) or [cache]
        timeline.marks += [Mark((lane, last), "here the oracle objects", "bad") for lane in about]
        return
    told = set()
    for each in wrong:
        named = [n for n, lane in enumerate(timeline.lanes) if lane.name == each.reader]
        reader, writer = (named or [cache])[0], each.holds.request
        if (reader, writer) in told:
            continue
        told.add((reader, writer))
        text = f"{each.place} should hold {each.should}, holds {each.holds.words}"
        timeline.marks.append(Mark((reader, last), text, "bad"))
        source = None if writer is None else timeline.lane(_lane(writer))
        wrote = [row for row, step in enumerate(steps) if writer in step.wrote]
        if source is not None and source != reader and wrote:
            timeline.arrows.append(Arrow((source, wrote[-1]), (reader, last), text, "bad"))
