"""A corpus: one file a tape or failure, whoever writes, is killed, or puts something else there."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from fuzz import cli, corpus
from fuzz.case import MOST_BYTES, Case
from fuzz.corpus import ABANDONED_S, Corpus, SavedTape, size
from fuzz.files import TEMPORARY, Unreadable, read_plain, write_whole
from fuzz.journal import Progress, journal
from fuzz.step import Violation
from fuzz.targets.setup import Pin


def tape(*operations: int, features: str, **fields: object) -> SavedTape:
    values = [9, *operations]
    starts = list(range(1, len(values) + 1))
    known = {"target": "slot_reuse", "system": "optimized", **fields}
    shown = dict.fromkeys(features.split(), len(values))
    return SavedTape(values=values, starts=starts, features=shown, **known)


def case(*values: int, component: str = "row", **fields: object) -> Case:
    known = {"system": "optimized", "target": "slot_reuse", "mutant": None, **fields}
    return Case(
        setup="tiny",
        operations=[f"operation {value}" for value in values],
        violations=[Violation("exact", component, "It should not.")],
        versions={},
        values=list(values),
        replay="kvoracle replay elsewhere",
        **known,
    )


def everything(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_tapes_come_back_where_they_were_run(tmp_path):
    found = Corpus(tmp_path)
    here = tape(1, 2, features="a b")
    assert found.add_tape(here)
    assert not found.add_tape(here)
    assert found.add_tape(tape(1, 2, features="a b", pin=Pin(kpool=2)))
    assert found.add_tape(tape(1, 2, features="a b", target="hot_buffer"))
    assert list(found.grown("slot_reuse", "optimized", Pin())) == [here.grown]
    assert list(found.grown("slot_reuse", "sglang", Pin())) == []
    assert len(list(found.tapes())) == 3
    assert not found.ignored


def test_only_the_smallest_case_of_a_signature_stays(tmp_path):
    found = Corpus(tmp_path)
    assert found.add_failure(case(5, 5, 5))
    assert found.add_failure(case(5, 5))
    assert not found.add_failure(case(5, 6))
    assert not found.add_failure(case(5, 5))
    assert found.add_failure(case(1, component="page"))
    assert found.add_failure(case(7, mutant="some_fault"))
    assert found.add_failure(case(2, system="sglang"))
    kept = [saved.values for _, saved in found.failures()]
    assert kept == [[1], [2], [7], [5, 5]]
    assert len(list(found.cases())) == 4
    for path, saved in found.failures():
        assert saved.replay == f"kvoracle replay {path}"


def test_merging_is_a_union(tmp_path):
    one, two = Corpus(tmp_path / "one"), Corpus(tmp_path / "two")
    for each, values in ((one, (1, 2)), (two, (2, 3))):
        for value in values:
            each.add_tape(tape(value, features=f"f{value}"))
    one.add_failure(case(4, 4))
    two.add_failure(case(4))
    two.add_failure(case(6, component="page"))
    shutil.copytree(two.path, tmp_path / "both")
    before = everything(two.path)
    assert one.merge(two) == 3
    assert one.merge(two) == 0
    assert everything(two.path) == before
    assert len(list(one.tapes())) == 3
    assert [saved.values for _, saved in one.failures()] == [[4], [6]]
    # the other way round, it is the same
    both = Corpus(tmp_path / "both")
    both.merge(one)
    assert [p.name for p, _ in both.tapes()] == [p.name for p, _ in one.tapes()]
    assert [saved.values for _, saved in both.failures()] == [[4], [6]]


def test_minimising_keeps_every_feature(tmp_path):
    found = Corpus(tmp_path)
    small, useless = tape(1, features="a"), tape(1, 2, features="a")
    large = tape(1, 2, 3, features="a b")
    elsewhere = tape(1, 2, features="a", pin=Pin(kpool=2))
    for each in (small, useless, large, elsewhere):
        found.add_tape(each)
    # two campaigns have written a failure at the same time
    for values in ((3, 3), (3,)):
        aside = Corpus(tmp_path / f"aside{len(values)}")
        aside.add_failure(case(*values))
        shutil.copytree(aside.path / "failures", tmp_path / "failures", dirs_exist_ok=True)
    torn = tmp_path / "tapes" / "slot_reuse" / f"{TEMPORARY}torn"
    fresh = tmp_path / "tapes" / "slot_reuse" / f"{TEMPORARY}fresh"
    for path in (torn, fresh):
        path.write_bytes(b"{")
    os.utime(torn, (0, 0))
    assert len(list(found.cases())) == 2
    assert found.minimise() == 3
    assert {saved.digest for _, saved in found.tapes()} == {
        each.digest for each in (small, large, elsewhere)
    }
    assert [saved.values for _, saved in found.cases()] == [[3]]
    assert fresh.exists()
    assert not torn.exists()
    assert ABANDONED_S >= 60
    assert found.minimise() == 0


def hostile(folder: Path) -> dict[Path, str]:
    """Files that are none of a corpus, with a part of what is said of each."""
    good = tape(1, features="a")
    data = json.loads(msgspec.json.encode(good))
    foreign = {
        "torn.json": msgspec.json.encode(good)[:-9],
        "text.txt": b"hello",
        "deep.json": b"[" * 200_000,
        "huge.json": b" " * (MOST_BYTES + 1),
        "renamed.json": msgspec.json.encode(good),
        "binary": bytes(range(256)),
        **{
            f"{name}.json": json.dumps({**data, **changed}).encode()
            for name, changed in {
                "version": {"version": 2},
                "negative": {"values": [-1]},
                "large": {"values": [1 << 40]},
                "starts": {"starts": [2, 1]},
                "beyond": {"starts": [100]},
                "escape": {"target": "../../../escaped"},
                "unknown": {"more": 1},
                "features": {"features": {"x" * 201: 1}},
                "many": {"features": {f"x{n}": 1 for n in range(4001)}},
            }.items()
        },
    }
    for name, content in foreign.items():
        (folder / name).write_bytes(content)
    os.mkfifo(folder / "pipe.json")
    (folder / "link.json").symlink_to("/etc/passwd")
    (folder / "folder.json").mkdir()
    return {
        folder / name: why
        for name, why in {
            **dict.fromkeys(foreign, ""),
            "huge.json": "more than",
            "renamed.json": "not what its name says",
            "version.json": "version 2",
            "starts.json": "do not follow",
            "escape.json": "not what its name says",
            "pipe.json": "no plain file",
            "link.json": "cannot be read",
            "folder.json": "no plain file",
        }.items()
    }


def test_what_is_no_file_of_a_corpus_is_told_of_and_left_alone(tmp_path):
    found = Corpus(tmp_path / "corpus")
    good = tape(2, features="a")
    found.add_tape(good)
    folder = found.path / "tapes" / "slot_reuse"
    expected = hostile(folder)
    failures = found.path / "failures" / "0123456789abcdef"
    failures.mkdir(parents=True)
    empty = msgspec.structs.replace(case(1), violations=[])
    (failures / "empty.json").write_bytes(msgspec.json.encode(empty))
    names = {path.name for path in folder.iterdir()}
    assert [saved for _, saved in found.tapes()] == [good]
    assert found.failures() == []
    assert found.ignored.keys() == expected.keys() | {failures / "empty.json"}
    for path, why in expected.items():
        assert why in found.ignored[path], path
    Corpus(tmp_path / "into").merge(found)
    found.minimise()
    assert {path.name for path in folder.iterdir()} == names
    assert not list(tmp_path.rglob("escaped*"))


def test_minimising_beside_a_writer(tmp_path, monkeypatch):
    """A smaller case of a failure comes at every step of the listing."""
    found, other = Corpus(tmp_path), Corpus(tmp_path)
    found.add_failure(case(5, 5, 5))
    listed, left = Corpus.cases, [4, 3, 2, 1]

    def cases(self):
        for each in listed(self):
            other.add_failure(case(*range(left.pop())))
            yield each

    monkeypatch.setattr(Corpus, "cases", cases)
    assert found.minimise() == 0
    monkeypatch.undo()
    assert len(list(found.cases())) == 1


def named_as_it_should_be(saved: Case, folder: Path) -> Path:
    """Put a case where a corpus would have it, whatever it holds."""
    path = (
        folder
        / "failures"
        / corpus._digest(
            (saved.target, saved.system, saved.mutant, "exact/row" if saved.violations else None)
        )
    )
    path.mkdir(parents=True)
    path /= f"{corpus._digest_of(saved)}.json"
    path.write_bytes(msgspec.json.encode(saved))
    return path


@pytest.mark.parametrize(
    ("changed", "why"),
    [({"violations": []}, "no violation"), ({"version": 1}, "is of version 1, not")],
)
def test_a_case_that_says_nothing_goes_nowhere(changed, why, tmp_path, monkeypatch, capsys):
    odd = msgspec.structs.replace(case(1), **changed)
    path = named_as_it_should_be(odd, tmp_path / "odd")
    found, into = Corpus(tmp_path / "odd"), Corpus(tmp_path / "into")
    assert found.failures() == []
    assert why in found.ignored[path]
    assert into.merge(found) == 0
    assert not list(into.cases())
    code, said = kvoracle(monkeypatch, capsys, "show", found.path)
    assert code == 0
    assert f"{path} was left alone: " in said
    # nor does it stand in the way of one that says something
    assert found.add_failure(case(1))
    assert [saved.values for _, saved in found.failures()] == [[1]]


def test_the_other_way_round_a_whole_case_is_taken(tmp_path):
    named_as_it_should_be(case(1), tmp_path)
    assert [saved.values for _, saved in Corpus(tmp_path).failures()] == [[1]]


def test_what_a_campaign_left_half_written_goes(tmp_path):
    for name, age in (("old", 0), ("new", None)):
        path = tmp_path / "campaigns" / f"{TEMPORARY}{name}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"{")
        if age is not None:
            os.utime(path, (age, age))
    assert Corpus(tmp_path).minimise() == 1
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [f"{TEMPORARY}new"]


def test_a_file_that_cannot_be_removed(tmp_path, monkeypatch):
    found = Corpus(tmp_path)
    found.add_tape(tape(1, features="a"))
    found.add_tape(tape(1, 2, features="a"))

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(corpus.CorpusError, match=r"cannot be removed \(Permission denied\): name"):
        found.minimise()


def test_journals_that_cannot_be(tmp_path, monkeypatch):
    (tmp_path / "campaigns").write_bytes(b"")
    with (
        pytest.raises(corpus.CorpusError, match=r"campaigns cannot be used \(File exists\): name"),
        journal(tmp_path / "campaigns", 1),
    ):
        pass
    with journal(tmp_path / "logs", 1) as log:
        lock = log.path.with_suffix(".lock")
    lock.unlink()
    lock.mkdir()
    with (
        pytest.raises(corpus.CorpusError, match=r"lock cannot be used \(Is a directory\): name"),
        journal(tmp_path / "logs", 1),
    ):
        pass


@pytest.mark.parametrize("field", ["executions", "operations", "cpu_seconds", "deaths"])
def test_a_journal_that_counts_less_than_nothing(field, tmp_path):
    with journal(tmp_path, 1) as log:
        log.save(Progress())
        data = json.loads(log.path.read_bytes())
        assert log.load() == Progress()
        data["total"][field] = -1
        log.path.write_text(json.dumps(data))
        with pytest.raises(corpus.CorpusError, match=r"less than nothing.*without --resume"):
            log.load()


def test_a_reader_among_writers_that_are_killed_sees_whole_files(tmp_path):
    """Two processes write the same and other tapes, and are killed wherever they are."""
    script = (
        "import sys; from pathlib import Path; from oracle_tests.test_corpus import tape\n"
        "from fuzz.corpus import Corpus\n"
        "found = Corpus(Path(sys.argv[1])); print('ready', flush=True)\n"
        "for n in range(10**6): found.add_tape(tape(n, n % 7, features=f'f{n} ' * 50))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
        found, seen = Corpus(tmp_path), 0
        order = random.Random(1)
        for round_ in range(8):
            seen = max(seen, len(list(found.tapes())))
            assert not found.ignored
            if round_ % 4 == 3:
                victim = writers.pop(order.randrange(len(writers)))
                os.kill(victim.pid, signal.SIGKILL)
                victim.wait(30)
    finally:
        for writer in writers:
            writer.kill()
            writer.wait(30)
    kept = list(found.tapes())
    assert not found.ignored
    assert len(kept) >= seen > 0
    assert len({saved.digest for _, saved in kept}) == len(kept)


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    write_whole(tmp_path / "a.json", b"before")
    monkeypatch.setattr("fuzz.files.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(tmp_path / "a.json", b"after")
    assert everything(tmp_path) == {"a.json": b"before"}
    with pytest.raises(corpus.CorpusError, match=r"cannot be written \(No space.*--corpus"):
        Corpus(tmp_path).add_tape(tape(1, features="a"))


def test_what_is_no_plain_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(Unreadable):
            read_plain(path, most_bytes=10)
    with pytest.raises(FileNotFoundError):
        read_plain(tmp_path / "nothing", most_bytes=10)


def test_cases_are_compared_by_their_size():
    assert size(case(9, 9)) > size(case(9)) > size(case(1))


def kvoracle(monkeypatch, capsys, *words: str | Path) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["kvoracle", "corpus", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return stop.value.code, printed.out + printed.err


def test_the_commands(tmp_path, monkeypatch, capsys):
    one, two = Corpus(tmp_path / "one"), Corpus(tmp_path / "two")
    one.add_tape(tape(1, features="a"))
    two.add_tape(tape(1, 2, features="a"))
    two.add_failure(case(3, mutant="some_fault"))
    (two.path / "tapes" / "slot_reuse" / "x").write_bytes(b"")
    code, said = kvoracle(monkeypatch, capsys, "merge", one.path, two.path)
    assert code == 0
    assert f"2 files of {two.path} came to {one.path}." in said
    assert "x was left alone: " in said
    code, said = kvoracle(monkeypatch, capsys, "show", one.path, "--json", tmp_path / "s.json")
    assert code == 0
    assert "exact/row of slot_reuse on optimized with some_fault, 1 operations" in said
    shown = json.loads((tmp_path / "s.json").read_bytes())
    assert shown["tapes"] == {"slot_reuse": 2}
    assert shown["features"] == {"slot_reuse": 1}
    code, said = kvoracle(monkeypatch, capsys, "minimise", one.path)
    assert code == 0
    assert "1 files went; 1 tapes are left." in said
    code, said = kvoracle(monkeypatch, capsys, "show", tmp_path / "nothing")
    assert code == 2
    assert "is no folder: name a corpus" in said
