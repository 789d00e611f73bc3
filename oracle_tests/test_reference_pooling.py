"""Pooled keys against high precision, and their limits: kpool 1, open groups, tail."""

from __future__ import annotations

import mpmath as mp
import pytest
import torch

from reference import pooling, quant
from reference.geometry import Geometry


def draw(n: int, dim: int, kpool: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(rows, dim, generator=generator, dtype=torch.float64) for rows in (n, n, kpool)
    )


def test_hadamard_is_sylvester_and_orthogonal() -> None:
    matrix = pooling.hadamard(16)
    sign = [[(-1) ** (i & j).bit_count() for j in range(16)] for i in range(16)]
    assert torch.equal(matrix, torch.tensor(sign, dtype=torch.float64) / 4)
    wide = pooling.hadamard(128)
    torch.testing.assert_close(wide @ wide.T, torch.eye(128, dtype=torch.float64))


@pytest.mark.parametrize("kpool", [2, 4])
def test_pooled_row_from_the_formula(kpool: int) -> None:
    keys, gates, ape = draw(kpool, 8, kpool, seed=kpool)
    keys, gates = quant.round_bf16(keys), quant.round_bf16(gates)
    with mp.workdps(40):
        pooled = []
        for d in range(8):
            e = [
                mp.exp(mp.mpf(float(gates[s, d])) + mp.mpf(float(ape[s, d]))) for s in range(kpool)
            ]
            total = sum(e[s] * mp.mpf(float(keys[s, d])) for s in range(kpool)) / sum(e)
            pooled.append(float(quant.round_bf16(torch.tensor([float(total)]).double())))
        turned = [
            float(
                sum(mp.mpf(pooled[j]) * (-1) ** (i & j).bit_count() for j in range(8)) / mp.sqrt(8)
            )
            for i in range(8)
        ]
    row = quant.round_bf16(torch.tensor([turned], dtype=torch.float64))
    geometry = Geometry(kpool=kpool)
    assert torch.equal(
        pooling.pooled_rows(keys, gates, ape, geometry), quant.encode_key(row, round_scale=True)
    )


def test_kpool_1_is_the_plain_key_bit_for_bit() -> None:
    keys, gates, ape = draw(9, 16, 1, seed=1)
    plain = quant.encode_key(pooling.rotate(quant.round_bf16(keys)), round_scale=True)
    geometry = Geometry(kpool=1)
    assert torch.equal(pooling.pooled_rows(keys, gates, ape, geometry), plain)
    assert torch.equal(pooling.pooled_rows(keys, 0 * gates, 5 * ape, geometry), plain)


def test_a_row_depends_on_its_group_alone_and_on_the_order_in_it() -> None:
    geometry = Geometry(kpool=4)
    keys, gates, ape = draw(11, 16, 4, seed=2)
    rows = pooling.pooled_rows(keys, gates, ape, geometry)
    assert rows.shape == (2, 20)  # 3 positions are still open
    assert torch.equal(rows[1:], pooling.pooled_rows(keys[4:8], gates[4:8], ape, geometry))
    assert not torch.equal(
        rows[:1], pooling.pooled_rows(keys[:4].flip(0), gates[:4].flip(0), ape, geometry)
    )


def test_tail_row_is_key_then_gate() -> None:
    keys, gates, _ = draw(3, 16, 1, seed=3)
    rows = pooling.tail_rows(keys, gates)
    assert torch.equal(quant.bf16_values(rows[:, :32]), quant.round_bf16(keys))
    assert torch.equal(quant.bf16_values(rows[:, 32:]), quant.round_bf16(gates))
