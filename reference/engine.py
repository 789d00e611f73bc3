"""The contract's engine without a cache: it keeps tokens and recomputes everything.

It never shares (every hit is 0), never evicts and never runs out of pages, so whatever
another engine answers after any history, this one answers from the tokens alone.  In a
stamped run it keeps, instead of a model, the rows that it was handed, by position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from reference.addressing import pages_for
from reference.contract import (
    Admission,
    Capability,
    Chunk,
    Component,
    Drafts,
    EngineOptions,
    InvalidCall,
    OutOfMemory,
    Places,
    RequestId,
    RequestView,
    Rows,
    Snapshot,
    StepOutput,
    Tokens,
    Weights,
    proceed,
)
from reference.geometry import Geometry, ModelShape
from reference.model import Forward, forward
from reference.pooling import pooled_rows, tail_rows
from reference.quant import encode_row, f32_bytes
from reference.stamped import Stamps


@dataclass(slots=True)
class _Request:
    """`tokens` are prompt and output; the first `length` of them are stored.  Drafts follow
    them, until they are accepted or rejected."""

    tokens: list[int]
    stamps: Stamps
    length: int = 0
    drafts: list[int] = field(default_factory=list)


class ReferenceEngine:
    """See the module.  Weights None makes it a stamped engine."""

    def __init__(
        self,
        geometry: Geometry,
        shape: ModelShape,
        options: EngineOptions,
        weights: Weights | None = None,
    ) -> None:
        self.geometry = geometry
        self.shape = shape
        run = Capability.STAMPED if weights is None else Capability.MODEL
        self.capabilities = frozenset(
            {run, Capability.VERIFY, Capability.ANY_DRAFTS, Capability.CHUNKS, Capability.ANY_CHUNK}
        )
        self._options = options
        sizes = (len(shape.dsa_layers), geometry.kpool, shape.index_dim)
        self._ape = torch.zeros(sizes) if options.ape is None else options.ape.clone()
        self._weights = weights
        self._requests: dict[RequestId, _Request] = {}
        self._last: tuple[tuple[int, ...], Forward] | None = None

    def submit(self, request: RequestId, tokens: Tokens) -> Admission:
        if request in self._requests:
            raise InvalidCall(f"request {request} runs already: choose another id.")
        prompt = self._copied(tokens)
        if not prompt:
            raise InvalidCall(f"request {request} has no tokens: submit at least one.")
        if len(self._requests) >= self._options.max_requests:
            raise OutOfMemory(
                f"all {self._options.max_requests} request slots are taken: finish, abort or "
                "retract a request first."
            )
        self._requests[request] = _Request(prompt, Stamps.empty(self.shape))
        return Admission(hit=0)

    def extend(self, chunks: Sequence[Chunk]) -> list[StepOutput]:
        self._distinct([chunk.request for chunk in chunks])
        steps: list[tuple[Chunk, int, int]] = []
        for chunk in chunks:
            state = self._idle(chunk.request)
            stop = _whole("stop", chunk.stop)
            first = stop - 1
            if chunk.outputs_from is not None:
                first = _whole("outputs_from", chunk.outputs_from)
            if not state.length < stop <= len(state.tokens):
                raise InvalidCall(
                    f"request {chunk.request} has {state.length} of {len(state.tokens)} tokens "
                    f"stored: extend it to a position in between, not {stop}."
                )
            if not state.length <= first < stop:
                raise InvalidCall(
                    f"outputs_from {first} lies outside the chunk {state.length} to {stop}: "
                    "choose a position of the chunk."
                )
            marks = self.geometry.state_positions(state.length, stop)
            self._check_rows(chunk.rows, stop - state.length, len(marks))
            steps.append((chunk, stop, first))
        return [self._extend_one(*step) for step in steps]

    def _extend_one(self, chunk: Chunk, stop: int, first: int) -> StepOutput:
        state = self._requests[chunk.request]
        start, state.length = state.length, stop
        if chunk.rows is not None:
            marks = self.geometry.state_positions(start, stop)
            state.stamps.write(chunk.rows, start, dict(zip(marks, chunk.rows.state, strict=True)))
        return self._outputs(chunk.request, state.tokens[:stop], first)

    def decode(
        self, requests: Sequence[RequestId], tokens: Tokens, rows: Rows | None = None
    ) -> list[StepOutput]:
        self._distinct(requests)
        appended = self._copied(tokens)
        if len(appended) != len(requests):
            raise InvalidCall(
                f"{len(appended)} tokens for {len(requests)} requests: give each request one."
            )
        for request in requests:
            self._complete(request)
        self._check_rows(rows, len(requests), len(requests))
        outputs: list[StepOutput] = []
        for i, (request, token) in enumerate(zip(requests, appended, strict=True)):
            state = self._requests[request]
            state.tokens.append(token)
            state.length += 1
            if rows is not None:
                one = Rows(
                    kv=rows.kv[:, i : i + 1],
                    key=rows.key[:, i : i + 1],
                    gate=rows.gate[:, i : i + 1],
                    state=rows.state[i : i + 1],
                )
                state.stamps.write(one, state.length - 1, {state.length: rows.state[i]})
            outputs.append(self._outputs(request, state.tokens, state.length - 1))
        return outputs

    def verify(self, drafts: Sequence[Drafts]) -> list[StepOutput]:
        self._distinct([part.request for part in drafts])
        copies = [self._copied(part.tokens) for part in drafts]
        for part, tokens in zip(drafts, copies, strict=True):
            self._complete(part.request)
            count = len(tokens)
            if not 1 <= count <= self.geometry.max_drafts:
                raise InvalidCall(
                    f"{count} drafts for request {part.request}: give 1 to max_drafts "
                    f"({self.geometry.max_drafts})."
                )
            self._check_rows(part.rows, count, count)
        outputs: list[StepOutput] = []
        for part, tokens in zip(drafts, copies, strict=True):
            state = self._requests[part.request]
            state.drafts = tokens
            if part.rows is not None:
                ends = range(state.length + 1, state.length + len(state.drafts) + 1)
                states = dict(zip(ends, part.rows.state, strict=True))
                state.stamps.write(part.rows, state.length, states)
            outputs.append(self._outputs(part.request, state.tokens + state.drafts, state.length))
        return outputs

    def accept(self, request: RequestId, count: int) -> None:
        state = self._running(request)
        count = _whole("count", count)
        if not state.drafts or not 0 <= count <= len(state.drafts):
            raise InvalidCall(
                f"request {request} has {len(state.drafts)} drafts pending, so {count} cannot be "
                "accepted: verify first, and accept at most as many."
            )
        state.tokens += state.drafts[:count]
        state.length += count
        state.drafts = []

    def finish(self, request: RequestId) -> None:
        self._running(request)
        del self._requests[request]

    def abort(self, request: RequestId) -> None:
        self.finish(request)

    def retract(self, request: RequestId) -> tuple[int, ...]:
        tokens = tuple(self._running(request).tokens)
        self.finish(request)
        return tokens

    def evict(self, pages: int) -> int:
        _whole("pages", pages)
        return 0

    def back_up(self, tokens: Tokens, *, before: Callable[[str], None] = proceed) -> int:
        raise InvalidCall("the reference engine has no host tier: check for HOST_TIER first.")

    def restore(self, tokens: Tokens, *, before: Callable[[str], None] = proceed) -> int:
        return self.back_up(tokens, before=before)

    def places(self, request: RequestId) -> Places:
        raise _no_transfer()

    def reserve(self, request: RequestId, tokens: Tokens) -> Places:
        raise _no_transfer()

    def adopt(self, request: RequestId) -> None:
        raise _no_transfer()

    def drop(self, request: RequestId) -> None:
        raise _no_transfer()

    def regions(self) -> Mapping[str, Tensor]:
        raise _no_transfer()

    def read(
        self, request: RequestId, component: Component, layer: int, start: int, stop: int
    ) -> Tensor:
        state = self._running(request)
        layer, start, stop = _whole("layer", layer), _whole("start", start), _whole("stop", stop)
        first, end = self._readable(component, state.length)
        layers = self.shape.kda_layers if component is Component.STATE else self.shape.dsa_layers
        if not 0 <= layer < len(layers):
            raise InvalidCall(
                f"layer {layer} of {component.value}: there are {len(layers)}, counted from 0."
            )
        if not first <= start <= stop <= end:
            raise InvalidCall(
                f"request {request} has {component.value} rows {first} to {end}: read within "
                f"them, not {start} to {stop}."
            )
        rows = self._rows if self._weights is None else self._computed_rows
        return rows(state, component, layer)[start - first : stop - first].clone()

    def _readable(self, component: Component, length: int) -> tuple[int, int]:
        closed = length // self.geometry.kpool
        return {
            Component.KV: (0, length),
            Component.INDEX: (0, closed),
            Component.TAIL: (closed * self.geometry.kpool, length),
            Component.STATE: (0, 1),
        }[component]

    def raw(self, component: Component, layer: int) -> Tensor:
        raise InvalidCall("the reference engine has no buffers: check for Capability.RAW first.")

    def inspect(self) -> Snapshot:
        """Pages, rows and slots are numbered on the spot, in order of admission."""
        views: dict[RequestId, RequestView] = {}
        used = 1
        for slot, (request, state) in enumerate(self._requests.items(), start=1):
            count = pages_for(state.length + len(state.drafts), self.geometry)
            views[request] = RequestView(
                length=state.length,
                pages=tuple(range(used, used + count)),
                shared=0,
                slot=slot,
                state_slot=slot,
                state_position=state.length,
                pending=len(state.drafts),
            )
            used += count
        return Snapshot(
            requests=views,
            cached=(),
            free_pages=frozenset(range(used, self._options.pages)),
            free_states=frozenset(range(len(views) + 1, self._options.state_slots)),
            ref_counts=dict.fromkeys(range(1, used), 1),
        )

    def _rows(self, state: _Request, component: Component, layer: int) -> Tensor:
        """All readable rows of a stamped request."""
        stamps, length = state.stamps, state.length
        if component is Component.STATE:
            return f32_bytes(stamps.states[length][layer : layer + 1])
        if component is Component.KV:
            return encode_row(stamps.kv[layer, :length], self.geometry.row_format)
        first = 0 if component is Component.INDEX else self._readable(component, length)[0]
        key, gate = stamps.key[layer, first:length], stamps.gate[layer, first:length]
        if component is Component.TAIL:
            return tail_rows(key, gate)
        return pooled_rows(key, gate, self._ape[layer], self.geometry)

    def _computed_rows(self, state: _Request, component: Component, layer: int) -> Tensor:
        """All readable rows of a request of a model run."""
        result = self._forward(state.tokens[: state.length], None)
        if component is Component.STATE:
            return f32_bytes(result.states[state.length][layer : layer + 1])
        if component is Component.KV:
            return result.kv[layer]
        if component is Component.INDEX:
            return result.index[layer]
        return result.tail[layer][self._readable(component, state.length)[0] :]

    def _forward(self, tokens: Sequence[int], outputs_from: int | None) -> Forward:
        """The model over `tokens`; the last result is kept, since several reads of the same
        tokens tend to follow each other."""
        assert self._weights is not None
        key = tuple(tokens)
        start = max(0, len(key) - 1) if outputs_from is None else outputs_from
        if self._last is None or self._last[0] != key or self._last[1].start > start:
            result = forward(
                self._weights,
                self.shape,
                self.geometry,
                key,
                outputs_from=start,
                state_at=(len(key),),
            )
            self._last = (key, result)
        return self._last[1]

    def _outputs(self, request: RequestId, tokens: Sequence[int], first: int) -> StepOutput:
        if self._weights is None:
            layers, width = len(self.shape.dsa_layers), self.geometry.selection_width
            return StepOutput(
                request=request,
                start=first,
                selected=torch.empty(layers, 0, width, dtype=torch.int64),
                logits=torch.empty(0, self.shape.vocab),
            )
        result = self._forward(tokens, first)
        skip = first - result.start
        return StepOutput(
            request=request,
            start=first,
            selected=result.selected[:, skip:].clone(),
            logits=result.logits[skip:].to(torch.float32),
        )

    def _running(self, request: RequestId) -> _Request:
        if request not in self._requests:
            raise InvalidCall(f"request {request} is not running: submit it first.")
        return self._requests[request]

    def _idle(self, request: RequestId) -> _Request:
        state = self._running(request)
        if state.drafts:
            raise InvalidCall(
                f"request {request} has {len(state.drafts)} drafts pending: accept or reject "
                "them first."
            )
        return state

    def _complete(self, request: RequestId) -> _Request:
        state = self._idle(request)
        if state.length < len(state.tokens):
            raise InvalidCall(
                f"request {request} has {state.length} of {len(state.tokens)} tokens stored: "
                "extend it to its end first."
            )
        return state

    def _distinct(self, requests: Sequence[RequestId]) -> None:
        if len(set(requests)) < len(requests):
            raise InvalidCall("a request stands twice in one step: give each of them once.")

    def _check_rows(self, rows: Rows | None, positions: int, states: int) -> None:
        if (rows is None) == (self._weights is None):
            raise InvalidCall("rows belong to a stamped run, and only there: build the other one.")
        if rows is None:
            return
        dsa, kda = len(self.shape.dsa_layers), len(self.shape.kda_layers)
        for name, tensor, size in (
            ("kv", rows.kv, (dsa, positions, self.shape.latent)),
            ("key", rows.key, (dsa, positions, self.shape.index_dim)),
            ("gate", rows.gate, (dsa, positions, self.shape.index_dim)),
            ("state", rows.state, (states, kda, self.shape.state_width)),
        ):
            if tensor.dtype != torch.float32 or tensor.shape != size:
                raise InvalidCall(f"rows with a wrong {name}: give it as float32 of shape {size}.")

    def _copied(self, tokens: Tokens) -> list[int]:
        """The caller's tokens, once all are known to be ids of this run."""
        low, high = (-(2**63), 2**63) if self._weights is None else (0, self.shape.vocab)
        if isinstance(tokens, np.ndarray):
            known = tokens.ndim == 1 and np.issubdtype(tokens.dtype, np.integer)
        else:
            known = isinstance(tokens, Sequence)
        if not known or not all(_is_integer(token) and low <= token < high for token in tokens):
            raise InvalidCall(
                "tokens that are no ids of this run: give a list, a tuple or a one-dimensional "
                f"array of integers from {low} to {high - 1}."
            )
        return [int(token) for token in tokens]


def _is_integer(value: object) -> bool:
    """Python and numpy count booleans and durations as integers; the contract does not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool | np.timedelta64)


def _no_transfer() -> InvalidCall:
    return InvalidCall("the reference engine has no memory to move: check for TRANSFER first.")


def _whole(name: str, value: int) -> int:
    """An argument that counts, as an integer of Python."""
    if not _is_integer(value):
        raise InvalidCall(f"{name} is of type {type(value).__name__}: give an integer.")
    return int(value)


def factory(
    geometry: Geometry,
    shape: ModelShape,
    options: EngineOptions,
    weights: Weights | None = None,
) -> ReferenceEngine:
    """contract.EngineFactory."""
    return ReferenceEngine(geometry, shape, options, weights)
