"""Row-local arithmetic in tiles of one fixed shape, so that a row's bits depend on the row alone.

A matrix product picks its blocking by its shape, and a vectorised exponential treats the last
few elements of an array in another way than the rest: with every call made on exactly TILE rows,
neither can depend on how many rows a step has.  (Torch gives tiles of more than 32,768 elements
to several threads; their number has to divide the tile evenly, as a power of two does.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 32
"""Rows of a tile: two float32 vectors of the widest kind, so that no row is a remainder."""
EPSILON = 1e-6


def by_tiles(function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> list[Tensor]:
    """Apply a row-local `function` to inputs of n rows each, TILE rows at a time.

    Args:
        function: takes tensors of TILE rows, one for each input, and returns such tensors.
        inputs: [n, ...] each.

    Returns:
        The function's results for all n rows, joined.
    """
    rows = len(inputs[0])
    tiles = [
        function(*(_tile(rows_of, at) for rows_of in inputs)) for at in range(0, max(rows, 1), TILE)
    ]
    return [torch.cat(parts)[:rows] for parts in zip(*tiles, strict=True)]


def _tile(rows: Tensor, at: int) -> Tensor:
    tile = rows[at : at + TILE]
    if len(tile) == TILE:
        return tile
    padded = rows.new_zeros(TILE, *rows.shape[1:])
    padded[: len(tile)] = tile
    return padded


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Layer norm over the last dimension."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPSILON)
