"""Roundings and stored row formats, in integer and float64 arithmetic.

No cast of the framework is trusted: a value is rounded on the float64 grid and its bits are
put together from that.  Bytes are little endian, as on every machine that we serve on.
Formats: bf16 (8 significant bits) and e4m3 without infinities (OCP 8-bit floating point
specification: 4 significant bits, largest value 448).  Row formats and scales:
docs/model.md.  Functions return the dtype that they were given unless they say else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.geometry import PACKED_BLOCK, RowFormat

E4M3_MAX = 448.0
ABSMAX_FLOOR = 1e-4
BF16_MAX = (2 - 2**-7) * 2.0**127
_BF16 = (8, -126)
_E4M3 = (4, -6)


def _quantum(x: Tensor, significant_bits: int, lowest_exponent: int) -> Tensor:
    """Distance of neighbours on the format's grid in the binade of float64 x; values below
    2**lowest_exponent share the grid of that binade (subnormals)."""
    exponent = ((x.view(torch.int64) >> 52) & 0x7FF) - 1023
    quantum_exponent = exponent.clamp(min=lowest_exponent) - (significant_bits - 1)
    return ((quantum_exponent + 1023) << 52).view(torch.float64)


def _round(x: Tensor, significant_bits: int, lowest_exponent: int) -> Tensor:
    """float64 x to the nearest value on the grid, ties to even."""
    quantum = _quantum(x, significant_bits, lowest_exponent)
    return torch.round(x / quantum) * quantum  # both exact: quantum is a power of two


def _gap(x: Tensor, value: Tensor, significant_bits: int, lowest_exponent: int) -> Tensor:
    """Distance from x to the nearest real that rounds to `value`, a point of the grid."""
    size = value.abs()
    outward = (x - value) * torch.where(value == 0, x.sign(), value.sign())
    above = _quantum(size, significant_bits, lowest_exponent) / 2
    # the lower neighbour of a power of two is only half as far away
    below = _quantum(size * (1 - 2**-40), significant_bits, lowest_exponent) / 2
    return torch.maximum(outward - above, -outward - below).clamp(min=0)


def round_bf16(x: Tensor) -> Tensor:
    """The nearest bf16 values; beyond the largest, infinity."""
    rounded = _round(x.to(torch.float64), *_BF16)
    over = rounded.abs() > BF16_MAX
    return torch.where(over, rounded.sign() * torch.inf, rounded).to(x.dtype)


def bf16_bytes(x: Tensor) -> Tensor:
    """[..., n] -> [..., 2n] uint8, little endian, each value rounded to bf16."""
    bits = round_bf16(x).to(torch.float32).contiguous().view(torch.int32)
    return (bits >> 16).to(torch.int16).view(torch.uint8)


def bf16_values(data: Tensor) -> Tensor:
    """[..., 2n] uint8 -> [..., n] float64."""
    bits = _aligned(data).view(torch.int16).to(torch.int32) << 16
    return bits.view(torch.float32).to(torch.float64)


def gap_bf16(x: Tensor, value: Tensor) -> Tensor:
    """How far float64 x would have to move to be rounded to the bf16 `value`."""
    return _gap(x, value, *_BF16)


def f32_bytes(x: Tensor) -> Tensor:
    """[..., n] -> [..., 4n] uint8, little endian, each value rounded to float32."""
    return x.to(torch.float32).contiguous().view(torch.uint8)


def f32_values(data: Tensor) -> Tensor:
    """[..., 4n] uint8 -> [..., n] float64."""
    return _aligned(data).view(torch.float32).to(torch.float64)


def round_e4m3(x: Tensor) -> Tensor:
    """The nearest e4m3 values, saturated at +-448; NaN stays NaN."""
    return _round(x.to(torch.float64).clamp(-E4M3_MAX, E4M3_MAX), *_E4M3).to(x.dtype)


def gap_e4m3(x: Tensor, value: Tensor) -> Tensor:
    """How far float64 x would have to move to be rounded to the e4m3 `value`."""
    return _gap(x.clamp(-E4M3_MAX, E4M3_MAX), value, *_E4M3)


def e4m3_codes(x: Tensor) -> Tensor:
    """uint8 codes: sign, 4 exponent bits of bias 7, 3 mantissa bits; NaN is 0x7F or 0xFF."""
    value = round_e4m3(x).to(torch.float64)
    bits = value.view(torch.int64)
    normal = ((bits >> 49) & 0x3FFF) - ((1023 - 7) << 3)
    subnormal = (value.abs() * 2**9).nan_to_num(nan=0.0).to(torch.int64)
    magnitude = torch.where(value.abs() < 2**-6, subnormal, normal)
    magnitude = torch.where(value.isnan(), 0x7F, magnitude)
    return (magnitude | ((bits >> 56) & 0x80)).to(torch.uint8)


def e4m3_values(codes: Tensor) -> Tensor:
    """float64 values of uint8 codes."""
    return _E4M3_VALUES[codes.to(torch.int64)]


def _e4m3_table() -> Tensor:
    codes = torch.arange(256)
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).to(torch.float64)
    power = torch.tensor([2.0**e for e in range(-7, 9)], dtype=torch.float64)[exponent]
    magnitude = torch.where(exponent == 0, mantissa * 2**-9, (1 + mantissa / 8) * power)
    magnitude[[0x7F, 0xFF]] = torch.nan
    return torch.where(codes < 128, magnitude, -magnitude)


_E4M3_VALUES = _e4m3_table()


def fp8_scale(absmax: Tensor, *, round_scale: bool) -> Tensor:
    """The scale that brings `absmax` to 448: float32 values, in float64.

    A float32 division; with `round_scale`, raised to the next power of two.
    """
    floored = absmax.to(torch.float32).clamp(min=ABSMAX_FLOOR).to(torch.float64)
    # a float64 quotient of float32 values, rounded to float32, is the float32 quotient
    scale = (floored / E4M3_MAX).to(torch.float32).to(torch.float64)
    if not round_scale:
        return scale
    fraction = scale.view(torch.int64) & ((1 << 52) - 1)
    exponent = (scale.view(torch.int64) >> 52) + (fraction != 0).to(torch.int64)
    raised = (exponent << 52).view(torch.float64)
    return torch.where(scale.isfinite(), raised, scale)


def quotient(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale as a float32 division of float32 operands would give it, in float64."""
    return (x.to(torch.float64) / scale).to(torch.float32).to(torch.float64)


