"""Selection, MLA and KDA: the reference's formulas in float64, query by query.

What is computed for a query may not depend on the batch or on the chunk, bit for bit, so every
query is computed alone, and every step of a recurrence ends in the stored float32.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from optimized import addressing
from optimized.dsa import DsaLayer
from optimized.kda import KdaLayer
from optimized.kernels import gather
from optimized.step import Batch
from reference import index, kda, mla, quant
from reference.geometry import Geometry, RowFormat
from reference.norms import EPSILON
from systems.components.component import Component

SELECT = Component("kernels.select", "selected groups to positions, and the tail")
DSA = Component("dsa", "index scores, and which groups are selected")
MLA = Component("kernels.mla", "attention over the selected rows")
KDA = Component("kda", "short convolution and gated delta rule, with its kernel")


def selecting(kpool: int, topk: int) -> Geometry:
    """A geometry that selects so many positions, whatever its pages."""
    return Geometry(
        kpool=kpool, physical_page_size=kpool, topk=topk, mamba_track_interval=kpool * kpool
    )


@SELECT.by("expand")
def expand(groups: Tensor, position: Tensor, *, kpool: int, width: int, backend: str) -> Tensor:
    chosen = torch.zeros(len(groups), int(groups.max()) + 2 if groups.numel() else 1)
    for query, row in enumerate(groups):
        chosen[query, row[row >= 0]] = 1
    return index.expand(chosen.bool(), position, selecting(kpool, width - kpool + 1))


@DSA.by("DsaLayer._select")
def select(
    self: DsaLayer, batch: Batch, positions: Tensor, owner: Tensor, q: Tensor, w: Tensor
) -> Tensor:
    """With groups of one position, a selection is the groups themselves."""
    kpool, most = self.geometry.kpool, self.geometry.topk_groups
    rows = [torch.zeros(0, most, dtype=torch.int64)]
    for query, (position, request) in enumerate(
        zip(positions.tolist(), owner.tolist(), strict=True)
    ):
        sees = (position + 1) // kpool
        keys, scale = _stored_keys(self, batch, request, sees)
        score = index.scores(q[query][None].double(), w[query][None].double(), keys, scale)
        rows.append(index.select(score, torch.tensor([sees - 1]), selecting(1, most)))
    return torch.cat(rows)


def _stored_keys(layer: DsaLayer, batch: Batch, request: int, groups: int) -> tuple[Tensor, Tensor]:
    """The keys [groups, index_dim] and scales [groups] that the engine reads, in float64."""
    slots = addressing.read_slots(
        layer.geometry, batch.table, batch.table_rows[request], np.arange(groups)
    )
    stored = gather.gather_index(
        layer.pools.index[layer.index],
        torch.from_numpy(slots),
        index_page_size=layer.geometry.index_page_size,
        backend=layer.backend,
    )
    return quant.decode_key(stored)


@MLA.by("mla")
def attend(
    q: Tensor, pool: Tensor, locs: Tensor, *, row_format: RowFormat, scale: float, backend: str
) -> Tensor:
    """`scale` is latent**-0.5 in the reference as well."""
    out = torch.zeros_like(q)
    for query, where in enumerate(locs):
        there = where[where != 0]
        if len(there):
            rows = quant.decode_row(pool[there], row_format, q.shape[2])
            every = torch.arange(len(there))[None]
            out[query] = mla.attend(q[query : query + 1].double(), rows, every)[0]
    return out


@KDA.by("KdaLayer._convolve")
def convolve(self: KdaLayer, inputs: Tensor, batch: Batch) -> Tensor:
    """With its activation, as the reference has it: `activate` goes without."""
    reach = self.shape.conv_width - 1
    out = torch.empty_like(inputs)
    for request, (first, stop) in enumerate(batch.row_spans):
        row = batch.states[batch.state_slots[request], self.index, self.matrix :]
        past = torch.cat((row.view(reach, -1), inputs[first:stop]))
        out[first:stop] = kda.convolve(past.double(), self.conv.t().double())[reach:]
        for mark in batch.marks_of(request):
            window = kda.window(past, reach + mark.count, self.shape)
            mark.out[self.index, self.matrix :] = window.reshape(-1)
        row.copy_(kda.window(past, len(past), self.shape).reshape(-1))
    return out


@KDA.by("KdaLayer._activate")
def activate(self: KdaLayer, conv: Tensor) -> tuple[Tensor, ...]:
    heads, key = self.shape.kda_heads, self.shape.kda_key_dim
    q, k, v = conv.double().tensor_split((heads * key, 2 * heads * key), dim=1)
    q, k = (_unit(rows.reshape(-1, heads, key)) for rows in (q, k))
    value = v.reshape(-1, heads, self.shape.kda_value_dim)
    return (q * key**-0.5).float(), k.float(), value.float()


def _unit(rows: Tensor) -> Tensor:
    return rows / (rows.square().sum(-1, keepdim=True) + EPSILON).sqrt()


@KDA.by("KdaLayer._scan")
def scan(
    self: KdaLayer, batch: Batch, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
) -> Tensor:
    shape = self.shape.kda_heads, self.shape.kda_key_dim, self.shape.kda_value_dim
    out = torch.empty_like(v)
    for request, (first, stop) in enumerate(batch.row_spans):
        row = batch.states[batch.state_slots[request], self.index, : self.matrix]
        marks = {mark.count: mark for mark in batch.marks_of(request)}
        for at in range(first, stop):
            streams = (stream[at].double() for stream in (q, k, v, decay, beta))
            out[at], state = step(row.view(shape), kda.Steps(*streams))
            row.copy_(state.reshape(-1))
            if at - first + 1 in marks:
                marks[at - first + 1].out[self.index, : self.matrix] = row
    return out.flatten(1)


def step(state: Tensor, now: kda.Steps) -> tuple[Tensor, Tensor]:
    """Output [heads, value] and new state of one step behind `state` [heads, key, value].

    The reference's recurrence begins with an empty state, so `state` is written into it first:
    a key of one channel alone, without decay and at full strength, puts its value in that row.
    """
    heads, key, _ = state.shape
    unit = torch.eye(key, dtype=torch.float64)[:, None].expand(key, heads, key)
    before = kda.Steps(
        q=torch.zeros_like(unit),
        k=unit,
        v=state.double().transpose(0, 1),
        a=torch.ones_like(unit),
        beta=unit.new_ones(key, heads),
    )
    joined = (torch.cat([then, this[None]]) for then, this in zip(before, now, strict=True))
    out, states = kda.recur(kda.Steps(*joined), (key + 1,))
    return out[key], states[key + 1]
