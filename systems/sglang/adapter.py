"""What the engines of SGLang have in common: which requests run, and what is not offered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from reference.contract import (
    Capability,
    Drafts,
    InvalidCall,
    Places,
    RequestId,
    Rows,
    StepOutput,
    Tokens,
    proceed,
)
from reference.geometry import Geometry, ModelShape

NOT_OFFERED = "the SGLang engine does not offer {}: take a target that does without."


Running = TypeVar("Running")


class Adapter(Generic[Running]):
    """An engine of `reference.contract.Engine`, with what it keeps of each request that runs.  It
    offers no host tier, no requests that move and no drafts, unless it says otherwise: those calls
    raise InvalidCall and do nothing."""

    def __init__(
        self, geometry: Geometry, shape: ModelShape, capabilities: frozenset[Capability]
    ) -> None:
        self.geometry, self.shape, self.capabilities = geometry, shape, capabilities
        self._running: dict[RequestId, Running] = {}
        self._none = (
            torch.zeros(len(shape.dsa_layers), 0, geometry.selection_width, dtype=torch.int64),
            torch.zeros(0, shape.vocab),
        )

    def _prompt(self, request: RequestId, tokens: Tokens) -> list[int]:
        """The tokens of a request that is to be submitted."""
        if request in self._running:
            raise InvalidCall(f"request {request} runs already: choose an id that is not in use.")
        if not len(tokens):
            raise InvalidCall(f"request {request} has no tokens: give at least one.")
        return [int(token) for token in tokens]

    def _find(self, request: RequestId) -> Running:
        if request not in self._running:
            raise InvalidCall(f"request {request} is not running: submit it first.")
        return self._running[request]

    def _silent(self, request: RequestId, start: int, **of_decode: Any) -> StepOutput:
        """What a stamped step returns of one request."""
        selected, logits = self._none
        return StepOutput(
            request=request, start=start, selected=selected, logits=logits, **of_decode
        )

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
