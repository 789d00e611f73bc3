"""SGLang's HiSparse under the target `hot_buffer`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import systems
from fuzz import targets
from fuzz.case import Case
from fuzz.checks import check_runnable
from fuzz.run import for_target
from fuzz.targets.setup import Pin, settled
from fuzz.terminal import UsageError
from oracle_tests.sglang_world import on
from reference.contract import Capability, Sizes, System
from reference.geometry import Geometry, ModelShape
from systems import unpacked

FOUND_BY = {
    "no wait for a copy": "provenance/kv",
    "the LRU order outlives its request": "residency/lru",
    "the newest row lies over another": "residency/attended",
    "two tags are swapped": "residency/tags",
    "a short prompt has a whole buffer": "residency/device pages",
    "a page that was taken stays free": "residency/logical pages",
    "device rows are kept": "residency/device pages",
}


SEEDS = [1, 3]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """All of `sglang_hot_runs` on the latest release."""
    return dict(on("0.5.23", "sglang_hot_runs.hot", SEEDS))


@pytest.mark.sglang
def test_the_oracles_find_nothing_in_the_latest_release(seen):
    assert seen["clean"] == [[]] * len(SEEDS)


@pytest.mark.sglang
def test_the_oracles_find_nothing_in_the_oldest_one():
    assert on("0.5.20", "campaign", "hot_buffer", SEEDS) == [[]] * len(SEEDS)


@pytest.mark.sglang
def test_an_incomplete_checkout_is_refused(tmp_path):
    """Before a campaign begins, and not by each of its executions."""
    shutil.copytree(unpacked("sglang", "0.5.23") / "sglang", tmp_path / "sglang")
    (tmp_path / "sglang/srt/managers/hisparse_coordinator.py").write_text("def :\n")
    (tmp_path / "sglang/_version.py").write_text("__version__ = '0.5.23'\n")
    command = [sys.executable, "-m", "fuzz.cli", "fuzz", "hot_buffer", "--executions", "1"]
    command += ["--system", f"sglang@{tmp_path}", "--cases", str(tmp_path / "cases")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "cannot be imported" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.sglang
def test_faults_of_the_coordinator_are_found(seen):
    assert {fault: said[0] for fault, said in seen["faults"].items()} == FOUND_BY


@pytest.mark.sglang
def test_cells_that_its_kernel_does_not_take_are_seen(seen):
    """Not promised: see systems/sglang/findings/swap-in-cells.md."""
    signature, _ = seen["any cells"]
    assert signature.startswith("residency/")


@pytest.mark.sglang
def test_what_it_is_not_built_for_is_refused_in_words(seen):
    said = seen["refusals"]
    words = {
        "without HiSparse": "needs HiSparse",
        "a buffer of half a page": "a hot buffer of whole pages",
        "a model": "does not offer model runs",
        "in two chunks": "extend it once, by its whole prompt",
        "no selection": "give `Rows.selected`",
        "states": "does not offer state rows",
        "too long": "pages are needed and",
    }
    for what, sentence in words.items():
        assert sentence in said[what]
    assert said["unchanged"]


def test_a_target_that_is_always_with_hisparse_drives_the_engine_for_it():
    factory = systems.load("reference").factory
    hot = System(name="hot", version="1", factory=factory)
    system = System(name="some", version="1", factory=factory, hot=lambda: hot)
    driven = {name: for_target(system, targets.find(name)) for name in targets.names()}
    assert [name for name, each in driven.items() if each is hot] == ["hot_buffer"]
    assert for_target(hot, targets.find("hot_buffer")) is hot


def test_what_all_sizes_have_in_common_is_as_good_as_pinned():
    small = Geometry(kpool=1, physical_page_size=8, mamba_track_interval=8)
    large = Geometry(kpool=1, physical_page_size=64, mamba_track_interval=64)
    sizes = [Sizes(geometry=each, shape=ModelShape()) for each in (small, large)]
    assert settled(Pin(), sizes) == Pin(kpool=1)
    assert settled(Pin(), sizes[:1]) == Pin(kpool=1, physical_page_size=8)
    assert settled(Pin(seed=3), []) == Pin(seed=3)


def test_a_case_that_pins_other_sizes_is_refused_in_words(monkeypatch):
    """`fuzz` refuses such options, and a case may have been found on another system."""
    page = Geometry(
        kpool=1, physical_page_size=8, topk=16, mamba_track_interval=8, device_buffer_size=64
    )
    reference = systems.load("reference")
    built = replace(reference, sizes=(Sizes(geometry=page, shape=ModelShape()),))
    monkeypatch.setattr(systems, "load", lambda name: built)
    case = partial(Case, system="some", target="hot_buffer", setup="", replay="")
    lists: dict[str, Any] = {"operations": [], "violations": [], "versions": {}, "values": []}
    for pin in (Pin(kpool=4), Pin(hisparse=False), Pin(spare_slots=1)):
        with pytest.raises(UsageError, match="the case pins others, so replay it on the system"):
            check_runnable(case(pin=pin, **lists))
    check_runnable(case(**lists))


def test_no_event_of_hot_buffer_is_owed_that_needs_what_is_lacking():
    target, everything = targets.find("hot_buffer"), frozenset(Capability)
    for capability, events in target.needs.items():
        owed = target.missing({}, Pin(), everything - {capability})
        assert set(target.required) - set(owed) == events
