"""What a report is made of, whatever the target: pools of pages, tables, a timeline and a story.

These are plain values.  The recordings make them (`fuzz.report.engine`, `transfer`, `ranks`), the
page and the timeline file show them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

Place = tuple[int, int]
"""A lane of a timeline, and a row."""


class Holder(NamedTuple):
    """Somebody who holds a page: in a few letters, in words, and the request that gives the colour;
    None for what belongs to no single one."""

    short: str
    words: str
    request: int | None = None


class Segment(NamedTuple):
    """Rows of a page that lie together and are alike.

    Fields:
        rows: how many.
        words: what they hold.
        kind: "written", "poison", "zeros" or "other".
        request: who wrote them, if that is known.
        changed, wrong: in the last operation; and whether some reader wants them otherwise.
        edge: a physical page begins with them.
    """

    rows: int
    words: str
    kind: str
    request: int | None = None
    changed: bool = False
    wrong: bool = False
    edge: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A page, slot or ring at one moment.

    Fields:
        references: the engine's own count; None where there is none.
        state: "free", "held" or "padding".
        segments: of its rows, in order; none where they are not looked at.
    """

    name: str
    holders: tuple[Holder, ...] = ()
    references: int | None = None
    state: str = "free"
    segments: tuple[Segment, ...] = ()

    @property
    def wrong(self) -> bool:
        return any(segment.wrong for segment in self.segments)

    @property
    def changed(self) -> bool:
        return any(segment.changed for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """All cells of one memory, before and after the last operation, in the same order."""

    title: str
    note: str
    before: tuple[Cell, ...]
    after: tuple[Cell, ...]

    def moved(self, at: int) -> bool:
        """Whether a cell is not as it was."""
        was, now = self.before[at], self.after[at]
        return now.changed or (was.holders, was.references) != (now.holders, now.references)

    def quiet(self, at: int) -> bool:
        """Whether a cell is nobody's, was so, and has nothing to tell."""
        states = self.before[at].state, self.after[at].state
        return "held" not in states and not self.moved(at) and not self.after[at].wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What differs, or figures; `marked` are the numbers of the lines that are wrong, `more` says
    how many were left out."""

    title: str
    note: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    marked: frozenset[int] = frozenset()
    more: int = 0


class Lane(NamedTuple):
    """A request, a rank, or a memory through time; lanes of a group belong together."""

    name: str
    group: str
    request: int | None = None


class Row(NamedTuple):
    """One step of time, and what happens in it.  A heading stands for an operation of which the
    rows behind it are the parts."""

    text: str
    heading: bool = False


class Mark(NamedTuple):
    """Something that happens in a lane; `kind` is "done", "idle", "end" or "bad"."""

    place: Place
    text: str
    kind: str = "done"


class Arrow(NamedTuple):
    """Something that goes from lane to lane; without a `stop` it never came.  `kind` is "message",
    "write", "data" or "bad"."""

    start: Place
    stop: Place | None
    text: str
    kind: str


class Life(NamedTuple):
    """Rows in which a lane is at work; `stop` is excluded."""

    lane: int
    start: int
    stop: int
    text: str


@dataclass(slots=True)
class Timeline:
    """A run in steps of time.  `counters` are figures by name, one for each row as far as it is
    known."""

    lanes: list[Lane] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)
    counters: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def lane(self, lane: Lane) -> int:
        """The number of a lane, which is made if it is not there."""
        if lane not in self.lanes:
            self.lanes.append(lane)
        return self.lanes.index(lane)

    def row(self, text: str, *, heading: bool = False) -> int:
        """Begin the next row."""
        self.rows.append(Row(text, heading))
        return len(self.rows) - 1


class Deed(NamedTuple):
    """An operation in words, and what came of it."""

    text: str
    effects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a recording makes of a run; `blamed` is the number of the deed at which it went
    wrong, if it did and if that is known."""

    deeds: tuple[Deed, ...]
    blamed: int | None
    timeline: Timeline
    pools: tuple[Pool, ...]
    tables: tuple[Table, ...]
