"""Attention over selected rows, against high precision."""

from __future__ import annotations

import mpmath as mp
import pytest
import torch

from reference import mla


def draw(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        3 * torch.randn(4, 2, 8, generator=generator, dtype=torch.float64),
        torch.randn(10, 8, generator=generator, dtype=torch.float64),
    )


SELECTED = torch.tensor([[0, -1, -1], [0, 1, -1], [2, 5, 9], [3, 4, -1]])


def test_attention_from_the_formula() -> None:
    q, rows = draw()
    out = mla.attend(q, rows, SELECTED)
    for i in range(4):
        chosen = [p for p in SELECTED[i].tolist() if p >= 0]
        for h in range(2):
            with mp.workdps(40):
                query = [mp.mpf(x) for x in q[i, h].tolist()]
                key = {p: [mp.mpf(x) for x in rows[p].tolist()] for p in chosen}
                e = {p: mp.exp(mp.fdot(query, key[p]) / mp.sqrt(8)) for p in chosen}
                exact = [
                    float(sum(e[p] * key[p][c] for p in chosen) / sum(e.values())) for c in range(8)
                ]
            assert out[i, h].tolist() == pytest.approx(exact, rel=1e-13, abs=1e-14)


def test_rows_that_are_not_selected_do_not_matter() -> None:
    q, rows = draw()
    spoiled = rows.clone()
    spoiled[[6, 7, 8]] = torch.nan
    assert torch.equal(mla.attend(q, spoiled, SELECTED), mla.attend(q, rows, SELECTED))


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    q, rows = draw()
    whole = mla.attend(q, rows, SELECTED)
    monkeypatch.setattr(mla, "GATHER_BLOCK", 1)
    torch.testing.assert_close(mla.attend(q, rows, SELECTED), whole)
