"""What a step reads and writes, worked out on the host before it runs.

An extend plan is made for its chunk.  Decode and verify plans live in buffers of fixed address
that `refresh` fills in place before each step, as a replayed CUDA graph needs it: the step reads
the buffers alone, the page table among them, and rows beyond the batch point at padding.  That
every one of them is refreshed is what SGLang #42178 had to repair for target verify.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from optimized import addressing
from optimized.addressing import Array
from reference.geometry import Geometry


@dataclass(frozen=True, slots=True)
class Spans:
    """The positions [start, stop) of each of several requests, laid end to end.

    Fields:
        owner, value: for each item, its request's place in the batch, and the item itself.
        first: for each request, the place of its first item.
    """

    owner: Array
    value: Array
    first: Array

    @classmethod
    def between(cls, starts: Array, stops: Array) -> Spans:
        """All integers of [start, stop), request by request."""
        if len(starts) == 1:
            # most chunks are of one request, and need none of the arithmetic below
            value = np.arange(starts[0], stops[0])
            return cls(np.zeros(len(value), dtype=np.int64), value, np.zeros(1, dtype=np.int64))
        counts = stops - starts
        first = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(counts)), counts)
        return cls(owner, np.arange(len(owner)) + (starts - first)[owner], first)


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """Stores of a step that runs several positions a request: an extend or a verify.

    Fields:
        owner, positions: [rows] request's place in the batch, and position, of each row.
        locs: [rows] where the KV rows go.
        index_slots: [groups] where the pooled keys of the closing groups go.
        sources: [groups, kpool] where their members are: a row of the flattened tail rings, or
            behind those a row of the chunk.
        ring_rows, ring_sources: [kept] ring rows to write afterwards, and from which row.
    """

    owner: Tensor
    positions: Tensor
    locs: Tensor
    index_slots: Tensor
    sources: Tensor
    ring_rows: Tensor
    ring_sources: Tensor


def plan_chunk(
    geometry: Geometry,
    table: Array,
    rows: Array,
    rings: Array,
    starts: Array,
    stops: Array,
    *,
    ring_slots: int,
    keep_from: Array,
) -> ChunkPlan:
    """Plan the positions [start, stop) of each request.

    Args:
        table: [.., logical pages] page table, of which `rows` are the requests' rows.
        rings: the requests' ring slots, of `ring_slots` there are.
        keep_from: first position of each request that its ring must hold afterwards.
    """
    span = Spans.between(starts, stops)
    groups = Spans.between(*closing_groups(geometry, starts, stops))
    kept = Spans.between(np.maximum(starts, keep_from), stops)
    members = groups.value[:, None] * geometry.kpool + np.arange(geometry.kpool)
    owner = groups.owner[:, None]
    behind_rings = ring_slots * geometry.ring_size + span.first - starts
    sources = np.where(
        members >= starts[owner],
        behind_rings[owner] + members,
        addressing.ring_rows(geometry, rings[owner], members),
    )
    plan = (
        span.owner,
        span.value,
        addressing.locs(geometry, table, rows[span.owner], span.value),
        addressing.index_slots(geometry, table, rows[groups.owner], groups.value),
        sources,
        addressing.ring_rows(geometry, rings[kept.owner], kept.value),
        (span.first - starts)[kept.owner] + kept.value,
    )
    return ChunkPlan(*map(torch.from_numpy, plan))


def closing_groups(geometry: Geometry, starts: Array, stops: Array) -> tuple[Array, Array]:
    """First and one past the last of the groups that close in each [start, stop)."""
    return (
        addressing.closed_groups(geometry, starts),
        addressing.closed_groups(geometry, stops),
    )


def closing_slots(geometry: Geometry, table: Array, rows: Array, positions: Array) -> Array:
    """Index slot of the group that closes at each position; padding where none does."""
    groups = addressing.closed_groups(geometry, positions)
    closes = addressing.visible_groups(geometry, positions) > groups
    return np.where(closes, addressing.index_slots(geometry, table, rows, groups), 0)


class ReplayTable:
    """Page table of a batch at a fixed address: row i is the batch's i-th request."""

    def __init__(self, *, capacity: int, width: int) -> None:
        self.pages = np.zeros((capacity, width), dtype=np.int64)

    def refresh(self, table: Array, slots: Array, width: int) -> None:
        """Copy the first `width` columns of the batch's rows in place."""
        self.pages[: len(slots), :width] = table[slots, :width]


