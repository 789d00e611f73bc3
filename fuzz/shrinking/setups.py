"""Passes toward the plainest setup, and those that leave it for a smaller case."""

from __future__ import annotations

from collections.abc import Iterator

from fuzz.shrinking.case import MOST, Case, Values, joined
from fuzz.shrinking.numbers import fewer_later, lengthened, scaled
from fuzz.shrinking.operations import without


def plain_setup(case: Case) -> Iterator[Values]:
    """The plainest setup, or a part of it."""
    setup = case.setup
    yield joined([0] * case.plain, case.operations)
    if len(setup) > case.plain:
        for i in range(case.plain):
            yield joined([*setup[:i], 0, *setup[i + 1 :]][: case.plain], case.operations)
    for size in (8, 4, 2, 1):
        for i in range(0, len(setup), size):
            if any(setup[i : i + size]):
                zeros = [0] * len(setup[i : i + size])
                yield joined([*setup[:i], *zeros, *setup[i + size :]], case.operations)


def lower_setup(case: Case) -> Iterator[Values]:
    """Lower values of the setup; lengths follow, since pages get smaller and pools larger."""
    setup, ops = case.setup, case.operations
    for i, value in enumerate(setup):
        for lower in sorted({0, value // 2, value - 1} & set(range(value))):
            changed, less = [*setup[:i], lower, *setup[i + 1 :]], value - lower
            yield joined(changed, ops)
            for multiply, divide in ((1, 2), (1, 4), (2, 1), (4, 1)):
                yield joined(changed, scaled(ops, multiply, divide))
            for divide in (2, 4):
                yield joined(changed, scaled(ops, 1, divide, end=1))
            for more in sorted({1, -1, less, -less, 4}):
                yield joined(changed, lengthened(ops, more))
            for later in (1, 2):
                yield joined(changed, lengthened(fewer_later(ops, later), later))


def other_setup(case: Case) -> Iterator[Values]:
    """The plainest setup but for one value; or one value goes back and another goes up.  Prompts
    stay as they are, or get as short or as long as they can."""
    setup, plain = case.setup, [0] * case.plain
    short, long = (lengthened(case.operations, more) for more in (-MOST, MOST))
    for j, bound in enumerate(case.bounds[: case.plain]):
        # A bound may depend on what goes back.
        near = {setup[j] + 1, setup[j] + 2} if setup[j] else set()
        for value in sorted(near | {1, 2, bound - 1} & set(range(1, bound))):
            setups = [[*plain[:j], value, *plain[j + 1 :]]]
            for i, before in enumerate(setup):
                if before and i != j and setup[j] < value:
                    changed = [*setup]
                    changed[i], changed[j] = 0, value
                    setups.append(changed)
            for changed in setups:
                if _oddness(changed) <= _oddness(setup):
                    yield joined(changed, case.operations)
                    yield joined(changed, short)
                if _oddness(changed) < _oddness(setup):
                    yield joined(changed, long)


def fewer_in_another_setup(case: Case) -> Iterator[Values]:
    """Delete an operation, or a request, and change a value of the setup: a smaller pool fills
    sooner."""
    ops = case.operations
    fewer = [ops[:j] + ops[j + 1 :] for j in range(len(ops) - 2, -1, -1)]
    fewer += [without(case, request) for request in range(case.requests)]
    for i, value in enumerate(case.setup):
        for other in sorted({0, case.bounds[i] - 1} - {value}):
            for kept in fewer:
                yield joined([*case.setup[:i], other, *case.setup[i + 1 :]], kept)


def _oddness(setup: Values) -> tuple[int, int]:
    """How many values are not the plainest, and how far they are from it."""
    return sum(value > 0 for value in setup), sum(setup)
