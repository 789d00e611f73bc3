"""What a night says: of the failures that it found, only those that no night before had are new."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fuzz.campaign import run
from fuzz.mutants.registry import find
from fuzz.mutants.report import KillRow, report
from fuzz.nightly import nightly
from fuzz.summary import Plan, Summary
from fuzz.terminal import UsageError, json_of
from fuzz.trend import Night, NightError, load, markdown, night_of

DATE, REVISION = "2026-01-02T03:04:05+00:00", "abc1234"


@pytest.fixture(scope="module")
def faulty() -> Summary:
    found = run(Plan(target="prefix_split", mutant="gather_by_loc", executions=10))
    return msgspec.structs.replace(found, missing=[])


@pytest.fixture(scope="module")
def row() -> KillRow:
    return report(["gather_by_loc"], seeds=1)[0]


def night(*summaries: Summary, rows: tuple[KillRow, ...] = (), last: Night | None = None) -> Night:
    return night_of(summaries, rows, date=DATE, revision=REVISION, last=last)


def test_a_failure_is_new_once(faulty, row):
    first = night(faulty, rows=(row,))
    assert first.new(None) == ["prefix_split provenance/index"]
    second = night(faulty, last=first)
    assert second.failures
    assert not second.new(first)


def test_a_failure_that_was_away_is_known_still(faulty):
    first = night(faulty)
    clean = msgspec.structs.replace(faulty, failures=[])
    between = night(clean, last=first)
    assert not between.failures
    assert not night(faulty, last=between).new(between)


def test_a_harness_that_finds_less_fails_the_night(faulty, row):
    blind = msgspec.structs.replace(
        faulty, failures=[], missing=["a hit"], missed=["gather_by_loc"], lost=[(25, 50)]
    )
    survivor = msgspec.structs.replace(row, verdict="survived", oracles={})
    assert night(blind, rows=(survivor,)).new(None) == [
        "mutant gather_by_loc survived",
        "prefix_split lost seeds",
        "prefix_split missed gather_by_loc",
        "prefix_split never saw a hit",
    ]


def test_the_summary_says_what_moved(faulty, row):
    then = night(faulty, rows=(row,))
    twice = msgspec.structs.replace(faulty, cpu_seconds=faulty.cpu_seconds / 2)
    late = msgspec.structs.replace(row, cpu_seconds=row.cpu_seconds + 100)
    text = markdown(night(twice, rows=(late,), last=then), then, {})
    assert "(+100 %)" in text
    assert "No new failure. Known ones that are still there: 1." in text
    assert "| gather_by_loc | 100" in text
    assert "found much later" not in markdown(then, None, {})


def test_nothing_in_a_summary_is_markup(faulty):
    hostile = msgspec.structs.replace(
        night(faulty), failures={"a|b": "<script>\n# heading `x` [y](z)"}
    )
    text = markdown(hostile, None, {})
    assert r"a\|b" in text
    assert r"\<script\> # heading \`x\` \[y\](z)" in text
    assert "\n# heading" not in text


def test_a_record_comes_back(faulty, row, tmp_path: Path):
    path = tmp_path / "night.json"
    assert load(path) is None
    record = night(faulty, rows=(row,))
    path.write_bytes(json_of(record))
    assert load(path) == record


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"schema": 3}', b"[" * 100_000, b"\xff\xfe", b'{"date": "x"}']
)
def test_another_file_is_refused_in_a_sentence(data: bytes, tmp_path: Path):
    path = tmp_path / "night.json"
    path.write_bytes(data)
    with pytest.raises(NightError, match="is no record of a night"):
        load(path)
    assert path.read_bytes() == data


def test_a_night_fails_for_a_new_failure_only(tmp_path: Path, monkeypatch):
    """A failing engine fails the first night, and the second finds nothing new."""
    monkeypatch.chdir(tmp_path)
    short = {"target": ["prefix_split"], "mutant": ["gather_by_loc"], "executions": 25, "seeds": 1}
    with find("extend_by_loc").applied():
        assert nightly(**short, seed=0, processes=1, corpus=tmp_path / "first") == 1
        before = {path: path.read_bytes() for path in tmp_path.glob("out/nightly/cases/*.json")}
        assert nightly(**short, seed=0, processes=1, corpus=tmp_path / "second") == 0
    assert before
    for path in before:
        page = tmp_path / "out" / "nightly" / "reports" / f"{path.stem}.html"
        assert page.read_text().startswith("<!doctype html>")
    summary = (tmp_path / "out" / "nightly" / "summary.md").read_text()
    assert f"reports/{page.name}".replace("_", r"\_") in summary
    assert "No new failure." in summary


def test_an_interrupted_night_keeps_what_it_did(faulty, tmp_path: Path, monkeypatch, capsys):
    """Ctrl-C in the second campaign: the first one's case is on the disk by then."""
    folder, seen = tmp_path / "night", []

    def interrupted_in_the_second(plan: Plan, **_: object) -> Summary:
        seen.append([path.name for path in folder.glob("cases/*.json")])
        if plan.target == "prefix_split":
            return msgspec.structs.replace(faulty, plan=plan)
        return msgspec.structs.replace(
            faulty, plan=plan, failures=[], missing=["a hit"], interrupted=True
        )

    def no_kill_report(*_: object, **__: object) -> None:
        raise AssertionError("An interrupted night makes no kill report.")

    monkeypatch.setattr("fuzz.campaign.run", interrupted_in_the_second)
    monkeypatch.setattr("fuzz.mutants.report.report", no_kill_report)
    asked = {
        "target": ["prefix_split", "slot_reuse", "hot_buffer"],
        "folder": folder,
        "corpus": tmp_path / "corpus",
    }
    assert nightly(**asked) == 1
    (case,) = folder.glob("cases/*.json")
    assert seen == [[], [case.name]]
    said = capsys.readouterr().out
    assert f"kvoracle replay {case}" in said
    assert "Interrupted: " in said
    assert "\\" not in said
    record = load(folder / "night.json")
    assert record is not None
    assert record.interrupted
    assert list(record.campaigns) == ["prefix_split", "slot_reuse"]
    # what an interrupted campaign has not seen yet is no failure
    assert list(record.failures) == ["prefix_split provenance/index"]
    summary = (folder / "summary.md").read_text()
    assert "Interrupted: " in summary
    assert "mutants killed" not in summary
    # the same once more is known
    assert nightly(**asked) == 130
    assert f"kvoracle replay {case}" not in capsys.readouterr().out


