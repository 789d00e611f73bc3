"""Where the KV rows of a step are: those that it stores, and those that its queries selected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from optimized import addressing
from optimized.addressing import Array
from reference.geometry import Geometry


class KvRows(Protocol):
    """The rows of one step.  Layers are counted among the DSA layers; row 0 of every pool is
    padding."""

    def targets(self, layer: int) -> tuple[Tensor, Tensor]:
        """A pool [rows, row bytes], and [positions] int64: the row of each position to store."""

    def sources(self, layer: int, owner: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
        """A pool, and the row in it of each selected position once the step has stored its own.

        Args:
            owner: [queries] int64, the request of each query by its place in the batch.
            selected: [queries, width] int64 positions; the rows of void cells are 0.
        """

    def misses(self) -> Tensor | None:
        """[dsa_layers, requests] int64: rows copied to make room for selections; None where every
        row stays where it is."""


@dataclass(frozen=True, slots=True)
class PagedRows:
    """All rows of all requests in one pool, found by page table.

    Fields:
        pool: [dsa_layers, rows, row bytes] uint8.
        row_of: the pool's rows of locs; padding stays padding.
        table: [.., logical pages] page table, of which `table_rows` are the requests' rows.
        stored: [positions] int64, the rows to store.
    """

    geometry: Geometry
    pool: Tensor
    row_of: Callable[[Array], Array]
    table: Array
    table_rows: Array
    stored: Tensor

    def targets(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.pool[layer], self.stored

    def sources(self, layer: int, owner: Tensor, selected: Tensor) -> tuple[Tensor, Tensor]:
        rows, chosen = self.table_rows[owner.numpy()][:, None], selected.numpy()
        locs = addressing.locs(self.geometry, self.table, rows, np.maximum(chosen, 0))
        return self.pool[layer], torch.from_numpy(self.row_of(np.where(chosen >= 0, locs, 0)))

    def misses(self) -> None:
        return None
