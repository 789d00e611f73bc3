"""What the commands that run targets refuse, before anything runs."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

import systems
from fuzz import mutants, targets
from fuzz.case import Case
from fuzz.run import for_target
from fuzz.targets.setup import Pin, fitting
from fuzz.terminal import UsageError
from reference.contract import System

OPTIONS = "leave out --kpool, --physical-page-size and --row-format, or give those."


def check_ranks(target: targets.Target, system: str, pin: Pin) -> None:
    """A target with a driver of its own draws its geometry itself, and only one system has what
    it drives."""
    if target.ranges is None and (system != "optimized" or pin != Pin()):
        raise UsageError(
            f"{target.name} drives ranks of the optimized engine, as its tape says: leave out "
            "--system, --payload, --kpool, --physical-page-size and --row-format."
        )


def run_on(saved: Case, file: Path, system: str | None) -> Case:
    """The case in `file` with the system to run it on: the one that the user names, or its own,
    unless that says in which folder there is code to run."""
    if system is not None:
        return msgspec.structs.replace(saved, system=system)
    if systems.is_checkout(saved.system):
        raise UsageError(
            f"{file} was found on {saved.system!r}, and a case is data, which may not say whose "
            f"code runs: give --system {shlex.quote(saved.system)} if you trust what lies there."
        )
    return saved


def check_runnable(saved: Case) -> None:
    """The fault and the sizes of a case fit its target, and the system to run it on."""
    check_plantable(saved.mutant, saved.system, saved.target)
    system = for_target(systems.load(saved.system), targets.find(saved.target))
    cure = "the case pins others, so replay it on the system that it was found on."
    check_sizes(system, saved.pin, cure=cure)


def check_sizes(system: System, pin: Pin, *, cure: str = OPTIONS) -> None:
    """A system that is built in few sizes has none that are pinned otherwise."""
    if system.sizes and not fitting(system.sizes, pin):
        geometries = {
            f"kpool {each.geometry.kpool}, physical page {each.geometry.physical_page_size}, "
            f"{each.geometry.row_format.value} rows"
            for each in system.sizes
        }
        raise UsageError(
            f"{system.name} is only built with {' or '.join(sorted(geometries))}: {cure}"
        )


def check_plantable(mutant: str | None, system: str, target: str) -> None:
    """Mutants patch the optimized engine or its drain protocol; where that does not run, a campaign
    would be in vain."""
    if mutant is None:
        return
    planted = mutants.find(mutant)
    with planted.applied():
        pass  # so that one that cannot be planted says so here, and not in every worker
    if target == "multi_rank" and not planted.of_protocol:
        raise UsageError(
            f"{mutant} is a fault of an engine, and multi_rank drives the drain protocol without "
            f"one: plant it with `kvoracle fuzz {planted.target} --mutant {mutant}`."
        )
    if planted.of_protocol and targets.find(target).ranges is not None:
        raise UsageError(
            f"{mutant} is a fault of the drain protocol, and {target} drives an engine without it: "
            f"plant it with `kvoracle fuzz multi_rank --mutant {mutant}`."
        )
    if system != "optimized":
        raise UsageError(
            f"mutant {mutant!r} is a fault of the optimized engine and plants nothing in "
            f"{system!r}: choose the system 'optimized', or no mutant."
        )
