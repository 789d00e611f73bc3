"""Pooled index keys: kpool consecutive keys become one stored row.

Specifies SGLang #42178: a softmax over the slots of a group, channel by channel, of gate
plus position weight; the weighted sum; a Hadamard rotation; FP8 with one scale a row.  With
kpool 1 the softmax is 1 and the row is the plain key's, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.geometry import Geometry
from reference.quant import bf16_bytes, encode_key, round_bf16


def sylvester(dim: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """[dim, dim] Hadamard matrix of +-1 in Sylvester's order."""
    matrix = torch.ones(1, 1, dtype=dtype)
    while len(matrix) < dim:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix


def hadamard(dim: int) -> Tensor:
    """[dim, dim] float64: `sylvester` times dim**-0.5 (so orthogonal)."""
    scaled: Tensor = sylvester(dim) * dim**-0.5
    return scaled


def rotate(x: Tensor) -> Tensor:
    """bf16(Had(x)) along the last axis, whose length is a power of two."""
    dim = x.shape[-1]
    # scaled last: float64 sums of bf16 values are exact, so that what cancels leaves a true 0
    return round_bf16((x @ sylvester(dim, x.dtype)) * dim**-0.5)


def pool(keys: Tensor, gates: Tensor, ape: Tensor) -> Tensor:
    """bf16 pooled keys [groups, dim] of keys and gates [groups, kpool, dim]; ape [kpool, dim]."""
    weights = torch.softmax(gates + ape, dim=1)
    return round_bf16((weights * keys).sum(1))


def pooled_rows(keys: Tensor, gates: Tensor, ape: Tensor, geometry: Geometry) -> Tensor:
    """Index rows of the closed groups among n consecutive positions that start a group.

    Arguments: keys and gates [n, index_dim], rounded to bf16 here; ape [kpool, index_dim].
    Returns: [n // kpool, index_dim + 4] uint8, each a key and its float32 scale.
    """
    closed = len(keys) // geometry.kpool
    shape = (closed, geometry.kpool, keys.shape[-1])
    key, gate = (
        round_bf16(x[: closed * geometry.kpool].to(torch.float64)).reshape(shape)
        for x in (keys, gates)
    )
    pooled = pool(key, gate, ape.to(torch.float64))
    return encode_key(rotate(pooled), round_scale=geometry.round_scale)


def tail_rows(keys: Tensor, gates: Tensor) -> Tensor:
    """[n, 4 * index_dim] uint8: bf16 key, then bf16 gate, of each of n positions."""
    return torch.cat([bf16_bytes(keys), bf16_bytes(gates)], -1)
