"""The first shrinker: from any failing tape to the smallest one of the same failure.

Smaller is a total order: fewer operations, then fewer requests, then fewer tokens, then the
shorter tape, then the tape that is smaller value by value (shortlex, as in MacIver and
Donaldson, ECOOP 2020).  Every pass proposes tapes; a proposal is kept if its run fails with the
same signature and is smaller.  Passes repeat until none helps, so that failures of one fault,
whatever their seeds, end in one minimum (tests compare it with exhaustive enumeration).

The passes work on the tape but know its layout (`fuzz.targets.session`): operations are spans of
WIDTH values, namely kind, request, count, amount and one more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, islice

from fuzz.outcome import Outcome
from fuzz.tape import trimmed
from fuzz.targets.session import KINDS, WIDTH

KIND, WHO, COUNT, AMOUNT = range(4)
APPENDS = {KINDS.index(kind) + 1 for kind in ("decode", "verify")}
SUBMIT = KINDS.index("submit") + 1
PAYLOAD = 0
"""Place of the payload on the tape; 0 is a stamped run."""

Run = Callable[[Sequence[int]], Outcome]
Cost = tuple[int, int, int, int, list[int]]


def cost(outcome: Outcome) -> Cost:
    """What the shrinker minimises."""
    values = trimmed(outcome.values)
    return len(outcome.operations), outcome.requests, outcome.tokens, len(values), values


def shrink(run: Run, failing: Outcome, *, executions: int = 1000) -> Outcome:
    """The smallest outcome found with the signature of `failing`, in at most `executions` runs.

    A failure of a model run that a stamped run shows too becomes the stamped one, whose oracles
    name the intruder."""
    shrinker = _Shrinker(run, failing, executions)
    try:
        shrinker.prefer_stamped()
        while shrinker.round():
            pass
    except _OutOfBudget:
        pass
    return shrinker.best


class _OutOfBudget(Exception):
    """All executions are used up."""


class _Shrinker:
    def __init__(self, run: Run, failing: Outcome, executions: int) -> None:
        self.best = failing
        self._run, self._left = run, executions
        self._tried: set[tuple[int, ...]] = set()

    def round(self) -> bool:
        """All passes once, cheap and greedy ones first; whether any helped."""
        before = self.best
        self._each(self._without_operations)
        self._each(self._without_request)
        self._each(self._merged)
        self._each(self._prompts_for_steps)
        self._each(self._plain_setup)
        self._lower_each()
        self._each(self._exchanged)
        self._each(self._other_kinds)
        self._each(self._lower_pairs)
        return self.best is not before

    def prefer_stamped(self) -> None:
        """Go over to the same tape's stamped run if it fails by an oracle of its own."""
        if not self.best.values or self.best.values[PAYLOAD] == 0:
            return
        outcome = self._run([0, *self.best.values[1:]])
        if outcome.failed and outcome.violations[0].oracle != "crash":
            self.best = outcome

    def _consider(self, values: Sequence[int]) -> bool:
        """Run `values`, and keep them if they are better."""
        key = tuple(trimmed(values))
        if key in self._tried or key == tuple(trimmed(self.best.values)):
            return False
        if not self._left:
            raise _OutOfBudget
        self._left -= 1
        self._tried.add(key)
        outcome = self._run(key)
        better = outcome.signature == self.best.signature and cost(outcome) < cost(self.best)
        if better:
            self.best = outcome
        return better

    def _each(self, proposals: Callable[[], Iterator[list[int]]]) -> None:
        """Try all `proposals`; after a success go on with the rest of the better tape's."""
        tried = 0
        while True:
            for values in islice(proposals(), tried, None):
                tried += 1
                if self._consider(values):
                    break
            else:
                return

    def _operations(self) -> tuple[list[int], list[list[int]]]:
        """The setup's values, and those of each operation."""
        spans = [s for s in self.best.spans if s.label == "operation"]
        first = spans[0].start if spans else len(self.best.values)
        operations = [self.best.values[s.start : s.stop] for s in spans]
        return self.best.values[:first], [o for o in operations if len(o) == WIDTH]

    def _without_operations(self) -> Iterator[list[int]]:
        """Delete runs of operations, long runs first; the last operation shows the failure."""
        setup, ops = self._operations()
        for size in (8, 4, 2, 1):
            for i in range(len(ops) - 1 - size, -1, -1):
                yield _joined(setup, ops[:i] + ops[i + size :])

    def _without_request(self) -> Iterator[list[int]]:
        """Drop a request with all that concerns it alone; its heirs go to its parent."""
        setup, ops = self._operations()
        for request in range(self.best.requests):
            submits = [op for op in ops if op[KIND] == SUBMIT]
            heritage = submits[request][WHO] if request < len(submits) else 0
            kept = [
                _renamed(op, request, heritage)
                for op, done in zip(ops, self.best.operations, strict=False)
                if done.requests != [request]
            ]
            yield _joined(setup, kept)

    def _merged(self) -> Iterator[list[int]]:
        """Of two operations of one kind keep one, which takes over the other's request, or goes
        to the end."""
        setup, ops = self._operations()
        for i, j in combinations(range(len(ops)), 2):
            if ops[i][KIND] != ops[j][KIND]:
                continue
            who, count, first = ops[i][WHO], ops[i][COUNT] + ops[j][COUNT] + 1, ops[i][AMOUNT]
            without_first = [*ops[:i], *ops[i + 1 : j]]
            yield _joined(setup, [*without_first, [ops[j][KIND], who, count, 0, 0], *ops[j + 1 :]])
            for changed in ([ops[i][KIND], who, count, first, 0], [*ops[i][:AMOUNT], 0, 0]):
                yield _joined(setup, [*ops[:i], changed, *ops[i + 1 : j], *ops[j + 1 :]])

    def _prompts_for_steps(self) -> Iterator[list[int]]:
        """Delete an operation that appends tokens, and lengthen its requests' prompts."""
        setup, ops = self._operations()
        submits = [i for i, op in enumerate(ops) if op[KIND] == SUBMIT]
        for i, (op, done) in enumerate(zip(ops, self.best.operations, strict=False)):
            if op[KIND] not in APPENDS:
                continue
            longer = [[*op] for op in ops]
            for request in done.requests:
                longer[submits[request]][AMOUNT] += op[AMOUNT] + 1
            yield _joined(setup, longer[:i] + longer[i + 1 :])

    def _exchanged(self) -> Iterator[list[int]]:
        """Two requests change places."""
        setup, ops = self._operations()
        submits = [i for i, op in enumerate(ops) if op[KIND] == SUBMIT]
        for a, b in combinations(range(len(submits)), 2):
            names = {a: b, b: a}
            changed = [
                op if op[KIND] == SUBMIT else [op[KIND], names.get(op[WHO], op[WHO]), *op[COUNT:]]
                for op in ops
            ]
            for i, j in ((submits[a], submits[b]), (submits[b], submits[a])):
                changed[i] = [*changed[i][:AMOUNT], ops[j][AMOUNT], changed[i][-1]]
            yield _joined(setup, changed)

    def _plain_setup(self) -> Iterator[list[int]]:
        """The plainest setup, all of it or value by value."""
        setup, ops = self._operations()
        yield _joined([0] * len(setup), ops)
        for i, value in enumerate(setup):
            for lower in dict.fromkeys((0, value // 2, value - 1)):
                if lower < value:
                    yield _joined([*setup[:i], lower, *setup[i + 1 :]], ops)

    def _lower_each(self) -> None:
        """Each value to 0, or by bisection to the least that still fails."""
        i = 0
        while i < len(self.best.values):
            passes_at = -1
            while i < len(self.best.values) and self.best.values[i] - passes_at > 1:
                # 0 first, then the middle.
                value = (self.best.values[i] + passes_at) // 2 if passes_at >= 0 else 0
                if not self._set(i, value):
                    passes_at = value
            i += 1

    def _set(self, i: int, value: int) -> bool:
        return self._consider([*self.best.values[:i], value, *self.best.values[i + 1 :]])

    def _other_kinds(self) -> Iterator[list[int]]:
        """Simpler kinds of operation in the place of each."""
        setup, ops = self._operations()
        for i, op in enumerate(ops):
            for kind in range(1, op[KIND]):
                yield _joined(setup, [*ops[:i], [kind, op[WHO], 0, 0, 0], *ops[i + 1 :]])

    def _lower_pairs(self) -> Iterator[list[int]]:
        """Two values lowered by as much: lengths that must change together."""
        values = self.best.values
        places = [i for i, value in enumerate(values) if value]
        for a, i in enumerate(places):
            for j in places[a + 1 :]:
                least = min(values[i], values[j])
                for less in dict.fromkeys((least, least // 2, 1)):
                    if less:
                        changed = [*values]
                        changed[i] -= less
                        changed[j] -= less
                        yield changed


def _joined(setup: Sequence[int], operations: Sequence[Sequence[int]]) -> list[int]:
    return [*setup, *(value for operation in operations for value in operation)]


def _renamed(operation: list[int], gone: int, heritage: int) -> list[int]:
    """An operation once request `gone` was never submitted.  A submit names its parent as one
    more than the request, 0 for none."""
    changed = [*operation]
    if operation[KIND] == SUBMIT and operation[WHO] == gone + 1:
        changed[WHO] = heritage
    elif operation[WHO] > gone + (operation[KIND] == SUBMIT):
        changed[WHO] -= 1
    return changed
