"""An instance of several tensor-parallel ranks in one process, called like one engine.

Every call is made on all ranks at once, each in a thread of its own, since in the middle of a
step they wait for each other.  All ranks have to return the same, bit by bit, or to raise the
same; what one of them alone does is reported, and the instance is of no use afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton import knobs

from optimized.engine import OptimizedEngine, factory
from optimized.groups import TIMEOUT_S, RankLost, ThreadGroup
from optimized.heads import rank_state, whole_state
from reference.contract import (
    Admission,
    Capability,
    Chunk,
    Component,
    Drafts,
    EngineOptions,
    InvalidCall,
    Places,
    RequestId,
    Rows,
    Snapshot,
    StepOutput,
    Tokens,
    Weights,
)
from reference.geometry import Geometry, ModelShape

T = TypeVar("T")
Step = TypeVar("Step", Chunk, Drafts)
_PER_RANK = {Capability.RAW, Capability.HOST_TIER}
"""Not offered by an instance: views of one buffer, and calls that call back."""


class RanksDisagree(RuntimeError):
    """Ranks computed or counted different things in one call."""


class Instance:
    """R ranks behind the calls of `reference.contract.Engine`, which tells what each does.

    `shape`, states and rows are those of the whole model.  What each rank has of its own, such
    as the regions of a transfer, is reached by `engines` and `each`.
    """

    def __init__(
        self,
        geometry: Geometry,
        shape: ModelShape,
        options: Sequence[EngineOptions],
        weights: Weights | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Build one rank for each of the `options`, which may differ in `kv_memory` only; a rank
        waits for the others in a collective for up to `timeout_s`.

        Raises:
            InvalidCall: as an engine does, where the KDA heads cannot be shared out evenly, and
                for several ranks whose kernels Triton interprets.
        """
        if len(options) > 1 and knobs.runtime.interpret and options[0].backend == "triton":
            raise InvalidCall(
                "Triton's interpreter runs in one thread at a time: make each rank a process of "
                "its own, or choose backend torch."
            )
        self.geometry = geometry
        self.shape = shape
        self._groups = ThreadGroup.of(len(options), timeout_s=timeout_s)
        self.engines: list[OptimizedEngine] = [
            factory(geometry, shape, option, weights, group=group)
            for group, option in zip(self._groups, options, strict=True)
        ]
        self.capabilities = self.engines[0].capabilities - _PER_RANK
        self._threads = [ThreadPoolExecutor(1, f"rank{group.rank}") for group in self._groups]
        self._failed = False

    def each(self, call: Callable[[OptimizedEngine, int], T]) -> list[T]:
        """Make a call, given the engine and its rank, on all ranks at once.

        Returns:
            What each returned, in rank order.

        Raises:
            RankLost: where a rank failed and others did not; the instance refuses all further
                calls with it.  What all ranks raise alike passes through.
        """
        if self._failed:
            raise RankLost("a rank of the instance has failed: build the instance anew.")
        for group in self._groups:
            group.enter()
        futures = [
            thread.submit(_attend, group, call, engine, group.rank)
            for thread, group, engine in zip(self._threads, self._groups, self.engines, strict=True)
        ]
        errors = [future.exception() for future in futures]
        self._require_alike(errors)
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the ranks' threads."""
        for thread in self._threads:
            thread.shutdown()

    def submit(self, request: RequestId, tokens: Tokens) -> Admission:
        return self._agreed(lambda engine, rank: engine.submit(request, tokens))

    def extend(self, chunks: Sequence[Chunk]) -> list[StepOutput]:
        return self._agreed(lambda engine, rank: engine.extend(self._own(chunks, rank)))

    def decode(
        self, requests: Sequence[RequestId], tokens: Tokens, rows: Rows | None = None
    ) -> list[StepOutput]:
        return self._agreed(
            lambda engine, rank: engine.decode(requests, tokens, self._own_rows(rows, rank))
        )

    def verify(self, drafts: Sequence[Drafts]) -> list[StepOutput]:
        return self._agreed(lambda engine, rank: engine.verify(self._own(drafts, rank)))

    def accept(self, request: RequestId, count: int) -> None:
        self._agreed(lambda engine, rank: engine.accept(request, count))

    def finish(self, request: RequestId) -> None:
        self._agreed(lambda engine, rank: engine.finish(request))

    def abort(self, request: RequestId) -> None:
        self._agreed(lambda engine, rank: engine.abort(request))

    def retract(self, request: RequestId) -> tuple[int, ...]:
        return self._agreed(lambda engine, rank: engine.retract(request))

    def evict(self, pages: int) -> int:
        return self._agreed(lambda engine, rank: engine.evict(pages))

    def places(self, request: RequestId) -> Places:
        return self._agreed(lambda engine, rank: engine.places(request))

    def reserve(self, request: RequestId, tokens: Tokens) -> Places:
        return self._agreed(lambda engine, rank: engine.reserve(request, tokens))

    def adopt(self, request: RequestId) -> None:
        self._agreed(lambda engine, rank: engine.adopt(request))

    def drop(self, request: RequestId) -> None:
        self._agreed(lambda engine, rank: engine.drop(request))

    def inspect(self) -> Snapshot:
        return self._agreed(lambda engine, rank: engine.inspect())

    def read(
        self, request: RequestId, component: Component, layer: int, start: int, stop: int
    ) -> Tensor:
        """As the contract says; a state is put together from all ranks' heads."""
        rows = self.each(lambda engine, rank: engine.read(request, component, layer, start, stop))
        if component is not Component.STATE:
            return self._one(rows)
        states = [row.view(torch.float32) for row in rows]
        return whole_state(self.shape, states).view(torch.uint8)

    def _agreed(self, call: Callable[[OptimizedEngine, int], T]) -> T:
        return self._one(self.each(call))

    def _one(self, results: Sequence[T]) -> T:
        """What all ranks returned."""
        for rank, result in enumerate(results):
            where = _difference(results[0], result)
            if where:
                self._failed = True
                raise RanksDisagree(
                    f"ranks 0 and {rank} of {len(results)} returned other {where}: look for a "
                    "collective out of rank order, or a rank that missed a call."
                )
        return results[0]

    def _require_alike(self, errors: Sequence[BaseException | None]) -> None:
        """Raise what all ranks raised, if they did."""
        if len({(type(error), str(error)) for error in errors}) == 1:
            if errors[0] is not None:
                raise errors[0]
            return
        self._failed = True
        # a lost rank is what the others saw of it
        own = [error is not None and not isinstance(error, RankLost) for error in errors]
        rank = own.index(True) if any(own) else 0
        raise RankLost(
            f"rank {rank} of {len(errors)} failed where others did not ({errors[rank]!r}): see "
            "why, and build the instance anew."
        ) from errors[rank]

    def _own(self, steps: Sequence[Step], rank: int) -> list[Step]:
        return [replace(step, rows=self._own_rows(step.rows, rank)) for step in steps]

    def _own_rows(self, rows: Rows | None, rank: int) -> Rows | None:
        """The rows that a rank stores: all but the states of the others' heads."""
        if rows is None:
            return None
        if rows.state.shape[-1:] != (self.shape.state_width,):
            raise InvalidCall(
                f"the state rows are of shape {tuple(rows.state.shape)}: give all heads, "
                f"{self.shape.state_width} words a state."
            )
        size = len(self.engines)
        return replace(rows, state=rank_state(self.shape, rows.state, rank, size))


def _attend(
    group: ThreadGroup,
    call: Callable[[OptimizedEngine, int], T],
    engine: OptimizedEngine,
    rank: int,
) -> T:
    """A rank's part in one call; whoever still waits for it afterwards waits in vain."""
    try:
        return call(engine, rank)
    finally:
        group.leave()


def _difference(one: Any, two: Any, name: str = "results") -> str:
    """The name of what differs in two results, tensors bit by bit; empty if they are equal."""
    if isinstance(one, Tensor):
        alike = isinstance(two, Tensor) and one.dtype == two.dtype and one.shape == two.shape
        equal = alike and torch.equal(*(x.contiguous().view(torch.uint8) for x in (one, two)))
        return "" if equal else name
    if isinstance(one, StepOutput):
        of = f"of request {one.request} from position {one.start} on"
        parts = (
            (getattr(one, f.name), getattr(two, f.name), f"{f.name} {of}") for f in fields(one)
        )
    elif isinstance(one, list) and len(one) == len(two):
        parts = ((*pair, name) for pair in zip(one, two, strict=True))
    else:
        return "" if one == two else name
    return next(filter(None, (_difference(*part) for part in parts)), "")
