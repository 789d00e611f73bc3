"""Histories to bisect: git repositories whose project is a script that stands for the engine."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from fuzz.case import Case, save
from fuzz.step import Violation

FAULT = Violation("provenance", "index", "Row 17 should hold A's group 4, holds C's.")

ENGINE = '''"""Stands for `kvoracle replay`: fails where engine.txt says so, at its rate."""
import json, os, random, sys
from pathlib import Path
here = Path(__file__).parent.parent
words = dict(line.split("=") for line in (here / "engine.txt").read_text().split())
log = Path(os.environ["TOY_LOG"])
with log.open("a") as runs:
    runs.write(words["number"] + "\\n")
if words["state"] == "crashes":
    raise ImportError("no such module")
draw = random.Random(f"{os.environ.get('TOY_SEED')} {len(log.read_text())}").random()
failed = words["state"] != "good" and draw < float(os.environ.get("TOY_RATE", "1"))
found = {"oracle": "provenance", "component": "index", "sentence": "Row 17."}
if words["state"] == "otherwise":
    found["component"] = "kv"
result = {"violations": [found] if failed else [], "digest": "0"}
Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(result))
sys.exit(failed)
'''


def git(repo: Path, *arguments: str, stdin: str | None = None) -> str:
    """What a git command printed."""
    who = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    done = subprocess.run(
        ["git", *who, "-C", str(repo), *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def history(repo: Path, states: Sequence[str]) -> list[str]:
    """A repository with one commit for each state (good, bad, crashes, otherwise or unbuildable),
    on branch main, which is checked out; their ids."""
    repo.mkdir()
    git(repo, "init", "--quiet", "--initial-branch=main")
    stream = []
    for number, state in enumerate(states):
        files = {"engine.txt": f"state={state}\nnumber={number}\n"}
        if number == 0:
            files |= {"fuzz/__init__.py": "", "fuzz/cli.py": ENGINE}
        stream.append(_commit(f"Change {number}", number, files))
    git(repo, "fast-import", "--quiet", stdin="".join(stream))
    git(repo, "checkout", "--quiet", "--force", "main")
    return git(repo, "rev-list", "--reverse", "main").split()


def _commit(message: str, number: int, files: Mapping[str, str]) -> str:
    when = f"{1_700_000_000 + number} +0000"
    head = f"commit refs/heads/main\ncommitter A <a@example.org> {when}\n{_data(message)}"
    return head + "".join(
        f"M 644 inline {name}\n{_data(content)}" for name, content in files.items()
    )


def _data(text: str) -> str:
    return f"data {len(text.encode())}\n{text}\n"


def saved_case(path: Path) -> Path:
    """A case with the failure FAULT, which only a toy can replay."""
    case = Case(
        system="optimized",
        target="prefix_split",
        setup="a toy",
        operations=["submit request 0 with 4 tokens"],
        violations=[FAULT],
        versions={},
        values=[1, 2, 3],
        replay=f"kvoracle replay {path}",
    )
    save(case, path)
    return path
