"""How the page map and the tables of differences look."""

from __future__ import annotations

from collections.abc import Sequence

from fuzz.report.html import Html, el
from fuzz.report.parts import Cell, Holder, Pool, Segment, Table

LEGEND = (
    ("written o0", "written by request 0"),
    ("written o1", "by request 1, and so on"),
    ("poison", "poison: fresh or freed"),
    ("zeros", "zeros"),
    ("other", "written by nobody known"),
    ("unseen", "not looked at"),
    ("written o0 changed", "changed by the last operation"),
    ("written o0 wrong", "not what its reader wants"),
)


def page_map(pools: Sequence[Pool]) -> Html:
    """All pools; those in which something happened are open."""
    legend = [
        el("li", {}, el("span", {"class": f"seg w1 {kind}"}, ""), words) for kind, words in LEGEND
    ]
    return Html(
        el("ul", {"class": "legend", "aria-label": "Legend"}, legend)
        + "".join(_pool(pool) for pool in pools)
    )


def widths(pools: Sequence[Pool]) -> list[int]:
    """The numbers of rows that segments have, each of which needs a style."""
    cells = [cell for pool in pools for cell in (*pool.before, *pool.after)]
    return sorted({1, *(segment.rows for cell in cells for segment in cell.segments)})


def _pool(pool: Pool) -> Html:
    moved = [i for i in range(len(pool.after)) if pool.moved(i)]
    wrong = sum(cell.wrong for cell in pool.after)
    said = [f"{len(moved)} changed"] if moved else ["as before"]
    said += [f"{wrong} wrong"] if wrong else []
    summary = el(
        "summary",
        {},
        el("b", {}, pool.title),
        el("span", {"class": "note"}, f"{len(pool.after)} cells, {', '.join(said)}; {pool.note}"),
    )
    sides = [
        el(
            "div",
            {"class": "side"},
            el("h3", {}, when),
            el(
                "ol",
                {"class": "cells", "aria-label": f"{pool.title}, {when}"},
                [
                    _cell(cell, moved=last and i in moved, quiet=pool.quiet(i))
                    for i, cell in enumerate(cells)
                ],
            ),
        )
        for when, cells, last in (
            ("before the last operation", pool.before, False),
            ("after it", pool.after, True),
        )
    ]
    opened = {"open": ""} if moved or wrong else {}
    return el("details", {"class": "pool", **opened}, summary, el("div", {"class": "sides"}, sides))


def _cell(cell: Cell, *, moved: bool, quiet: bool) -> Html:
    if quiet:
        hint = f"{cell.name}: {cell.state}, {_told(cell)}"
        hidden = el("span", {"class": "vh"}, f" {cell.state}")
        plain = {"class": f"cell quiet {cell.state}", "title": hint}
        return el("li", plain, el("span", {"class": "name"}, cell.name, hidden))
    kinds = ["cell", cell.state]
    kinds += ["moved"] if moved else []
    kinds += ["bad"] if cell.wrong else []
    count = None
    if cell.references is not None:
        shown = {"class": "count", "title": f"reference count {cell.references}"}
        count = el("span", shown, f"×{cell.references}")
    return el(
        "li",
        {"class": " ".join(kinds)},
        el("span", {"class": "name"}, cell.name, count),
        el("span", {"class": "who"}, [_chip(holder) for holder in cell.holders] or cell.state),
        el("span", {"class": "strip"}, [_segment(segment) for segment in cell.segments])
        if cell.segments
        else None,
        el("span", {"class": "vh"}, f" rows: {_told(cell)}"),
    )


def _told(cell: Cell) -> str:
    """What all rows of a cell are, in words."""
    return ", ".join(dict.fromkeys(segment.words for segment in cell.segments)) or "no rows"


def _chip(holder: Holder) -> Html:
    colour = "cache" if holder.request is None else f"o{holder.request % 8}"
    return el("span", {"class": f"chip {colour}", "title": holder.words}, holder.short)


def _segment(segment: Segment) -> Html:
    kinds = ["seg", f"w{segment.rows}", segment.kind]
    if segment.request is not None:
        kinds.append(f"o{segment.request % 8}")
    kinds += ["changed"] if segment.changed else []
    kinds += ["wrong"] if segment.wrong else []
    kinds += ["edge"] if segment.edge else []
    rows = f"{segment.rows} rows" if segment.rows > 1 else "a row"
    words = f"{rows}: {segment.words}" + (", changed" if segment.changed else "")
    return el("span", {"class": " ".join(kinds), "title": words})


def tables(given: Sequence[Table]) -> Html:
    """Tables with what is wrong open, the others folded."""
    return Html("".join(_table(table) for table in given))


def _table(table: Table) -> Html:
    head = el("tr", {}, [el("th", {"scope": "col"}, column) for column in table.columns])
    body = [
        el("tr", {"class": "bad" if n in table.marked else None}, [el("td", {}, x) for x in line])
        for n, line in enumerate(table.lines)
    ]
    if not table.lines:
        inside: Html = el("p", {}, "None.")
    else:
        grid = el("table", {}, el("thead", {}, head), el("tbody", {}, body))
        frame = {"class": "scroll", "tabindex": 0, "role": "region", "aria-label": table.title}
        inside = el("div", frame, grid)
    count = len(table.lines) + table.more
    said = {0: "none", 1: "1 line"}.get(count, f"{count} lines")
    more = el("p", {"class": "note"}, f"{table.more} more are left out.") if table.more else None
    opened = {"open": ""} if table.marked else {}
    return el(
        "details",
        {"class": "difference", **opened},
        el("summary", {}, el("b", {}, table.title), el("span", {"class": "note"}, said)),
        el("p", {"class": "note"}, table.note),
        inside,
        more,
    )