class DecodePlan:
    """Stores of a step that appends one position to each request.

    Fields:
        table: [capacity, logical pages] page table of the batch.
        owner, rings, positions, locs, index_slots, states: [batch] views of the buffers: place in
            the batch, ring slot, new position, where its KV row and the pooled key that it
            closes go (padding if none), and state slot.
    """

    def __init__(self, geometry: Geometry, *, capacity: int, width: int) -> None:
        self.geometry = geometry
        self.table = ReplayTable(capacity=capacity, width=width)
        self._host = np.zeros((6, capacity), dtype=np.int64)
        self._device = torch.from_numpy(self._host)
        self._view(capacity)

    def refresh(self, table: Array, rings: Array, positions: Array, states: Array) -> None:
        """Fill the buffers for a batch, whose rows in `table` are its ring slots."""
        batch = len(rings)
        width = int(addressing.pages_for(self.geometry, positions.max() + 1))
        self.table.refresh(table, rings, width)
        pages, owner = self.table.pages, np.arange(batch)
        self._host[:, batch:] = 0
        self._host[:, :batch] = (
            owner,
            rings,
            positions,
            addressing.locs(self.geometry, pages, owner, positions),
            closing_slots(self.geometry, pages, owner, positions),
            states,
        )
        self._view(batch)

    def _view(self, batch: int) -> None:
        owner, rings, positions, locs, index_slots, states = self._device[:, :batch].unbind()
        self.owner, self.rings, self.positions = owner, rings, positions
        self.locs, self.index_slots, self.states = locs, index_slots, states


class VerifyPlan:
    """Stores of a step that runs up to max_drafts positions of each request: `chunk` views
    buffers of fixed address.  All drafts go to the ring, since any of them may be the last one
    accepted."""

    def __init__(self, geometry: Geometry, *, capacity: int, width: int) -> None:
        self.geometry = geometry
        self.table = ReplayTable(capacity=capacity, width=width)
        rows = capacity * geometry.max_drafts
        groups = capacity * (geometry.ring_size - 1) // geometry.kpool
        sizes: dict[str, tuple[int, ...]] = dict.fromkeys(ChunkPlan.__dataclass_fields__, (rows,))
        sizes |= {"index_slots": (groups,), "sources": (groups, geometry.kpool)}
        self._host = {name: np.zeros(size, dtype=np.int64) for name, size in sizes.items()}
        self.chunk = _viewed(self._host)

    def refresh(
        self, table: Array, rings: Array, starts: Array, stops: Array, *, ring_slots: int
    ) -> None:
        """Fill the buffers for a batch, whose rows in `table` are its ring slots."""
        width = int(addressing.pages_for(self.geometry, stops.max()))
        self.table.refresh(table, rings, width)
        fresh = plan_chunk(
            self.geometry,
            self.table.pages,
            np.arange(len(rings)),
            rings,
            starts,
            stops,
            ring_slots=ring_slots,
            keep_from=starts,
        )
        self.chunk = _viewed(
            {
                name: _fill(buffer, getattr(fresh, name).numpy())
                for name, buffer in self._host.items()
            }
        )


def _fill(buffer: Array, values: Array) -> Array:
    """Write `values` to the front of a buffer, padding behind; returns the front's view."""
    front = buffer[: len(values)]
    front[...] = values
    buffer[len(values) :] = 0
    return front


def _viewed(arrays: Mapping[str, Array]) -> ChunkPlan:
    """The plan whose tensors share the memory of these arrays."""
    return ChunkPlan(**{name: torch.from_numpy(array) for name, array in arrays.items()})
