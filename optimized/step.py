"""What the model is told of one step: whose rows it runs, and where their memory is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from optimized.addressing import Array
from optimized.kv_rows import KvRows


@dataclass(frozen=True, slots=True)
class Mark:
    """The KDA state of the batch's `request` after `count` of its rows, to be written into
    `out` [kda_layers, state_width]."""

    request: int
    count: int
    out: Tensor


@dataclass(frozen=True)
class Batch:
    """Rows of several requests, request by request.

    Fields:
        tokens, owner, positions: [rows] int64: token id, request's place in the batch, position.
        starts, stops: [requests] positions of each request that run.
        outputs_from: [requests] first position whose selection and logits are wanted.
        table: [requests or more, logical pages] page table; `table_rows` names the requests'.
        kv_rows: where attention finds the rows of a selection.
        states: [slots, kda_layers, state_width] float32, advanced in place at `state_slots`,
            one for each request.
        marks: states to keep on the way.
        write: stores (DSA layer, kv, key, gate) of all rows before anything reads them.
    """

    tokens: Tensor
    owner: Tensor
    positions: Tensor
    starts: Array
    stops: Array
    outputs_from: Array
    table: Array
    table_rows: Array
    kv_rows: KvRows
    states: Tensor
    state_slots: Tensor
    marks: Sequence[Mark]
    write: Callable[[int, Tensor, Tensor, Tensor], None]

    @cached_property
    def wanted(self) -> Tensor:
        """[outputs] int64: the rows whose selection and logits are wanted."""
        first = torch.from_numpy(self.outputs_from)[self.owner]
        return (self.positions >= first).nonzero()[:, 0]

    @property
    def counts(self) -> Array:
        """Rows of each request."""
        return self.stops - self.starts

    @cached_property
    def row_spans(self) -> list[tuple[int, int]]:
        """First and one past the last row of each request."""
        stops = np.cumsum(self.counts)
        return list(zip((stops - self.counts).tolist(), stops.tolist(), strict=True))

    @cached_property
    def by_time(self) -> tuple[Tensor, list[int], Sequence[Tensor]]:
        """Rows in the order of a recurrence: all first rows, all second rows, and so on; how
        many rows each time has; and their state slots."""
        first = np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        time = np.arange(len(first)) - first
        order = torch.from_numpy(np.argsort(time, kind="stable"))
        running = np.bincount(time).tolist()
        return order, running, self.state_slots[self.owner[order]].split(running)

    def marks_of(self, request: int) -> list[Mark]:
        """The marks of one request."""
        return self._marks_by_request.get(request, [])

    def marks_at(self, count: int) -> list[Mark]:
        """The marks after `count` rows of their request."""
        return self._marks_by_count.get(count, [])

    @cached_property
    def _marks_by_request(self) -> dict[int, list[Mark]]:
        return _grouped(self.marks, lambda mark: mark.request)

    @cached_property
    def _marks_by_count(self) -> dict[int, list[Mark]]:
        return _grouped(self.marks, lambda mark: mark.count)


def _grouped(marks: Sequence[Mark], key: Callable[[Mark], int]) -> dict[int, list[Mark]]:
    groups = defaultdict(list)
    for mark in marks:
        groups[key(mark)].append(mark)
    return groups
