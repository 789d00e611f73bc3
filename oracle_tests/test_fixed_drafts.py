"""Targets and an engine that always verifies: `Capability.ANY_DRAFTS`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

import systems
from fuzz.run import execute_here
from fuzz.tape import Tape
from fuzz.targets import find
from fuzz.targets.setup import Pin
from reference.contract import Capability, System

DRAFTS = 3


def without_any_drafts() -> System:
    system = systems.load("reference")

    def build(*args, **kwargs):
        engine = system.factory(*args, **kwargs)
        engine.capabilities -= {Capability.ANY_DRAFTS}
        return engine

    lacking = system.capabilities - {Capability.ANY_DRAFTS}
    return replace(system, factory=build, capabilities=lacking)


def operations(system: System, target: str) -> Iterator[str]:
    """What 12 seeds did."""
    for seed in range(12):
        pin = Pin(max_drafts=DRAFTS, payload="stamped")
        outcome = execute_here(system, find(target), Tape(seed=seed), pin=pin)
        assert not outcome.violations
        yield from (each.text for each in outcome.operations if "nothing to do" not in each.text)


@pytest.mark.parametrize("target", ["prefix_split", "slot_reuse"])
def test_what_an_engine_lacks_is_not_asked_of_it(target):
    seen = {}
    for name, system in (("any", systems.load("reference")), ("fixed", without_any_drafts())):
        texts = list(operations(system, target))
        seen[name] = {
            "decodes": any(text.startswith("decode") for text in texts),
            "drafts": {int(n) for text in texts for n in re.findall(r"(\d+) drafts of", text)},
            "kept": {int(n) for text in texts for n in re.findall(r"accept (\d+) of", text)},
        }
    # the control: such seeds do ask for it, of an engine that can
    assert seen["any"]["decodes"]
    assert seen["any"]["drafts"] > {DRAFTS}
    assert 0 in seen["any"]["kept"]
    assert not seen["fixed"]["decodes"]
    assert seen["fixed"]["drafts"] == {DRAFTS}
    assert seen["fixed"]["kept"]
    assert min(seen["fixed"]["kept"]) == 1
