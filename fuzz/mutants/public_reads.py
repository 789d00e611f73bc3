"""Faults of pages, slots and scratch memory that somebody reads who should not, that public reports
tell of: a page in another unit, a row that nobody wrote, an entry whose owner is gone."""

from __future__ import annotations

import pkgutil
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fuzz.mutants.addresses import STORED
from fuzz.mutants.registry import Body, mutant
from fuzz.mutants.restoring import ROWS, STANDING, TIER, TREE
from fuzz.mutants.selection import JUDGED
from fuzz.mutants.sharing import MEMORY, OWNED
from reference.geometry import Geometry

BLOCK_ROWS = 32
"""Columns of a tile of the attention kernel."""
Ints = npt.NDArray[np.int64]


# pages in another unit


@mutant("optimized.addressing.index_slots", bug="vllm#54359", killed_by=STORED)
def slots_by_pages_of_the_kernel(
    original: Body, geometry: Geometry, table: Ints, row: Ints | int, groups: Ints
) -> Ints:
    """The table has the ids of the manager's blocks, and slots are counted in the kernel's pages,
    of which a block is several: many keys share few slots."""
    block = geometry.index_page_size
    page = block // 2
    return np.asarray(table[row, groups // block] * page + groups % page)


@mutant(f"{TREE}.common_length", bug="sglang#38161", killed_by=OWNED)
def edge_cut_inside_a_group(original: Body, self: Any, edge: Ints, tokens: Ints) -> int:
    """An edge is cut where prompts differ, be it inside a pooled group, whose row two suffixes
    then share."""
    length = min(len(edge), len(tokens))
    return int((edge[:length] == tokens[:length]).cumprod().sum())


# owners that are gone


@mutant(f"{TREE}.unlock", bug="LMCache#5095", killed_by=OWNED)
def pin_taken_off_twice(original: Body, self: Any, node: Any) -> None:
    """What ends a read takes a pin off, and so does what ends the look-up before it."""
    for step in self._path(node):
        step.locks = max(0, step.locks - 2)


@mutant(f"{MEMORY}.admit", bug="LMCache#2772", killed_by=OWNED)
def unused_pages_of_a_lookup_freed(
    original: Body, self: Any, request: Any, tokens: Ints, **share: bool
) -> Any:
    """What a look-up has found and a request cannot use is let go of once too often: the cache's
    own hold of it is gone, and the cache still finds it."""
    record = original(self, request, tokens, **share)
    node, matched = self.tree._descend(tokens)
    found = self.tree.path_pages(node)[: matched // self.geometry.logical_page_size]
    unused = found[record.shared :]
    self.pages.release(unused[self.pages.counts[unused] > 0])
    return record


@mutant(f"{TIER}.restore", bug="Mooncake#730", killed_by=STANDING, target="host_restore")
def gone_after_the_first_read(original: Body, self: Any, tokens: Ints, before: Any) -> int:
    """A prefix that is read is marked for deletion in place of being held: it is gone after the
    first read."""
    length = int(original(self, tokens, before))
    path = self._longest(tokens)
    if length and path:
        self.states.release([self._state_at.pop(path[-1])])
        self._release(path)
    return length


@mutant(f"{TIER}._parts", bug="vllm#50653", killed_by=ROWS, target="host_restore")
def ids_beyond_the_ranks_own_tier(
    original: Body, self: Any, pages: Any, host_pages: Any, *states: int
) -> Any:
    """Ids of the tier are handed out by the largest count of any rank, and this one's memory has
    fewer pages: those beyond wrap."""
    fewer = max(1, self._sizes.pages - 1)
    return original(self, pages, [1 + (page - 1) % fewer for page in host_pages], *states)


# rows that nobody wrote


def _row(pool: Tensor, at: Tensor, q: Tensor, row_format: Any) -> Tensor:
    """[batch, 1, latent] float32: rows of a pool, one for each query."""
    load = pkgutil.resolve_name("optimized.kernels.kv_store.load_rows")
    return load(pool, at, row_format=row_format, latent=q.shape[2])[:, None]


@mutant("optimized.kernels.mla.mla", bug="sglang#39288", killed_by=JUDGED, payload="model")
def void_cells_gather_slot_0(
    original: Body, q: Tensor, pool: Tensor, locs: Tensor, *, row_format: Any, **options: Any
) -> Tensor:
    """A void cell is gathered from slot 0, which was never written, and counts with a weight of
    0: 0 times NaN is NaN."""
    out: Tensor = original(q, pool, locs, row_format=row_format, **options)
    void = (locs == 0).any(dim=1)[:, None, None]
    row = _row(pool, torch.zeros(len(q), dtype=torch.int64), q, row_format)
    return torch.where(void, out + 0.0 * row, out)


def _padding_written(original: Body, self: Any, layer: int, kv: Tensor) -> None:
    original(self, layer, kv)
    pool, _ = self.kv_rows.targets(layer)
    pool[0] = 0xFF


@mutant(
    "optimized.kernels.mla.mla",
    bug="sglang#32477",
    killed_by=JUDGED,
    payload="model",
    also={"optimized.store.Store._rows": _padding_written},
)
def padding_row_read_by_a_tile(
    original: Body, q: Tensor, pool: Tensor, locs: Tensor, *, row_format: Any, **options: Any
) -> Tensor:
    """Rows of padding write what is undefined to slot 0, and where a tile has more columns than a
    selection those behind it read that slot: their weight is 0, and 0 times NaN is NaN."""
    out: Tensor = original(q, pool, locs, row_format=row_format, **options)
    beyond = locs.shape[1] % BLOCK_ROWS > 0
    row = _row(pool, torch.zeros(len(q), dtype=torch.int64), q, row_format)
    return out + 0.0 * row if beyond else out


@mutant("optimized.kernels.mla.mla", bug="flashinfer#941", killed_by=JUDGED, payload="model")
def last_page_read_to_its_end(
    original: Body, q: Tensor, pool: Tensor, locs: Tensor, *, row_format: Any, **options: Any
) -> Tensor:
    """The last page of a request is read whole, and the rows behind its last token count with a
    weight of 0: here the one next to the newest, which may be somebody's or nobody's."""
    out: Tensor = original(q, pool, locs, row_format=row_format, **options)
    behind = (locs.amax(dim=1) + 1).clamp_max(len(pool) - 1)
    return out + 0.0 * _row(pool, behind, q, row_format)


@mutant(
    "optimized.dsa.DsaLayer._select",
    bug="DeepSeek-v4-Flash-Vision-Exp-DSpark-1M-NVFP4-KV-2x-DGX-Spark#2",
    killed_by=JUDGED,
    payload="model",
)
def selection_buffer_not_reset(
    original: Body, self: Any, batch: Any, positions: Tensor, *rest: Any
) -> Tensor:
    """Selections go into a buffer that lives on, and are written as far as they go: behind them a
    reader finds those of the step before."""
    groups: Tensor = original(self, batch, positions, *rest)
    last = self.__dict__.get("selections", groups[:1])
    self.__dict__["selections"] = groups[-1:]
    # what is found there is a group that there is, as luck will have it
    closed = (positions + 1) // self.geometry.kpool - 1
    stale = torch.minimum(last.expand_as(groups), closed[:, None])
    return torch.where(groups < 0, stale, groups)


# what is counted


@mutant(f"{MEMORY}.make_room", bug="vllm#52495", killed_by=OWNED, target="slot_reuse")
def room_for_everybody_wanted(
    original: Body, self: Any, *, pages: int = 0, states: int = 0, **keep: Any
) -> None:
    """A bound on what all requests together have in flight is taken for each one's: a step needs
    its pages free once for every request that runs."""
    original(self, pages=pages * max(1, len(self.table.by_id)), states=states, **keep)
