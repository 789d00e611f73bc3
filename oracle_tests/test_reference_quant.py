"""Roundings and row formats: exact rational arithmetic, exhaustive casts, and each format."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from reference import quant
from reference.geometry import RowFormat


def neighbourhood(values: torch.Tensor) -> torch.Tensor:
    """float32 points on, between and one ulp beside consecutive values."""
    finite = values[values.isfinite()].unique()
    middle = ((finite[1:] + finite[:-1]) / 2).float()
    points = torch.cat([finite.float(), middle])
    inf = torch.tensor(torch.inf)
    return torch.cat([points, torch.nextafter(points, inf), torch.nextafter(points, -inf)])


def all_bf16() -> torch.Tensor:
    return torch.arange(65536).to(torch.int16).view(torch.bfloat16)


def test_bf16_bytes_equal_the_cast_at_every_boundary() -> None:
    x = neighbourhood(all_bf16().double())
    assert torch.equal(quant.bf16_bytes(x), x.to(torch.bfloat16).view(torch.uint8))


def test_bf16_values_of_all_65536_patterns() -> None:
    patterns = all_bf16()
    values = quant.bf16_values(patterns.view(torch.uint8))
    assert torch.equal(values.nan_to_num(nan=7.0), patterns.double().nan_to_num(nan=7.0))


def test_bf16_of_float64_is_rounded_once() -> None:
    # through float32 this would round up to a tie, and then to even, downwards
    x = torch.tensor([1 + 2**-8 + 2**-40, 1 + 2**-8 - 2**-40], dtype=torch.float64)
    assert quant.round_bf16(x).tolist() == [1 + 2**-7, 1.0]


def test_e4m3_equals_the_cast_at_every_boundary() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    cast = codes.view(torch.float8_e4m3fn).double()
    assert torch.equal(quant.e4m3_values(codes).nan_to_num(9e9), cast.nan_to_num(9e9))
    assert torch.equal(quant.e4m3_codes(quant.e4m3_values(codes)), codes)
    x = neighbourhood(cast).clamp(-448, 448)
    assert torch.equal(quant.e4m3_codes(x), x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_e4m3_is_the_nearest_value_ties_to_even_and_saturates() -> None:
    values = quant.e4m3_values(torch.arange(127, dtype=torch.uint8)).tolist()
    for x in [0.0, 2**-10, 3 * 2**-10, 0.3, 17.0, 19.0, 447.0, 448.0, 500.0, 1e9]:
        best = min(
            range(127), key=lambda code: (abs(Fraction(values[code]) - Fraction(x)), code % 2)
        )
        assert int(quant.e4m3_codes(torch.tensor([x]))[0]) == best


@pytest.mark.parametrize("round_scale", [False, True])
def test_fp8_scale(round_scale: bool) -> None:
    absmax = torch.tensor([0.0, 1e-4, 1.0, 448.0, 449.0, 3e5])
    scale = quant.fp8_scale(absmax, round_scale=round_scale)
    exact = absmax.clamp(min=1e-4) / 448
    if round_scale:
        expected = [2.0 ** next(e for e in range(-40, 40) if 2.0**e >= s) for s in exact.tolist()]
        assert scale.tolist() == expected
    else:
        assert torch.equal(scale, exact.double())


@pytest.mark.parametrize("row_format", RowFormat)
def test_rows_survive_their_format(row_format: RowFormat) -> None:
    latent = 160  # one whole block of 128 channels and a part
    row = torch.randn(7, latent, generator=torch.Generator().manual_seed(0)) * 3
    data = quant.encode_row(row, row_format)
    assert data.shape == (7, row_format.row_bytes(latent))
    back = quant.decode_row(data, row_format, latent)
    step = 2**-8 if row_format is RowFormat.BF16 else 2**-4
    assert bool(((back - row).abs() <= row.abs() * step + 2**-9).all())
    assert torch.equal(quant.encode_row(back, row_format), data)


def test_packed_blocks_have_scales_of_their_own() -> None:
    row = torch.cat([torch.full((1, 128), 1e-3), torch.full((1, 32), 1e3)], 1)
    data = quant.encode_row(row, RowFormat.FP8_PACKED)
    assert torch.equal(quant.packed_scales(data, 160), (torch.tensor([[1e-3, 1e3]]) / 448).double())
    assert set(data[0, :160].tolist()) == {0x7E}  # each block reaches 448 by itself


def test_key_row_is_bytes_then_scale() -> None:
    x = torch.linspace(-3, 3, 16, dtype=torch.float64)[None]
    data = quant.encode_key(x, round_scale=True)
    values, scale = quant.decode_key(data)
    assert data.shape == (1, 20)
    assert scale.tolist() == [2.0**-7]
    assert torch.equal(values, quant.round_e4m3(x / 2.0**-7))


@pytest.mark.parametrize("name", ["bf16", "e4m3"])
def test_gap_is_the_distance_to_what_rounds_to_a_value(name: str) -> None:
    rounding = getattr(quant, f"round_{name}")
    gap = getattr(quant, f"gap_{name}")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20000, dtype=torch.float64, generator=generator) * 50
    x[:3000] *= 2**-13  # subnormals of e4m3
    value = rounding(x[torch.randperm(len(x), generator=generator)] * 1e-9 + x * 1.04)
    distance = gap(x, value)
    assert torch.equal(distance == 0, rounding(x) == value)
    toward = x + (value - x).sign() * distance * (1 + 1e-9)
    assert torch.equal(rounding(toward), value)
