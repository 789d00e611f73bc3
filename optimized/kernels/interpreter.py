"""Self-check of the arithmetic under Triton kernels against torch's casts.

It runs before the first kernel that Triton interprets, so that a wrong cast is a sentence and
never a difference between two engines.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.kernels import casts

BLOCK = 4096
E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max


class InterpreterError(RuntimeError):
    """Triton converts numbers in another way than torch; the message names the cure."""


@triton.jit
def casts_kernel(values, bf16, e4m3, from_bf16, from_e4m3, COUNT: tl.constexpr):
    """Convert float32 `values` to `bf16` (int16) and `e4m3` (uint8), and those back; one program
    for COUNT of them."""
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    x = tl.load(values + at)
    bits = casts.bf16_bits(x)
    code = casts.e4m3_code(x)
    tl.store(bf16 + at, bits)
    tl.store(e4m3 + at, code)
    tl.store(from_bf16 + at, casts.bf16_value(bits))
    tl.store(from_e4m3 + at, casts.e4m3_value(code))


@lru_cache
def self_check() -> None:
    """Raise InterpreterError unless the kernels' casts equal torch's on the CPU; checked once."""
    wrong = mismatches(casts_kernel, torch.device("cpu"))
    if any(wrong.values()):
        counts = ", ".join(f"{name} {count}" for name, count in wrong.items())
        raise InterpreterError(
            f"Triton {triton.__version__} rounds differently from torch ({counts} of "
            f"{len(probe_values())} values): use a release of Triton that optimized/kernels/"
            "casts.py is tested with, or backend torch."
        )


def mismatches(kernel: triton.KernelInterface, device: torch.device) -> dict[str, int]:
    """How many of the probe values `kernel`, of casts_kernel's signature, converts otherwise
    than torch, by conversion."""
    values = probe_values().to(device)
    bf16 = torch.empty_like(values, dtype=torch.int16)
    e4m3 = torch.empty_like(values, dtype=torch.uint8)
    from_bf16, from_e4m3 = torch.empty_like(values), torch.empty_like(values)
    kernel[(len(values) // BLOCK,)](values, bf16, e4m3, from_bf16, from_e4m3, COUNT=BLOCK)
    rounded = values.bfloat16().float()
    codes = values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()
    return {
        "float32 to bf16": count_different(bf16.view(torch.bfloat16).float(), rounded),
        "float32 to e4m3": count_different(e4m3.view(torch.float8_e4m3fn).float(), codes),
        "bf16 to float32": count_different(from_bf16, rounded),
        "e4m3 to float32": count_different(from_e4m3, codes),
    }


def probe_values() -> Tensor:
    """[65536] float32: every high half of a float32, both signs, NaNs and infinities among them,
    with a low half on a tie, beside one on either side, or zero."""
    high = torch.arange(1 << 16, dtype=torch.int32)
    low = torch.tensor([0x0000, 0x8000, 0x7FFF, 0x8001], dtype=torch.int32)
    # the low half must not follow the bits that decide ties, so it is drawn from the higher ones
    return ((high << 16) | low[(high + (high >> 2) + (high >> 5)) % 4]).view(torch.float32)


def count_different(ours: Tensor, theirs: Tensor) -> int:
    """Places where two float32 tensors differ in bits; all NaNs are one."""
    same = (ours.view(torch.int32) == theirs.view(torch.int32)) | (ours.isnan() & theirs.isnan())
    return int((~same).sum())
