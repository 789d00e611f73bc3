"""Saved failures: what is written is what is replayed, and anything else gets one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

import systems
from fuzz import mutants, targets
from fuzz.case import MOST_BYTES, CaseError, case_of, check_same_run, load, save
from fuzz.run import execute
from fuzz.tape import Tape
from fuzz.targets.setup import KPool, PhysicalPageSize, Pin


@pytest.fixture(scope="module")
def failing():
    with mutants.find("page_table_41494").applied():
        for seed in range(500):
            tape = Tape(seed=seed)
            pin = Pin(payload="stamped")
            outcome = execute(
                systems.load("optimized"), targets.find("prefix_split"), tape, pin=pin
            )
            if outcome.failed:
                return outcome
    raise AssertionError("the fault was not found")


@pytest.fixture
def saved(failing, tmp_path):
    path = tmp_path / "found" / "case.json"
    pin = Pin(payload="stamped")
    case = case_of(failing, system="optimized", path=path, pin=pin, mutant="page_table_41494")
    save(case, path)
    return path


def test_a_case_replays_to_the_same_digest_and_verdict(saved, failing):
    case = load(saved)
    with mutants.find(case.mutant).applied():
        again = execute(
            systems.load(case.system), targets.find(case.target), Tape(case.values), pin=case.pin
        )
    assert again.violations == case.violations == failing.violations
    assert again.digest == failing.digest


def test_a_case_can_be_read_by_people(saved):
    text = saved.read_text()
    data = json.loads(text)
    assert data["operations"][0].startswith("submit request 0 with ")
    assert data["violations"][0]["sentence"].endswith(".")
    assert data["versions"].keys() >= {"kvoracle", "torch", "numpy", "python"}
    assert text.rstrip().endswith(f'"replay": "kvoracle replay {saved}"\n}}')


def edited(saved, **changes):
    data = json.loads(saved.read_text()) | changes
    saved.write_text(json.dumps(data))
    return saved


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"version": 1}, r"is a 'kvoracle-case' of version 1, .* replay it with the KVOracle"),
        ({"schema": "x"}, r"is a 'x' of version 2, not a 'kvoracle-case'"),
        ({"values": [-1]}, r"is a damaged case \(.*>= 0.*\): save it anew"),
        ({"values": [1 << 40]}, r"is a damaged case"),
        ({"values": [0] * 70_000}, r"is a damaged case"),
        ({"values": "0"}, r"is a damaged case \(Expected `array`"),
        ({"extra": 1}, r"is a damaged case \(Object contains unknown field"),
        ({"pin": {"payload": "x"}}, r"is a damaged case"),
        ({"pin": {"page": 4}}, r"is a damaged case \(Object contains unknown field `page`"),
        ({"pin": {"kpool": 16}}, r"is a damaged case"),
        ({"pin": {"kpool": 4.5}}, r"is a damaged case"),
        ({"pin": {"physical_page_size": 1_000_000}}, r"is a damaged case"),
        ({"pin": {"physical_page_size": 6}}, r"is a damaged case"),
        ({"pin": {"interval_pages": 0}}, r"is a damaged case \(.*>= 1"),
        ({"pin": {"max_drafts": 1_000_000}}, r"is a damaged case \(.*<= 16"),
        ({"pin": {"pages": 1 << 40}}, r"is a damaged case \(.*<= 1000"),
        ({"pin": {"max_requests": 0}}, r"is a damaged case \(.*>= 1"),
        ({"pin": {"spare_states": -1}}, r"is a damaged case \(.*>= 0"),
        ({"pin": {"operations": 1 << 40}}, r"is a damaged case \(.*<= 1000"),
        ({"mutant": ""}, r"is a damaged case \(.*length >= 1"),
    ],
)
def test_a_hostile_case_is_told_with_the_cure(saved, changes, sentence):
    with pytest.raises(CaseError, match=sentence) as error:
        load(edited(saved, **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "is no saved case"),
        (b"\xff\xfe", "is no saved case"),
        (b"[1, 2]", "is no saved case"),
        (b"{}", "is no saved case .* missing required field `schema`"),
        (b"[" * 100_000, "is no saved case"),
        (b" " * (MOST_BYTES + 1), f"has more than {MOST_BYTES} bytes"),
    ],
)
def test_a_file_that_is_no_case_is_told_with_the_cure(tmp_path, data, sentence):
    path = tmp_path / "case.json"
    path.write_bytes(data)
    with pytest.raises(CaseError, match=sentence):
        load(path)


@pytest.mark.parametrize("kpool", get_args(KPool))
@pytest.mark.parametrize("page", get_args(PhysicalPageSize))
def test_every_pinned_geometry_runs(kpool, page):
    """Whatever the tape draws for the other choices."""
    target = targets.find("slot_reuse")
    for pin in (
        Pin(payload="stamped", kpool=kpool, physical_page_size=page),
        Pin(payload="stamped", kpool=kpool),
        Pin(payload="stamped", physical_page_size=page),
    ):
        for seed in range(2):
            outcome = execute(systems.load("optimized"), target, Tape(seed=seed), pin=pin)
            assert not outcome.failed


def test_a_case_that_cannot_be_written_is_told_with_the_cure(saved):
    case = load(saved)
    with pytest.raises(CaseError, match=r"cannot be written \(.*\): name a folder on a disk"):
        save(case, saved / "case.json")
    with pytest.raises(CaseError, match="cannot be written"):
        save(case, Path("/dev/full"))


def test_a_missing_file_is_told_with_the_cure(tmp_path):
    with pytest.raises(CaseError, match=r"cannot be read .*: give the path of a saved case"):
        load(tmp_path / "nothing.json")
    with pytest.raises(CaseError, match="cannot be read"):
        load(tmp_path)


def test_a_case_that_is_another_run_now_is_not_called_mended(saved, failing):
    """No failure, but of a run that is not the one that was saved."""
    system, target, kept = systems.load("optimized"), targets.find(failing.target), load(saved)
    mended = execute(system, target, Tape(kept.values), pin=kept.pin)
    assert not mended.failed
    check_same_run(kept, mended, saved)
    for other in (
        execute(system, target, Tape([]), pin=kept.pin),
        execute(system, target, Tape(kept.values), pin=Pin(pages=1)),
        execute(system, targets.find("hot_buffer"), Tape(kept.values), pin=kept.pin),
    ):
        with pytest.raises(
            CaseError, match=r"no longer gives the run .* replay it on the system that it"
        ):
            check_same_run(kept, other, saved)
    for text in ("", " ", "\n"):
        odd = load(edited(saved, operations=[text]))
        with pytest.raises(CaseError, match=r"no longer gives the run"):
            check_same_run(odd, mended, saved)
