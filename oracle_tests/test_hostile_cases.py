"""Case files that mean harm, or are no files: one sentence for each, at once, and nothing else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from fuzz import cli
from fuzz.case import (
    MOST_LETTERS,
    MOST_OPERATIONS,
    MOST_VIOLATIONS,
    Case,
    CaseError,
    case_of,
    load,
    save,
)
from fuzz.outcome import Operation, Outcome
from fuzz.rarity import Rarity
from fuzz.step import Violation
from fuzz.tape import SplitMix
from fuzz.targets.setup import Pin
from oracle_tests.report_cases import HOSTILE, PLANTED, case_in, failure, hostile_in

MUTATIONS = 240
LONGEST = 900
"""Letters of a sentence, however much of a file it quotes."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return case_in(tmp_path_factory.mktemp("cases"), PLANTED[1])


def sentence(path: Path) -> str:
    """What is said of a file that is refused: a line that steers no terminal."""
    with pytest.raises(CaseError) as error:
        load(path)
    said = str(error.value)
    assert said.isprintable()
    assert len(said) < LONGEST
    return said


# files that are damaged at random


def flipped(data: bytes, random: SplitMix) -> bytes:
    at = random.below(len(data))
    return data[:at] + bytes([random.below(256)]) + data[at + 1 :]


def cut(data: bytes, random: SplitMix) -> bytes:
    start = random.below(len(data))
    return data[:start] + data[start + random.below(40) + 1 :]


def doubled(data: bytes, random: SplitMix) -> bytes:
    start = random.below(len(data))
    part = data[start : start + random.below(60)]
    return data[:start] + part + data[start:]


def exchanged(data: bytes, random: SplitMix) -> bytes:
    """A value, somewhere, by one of another type or size."""
    whole = json.loads(data)
    key = list(whole)[random.below(len(whole))]
    odd = (None, True, -1, 1 << 40, 10**400, 1e308, "", "x" * 5000, HOSTILE, [], [[]], {}, [{}])
    value = odd[random.below(len(odd))]
    inside = whole[key]
    if isinstance(inside, list) and inside and random.below(2):
        inside[random.below(len(inside))] = value
    elif isinstance(inside, dict) and inside and random.below(2):
        inside[list(inside)[random.below(len(inside))]] = value
    else:
        whole[key] = value
    return json.dumps(whole).encode()


def keyed_twice(data: bytes, random: SplitMix) -> bytes:
    whole = json.loads(data)
    key = list(whole)[random.below(len(whole))]
    return data.rstrip()[:-1] + b', "%s": %s}' % (key.encode(), json.dumps(whole[key]).encode())


DAMAGE: tuple[Callable[[bytes, SplitMix], bytes], ...] = (
    flipped,
    cut,
    doubled,
    exchanged,
    keyed_twice,
)


def test_a_file_damaged_at_random_is_a_case_or_gets_a_sentence(saved: Path, tmp_path: Path):
    """What is still a case is within all limits, and is the same when it is saved and read."""
    data, told, read = saved.read_bytes(), 0, 0
    for seed in range(MUTATIONS):
        path = tmp_path / "case.json"
        path.write_bytes(DAMAGE[seed % len(DAMAGE)](data, SplitMix(seed)))
        try:
            found = load(path)
        except CaseError:
            told += bool(sentence(path))
            continue
        read += 1
        save(found, path)
        assert load(path) == found
    assert told > MUTATIONS // 4
    assert read > MUTATIONS // 10


@pytest.mark.parametrize(
    "value",
    [
        "NaN",
        "Infinity",
        "-0",
        "1e999",
        "9" * 5000,
        '"\\ud800"',
        "[" * 50_000,
        '{"a":' * 50_000,
        '"' + "x" * 100_000 + '"',
        '{"\\u001b[31m": 1}',
    ],
)
@pytest.mark.parametrize("field", ["schema", "version", "values", "versions", "setup"])
def test_a_hostile_value_gets_a_sentence(saved: Path, tmp_path: Path, field: str, value: str):
    path = tmp_path / "case.json"
    text = saved.read_text()
    old = json.dumps(json.loads(text)[field])
    compact = json.dumps(json.loads(text))
    assert f'"{field}": {old}' in compact
    path.write_text(compact.replace(f'"{field}": {old}', f'"{field}": {value}', 1))
    if (field, value) in {("versions", '{"\\u001b[31m": 1}')}:
        assert "Expected `str`" in sentence(path)
    else:
        assert "case.json is " in sentence(path)


def test_a_field_of_any_name_does_not_steer_the_terminal(saved: Path, tmp_path: Path):
    whole = json.loads(saved.read_text()) | {"\x1b]0;owned\x07\n" + "x" * 3000: 1}
    path = tmp_path / "case.json"
    path.write_text(json.dumps(whole))
    assert "unknown field" in sentence(path)


# paths that are no files


