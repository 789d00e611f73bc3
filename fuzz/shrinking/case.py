"""A failing run in its parts, as the shrinker takes it apart and puts it together again.

A tape of the targets that drive engines is a setup, some values long, and then operations of WIDTH
values each: a kind, whom it concerns, and up to three numbers (`fuzz.targets.session`,
`fuzz.handover`).  What comes behind the drawn operations of its own accord is no part of a case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fuzz import handover
from fuzz.outcome import Outcome
from fuzz.tape import trimmed
from fuzz.targets import session

WIDTH = session.WIDTH
KIND, WHO, COUNT, AMOUNT, MORE = range(WIDTH)
SUBMIT = 1 + session.KINDS.index("submit")
"""The same of all targets, and so is what a submit draws: a parent, a way to derive from it, one
less than its tokens, and how many of them it shares."""
MOST = 1 << 16
"""As a number: as large as it may be where it stands."""
PAYLOAD = 0
"""Place of the payload on the tape; 0 is a stamped run."""
assert handover.WIDTH == WIDTH
assert 1 + handover.KINDS.index("submit") == SUBMIT

Values = list[int]
Cost = tuple[int, int, int, int, int, Values]


@dataclass(frozen=True, slots=True)
class Case:
    """A failing run in its parts.

    Fields:
        setup: values that geometry, pools and faults are drawn from; 0 is the plainest of each.
        operations: values of each operation, WIDTH of them.
        about: for each operation, the requests that it concerned.
        idle: for each, whether it did nothing.
        bounds: for each value of the tape, how many it could have had.
        plain: how many values the plainest setup has; what others add comes behind those.
        requests: submitted in all.
        kinds: names of the kinds of operation, in the order of their values from 1 on.
    """

    setup: Values
    operations: list[Values]
    about: list[list[int]]
    idle: list[bool]
    bounds: list[int]
    plain: int
    requests: int
    kinds: tuple[str, ...]

    def submits(self) -> list[int]:
        """Places of the operations that submit a request, one for each request."""
        return [i for i, op in enumerate(self.operations) if op[KIND] == SUBMIT]

    def numbers(self, *names: str) -> frozenset[int]:
        """Tape values of the kinds called `names`, those that the target has."""
        return frozenset(self.kinds.index(name) + 1 for name in names if name in self.kinds)


def setup_of(outcome: Outcome) -> int:
    """How many values of the tape the setup took."""
    return max((span.stop for span in outcome.spans if span.label == "setup"), default=0)


def case_of(outcome: Outcome, plain: int) -> Case:
    """The parts of an outcome of a target that drives engines; `plain` as in Case."""
    moving = outcome.target in ("transfer", "shared_memory")
    first = setup_of(outcome)
    drawn = outcome.values[first:]
    operations = [
        [*drawn[i : i + WIDTH], *[0] * (i + WIDTH - len(drawn))]
        for i in range(0, len(drawn), WIDTH)
        if drawn[i]
    ]
    # Before the first one that is drawn, processes meet.
    done = outcome.operations[1:] if moving else outcome.operations
    done = done[: len(operations)]
    unknown = len(operations) - len(done)
    return Case(
        setup=outcome.values[:first],
        operations=operations,
        about=[operation.requests for operation in done] + [[] for _ in range(unknown)],
        idle=[operation.idle for operation in done] + [False] * unknown,
        bounds=outcome.bounds,
        plain=plain,
        requests=outcome.requests,
        kinds=handover.KINDS if moving else session.KINDS,
    )


def joined(setup: Sequence[int], operations: Sequence[Sequence[int]]) -> Values:
    """The tape of a setup and operations."""
    return [*setup, *(value for operation in operations for value in operation)]


def cost(outcome: Outcome) -> Cost:
    """What the shrinker minimises, and the order of a report: drawn operations, then values of the
    setup that are not the plainest, how many and how far, then requests, tokens, and the tape value
    by value (after the shortlex order of MacIver and Donaldson, ECOOP 2020)."""
    values = trimmed(outcome.values)
    drawn = sum(s.label == "operation" and outcome.values[s.start] > 0 for s in outcome.spans)
    setup = outcome.values[: setup_of(outcome)]
    odd = sum(value > 0 for value in setup)
    return drawn, odd, sum(setup), outcome.requests, outcome.tokens, values
