"""Faults of a token or so in SGLang's k-pool code, each killed by a named oracle."""

from __future__ import annotations

from pathlib import Path

import pytest

from oracle_tests.sglang_world import on
from systems import unpacked
from systems.sglang.mutants import MUTANTS, MutantError, mutated

pytestmark = pytest.mark.sglang
RELEASE = "0.5.23"
RUNS = (
    ("prefix_split", 0),
    ("slot_reuse", 1),
    ("prefix_split", 3),
    ("slot_reuse", 7),
    ("prefix_split", 17),
    ("slot_reuse", 26),
    ("prefix_split", 14),
    ("prefix_split", 21),
    ("slot_reuse", 37),
)
"""Targets and seeds that fail on no release as it is."""
DRAFT_RUNS = (
    ("prefix_split", 11),
    ("prefix_split", 15),
    ("slot_reuse", 7),
    ("slot_reuse", 37),
)
"""The same with drafts, for the faults of a verify."""


def source(module: str) -> str:
    """The text of a module of the release."""
    path = Path(*module.split(".")).with_suffix(".py")
    return (unpacked("sglang", RELEASE) / path).read_text()


def test_there_are_thirty():
    assert len(MUTANTS) >= 30


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_changes_one_place(name):
    before = source(MUTANTS[name].module)
    after = mutated(MUTANTS[name], before)
    pairs = zip(before.splitlines(), after.splitlines(), strict=True)
    assert 1 <= sum(old != new for old, new in pairs) <= 3


def test_a_pattern_that_fits_nowhere_is_told():
    with pytest.raises(MutantError, match="write it anew"):
        mutated(MUTANTS["scale_rounded_down"], "def other():\n    pass\n")


@pytest.mark.parametrize(("runs", "drafts"), [(RUNS, False), (DRAFT_RUNS, True)])
def test_nothing_is_killed_without_a_mutant(runs, drafts):
    assert on(RELEASE, "killed", runs, drafts)["by"] is None


@pytest.mark.parametrize("name", MUTANTS)
def test_an_oracle_kills_it(name):
    drafts = name.startswith("verify_")
    seen = on(RELEASE, "killed", DRAFT_RUNS if drafts else RUNS, drafts, mutant=name)
    assert seen["by"] is not None, seen["crashes"]
