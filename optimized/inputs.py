"""What a caller hands in, checked in full and copied, before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from optimized.addressing import Array
from reference.contract import EngineOptions, InvalidCall, Rows, Tokens, kv_bytes
from reference.geometry import Geometry, ModelShape

BACKENDS = ("torch", "triton")


def checked_options(options: EngineOptions, geometry: Geometry, shape: ModelShape) -> EngineOptions:
    """The options, if their backend is one of the engine's and their tensors fit the model."""
    if options.backend not in BACKENDS:
        raise InvalidCall(
            f"there is no backend {options.backend!r}: choose one of {', '.join(BACKENDS)}."
        )
    if options.ape is not None:
        size = len(shape.dsa_layers), geometry.kpool, shape.index_dim
        options = replace(options, ape=dense("ape", options.ape, torch.float32, size))
    if options.kv_memory is not None:
        flat = (kv_bytes(geometry, shape, options),)
        memory = dense("kv_memory", options.kv_memory, torch.uint8, flat)
        if not memory.is_contiguous():
            raise InvalidCall("kv_memory skips bytes: pass a contiguous tensor.")
        options = replace(options, kv_memory=memory)
    return options


def integers(**counts: int) -> list[int]:
    """The arguments as Python's integers: numpy's would overflow where theirs are narrow."""
    for name, count in counts.items():
        if not _integral(type(count)):
            raise InvalidCall(f"{name} is of type {type(count).__name__}: pass an integer.")
    return list(map(int, counts.values()))


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


def dense(name: str, given: object, dtype: torch.dtype, size: tuple[int, ...]) -> Tensor:
    """`given` without its gradients, if it is a dense tensor of this kind where the engine is."""
    found = type(given).__name__
    if isinstance(given, Tensor):
        on_cpu = given.is_cpu and given.layout is torch.strided
        if on_cpu and given.dtype is dtype and given.shape == size:
            return given.detach() if given.requires_grad else given
        kind = given.dtype, given.layout, given.device.type, tuple(given.shape)
        found = "{} of layout {} on {} of shape {}".format(*kind).replace("torch.", "")
    wanted = str(dtype).removeprefix("torch.")
    raise InvalidCall(
        f"{name} is {found}: make it a dense {wanted} tensor on the CPU of shape {size}."
    )


def given_rows(
    geometry: Geometry,
    shape: ModelShape,
    rows: Sequence[Rows | None],
    sizes: Sequence[tuple[int, int]],
    *,
    stamped: bool,
    selects: bool = False,
) -> list[Rows] | None:
    """The rows of a stamped step, or None of a model's.

    Args:
        sizes: of how many positions and states each of them is to be.
        selects: whether they are to name what the step selects.
    """
    given = [some for some in rows if some is not None]
    if len(given) != (len(rows) if stamped else 0):
        raise InvalidCall(
            "a stamped engine stores the rows that it is handed and one with a model computes "
            "them: pass rows to the former and none to the latter."
        )
    if any((some.selected is not None) != selects for some in given):
        raise InvalidCall(
            "a stamped decode under HiSparse is told what to select, and no other step is: pass "
            "Rows.selected to that alone."
        )
    if not stamped:
        return None
    return [
        _checked(geometry, shape, some, positions=positions, states=states)
        for some, (positions, states) in zip(given, sizes, strict=True)
    ]


def _checked(
    geometry: Geometry, shape: ModelShape, rows: Rows, *, positions: int, states: int
) -> Rows:
    dsa, kda = len(shape.dsa_layers), len(shape.kda_layers)
    real, narrow = torch.float32, (dsa, positions, shape.index_dim)
    wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "kv": (real, (dsa, positions, shape.latent)),
        "key": (real, narrow),
        "gate": (real, narrow),
        "state": (real, (states, kda, shape.state_width)),
    }
    if rows.selected is not None:
        wanted["selected"] = torch.int64, (dsa, positions, geometry.selection_width)
    tensors = {name: dense(name, getattr(rows, name), *kind) for name, kind in wanted.items()}
    return Rows(**tensors)


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


@lru_cache
def _integral(kind: type) -> bool:
    """Whether a type is one of integers; numpy derives its time spans from them."""
    return issubclass(kind, int | np.integer) and not issubclass(kind, bool | np.timedelta64)
