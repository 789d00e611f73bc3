"""Triton's interpreter, with the casts that a GPU has.

Triton 3.6 to 3.9 truncate float32 to bf16 under the interpreter and drop the carry of float32 to
e4m3.  A foreign kernel cannot be written around that, as ours are, so here the interpreter's own
conversion is replaced by torch's, and then checked.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from systems import CannotLoad

PROBES = 1 << 16
Convert = Callable[[Any, Any, Any, Any], Any]


def prepare() -> None:
    """On a machine without a GPU have kernels interpreted, with right casts.

    Raises:
        CannotLoad: Triton was imported before, for a GPU; or its casts are wrong even so.
    """
    if torch.cuda.is_available():
        return
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    from triton.language import standard
    from triton.runtime import interpreter

    if not isinstance(standard.sum, interpreter.InterpretedFunction):
        raise CannotLoad(
            "Triton was imported before TRITON_INTERPRET=1 was set, so its kernels need a GPU: "
            "set that variable before this process starts."
        )
    _correct(interpreter)
    _quicken(interpreter)
    _check()


@lru_cache
def _correct(interpreter: Any) -> None:
    """Have `interpreter` convert between float32, bf16 and e4m3 as torch does."""
    import triton.language as tl
    from triton._C.libtriton import ir

    theirs: Convert = interpreter._convert_float
    dtypes = {
        tl.float32: (torch.float32, np.uint32),
        tl.bfloat16: (torch.bfloat16, np.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
    }
    most = torch.finfo(torch.float8_e4m3fn).max

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        """Bits of `values` in `target`, as an unsigned array of the same shape."""
        toward_zero = rounding is not None and rounding != ir.ROUNDING_MODE.RTNE
        if source not in dtypes or target not in dtypes or toward_zero:
            return theirs(values, source, target, rounding)
        (dtype, bits), (wanted, wanted_bits) = dtypes[source], dtypes[target]
        held = torch.from_numpy(np.ascontiguousarray(values).view(bits).copy()).view(dtype)
        if wanted is torch.float8_e4m3fn:
            # a GPU saturates here, and torch makes it a NaN
            held = held.float().clamp(-most, most)
        out = held.to(wanted).view(torch.uint8).numpy().view(wanted_bits)
        return out.reshape(np.shape(values))

    interpreter._convert_float = convert


@lru_cache
def _quicken(interpreter: Any) -> None:
    """Leave out what takes two fifths of the time and changes nothing: Triton puts the
    interpreter's functions into its language at each launch, and again at each call of a function
    within a kernel; and it checks integers for overflow, where a GPU lets them wrap."""
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) in patched:
            return interpreter._LangPatchScope()
        patched.add(id(function.__globals__))
        return patch(function)

    def launched(executor: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(executor, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launched


@lru_cache
def _check() -> None:
    """Raise CannotLoad unless a kernel runs, and its casts equal torch's."""
    import triton

    try:
        wrong = mismatches()
    except Exception as error:  # whatever the interpreter makes of it
        raise CannotLoad(
            f"Triton {triton.__version__} cannot interpret a kernel with NumPy {np.__version__} "
            f"({error}): install Triton 3.7 or later, or NumPy below 2.4."
        ) from error
    if any(wrong.values()):
        counts = ", ".join(f"{name} {count}" for name, count in wrong.items())
        raise CannotLoad(
            f"Triton {triton.__version__} converts {counts} of {PROBES} values otherwise than "
            "torch, and what differs afterwards would be noise: install Triton 3.6 to 3.9."
        )


def mismatches() -> dict[str, int]:
    """How many of PROBES values a kernel converts otherwise than torch, by conversion."""
    import triton
    import triton.language as tl

    @triton.jit
    def casts(values, to_bf16, to_e4m3, from_bf16, from_e4m3, parts, COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, COUNT)
        x = tl.zeros((COUNT,), tl.float32)
        # a loop whose end is an argument, which Triton 3.6 cannot take from NumPy 2.4
        for _ in range(parts):
            x = tl.load(values + at)
        bf16, e4m3 = x.to(tl.bfloat16), x.to(tl.float8e4nv)
        tl.store(to_bf16 + at, bf16.to(tl.int16, bitcast=True))
        tl.store(to_e4m3 + at, e4m3.to(tl.int8, bitcast=True))
        tl.store(from_bf16 + at, bf16.to(tl.float32))
        tl.store(from_e4m3 + at, e4m3.to(tl.float32))

    values = _probes()
    bf16, e4m3 = (torch.empty(PROBES, dtype=dtype) for dtype in (torch.int16, torch.int8))
    from_bf16, from_e4m3 = torch.empty_like(values), torch.empty_like(values)
    casts[(1,)](values, bf16, e4m3, from_bf16, from_e4m3, 1, COUNT=PROBES)
    most = torch.finfo(torch.float8_e4m3fn).max
    rounded = values.bfloat16().float()
    codes = values.clamp(-most, most).to(torch.float8_e4m3fn).float()
    return {
        "float32 to bf16": _different(bf16.view(torch.bfloat16).float(), rounded),
        "float32 to e4m3": _different(e4m3.view(torch.float8_e4m3fn).float(), codes),
        "bf16 to float32": _different(from_bf16, rounded),
        "e4m3 to float32": _different(from_e4m3, codes),
    }


def _probes() -> Tensor:
    """[PROBES] float32: every sign, exponent and seven high bits of a mantissa, followed by bits
    that are a tie of bf16 or of e4m3, beside one, or nothing; NaNs and infinities among them."""
    high = torch.arange(PROBES, dtype=torch.int32)
    low = torch.tensor([0x0000, 0x8000, 0x7FFF, 0x8001, 0x0001], dtype=torch.int32)
    return ((high << 16) | low[high * 7 % len(low)]).view(torch.float32)


def _different(ours: Tensor, theirs: Tensor) -> int:
    """Places where two float32 tensors differ in bits; all NaNs are one."""
    same = (ours.view(torch.int32) == theirs.view(torch.int32)) | (ours.isnan() & theirs.isnan())
    return int((~same).sum())
