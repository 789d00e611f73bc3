"""Failures of one fault, whatever their seeds and signatures, end in one minimum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import pytest

import systems
from fuzz import mutants, targets
from fuzz.mutants.registry import Mutant
from fuzz.mutants.report import kill
from fuzz.outcome import Outcome
from fuzz.run import execute
from fuzz.shrink import cost, minima, shrink
from fuzz.shrinking import numbers, operations, setups
from fuzz.shrinking.case import MOST, SUBMIT, WIDTH, Case, case_of, joined, setup_of
from fuzz.step import Violation
from fuzz.tape import Tape, trimmed
from fuzz.targets.session import KINDS

SEEDS = range(3)
EXECUTIONS = 1000
FEW = 4
"""Tokens."""
MINIMA = {
    # by their names: the values of the setup that are not the plainest, and what is drawn
    "freed_rows_not_poisoned": (
        {},
        [
            "submit request 0 with 1 tokens",
            "extend request 0 to 1",
            "finish request 0 at 1 of 1 tokens",
        ],
    ),
    "state_not_restored": (
        {},
        [
            "submit request 0 with 4 tokens",
            "extend request 0 to 4",
            "submit request 1 with 5 tokens, the first 4 as in request 0",
        ],
    ),
    "match_ignores_checkpoint": (
        {3: 1},
        [
            "submit request 0 with 16 tokens",
            "extend request 0 to 16",
            "submit request 1 with 13 tokens, the first 12 as in request 0",
        ],
    ),
    "verify_by_loc": (
        {1: 1, 4: 1},
        [
            "submit request 0 with 5 tokens",
            "extend request 0 to 5",
            "verify 1 drafts of request 0",
        ],
    ),
    "ring_row_left_at_abort": (
        {1: 1},
        [
            "submit request 0 with 1 tokens",
            "extend request 0 to 1",
            "abort request 0 at 1 of 1 tokens",
        ],
    ),
    "decoded_row_never_backed_up": (
        {},
        [
            "submit request 0 with 1 tokens",
            "extend request 0 to 1",
            "decode 2 tokens of request 0, selecting the latest positions",
        ],
    ),
    "copies_not_announced": (
        {},
        [
            "submit request 0 with 4 tokens",
            "extend request 0 to 4",
            "back_up of the first 4 tokens of request 0",
        ],
    ),
    "aux_row_to_the_writers_slot": ({12: 1}, ["submit request 0 with 1 tokens, as room 0"]),
    "bounds_in_bytes": ({22: 1}, ["submit request 0 with 1 tokens, as room 0"]),
}


@contextmanager
def running(mutant: Mutant) -> Iterator[Callable[[Sequence[int]], Outcome]]:
    """What executes a tape with the mutant in the engine."""
    with mutant.applied():
        system, target = systems.load("optimized"), targets.find(mutant.target)
        yield lambda values: execute(system, target, Tape(values), pin=mutant.pin)


def found(mutant: Mutant, seed: int) -> Outcome:
    """The first failing run of a seed."""
    outcome = kill(mutant, seed=seed).outcome
    assert outcome is not None
    return outcome


def drawn(outcome: Outcome) -> list[str]:
    """What the tape of an outcome says to do, readable."""
    case = case_of(outcome, setup_of(outcome))
    texts = [o.text for o in outcome.operations if o.text != "meet"]
    return texts[: len(case.operations)]


def odd(outcome: Outcome) -> dict[int, int]:
    """Places and values of the setup that are not the plainest."""
    return {i: value for i, value in enumerate(case_of(outcome, 0).setup) if value}


@pytest.mark.parametrize("name", MINIMA)
def test_three_seeds_end_in_one_minimum(name):
    mutant = mutants.find(name)
    for seed in SEEDS:
        failing = found(mutant, seed)
        with running(mutant) as run:
            by_signature = minima(run, failing, executions=EXECUTIONS)
        least = min(by_signature.values(), key=cost)
        assert (odd(least), drawn(least)) == MINIMA[name]
        assert failing.signature in by_signature


def test_another_signature_is_a_failure_of_its_own():
    """What was found as a refusal is smaller as a row that somebody left in a ring: both are told,
    and the one that was asked for stays."""
    mutant = mutants.find("ring_row_left_at_abort")
    failing = next(f for f in (found(mutant, seed) for seed in range(10)) if is_refusal(f))
    with running(mutant) as run:
        by_signature = minima(run, failing, executions=EXECUTIONS)
        kept = shrink(run, failing)
    assert {"exact/refusal", "containment/tail"} <= by_signature.keys()
    assert all(outcome.signature == name for name, outcome in by_signature.items())
    assert cost(by_signature["containment/tail"]) < cost(by_signature["exact/refusal"])
    assert kept.signature == "exact/refusal"
    assert cost(kept) < cost(failing)


def test_a_shrink_goes_past_smaller_runs_of_another_signature():
    """Runs of few tokens show something else, and would be next in any descent."""
    mutant = mutants.find("freed_rows_not_poisoned")
    failing = next(f for f in (found(mutant, seed) for seed in range(10)) if f.tokens > FEW)
    with running(mutant) as run:

        def renamed(values: Sequence[int]) -> Outcome:
            outcome = run(values)
            few = outcome.failed and outcome.tokens <= FEW
            return as_another(outcome) if few else outcome

        kept = shrink(renamed, failing)
        least = min(minima(renamed, failing).values(), key=cost)
    assert (kept.signature, kept.tokens) == (failing.signature, FEW + 1)
    assert (least.signature, least.tokens) == ("exact/other", 1)


def as_another(outcome: Outcome) -> Outcome:
    return msgspec.structs.replace(outcome, violations=[Violation("exact", "other", "It is.")])


def is_refusal(outcome: Outcome) -> bool:
    return outcome.signature == "exact/refusal"


def test_a_crash_is_no_minimum_of_what_an_oracle_found():
    """The control: runs that crash are smaller than the failing one, and are left alone."""
    mutant = mutants.find("freed_rows_not_poisoned")
    failing = found(mutant, 0)
    with running(mutant) as run:

        def crashing(values: Sequence[int]) -> Outcome:
            outcome = run(values)
            return outcome if outcome.signature == failing.signature else as_crash(outcome)

        by_signature = minima(crashing, failing, executions=100)
    assert by_signature.keys() == {failing.signature}


def as_crash(outcome: Outcome) -> Outcome:
    return msgspec.structs.replace(outcome, violations=[Violation("crash", "submit.X", "It did.")])


def test_shrinking_is_a_function_of_the_tape():
    mutant = mutants.find("freed_rows_not_poisoned")
    failing, runs = found(mutant, 1), []
    with running(mutant) as run:

        def noted(values: Sequence[int]) -> Outcome:
            runs.append(tuple(values))
            return run(values)

        first = minima(noted, failing)
        half = len(runs)
        second = minima(noted, failing)
    assert runs[:half] == runs[half:]
    assert {name: trimmed(o.values) for name, o in first.items()} == {
        name: trimmed(o.values) for name, o in second.items()
    }


def case(*operations: list[int], setup: Sequence[int] = (0, 0), about: Sequence[int] = ()) -> Case:
    """A case of prefix_split: its operations, and the request that each one concerned."""
    return Case(
        setup=list(setup),
        operations=[[*operation, *[0] * (WIDTH - len(operation))] for operation in operations],
        about=[[request] for request in about] or [[] for _ in operations],
        idle=[False] * len(operations),
        bounds=[16] * (len(setup) + WIDTH * len(operations)),
        plain=len(setup),
        requests=sum(operation[0] == SUBMIT for operation in operations),
        kinds=KINDS,
    )


EXTEND, FINISH, RETRACT, RESUME, EVICT = (
    1 + KINDS.index(kind) for kind in ("extend", "finish", "retract", "resume", "evict")
)


@pytest.mark.parametrize(
    ("proposals", "given", "proposed"),
    [
        pytest.param(
            operations.without_request,
            # the second one goes: the third, its heir, comes from the first now
            case([SUBMIT], [SUBMIT, 1], [SUBMIT, 2], [EXTEND, 2], about=(0, 1, 2, 2)),
            case([SUBMIT], [SUBMIT, 1], [EXTEND, 1]),
            id="drop a request",
        ),
        pytest.param(
            numbers.shorter,
            case([SUBMIT, 0, 0, 15, 0], [SUBMIT, 1, 0, 16, 16]),
            case([SUBMIT, 0, 0, 7, 0], [SUBMIT, 1, 0, 8, 8]),
            id="merge pages",
        ),
        pytest.param(
            numbers.later_tokens,
            case([SUBMIT, 0, 0, 5], [SUBMIT, 0, 0, 2]),
            case([SUBMIT, 0, 0, 0], [SUBMIT, 0, 0, 7]),
            id="move tokens",
        ),
        pytest.param(
            operations.in_order,
            case([SUBMIT], [EXTEND, 1], [SUBMIT], [EXTEND, 0]),
            case([SUBMIT], [SUBMIT], [EXTEND, 1], [EXTEND, 0]),
            id="un-deviate the schedule",
        ),
        pytest.param(
            setups.plain_setup,
            case([SUBMIT], setup=(3, 1)),
            case([SUBMIT], setup=(3, 0)),
            id="remove a fault",
        ),
        pytest.param(
            operations.heirs_for_resumed,
            case([SUBMIT, 0, 0, 3], [RETRACT], [RESUME], about=(0, 0, 0)),
            case([SUBMIT, 0, 0, 3], [SUBMIT, 1, 0, 3, MOST]),
            id="an heir for one that comes back",
        ),
        pytest.param(
            operations.something_else_instead,
            case([SUBMIT], [SUBMIT, 0, 0, 9], [EXTEND, 1], [FINISH], about=(0, 1, 1, 0)),
            case([SUBMIT], [EVICT], [FINISH]),
            id="evict instead",
        ),
    ],
)
def test_passes_know_what_values_mean(proposals, given, proposed):
    assert joined(proposed.setup, proposed.operations) in list(proposals(given))
