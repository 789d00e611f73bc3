"""Faults of the index's reader: visibility, scores, top-k, and the tail behind the selection."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fuzz.mutants.registry import Body, mutant

SELECT = "optimized.dsa.DsaLayer._select"
EXPAND = "optimized.kernels.select.expand"
JUDGED = ("numeric", "metamorphic")


def _seeing_further(
    original: Body, layer: Any, batch: Any, positions: Tensor, *rest: Any, by: int
) -> Tensor:
    """Select for positions `by` further on, as far as the page table goes."""
    last = batch.table.shape[1] * layer.geometry.logical_page_size - 1
    return original(layer, batch, (positions + by).clamp_max(last), *rest)


@mutant(SELECT, bug="sglang-jax#1607", killed_by=JUDGED, payload="model")
def one_group_too_many_visible(
    original: Body, self: Any, batch: Any, positions: Tensor, *rest: Any
) -> Tensor:
    """A query sees one group more than have closed."""
    kpool = self.geometry.kpool
    return _seeing_further(original, self, batch, positions, *rest, by=kpool)


@mutant(SELECT, bug="sglang-jax#1607", killed_by=JUDGED, payload="model")
def pooled_length_rounded_up(
    original: Body, self: Any, batch: Any, positions: Tensor, *rest: Any
) -> Tensor:
    """The number of pooled keys is the length over kpool, rounded up: an open group is seen."""
    kpool = self.geometry.kpool
    return _seeing_further(original, self, batch, positions, *rest, by=kpool - 1)


@mutant(SELECT, bug="own", killed_by=JUDGED, payload="model")
def batch_skips_with_its_shortest(original: Body, self: Any, batch: Any, *rest: Any) -> Tensor:
    """A batch goes without scores when its shortest request can, and selects the first groups
    of the longer ones."""
    shortest = int(batch.stops.min()) // self.geometry.kpool
    if not self.skips_scores(shortest):
        return original(self, batch, *rest)
    with patch.object(self, "skips_scores", return_value=True):
        return original(self, batch, *rest)


@mutant("optimized.dsa.highest_groups", bug="vllm#51323", killed_by=JUDGED, payload="model")
def threshold_bin_clipped(original: Body, score: Tensor, visible: Tensor, most: int) -> Tensor:
    """Of the groups whose scores share the threshold's bin the first are taken, not the best."""
    # a bin: sign, exponent and two bits of the mantissa
    bins = (score.view(torch.int32) & ~0x1FFFFF).view(torch.float32)
    return original(bins, visible, most)


@mutant("optimized.dsa.index_scores", bug="own", killed_by=JUDGED, payload="model")
def key_scale_ignored(original: Body, q: Tensor, w: Tensor, keys: Tensor, scale: Tensor) -> Tensor:
    """Scores are taken of the stored codes, without the key's scale."""
    return original(q, w, keys, torch.ones_like(scale))


@mutant(EXPAND, bug="sglang#42178", killed_by=JUDGED, payload="model")
def tail_omitted_past_topk(
    original: Body, groups: Tensor, position: Tensor, *, kpool: int, **options: Any
) -> Tensor:
    """A full selection leaves no columns for the tail."""
    selected = original(groups, position, kpool=kpool, **options)
    selected[:, groups.shape[1] * kpool :] = -1
    return selected


@mutant(EXPAND, bug="own", killed_by=JUDGED, payload="model")
def tail_starts_one_late(
    original: Body, groups: Tensor, position: Tensor, *, kpool: int, **options: Any
) -> Tensor:
    """The tail leaves out its first position."""
    selected = original(groups, position, kpool=kpool, **options)
    first = ((position + 1) // kpool * kpool)[:, None]
    return selected.masked_fill_(selected == first, -1)


@mutant(EXPAND, bug="own", killed_by=JUDGED, payload="model")
def tail_of_previous_position(
    original: Body, groups: Tensor, position: Tensor, **options: Any
) -> Tensor:
    """The tail is counted by the length before the new token."""
    return original(groups, position - 1, **options)


@mutant(EXPAND, bug="own", killed_by=JUDGED, payload="model")
def tail_modulo_page(
    original: Body, groups: Tensor, position: Tensor, *, kpool: int, **options: Any
) -> Tensor:
    """The tail's length is taken modulo a page, here of two groups: it begins with the page, not
    with the open group."""
    selected = original(groups, position, kpool=kpool, **options)
    start = ((position + 1) // kpool * kpool)[:, None]
    return torch.where(selected >= start, selected - start % (2 * kpool), selected)
