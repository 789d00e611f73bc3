"""Passes that change lengths, counts and other numbers of operations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product

from fuzz.shrinking.case import (
    AMOUNT,
    COUNT,
    KIND,
    MORE,
    MOST,
    SUBMIT,
    WHO,
    WIDTH,
    Case,
    Values,
    joined,
)

MANY = 12
"""Small numbers are those below."""
PAGES = (4, 8, 16, 32)
"""Sizes of pages, in tokens."""


def plain(case: Case) -> Iterator[Values]:
    """No operation, or not this one, has more to it than its kind and whom it concerns."""
    ops = case.operations
    simple = [op if op[KIND] == SUBMIT else [*op[:COUNT], 0, 0, 0] for op in ops]
    yield joined(case.setup, simple)
    for i, op in enumerate(ops):
        yield joined(case.setup, [*ops[:i], [op[KIND], op[WHO], 0, 0, 0], *ops[i + 1 :]])


def prompts_for_steps(case: Case) -> Iterator[Values]:
    """Delete an operation that appends tokens, and lengthen its requests' prompts."""
    appends, submits = case.numbers("decode", "verify"), case.submits()
    for i, (op, about) in enumerate(zip(case.operations, case.about, strict=True)):
        if op[KIND] not in appends:
            continue
        longer = [[*op] for op in case.operations]
        for request in about:
            longer[submits[request]][AMOUNT] += op[AMOUNT] + 1
        yield joined(case.setup, longer[:i] + longer[i + 1 :])


def shorter(case: Case) -> Iterator[Values]:
    """All prompts shorter, and what they share: lengths that hang together."""
    for divide in (2, 3, 4):
        yield joined(case.setup, scaled(case.operations, 1, divide))
    for less in (8, 4, 1):
        shorter = [
            [*op[:AMOUNT], max(0, op[AMOUNT] - less), max(0, op[MORE] - less)]
            if op[KIND] == SUBMIT
            else op
            for op in case.operations
        ]
        yield joined(case.setup, shorter)


def lowered_pairs(case: Case) -> Iterator[Values]:
    """Two numbers lowered by as much: lengths that must change together."""
    values, first = joined(case.setup, case.operations), len(case.setup)
    numbers = [i for i in range(first, len(values)) if values[i] and (i - first) % WIDTH > WHO]
    for i, j in combinations(numbers, 2):
        least = min(values[i], values[j])
        for less in dict.fromkeys((least, least // 2, 1)):
            if less:
                yield _added(values, {i: -less, j: -less})


def later_tokens(case: Case) -> Iterator[Values]:
    """Tokens go from an operation to a later one, or one token to all later ones."""
    ops = case.operations
    appends = case.numbers("submit", "decode", "verify")
    places = [i for i, op in enumerate(ops) if op[KIND] in appends]
    for i, j in combinations(places, 2):
        for less in range(min(ops[i][AMOUNT], MANY), 0, -1):
            changed = [*ops]
            changed[i] = [*ops[i][:AMOUNT], ops[i][AMOUNT] - less, ops[i][MORE]]
            changed[j] = [*ops[j][:AMOUNT], ops[j][AMOUNT] + less, ops[j][MORE]]
            yield joined(case.setup, changed)
    for i in places:
        if ops[i][AMOUNT]:
            less = [*ops[i][:AMOUNT], ops[i][AMOUNT] - 1, ops[i][MORE]]
            more = [[*op[:COUNT], *(n + (n > 0) for n in op[COUNT:])] for op in ops[i + 1 :]]
            yield joined(case.setup, [*ops[:i], less, *more])


def traded(case: Case) -> Iterator[Values]:
    """Another number in one place, with one less in another where that alone does not do."""
    values, first = joined(case.setup, case.operations), len(case.setup)
    numbers = [i for i in range(first, len(values)) if (i - first) % WIDTH]
    others = [
        (i, other)
        for i in numbers
        for other in _others(case, i, values[i])
        if other < case.bounds[i] and other != values[i]
    ]
    for i, other in others:
        if other < values[i] - 1:
            yield [*values[:i], other, *values[i + 1 :]]
    for less in numbers:
        if values[less] and (less - first) % WIDTH > WHO:
            fewer = _added(values, {less: -1})
            for i, other in others:
                if i != less:
                    yield [*fewer[:i], other, *fewer[i + 1 :]]


def fewer_and_numbers(case: Case) -> Iterator[Values]:
    """Delete an operation, with its tokens or without, and change a number of another."""
    ops, submits = case.operations, case.submits()
    for i in range(len(ops)):
        steps = ops[i][AMOUNT] + 1 if ops[i][KIND] in case.numbers("decode") else 0
        for more in sorted({0, steps}):
            rest = [[*op] for op in ops]
            for request in case.about[i] if more else ():
                rest[submits[request]][AMOUNT] += more
            del rest[i]
            for j, place in product(range(len(rest)), (COUNT, AMOUNT, MORE)):
                for number in sorted({0, 1, MOST} - {rest[j][place]}):
                    changed = [*rest[j]]
                    changed[place] = number
                    yield joined(case.setup, [*rest[:j], changed, *rest[j + 1 :]])


def _others(case: Case, place: int, value: int) -> Iterable[int]:
    """What else might stand in a place of the tape: a length near it or as far into a page, or
    any small number."""
    operation, column = divmod(place - len(case.setup), WIDTH)
    if case.operations[operation][KIND] == SUBMIT and column >= AMOUNT:
        return sorted({max(0, value - 1), value + 1, *(value % page for page in PAGES)})
    return range(MANY)


def _added(values: Values, change: dict[int, int]) -> Values:
    return [value + change.get(i, 0) for i, value in enumerate(values)]


def scaled(
    operations: Sequence[Values], multiply: int, divide: int, *, end: int = 0
) -> list[Values]:
    """Prompts and what they share, so many times as long; what lies `end` tokens before the end
    of a page stays there."""
    return [
        [
            *op[:AMOUNT],
            max(0, ((op[AMOUNT] + 1 + end) * multiply - 1) // divide - end),
            op[MORE] * multiply // divide,
        ]
        if op[KIND] == SUBMIT
        else op
        for op in operations
    ]


def lengthened(operations: Sequence[Values], more: int) -> list[Values]:
    """Prompts so many tokens longer, or shorter."""
    return [
        [*op[:AMOUNT], max(0, op[AMOUNT] + more), op[MORE]] if op[KIND] == SUBMIT else op
        for op in operations
    ]


def fewer_later(operations: Sequence[Values], less: int) -> list[Values]:
    """Numbers so much less of all operations that are no submit."""
    return [
        op if op[KIND] == SUBMIT else [*op[:COUNT], *(max(0, n - less) for n in op[COUNT:])]
        for op in operations
    ]
