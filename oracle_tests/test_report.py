"""Reports: what the page and the timeline say of a run is so, and a hostile case does no harm."""

from __future__ import annotations

import base64
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest

import systems
from fuzz import case, mutants, targets
from fuzz.rarity import Rarity
from fuzz.report.command import write_report
from fuzz.report.html import Html, el, text
from fuzz.report.map_view import LEGEND
from fuzz.report.parts import Arrow, Lane, Mark, Recorded, Timeline
from fuzz.report.perfetto import trace
from fuzz.report.record import record
from fuzz.run import execute
from fuzz.tape import Tape
from fuzz.targets.setup import Pin
from oracle_tests.report_cases import PLANTED, Planted, case_in, failure, hostile_in

SECTIONS = {"story", "diagram", "map", "differences", "case"}
VOID = {"meta"}


class Page(HTMLParser):
    """The elements of a page, each with the classes that it is in, and all of its text."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(page.decode())
        self.close()
        assert not self.open, "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)

    def having(self, kind: str) -> list[dict[str, str | None]]:
        """Attributes of all elements of a class."""
        return [a for _, a in self.elements if kind in (a.get("class") or "").split()]


def made(path: Path) -> Page:
    page = path.with_suffix(".html")
    write_report(path, page)
    return Page(page.read_bytes())


def told(planted: Planted, folder: Path) -> tuple[Any, Recorded]:
    return record(case.load(case_in(folder, planted)))


each_target = pytest.mark.parametrize("planted", PLANTED, ids=lambda p: f"{p.target}-{p.mutant}")
engines = pytest.mark.parametrize("planted", PLANTED[:5], ids=lambda p: f"{p.target}-{p.mutant}")


# the page


@each_target
def test_a_page_tells_all_of_a_case_and_needs_nothing_else(planted: Planted, tmp_path: Path):
    path = case_in(tmp_path, planted)
    page, found = made(path), failure(planted)
    assert {a["id"] for _, a in page.elements if "id" in a} >= SECTIONS
    assert found.violations[0].sentence in page.text
    assert mutants.find(planted.mutant).sentence in page.text
    assert f"kvoracle replay {path}" in page.text
    assert len(page.having("bad")) > 0
    assert len(page.having("deeds")) == 1
    assert page.tags["li"] >= len(found.operations)
    assert not page.tags.keys() & {"script", "iframe", "object", "img", "link", "form", "base"}
    for name in ("src", "style", "onload", "onclick", "srcdoc", "action"):
        assert not [a for _, a in page.elements if name in a]
    links = [a["href"] or "" for _, a in page.elements if "href" in a]
    assert all(link.startswith(("#", "data:application/json;base64,")) for link in links)
    (policy,) = [a for a in page.elements if a[1].get("http-equiv") == "Content-Security-Policy"]
    assert (policy[1]["content"] or "").startswith("default-src 'none'; style-src 'sha256-")
    (saved,) = [link for link in links if link.startswith("data:")]
    assert base64.b64decode(saved.partition(",")[2]) == path.read_bytes()


@each_target
def test_looking_on_changes_nothing(planted: Planted, tmp_path: Path):
    again, _ = told(planted, tmp_path)
    found = failure(planted)
    assert again.digest == found.digest
    assert again.violations == found.violations
    assert again.events == found.events


def test_a_case_that_no_longer_fails_is_said_to(tmp_path: Path):
    path = case_in(tmp_path, PLANTED[1], mutant=None, seen=Rarity(3, 1000))
    page = made(path)
    assert "1,715 clean executions would say with 95%" in page.text
    assert "This case no longer fails" in page.text
    assert failure(PLANTED[1]).violations[0].sentence in page.text
    assert not page.having("failed")
    assert not page.having("wrong")[1:], "but for the legend"


def test_a_case_that_fails_otherwise_is_said_to(tmp_path: Path):
    path = case_in(tmp_path, PLANTED[1])
    assert "It was saved with" not in made(path).text
    changed = msgspec.structs.replace(failure(PLANTED[1]).violations[0], sentence="Something.")
    path = case_in(tmp_path, PLANTED[1], violations=[changed])
    assert f"It was saved with: {changed.oracle}" in made(path).text


def test_a_hostile_case_is_text(tmp_path: Path):
    for planted in (PLANTED[1], PLANTED[8]):
        path = hostile_in(tmp_path, planted)
        page = made(path)
        assert not page.tags.keys() & {"script", "img"}
        assert page.tags["svg"] == 1
        data = path.with_suffix(".html").read_text()
        assert not set("\u202e\u2066\u200b\x00\x1b") & set(data)
        assert "<script>" in page.text
        assert "\\u{202e}evil" in page.text


def test_text_and_markup_are_told_apart():
    assert el("p", {"title": "\"><b a='"}, "<b>") == (
        '<p title="&quot;&gt;&lt;b a=&#x27;">&lt;b&gt;</p>'
    )
    assert el("p", {}, Html("<b>"), ["<", None, ("&",)]) == "<p><b>&lt;&amp;</p>"
    assert text("a\x00\u202e\ud800\n") == "a\\u{0}\\u{202e}\\u{d800}\n"
    assert el("p", {"id": None}) == "<p></p>"


def test_a_crash_is_told_as_the_last_operation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The engine raises in an extend, of which there is no account."""
    saved = case.load(case_in(tmp_path, PLANTED[1], mutant=None))

    def breaks(*_: object, **__: object) -> None:
        raise RuntimeError("a <b>kernel</b> failed")

    monkeypatch.setattr("optimized.addressing.locs", breaks)
    outcome, recorded = record(saved)
    assert outcome.violations[0].oracle == "crash"
    assert len(recorded.deeds) == len(outcome.operations) + 1
    assert recorded.deeds[-1].text == outcome.violations[0].sentence
    assert [m.place[1] for m in recorded.timeline.marks if m.kind == "bad"] == [
        len(outcome.operations)
    ]


