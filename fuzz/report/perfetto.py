"""The timeline as a file that ui.perfetto.dev opens: Chrome's trace event format, as JSON.

One row of the timeline is 1 ms, since a run has no other time.  A lane is a thread, a group of
lanes a process; what happens is a slice, and what goes between lanes a flow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from fuzz.report.parts import Arrow, Timeline

STEP_US, SLICE_US = 1000, 900
"""Microseconds of a row, and of a slice in it."""
Event = dict[str, Any]


def trace(timeline: Timeline, *, title: str) -> bytes:
    """The timeline of a run; `title` says of which."""
    events = [*_names(timeline), *_slices(timeline), *_flows(timeline), *_counters(timeline)]
    whole = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"title": title, "time": "one step of the run is 1 ms"},
    }
    return msgspec.json.encode(whole)


def _names(timeline: Timeline) -> Iterator[Event]:
    """What processes and threads are called, in the order of the lanes."""
    for group, pid in _processes(timeline).items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": group}}
    for number, lane in enumerate(timeline.lanes):
        where = _where(timeline, number)
        yield {"ph": "M", "name": "thread_name", **where, "args": {"name": lane.name}}
        yield {"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": number}}


def _slices(timeline: Timeline) -> Iterator[Event]:
    """Of each lane a slice for every row in which something happens there, or starts or ends."""
    said: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for mark in timeline.marks:
        said.setdefault(mark.place, []).append((mark.text, mark.kind))
    for arrow in timeline.arrows:
        for place in (arrow.start, arrow.stop):
            if place is not None and place not in said:
                said[place] = [(arrow.text, arrow.kind)]
    for (lane, row), texts in sorted(said.items()):
        kinds = {kind for _, kind in texts}
        yield {
            "ph": "X",
            "name": "; ".join(text for text, _ in texts),
            "cat": "bad" if "bad" in kinds else "run",
            "ts": row * STEP_US,
            "dur": SLICE_US,
            **_where(timeline, lane),
            "args": {"step": timeline.rows[row].text},
            **({"cname": "terrible"} if "bad" in kinds else {}),
        }


def _flows(timeline: Timeline) -> Iterator[Event]:
    """An arrow between slices; one that never came has no end, and is no flow."""
    for number, arrow in enumerate(timeline.arrows, start=1):
        if arrow.stop is not None and arrow.stop != arrow.start:
            yield from _flow(timeline, arrow, arrow.stop, number)


def _flow(timeline: Timeline, arrow: Arrow, stop: tuple[int, int], number: int) -> Iterator[Event]:
    common = {"name": arrow.text, "cat": arrow.kind, "id": number}
    for phase, (lane, row) in (("s", arrow.start), ("f", stop)):
        late = SLICE_US // 2 if phase == "f" else 1
        end = {"bp": "e"} if phase == "f" else {}
        when = row * STEP_US + late
        yield {"ph": phase, **common, "ts": when, **_where(timeline, lane), **end}


def _counters(timeline: Timeline) -> Iterator[Event]:
    pid = len(_processes(timeline)) + 1
    for name, figures in timeline.counters.items():
        for row, figure in figures:
            args = {name: figure}
            yield {"ph": "C", "name": name, "ts": row * STEP_US, "pid": pid, "tid": 0, "args": args}


def _processes(timeline: Timeline) -> dict[str, int]:
    """The number of each group of lanes, from 1."""
    groups = dict.fromkeys(lane.group for lane in timeline.lanes)
    return {group: pid for pid, group in enumerate(groups, start=1)}


def _where(timeline: Timeline, lane: int) -> dict[str, int]:
    return {"pid": _processes(timeline)[timeline.lanes[lane].group], "tid": lane + 1}