def fifo(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def linked_to(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    def link(folder: Path) -> Path:
        (folder / "link").symlink_to(make(folder))
        return folder / "link"

    return link


def looped(folder: Path) -> Path:
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop"


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "make",
    [
        fifo,
        linked_to(fifo),
        looped,
        lambda folder: folder,
        lambda _: Path("/dev/zero"),
        lambda _: Path("/dev/tty"),
        linked_to(lambda _: Path("/dev/zero")),
        lambda folder: folder / "nothing",
        linked_to(lambda folder: folder / "nothing"),
        lambda folder: folder / ("x" * 300),
    ],
)
def test_what_is_no_plain_file_is_not_waited_for(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    said = sentence(make(tmp_path))
    assert "cannot be read (" in said
    assert "give the path of a saved case" in said


def test_a_link_to_a_case_is_a_case(saved: Path, tmp_path: Path):
    (tmp_path / "link").symlink_to(saved)
    assert load(tmp_path / "link") == load(saved)


# what is written can be read


def test_whatever_a_run_says_its_case_can_be_read(tmp_path: Path):
    """A run of the longest texts, of more operations and violations than a case may have."""
    long = "x" * (2 * MOST_LETTERS)
    found: Outcome = msgspec.structs.replace(
        failure(PLANTED[1]),
        setup=long,
        operations=[Operation(long, [], 0, False)] * 10
        + [Operation("submit", [], 0, False)] * MOST_OPERATIONS,
        violations=[Violation("exact", "part", long, "row", long, long)] * 5
        + [Violation("exact", "part", "A sentence.")] * MOST_VIOLATIONS,
    )
    path = tmp_path / "case.json"
    case: Case = case_of(found, system="optimized", path=path, pin=Pin())
    save(case, path)
    again = load(path)
    assert again == case
    assert len(again.operations) == MOST_OPERATIONS
    assert again.violations[0].sentence.endswith("x…")


# replaying


def test_replay_prints_the_row_and_both_owners(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {0: "every row that", 4: "every row that", 8: "clause S3"}
    monkeypatch.setenv("COLUMNS", "200")
    for number, rule in expected.items():
        path = case_in(tmp_path, PLANTED[number])
        first = failure(PLANTED[number]).violations[0]
        monkeypatch.setattr(sys, "argv", ["kvoracle", "replay", str(path)])
        with pytest.raises(SystemExit, match="1"):
            cli.main()
        out = capsys.readouterr().out
        assert rule in out
        assert first.sentence in out
        assert f"kvoracle report {path}" in out
        assert (number == 8) is (not first.row)
        for words in (first.row, first.expected, first.actual):
            assert words in out
        assert ("expected owner" in out) is bool(first.row)


def test_replay_of_a_mended_case_says_how_many_clean_executions_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = case_in(tmp_path, PLANTED[1], mutant=None, seen=Rarity(3, 1000))
    monkeypatch.setattr(sys, "argv", ["kvoracle", "replay", str(path)])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    out = capsys.readouterr().out
    assert "no longer fails. It was found 3 times in 1,000 executions: 1,715 clean" in out


def test_replay_of_a_hostile_case_prints_nothing_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hostile_in(tmp_path, PLANTED[1])
    monkeypatch.setattr(sys, "argv", ["kvoracle", "replay", str(path)])
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert "owned" not in printed.out + printed.err


@pytest.mark.parametrize("field", ["system", "target", "mutant"])
def test_a_hostile_name_is_shown_harmlessly(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ("replay", "report"):
        path = case_in(tmp_path, PLANTED[1], **{field: "\x1b[31m\n" + "y" * 190})
        monkeypatch.setattr(sys, "argv", ["kvoracle", command, str(path)])
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit, match="2"):
            cli.main()
        said = capsys.readouterr().err
        assert said.startswith("kvoracle: ")
        assert "\\x1b[31m" in said
        assert said.rstrip("\n").isprintable()
        assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        (["-o", "{case}"], "is the case itself: name another file"),
        (["--perfetto", "{case}"], "is the case itself: name another file"),
        (["-o", "{folder}/x", "--perfetto", "{folder}/x"], "name two files"),
        (["-o", "/nowhere/page.html"], "name a file in a folder that is there"),
        (["--perfetto", "/nowhere/trace.json"], "name a file in a folder that is there"),
        (["-o", "/dev/full"], "name a file on a disk with room"),
    ],
)
def test_a_report_that_cannot_be_written_gets_a_sentence(
    arguments: list[str],
    cure: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = case_in(tmp_path, PLANTED[8])
    before = path.read_bytes()
    given = [each.format(case=path, folder=tmp_path) for each in arguments]
    monkeypatch.setattr(sys, "argv", ["kvoracle", "report", str(path), *given])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert cure in capsys.readouterr().err
    assert path.read_bytes() == before


def test_the_published_schema_is_that_of_a_case():
    """Write it anew with this, after a change of `Case`."""
    published = Path(__file__).parents[1] / "docs" / "case.schema.json"
    schema = msgspec.json.format(msgspec.json.encode(msgspec.json.schema(Case)), indent=1) + b"\n"
    assert published.read_bytes() == schema
