"""Saved failures of every kind of target, for the tests of reports."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import systems
from fuzz import mutants, targets
from fuzz.case import Case, case_of, save
from fuzz.outcome import Outcome
from fuzz.run import execute
from fuzz.tape import Tape
from fuzz.targets.setup import Pin

HOSTILE = (
    "</pre></script><script>document.title='owned'</script>"
    "<img src=http://evil.invalid/x onerror=\"document.title='owned'\">"
    "'\"`]]>--><svg/onload=document.title='owned'>\u202eevil\u2066\u200b\x00\x1b[31m"
)
"""What a file may hold that means harm: markup, an address, and letters that do not show."""


class Planted(NamedTuple):
    """A target with a fault that fuzzing finds there at once."""

    target: str
    mutant: str
    pin: Pin = Pin(payload="stamped", operations=10)


PLANTED = (
    Planted("prefix_split", "page_table_41494"),
    Planted("slot_reuse", "ape_dropped"),
    Planted("prefix_split", "key_scale_ignored", Pin(payload="model", operations=6)),
    Planted("hot_buffer", "most_recent_slot_evicted"),
    Planted("host_restore", "restore_without_kv"),
    Planted("transfer", "logical_pages_for_host_pages", Pin()),
    Planted("transfer", "heads_from_the_first_on", Pin()),
    Planted("shared_memory", "source_rows_for_target_rows", Pin()),
    Planted("multi_rank", "ack_on_receipt_of_abort", Pin()),
)


@functools.cache
def failure(planted: Planted) -> Outcome:
    """The first run that shows the fault."""
    target, system = targets.find(planted.target), systems.load("optimized")
    with mutants.find(planted.mutant).applied():
        for seed in range(1000):
            outcome = execute(system, target, Tape(seed=seed), pin=planted.pin)
            if outcome.failed and outcome.violations[0].oracle != "crash":
                return outcome
    raise AssertionError(f"{planted.mutant} was not found")


def case_in(folder: Path, planted: Planted, **changes: Any) -> Path:
    """The case of the fault, saved in a folder, with some of its fields changed."""
    path = folder / f"{planted.target}-{planted.mutant}.json"
    found: Case = case_of(
        failure(planted), system="optimized", path=path, pin=planted.pin, mutant=planted.mutant
    )
    save(msgspec.structs.replace(found, **changes), path)
    return path


def hostile_in(folder: Path, planted: Planted) -> Path:
    """The same with harmful texts wherever a file may hold a text."""
    found = failure(planted)
    return case_in(
        folder,
        planted,
        setup=HOSTILE,
        operations=[HOSTILE, "x" * 4000],
        violations=[msgspec.structs.replace(found.violations[0], sentence=HOSTILE, row=HOSTILE)],
        versions={HOSTILE[:200]: HOSTILE[:200]},
        replay=HOSTILE,
    )
