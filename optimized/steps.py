"""The three steps, once the engine has checked a call and found its memory: extend, decode and
verify, each a plan, the stores that it names and, with a model, a forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from optimized import addressing, planner
from optimized.addressing import Array
from optimized.groups import Group
from optimized.kernels import gather
from optimized.kv_rows import KvRows
from optimized.memory.manager import Memory
from optimized.memory.requests import Request
from optimized.model import Model
from optimized.planner import ChunkPlan, DecodePlan, VerifyPlan
from optimized.step import Batch, Mark
from optimized.store import Store
from reference.contract import EngineOptions, RequestId, Rows, StepOutput, Weights
from reference.geometry import Geometry, ModelShape

Plan = TypeVar("Plan", DecodePlan, VerifyPlan)


class Steps:
    """Runs steps over `memory`; stamped ones where `weights` is None."""

    def __init__(
        self,
        geometry: Geometry,
        shape: ModelShape,
        options: EngineOptions,
        weights: Weights | None,
        memory: Memory,
        group: Group,
    ) -> None:
        self.geometry = geometry
        self.memory = memory
        self.max_requests = options.max_requests
        self.backend = options.backend
        self.ape = _ape(geometry, shape, options, weights)
        self.model = (
            None
            if weights is None
            else Model(geometry, shape, weights, memory.pools, group, options.backend)
        )
        size = {"capacity": self.max_requests, "width": memory.table.pages.shape[1]}
        self.decode_plan = DecodePlan(geometry, **size)
        self.verify_plan = VerifyPlan(geometry, **size)
        width = geometry.selection_width
        self._no_selection = torch.zeros(len(shape.dsa_layers), 0, width, dtype=torch.int64)
        self._no_logits = torch.zeros(0, shape.vocab)

    def extend(
        self,
        records: Sequence[Request],
        stops: Array,
        rows: Sequence[Rows] | None,
        outputs_from: Array,
    ) -> list[StepOutput]:
        """Prefill each request up to its stop."""
        table, slots = self.memory.table, _slots(records)
        starts = table.length[slots]
        plan = planner.plan_chunk(
            self.geometry,
            table.pages,
            slots,
            slots,
            starts,
            stops,
            ring_slots=self.max_requests + 1,
            keep_from=addressing.tail_start(self.geometry, stops),
        )
        kv_rows = self.memory.paged_rows(table.pages, slots, plan.locs)
        store = self._store(kv_rows)
        states, running = self.memory.pools.state, table.state[slots]
        spans = zip(starts.tolist(), stops.tolist(), strict=True)
        kept = [self.geometry.state_positions(*span)[:-1] for span in spans]
        if rows is not None:
            _stamp_chunk(store, plan, rows)
            for record, lengths, last, given in zip(records, kept, running, rows, strict=True):
                targets = [*(record.checkpoints[length] for length in lengths), int(last)]
                states.index_copy_(0, torch.from_numpy(np.array(targets)), given.state)
            return self._silent([record.id for record in records], starts)
        batch = Batch(
            tokens=self._tokens(slots, plan),
            owner=plan.owner,
            positions=plan.positions,
            starts=starts,
            stops=stops,
            outputs_from=outputs_from,
            table=table.pages,
            table_rows=slots,
            kv_rows=kv_rows,
            states=states,
            state_slots=torch.from_numpy(running),
            marks=[
                Mark(place, length - int(starts[place]), states[record.checkpoints[length]])
                for place, record in enumerate(records)
                for length in kept[place]
            ],
            write=partial(store.chunk, plan),
        )
        return self._forward([record.id for record in records], batch)

    def decode(
        self, requests: Sequence[RequestId], slots: Array, rows: Rows | None
    ) -> list[StepOutput]:
        """Run the token behind the stored positions of each request."""
        table, pools = self.memory.table, self.memory.pools
        positions = table.length[slots]
        plan = self.decode_plan = self._fitted(self.decode_plan)
        plan.refresh(table.pages, slots, positions, table.state[slots])
        kv_rows = self.memory.decode_rows(plan, slots)
        store = self._store(kv_rows)
        if rows is not None:
            attended = self._stamp_decode(store, plan, rows)
            pools.state.index_copy_(0, plan.states, rows.state)
            return _swapped(self._silent(requests, positions), kv_rows.misses(), attended)
        batch = Batch(
            tokens=self._tokens(slots, plan),
            owner=plan.owner,
            positions=plan.positions,
            starts=positions,
            stops=positions + 1,
            outputs_from=positions,
            table=plan.table.pages,
            table_rows=np.arange(len(slots)),
            kv_rows=kv_rows,
            states=pools.state,
            state_slots=plan.states,
            marks=[],
            write=partial(store.decode, plan),
        )
        outputs = self._forward(requests, batch)
        return _swapped(outputs, kv_rows.misses())

    def verify(
        self, records: Sequence[Request], stops: Array, rows: Sequence[Rows] | None
    ) -> list[StepOutput]:
        """Run the drafts behind the stored positions of each request, whose running state stays
        as it is: the states after each draft wait in its record."""
        table, slots = self.memory.table, _slots(records)
        starts = table.length[slots]
        plan = self.verify_plan = self._fitted(self.verify_plan)
        plan.refresh(table.pages, slots, starts, stops, ring_slots=self.max_requests + 1)
        kv_rows = self.memory.paged_rows(plan.table.pages, np.arange(len(slots)), plan.chunk.locs)
        store = self._store(kv_rows)
        requests = [record.id for record in records]
        if rows is not None:
            _stamp_chunk(store, plan.chunk, rows)
            for record, given in zip(records, rows, strict=True):
                record.draft_states = given.state.clone()
            return self._silent(requests, starts)
        scratch = self.memory.pools.state[torch.from_numpy(table.state[slots])]
        marks = []
        for place, (record, drafts) in enumerate(zip(records, stops - starts, strict=True)):
            record.draft_states = scratch.new_empty(int(drafts), *scratch.shape[1:])
            marks += [Mark(place, i + 1, out) for i, out in enumerate(record.draft_states)]
        batch = Batch(
            tokens=self._tokens(slots, plan.chunk),
            owner=plan.chunk.owner,
            positions=plan.chunk.positions,
            starts=starts,
            stops=stops,
            outputs_from=starts,
            table=plan.table.pages,
            table_rows=np.arange(len(slots)),
            kv_rows=kv_rows,
            states=scratch,
            state_slots=torch.arange(len(slots)),
            marks=marks,
            write=partial(store.chunk, plan.chunk),
        )
        return self._forward(requests, batch)

    def _store(self, kv_rows: KvRows) -> Store:
        """The store path of one step."""
        return Store(self.geometry, self.memory.pools, self.ape, kv_rows, self.backend)

    def _stamp_decode(self, store: Store, plan: DecodePlan, rows: Rows) -> Tensor | None:
        """Store the rows of a stamped decode, and read what it is told to select: [dsa_layers,
        requests, selection_width, row bytes] uint8, 0 in void cells."""
        key, gate = rows.key.bfloat16(), rows.gate.bfloat16()
        attended = []
        for layer, kv in enumerate(rows.kv):
            store.decode(plan, layer, kv, key[layer], gate[layer])
            if rows.selected is None:
                continue
            pool, at = store.kv_rows.sources(layer, plan.owner, rows.selected[layer])
            found = gather.gather_rows(pool, at.flatten(), backend=self.backend)
            attended.append(found.view(*at.shape, -1).masked_fill_((at == 0)[..., None], 0))
        return torch.stack(attended) if attended else None

    def _tokens(self, slots: Array, plan: ChunkPlan | DecodePlan) -> Tensor:
        """[rows] int64: the tokens of a plan's rows."""
        owner, positions = plan.owner.numpy(), plan.positions.numpy()
        return torch.from_numpy(self.memory.table.tokens[slots[owner], positions])

    def _forward(self, requests: Sequence[RequestId], batch: Batch) -> list[StepOutput]:
        assert self.model is not None, "a stamped step has no forward"
        # without views and versions to track, the many small operators cost half
        with torch.inference_mode():
            computed = self.model.forward(batch)
        selected, logits = (result.clone() for result in computed)
        outputs = (batch.stops - batch.outputs_from).tolist()
        return [
            StepOutput(request=request, start=start, selected=choice, logits=logit)
            for request, start, choice, logit in zip(
                requests,
                batch.outputs_from.tolist(),
                selected.split(outputs, dim=1),
                logits.split(outputs),
                strict=True,
            )
        ]

    def _silent(self, requests: Sequence[RequestId], starts: Array) -> list[StepOutput]:
        """What a stamped step returns."""
        return [
            StepOutput(
                request=request,
                start=start,
                selected=self._no_selection,
                logits=self._no_logits,
            )
            for request, start in zip(requests, starts.tolist(), strict=True)
        ]

    def _fitted(self, plan: Plan) -> Plan:
        """The plan, with new buffers where the page table has outgrown its own."""
        width = self.memory.table.pages.shape[1]
        if plan.table.pages.shape[1] == width:
            return plan
        return type(plan)(self.geometry, capacity=self.max_requests, width=width)


