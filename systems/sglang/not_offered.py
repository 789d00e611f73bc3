"""What the adapters of SGLang do not offer: a host tier, requests that move, and drafts, unless
one says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from reference.contract import (
    Drafts,
    InvalidCall,
    Places,
    RequestId,
    Rows,
    StepOutput,
    Tokens,
    proceed,
)

NOT_OFFERED = "the SGLang engine does not offer {}: take a target that does without."


class NotOffered:
    """The calls of `reference.contract.Engine` that raise InvalidCall and do nothing."""

    def verify(self, drafts: Sequence[Drafts]) -> list[StepOutput]:
        raise InvalidCall(NOT_OFFERED.format("verify"))

    def accept(self, request: RequestId, count: int) -> None:
        raise InvalidCall(NOT_OFFERED.format("accept"))

    def back_up(self, tokens: Tokens, *, before: Callable[[str], None] = proceed) -> int:
        raise InvalidCall(NOT_OFFERED.format("a host tier"))

    def restore(self, tokens: Tokens, *, before: Callable[[str], None] = proceed) -> int:
        raise InvalidCall(NOT_OFFERED.format("a host tier"))

    def places(self, request: RequestId) -> Places:
        raise InvalidCall(NOT_OFFERED.format("transfers"))

    def reserve(self, request: RequestId, tokens: Tokens) -> Places:
        raise InvalidCall(NOT_OFFERED.format("transfers"))

    def adopt(self, request: RequestId) -> None:
        raise InvalidCall(NOT_OFFERED.format("transfers"))

    def drop(self, request: RequestId) -> None:
        raise InvalidCall(NOT_OFFERED.format("transfers"))

    def regions(self) -> Mapping[str, Tensor]:
        raise InvalidCall(NOT_OFFERED.format("transfers"))


def given(rows: Rows | None) -> Rows:
    """The rows of a step.

    Raises:
        InvalidCall: there are none.
    """
    if rows is None:
        raise InvalidCall("this is a stamped engine: give the rows to store with each step.")
    return rows
