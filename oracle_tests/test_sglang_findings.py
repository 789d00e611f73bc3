"""The findings in SGLang that a scenario shows, and on which releases it shows none."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oracle_tests import sglang_world
from oracle_tests.sglang_hot_cases import TOPK, on
from systems.sglang.transfer_scenarios import SCENARIOS
from systems.sglang.wheels import unpacked

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "systems/sglang/findings"


def moves(release: str) -> dict[tuple[int, int], dict[str, Any]]:
    """What the moves of `index_key_move` did on a release, by kpool and target."""
    module = "systems.sglang.findings.index_key_move"
    command = [sys.executable, "-m", module, str(unpacked(release))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return {(row["kpool"], row["target_loc"]): row for row in json.loads(done.stdout)}


@pytest.mark.sglang
@pytest.mark.parametrize("release", ["0.5.21", "0.5.22"])
def test_a_moved_token_takes_an_index_page_along(release: str) -> None:
    found = moves(release)
    for kpool in (1, 4):
        near = found[kpool, 9]
        assert (near["refused"], near["target"], near["intruded"]) == (None, False, 64)
        assert found[kpool, 4159]["refused"].startswith("IndexError")


@pytest.mark.sglang
def test_a_moved_token_takes_its_own_index_key_along() -> None:
    """The control: without pooling 0.5.23 is right, and with it says that it cannot."""
    found = moves("0.5.23")
    for target in (9, 4159):
        row = found[1, target]
        assert (row["refused"], row["target"], row["intruded"]) == (None, True, 0)
        assert found[4, target]["refused"].startswith("AssertionError")


@pytest.mark.sglang
@pytest.mark.parametrize("release", ["0.5.21", "0.5.22", "0.5.23"])
def test_hisparse_drops_the_tail(release: str) -> None:
    found = on(release, "tail")
    assert found["given"] == found["asked"][:TOPK]
    assert found["asked"][TOPK:] == [148, 149, 150]


@pytest.mark.sglang
@pytest.mark.parametrize("release", ["0.5.20", "0.5.21", "0.5.22", "0.5.23"])
def test_the_rest_of_a_split_prefix_outlives_newer_ones(release: str) -> None:
    older, newer = sglang_world.on(release, "evicted_after_a_cut", True)
    assert (older, newer) == (768, 0)
    # the control: uncut, the older one goes
    assert sglang_world.on(release, "evicted_after_a_cut", False) == [0, 768]


def test_every_page_is_listed_and_names_what_there_is() -> None:
    index = (PAGES / "README.md").read_text()
    pages = {path.name for path in PAGES.glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    for page in pages:
        text = (PAGES / page).read_text()
        for part in (
            "## Scenario",
            "## Expected",
            "## Actual",
            "## Where",
            "## What could be done",
        ):
            assert part in text, f"{page} lacks {part}"
        for name in re.findall(r"scenario `(\w+)`", text):
            assert name in SCENARIOS, f"{page} names {name}"