def fp8(x: Tensor, *, round_scale: bool) -> tuple[Tensor, Tensor]:
    """Quantise rows [..., n]: (e4m3 values [..., n], scales [...]), both float64."""
    scale = fp8_scale(x.abs().amax(-1), round_scale=round_scale)
    return round_e4m3(quotient(x, scale[..., None])), scale


def encode_key(x: Tensor, *, round_scale: bool) -> Tensor:
    """[..., n] -> [..., n + 4] uint8: an index row's key bytes, then its float32 scale."""
    values, scale = fp8(x, round_scale=round_scale)
    return torch.cat([e4m3_codes(values), f32_bytes(scale[..., None])], -1)


def decode_key(data: Tensor) -> tuple[Tensor, Tensor]:
    """[..., n + 4] uint8 -> (e4m3 values [..., n], scales [...]), both float64."""
    return e4m3_values(data[..., :-4]), f32_values(data[..., -4:])[..., 0]


def encode_row(row: Tensor, row_format: RowFormat) -> Tensor:
    """[..., latent] -> [..., row bytes] uint8: one KV row as `row_format` stores it."""
    if row_format is RowFormat.BF16:
        return bf16_bytes(row)
    if row_format is RowFormat.FP8_RAW:
        return e4m3_codes(row)
    blocks = [fp8(block, round_scale=False) for block in torch.split(row, PACKED_BLOCK, -1)]
    codes = [e4m3_codes(values) for values, _ in blocks]
    scales = torch.stack([scale for _, scale in blocks], -1)
    return torch.cat([*codes, f32_bytes(scales)], -1)


def decode_row(data: Tensor, row_format: RowFormat, latent: int) -> Tensor:
    """[..., row bytes] uint8 -> [..., latent] float64."""
    if row_format is RowFormat.BF16:
        return bf16_values(data)
    values = e4m3_values(data[..., :latent])
    if row_format is RowFormat.FP8_RAW:
        return values
    return values * packed_scales(data, latent).repeat_interleave(PACKED_BLOCK, -1)[..., :latent]


def packed_scales(data: Tensor, latent: int) -> Tensor:
    """[..., row bytes] uint8 of RowFormat.FP8_PACKED -> [..., blocks] float64."""
    return f32_values(data[..., latent:])


def _aligned(data: Tensor) -> Tensor:
    return data.clone(memory_format=torch.contiguous_format)
