"""Selected groups expanded to positions: equal to the reference's selection rows."""

from __future__ import annotations

import pytest
import torch

from optimized.kernels.select import expand
from reference import index
from reference.geometry import Geometry


def case(kpool, topk_groups):
    """Queries at every phase of a group, from an empty index to far beyond topk: groups, their
    positions, and the reference's selection rows."""
    geometry = Geometry(
        kpool=kpool, physical_page_size=4, topk=topk_groups * kpool, mamba_track_interval=4 * kpool
    )
    torch.manual_seed(kpool)
    position = torch.arange(4 * topk_groups * kpool)[torch.randperm(4 * topk_groups * kpool)]
    score = torch.randn(len(position), 4 * topk_groups + 1, dtype=torch.float64)
    groups = torch.full((len(position), topk_groups), -1)
    for query, p in enumerate(position.tolist()):
        visible = score[query, : (p + 1) // kpool]
        best = visible.topk(min(topk_groups, len(visible))).indices.sort().values
        groups[query, : len(best)] = best
    return geometry, groups, position, index.select(score, position, geometry)


@pytest.mark.parametrize("topk_groups", [1, 6, 16])
@pytest.mark.parametrize("kpool", [1, 2, 4])
def test_equals_reference(launch, kpool, topk_groups):
    backend, device = launch
    geometry, groups, position, expected = case(kpool, topk_groups)
    width = geometry.selection_width
    groups, position = groups.to(device), position.to(device)
    rows = expand(groups, position, kpool=kpool, width=width, backend=backend)
    assert torch.equal(rows.cpu(), expected)


def test_production_width(launch):
    backend, device = launch
    groups = torch.arange(512).repeat(2, 1) * 3
    position = torch.tensor([6146, 6147])
    rows = expand(groups.to(device), position.to(device), kpool=4, width=2051, backend=backend)
    assert rows[0, -4:].tolist() == [1533 * 4 + 3, 6144, 6145, 6146]
    assert rows[1, -4:].tolist() == [1533 * 4 + 3, -1, -1, -1]


def test_wider_rows_end_in_minus_one(launch):
    backend, device = launch
    _, groups, position, expected = case(4, 6)
    width = expected.shape[1] + 5
    rows = expand(groups.to(device), position.to(device), kpool=4, width=width, backend=backend)
    assert torch.equal(rows.cpu()[:, :-5], expected)
    assert (rows[:, -5:] == -1).all()


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_wrong_position_is_noticed(launch, shift):
    """A tail one short or one long would show in every row."""
    backend, device = launch
    geometry, groups, position, expected = case(4, 6)
    moved = (position + shift).to(device)
    rows = expand(
        groups.to(device), moved, kpool=4, width=geometry.selection_width, backend=backend
    )
    assert (rows.cpu() != expected).any(dim=1).all()
