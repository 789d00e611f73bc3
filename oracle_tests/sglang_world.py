"""Runs a function of `sglang_cases` on a release of SGLang, in a process of its own.

One process holds one release, and what a case plants in it must not stay.  `python -m
oracle_tests.sglang_world RELEASE FUNCTION ARGUMENTS [MUTANT]` prints what it returns; arguments
and result are JSON.  FUNCTION may be MODULE.FUNCTION, of another module of the tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

TIMEOUT_S = 500
ROOT = Path(__file__).parents[1]


def on(release: str, function: str, *arguments: Any, mutant: str | None = None) -> Any:
    """What `function(system, *arguments)` of `sglang_cases`, or of another module of the tests if
    it is named, returns, for the system of a release, with a mutant of `systems.sglang.mutants` in
    it or none."""
    command = [sys.executable, "-m", __name__, release, function, json.dumps(arguments)]
    command += [mutant] if mutant else []
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    import torch

    from systems import load
    from systems.sglang import mutants

    torch.set_num_threads(1)
    for name in sys.argv[4:]:
        mutants.plant(name)
    system = load(f"sglang=={sys.argv[1]}")
    module, _, function = sys.argv[2].rpartition(".")
    cases = import_module(f"oracle_tests.{module or 'sglang_cases'}")
    print(json.dumps(getattr(cases, function)(system, *json.loads(sys.argv[3]))))
