"""The story of a run in sentences: what it was, what was done, and where it went wrong."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from fuzz import mutants
from fuzz.case import Case
from fuzz.oracles.metamorphic import AUDITED
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
EXACT = {
    "handshake": "two processes share memory where they may and where nobody has tampered, and "
    "nowhere else",
    "first_token": "D decodes from the token on that P has sampled",
    "places": "D advertises those places of its memory that it has reserved for the request",
    "aux": "an aux row is clear until it comes, and then names the transfer that has reserved it",
    "outcome": "every write lands as long as nothing goes wrong",
    "live": "every request becomes live at D as long as nothing goes wrong",
    "memory": "once all requests are over, free, owned and held memory adds up on either side",
    "refusal": "an engine runs out of memory only once all is used, and then changes nothing but "
    "what it has evicted",
    "refused": "the engine does what the contract allows to ask of it",
    "outputs": "a step gives the outputs of those positions that were asked for",
}
"""What the oracle exact asks for in components that are no account of pages."""
ROWS = {
    "kv": "KV rows",
    "index": "index rows",
    "tail": "tail rows",
    "state": "states",
    "hot": "rows of hot buffers",
    "aux": "aux rows",
    "first_token": "first token",
}
"""Components in words, where their names are none."""
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
        el("p", {"class": "kicker"}, f"{_when(first, operations)} {_rule(first)}"),
        el("h2", {"id": "verdict"}, first.sentence),
        _owners(first),
        el("p", {}, f"The oracle asks that {asks(first)}."),
        el("p", {"class": "note"}, _was(saved)) if _is_new(first, saved) else None,
        _folded(f"{len(others)} more, found with it", el("ul", {}, more)) if more else None,
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


def deeds(done: tuple[Deed, ...], *, bad: int | None) -> Html:
    """The operations, one after the other, and what came of each; `bad` is the number of the one
    that is to blame."""
    first = max(0, len(done) - MOST_DEEDS)
    items = [
        el(
            "li",
            {"class": "bad" if number == bad else None, "value": number},
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


def _when(violation: Violation, operations: int) -> str:
    """A run is audited once it has ended, and not for its last operation's sake."""
    if violation.oracle == "numeric" or AUDITED in violation.sentence:
        return f"In the audit of the run, after operation {operations},"
    return f"After operation {operations}"


def _rule(violation: Violation) -> str:
    if violation.oracle == "drain" and violation.component in CLAUSES:
        return f"the run breaks clause {violation.component} of the drain contract"
    rows = ROWS.get(violation.component, violation.component)
    return f"the oracle {violation.oracle} objects ({rows})"


def asks(violation: Violation) -> str:
    """What the oracle holds a run to, in this component."""
    if violation.oracle == "drain" and violation.component in CLAUSES:
        return CLAUSES[violation.component]
    if violation.oracle == "exact" and violation.component in EXACT:
        return EXACT[violation.component]
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
