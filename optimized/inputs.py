"""What a caller hands in, checked in full and copied, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from optimized.addressing import Array
from reference.contract import InvalidCall, Rows, Tokens
from reference.geometry import Geometry, ModelShape


def integers(**counts: int) -> list[int]:
    """The arguments as Python's integers: numpy's would overflow where theirs are narrow."""
    for name, count in counts.items():
        if not _integral(type(count)):
            raise InvalidCall(f"{name} is of type {type(count).__name__}: pass an integer.")
    return [int(count) for count in counts.values()]


def token_ids(tokens: Tokens, *, vocab: int | None) -> Array:
    """The tokens as an int64 array of the engine's own, all in the vocabulary if there is one."""
    array = _int64s(tokens)
    if array is None:
        raise InvalidCall(
            "tokens are no flat sequence of 64-bit integers: give a list, tuple or array with "
            "one integer a token."
        )
    if vocab is not None and ((array < 0) | (array >= vocab)).any():
        raise InvalidCall(f"a token is no id of the vocabulary: give ids from 0 to {vocab - 1}.")
    return array


def check_rows(
    rows: Rows,
    geometry: Geometry,
    shape: ModelShape,
    *,
    positions: int,
    states: int,
    selects: bool = False,
) -> None:
    """Raises InvalidCall unless `rows` are of so many positions and states, with a selection
    where the step `selects` by them and without one elsewhere."""
    if (rows.selected is not None) != selects:
        raise InvalidCall(
            "a stamped decode under HiSparse is told what to select, and no other step is: pass "
            "Rows.selected to that alone."
        )
    dsa, kda = len(shape.dsa_layers), len(shape.kda_layers)
    wanted = {
        "kv": ("float32", (dsa, positions, shape.latent)),
        "key": ("float32", (dsa, positions, shape.index_dim)),
        "gate": ("float32", (dsa, positions, shape.index_dim)),
        "state": ("float32", (states, kda, shape.state_width)),
    }
    if selects:
        wanted["selected"] = ("int64", (dsa, positions, geometry.selection_width))
    for name, (kind, size) in wanted.items():
        given: Tensor = getattr(rows, name)
        found = str(given.dtype).removeprefix("torch."), tuple(given.shape)
        if found != (kind, size):
            raise InvalidCall(
                f"rows have {name} as {found[0]} of shape {found[1]}: make it {kind} of shape "
                f"{size}."
            )


def _int64s(tokens: Tokens) -> Array | None:
    """A copy of the tokens, or None where numpy would round, wrap or reshape to make one."""
    if isinstance(tokens, np.ndarray):
        flat = tokens.ndim == 1 and tokens.dtype.kind in "iu"
        if not flat or (tokens > np.iinfo(np.int64).max).any():
            return None
        return tokens.astype(np.int64)
    if not isinstance(tokens, Sequence) or not all(map(_integral, set(map(type, tokens)))):
        return None
    try:
        return np.fromiter(tokens, np.int64, len(tokens))
    except OverflowError:
        return None


def _integral(kind: type) -> bool:
    """Whether a type is one of integers; numpy derives its time spans from them."""
    return issubclass(kind, int | np.integer) and not issubclass(kind, bool | np.timedelta64)
