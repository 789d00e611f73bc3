"""Faults of the pooled key: softmax pooling, Hadamard rotation, FP8 scale, and the tail ring."""

from __future__ import annotations

import pkgutil
from typing import Any

import torch
from torch import Tensor

from fuzz.mutants.registry import Body, mutant

KERNEL = "optimized.kernels.pooled_key"


@mutant("optimized.steps._ape", bug="own", killed_by=("provenance",))
def ape_dropped(original: Body, *args: Any) -> Tensor:
    """Keys are pooled by their gates alone, without the position weights."""
    return torch.zeros_like(original(*args))


@mutant(f"{KERNEL}.hadamard", bug="own", killed_by=("provenance",))
def hadamard_stage_missing(original: Body, dim: int, device: torch.device) -> Tensor:
    """The Hadamard rotation leaves out its last butterfly stage."""
    half = original(dim // 2, device)
    return torch.kron(half, torch.eye(2, dtype=half.dtype, device=device))


@mutant(f"{KERNEL}.pool", bug="own", killed_by=("provenance",))
def rotated_before_pooling(original: Body, keys: Tensor, gates: Tensor, ape: Tensor) -> Tensor:
    """Keys are rotated one by one and then pooled, and not pooled and then rotated."""
    rotate = pkgutil.resolve_name(f"{KERNEL}.rotate")
    rotated = rotate(keys.flatten(0, 1)).to(keys).view_as(keys)
    # the rotation is its own inverse: the one that follows undoes this one
    return rotate(original(rotated, gates, ape)).to(keys)


@mutant(f"{KERNEL}.next_power_of_two", bug="own", killed_by=("provenance",))
def scale_rounded_down(original: Body, scale: Tensor) -> Tensor:
    """A key's scale is rounded down to a power of two, so that its largest values saturate."""
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)


def _left_in_rings(original: Body, self: Any, ids: Any) -> None:
    left = vars(self).setdefault("left", self.ring.clone())
    left[:, ids] = self.ring[:, ids]
    original(self, ids)


@mutant(
    "optimized.memory.manager.Memory.admit",
    bug="own",
    killed_by=(),
    target="slot_reuse",
    also={"optimized.memory.pools.Pools.scrub_rings": _left_in_rings},
    equivalence="oracle_tests/test_mutant_equivalence.py::test_ring_needs_no_reset",
)
def ring_not_reset(original: Body, self: Any, *request: Any) -> Any:
    """A request finds the keys of the slot's last owner in its tail ring."""
    record, ring = original(self, *request), self.pools.ring
    ring[:, record.slot] = vars(self.pools).get("left", ring)[:, record.slot]
    return record
