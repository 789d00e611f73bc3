"""The optimized engine behind the contract: checks each call, finds its memory, runs its step.

A call is checked in full and its memory found before anything is written, so that one that
raises has changed nothing but what it evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from optimized import addressing, inputs
from optimized.addressing import Array
from optimized.groups import ALONE, Group
from optimized.heads import rank_shape
from optimized.hisparse.coordinator import Coordinator
from optimized.hisparse.memory import HiSparseMemory
from optimized.kernels import gather
from optimized.memory import transfers
from optimized.memory.host_tier import HostTier
from optimized.memory.manager import Memory
from optimized.memory.requests import Request
from optimized.steps import Steps
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
    components,
    proceed,
)
from reference.geometry import Geometry, ModelShape


class OptimizedEngine:
    """Paged, prefix-sharing, batched, on a CPU; `reference.contract.Engine` tells what each call
    does, takes and returns."""

    def __init__(
        self,
        geometry: Geometry,
        shape: ModelShape,
        options: EngineOptions,
        weights: Weights | None,
        group: Group,
    ) -> None:
        shape = rank_shape(shape, group.size)
        options = inputs.checked_options(options, geometry, shape)
        self.geometry = geometry
        self.shape = shape
        sizes = options.hisparse
        self.capabilities = frozenset(
            {
                Capability.STAMPED if weights is None else Capability.MODEL,
                Capability.PREFIX_SHARING,
                Capability.CHUNKS,
                Capability.ANY_CHUNK,
                Capability.ANY_DRAFTS,
                Capability.EVERY_CHECKPOINT,
                Capability.FRUGAL_EVICTION,
                Capability.KEEPS_AGE,
                # a hot buffer has one newest row, and a verify would store several
                *(() if sizes else (Capability.VERIFY,)),
                Capability.RAW,
                Capability.HISPARSE,
                Capability.HOT_AHEAD,
                Capability.ANY_CELLS,
                Capability.HOST_TIER,
                Capability.TRANSFER,
            }
        )
        self._components = components(options)
        self._stamped = weights is None
        self._rows = partial(inputs.given_rows, geometry, shape, stamped=self._stamped)
        self._dsa_layers, self._kda_layers = len(shape.dsa_layers), len(shape.kda_layers)
        self._backend = options.backend
        self.memory = (
            HiSparseMemory(sizes, geometry, shape, options)
            if sizes
            else Memory(geometry, shape, options)
        )
        tier = options.host_tier
        self._tier = HostTier(tier, options, self.memory) if tier else None
        self._moving = False
        self.steps = Steps(geometry, shape, options, weights, self.memory, group)

    def submit(self, request: RequestId, tokens: Tokens) -> Admission:
        record = self.memory.admit(request, self._new(request, tokens))
        return Admission(hit=int(self.memory.table.length[record.slot]))

    def extend(self, chunks: Sequence[Chunk]) -> list[StepOutput]:
        records = self._distinct([chunk.request for chunk in chunks])
        if not records:
            return []
        stops, firsts = np.array(
            [self._span(record, chunk) for record, chunk in zip(records, chunks, strict=True)]
        ).T
        table = self.memory.table
        slots = np.array([record.slot for record in records])
        spans = zip(table.length[slots].tolist(), stops.tolist(), strict=True)
        sizes = [(stop - at, len(self.geometry.state_positions(at, stop))) for at, stop in spans]
        rows = self._rows([chunk.rows for chunk in chunks], sizes)
        self.memory.grow(slots, stops)
        outputs = self.steps.extend(records, stops, rows, firsts)
        self.memory.advance(slots, stops)
        for record in records:
            if table.length[record.slot] == table.known[record.slot]:
                self.memory.complete(record)
        return outputs

    def decode(
        self, requests: Sequence[RequestId], tokens: Tokens, rows: Rows | None = None
    ) -> list[StepOutput]:
        records = self._distinct(requests)
        appended = self._tokens(tokens)
        if len(appended) != len(records):
            raise InvalidCall(
                f"decode has {len(records)} requests and {len(appended)} tokens: give one token "
                "a request."
            )
        selects = Component.HOT in self._components
        given = self._rows([rows], [(len(records), len(records))], selects=selects)
        if not records:
            return []
        table = self.memory.table
        slots = np.array([record.slot for record in records])
        self._require_prefilled(slots)
        lengths = table.length[slots]
        self.memory.grow(slots, lengths + 1)
        table.tokens[slots, lengths] = appended
        table.known[slots] += 1
        outputs = self.steps.decode(requests, slots, given[0] if given else None)
        self.memory.advance(slots, lengths + 1)
        return outputs

    def verify(self, drafts: Sequence[Drafts]) -> list[StepOutput]:
        if Capability.VERIFY not in self.capabilities:
            raise InvalidCall(
                "verify is not offered with HiSparse: decode token by token, or build the engine "
                "without the option hisparse."
            )
        records = self._distinct([draft.request for draft in drafts])
        if not records:
            return []
        tokens = [self._tokens(draft.tokens) for draft in drafts]
        most = self.geometry.max_drafts
        for draft, given in zip(drafts, tokens, strict=True):
            if not 0 < len(given) <= most:
                raise InvalidCall(
                    f"request {draft.request} has {len(given)} drafts: give 1 to max_drafts, "
                    f"which is {most}."
                )
        sizes = [(len(given), len(given)) for given in tokens]
        rows = self._rows([draft.rows for draft in drafts], sizes)
        table = self.memory.table
        slots = np.array([record.slot for record in records])
        self._require_prefilled(slots)
        lengths, counts = table.length[slots], np.array([len(given) for given in tokens])
        self.memory.grow(slots, lengths + counts, checkpoints=False)
        for slot, length, given in zip(slots, lengths, tokens, strict=True):
            table.tokens[slot, length : length + len(given)] = given
        outputs = self.steps.verify(records, lengths + counts, rows)
        table.pending[slots] = counts
        return outputs

    def accept(self, request: RequestId, count: int) -> None:
        record = self._find(request)
        (count,) = inputs.integers(count=count)
        table, slot = self.memory.table, record.slot
        pending = int(table.pending[slot])
        if not pending:
            raise InvalidCall(f"request {request} has no pending drafts: call verify first.")
        if not 0 <= count <= pending:
            raise InvalidCall(
                f"request {request} cannot keep {count} drafts: keep 0 to the {pending} pending."
            )
        slots, stops = np.array([slot]), table.length[[slot]] + count
        self.memory.grow(slots, stops)
        if count:
            self._adopt_draft_state(record, count)
            table.known[slot] += count
            self.memory.advance(slots, stops)
        record.draft_states = None
        table.pending[slot] = 0

    def _adopt_draft_state(self, record: Request, count: int) -> None:
        """Make the state after `count` drafts the running one; keep checkpoints on the way."""
        states, length = self.memory.pools.state, int(self.memory.table.length[record.slot])
        assert record.draft_states is not None, "pending drafts have states"
        for at, slot in record.checkpoints.items():
            if at > length:
                states[slot] = record.draft_states[at - length - 1]
        states[int(self.memory.table.state[record.slot])] = record.draft_states[count - 1]

    def finish(self, request: RequestId) -> None:
        record = self._find(request)
        self.memory.share(record)
        self.memory.release(record)

    def abort(self, request: RequestId) -> None:
        self.memory.release(self._find(request))

    def retract(self, request: RequestId) -> tuple[int, ...]:
        record = self._find(request)
        table = self.memory.table
        tokens = tuple(table.tokens[record.slot, : table.known[record.slot]].tolist())
        self.finish(request)
        return tokens

    def evict(self, pages: int) -> int:
        self._require_idle()
        (pages,) = inputs.integers(pages=pages)
        return self.memory.tree.evict(pages=pages)

    def back_up(self, tokens: Tokens, *, before: Callable[[str], None] = proceed) -> int:
        return self._move(HostTier.back_up, tokens, before)

    def restore(self, tokens: Tokens, *, before: Callable[[str], None] = proceed) -> int:
        return self._move(HostTier.restore, tokens, before)

    def _move(
        self,
        move: Callable[[HostTier, Array, Callable[[str], None]], int],
        tokens: Tokens,
        before: Callable[[str], None],
    ) -> int:
        self._require_idle()
        if self._tier is None:
            raise InvalidCall("the engine has no host tier: build it with the option host_tier.")
        if not callable(before):
            raise InvalidCall("before cannot be called: pass a function that takes a string.")
        prefix = self._tokens(tokens)
        self._moving = True
        try:
            return move(self._tier, prefix, before)
        finally:
            self._moving = False

    def places(self, request: RequestId) -> Places:
        return transfers.places(self.memory, self._find(request))

    def reserve(self, request: RequestId, tokens: Tokens) -> Places:
        return transfers.reserve(self.memory, request, self._new(request, tokens))

    def adopt(self, request: RequestId) -> None:
        transfers.adopt(self.memory, self._reserved(request))

    def drop(self, request: RequestId) -> None:
        self.memory.release(self._reserved(request))

    def regions(self) -> Mapping[str, Tensor]:
        return transfers.regions(self.memory, self.shape)

    def read(
        self, request: RequestId, component: Component, layer: int, start: int, stop: int
    ) -> Tensor:
        record = self._find(request)
        layer = self._layer(component, layer)
        start, stop = inputs.integers(start=start, stop=stop)
        low, high = self._readable(record, component)
        if not low <= start <= stop <= high:
            raise InvalidCall(
                f"request {request} has {component.value} rows {low} to {high}, not {start} to "
                f"{stop}: read inside that range."
            )
        pools, slot = self.memory.pools, record.slot
        if component is Component.STATE:
            row = pools.state[int(self.memory.table.state[slot]), layer]
            return row.view(torch.uint8).clone()[None][start:stop]
        items, pages = np.arange(start, stop), self.memory.table.pages
        if component is Component.KV:
            return self.memory.read_kv(slot, layer, items)
        if component is Component.HOT:
            return self._hot.read(slot, layer, items)
        if component is Component.INDEX:
            return gather.gather_index(
                pools.index[layer],
                torch.from_numpy(addressing.read_slots(self.geometry, pages, slot, items)),
                index_page_size=self.geometry.index_page_size,
                backend=self._backend,
            )
        rows = torch.from_numpy(addressing.ring_rows(self.geometry, slot, items))
        rings = self.raw(Component.TAIL, layer).flatten(0, 1)
        return gather.gather_rows(rings, rows, backend=self._backend)

    def raw(self, component: Component, layer: int) -> Tensor:
        layer = self._layer(component, layer)
        pools = self.memory.pools
        if component is Component.KV:
            return pools.kv[layer]
        if component is Component.HOT:
            return self._hot.pools.device[layer]
        if component is Component.INDEX:
            return pools.index[layer]
        if component is Component.STATE:
            return pools.state[:, layer].view(torch.uint8)
        return pools.ring[layer].view(torch.uint8)

    def inspect(self) -> Snapshot:
        snapshot = self.memory.snapshot()
        return replace(snapshot, tier=self._tier.snapshot()) if self._tier else snapshot

    @property
    def _hot(self) -> Coordinator:
        assert isinstance(self.memory, HiSparseMemory), "no other memory has hot rows"
        return self.memory.hot

    def _require_idle(self) -> None:
        """Refuse what `before` may not call: memory that it took or freed would be missed."""
        if self._moving:
            raise InvalidCall(
                "a back_up or restore has called before and waits for it: finish it first."
            )

    def _new(self, request: RequestId, tokens: Tokens) -> Array:
        """The tokens of a request that is to be entered."""
        self._require_idle()
        inputs.integers(request=request)
        if request in self.memory.table.by_id:
            raise InvalidCall(f"request {request} runs already: choose an id that is not in use.")
        prompt = self._tokens(tokens)
        if not prompt.size:
            raise InvalidCall(f"request {request} has no tokens: give at least one.")
        return prompt

    def _find(self, request: RequestId) -> Request:
        self._require_idle()
        inputs.integers(request=request)
        record = self.memory.table.by_id.get(request)
        if record is None:
            raise InvalidCall(f"request {request} is not running: submit it first.")
        if record.reserved:
            raise InvalidCall(
                f"request {request} is reserved for a transfer whose bytes may land at any time: "
                "adopt it when all have, or drop it once none can."
            )
        return record

    def _reserved(self, request: RequestId) -> Request:
        self._require_idle()
        inputs.integers(request=request)
        record = self.memory.table.by_id.get(request)
        if record is None or not record.reserved:
            raise InvalidCall(f"request {request} is not reserved: reserve it first.")
        return record

    def _distinct(self, requests: Sequence[RequestId]) -> list[Request]:
        """The records of a step's requests, none of which may occur twice or have drafts that
        wait."""
        self._require_idle()
        records = [self._find(request) for request in requests]
        if len(set(requests)) < len(requests):
            raise InvalidCall("a request occurs twice in one step: give each its own step.")
        pending = self.memory.table.pending[[record.slot for record in records]]
        if pending.any():
            request = requests[int(pending.argmax())]
            raise InvalidCall(f"request {request} has pending drafts: call accept first.")
        return records

    def _tokens(self, tokens: Tokens) -> Array:
        """The tokens as an int64 array of the engine's own, all in the model's vocabulary."""
        return inputs.token_ids(tokens, vocab=None if self._stamped else self.shape.vocab)

    def _span(self, record: Request, chunk: Chunk) -> tuple[int, int]:
        """Where a chunk stops, and its first position whose output is wanted."""
        (stop,) = inputs.integers(stop=chunk.stop)
        table = self.memory.table
        start, known = int(table.length[record.slot]), int(table.known[record.slot])
        if not start < stop <= known:
            raise InvalidCall(
                f"request {record.id} has {start} of {known} tokens stored and cannot stop at "
                f"{stop}: choose a stop behind what is stored and not behind its tokens."
            )
        wanted = stop - 1 if chunk.outputs_from is None else chunk.outputs_from
        (first,) = inputs.integers(outputs_from=wanted)
        if not start <= first < stop:
            raise InvalidCall(
                f"request {record.id} wants outputs from {first} of a chunk from {start} to "
                f"{stop}: choose a position in it."
            )
        return stop, first

    def _require_prefilled(self, slots: Array) -> None:
        table = self.memory.table
        missing = table.known[slots] - table.length[slots]
        if missing.any():
            place = int(missing.argmax())
            record = table.by_slot[slots[place]]
            assert record is not None, "the caller has found the request"
            raise InvalidCall(
                f"request {record.id} has {missing[place]} tokens of its prompt to compute: "
                "extend it first."
            )

    def _layer(self, component: Component, layer: int) -> int:
        (layer,) = inputs.integers(layer=layer)
        if not isinstance(component, Component):
            raise InvalidCall(f"{component!r} is no component: pass a member of Component.")
        if component not in self._components:
            raise InvalidCall(
                f"the engine stores no {component.value} rows: build it with the option hisparse."
            )
        own = self._kda_layers if component is Component.STATE else self._dsa_layers
        if not 0 <= layer < own:
            raise InvalidCall(
                f"component {component.value} has {own} layers and no layer {layer}: count "
                "within the component's own layers."
            )
        return layer

    def _readable(self, record: Request, component: Component) -> tuple[int, int]:
        """First and one past the last row of a component that a request has, drafts included."""
        table, geometry = self.memory.table, self.geometry
        length = int(table.length[record.slot])
        stored = length + int(table.pending[record.slot])
        if component is Component.KV:
            return 0, stored
        if component is Component.INDEX:
            return 0, stored // geometry.kpool
        if component is Component.HOT:
            return 0, self._hot.size + 1
        if component is Component.TAIL:
            return length // geometry.kpool * geometry.kpool, stored
        return 0, 1


def factory(
    geometry: Geometry,
    shape: ModelShape,
    options: EngineOptions,
    weights: Weights | None = None,
    *,
    group: Group = ALONE,
) -> OptimizedEngine:
    """Build an engine; without weights, a stamped one.  In a `group` it is one rank, to which
    `shape` and `weights` are given whole; `OptimizedEngine.shape` is the rank's."""
    return OptimizedEngine(geometry, shape, options, weights, group)
