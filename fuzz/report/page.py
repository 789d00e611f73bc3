"""The page: one file that needs nothing else, runs no script and lets nothing in or out."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from pathlib import Path

from fuzz.case import Case
from fuzz.outcome import Outcome
from fuzz.report import map_view, story
from fuzz.report.differences import named
from fuzz.report.html import Html, el, lone
from fuzz.report.parts import Recorded
from fuzz.report.spacetime import KINDS, MOST_ROWS, UNARRIVED, spacetime

SECTIONS = (
    ("story", "The story"),
    ("diagram", "Space and time"),
    ("map", "Page map"),
    ("differences", "Differences"),
    ("case", "The case"),
)


def page(
    saved: Case, data: bytes, path: Path, outcome: Outcome, recorded: Recorded, *, timed: bool
) -> bytes:
    """The report of a case that was read from `path`, where `data` is what lies there.  `timed`:
    there is a timeline as well."""
    style = _style(recorded)
    head = el(
        "head",
        {},
        lone("meta", {"charset": "utf-8"}),
        lone("meta", {"http-equiv": "Content-Security-Policy", "content": _policy(style)}),
        lone("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        lone("meta", {"name": "color-scheme", "content": "light dark"}),
        lone("meta", {"name": "referrer", "content": "no-referrer"}),
        el("title", {}, f"KVOracle: {_title(outcome)}"),
        el("style", {}, Html(style)),
    )
    body = el("body", {}, *_body(saved, data, path, outcome, recorded, timed=timed))
    whole = f"<!doctype html>\n{el('html', {'lang': 'en'}, head, body)}\n"
    return whole.encode()


def _title(outcome: Outcome) -> str:
    return f"{outcome.signature or 'no failure'} in {outcome.target}"


def _body(
    saved: Case, data: bytes, path: Path, outcome: Outcome, recorded: Recorded, *, timed: bool
) -> tuple[Html, ...]:
    links = [el("a", {"href": f"#{name}"}, title) for name, title in SECTIONS]
    time = " One step of time in the timeline is 1 ms." if timed else ""
    bad = recorded.blamed if outcome.failed else None
    contents = {
        "story": Html(
            story.setup(saved, outcome, path)
            + el("h3", {}, "What happened")
            + story.deeds(recorded.deeds, bad=bad)
        ),
        "diagram": _diagram(outcome, recorded),
        "map": map_view.page_map(recorded.pools),
        "differences": map_view.tables([*named(outcome), *recorded.tables]),
        "case": _case(data, path),
    }
    return (
        el("a", {"class": "skip", "href": "#story"}, "Skip to the story"),
        el("header", {}, el("p", {"class": "brand"}, "KVOracle"), el("h1", {}, _title(outcome))),
        el("nav", {"aria-label": "Sections"}, links),
        el(
            "main",
            {},
            story.verdict(saved, outcome, len(recorded.deeds)),
            [
                el(
                    "section",
                    {"id": name, "aria-labelledby": f"{name}-title"},
                    el("h2", {"id": f"{name}-title"}, title),
                    contents[name],
                )
                for name, title in SECTIONS
            ],
        ),
        el("footer", {}, f"Made by kvoracle report from {path.name}.{time}"),
    )


def _diagram(outcome: Outcome, recorded: Recorded) -> Html:
    timeline = recorded.timeline
    names = ", ".join(lane.name for lane in timeline.lanes)
    summary = (
        f"Space-time diagram with a column for each of {names}, and {len(timeline.rows)} rows of "
        f"time; the story tells the same in words."
    )
    left = len(timeline.rows) - MOST_ROWS
    kinds = [kind for kind in KINDS if any(arrow.kind == kind for arrow in timeline.arrows)]
    legend = [
        el("li", {}, el("span", {"class": f"sample {kind}"}, ""), KINDS[kind]) for kind in kinds
    ]
    if any(arrow.stop is None for arrow in timeline.arrows):
        legend.append(el("li", {}, el("span", {"class": "sample unarrived"}, ""), UNARRIVED))
    frame = {"class": "scroll", "tabindex": 0, "role": "region", "aria-label": "Diagram"}
    return Html(
        (el("ul", {"class": "legend"}, legend) if legend else "")
        + (el("p", {"class": "note"}, f"The first {left} rows are left out.") if left > 0 else "")
        + el("div", frame, spacetime(timeline, summary=summary))
    )


def _case(data: bytes, path: Path) -> Html:
    encoded = base64.b64encode(data).decode()
    link = {"download": path.name, "href": f"data:application/json;base64,{encoded}"}
    return Html(
        el("p", {}, el("a", {"class": "button", **link}, "Download the case"))
        + el(
            "details",
            {},
            el("summary", {}, f"{len(data):,} bytes of JSON"),
            el("pre", {"tabindex": 0}, data.decode(errors="replace")),
        )
    )


def _style(recorded: Recorded) -> str:
    """All styles; how wide a segment is follows from its rows."""
    fixed = files("fuzz.report").joinpath("page.css").read_text()
    return fixed + "".join(f".w{n}{{flex-grow:{n}}}" for n in map_view.widths(recorded.pools))


def _policy(style: str) -> str:
    """Nothing but this very style sheet: no script, no image, no font, no connection."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
