"""Runs the saved case on one version that lies in a folder, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

import systems
from fuzz.bisect.search import Verdict
from fuzz.case import Case, save
from fuzz.step import Violation

CASE_VARIABLE = "KVORACLE_CASE"
"""Names the case to a command of the user's."""
MOST_LINE = 300
NOT_INHERITED = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY")
"""A search that a git hook started must not act on the repository of the hook."""

NOT_ITS_OWN = 3
"""Exit status of a replay for which a version would have borrowed another KVOracle's modules."""
OWN_REPLAY = f"""
import runpy, sys
from importlib.util import find_spec
from pathlib import Path

def insist(*names):
    for name in names:
        spec = find_spec(name)
        origin = spec and spec.origin
        if not origin or not Path(origin).resolve().is_relative_to(Path.cwd()):
            print(f"it has no package {{name!r}} of its own to replay the case with", flush=True)
            sys.exit({NOT_ITS_OWN})

insist("fuzz")
try:
    runpy.run_module("fuzz.cli", run_name="__main__", alter_sys=True)
finally:
    ours = ("fuzz", "systems", "optimized", "reference")
    insist(*(name for name in ours if name in sys.modules))
"""
"""Replays with the KVOracle in the current folder, or not at all: what the folder lacks Python
would take from where KVOracle is installed, and its verdict says nothing of the version."""

Runner = Callable[[Path], tuple[Verdict, str]]
"""Runs the case on the version in a folder: the verdict, and of a skip the reason."""


class Unusable(Exception):
    """A version that cannot be run; the message says why."""


class _Replayed(msgspec.Struct):
    """Of the result of a replay, what counts."""

    violations: list[Violation]


def environment(**more: str) -> dict[str, str]:
    """The environment of what is run for a version."""
    inherited = {name: v for name, v in os.environ.items() if name not in NOT_INHERITED}
    return {**inherited, **more}


def finish(
    command: str | Sequence[str], *, folder: Path, env: Mapping[str, str], timeout_s: int
) -> tuple[int, str]:
    """Run a command, a string by the shell, to its end: its exit status and last line.

    Raises:
        Unusable: it did not end in time, or could not be started.
    """
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command,
                shell=isinstance(command, str),
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise Unusable(f"it cannot be started ({error.strerror})") from error
        try:
            status = process.wait(timeout=timeout_s)
        except BaseException as error:
            # the command may have children, and Ctrl-C reaches none of them in their own session
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise Unusable(f"it did not end within {timeout_s} seconds") from error
            raise
        return status, _last_line(output.fileno())


def _last_line(file: int) -> str:
    end = os.lseek(file, 0, os.SEEK_END)
    tail = os.pread(file, MOST_LINE, max(0, end - MOST_LINE)).decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(tail) if line.strip()), "it said nothing")
    return "".join(letter if letter.isprintable() else " " for letter in last)


def by_command(command: str, case: Path, *, timeout_s: int) -> Runner:
    """Runs a command of the user's: exit status 1 is bad and 0 is good, as of a replay."""

    def run(folder: Path) -> tuple[Verdict, str]:
        env = environment(**_on_path(folder), **{CASE_VARIABLE: str(case)})
        status, line = finish(command, folder=folder, env=env, timeout_s=timeout_s)
        if status in (0, 1):
            return ("bad" if status else "good"), ""
        return "skip", f"the command exited with {status}: {line}"

    return run


def by_replay(saved: Case, case: Path, *, timeout_s: int) -> Runner:
    """Replays the case with the KVOracle in the folder, and no other."""

    def run(folder: Path) -> tuple[Verdict, str]:
        env = environment(**_on_path(folder))
        command = [sys.executable, "-c", OWN_REPLAY]
        return _replayed(command, saved, case, folder=folder, env=env, timeout_s=timeout_s)

    return run


def by_system(saved: Case, *, timeout_s: int) -> Runner:
    """Replays the case with this KVOracle, and with the foreign system that lies in the folder."""
    package = systems.foreign(saved.system)

    def run(folder: Path) -> tuple[Verdict, str]:
        with tempfile.TemporaryDirectory() as scratch:
            case = Path(scratch) / "case.json"
            save(saved, case)
            command = [sys.executable, "-m", "fuzz.cli"]
            # not in the version's folder, from which Python would import what is called like ours
            where = Path(scratch)
            return _replayed(
                command,
                saved,
                case,
                f"--system={package}@{folder}",
                folder=where,
                env=environment(),
                timeout_s=timeout_s,
            )

    return run


def _replayed(
    command: Sequence[str],
    saved: Case,
    case: Path,
    *options: str,
    folder: Path,
    env: Mapping[str, str],
    timeout_s: int,
) -> tuple[Verdict, str]:
    """What the replay of the case at `case` by a command line says.  Bad is only the failure that
    was saved: a version that fails in another way says nothing of this one, nor does one that
    crashes, which exits with 1 as well."""
    signature = saved.violations[0].signature if saved.violations else ""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        replay = [*command, "replay", str(case), *options, "--json", str(result)]
        status, line = finish(replay, folder=folder, env=env, timeout_s=timeout_s)
        found = _violations(result)
    if status == NOT_ITS_OWN:
        return "skip", line
    if status == 0:
        return "good", ""
    if status != 1 or not found:
        return "skip", f"the replay exited with {status}: {line}"
    if found[0].signature != signature:
        return "skip", f"it fails otherwise: {found[0].signature}: {found[0].sentence}"
    return "bad", ""


def _on_path(folder: Path) -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *([inherited] if inherited else [])])}


def _violations(result: Path) -> list[Violation]:
    """Those of a replay's result; none where it wrote none that can be read."""
    try:
        return msgspec.json.decode(result.read_bytes(), type=_Replayed).violations
    except (OSError, msgspec.MsgspecError):
        return []
