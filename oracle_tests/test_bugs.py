"""Public bugs: each one that is encoded is caught, and passes where its fault is taken out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from fuzz.bugs import registry
from fuzz.bugs.check import Checked, check
from fuzz.bugs.command import BugRow, report, summary, table, table_of_docs
from fuzz.bugs.registry import UnknownBug, encoding, find, registered, scenarios
from fuzz.mutants.registry import Mutant
from fuzz.mutants.registry import find as find_mutant
from fuzz.mutants.registry import registered as mutants
from fuzz.step import Violation

IDS = """
DeepSeek-v4-Flash-Vision-Exp-DSpark-1M-NVFP4-KV-2x-DGX-Spark#2 FlashMLA#109 LMCache#2772
LMCache#2972 LMCache#4086 LMCache#4133 LMCache#4247 LMCache#4463 LMCache#5095 Mooncake#3599
Mooncake#4153 Mooncake#4239 Mooncake#730 Mooncake#850 TensorRT-LLM#12313 TensorRT-LLM#12314
TensorRT-LLM#12542 TensorRT-LLM#13713 TensorRT-LLM#15018 TensorRT-LLM#15139 TensorRT-LLM#17658
TensorRT-LLM#17665 TensorRT-LLM#18769 TensorRT-LLM#8813 aiter#4587 cudnn-frontend#1013
dynamo#15079 dynamo#5068 flash-linear-attention#103 flash-linear-attention#1134 flashinfer#4896
flashinfer#941 nixl#2027 nixl#2107 nixl#688 sglang#10637 sglang#11970 sglang#15805 sglang#18939
sglang#19897 sglang#20611 sglang#23020 sglang#23239 sglang#23704 sglang#24371 sglang#24527
sglang#24585 sglang#24758 sglang#24878 sglang#25116 sglang#26747 sglang#26975 sglang#27108
sglang#28468 sglang#28753 sglang#28896 sglang#28971 sglang#30352 sglang#30601 sglang#30760
sglang#30938 sglang#30986 sglang#31218 sglang#31471 sglang#31901 sglang#32176 sglang#32477
sglang#34025 sglang#34076 sglang#34607 sglang#34683 sglang#36033 sglang#36081 sglang#36371
sglang#36409 sglang#36966 sglang#37103 sglang#37633 sglang#38031 sglang#38161 sglang#38273
sglang#38815 sglang#38961a sglang#38961b sglang#38961c sglang#38961d sglang#39288 sglang#39342
sglang#39830 sglang#39846 sglang#40743 sglang#42178 sglang#42178r sglang#42536 sglang#42750
sglang#42832 sglang#42918 sglang#7130 sglang#seed000 sglang-jax#1523 sglang-jax#1532
sglang-jax#1607 smg#2365 tilelang#1948 tpu-inference#3412 triton#9887 vllm#24268 vllm#25562
vllm#27264 vllm#32255 vllm#40896 vllm#41037 vllm#43523 vllm#43990 vllm#44701 vllm#46283 vllm#47282
vllm#47574 vllm#47671 vllm#47783 vllm#49620 vllm#50272 vllm#50427 vllm#50653 vllm#50714 vllm#51187
vllm#51323 vllm#52109 vllm#52234 vllm#52495 vllm#52942 vllm#53504 vllm#53505 vllm#53912 vllm#54076
vllm#54342 vllm#54359 vllm#56158 vllm#56699 vllm#57019 vllm#57156 vllm#57388 vllm#57705
vllm-ascend#13501 vllm-ascend#14055
"""
"""The reports that the harness is held to, by repository and number."""
CORPUS = IDS.split()
ENCODED = [bug for bug in registered().values() if bug.by]
SERVES = Counter(name for bug in ENCODED for name in bug.by)
DOCS = Path(__file__).parent.parent / "docs" / "bugs.md"


def is_searched_for_elsewhere(name):
    """test_mutants kills each mutant that a target finds, and runs the same control."""
    found = encoding(name)
    return isinstance(found, Mutant) and found.target != "drain" and not found.needs


@pytest.mark.parametrize("name", [name for name in SERVES if not is_searched_for_elsewhere(name)])
def test_encoding_is_caught_and_passes_without_its_fault(name):
    checked = check(name, budget_s=60)
    assert checked.passed, (checked.oracle, checked.sentence, checked.control)


@pytest.mark.parametrize(
    "name", ["keys_read_flat", "ties_at_the_threshold_dropped", "restore_without_index"]
)
def test_mutant_of_a_target_is_caught_and_passes_without_its_fault(name):
    assert is_searched_for_elsewhere(name)
    checked = check(name, budget_s=60)
    assert checked.passed, (checked.oracle, checked.sentence, checked.control)


def test_no_encoding_is_a_mutant_that_cannot_matter():
    for name in filter(is_searched_for_elsewhere, SERVES):
        assert encoding(name).equivalence is None
        assert encoding(name).killed_by


def test_enough_bugs_are_encoded_by_enough_encodings():
    assert len(ENCODED) >= 100
    assert len(SERVES) >= 60
    assert max(SERVES.values()) <= 3


def test_every_report_of_the_corpus_has_a_row():
    assert len(CORPUS) == len(set(CORPUS)) == 145
    assert set(registered()) == set(CORPUS)


def test_rows_say_what_they_are_in_sentences():
    for bug in registered().values():
        assert bug.sentence.endswith(".")
        assert bool(bug.by) != bool(bug.missing)
        assert bug.missing.endswith(".") or bug.by
        assert len(set(bug.by)) == len(bug.by)


def test_scenarios_name_their_oracles_serve_a_row_and_are_no_mutants():
    assert scenarios().keys() <= SERVES.keys()
    assert scenarios().keys().isdisjoint(mutants())
    for scene in scenarios().values():
        assert scene.caught_by
        assert "crash" not in scene.caught_by
        assert scene.sentence.endswith(".")


def test_a_mutant_for_one_bug_is_entered_there():
    """A mutant that says which bug it re-creates serves that row, if the row is encoded."""
    strays = [
        (mutant.name, mutant.bug)
        for mutant in mutants().values()
        if mutant.name in SERVES and mutant.bug in registered()
        if mutant.name not in registered()[mutant.bug].by
    ]
    assert not strays


def test_scene_without_a_working_fault_is_not_caught(monkeypatch):
    scene = scenarios()["repeat_of_whole_pages_hits"]
    (name,) = scene.faults
    idle = {name: lambda original, *args, **kwargs: original(*args, **kwargs)}
    monkeypatch.setitem(registry._SCENARIOS, scene.name, replace(scene, faults=idle))
    checked = check(scene.name)
    assert checked.oracle is None
    assert not checked.passed


def test_scene_that_goes_wrong_by_itself_fails_its_control(monkeypatch):
    scene = scenarios()["repeat_of_whole_pages_hits"]
    always = replace(scene, play=lambda: [Violation("exact", "hit", "It is always wrong.")])
    monkeypatch.setitem(registry._SCENARIOS, scene.name, always)
    checked = check(scene.name)
    assert (checked.named, checked.control) == (True, "It is always wrong.")
    assert not checked.passed


def test_oracle_that_is_not_named_does_not_count(monkeypatch):
    scene = scenarios()["repeat_of_whole_pages_hits"]
    monkeypatch.setitem(registry._SCENARIOS, scene.name, replace(scene, caught_by=("numeric",)))
    checked = check(scene.name)
    assert (checked.oracle, checked.named) == ("exact", False)
    assert not checked.passed


@pytest.mark.parametrize("name", ["keys_read_flat", "released_twice", "loc_in_32_bits"])
def test_mutant_that_changes_nothing_is_not_caught(monkeypatch, name):
    mutant = find_mutant(name)
    for function in mutant.patches:
        monkeypatch.setitem(mutant.patches, function, lambda original, *a, **k: original(*a, **k))
    checked = check(name, budget_s=0.2)
    assert checked.oracle is None
    assert not checked.passed


def test_fault_is_taken_out_again():
    scene = scenarios()["items_of_another_width_are_refused"]
    with scene.applied():
        assert scene.play()
    assert not scene.play()


def test_unknown_bug_is_one_sentence():
    with pytest.raises(UnknownBug, match=r"^There is no bug 'tilelang#198': .*'tilelang#1948'"):
        find("tilelang#198")


def test_encoding_is_found_by_name():
    assert encoding("keys_read_flat") is find_mutant("keys_read_flat")
    assert encoding("an_adapter_is_no_salt") is scenarios()["an_adapter_is_no_salt"]


def test_report_checks_each_encoding_once():
    steps = []
    # two bugs of one mutant, and one that is not encoded
    rows = report(
        ["sglang#34025", "vllm#47671", "sglang#36966"], progress=lambda *s: steps.append(s)
    )
    assert steps == [(1, 1)]
    assert [len(row.encodings) for row in rows] == [1, 1, 0]
    assert rows[0].encodings == rows[1].encodings
    assert all(row.passed for row in rows)
    said = "2 of 3 bugs encoded and caught, by 1 encodings, of which none serves more than 2"
    assert said in summary(rows)


def test_tables_say_what_is_amiss():
    def row(**fields):
        checked = Checked(name="a_fault", kind="mutant", **fields)
        return BugRow(id="a#1", sentence="It fails.", missing="", encodings=(checked,))

    lacking = BugRow(id="b#2", sentence="It fails.", missing="A clock.", encodings=())
    rows = [
        row(oracle="exact", named=True, seconds=1.5),
        row(),
        row(oracle="exact", sentence="x", named=False),
        row(oracle="exact", named=True, control="It fails too."),
        lacking,
    ]
    assert [one.passed for one in rows] == [True, False, False, False, True]
    said = table_of_docs(rows)
    assert "| a#1 | It fails. | `a_fault` (mutant) | exact | 1.50 |" in said
    assert "| nothing |" in said
    assert "exact, which its entry does not name" in said
    assert "its control fails: It fails too." in said
    assert "| b#2 | It fails. | A clock. |" in said
    assert table(rows).row_count == 4


def test_docs_list_every_bug_with_its_encodings():
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in DOCS.read_text().split("\n")}
    for bug in registered().values():
        for said in (bug.sentence, bug.missing, *bug.by):
            assert said in lines[bug.id]


def kvoracle(*args, cwd):
    return subprocess.run(
        [sys.executable, "-m", "fuzz.cli", "bugs", *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_command_writes_its_report(tmp_path):
    done = kvoracle(
        "sglang#36371", "vllm#53504", "--processes", "1", "--json", "out.json",
        "--markdown", "out.md", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 of 2 bugs encoded and caught, by 2 encodings" in done.stdout
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [row["id"] for row in rows] == ["sglang#36371", "vllm#53504"]
    assert rows[1]["encodings"][0]["oracle"] == "exact"
    assert "`repeat_of_whole_pages_hits` (scenario)" in (tmp_path / "out.md").read_text()


def test_command_names_a_bug_that_there_is(tmp_path):
    done = kvoracle("sglang#3637", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("kvoracle: There is no bug 'sglang#3637': choose one of")
    assert "Traceback" not in done.stderr
