"""The page of a report in a real browser: it loads, it fits, and it runs nothing."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzz import case
from fuzz.report.command import write_report
from fuzz.report.record import record
from oracle_tests.browser import Browser, BrowserError, browser
from oracle_tests.report_cases import HOSTILE, PLANTED, Planted, case_in, hostile_in

pytestmark = pytest.mark.browser
TEXT = "document.body.innerText"
"""What is to be seen, or would be if it were unfolded."""

CONTRAST = """selector => {
  const lit = colour => {
    const context = document.createElement("canvas").getContext("2d");
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = context.getImageData(0, 0, 1, 1).data;
    const of = c => (c /= 255) <= .03928 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
    return [.2126 * of(r) + .7152 * of(g) + .0722 * of(b), a];
  };
  const element = document.querySelector(selector);
  const text = lit(getComputedStyle(element).color)[0];
  let around = element, back = [1, 0];
  while (around && (back = lit(getComputedStyle(around).backgroundColor))[1] < 255) {
    around = around.parentElement;
  }
  const [low, high] = [text, back[0]].sort((a, b) => a - b);
  return (high + .05) / (low + .05);
}"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


def made(path: Path) -> Path:
    page = path.with_suffix(".html")
    write_report(path, page)
    return page


def contrast(tab: Browser, selector: str) -> float:
    """How far a text stands out from the nearest background, by the WCAG's measure: 1 to 21."""
    return float(tab.value(f"({CONTRAST})({selector!r})"))


@pytest.mark.parametrize("planted", PLANTED, ids=lambda p: f"{p.target}-{p.mutant}")
def test_a_page_loads_with_all_its_parts(tab: Browser, planted: Planted, tmp_path: Path) -> None:
    path = case_in(tmp_path, planted)
    outcome, recorded = record(case.load(path))
    page = made(path)
    tab.requests.clear()
    tab.open(page)
    assert tab.complaints == []
    assert tab.requests == [page.as_uri()]
    assert outcome.violations[0].sentence in tab.value(TEXT)
    for name in ("story", "diagram", "map", "differences", "case"):
        assert tab.value(f"document.querySelector('#{name} h2').getBoundingClientRect().height") > 0
    cells = 2 * sum(len(pool.after) for pool in recorded.pools)
    assert tab.value("document.querySelectorAll('#map .cell').length") == cells
    drawn = tab.value("document.querySelectorAll('#diagram svg .mark.bad').length")
    assert drawn == sum(mark.kind == "bad" for mark in recorded.timeline.marks)
    styled = tab.value("getComputedStyle(document.querySelector('.verdict')).borderRadius")
    assert styled == "10px", "the policy lets the page's own style in"


@pytest.mark.parametrize("width", [320, 420, 1280])
def test_a_page_fits_into_its_window(tab: Browser, width: int, tmp_path: Path) -> None:
    """What is wider scrolls in a frame of its own, which the keyboard reaches."""
    for planted in (PLANTED[0], PLANTED[6]):
        tab.open(made(case_in(tmp_path, planted)), width=width)
        assert tab.value("document.documentElement.scrollWidth") <= width
        unreached = "[...document.querySelectorAll('.scroll, pre')].filter(e => e.tabIndex !== 0)"
        assert tab.value(f"{unreached}.length") == 0


@pytest.mark.parametrize("dark", [False, True])
def test_a_page_can_be_read_in_light_and_dark(tab: Browser, dark: bool, tmp_path: Path) -> None:
    tab.open(made(case_in(tmp_path, PLANTED[4])), dark=dark)
    paper = tab.value("getComputedStyle(document.body).backgroundColor")
    shade = sum(map(int, paper.removeprefix("rgb(").removesuffix(")").split(",")))
    assert (shade < 150) is dark
    for selector in (
        "body",
        ".kicker",
        ".verdict h2",
        ".owners .expected",
        ".owners .actual",
        ".note",
        ".setup dt",
        "nav a",
        ".cell.held .name",
        ".chip",
        ".cell.quiet .name",
        "tr.bad td",
    ):
        assert contrast(tab, selector) >= 4.5, selector
    picture = tab.picture()
    width, height = struct.unpack(">II", picture[16:24])
    assert (picture[:4], width, height) == (b"\x89PNG", 1280, 900)


def test_screen_readers_find_their_way(tab: Browser, tmp_path: Path) -> None:
    """By landmarks and headings in order, by names for what is drawn, and by links that lead to
    what is there."""
    tab.open(made(case_in(tmp_path, PLANTED[5])))
    for selector in ("main", "nav", "header", "footer", "h1", "a.skip", "html[lang]"):
        assert tab.value(f"document.querySelectorAll('{selector}').length") == 1, selector
    levels = tab.value("[...document.querySelectorAll('h1,h2,h3')].map(h => +h.tagName[1])")
    assert all(after <= level + 1 for level, after in itertools.pairwise(levels))
    assert tab.value("document.querySelector('svg').getAttribute('aria-label').length") > 40
    leading = "[...document.querySelectorAll('a[href^=\"#\"]')]"
    assert tab.value(f"{leading}.every(a => document.querySelector(a.getAttribute('href')))")
    assert tab.value("[...document.querySelectorAll('#map .cell .vh')].length") > 0


def test_a_hostile_case_runs_nothing_and_asks_for_nothing(tab: Browser, tmp_path: Path) -> None:
    for planted in (PLANTED[1], PLANTED[8]):
        page = made(hostile_in(tmp_path, planted))
        tab.requests.clear()
        tab.open(page)
        assert tab.complaints == []
        assert tab.requests == [page.as_uri()]
        assert tab.value("document.title").startswith("KVOracle: ")
        assert tab.value("document.querySelectorAll('script, img').length") == 0
        assert "<script>document.title='owned'</script>" in tab.value(TEXT)


def test_the_same_texts_unescaped_do_harm(tab: Browser, tmp_path: Path) -> None:
    """So the test above would notice; and what they would do the policy of a page stops."""
    bare = tmp_path / "bare.html"
    bare.write_text(f"<!doctype html><title>mine</title><pre>{HOSTILE}")
    tab.requests.clear()
    tab.open(bare)
    assert tab.value("document.title") == "owned"
    assert "http://evil.invalid/x" in tab.requests

    page = made(case_in(tmp_path, PLANTED[1]))
    broken = tmp_path / "broken.html"
    broken.write_text(page.read_text().replace("<footer>", f"<footer><pre>{HOSTILE}"))
    tab.open(broken)
    assert tab.value("document.title").startswith("KVOracle: ")
    assert any("Content Security Policy" in complaint for complaint in tab.complaints)


def test_a_missing_browser_is_an_error_with_its_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BrowserError, match="install chromium"), browser(tmp_path):
        pass
