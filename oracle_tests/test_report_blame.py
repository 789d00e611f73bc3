"""Where a report puts the blame: on whom the oracle's sentence names, and on nobody else."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

import systems
from fuzz import case, mutants, targets
from fuzz.oracles.metamorphic import AUDITED
from fuzz.report.blame import WHOLE, mark
from fuzz.report.parts import Lane, Timeline
from fuzz.report.record import record
from fuzz.report.spacetime import UNARRIVED
from fuzz.run import execute
from fuzz.tape import Tape
from fuzz.targets.setup import Pin
from oracle_tests.report_cases import PLANTED, Planted, case_in
from oracle_tests.test_report import made, told


def test_an_audit_accuses_the_operation_that_it_is_about(tmp_path: Path):
    """And not the last one, which has nothing to do with it."""
    planted = Planted("prefix_split", "copied_state_one_ulp_off", Pin(payload="model"))
    system, target = systems.load("optimized"), targets.find(planted.target)
    with mutants.find(planted.mutant).applied():
        runs = (execute(system, target, Tape(seed=seed), pin=planted.pin) for seed in range(400))
        found = next(run for run in runs if AUDITED in "".join(v.sentence for v in run.violations))
    path = tmp_path / "audit.json"
    saved = case.case_of(
        found, system="optimized", path=path, pin=planted.pin, mutant=planted.mutant
    )
    case.save(saved, path)
    _, recorded = record(saved)
    sentence = found.violations[0].sentence
    named = re.match(
        r"Request (\d+)'s \w+ of position \d+ .* operation (\d+), '(.*)', differ", sentence
    )
    assert named, sentence
    number = int(named[2])
    assert number < len(found.operations)
    assert recorded.deeds[number - 1].text == named[3]
    (ring,) = [mark for mark in recorded.timeline.marks if mark.kind == "bad"]
    assert recorded.timeline.lanes[ring.place[0]].name == f"request {named[1]}"
    assert ring.place[1] == number - 1
    page = made(path)
    (red,) = [a["value"] for tag, a in page.elements if tag == "li" and a.get("class") == "bad"]
    assert red == str(number)
    assert f"In the audit of the run, after operation {len(found.operations)}," in page.text


def test_a_faulty_aux_row_is_on_the_page_map(tmp_path: Path):
    planted = Planted("transfer", "aux_row_to_the_writers_slot", Pin())
    outcome, recorded = told(planted, tmp_path)
    named = {re.match(r"Aux row (\d+) of (D\d)", v.sentence) for v in outcome.violations} - {None}
    assert named
    pools = {pool.title: pool for pool in recorded.pools}
    wrong = {(c.name, rank) for rank in ("D0", "D1") for c in _after(pools, rank) if c.wrong}
    assert wrong == {match.groups() for match in named if match}
    rings = [mark for mark in recorded.timeline.marks if mark.kind == "bad"]
    lanes = {recorded.timeline.lanes[ring.place[0]].name for ring in rings}
    assert lanes == {outcome.violations[0].sentence.split()[4]}
    assert all(recorded.timeline.rows[ring.place[1]].heading for ring in rings)
    page = made(case_in(tmp_path, planted))
    assert "What the oracles name" not in page.text
    assert "0 lines" not in page.text


def _after(pools: Any, rank: str) -> Any:
    title = f"Aux rows of {rank}"
    return pools[title].after if title in pools else ()


def test_a_handshake_accuses_no_rank_that_it_does_not_name(tmp_path: Path):
    planted = Planted("shared_memory", "visitor_without_the_nonce", Pin())
    outcome, recorded = told(planted, tmp_path)
    assert outcome.signature == "exact/handshake"
    rings = [mark for mark in recorded.timeline.marks if mark.kind == "bad"]
    assert [recorded.timeline.lanes[ring.place[0]] for ring in rings] == [WHOLE]
    page = made(case_in(tmp_path, planted))
    assert "The oracle asks that two processes share memory" in page.text
    assert "reference counts, hits" not in page.text


@pytest.mark.parametrize(
    ("sentence", "lanes"),
    [
        ("Aux row 2 of D1 changed, for request 0.", {"D1"}),
        ("writer P0 (life 1) acknowledged room 0 to rank 1 of D.", {"P0", "D1"}),
        ("D should decode request 0 from token 7 on, which P has sampled.", {"request 0"}),
        ("P: page 3 is free, and owned.", {"P0", "P1"}),
        ("Piece 0 of room 0 should land.", {"whole run"}),
    ],
)
def test_rings_are_on_those_whom_a_sentence_names(sentence: str, lanes: set[str]):
    timeline = Timeline(lanes=[Lane("request 0", "requests", 0)])
    for side, rank in itertools.product("PD", (0, 1)):
        timeline.lane(Lane(f"{side}{rank}", f"ranks of {side}"))
    mark(timeline, sentence, timeline.row("an operation"))
    assert {timeline.lanes[ring.place[0]].name for ring in timeline.marks} == lanes


def test_what_never_came_is_told_in_arrow_and_legend(tmp_path: Path):
    path = case_in(tmp_path, PLANTED[8])
    _, recorded = record(case.load(path))
    assert [a for a in recorded.timeline.arrows if a.stop is None]
    page = made(path)
    assert UNARRIVED in page.text
    assert "had not come when the run ended" in page.text.replace(UNARRIVED, "")


def test_an_audit_that_names_no_request_accuses_none(tmp_path: Path):
    outcome, recorded = told(PLANTED[2], tmp_path)
    assert outcome.violations[0].oracle == "numeric"
    assert recorded.blamed is None
    rings = [mark for mark in recorded.timeline.marks if mark.kind == "bad"]
    assert [recorded.timeline.lanes[ring.place[0]] for ring in rings] == [WHOLE]
