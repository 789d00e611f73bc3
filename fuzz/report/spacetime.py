"""The space-time diagram: a column for each request or rank, time downwards, arrows between."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from fuzz.report.html import Html, el
from fuzz.report.parts import Arrow, Lane, Mark, Place, Timeline

LANE, ROW, TOP, LEFT = 92, 24, 46, 36
"""Distances in pixels: of lanes, of rows, above the first row, and before the first lane."""
MOST_ROWS = 240
"""The last ones; the timeline file has all."""
LETTER, CAPTION = 7.3, 110
"""Width of a letter in pixels, and letters of a caption."""
KINDS = {
    "message": "message",
    "write": "bytes on their way",
    "data": "tokens between request, cache and host",
    "bad": "what should not be",
}
UNARRIVED = "dotted, with a cross: had not come when the run ended, or failed"


def spacetime(timeline: Timeline, *, summary: str) -> Html:
    """The diagram, as SVG; `summary` is what it is in a sentence."""
    return _Drawing(timeline).svg(summary)


class _Drawing:
    """Places lanes and rows, and leaves out the first rows of a run that is too long."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._first = max(0, len(timeline.rows) - MOST_ROWS)
        self._rows = timeline.rows[self._first :]
        self._bad = {mark.place[1] for mark in timeline.marks if mark.kind == "bad"}
        self._edge = LEFT + LANE * len(timeline.lanes)

    def svg(self, summary: str) -> Html:
        captions = max((min(len(row.text), CAPTION) for row in self._rows), default=0)
        width = int(self._edge + 16 + captions * LETTER)
        height = TOP + ROW * len(self._rows) + 12
        shape = {
            "class": "spacetime",
            "viewBox": f"0 0 {width} {height}",
            "width": width,
            "height": height,
            "role": "img",
            "aria-label": summary,
        }
        parts = [*self._stripes(width), *self._heads(), *self._lanes(height), *self._lives()]
        arrows = [*map(self._arrow, filter(self._shown, self._timeline.arrows))]
        marks = [self._mark(mark) for mark in self._timeline.marks if mark.place[1] >= self._first]
        return el("svg", shape, self._markers(), parts, arrows, marks, [*self._captions()])

    def _x(self, place: Place) -> int:
        return LEFT + LANE * place[0] + LANE // 2

    def _y(self, place: Place) -> int:
        return max(TOP + ROW * (place[1] - self._first) + ROW // 2, TOP - 4)

    def _shown(self, arrow: Arrow) -> bool:
        return (arrow.stop or arrow.start)[1] >= self._first

    def _markers(self) -> Html:
        head = {"d": "M0,0 L8,4 L0,8 z"}
        shape = {"viewBox": "0 0 8 8", "refX": 7, "refY": 4, "orient": "auto"}
        size = {"markerWidth": 8, "markerHeight": 8, "markerUnits": "userSpaceOnUse"}
        return el(
            "defs",
            {},
            [
                el(
                    "marker",
                    {"id": f"head-{kind}", "class": kind, **shape, **size},
                    el("path", head),
                )
                for kind in KINDS
            ],
        )

    def _stripes(self, width: int) -> Iterator[Html]:
        """Behind headings and every other row."""
        for i, row in enumerate(self._rows):
            if bad := i + self._first in self._bad:
                kind = "stripe bad"
            else:
                kind = "stripe heading" if row.heading else "stripe"
            if bad or row.heading or (i + self._first) % 2:
                at = {"x": 0, "y": TOP + ROW * i, "width": width, "height": ROW}
                yield el("rect", {"class": kind, **at})

    def _heads(self) -> Iterator[Html]:
        """Names of lanes, and of their groups."""
        numbered = list(enumerate(self._timeline.lanes))
        for group, some in groupby(numbered, key=lambda pair: pair[1].group):
            lanes = [number for number, _ in some]
            middle = (self._x((lanes[0], 0)) + self._x((lanes[-1], 0))) // 2
            yield el("text", {"class": "group", "x": middle, "y": 14}, group)
        for number, lane in numbered:
            at = {"x": self._x((number, 0)), "y": 34}
            yield el("text", {"class": f"lane {_colour(lane)}", **at}, lane.name)

    def _lanes(self, height: int) -> Iterator[Html]:
        for number, _ in enumerate(self._timeline.lanes):
            x = self._x((number, 0))
            line = {"x1": x, "y1": TOP, "x2": x, "y2": height - 6}
            yield el("line", {"class": "thread", **line})

    def _lives(self) -> Iterator[Html]:
        for life in self._timeline.lives:
            if life.stop <= self._first:
                continue
            lane = self._timeline.lanes[life.lane]
            top, bottom = self._y((life.lane, life.start)), self._y((life.lane, life.stop - 1))
            box = {"x": self._x((life.lane, 0)) - 4, "y": top - 8, "rx": 4}
            size = {"width": 8, "height": bottom - top + 16}
            yield el("rect", {"class": f"life {_colour(lane)}", **box, **size}, _hint(life.text))

    def _arrow(self, arrow: Arrow) -> Html:
        (x1, y1) = self._x(arrow.start), self._y(arrow.start)
        kind, stop = f"arrow {arrow.kind}", arrow.stop
        if stop is None:
            right = arrow.start[0] < len(self._timeline.lanes) / 2
            x2, y2 = x1 + (1 if right else -1) * LANE // 2, y1 + ROW // 2
            end = el("text", {"class": "lost", "x": x2, "y": y2 + 4}, "✕")
            return el(
                "g",
                {"class": f"{kind} unarrived"},
                self._path(x1, y1, x2, y2),
                end,
                _hint(arrow.text),
            )
        x2, y2 = self._x(stop), self._y(stop)
        if x1 == x2:
            return el("g", {"class": kind}, _hint(arrow.text))
        inset = 6 if x2 > x1 else -6
        drawn = self._path(x1, y1, x2 - inset, y2, head=arrow.kind)
        return el("g", {"class": kind}, drawn, _hint(arrow.text))

    def _path(self, x1: int, y1: int, x2: int, y2: int, *, head: str | None = None) -> Html:
        """A line that is easy to hit, and the one that is seen."""
        line = {"x1": x1, "y1": y1, "x2": x2, "y2": y2}
        end = {"marker-end": f"url(#head-{head})"} if head else {}
        return Html(el("line", {"class": "reach", **line}) + el("line", {**line, **end}))

    def _mark(self, mark: Mark) -> Html:
        x, y = self._x(mark.place), self._y(mark.place)
        lane = self._timeline.lanes[mark.place[0]]
        kind = f"mark {mark.kind} {_colour(lane)}"
        if mark.kind == "bad":
            cross = f"M{x - 4},{y - 4} l8,8 m0,-8 l-8,8"
            ring = el("circle", {"cx": x, "cy": y, "r": 9})
            return el("g", {"class": kind}, ring, el("path", {"d": cross}), _hint(mark.text))
        dot = {"class": kind, "cx": x, "cy": y, "r": 5}
        return el("circle", dot, _hint(mark.text))

    def _captions(self) -> Iterator[Html]:
        for i, row in enumerate(self._rows):
            y = TOP + ROW * i + ROW // 2 + 4
            if not row.heading:
                number = {"class": "number", "x": LEFT - 14, "y": y}
                yield el("text", number, str(i + self._first + 1))
            kind = "caption heading" if row.heading else "caption"
            words = row.text if len(row.text) <= CAPTION else row.text[: CAPTION - 1] + "…"
            yield el("text", {"class": kind, "x": self._edge + 10, "y": y}, words, _hint(row.text))


def _hint(words: str) -> Html:
    return el("title", {}, words)


def _colour(lane: Lane) -> str:
    return "" if lane.request is None else f"o{lane.request % 8}"
