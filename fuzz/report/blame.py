"""Where a run went wrong: in the lanes of those whom the oracle's sentence names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fuzz.report.parts import Lane, Mark, Timeline

RANK = re.compile(r"\b(?P<side>[PD])(?P<rank>\d+)|\brank (?P<of>\d+) of (?P<whose>[PD])\b")
REQUEST = re.compile(r"\b[Rr]equest \d+")
SIDE = re.compile(r"[PD]\b")
"""A whole side, with which a sentence begins."""
WHOLE = Lane("whole run", "all")
"""Of what concerns nobody in particular."""


def mark(timeline: Timeline, sentence: str, row: int) -> None:
    """Put a ring into each lane that a sentence is about, at a row."""
    lanes = sorted({*_named(timeline, sentence)}) or [timeline.lane(WHOLE)]
    timeline.marks += [Mark((lane, row), sentence, "bad") for lane in lanes]


def _named(timeline: Timeline, sentence: str) -> Iterator[int]:
    """The ranks that it names; if there are none the requests, or else a side."""
    side = SIDE.match(sentence)
    told = RANK.finditer(sentence)
    ranks = {f"{t['side'] or t['whose']}{t['rank'] or t['of']}" for t in told}
    for names in (ranks, {n.lower() for n in REQUEST.findall(sentence)}):
        if found := [n for n, lane in enumerate(timeline.lanes) if lane.name in names]:
            yield from found
            return
    for number, lane in enumerate(timeline.lanes):
        if side and lane.group == f"ranks of {side[0]}":
            yield number
