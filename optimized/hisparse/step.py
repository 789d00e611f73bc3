"""One decode step under HiSparse: where its new rows go, and where its selected rows are."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from optimized.hisparse.backups import Backups
from optimized.hisparse.pools import HotPools
from optimized.kernels import swap_in
from optimized.kernels.swap_in import SwapPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class HotStep:
    """The `KvRows` of a decode of some requests, each with one new position.

    For each DSA layer in turn: a store to `targets`, then `locate`; or `follow`, where the layer
    uses the index of another.

    Fields:
        pools, backups: of the coordinator, and
        tags, lru: [dsa_layers, slots, H] its tables, updated in place.
        slots: [batch] int64, request slots.
        length: [batch] int64, positions, the new one included.
        slot_rows: [batch, H + 1] int64, device row of each slot and of the newest position.
        host_rows: [batch, longest] int64, host row of each position; -1 where there is none.
        newest: [batch] int64, device row of each new position.
        missed: [batch] int64 for each layer so far, the rows that it swapped in.
    """

    pools: HotPools
    backups: Backups
    tags: Tensor
    lru: Tensor
    slots: Tensor
    length: Tensor
    slot_rows: Tensor
    host_rows: Tensor
    newest: Tensor
    backend: str
    missed: list[Tensor] = field(default_factory=list)

    def targets(self, layer: int) -> tuple[Tensor, Tensor]:
        """The rows of the new positions, once no backup needs what is there."""
        self.backups.progress()
        self.backups.wait()
        return self.pools.device[layer], self.newest

    def sources(self, layer: int, owner: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
        assert len(owner) == len(self.slots), "a decode has one query a request"
        self.backups.progress()
        # padding is row 0 of the device
        return self.pools.device[layer], self.locate(layer, selected).rows.clamp_min(0)

    def misses(self) -> Tensor:
        return torch.stack(self.missed)

    def locate(self, layer: int, selection: Tensor) -> SwapPlan:
        """Make what a layer selected resident; [batch, width] int64 positions.  The plan's rows
        are device rows of the layer, -1 for void cells."""
        tags, lru = (table[layer].index_select(0, self.slots) for table in (self.tags, self.lru))
        device, host = self.pools.of_layer(layer)
        plan = swap_in.swap_in(
            selection,
            self.length,
            tags,
            lru,
            self.slot_rows,
            self.host_rows,
            host,
            device,
            backend=self.backend,
        )
        self.tags[layer].index_copy_(0, self.slots, tags)
        self.lru[layer].index_copy_(0, self.slots, lru)
        self.missed.append(plan.misses)
        return plan

    def follow(self, layer: int, plan: SwapPlan) -> None:
        """Make what a plan's layer selected resident in another; the plan's rows are its rows
        too."""
        device, host = self.pools.of_layer(layer)
        swap_in.replay(plan, self.slot_rows, self.host_rows, host, device, backend=self.backend)
        self.missed.append(plan.misses)
