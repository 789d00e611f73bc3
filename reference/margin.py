"""Is a selection row right, given the groups' scores and how far an engine's may be off?

A row must be well formed whatever the scores are: whole groups, closed by then (causal), each
once and ascending, as many as there are up to topk / kpool, then the tail, then -1.  Which
groups it holds may differ from the reference only between scores whose bounds overlap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.geometry import Geometry
from reference.index import expand
from reference.rounding import Approx


def chosen_groups(
    rows: Tensor, positions: Tensor, groups: int, geometry: Geometry
) -> tuple[Tensor, Tensor]:
    """(chosen [n, groups] bool, well formed [n] bool) of selection rows [n, selection_width]."""
    visible = (positions + 1) // geometry.kpool
    count = visible.clamp(max=geometry.topk_groups)
    claimed = rows[:, : geometry.topk : geometry.kpool].div(geometry.kpool, rounding_mode="floor")
    real = (torch.arange(claimed.shape[1]) < count[:, None]) & (claimed >= 0)
    real &= claimed < visible[:, None]
    chosen = torch.zeros(len(rows), groups, dtype=torch.bool)
    query, column = real.nonzero(as_tuple=True)
    chosen[query, claimed[query, column]] = True
    same = (expand(chosen, positions, geometry) == rows).all(1)
    return chosen, same & (chosen.sum(1) == count)


def malformation(row: Tensor, position: int, geometry: Geometry) -> str:
    """What is wrong with a row that is not well formed, as the end of a sentence."""
    visible = (position + 1) // geometry.kpool
    split = min(visible, geometry.topk_groups) * geometry.kpool
    tail = list(range(visible * geometry.kpool, position + 1))
    values = row.tolist()
    real = [p for p in values if p >= 0]
    if max(real, default=0) > position:
        return f"selects position {max(real)}, which is later"
    if len(set(real)) < len(real):
        twice = next(p for p in real if real.count(p) > 1)
        return f"selects position {twice} twice"
    if len(real) < split + len(tail):
        return f"selects {len(real)} positions and should select {split + len(tail)}"
    if values[split : split + len(tail)] != tail:
        return f"should end with the tail {tail}, but has {values[split : split + len(tail)]}"
    if any(p != -1 for p in values[split + len(tail) :]):
        return "should be padded with -1 after the tail"
    return "does not hold whole groups in ascending order"


def excess(
    score: Approx, chosen: Tensor, positions: Tensor, geometry: Geometry
) -> tuple[Tensor, Tensor, Tensor]:
    """How wrong a choice is, in units of what the bounds explain: wrong above 1.

    Arguments: score [n, groups]; chosen [n, groups] bool.
    Returns: (ratio [n], the group kept wrongly [n], the group dropped wrongly [n]).
    """
    if not chosen.shape[1]:
        none = torch.zeros(len(chosen), dtype=torch.int64)
        return none.double(), none, none
    mid, spread = score.mid, score.bound
    dropped = _dropped(chosen, positions, geometry)
    kept_at = (mid + spread).masked_fill(~chosen, torch.inf).argmin(1, keepdim=True)
    dropped_at = (mid - spread).masked_fill(~dropped, -torch.inf).argmax(1, keepdim=True)
    gap = (mid.gather(1, dropped_at) - mid.gather(1, kept_at))[:, 0].clamp(min=0)
    slack = (spread.gather(1, dropped_at) + spread.gather(1, kept_at))[:, 0]
    ratio = torch.where((gap > 0) & dropped.any(1) & chosen.any(1), gap / slack, 0.0)
    # of scores that are equal without any rounding the lower group goes first
    tied = (mid == mid.gather(1, kept_at)) & (spread == 0)
    order = torch.arange(mid.shape[1])
    last_kept = order.masked_fill(~(tied & chosen), -1).amax(1)
    first_dropped = order.masked_fill(~(tied & dropped), mid.shape[1]).amin(1)
    swapped = first_dropped < last_kept
    return (
        ratio.masked_fill(swapped, torch.inf),
        torch.where(swapped, last_kept, kept_at[:, 0]),
        torch.where(swapped, first_dropped, dropped_at[:, 0]),
    )


def contested(score: Approx, chosen: Tensor, positions: Tensor, geometry: Geometry) -> Tensor:
    """[n] bool: could an engine within the bounds have chosen otherwise?"""
    if not chosen.shape[1]:
        return torch.zeros(len(chosen), dtype=torch.bool)
    dropped = _dropped(chosen, positions, geometry)
    lowest = (score.mid - score.bound).masked_fill(~chosen, torch.inf).amin(1)
    return (score.mid + score.bound).masked_fill(~dropped, -torch.inf).amax(1) > lowest


def _dropped(chosen: Tensor, positions: Tensor, geometry: Geometry) -> Tensor:
    """Visible groups that were not chosen."""
    visible = (positions + 1) // geometry.kpool
    return (torch.arange(chosen.shape[1]) < visible[:, None]) & ~chosen
