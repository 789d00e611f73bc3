"""`kvoracle bisect` over real histories and wheels: nothing of the user's is touched."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

import systems
from fuzz import cli, mutants, targets
from fuzz.case import case_of, load, save
from fuzz.run import execute
from fuzz.tape import Tape
from fuzz.targets.setup import Pin
from oracle_tests.bisect_history import git, history, saved_case

COMMITS, FIRST_BAD = 200, 137
SOURCES = Path(cli.__file__).parent.parent


class Bisect:
    """Calls `kvoracle bisect` in this process, with a case that a toy replays."""

    def __init__(
        self, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.folder, self.log, self.result = folder, folder / "log", folder / "result.json"
        self.case = saved_case(folder / "case.json")
        self._capsys, self._monkeypatch = capsys, monkeypatch
        monkeypatch.setenv("TOY_LOG", str(self.log))

    def __call__(self, *options: str | Path) -> tuple[int, str, str]:
        """(exit status, standard output, standard error)"""
        command = ["kvoracle", "bisect", self.case, "--json", self.result, *options]
        self._monkeypatch.setattr(sys, "argv", list(map(str, command)))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        printed = self._capsys.readouterr()
        assert isinstance(stop.value.code, int)
        return stop.value.code, printed.out, printed.err

    @property
    def found(self) -> dict:
        return json.loads(self.result.read_text())

    @property
    def ran(self) -> list[int]:
        """Commits that were run, in order."""
        return list(map(int, self.log.read_text().split()))


@pytest.fixture
def bisect(tmp_path, capsys, monkeypatch) -> Bisect:
    return Bisect(tmp_path, capsys, monkeypatch)


@pytest.fixture(scope="module")
def long_history(tmp_path_factory) -> tuple[Path, list[str]]:
    """200 commits, of which those from FIRST_BAD on are bad."""
    repo = tmp_path_factory.mktemp("history") / "repo"
    bad = COMMITS - FIRST_BAD
    return repo, history(repo, ["good"] * FIRST_BAD + ["bad"] * bad)


def checkout(repo: Path) -> tuple[str, ...]:
    """All that a search may not change."""
    commands = ("status --porcelain", "worktree list", "for-each-ref", "stash list", "reflog")
    return tuple(git(repo, *command.split()) for command in commands)


def test_the_commit_of_200_in_nine_runs(bisect, long_history):
    repo, commits = long_history
    (repo / "mine.txt").write_text("not committed")
    before = checkout(repo)
    status, out, err = bisect("--repo", repo, "--good", commits[0], "--bad", "main")
    assert status == 0
    assert f"first bad: {commits[FIRST_BAD]} Change {FIRST_BAD}" in out
    assert len(bisect.ran) <= 9
    assert {FIRST_BAD - 1, FIRST_BAD} <= set(bisect.ran)
    assert err.count("run ") == len(bisect.ran)
    assert bisect.found["suspects"] == [
        {"names": [commits[FIRST_BAD]], "titles": [f"Change {FIRST_BAD}"], "chance": 1.0}
    ]
    assert checkout(repo) == before
    assert (repo / "mine.txt").read_text() == "not committed"
    assert not (repo / ".git" / "worktrees").exists()


def test_a_flaky_commit_of_200(bisect, long_history, monkeypatch):
    repo, commits = long_history
    monkeypatch.setenv("TOY_RATE", "0.7")
    before = checkout(repo)
    status, out, _ = bisect("--repo", repo, "--good", commits[0], "--bad", "main", "--flaky")
    assert status == 0
    assert f"first bad: {commits[FIRST_BAD]} Change {FIRST_BAD}, with probability 0.99" in out
    assert bisect.found["flaky"]
    assert len(bisect.ran) == len(bisect.found["runs"])
    assert checkout(repo) == before


def test_what_cannot_be_built_or_fails_otherwise_is_skipped(bisect, tmp_path):
    states = ["good", "good", "otherwise", "crashes", "unbuildable", "bad", "bad"]
    commits = history(tmp_path / "repo", states)
    status, out, err = bisect(
        *("--repo", tmp_path / "repo", "--good", commits[0], "--bad", "main"),
        *("--build", "echo compiling; ! grep unbuildable engine.txt"),
    )
    assert status == 1
    assert "The first bad version is one of 4:" in out
    assert bisect.found["suspects"][0]["names"] == commits[2:6]
    assert not bisect.found["decided"]
    assert "it fails otherwise: provenance/kv" in err
    assert "the replay exited with 1: ImportError: no such module" in err
    assert "its build exited with 1: state=unbuildable" in err
    assert not (tmp_path / "repo" / ".git" / "worktrees").exists()


def test_a_version_is_never_replayed_with_the_installed_kvoracle(bisect, tmp_path):
    """Two revisions lack `fuzz`, one borrows `systems`; the installed ones are importable there."""
    repo = tmp_path / "repo"
    good = history(repo, ["good"])[0]
    script = (repo / "fuzz" / "cli.py").read_text()

    def commit(name: str) -> str:
        git(repo, "add", "--all")
        git(repo, "commit", "--quiet", "--message", name)
        return git(repo, "rev-parse", "HEAD")

    git(repo, "mv", "fuzz", "fuzzing")
    renamed = commit("Rename")
    (repo / "fuzz").mkdir()
    (repo / "fuzz" / "notes.txt").write_text("no package")
    bare = commit("Begin anew")
    git(repo, "rm", "--quiet", "-r", "fuzz")
    git(repo, "mv", "fuzzing", "fuzz")
    (repo / "fuzz" / "cli.py").write_text("import systems\n" + script)
    borrowing = commit("Borrow")
    (repo / "fuzz" / "cli.py").write_text(script)
    (repo / "engine.txt").write_text("state=bad number=4")
    bad = commit("Break")
    status, out, err = bisect("--repo", repo, "--good", good, "--bad", bad)
    assert status == 1
    assert "The first bad version is one of 4:" in out
    for revision, package in ((renamed, "fuzz"), (bare, "fuzz"), (borrowing, "systems")):
        why = f"it has no package {package!r} of its own to replay the case with"
        assert f"{revision} skip ({why})" in err


def test_a_repository_without_kvoracle_needs_a_command(bisect, tmp_path):
    repo = tmp_path / "repo"
    commits = history(repo, ["good", "good"])
    git(repo, "rm", "--quiet", "-r", "fuzz")
    for change in ("One", "Two"):
        git(repo, "commit", "--quiet", "--allow-empty", "--message", change)
    status, out, err = bisect("--repo", repo, "--good", commits[0], "--bad", "main")
    assert status == 2
    assert "Traceback" not in out + err
    assert err.splitlines()[-1].endswith("check --build and --run.")
    assert "has no package 'fuzz' of its own to replay the case with" in err.splitlines()[-1]
    assert not bisect.log.exists()


def test_a_planted_mutant_has_no_first_bad_version(bisect, long_history):
    repo, commits = long_history
    planted = msgspec.structs.replace(load(bisect.case), mutant="gather_by_loc")
    save(planted, bisect.case)
    ends = ("--good", commits[0], "--bad", "main")
    for search in (("--repo", repo), ("--wheels", "kvoracle")):
        status, _, err = bisect(*search, *ends)
        assert status == 2
        assert "is a case of the mutant 'gather_by_loc'" in err
        assert len(err.splitlines()) == 1
    assert not bisect.log.exists()
    status, out, err = bisect("--repo", repo, *ends, "--run", "! grep -q bad engine.txt")
    assert status == 0, err
    assert f"first bad: {commits[FIRST_BAD]}" in out


def test_a_fault_from_a_side_is_the_merges(bisect, tmp_path):
    """The good revision is on a side; the main line, where it is not, had the fault before."""
    repo = tmp_path / "repo"
    base, good, *_ = history(repo, ["good", "good", "good"])
    git(repo, "checkout", "--quiet", "-B", "line", base)
    (repo / "engine.txt").write_text("state=bad number=7")
    git(repo, "commit", "--quiet", "--all", "--message", "\x1b[31mThe fault\r\x85")
    git(repo, "merge", "--quiet", "--strategy", "ours", "--message", "Bring it", "main")
    merge = git(repo, "rev-parse", "HEAD")
    git(repo, "commit", "--quiet", "--allow-empty", "--message", "Go on")
    status, out, _ = bisect("--repo", repo, "--good", good, "--bad", "line")
    assert status == 0
    assert f"first bad: {merge} Bring it" in out
    assert len(bisect.found["names"]) == 3
    status, out, _ = bisect("--repo", repo, "--good", base, "--bad", f"{merge}^1")
    assert status == 0
    assert " [31mThe fault" in out
    assert "\x1b" not in bisect.found["suspects"][0]["titles"][0]


def test_a_command_of_the_users_decides(bisect, tmp_path):
    commits = history(tmp_path / "repo", ["good", "good", "unbuildable", "bad", "bad"])
    status, out, _ = bisect(
        *("--repo", tmp_path / "repo", "--good", commits[0], "--bad", commits[-1]),
        *(
            "--run",
            'test -s "$KVORACLE_CASE" && case $(head -1 engine.txt) in '
            "*good) exit 0;; *bad) exit 1;; *) echo no engine; exit 7;; esac",
        ),
    )
    assert status == 1
    assert "one of 2:" in out
    assert not bisect.log.exists()
    whys = {run["why"] for run in bisect.found["runs"] if run["verdict"] == "skip"}
    assert whys == {"the command exited with 7: no engine"}


def test_a_run_without_end_is_skipped(bisect, tmp_path):
    commits = history(tmp_path / "repo", ["good", "unbuildable", "bad"])
    status, _, err = bisect(
        *("--repo", tmp_path / "repo", "--good", commits[0], "--bad", "main", "--timeout-s", "1"),
        *("--run", "grep -q unbuildable engine.txt && sleep 1000; ! grep -q bad engine.txt"),
    )
    assert status == 1
    assert "it did not end within 1 seconds" in err


@pytest.mark.timeout(100)
def test_an_interrupt_leaves_no_worktree_and_no_process(bisect, tmp_path):
    repo, pipe = tmp_path / "repo", tmp_path / "pipe"
    commits = history(repo, ["good", "good", "bad", "bad"])
    os.mkfifo(pipe)
    once = tmp_path / "once"
    run = f"test -e {once} && echo $$ $PWD > {pipe} && exec sleep 1000; touch {once}; exit 1"
    command = [sys.executable, "-m", "fuzz.cli", "bisect", bisect.case, "--repo", repo]
    options = ["--good", commits[0], "--bad", "main", "--run", run, "--checks", "1"]
    search = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    process, folder = pipe.read_text().split()
    assert folder in git(repo, "worktree", "list")
    search.send_signal(signal.SIGINT)
    said, _ = search.communicate(timeout=60)
    assert search.returncode == 130
    assert "interrupted" in said
    assert "The first bad version is one of 3:" in said
    with pytest.raises(ProcessLookupError):
        os.kill(int(process), 0)
    assert not Path(folder).exists()
    assert len(git(repo, "worktree", "list").splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ([], "say what to search: give one of --repo, --wheels and --components."),
        (["--repo", "{repo}", "--components"], "say what to search"),
        (["--repo", "{repo}", "--good", "main"], "give --good and --bad."),
        (["--repo", "{repo}/none", "--good", "a", "--bad", "b"], "is no git repository"),
        (["--repo", "{repo}", "--good", "no", "--bad", "main"], "has no revision 'no'"),
        (["--repo", "{repo}", "--good=--all", "--bad", "main"], "has no revision '--all'"),
        (["--repo", "{repo}", "--good", "a b;c", "--bad", "main"], "has no revision 'a b;c'"),
        (["--repo", "{repo}", "--good", "main", "--bad", "main"], "are one revision"),
        (["--repo", "{repo}", "--good", "side", "--bad", "main"], "is no ancestor"),
        (["--repo", "{repo}", "--good", "main~1", "--bad", "main"], "does not fail at the bad end"),
        (["--wheels", "a/b", "--good", "1", "--bad", "2"], "'a/b' is no package"),
        (["--wheels", "toy", "--good", "1", "--bad", "x y"], "--bad 'x y' is no version"),
        (["--wheels", "toy", "--good", "2", "--bad", "1"], "swap --good and --bad"),
        (["--wheels", "toy", "--good", "1", "--bad", "2", "--build", "make"], "leave out --build"),
        (["--repo", "{repo}", "--good", "a", "--bad", "b", "--confidence", "1"], "--confidence"),
    ],
)
def test_bad_input_gets_a_sentence(bisect, tmp_path, monkeypatch, options, sentence):
    monkeypatch.chdir(tmp_path)
    repo = tmp_path / "repo"
    history(repo, ["good", "good", "good"])
    git(repo, "branch", "side", git(repo, "commit-tree", "main^{tree}", "-m", "no parent"))
    status, out, err = bisect(*(option.format(repo=repo) for option in options))
    assert status == 2
    assert "Traceback" not in out + err
    lines = [line for line in err.splitlines() if not line.startswith("run ")]
    assert sentence in lines[0]
    assert len(lines) == 1
    assert not bisect.result.exists()


def test_the_commit_of_a_copy_of_this_project(bisect, tmp_path):
    """The fault of a mutant, committed as a change of the engine."""
    repo = tmp_path / "repo"
    repo.mkdir()
    for package in ("reference", "optimized", "fuzz", "systems"):
        shutil.copytree(
            SOURCES / package, repo / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    git(repo, "init", "--quiet", "--initial-branch=main")
    commits = []
    right = "groups * geometry.kpool) // geometry.kpool"
    addressing = repo / "optimized" / "addressing.py"
    for change in ("Begin", "Note this", "Store keys in another slot", "Note that"):
        if change.startswith("Store"):
            assert right in addressing.read_text()
            addressing.write_text(
                addressing.read_text().replace(right, "groups) // geometry.kpool")
            )
        (repo / "NOTES").write_text(change)
        git(repo, "add", "--all")
        git(repo, "commit", "--quiet", "--message", change)
        commits.append(git(repo, "rev-parse", "HEAD"))
    _save_case_of("slot_of_group_as_position", bisect.case)
    status, out, err = bisect("--repo", repo, "--good", commits[0], "--bad", "main")
    assert status == 0, err
    assert f"first bad: {commits[2]} Store keys in another slot" in out


def _save_case_of(mutant: str, path: Path) -> None:
    """Save what the mutant's fault does, as though nobody had planted it."""
    pin = Pin(payload="stamped")
    system, target = systems.load("optimized"), targets.find("prefix_split")
    with mutants.find(mutant).applied():
        runs = (execute(system, target, Tape(seed=seed), pin=pin) for seed in range(200))
        outcome = next(run for run in runs if run.failed)
    save(case_of(outcome, system="optimized", path=path, pin=pin), path)


