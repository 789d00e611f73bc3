"""What one execution did, and what was wrong with it."""

from __future__ import annotations

import msgspec

from fuzz.step import Violation
from fuzz.tape import Span


class Operation(msgspec.Struct, frozen=True):
    """One operation of a run: in words, the requests that it was about (none if there was
    nothing to do), and the tokens of all prompts, decodes and drafts so far."""

    text: str
    requests: list[int]
    tokens: int
    idle: bool


class Outcome(msgspec.Struct, kw_only=True, frozen=True):
    """What one execution did and what was wrong with it.

    Fields:
        values, bounds, spans: the tape as it was read, in its normal form.
        operations: the last one failed if there are violations.
        violations: of the first operation that had any.
        exact, digest: of choices, verdict, accounts, selections and stamped rows; and with the
            floats of a model run (`fuzz.digest`).
        events: what happened how often.
        features: which behaviours were shown, and by which place of the tape (`fuzz.coverage`).
        ratios: of a model run, the largest error by its bound, by stage (`reference.bounds`).
        requests, tokens: the size of the case.
        skipped: what the target would do and the engine lacks the capability for.
        setup: geometry and pools, readable.
    """

    target: str
    values: list[int]
    bounds: list[int]
    spans: list[Span]
    violations: list[Violation]
    exact: str
    digest: str
    setup: str
    operations: list[Operation] = []
    events: dict[str, int] = {}
    features: dict[str, int] = {}
    ratios: dict[str, float] = {}
    requests: int = 0
    tokens: int = 0
    skipped: list[str] = []

    @property
    def failed(self) -> bool:
        return bool(self.violations)

    @property
    def signature(self) -> str | None:
        """Of the first violation; None of a clean run."""
        return self.violations[0].signature if self.violations else None
