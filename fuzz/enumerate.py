"""Every run within given bounds, one after the other: what proves that a case is minimal.

Tapes are counted like the digits of a number whose bases are the bounds that the run itself
met, so that each different run is executed once.  A run with an operation that did nothing is a
longer way to write a shorter one, so nothing that begins like it is run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fuzz.outcome import Outcome

Run = Callable[[Sequence[int]], Outcome]


def outcomes(run: Run, *, tokens: int) -> Iterator[Outcome]:
    """All outcomes of at most `tokens` tokens, in the order of their tapes.

    `run` bounds the number of operations and pins what is not to be enumerated (`Pin`)."""
    values: list[int] | None = []
    while values is not None:
        outcome = run(values)
        cut = len(outcome.values)
        wasteful = _first_wasteful(outcome, tokens)
        if wasteful is None:
            yield outcome
        else:
            cut = wasteful
        values = _next(outcome.values[:cut], outcome.bounds[:cut])


def _first_wasteful(outcome: Outcome, tokens: int) -> int | None:
    """Where the tape's first operation ends that did nothing or went beyond `tokens`."""
    spans = [span for span in outcome.spans if span.label == "operation"]
    for span, operation in zip(spans, outcome.operations, strict=False):
        if operation.idle or operation.tokens > tokens:
            return span.stop
    return None


def _next(values: Sequence[int], bounds: Sequence[int]) -> list[int] | None:
    """The following number: the last digit that can still grow, one larger; None after the
    last."""
    for i in range(len(values) - 1, -1, -1):
        if values[i] + 1 < bounds[i]:
            return [*values[:i], values[i] + 1]
    return None