def _stamp_chunk(store: Store, plan: ChunkPlan, rows: Sequence[Rows]) -> None:
    """Store the rows of a stamped extend or verify."""
    kv, key, gate = (
        parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        for parts in ([r.kv for r in rows], [r.key for r in rows], [r.gate for r in rows])
    )
    key, gate = key.bfloat16(), gate.bfloat16()
    for layer in range(len(kv)):
        store.chunk(plan, layer, kv[layer], key[layer], gate[layer])


def _swapped(
    outputs: list[StepOutput], misses: Tensor | None, attended: Tensor | None = None
) -> list[StepOutput]:
    """The outputs of a decode with what each request swapped in and found, if anything can be."""
    if misses is None:
        return outputs
    found = [None] * len(outputs) if attended is None else attended.split(1, dim=1)
    swapped = zip(outputs, misses.split(1, dim=1), found, strict=True)
    return [replace(output, misses=some, attended=rows) for output, some, rows in swapped]


def _slots(records: Sequence[Request]) -> Array:
    return np.array([record.slot for record in records], dtype=np.int64)


def _ape(
    geometry: Geometry, shape: ModelShape, options: EngineOptions, weights: Weights | None
) -> Tensor:
    """[dsa_layers, kpool, index_dim] float32: position weights of the pooling."""
    zeros = torch.zeros(len(shape.dsa_layers), geometry.kpool, shape.index_dim)
    if weights is not None:
        for i, layer in enumerate(shape.dsa_layers):
            zeros[i] = weights[f"layers.{layer}.ape"]
        return zeros
    return zeros if options.ape is None else options.ape.float().clone()