def wheel(folder: Path, version: str, *, state: str) -> None:
    """Make a wheel of the package `kvtoy`, which knows whether it is bad."""
    info = f"kvtoy-{version}.dist-info"
    about = f"Metadata-Version: 2.1\nName: kvtoy\nVersion: {version}\n"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"kvtoy-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr("kvtoy.py", f"BAD = {state == 'bad'}\n")
        archive.writestr(f"{info}/METADATA", about)
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def wheelhouse(tmp_path, monkeypatch) -> Path:
    """A folder of ten versions in which pip looks, and nowhere else; bad from 1.10 on.  Of 1.3
    there is a source archive, which nobody builds."""
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    for version in ("0.9", "1.0", "1.1", "1.2", "1.9"):
        wheel(folder, version, state="good")
    for version in ("1.10", "1.11", "2.0", "2.1"):
        wheel(folder, version, state="bad")
    (folder / "kvtoy-1.3.tar.gz").write_bytes(b"")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


IMPORTED = f"{sys.executable} -c 'import kvtoy, sys; sys.exit(kvtoy.BAD)'"


def test_the_release_that_brought_it(bisect, wheelhouse, tmp_path):
    cache = tmp_path / "cache"
    search = ("--wheels", "KVtoy", "--good", "1.0", "--bad", "2", "--cache", cache)
    status, out, err = bisect(*search, "--run", IMPORTED)
    assert status == 0, err
    assert "first bad: 1.10" in out
    assert bisect.found["names"] == ["1.0", "1.1", "1.2", "1.3", "1.9", "1.10", "1.11", "2.0"]
    downloads = {path.name for path in cache.glob("*.whl")}
    assert {"kvtoy-1.9-py3-none-any.whl", "kvtoy-1.10-py3-none-any.whl"} <= downloads
    assert "kvtoy-2.1-py3-none-any.whl" not in downloads
    assert "1.3 skip (pip cannot download it (ERROR: " in err
    assert f"put kvtoy-1.3-*.whl into {cache})" in err


def test_wheels_by_hand_without_an_index(bisect, wheelhouse, tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_FIND_LINKS")
    cache = tmp_path / "cache"
    search = ("--wheels", "kvtoy", "--good", "1.0", "--bad", "1.10", "--cache", cache)
    status, _, err = bisect(*search, "--run", IMPORTED)
    assert status == 2
    assert f"or put kvtoy-1.0-*.whl into {cache}." in err
    for version in ("1.0", "1.9", "1.10"):
        shutil.copy(wheelhouse / f"kvtoy-{version}-py3-none-any.whl", cache)
    (cache / "kvtoy-1.2-py3-none-any.whl").write_bytes(b"no archive")
    status, out, err = bisect(*search, "--run", IMPORTED)
    assert status == 0
    assert "first bad: 1.10" in out
    assert "kvtoy-1.2-py3-none-any.whl cannot be unpacked (File is not a zip file)" in err
