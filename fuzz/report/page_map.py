"""The page map: every page, slot and ring of an engine, before and after the last operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from fuzz.report import holders
from fuzz.report.contents import Contents
from fuzz.report.holders import Account
from fuzz.report.moment import Moment, layers_of, pages_of
from fuzz.report.parts import Cell, Holder, Pool, Segment
from fuzz.report.wrong import Wrong
from fuzz.step import World
from reference.contract import Component

MOST_CELLS = 256
"""Of one pool; those that are free and stay as they are, are left out first."""
MOST_SEGMENTS = 32
"""Of one cell."""


class PageMap:
    """Makes the pools of one engine's memory.  `name` is its rank's, where there are several."""

    def __init__(
        self,
        world: World,
        moments: tuple[Moment, Moment],
        contents: Contents,
        wrong: Sequence[Wrong],
        *,
        name: str = "",
    ) -> None:
        self._world, self._moments, self._contents, self._name = world, moments, contents, name
        self._shown = {at for moment in moments for at in moment.rows}
        self._wrong = {
            (each.component, each.row, each.layer): each for each in wrong if not each.read
        }

    def pools(self) -> Iterator[Pool]:
        """All of them, the most telling first."""
        geometry, options = self._world.geometry, self._world.options
        size, hisparse = geometry.logical_page_size, options.hisparse
        kv = None if hisparse else Component.KV
        pages, slots = pages_of(self._moments[1].snapshot), geometry.index_page_size
        yield self._pool("Logical pages", kv, holders.logical, pages, size)
        yield self._pool("Index pages", Component.INDEX, holders.logical, pages, slots)
        if hisparse:
            rows = geometry.physical_page_size
            pages = hisparse.device_pages
            yield self._pool("Device pages", Component.HOT, holders.device, pages, rows)
            yield self._pool("Host pages", Component.KV, holders.host, hisparse.host_pages, size)
        if tier := options.host_tier:
            yield self._pool("Host tier", None, holders.tier, tier.pages, size, padded=False)
        rings, rows = options.max_requests + 1, geometry.ring_size
        yield self._pool("Tail rings", Component.TAIL, holders.rings, rings, rows)
        yield self._pool("KDA states", Component.STATE, holders.states, options.state_slots, 1)

    def _pool(
        self,
        title: str,
        component: Component | None,
        account: Account,
        cells: int,
        rows: int,
        *,
        padded: bool = True,
    ) -> Pool:
        before, after = (
            self._cells(moment, component, account, cells, rows, padded) for moment in self._moments
        )
        said = f"{rows} rows each" if rows > 1 else "a row each"
        if component is Component.KV and rows > self._world.geometry.physical_page_size:
            said += f" in {rows // self._world.geometry.physical_page_size} physical pages"
        if component is None:
            said = "the rows are elsewhere" if account is holders.logical else "no rows are shown"
        return trimmed(Pool(title=self._titled(title), note=said, before=before, after=after))

    def _titled(self, title: str) -> str:
        return f"{title} of {self._name}" if self._name else title

    def _cells(
        self,
        moment: Moment,
        component: Component | None,
        account: Account,
        cells: int,
        rows: int,
        padded: bool,
    ) -> tuple[Cell, ...]:
        held, seen = account(moment.snapshot), component and (component, 0) in self._shown
        made = []
        for i in range(cells):
            segments: tuple[Segment, ...] = ()
            if component and seen:
                here = held.by.get(i, ())
                segments = self._segments(moment, component, i * rows, rows, here)
            state = "held" if i in held.by else "free"
            if state == "free" and i:
                segments = tuple(_stray(segment) for segment in segments)
            made.append(
                Cell(
                    name=str(i),
                    holders=held.by.get(i, ()),
                    references=held.counts.get(i) if held.counts else None,
                    state="padding" if padded and not i else state,
                    segments=segments,
                )
            )
        return tuple(made)

    def _segments(
        self, moment: Moment, component: Component, first: int, rows: int, here: Sequence[Holder]
    ) -> tuple[Segment, ...]:
        """The rows of a cell, those that are alike put together."""
        single = [self._segment(moment, component, first + i, here) for i in range(rows)]
        size = self._world.geometry.physical_page_size if component is Component.KV else rows
        runs = groupby(enumerate(single), key=lambda at: (at[0] // size, at[1][2:]))
        merged = [_merged([segment for _, segment in run]) for _, run in runs]
        merged = [*_edged(merged, size)]
        if len(merged) <= MOST_SEGMENTS:
            return tuple(merged)
        step = -(-rows // MOST_SEGMENTS)
        parts = [single[i : i + step] for i in range(0, rows, step)]
        return tuple(max(part, key=_telling)._replace(rows=len(part)) for part in parts)

    def _segment(
        self, moment: Moment, component: Component, row: int, here: Sequence[Holder]
    ) -> Segment:
        """A row, in the layer that has most to tell: where it is wrong, or has changed."""
        layers, last = layers_of(self._world, component), moment is self._moments[1]
        changed = [i for i in range(len(layers)) if last and self._changed((component, i), row)]
        wrong = [i for i, n in enumerate(layers) if last and (component, row, n) in self._wrong]
        shown = (wrong or changed or [0])[0]
        found = self._contents.of(moment, (component, shown), row, here)
        words = found.words
        if wrong:
            should = self._wrong[component, row, layers[shown]].should
            words = f"should hold {should}, holds {words}, in layer {layers[shown]}"
        request = found.request
        if request is None and found.kind == "written" and here:
            request = here[0].request
        return Segment(1, words, found.kind, request, bool(changed), bool(wrong))

    def _changed(self, at: tuple[Component, int], row: int) -> bool:
        before, after = (moment.rows.get(at) for moment in self._moments)
        if after is None or row >= len(after) or not self._moments[1].seen[at][row]:
            return False
        return before is None or bool((before[row] != after[row]).any())


def _edged(segments: Sequence[Segment], size: int) -> Iterator[Segment]:
    """The same with a mark where a physical page begins, but for the first."""
    stop = 0
    for segment in segments:
        yield segment._replace(edge=bool(stop) and stop % size == 0)
        stop += segment.rows


def _merged(alike: Sequence[Segment]) -> Segment:
    """Rows that look alike as one."""
    first, last = alike[0], alike[-1]
    words = first.words if first.words == last.words else f"{first.words} to {last.words}"
    return first._replace(rows=len(alike), words=words)


def _stray(segment: Segment) -> Segment:
    """A row of nobody's to which the last operation has written, which is wrong."""
    if segment.wrong or not segment.changed or segment.kind not in ("written", "other"):
        return segment
    words = f"lies where nobody's memory is: {segment.words}"
    return segment._replace(words=words, wrong=True)


def _telling(segment: Segment) -> tuple[bool, bool, bool]:
    return segment.wrong, segment.changed, segment.kind == "written"


def trimmed(pool: Pool) -> Pool:
    """The pool without the last of those cells that have nothing to tell, where it has too many."""
    telling = [i for i in range(len(pool.after)) if not pool.quiet(i)][:MOST_CELLS]
    quiet = [i for i in range(len(pool.after)) if pool.quiet(i)][: MOST_CELLS - len(telling)]
    kept = sorted(telling + quiet)
    if len(kept) == len(pool.after):
        return pool
    return Pool(
        title=pool.title,
        note=f"{pool.note}; {len(pool.after) - len(kept)} more are not shown",
        before=tuple(pool.before[i] for i in kept),
        after=tuple(pool.after[i] for i in kept),
    )
