"""bf16 and e4m3 conversions for Triton kernels, in integer arithmetic.

Triton's own casts are right on a GPU and wrong in its interpreter (3.6 to 3.9 truncate to bf16
and drop a carry on the way to FP8), so kernels that must store the same bytes in both places do
not use them.  `interpreter.self_check` compares these with torch's casts.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bf16_bits(x):
    """int16 bits of float32 `x` in bf16, rounded to nearest even; a NaN stays one."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0).to(tl.int16)


@triton.jit
def bf16_value(bits):
    """float32 of int16 bf16 `bits`."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def round_bf16(x):
    """float32 `x` rounded to a bf16 value."""
    return bf16_value(bf16_bits(x))


@triton.jit
def e4m3_code(x):
    """uint8 e4m3 code of float32 `x`, saturated at 448, to nearest even; a NaN stays one."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), 448.0)
    above = magnitude.to(tl.int32, bitcast=True)
    # three mantissa bits are kept, and the exponent's bias falls from 127 to 7
    normal = ((above + 0x7FFFF + ((above >> 20) & 1)) >> 20) - (120 << 3)
    # below 2**-6 codes count steps of 2**-9, the last place of a float32 at 2**14
    subnormal = (magnitude + 16384.0).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0.015625, subnormal, normal)
    return (tl.where(x == x, code, 0x7F) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e4m3_value(code):
    """float32 of uint8 e4m3 `code`."""
    code = code.to(tl.int32)
    magnitude = code & 0x7F
    bits = tl.where(magnitude == 0x7F, 0x7FC00000, magnitude << 20) | ((code & 0x80) << 24)
    # the exponent's bias rises from 7 to 127; subnormal codes become normal on the way
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120


@triton.jit
def fp8_scale(x):
    """[rows] float32: the scale that takes each row of `x` [rows, channels] into e4m3's range."""
    return tl.div_rn(tl.maximum(tl.max(tl.abs(x), axis=1), 1e-4), 448.0)
