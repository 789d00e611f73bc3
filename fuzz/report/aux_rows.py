"""The aux rows of a rank of D, one for each state slot: what they say, and whose they are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from fuzz.explore.draw import name, name_key
from fuzz.outcome import Outcome
from fuzz.report.moment import Moment
from fuzz.report.page_map import trimmed
from fuzz.report.parts import Cell, Holder, Pool, Segment
from fuzz.stamps import Bytes
from reference.protocol import Peer
from reference.transfer import read_aux

NAMED = re.compile(r"Aux row (?P<row>\d+) of (?P<rank>D\d+)")
"""How a sentence of `fuzz.oracles.landing` begins."""
CLEARED = 0xFF


def aux_pool(
    peer: Peer, moments: tuple[Moment, Moment], rows: tuple[Bytes, Bytes], outcome: Outcome
) -> Pool:
    """All of them, [rows, row bytes] before and after the last operation."""
    wrong = {
        int(told["row"])
        for told in (NAMED.match(violation.sentence) for violation in outcome.violations)
        if told and told["rank"] == name(peer._replace(incarnation=0))
    }
    moved = {row for row, _, _ in changed_aux(rows)}
    before = _cells(moments[0], rows[0], moved=set(), wrong=set())
    after = _cells(moments[1], rows[1], moved=moved, wrong=wrong)
    note = "the row of a transfer has the number of its request's state slot"
    return trimmed(Pool(title=f"Aux rows of {name(peer)}", note=note, before=before, after=after))


def changed_aux(rows: tuple[Bytes, Bytes]) -> Iterator[tuple[int, str, str]]:
    """The rows that the last operation changed: number, and what they said and say."""
    for row, (was, now) in enumerate(zip(*rows, strict=True)):
        if (was != now).any():
            yield row, _said(was), _said(now)


def _said(row: Bytes) -> str:
    """An aux row [row bytes] in words."""
    if (row == CLEARED).all():
        return "cleared: names no transfer"
    said = read_aux(row.tobytes())
    return f"{name_key(said.key)}, {said.length} tokens, first token {said.first_token}"


def _cells(moment: Moment, rows: Bytes, *, moved: set[int], wrong: set[int]) -> tuple[Cell, ...]:
    holders: dict[int, Holder] = {}
    for request, view in moment.snapshot.holders.items():
        waits = request in moment.snapshot.reserved
        words = f"request {request} {'waits for it' if waits else 'went live with it'}"
        holders[view.state_slot] = Holder(f"r{request}", words, int(request))
    cells = []
    for i, row in enumerate(rows):
        here: Sequence[Holder] = (holders[i],) if i in holders else ()
        kind = "poison" if (row == CLEARED).all() else "written"
        segment = Segment(1, _said(row), kind, None, i in moved, i in wrong)
        state = "held" if here else "free"
        cells.append(Cell(name=str(i), holders=tuple(here), state=state, segments=(segment,)))
    return tuple(cells)