# the page map


@engines
def test_the_page_map_is_the_engines_own_account(planted: Planted, tmp_path: Path):
    saved = case.load(case_in(tmp_path, planted))
    snapshots: list[Any] = []

    class Looking:
        def begin(self, run: Any) -> None:
            snapshots.append(run.engine.inspect())

        def after(self, operation: Any, seen: Any = ()) -> None:
            snapshots.append(operation.after)

    with mutants.find(planted.mutant).applied():
        system, target = systems.load("optimized"), targets.find(planted.target)
        execute(system, target, Tape(saved.values), pin=saved.pin, watch=Looking())
    pools = {pool.title: pool for pool in record(saved)[1].pools}
    for cells, snapshot in zip(
        (pools["Logical pages"].before, pools["Logical pages"].after), snapshots[-2:], strict=True
    ):
        shown = 0
        for cell in cells:
            if cell.state == "padding":
                continue
            page = int(cell.name)
            assert (cell.state == "free") == (page in snapshot.free_pages)
            assert cell.references == snapshot.ref_counts.get(page)
            holders = {f"r{r}" for r, view in snapshot.requests.items() if page in view.pages}
            holders |= {"cache" for node in snapshot.cached if page in node.pages}
            assert {holder.short for holder in cell.holders} == holders
            shown += 1
        assert shown == len(snapshot.free_pages) + len(snapshot.ref_counts)


@each_target
def test_cells_are_on_the_page_as_often_as_there_are(planted: Planted, tmp_path: Path):
    path = case_in(tmp_path, planted)
    _, recorded = record(case.load(path))
    page = made(path)
    assert len(page.having("cell")) == 2 * sum(len(pool.after) for pool in recorded.pools)
    assert len(page.having("pool")) == len(recorded.pools)
    rows = sum(len(cell.segments) for pool in recorded.pools for cell in _loud(pool))
    assert len(page.having("seg")) == rows + len(LEGEND)


def _loud(pool: Any) -> Iterator[Any]:
    for i in range(len(pool.after)):
        if not pool.quiet(i):
            yield pool.before[i]
            yield pool.after[i]


