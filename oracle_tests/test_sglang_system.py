"""SGLang's releases as systems: by name, on the command line, in cases and in a bisection."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import systems
from fuzz import cli, targets
from fuzz.bisect.releases import Releases
from fuzz.checks import check_sizes
from fuzz.targets.setup import Pin
from fuzz.terminal import UsageError
from oracle_tests.report_cases import PLANTED, case_in
from reference.contract import Capability, Sizes, System
from reference.geometry import Geometry, ModelShape, RowFormat
from systems import CannotLoad, UnknownSystem

FOUND = """
import sys
from pathlib import Path
import systems
from fuzz import targets
from fuzz.case import case_of, save
from fuzz.run import execute
from fuzz.tape import Tape
from fuzz.targets.setup import Pin

system, target, path = systems.load(sys.argv[1]), targets.find("prefix_split"), Path(sys.argv[2])
runs = (execute(system, target, Tape(seed=seed)) for seed in range(20))
outcome = next(run for run in runs if run.signature == "provenance/index")
save(case_of(outcome, system=system.name, path=path, pin=Pin()), path)
"""
"""Saves the first case of #41494, as it is found."""


def python(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A process of its own, in which a release can be loaded."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=280
    )


def kvoracle(*arguments: object) -> subprocess.CompletedProcess[str]:
    return python("-m", "fuzz.cli", *arguments)


def test_the_forms_of_a_name_are_listed():
    for name in ("sglang", "vllm==1.0", "sglnag==0.5.23", ""):
        with pytest.raises(UnknownSystem, match=r"reference, optimized, sglang==VERSION, sglang@P"):
            systems.load(name)


def test_a_release_of_which_nothing_is_known_is_refused():
    with pytest.raises(CannotLoad, match=r"of SGLang '0\.4\.1': take one of 0\.5\.20, 0\.5\.21"):
        systems.load("sglang==0.4.1")


def test_a_path_without_sglang_is_refused(tmp_path):
    (tmp_path / "python").mkdir()
    with pytest.raises(CannotLoad, match=f"^{tmp_path} holds no SGLang: give a checkout"):
        systems.load(f"sglang@{tmp_path}")


@pytest.mark.parametrize("path", ["", "a\0b", "\x1b[31m"])
def test_a_path_that_is_none_is_refused(path):
    with pytest.raises(CannotLoad, match=r"is no path of a checkout: write sglang@PATH\.$"):
        systems.load(f"sglang@{path}")


def test_an_incomplete_checkout_is_refused(tmp_path):
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "sglang" / "_version.py").write_text("__version__ = '0.5.23'\n")
    done = kvoracle("fuzz", "prefix_split", "--system", f"sglang@{tmp_path}")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(
        r"kvoracle: The SGLang in .* cannot be imported \(No module named .*\): complete it.*\n",
        done.stderr,
    )


def test_a_case_does_not_say_whose_code_runs(tmp_path):
    """Of a case that names a checkout nothing is imported, unless the user names it too."""
    package = tmp_path / "sglang" / "srt"
    package.mkdir(parents=True)
    (package.parent / "_version.py").write_text("__version__ = '0.5.23'\n")
    ran = tmp_path / "ran"
    (package / "runtime_context.py").write_text(f"open({str(ran)!r}, 'w')\n")
    system = f"sglang@{tmp_path}"
    path = case_in(tmp_path, PLANTED[0], system=system, mutant=None)
    for command in (["replay", path], ["report", path, "-o", tmp_path / "page.html"]):
        done = kvoracle(*command)
        assert done.returncode == 2
        assert "a case is data, which may not say whose code runs: give --system" in done.stderr
        assert not ran.exists()
    # the control: so named it is imported, as far as it goes
    assert kvoracle("replay", path, "--system", system).returncode == 2
    assert ran.exists()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["fuzz", "prefix_split", "--system", "sglang==9.9"], "Nothing is known here of SGLang"),
        (["fuzz", "prefix_split", "--system", "sglang@/dev/null"], "holds no SGLang"),
        (["fuzz", "prefix_split", "--system", "sglang==0.5.23"], "sglang-0.5.23-*.whl, into"),
    ],
)
def test_bad_input_gets_a_sentence(options, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KVORACLE_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(sys, "argv", ["kvoracle", *options])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    said = capsys.readouterr()
    assert stop.value.code == 2
    assert sentence in said.err
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("good", "bad", "names"),
    [
        ("0.5.20", "0.5.22", ["0.5.20", "0.5.21", "0.5.22"]),
        ("0.5.23", "0.5.21", ["0.5.23", "0.5.22", "0.5.21"]),
        ("0.5.22", "0.5.21", ["0.5.22", "0.5.21"]),
    ],
)
def test_releases_go_from_good_to_bad_either_way(good, bad, names):
    assert Releases("sglang", good=good, bad=bad).names == names


