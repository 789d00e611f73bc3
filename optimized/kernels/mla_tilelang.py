"""MLA over the selected rows in TileLang, compiled to C for the CPU.

TileLang's C target has no bf16 or FP8 type, so rows are read as bytes and dequantised in integer
arithmetic, as in `casts`.
"""

# no postponed annotations here: TileLang evaluates those of a program where it stands

from functools import lru_cache

import tilelang
import tilelang.language as T
import torch
from tilelang.contrib.cc import get_cplus_compiler
from torch import Tensor

from optimized.kernels.backends import BackendError
from reference.geometry import PACKED_BLOCK, RowFormat


def mla(q: Tensor, pool: Tensor, locs: Tensor, *, row_format: RowFormat, scale: float) -> Tensor:
    """[batch, heads, latent] float32; arguments as for `kernels.mla.mla`, on the CPU.

    Raises:
        BackendError: without a C++ compiler, or for tensors on a GPU.
    """
    if q.is_cuda:
        raise BackendError(
            "the tilelang backend compiles to C for the CPU: choose backend triton on a GPU."
        )
    if get_cplus_compiler() is None:
        raise BackendError(
            "the tilelang backend found no C++ compiler: install one (on Debian or Ubuntu, "
            "apt-get install g++), or choose another backend."
        )
    out = torch.empty_like(q)
    kernel = compiled(row_format, *q.shape[1:])
    kernel((q * scale).contiguous(), pool, locs.contiguous(), out)
    return out


@lru_cache
def compiled(row_format: RowFormat, heads: int, latent: int) -> tilelang.JITKernel:
    """The kernel for one row format and these sizes; batch, width and pool may vary."""
    program = mla_program(row_format, heads, latent)
    return tilelang.compile(program, target="c", execution_backend="cython")


def mla_program(row_format: RowFormat, heads: int, latent: int):
    """Online softmax over the unmasked rows of each query, one row at a time."""
    batch, width, pool_rows = T.dynamic("batch"), T.dynamic("width"), T.dynamic("pool_rows")
    row_bytes = row_format.row_bytes(latent)

    def word(pool, loc, byte, size):
        parts = [T.shift_left(T.cast(pool[loc, byte + i], "int32"), 8 * i) for i in range(size)]
        return sum(parts[1:], parts[0])

    def channel(pool, loc, c):
        if row_format is RowFormat.BF16:
            return T.reinterpret(T.shift_left(word(pool, loc, 2 * c, 2), 16), "float32")
        code = word(pool, loc, c, 1)
        magnitude = T.bitwise_and(code, 0x7F)
        bits = T.if_then_else(magnitude == 0x7F, 0x7FC00000, T.shift_left(magnitude, 20))
        bits = T.bitwise_or(bits, T.shift_left(T.bitwise_and(code, 0x80), 24))
        value = T.reinterpret(bits, "float32") * T.float32(2.0**120)
        if row_format is RowFormat.FP8_PACKED:
            scale_at = latent + c // PACKED_BLOCK * 4
            value *= T.reinterpret(word(pool, loc, scale_at, 4), "float32")
        return value

    @T.prim_func
    def program(
        q: T.Tensor((batch, heads, latent), "float32"),
        pool: T.Tensor((pool_rows, row_bytes), "uint8"),
        locs: T.Tensor((batch, width), "int64"),
        out: T.Tensor((batch, heads, latent), "float32"),
    ):
        with T.Kernel(batch, heads) as (b, h):
            row = T.alloc_local((latent,), "float32")
            total = T.alloc_local((latent,), "float32")
            normaliser = T.alloc_var("float32")
            top = T.alloc_var("float32")
            higher = T.alloc_var("float32")
            score = T.alloc_var("float32")
            weight = T.alloc_var("float32")
            rescale = T.alloc_var("float32")
            normaliser = 0.0
            top = -T.infinity("float32")
            for c in T.serial(latent):
                total[c] = 0.0
            for j in T.serial(width):
                if locs[b, j] > 0:
                    score = 0.0
                    for c in T.serial(latent):
                        row[c] = channel(pool, locs[b, j], c)
                        score += q[b, h, c] * row[c]
                    higher = T.max(top, score)
                    rescale = T.exp(top - higher)
                    weight = T.exp(score - higher)
                    normaliser = normaliser * rescale + weight
                    for c in T.serial(latent):
                        total[c] = total[c] * rescale + weight * row[c]
                    top = higher
            for c in T.serial(latent):
                out[b, h, c] = total[c] / T.max(normaliser, T.float32(1e-37))

    return program
