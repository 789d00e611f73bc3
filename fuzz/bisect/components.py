"""Which component of the optimized engine is at fault: the reference stands in for one after the
other, and the case is run again each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import RenderableType
from rich.table import Table

import systems
from fuzz import case, mutants, targets
from fuzz.case import Case
from fuzz.mutants.registry import planted
from fuzz.outcome import Outcome
from fuzz.run import execute
from fuzz.tape import Tape
from fuzz.terminal import UsageError

Result = Literal["passes", "fails", "fails otherwise", "runs otherwise"]
"""Of the case with a stand-in: as saved it "fails"; a run that passes counts only while it is the
run that was saved."""


class Swap(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the case with the reference in one component's place."""

    component: str
    does: str
    result: Result
    signature: str | None


class Blamed(msgspec.Struct, frozen=True, kw_only=True):
    """What a search over components found.

    Fields:
        swaps: one for each component.
        found: the components at fault: each by itself lets the case pass; or, with `together`,
            none does and all of these do, but no fewer of them.
    """

    swaps: list[Swap]
    found: list[str]
    together: bool

    @property
    def decided(self) -> bool:
        """One component, or one set of them, is at fault."""
        return len(self.found) == 1 or self.together


def blame(saved: Case, file: Path, *, tick: Callable[[int, int], None]) -> Blamed:
    """Search for the component at fault; `tick` is called with the swaps done and all.

    Raises:
        UsageError: the case is of another engine, or does not fail any more.
    """
    if saved.system != "optimized":
        raise UsageError(
            f"{file} is a case of the system {saved.system!r}: only the components of "
            "'optimized' can be swapped."
        )
    # it imports all of the engine, which no other command line needs at its start
    components = {c.name: c for c in import_module("systems.components").COMPONENTS}

    def swapped(names: Iterable[str]) -> tuple[Result, str | None]:
        outcome = _run(saved, [components[name].stand_ins for name in names])
        return _result(saved, outcome, file), outcome.signature

    result, signature = swapped(())
    if result != "fails":
        raise UsageError(
            f"{file} does not fail as it was saved ({signature or 'it passes'}): bisect with the "
            "KVOracle release that saved it, or over versions."
        )
    swaps = []
    for done, (name, component) in enumerate(components.items(), start=1):
        result, signature = swapped([name])
        swaps.append(Swap(component=name, does=component.does, result=result, signature=signature))
        tick(done, len(components))
    found = [swap.component for swap in swaps if swap.result == "passes"]
    if found or swapped(components)[0] != "passes":
        return Blamed(swaps=swaps, found=found, together=False)
    needed = list(components)
    for name in components:
        fewer = [other for other in needed if other != name]
        if swapped(fewer)[0] == "passes":
            needed = fewer
    return Blamed(swaps=swaps, found=needed, together=True)


def _run(saved: Case, stand_ins: Iterable[dict[str, Callable[..., Any]]]) -> Outcome:
    """The case as saved, its mutant and all, with these in the place of the engine's own."""
    with ExitStack() as stack:
        if saved.mutant:
            stack.enter_context(mutants.find(saved.mutant).applied())
        for names in stand_ins:
            stack.enter_context(planted({name: _alone(body) for name, body in names.items()}))
        system, target = systems.load(saved.system), targets.find(saved.target)
        return execute(system, target, Tape(saved.values), pin=saved.pin)


def _alone(body: Callable[..., Any]) -> Callable[..., Any]:
    """A stand-in that has no use for what it stands in for."""
    return lambda _, *args, **kwargs: body(*args, **kwargs)


def _result(saved: Case, outcome: Outcome, file: Path) -> Result:
    if outcome.failed:
        was = saved.violations[0].signature if saved.violations else None
        return "fails" if outcome.signature == was else "fails otherwise"
    try:
        case.check_same_run(saved, outcome, file)
    except case.CaseError:
        return "runs otherwise"
    return "passes"


def shown(blamed: Blamed) -> Iterator[RenderableType]:
    """The result for a terminal."""
    table = Table("reference in place of", "which does", "the case")
    for swap in blamed.swaps:
        other = f": {swap.signature}" if swap.result == "fails otherwise" else ""
        table.add_row(f"optimized.{swap.component}", swap.does, f"{swap.result}{other}")
    yield table
    names = ", ".join(f"optimized.{name}" for name in blamed.found)
    if blamed.together:
        yield f"at fault together: {names}"
    elif len(blamed.found) == 1:
        yield f"at fault: {names}"
    elif blamed.found:
        yield f"at fault is one of these, or what lies between them: {names}"
    else:
        yield "None of these is at fault: look at what the engine does with them."