@pytest.mark.parametrize(
    ("good", "bad", "sentence"),
    [
        ("0.5.1", "0.5.22", "nothing is known here of sglang '0.5.1': give --good one of 0.5.20"),
        ("0.5.22", "main", "nothing is known here of sglang 'main': give --bad one of"),
        ("0.5.22", "0.5.22", "both ends are 0.5.22"),
    ],
)
def test_ends_that_are_no_releases_are_refused(good, bad, sentence):
    with pytest.raises(UsageError, match=sentence):
        Releases("sglang", good=good, bad=bad)


def test_a_geometry_that_it_is_not_built_with_is_refused():
    sizes = (Sizes(geometry=Geometry(kpool=4), shape=ModelShape()),)
    system = System(name="some", version="1", factory=systems.load("reference").factory)
    built = System(name="some", version="1", factory=system.factory, sizes=sizes)
    for pin in (Pin(), Pin(kpool=4), Pin(physical_page_size=64, row_format=RowFormat.BF16)):
        check_sizes(built, pin)
    check_sizes(system, Pin(kpool=2))
    for pin in (Pin(kpool=2), Pin(physical_page_size=8), Pin(row_format=RowFormat.FP8_RAW)):
        with pytest.raises(UsageError, match="some is only built with kpool 4, physical page 64"):
            check_sizes(built, pin)


def test_no_event_is_owed_that_needs_what_the_system_lacks():
    target, everything = targets.find("prefix_split"), frozenset(Capability)
    assert target.missing({}, Pin(), everything) == target.missing({}, Pin())
    lacking = target.missing({}, Pin(), everything - {Capability.VERIFY})
    assert set(target.missing({}, Pin())) - set(lacking) == {"rejected_draft_closed_group"}
    for name in targets.names():
        each = targets.find(name)
        for events in each.needs.values():
            assert events <= each.required


@pytest.mark.sglang
def test_a_case_is_replayed_reported_and_bisected(tmp_path):
    path, page = tmp_path / "case.json", tmp_path / "page.html"
    done = python("-c", dedent(FOUND), "sglang==0.5.21", path)
    assert done.returncode == 0, done.stderr
    replayed = kvoracle("replay", path)
    assert replayed.returncode == 1, replayed.stderr
    assert "provenance/index" in replayed.stdout
    reported = kvoracle("report", path, "-o", page)
    assert reported.returncode == 0, reported.stderr
    assert "Page map" in page.read_text()
    ends = ("--good", "0.5.23", "--bad", "0.5.20")
    bisected = kvoracle("bisect", path, "--wheels", "sglang", *ends)
    assert bisected.returncode == 0, bisected.stderr
    assert "first good: 0.5.22" in bisected.stdout
    assert "first bad: 0.5.21" in bisected.stdout


@pytest.mark.sglang
def test_a_run_is_the_same_however_often_its_system_was_asked_for():
    script = """
        import systems
        from fuzz import targets
        from fuzz.run import execute
        from fuzz.tape import Tape

        def digest():
            system = systems.load("sglang==0.5.23")
            return execute(system, targets.find("prefix_split"), Tape(seed=0)).digest

        print(len({digest() for _ in range(3)}))
    """
    done = python("-c", dedent(script))
    assert done.stdout.strip() == "1", done.stderr


@pytest.mark.sglang
@pytest.mark.parametrize(("version", "sound"), [("0.5.21", False), ("0.5.22", True)])
def test_verify_serves_a_trace(version, sound, tmp_path):
    result = tmp_path / "result.json"
    done = kvoracle("verify", "--system", f"sglang=={version}", "--quick", "--json", result)
    assert done.returncode == (0 if sound else 1), done.stderr
    assert f"Not run, since sglang=={version} computes no model here" in done.stdout
    (part,) = json.loads(result.read_text())["parts"]
    assert part["figures"]["hits"] >= 4
    assert (part["figures"]["mismatches"] == 0) is sound
    assert set(part["figures"]["hit_remainders"]) == {"0"} or not sound


@pytest.mark.sglang
def test_a_checkout_is_named_by_its_path(tmp_path):
    """A release's folder, moved to where a checkout has it."""
    unpacked = systems.unpacked("sglang", "0.5.23")
    (tmp_path / "python").symlink_to(unpacked, target_is_directory=True)
    script = "import sys, systems; s = systems.load(sys.argv[1]); print(s.name, s.version)"
    done = python("-c", script, f"sglang@{os.path.relpath(tmp_path)}")
    assert done.returncode == 0, done.stderr
    name, version = done.stdout.split()
    assert version == "0.5.23"
    assert Path(name.removeprefix("sglang@")).is_absolute(), "a case is replayed from anywhere"
