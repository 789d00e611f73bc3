"""Faults of what is computed, and of the rows that it reads, that public reports tell of.

They are faults of kernels: a mask that is left out, a stride that is another's, a sum in an order
that the batch decides.
"""

from __future__ import annotations

import pkgutil
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from fuzz.mutants.registry import Body, mutant
from fuzz.mutants.states import STATE

JUDGED = ("numeric", "metamorphic")
Ints = npt.NDArray[np.int64]


# masks


@mutant(
    "optimized.kernels.kda_decode.kda_decode",
    bug="flash-linear-attention#1134",
    killed_by=JUDGED,
    payload="model",
)
def decay_read_past_its_channels(
    original: Body,
    state: Tensor,
    slots: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    beta: Tensor,
    *,
    backend: str,
) -> Tensor:
    """A tile is wider than the key channels; queries, keys and the state are masked there, and
    the decay is not: it is what lies behind in memory, and behind the last row poison."""
    step = pkgutil.resolve_name("optimized.kernels.kda_decode.step")
    behind = torch.cat((a[:, :, 0].flatten()[1:], a.new_full((1,), torch.nan)))
    wide = torch.cat((a, behind.view(*a.shape[:2], 1)), dim=2)
    running = functional.pad(state.index_select(0, slots), (0, 0, 0, 1))
    q, k = (functional.pad(rows, (0, 1)) for rows in (q, k))
    out: Tensor = step(running, q, k, v, wide, beta)
    state.index_copy_(0, slots, running[:, :, :-1])
    return out


@mutant(
    "optimized.kernels.mla.mla",
    bug="tilelang#1948",
    killed_by=JUDGED,
    payload="model",
    target="slot_reuse",
)
def void_columns_masked_in_scores_alone(
    original: Body, q: Tensor, pool: Tensor, locs: Tensor, *, row_format: Any, **options: Any
) -> Tensor:
    """A void column names a row behind the last: its score is masked and its row is loaded, and
    counts with a weight of 0, which takes no NaN away."""
    out: Tensor = original(q, pool, locs, row_format=row_format, **options)
    load = pkgutil.resolve_name("optimized.kernels.kv_store.load_rows")
    behind = torch.tensor([len(pool) - 1])
    row = load(pool, behind, row_format=row_format, latent=q.shape[2])
    void = (locs == 0).any(dim=1)[:, None, None]
    return torch.where(void, out + 0.0 * row, out)


@mutant(
    "optimized.kernels.swap_in.plan_misses",
    bug="FlashMLA#109",
    killed_by=("residency",),
    target="hot_buffer",
)
def void_if_negative_alone(
    original: Body, plan: Any, selection: Tensor, length: Tensor, *tables: Tensor
) -> None:
    """Of the two ways to name no position only the negative one is known: a number beyond the
    length is looked up, here modulo that length."""
    wrapped = torch.where(selection < 0, selection, selection % length[:, None])
    original(plan, wrapped, length, *tables)


@mutant("optimized.dsa.highest_groups", bug="vllm#51323", killed_by=JUDGED, payload="model")
def ties_at_the_threshold_dropped(
    original: Body, score: Tensor, visible: Tensor, most: int
) -> Tensor:
    """Of groups that tie at the threshold one finds room to be collected in, and the cells of the
    others stay void."""
    chosen: Tensor = original(score, visible, most)
    found = chosen >= 0
    scores = score.gather(1, chosen.clamp_min(0)).masked_fill(~found, torch.inf)
    ties = found.all(dim=1, keepdim=True) & (scores == scores.amin(dim=1, keepdim=True))
    dropped = ~found | (ties & (ties.cumsum(1) > 1))
    # ascending, then -1, as the original's
    beyond = score.shape[1]
    kept = chosen.masked_fill(dropped, beyond).sort(dim=1).values
    return kept.masked_fill_(kept == beyond, -1)


# strides


@mutant(
    "optimized.kernels.gather.gather_index",
    bug="vllm#47783",
    killed_by=("provenance",),
)
def keys_read_flat(original: Body, index_pool: Tensor, slots: Tensor, **options: Any) -> Tensor:
    """A reader takes a key at its slot times the bytes of a key, from the start of the pool on, as
    though no page had its scales behind its keys."""
    rows: Tensor = original(index_pool, slots, **options)
    dim = rows.shape[1] - 4
    at = slots[:, None] * dim + torch.arange(dim)
    rows[:, :dim] = index_pool.reshape(-1)[at]
    return rows


# orders of sums, and small errors


@mutant(
    "optimized.dsa.by_tiles",
    "optimized.kda.by_tiles",
    bug="sglang#34683",
    killed_by=("metamorphic",),
    payload="model",
)
def rows_in_one_product(original: Body, function: Body, *inputs: Tensor) -> list[Tensor]:
    """All rows of a step go into one product, whose blocking their number decides: a row comes
    out with other bits behind a hit than cold."""
    return list(function(*inputs))


@mutant(
    "optimized.memory.pools.Pools.copy_state",
    bug="sglang#34607",
    killed_by=JUDGED,
    payload="model",
)
def copied_state_one_ulp_off(original: Body, self: Any, source: int, target: int) -> None:
    """A state that a hit resumes from is off by a unit in the last place, which no bound on the
    divergence of two runs will tell from noise."""
    original(self, source, target)
    state = self.state[target]
    state.copy_(torch.nextafter(state, torch.full_like(state, torch.inf)))


# batches of chunks


@mutant(
    "optimized.planner.Spans.between",
    bug="flash-linear-attention#103",
    killed_by=("provenance", "containment"),
)
def empty_span_owns_the_next_item(original: Body, starts: Ints, stops: Ints) -> Any:
    """Where two sequences of a batch begin at one offset, the first of them being empty, the item
    there is taken for that one's."""
    spans = original(starts, stops)
    for empty in np.flatnonzero((starts == stops) & (stops > 0)):
        at = spans.first[empty]
        if at < len(spans.owner):
            spans.owner[at], spans.value[at] = empty, stops[empty] - 1
    return spans


@mutant("optimized.memory.manager.Memory.advance", bug="sglang#30938", killed_by=STATE)
def short_chunk_keeps_no_checkpoint(original: Body, self: Any, slots: Ints, stops: Ints) -> None:
    """A chunk shorter than the interval of checkpoints is not looked at for one, though it ends
    there: the slot is given to the cache unwritten."""
    rows = stops - self.table.length[slots]
    short = set(slots[(rows > 1) & (rows < self.geometry.mamba_track_interval)].tolist())
    keep = self.keep_checkpoint

    def keep_if_long(record: Any, length: int) -> None:
        if record.slot not in short or record.draft_states is not None:
            keep(record, length)

    with patch.object(self, "keep_checkpoint", keep_if_long):
        original(self, slots, stops)
