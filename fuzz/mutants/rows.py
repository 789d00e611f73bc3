"""Faults of stored KV rows: FP8 saturation, and the scales of packed rows."""

from __future__ import annotations

import torch
from torch import Tensor

from fuzz.mutants.registry import Body, mutant
from reference.geometry import RowFormat

KERNEL = "optimized.kernels.kv_store"


@mutant(f"{KERNEL}.encode_rows", bug="own", killed_by=("provenance",))
def packed_scales_reversed(original: Body, rows: Tensor, *, row_format: RowFormat) -> Tensor:
    """The scales of a packed row stand in the order of the last block to the first."""
    stored = original(rows, row_format=row_format)
    if row_format is RowFormat.FP8_PACKED:
        scales = stored[:, rows.shape[1] :].reshape(len(rows), -1, 4)
        stored[:, rows.shape[1] :] = scales.flip(1).flatten(1)
    return stored


@mutant(f"{KERNEL}.encode_e4m3", bug="own", killed_by=("provenance",))
def fp8_overflow_is_nan(original: Body, values: Tensor) -> Tensor:
    """A value beyond the range of FP8 is stored as NaN, and not as the largest value."""
    beyond = values.abs() > torch.finfo(torch.float8_e4m3fn).max
    return original(values) | beyond.byte()
