"""The story of a run in sentences: what it was, what was done, and where it went wrong."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from fuzz import mutants
from fuzz.case import Case
from fuzz.outcome import Outcome
from fuzz.report.html import Html, el
from fuzz.report.parts import Deed
from fuzz.step import Violation

ORACLES = {
    "exact": "owners, reference counts, hits and lengths are equal to the reference's, without "
    "tolerance",
    "residency": "under HiSparse every row is where the model of hot buffers has it",
    "restore": "a prefix stands whole in a tier, with all its components, or not at all",
    "provenance": "every row that somebody may read holds what its position's tokens wrote there",
    "containment": "an operation changes no row but those that it was told to write",
    "numeric": "every value is within the error bound that rounding explains",
    "metamorphic": "the same tokens give the same bits, whatever happened before",
    "drain": "no memory is used again while a write may still land in it",
    "crash": "the engine raises nothing but what the contract allows",
}
"""What each oracle holds a run to."""
CLAUSES = {
    "order": "phases follow their diagram, and nothing settles that was not posted",
    "S1": "nothing of a transfer is allocatable while a write of it may still execute",
    "S2": "a rank counts as drained only with an ACK or a fence proof of every writer",
    "S3": "a writer ACKs only what it has closed, with no write of it left",
    "S4": "no write starts after its writer has closed the transfer",
    "S5": "a transfer is freed at most once a rank, in the same round everywhere",
    "S6": "a transfer is live only with all its bytes and its aux row on all ranks",
    "S7": "stale messages change nothing",
    "S8": "source pages outlive the reads of them",
    "S9": "free, owned and held pages add up",
    "L1": "with live peers an aborted transfer is freed in the end",
    "L2": "a lost ABORT or ACK is sent again",
    "L3": "quarantine is bounded, and holds admission back",
    "L4": "all ranks issue the same collectives",
    "L5": "every request ends: no abort blocks another room for ever",
}
"""What the clauses of the drain contract ask for (`reference.drain`)."""
MOST_DEEDS = 240
"""The last ones."""


def verdict(saved: Case, outcome: Outcome, operations: int) -> Html:
    """What was wrong, first of all."""
    if not outcome.failed:
        return el(
            "section",
            {"class": "verdict passed", "aria-labelledby": "verdict"},
            el("h2", {"id": "verdict"}, "This case no longer fails"),
            el("p", {}, _was(saved)),
            el("p", {}, str(saved.seen)) if saved.seen else None,
        )
    first, *others = outcome.violations
    more = [el("li", {}, f"{each.oracle}: {each.sentence}") for each in others[:20]]
    return el(
        "section",
        {"class": "verdict failed", "aria-labelledby": "verdict"},
        el("p", {"class": "kicker"}, f"After operation {operations} the run breaks {_rule(first)}"),
        el("h2", {"id": "verdict"}, first.sentence),
        _owners(first),
        el("p", {}, f"The oracle asks that {_asks(first)}."),
        el("p", {"class": "note"}, _was(saved)) if _is_new(first, saved) else None,
        _folded(f"{len(others)} more at the same operation", el("ul", {}, more)) if more else None,
    )


def setup(saved: Case, outcome: Outcome, path: Path) -> Html:
    """What was run, and how to run it again."""
    told = [
        ("Target", saved.target),
        ("System", saved.system),
        ("Setup", outcome.setup),
        ("Size", _size(outcome)),
        ("Found with", ", ".join(f"{name} {said}" for name, said in saved.versions.items())),
    ]
    if saved.mutant:
        told.insert(2, ("Planted fault", f"{saved.mutant}: {mutants.find(saved.mutant).sentence}"))
    return Html(
        el(
            "dl",
            {"class": "setup"},
            [(el("dt", {}, name), el("dd", {}, said)) for name, said in told],
        )
        + el("p", {}, "Replay it with")
        + el(
            "pre", {"class": "command", "tabindex": 0}, f"kvoracle replay {shlex.quote(str(path))}"
        )
    )


def deeds(done: tuple[Deed, ...], *, failed: bool) -> Html:
    """The operations, one after the other, and what came of each."""
    first = max(0, len(done) - MOST_DEEDS)
    items = [
        el(
            "li",
            {"class": "bad" if failed and number == len(done) else None, "value": number},
            el("p", {}, deed.text),
            el("ul", {}, [el("li", {}, effect) for effect in deed.effects])
            if deed.effects
            else None,
        )
        for number, deed in enumerate(done[first:], start=first + 1)
    ]
    left = el("p", {"class": "note"}, f"The first {first} operations are left out here.")
    return Html((left if first else "") + el("ol", {"class": "deeds"}, items))


def _size(outcome: Outcome) -> str:
    requests = "1 request" if outcome.requests == 1 else f"{outcome.requests} requests"
    return f"{requests}, {outcome.tokens} tokens" if outcome.tokens else requests


def _rule(violation: Violation) -> str:
    clause = CLAUSES.get(violation.component) if violation.oracle == "drain" else None
    if clause:
        return f"clause {violation.component} of the drain contract"
    return f"the oracle {violation.oracle}, in {violation.component}"


def _asks(violation: Violation) -> str:
    if violation.oracle == "drain" and violation.component in CLAUSES:
        return CLAUSES[violation.component]
    return ORACLES.get(violation.oracle, "nothing of the kind happens")


def _owners(violation: Violation) -> Html | None:
    """The row, who should own it and who does, where one row shows it."""
    told = [*owners(violation)]
    if not told:
        return None
    return el(
        "dl",
        {"class": "owners"},
        [(el("dt", {}, name), el("dd", {"class": name.split()[0]}, said)) for name, said in told],
    )


def owners(violation: Violation) -> Iterator[tuple[str, str]]:
    """The row, its expected owner and its actual one, as far as the oracle names them."""
    for name, said in (
        ("row", violation.row),
        ("expected owner", violation.expected),
        ("actual owner", violation.actual),
    ):
        if said:
            yield name, said


def _is_new(violation: Violation, saved: Case) -> bool:
    known = {(each.signature, each.sentence) for each in saved.violations}
    return (violation.signature, violation.sentence) not in known


def _was(saved: Case) -> str:
    if not saved.violations:
        return "The file names no violation."
    first = saved.violations[0]
    return f"It was saved with: {first.oracle}, {first.component}: {first.sentence}"


def _folded(summary: str, inside: Html) -> Html:
    return el("details", {}, el("summary", {}, summary), inside)
