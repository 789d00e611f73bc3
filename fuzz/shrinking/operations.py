"""Passes that delete, replace and move operations.

A pass takes a case and yields tapes, the boldest first.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, permutations, product

from fuzz.shrinking.case import (
    AMOUNT,
    COUNT,
    KIND,
    MORE,
    MOST,
    SUBMIT,
    WHO,
    Case,
    Values,
    joined,
)

RUNS = (16, 8, 4, 2, 1)
"""Lengths of the runs of operations that are deleted."""
NO_POOLS = 9
"""Places of the setup before the sizes of pools."""
LIVES = (
    ("submit", "finish"),
    ("submit", "abort"),
    *(("submit", "extend", end) for end in ("decode", "finish", "retract", "abort", "verify")),
)
"""Of one request, in kinds of operation."""


def without_operations(case: Case) -> Iterator[Values]:
    """Delete what did nothing, and runs of operations from the end on, long runs first."""
    ops = case.operations
    if any(case.idle):
        yield joined(case.setup, [op for op, idle in zip(ops, case.idle, strict=True) if not idle])
    for size in RUNS:
        for i in range(len(ops) - size, -1, -1):
            yield joined(case.setup, ops[:i] + ops[i + size :])


def without_request(case: Case) -> Iterator[Values]:
    """Drop a request with all that concerns it alone; its heirs go to its parent, and others take
    over how long it was."""
    for gone in range(case.requests):
        kept = without(case, gone)
        yield joined(case.setup, kept)
        before = [
            op for op, about in zip(case.operations, case.about, strict=True) if about != [gone]
        ]
        led = [
            [*op[:AMOUNT], op[MORE], op[MORE]] if was[WHO] == gone and op[COUNT] else op
            for was, op in zip(before, kept, strict=True)
        ]
        yield joined(case.setup, led)
        long = case.numbers("submit", "decode")
        most = [[*op[:AMOUNT], MOST, op[MORE]] if op[KIND] in long else op for op in kept]
        yield joined(case.setup, most)


def without(case: Case, gone: int) -> list[Values]:
    """The operations without those that concern request `gone` alone; its heirs go to its
    parent."""
    submits = case.submits()
    heritage = case.operations[submits[gone]][WHO] if gone < len(submits) else 0
    return [
        _renamed(case, op, gone, heritage)
        for op, about in zip(case.operations, case.about, strict=True)
        if about != [gone]
    ]


def something_else_instead(case: Case) -> Iterator[Values]:
    """Drop a request that did no more than to take memory, or to give it back, and do that in
    another way: evict pages where it was last heard of, or let another one end."""
    for gone in range(case.requests):
        last = max((i for i, about in enumerate(case.about) if gone in about), default=0)
        ops = [
            (i, _renamed(case, op, gone, 0))
            for i, op in enumerate(case.operations)
            if i == last or case.about[i] != [gone]
        ]
        rest = [op for i, op in ops if i != last]
        whole = rest if case.about[last] == [gone] else [op for _, op in ops]
        ends = sorted(case.numbers("finish", "abort"))
        for kind, kept in product(ends, (rest, whole)):
            yield joined(case.setup, [*kept, [kind, 0, 0, 0, 0]])
            short = [[*op[:COUNT], 0, 0, 0] if op[KIND] == SUBMIT else op for op in kept]
            yield joined(case.setup, [*short, [kind, 0, 0, 0, 0]])
        for evict, amount in product(case.numbers("evict"), (0, MOST)):
            changed = [[evict, 0, 0, amount, 0] if i == last else op for i, op in ops]
            yield joined(case.setup, changed)
            yield joined([0] * case.plain, changed)


def heirs_for_resumed(case: Case) -> Iterator[Values]:
    """Instead of a request that is retracted and resumed, one that ends and one that has its
    tokens."""
    (finish,), (retract,), (resume,) = (
        case.numbers(kind) or {0} for kind in ("finish", "retract", "resume")
    )
    ops, submits = case.operations, case.submits()
    for j, op in enumerate(ops):
        if op[KIND] != resume or not case.about[j]:
            continue
        who = case.about[j][0]
        length = ops[submits[who]][AMOUNT] if who < len(submits) else 0
        for amount in (0, length, length + 1):
            heir = [SUBMIT, who + 1, 0, amount, amount and MOST]
            anew = [*ops[:j], heir, *ops[j + 1 :]]
            for i in range(j):
                if ops[i][KIND] == retract:
                    yield joined(case.setup, anew[:i] + anew[i + 1 :])
                    yield joined(case.setup, [*anew[:i], [finish, *ops[i][WHO:]], *anew[i + 1 :]])


def resumed_for_heirs(case: Case) -> Iterator[Values]:
    """Instead of a request that ends and a later one, one that is retracted and resumed."""
    (finish,), (retract,), (resume,) = (
        case.numbers(kind) or {0} for kind in ("finish", "retract", "resume")
    )
    ops, submits = case.operations, case.submits()
    if not resume:
        return
    for (i, op), (gone, j) in product(enumerate(ops), enumerate(submits)):
        if op[KIND] == finish and i < j:
            rest = [_renamed(case, later, gone, 0) for later in ops[j + 1 :]]
            back = [[retract, *op[WHO:]], *ops[i + 1 : j], [resume, op[WHO], 0, 0, 0]]
            yield joined(case.setup, [*ops[:i], *back, *rest])


def merged(case: Case) -> Iterator[Values]:
    """Of two operations of one kind keep one, which takes over the other's request, or goes to
    the end."""
    ops = case.operations
    for i, j in combinations(range(len(ops)), 2):
        if ops[i][KIND] != ops[j][KIND]:
            continue
        who, count, first = ops[i][WHO], ops[i][COUNT] + ops[j][COUNT] + 1, ops[i][AMOUNT]
        without_first = [*ops[:i], *ops[i + 1 : j]]
        yield joined(case.setup, [*without_first, [ops[j][KIND], who, count, 0, 0], *ops[j + 1 :]])
        steps = [*ops[j][:AMOUNT], first + ops[j][AMOUNT] + 1, ops[j][MORE]]
        for changed in ([ops[i][KIND], who, count, first, 0], [*ops[i][:AMOUNT], 0, 0], steps):
            yield joined(case.setup, [*ops[:i], changed, *ops[i + 1 : j], *ops[j + 1 :]])


def exchanged(case: Case) -> Iterator[Values]:
    """Two requests change places, lengths and all; or names alone, from some operation on."""
    ops, submits = case.operations, case.submits()
    for a, b in combinations(range(len(submits)), 2):
        names = {a: b, b: a}
        swapped = [
            op if op[KIND] == SUBMIT else [op[KIND], names.get(op[WHO], op[WHO]), *op[COUNT:]]
            for op in ops
        ]
        changed = [*swapped]
        for i, j in ((submits[a], submits[b]), (submits[b], submits[a])):
            changed[i] = [*changed[i][:AMOUNT], ops[j][AMOUNT], changed[i][MORE]]
        yield joined(case.setup, changed)
        for start in range(submits[b] + 1, len(ops)):
            yield joined(case.setup, ops[:start] + swapped[start:])


def in_order(case: Case) -> Iterator[Values]:
    """An operation goes ahead of those before it, if that makes the tape smaller: a schedule
    nearer to the order of the kinds."""
    ops = case.operations
    for j in range(1, len(ops)):
        for i in range(j - 1, -1, -1):
            if ops[j] < ops[i]:
                yield joined(case.setup, [*ops[:i], ops[j], *ops[i:j], *ops[j + 1 :]])
                batch = [[*op[:COUNT], MOST, *op[AMOUNT:]] for op in ops[i:j]]
                yield joined(case.setup, [*ops[:i], ops[j], *batch, *ops[j + 1 :]])


def other_kinds(case: Case) -> Iterator[Values]:
    """Simpler kinds of operation in the place of each."""
    for i, op in enumerate(case.operations):
        for kind in range(1, op[KIND]):
            for who in sorted({op[WHO], 0}):
                plain = [kind, who, 0, 0, 0]
                yield joined(case.setup, [*case.operations[:i], plain, *case.operations[i + 1 :]])


def without_two(case: Case) -> Iterator[Values]:
    """Delete two operations that are no neighbours."""
    ops = case.operations
    for i, j in combinations(range(len(ops)), 2):
        if j > i + 1:
            yield joined(case.setup, [*ops[:i], *ops[i + 1 : j], *ops[j + 1 :]])


def fewer_and_others(case: Case) -> Iterator[Values]:
    """Delete an operation, and put another kind in the place of another."""
    ops = case.operations
    kinds = sorted({op[KIND] for op in ops})
    for i, j in permutations(range(len(ops)), 2):
        for kind in kinds:
            if kind != ops[j][KIND]:
                changed = [*ops[:j], [kind, ops[j][WHO], 0, 0, 0], *ops[j + 1 :]]
                yield joined(case.setup, changed[:i] + changed[i + 1 :])


def short_lives(case: Case) -> Iterator[Values]:
    """The short lives of one request of one token, in the plainest setup and in those whose
    geometry or order of pages differs from it in one value."""
    plain = [0] * case.plain
    setups = [case.setup, plain, *([*plain[:i], 1, *plain[i + 1 :]] for i in range(1, NO_POOLS))]
    for life in LIVES:
        kinds = [case.kinds.index(kind) + 1 for kind in life if kind in case.kinds]
        if len(kinds) == len(life) <= len(case.operations):
            for setup in setups:
                yield joined(setup, [[kind, 0, 0, 0, 0] for kind in kinds])


def _renamed(case: Case, operation: Values, gone: int, heritage: int) -> Values:
    """An operation once request `gone` was never submitted.  A submit names its parent as one
    more than the request, 0 for none."""
    changed = [*operation]
    if operation[KIND] == SUBMIT and operation[WHO] == gone + 1:
        changed[WHO] = heritage
    elif operation[WHO] > gone + (operation[KIND] == SUBMIT):
        changed[WHO] -= 1
    return changed