def test_ctrl_c_in_the_kill_report(faulty, tmp_path: Path, monkeypatch):
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    clean = msgspec.structs.replace(faulty, failures=[])
    monkeypatch.setattr("fuzz.campaign.run", lambda plan, **_: clean)
    monkeypatch.setattr("fuzz.mutants.report.report", stopped)
    asked = {"target": ["prefix_split"], "folder": tmp_path, "corpus": tmp_path / "corpus"}
    assert nightly(**asked) == 130
    before = load(tmp_path / "night.json")
    assert before is not None
    assert before.interrupted
    # nothing done is nothing written
    monkeypatch.setattr("fuzz.campaign.run", stopped)
    with pytest.raises(KeyboardInterrupt):
        nightly(**asked)
    assert load(tmp_path / "night.json") == before


def test_a_record_is_written_whole(faulty, tmp_path: Path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    record = json_of(night(faulty))
    (tmp_path / "night.json").write_bytes(record)
    monkeypatch.setattr("fuzz.campaign.run", lambda plan, **_: faulty)
    monkeypatch.setattr("fuzz.mutants.report.report", lambda *_, **__: [])
    monkeypatch.setattr("fuzz.files.os.fsync", full)
    with pytest.raises(UsageError, match=r"cannot be written \(No space left on device\): name"):
        nightly(target=["prefix_split"], folder=tmp_path, corpus=tmp_path / "corpus")
    assert (tmp_path / "night.json").read_bytes() == record
