"""Which heads of the KDA layers a tensor-parallel rank has, and how its states lie.

Rank r of R computes and stores heads r * H/R .. (r+1) * H/R - 1 of the H heads, and everything
else as a single rank does: MLA and index rows are on all ranks.  So a rank is an engine of a
smaller model, whose layers exchange their heads' outputs; its state has the layout of
`ModelShape.state_width` for its own heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from reference.contract import InvalidCall
from reference.geometry import ModelShape


def rank_shape(shape: ModelShape, size: int) -> ModelShape:
    """The shape of the model as one of `size` ranks has it.

    Raises:
        InvalidCall: where the heads cannot be shared out evenly.
    """
    if shape.kda_heads % size:
        raise InvalidCall(
            f"{shape.kda_heads} KDA heads cannot be shared out to {size} ranks: choose a number "
            "of ranks that divides kda_heads."
        )
    return replace(shape, kda_heads=shape.kda_heads // size)


def own_rows(weight: Tensor, rank: int, size: int) -> Tensor:
    """The rows of a head-major weight [rows of all heads, ...] that belong to one rank's heads."""
    return weight.chunk(size)[rank]


def rank_state(shape: ModelShape, state: Tensor, rank: int, size: int) -> Tensor:
    """[..., rank's state_width]: one rank's part of states [..., state_width] of all heads."""
    return _joined(*(part.chunk(size, dim=-1)[rank] for part in _parts(shape, state)))


def whole_state(shape: ModelShape, states: Sequence[Tensor]) -> Tensor:
    """[..., state_width]: the states of all heads from those of all ranks, in rank order."""
    own = rank_shape(shape, len(states))
    parts = zip(*(_parts(own, state) for state in states), strict=True)
    return _joined(*(torch.cat(part, dim=-1) for part in parts))


def _parts(shape: ModelShape, state: Tensor) -> list[Tensor]:
    """Views of the matrix [..., words] and of the window's q, k and v [..., conv_width - 1,
    channels]: in the last dimension of each lies one head behind the other."""
    keys, values = shape.kda_heads * shape.kda_key_dim, shape.kda_heads * shape.kda_value_dim
    matrix, window = state.tensor_split([keys * shape.kda_value_dim], dim=-1)
    rows = window.unflatten(-1, (shape.conv_width - 1, shape.conv_channels))
    return [matrix, *rows.split([keys, keys, values], dim=-1)]


def _joined(matrix: Tensor, *window: Tensor) -> Tensor:
    return torch.cat([matrix, torch.cat(window, dim=-1).flatten(-2)], dim=-1)
