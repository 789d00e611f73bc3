"""The command line: results, exit statuses, and one sentence for every bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from fuzz import campaign, case, cli

FAULT = "page_table_41494"


class Run:
    """Calls `kvoracle` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: str | Path) -> tuple[int, str, str]:
        """(exit status, standard output, standard error)"""
        self._monkeypatch.setattr(sys, "argv", ["kvoracle", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = self._capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return stop.value.code, printed.out, printed.err


@pytest.fixture
def kvoracle(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(capsys, monkeypatch)


@pytest.fixture(scope="module")
def saved_case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A case of the planted fault, saved by the command itself in a process of its own."""
    folder = tmp_path_factory.mktemp("cases")
    command = [sys.executable, "-m", "fuzz.cli", "fuzz", "prefix_split"]
    options = ["--executions", "100", "--payload", "stamped", "--mutant", FAULT]
    folders = ["--cases", folder, "--corpus", tmp_path_factory.mktemp("corpus")]
    found = subprocess.run([*command, *options, *folders], capture_output=True, text=True)
    assert found.returncode == 1, found.stderr
    first = min(folder.iterdir())
    assert f"kvoracle replay {first}" in found.stdout
    return first


def sentence(status: int, out: str, err: str) -> str:
    """The one sentence of a refused call."""
    assert status == 2
    assert "Traceback" not in out + err
    lines = [line for line in err.splitlines() if line.startswith("kvoracle: ")]
    assert len(lines) == 1
    return lines[0].removeprefix("kvoracle: ")


def test_a_clean_campaign_ends_with_0_and_writes_its_summary(kvoracle: Run, tmp_path: Path) -> None:
    result = tmp_path / "summary.json"
    status, out, _ = kvoracle(
        "fuzz", "slot_reuse", "--executions", "300", "--cases", tmp_path, "--json", result
    )
    assert status == 0, out
    summary = json.loads(result.read_bytes())
    assert summary["executions"] == 300
    assert summary["failures"] == []
    assert summary["events"]["page_reused_at_once"] > 0


def test_a_campaign_that_saw_too_little_fails(kvoracle: Run, tmp_path: Path) -> None:
    status, out, _ = kvoracle("fuzz", "slot_reuse", "--executions", "1", "--cases", tmp_path)
    assert status == 1
    assert "never seen" in out


def test_replay_shows_the_violation_of_a_saved_case(
    kvoracle: Run, saved_case: Path, tmp_path: Path
) -> None:
    result = tmp_path / "outcome.json"
    status, out, _ = kvoracle("replay", saved_case, "--json", result)
    assert status == 1
    stored = case.load(saved_case)
    assert stored.violations[0].sentence in out
    assert json.loads(result.read_bytes())["violations"] == msgspec.to_builtins(stored.violations)


def test_replay_of_a_mended_case_ends_with_0(
    kvoracle: Run, saved_case: Path, tmp_path: Path
) -> None:
    mended = msgspec.structs.replace(case.load(saved_case), mutant=None)
    case.save(mended, tmp_path / "mended.json")
    status, out, _ = kvoracle("replay", tmp_path / "mended.json")
    assert status == 0
    assert "no longer fails" in out


def test_geometry_prints_sizes(kvoracle: Run) -> None:
    status, out, _ = kvoracle("geometry")
    assert status == 0
    assert "8448" in out


@pytest.mark.parametrize(
    ("arguments", "cause", "cure"),
    [
        (["geometry", "--kpool", "3"], "no multiple of kpool 3", "choose a page size"),
        (["geometry", "--dcp-size", "2"], "dcp_size 2", "set dcp_size to 1"),
        (["geometry", "--mamba-track-interval", "64"], "64 is no multiple", "multiple of 256"),
        (["fuzz", "nothing"], "no target 'nothing'", "choose one of prefix_split"),
        (["fuzz", "slot_reuse", "--system", "none"], "no system 'none'", "choose one of"),
        (["fuzz", "slot_reuse", "--mutant", "none"], "no mutant 'none'", "docs/mutants.md"),
        (["fuzz", "slot_reuse", "--kpool", "16"], '"16" for --kpool', "Choose from: 1, 2, 4"),
        (["fuzz", "slot_reuse", "--physical-page-size", "1000000"], "1000000", "4, 8, 16, 32, 64"),
        (["fuzz", "slot_reuse", "--cases", "/dev/null/x"], "cannot be made", "name a folder"),
        (["fuzz", "slot_reuse", "--corpus", "/dev/null/x"], "cannot be made", "name a folder"),
        (
            ["fuzz", "slot_reuse", "--system", "reference", "--mutant", FAULT],
            "plants nothing in 'reference'",
            "choose the system 'optimized'",
        ),
        (["fuzz", "slot_reuse", "--executions", "0"], '"0" for --executions', "Must be >= 1"),
        (["fuzz", "slot_reuse", "--no-such"], "Unknown option", "--no-such"),
        (["geometry", "--index-dim", "0"], "index_dim is 0", "at least 1"),
        (["geometry", "--index-dim", "-3"], "index_dim is -3", "at least 1"),
        (["geometry", "--index-dim", "100"], "index_dim 100 is no power of two", "choose one"),
        (["verify", "--trace", "/dev/zero"], "no regular file", "save the trace as one"),
        (["verify", "--trace", "/"], "no regular file", "save the trace as one"),
        (["mutants", "none"], "no mutant 'none'", "docs/mutants.md"),
        (["replay", "/nowhere/case.json"], "cannot be read", "give the path"),
        (["verify", "--trace", "/nowhere/trace.jsonl"], "/nowhere/trace.jsonl", "Mooncake"),
        (["geometry", "--json", "/nowhere/x.json"], "cannot be written", "name a file"),
    ],
)
def test_bad_input_gets_one_sentence(
    kvoracle: Run, arguments: list[str], cause: str, cure: str
) -> None:
    said = sentence(*kvoracle(*arguments))
    assert cause in said
    assert cure in said


@pytest.mark.parametrize(
    ("damage", "cure"),
    [
        (lambda text: text[: len(text) // 2], "give a JSON file"),
        (lambda text: text.replace('"version": 2', '"version": 999'), "release that saved it"),
        (lambda text: text.replace("kvoracle-case", "something"), "release that saved it"),
        (lambda text: text.replace('"values"', '"value"'), "save it anew"),
        (lambda text: "\x80" + text, "give a JSON file"),
        (lambda text: "[" * 100_000, "give a JSON file"),
    ],
)
def test_a_damaged_case_gets_one_sentence(
    kvoracle: Run, saved_case: Path, tmp_path: Path, damage, cure: str
) -> None:
    damaged = tmp_path / "damaged.json"
    text = damage(saved_case.read_text())
    assert text != saved_case.read_text()
    damaged.write_text(text)
    assert cure in sentence(*kvoracle("replay", damaged))


def test_a_case_of_a_fault_that_its_system_cannot_have_is_refused(
    kvoracle: Run, saved_case: Path, tmp_path: Path
) -> None:
    moved = msgspec.structs.replace(case.load(saved_case), system="reference")
    case.save(moved, tmp_path / "moved.json")
    assert "plants nothing in 'reference'" in sentence(*kvoracle("replay", tmp_path / "moved.json"))


FOUND = ["fuzz", "prefix_split", "--executions", "100", "--payload", "stamped", "--mutant", FAULT]


def test_a_full_disk_costs_neither_the_cases_nor_the_print(kvoracle: Run, tmp_path: Path) -> None:
    status, out, err = kvoracle(*FOUND, "--cases", tmp_path, "--json", "/dev/full")
    assert "/dev/full cannot be written (No space left on device)" in sentence(status, out, err)
    for path in tmp_path.iterdir():
        assert case.load(path).replay in out
    assert "failure 1" in out


@pytest.mark.parametrize("reader", ["gone", "full disk"])
def test_a_reader_who_goes_away_costs_neither_the_cases_nor_the_json(
    tmp_path: Path, reader: str
) -> None:
    result = tmp_path / "summary.json"
    command = [sys.executable, "-m", "fuzz.cli", *FOUND, "--cases", tmp_path / "cases"]
    if reader == "gone":
        read, write = os.pipe()
        os.close(read)
    else:
        write = os.open("/dev/full", os.O_WRONLY)
    ended = subprocess.run(
        [*command, "--json", result], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    said = sentence(ended.returncode, "", ended.stderr)
    assert said.startswith("standard output took only a part of the result")
    assert "Exception ignored" not in ended.stderr
    failures = json.loads(result.read_bytes())["failures"]
    assert len(failures) == len(list((tmp_path / "cases").iterdir())) > 0


def interrupt(*_: object, **__: object) -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("planted", "status"), [([], 130), (["--mutant", FAULT], 1)])
def test_ctrl_c_saves_what_was_found(
    kvoracle: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, planted: list[str], status: int
) -> None:
    batches = []

    def search(plan: campaign.Plan, batch: campaign.Batch) -> object:
        batches.append(batch)
        if len(batches) == 4:
            interrupt()
        return searched(plan, batch)

    searched = campaign._search
    monkeypatch.setattr(campaign, "_search", search)
    result = tmp_path / "summary.json"
    options = ["--seconds", "100", "--payload", "stamped", "--cases", tmp_path / "cases"]
    ended, out, err = kvoracle("fuzz", "prefix_split", *options, *planted, "--json", result)
    assert ended == status
    assert "Traceback" not in out + err
    assert "interrupted" in out
    summary = json.loads(result.read_bytes())
    assert summary["executions"] == 4 * campaign.BATCH
    assert len(list((tmp_path / "cases").iterdir())) == len(summary["failures"])
    assert bool(summary["failures"]) == bool(planted)


@pytest.mark.parametrize(
    ("arguments", "work"),
    [(["verify", "--quick"], "fuzz.cli.run_verify"), (["mutants"], "fuzz.mutants.report.report")],
)
def test_ctrl_c_ends_with_one_sentence(
    kvoracle: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], work: str
) -> None:
    monkeypatch.setattr(work, interrupt)
    status, out, err = kvoracle(*arguments)
    assert status == 130
    assert "kvoracle: interrupted before there was a result: run it again." in err
    assert "Traceback" not in out + err


def test_a_campaign_of_seconds_shows_the_time(
    kvoracle: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ["--seconds", "1", "--payload", "stamped", "--cases", tmp_path]
    _, _, err = kvoracle("fuzz", "slot_reuse", *options)
    assert "slot_reuse, seconds" in err
    assert "/1 " in err


def test_names_are_printed_as_they_are(kvoracle: Run, tmp_path: Path) -> None:
    folder = tmp_path / "[red]a[/] :smile:"
    status, out, _ = kvoracle(*FOUND, "--cases", folder)
    assert status == 1
    for path in folder.iterdir():
        assert f"kvoracle replay '{path}'" in out


@pytest.mark.parametrize(
    "line", ["{", '{"timestamp": 0}', '{"timestamp": 0, "input_length": -1, "output_length": 1}']
)
def test_a_malformed_trace_line_is_named(kvoracle: Run, tmp_path: Path, line: str) -> None:
    good = '{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}'
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f"{good}\n{line}\n")
    assert "line 2" in sentence(*kvoracle("verify", "--trace", trace))