def test_a_faulty_row_is_marked_where_it_lies(tmp_path: Path):
    """Of a restore that leaves out the KV rows: they alone are wrong, and still poison."""
    outcome, recorded = told(PLANTED[4], tmp_path)
    pools = {pool.title: pool for pool in recorded.pools}
    wrong = {title: [c for c in pool.after if c.wrong] for title, pool in pools.items()}
    assert [title for title in wrong if wrong[title]] == ["Logical pages"]
    row = int(outcome.violations[0].row.removeprefix("KV row "))
    page = sum(segment.rows for segment in pools["Logical pages"].after[1].segments)
    assert str(row // page) in {cell.name for cell in wrong["Logical pages"]}
    for cell in wrong["Logical pages"]:
        assert {s.kind for s in cell.segments if s.wrong} == {"poison"}


@pytest.mark.parametrize("target", ["prefix_split", "hot_buffer", "host_restore", "transfer"])
def test_nothing_is_wrong_in_a_clean_run(target: str, tmp_path: Path):
    stamped = Pin() if target == "transfer" else Pin(payload="stamped")
    for seed in range(3):
        clean = execute(
            systems.load("optimized"), targets.find(target), Tape(seed=seed), pin=stamped
        )
        path = tmp_path / "clean.json"
        saved = case.case_of(clean, system="optimized", path=path, pin=stamped)
        outcome, recorded = record(saved)
        assert not outcome.failed
        cells = [cell for pool in recorded.pools for cell in (*pool.before, *pool.after)]
        assert not any(cell.wrong for cell in cells)
        assert not any(table.marked for table in recorded.tables)
        assert not [arrow for arrow in recorded.timeline.arrows if arrow.kind == "bad"]
        assert {s.kind for cell in cells for s in cell.segments} >= {"poison"}


# what differs


def test_stamped_rows_are_told_with_both_stamps(tmp_path: Path):
    outcome, recorded = told(PLANTED[1], tmp_path)
    (table,) = [table for table in recorded.tables if table.title == "Rows that differ"]
    first = outcome.violations[0]
    assert first.expected in {line[3] for line in table.lines}
    assert len(table.marked) == len(table.lines) > 0


def test_outputs_of_a_model_run_stand_beside_the_references(tmp_path: Path):
    """Those of the faulty selection are marked; with the fault gone none is, at the same tape."""
    _, faulty = told(PLANTED[2], tmp_path)
    (table,) = [t for t in faulty.tables if t.title.startswith("Outputs")]
    assert table.marked
    (errors,) = [t for t in faulty.tables if t.title.startswith("Largest error")]
    assert any(float(line[1]) > 1 for line in errors.lines)
    assert errors.marked
    _, clean = record(case.load(case_in(tmp_path, PLANTED[2], mutant=None)))
    (table,) = [t for t in clean.tables if t.title.startswith("Outputs")]
    assert table.lines
    assert not table.marked
    assert all(float(line[5]) < 1e-3 for line in table.lines)


# the timeline


def assert_is_trace(data: bytes) -> list[dict[str, Any]]:
    """The rules of the trace event format, as far as a viewer goes by them."""
    whole = json.loads(data)
    events = whole["traceEvents"]
    assert whole["displayTimeUnit"] == "ms"
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["name"] == "process_name"}
    slices = [e for e in events if e["ph"] == "X"]
    flows: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        assert event["ph"] in {"M", "X", "s", "f", "C"}
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["name"]
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] in "Xsf":
            assert (event["pid"], event["tid"]) in named
            assert event["pid"] in processes
        if event["ph"] == "X":
            assert event["dur"] > 0
        if event["ph"] in "sf":
            flows.setdefault(event["id"], []).append(event)
    for start, stop in flows.values():
        assert (start["ph"], stop["ph"], stop["bp"]) == ("s", "f", "e")
        assert (start["name"], start["cat"]) == (stop["name"], stop["cat"])
        assert start["ts"] <= stop["ts"]
        for end in (start, stop):
            assert [
                s
                for s in slices
                if (s["pid"], s["tid"]) == (end["pid"], end["tid"])
                and s["ts"] <= end["ts"] <= s["ts"] + s["dur"]
            ], "a flow begins and ends in a slice"
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for each in slices:
        lanes.setdefault((each["pid"], each["tid"]), []).append((each["ts"], each["dur"]))
    for times in lanes.values():
        times.sort()
        for (ts, dur), (after, _) in itertools.pairwise(times):
            assert ts + dur <= after, "slices of a lane do not overlap"
    return events


@each_target
def test_the_timeline_keeps_to_the_format(planted: Planted, tmp_path: Path):
    path, found = case_in(tmp_path, planted), failure(planted)
    write_report(path, tmp_path / "page.html", perfetto=tmp_path / "trace.json")
    assert "in the timeline is 1 ms" in (tmp_path / "page.html").read_text()
    events = assert_is_trace((tmp_path / "trace.json").read_bytes())
    assert any(event.get("cat") == "bad" for event in events)
    assert max(e["ts"] for e in events if e["ph"] == "X") >= 1000 * (len(found.operations) - 1)


@pytest.mark.parametrize("planted", PLANTED[6:9], ids=lambda p: f"{p.target}-{p.mutant}")
def test_messages_and_writes_fly_forwards(planted: Planted, tmp_path: Path):
    """Also where they are drawn: no arrow ends before it starts, and some go either way."""
    _, recorded = told(planted, tmp_path)
    arrows = recorded.timeline.arrows
    assert arrows
    for arrow in arrows:
        assert arrow.stop is None or arrow.stop[1] >= arrow.start[1]
    offers = [a for a in arrows if "ADVERTISE" in a.text]
    assert offers
    assert all(recorded.timeline.lanes[a.start[0]].group == "ranks of D" for a in offers)


def test_the_timeline_is_told_of_where_there_is_one(tmp_path: Path):
    path, page, trace_file = case_in(tmp_path, PLANTED[1]), tmp_path / "p", tmp_path / "trace.json"
    assert str(trace_file) in write_report(path, page, perfetto=trace_file)
    assert "The timeline" not in write_report(path, page)
    assert "1 ms" not in page.read_text()


def test_a_timeline_says_what_it_was_given():
    timeline = Timeline()
    p, d = (timeline.lane(Lane(name, f"ranks of {name[0]}")) for name in ("P0", "D0"))
    for words in ("first", "second"):
        timeline.row(words)
    timeline.marks.append(Mark((p, 0), "sends"))
    timeline.arrows += [
        Arrow((p, 0), (d, 1), "ACK", "message"),
        Arrow((d, 1), None, "lost", "message"),
    ]
    events = assert_is_trace(trace(timeline, title="a run"))
    slices = [(e["name"], e["ts"], e["args"]["step"]) for e in events if e["ph"] == "X"]
    assert slices == [("sends", 0, "first"), ("ACK", 1000, "second")]
    assert [e["ph"] for e in events if e["ph"] in "sf"] == ["s", "f"]
