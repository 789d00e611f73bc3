"""Scores and selection against brute force: order, ties, tail, padding, causality."""

from __future__ import annotations

import pytest
import torch

from reference import index
from reference.geometry import Geometry, ModelShape


def brute_force(score: list[float], position: int, geometry: Geometry) -> list[int]:
    kpool, visible = geometry.kpool, (position + 1) // geometry.kpool
    best = sorted(range(visible), key=lambda j: (-score[j], j))[: geometry.topk // kpool]
    row = [j * kpool + s for j in sorted(best) for s in range(kpool)]
    row += range(visible * kpool, position + 1)
    return row + [-1] * (geometry.topk + kpool - 1 - len(row))


@pytest.mark.parametrize("kpool", [1, 2, 4])
def test_selection_is_brute_force_with_many_ties(kpool: int) -> None:
    geometry = Geometry(kpool=kpool, physical_page_size=4, topk=4 * kpool, mamba_track_interval=16)
    positions = torch.arange(40)
    generator = torch.Generator().manual_seed(kpool)
    score = torch.randint(-2, 3, (40, 40 // kpool), generator=generator).double()
    rows = index.select(score, positions, geometry)
    assert rows.shape == (40, geometry.selection_width)
    expected = [brute_force(score[p].tolist(), p, geometry) for p in range(40)]
    assert rows.tolist() == expected


def test_scores_follow_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    iq, keys = (torch.randn(*s, generator=generator).double() for s in ((3, 2, 8), (5, 8)))
    iw, scales = (torch.randn(*s, generator=generator).double() for s in ((3, 2), (5,)))
    score = index.scores(iq, iw, keys, scales)
    for i in range(3):
        for j in range(5):
            heads = [
                float(iw[i, h]) * max(0.0, float((iq[i, h] * keys[j]).sum())) for h in range(2)
            ]
            assert float(score[i, j]) == pytest.approx(float(scales[j]) * sum(heads))


def test_selection_does_not_depend_on_how_queries_are_grouped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    geometry = Geometry(kpool=2, physical_page_size=4, topk=8, mamba_track_interval=8)
    generator = torch.Generator().manual_seed(3)
    iq = torch.randint(-8, 9, (60, 2, 16), generator=generator).double()
    iw = torch.randn(60, 2, generator=generator).double()
    stored = (
        torch.randint(-8, 9, (30, 16), generator=generator).double(),
        torch.ones(30, dtype=torch.float64),
    )
    whole = index.selections((iq, iw), stored, torch.arange(60), geometry)
    monkeypatch.setattr(index, "SCORE_BLOCK", 7 * 60)
    for start, stop in ((0, 60), (0, 17), (17, 60)):
        at = slice(start, stop)
        # a chunk does not see the groups that close after it
        seen = (stored[0][: stop // 2], stored[1][: stop // 2])
        part = index.selections((iq[at], iw[at]), seen, torch.arange(start, stop), geometry)
        assert torch.equal(part, whole[at])


def test_query_weights_carry_the_scale() -> None:
    shape = ModelShape(hidden=16, q_lora=16, index_heads=2, index_dim=8)
    generator = torch.Generator().manual_seed(4)
    w = {
        "wiq": torch.randn(16, 16, generator=generator).double(),
        "wiw": torch.ones(2, 16, dtype=torch.float64),
    }
    c_q = torch.randn(5, 16, generator=generator).double()
    y = torch.ones(5, 16, dtype=torch.float64)
    for factor in (1, 1024):
        values, weights = index.index_query(c_q * factor, y, w, shape, Geometry())
        if factor == 1:
            first = values, weights
    assert torch.equal(values, first[0])
    torch.testing.assert_close(weights, first[1] * 1024)
