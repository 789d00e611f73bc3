"""What the kernel tests share: poisoned buffers, whole-buffer comparison, accepted roundings."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import torch
from torch import Tensor

from reference import pooling, quant
from reference.addressing import index_byte_offsets
from reference.geometry import Geometry

UNIT = 2.0**-24
"""Unit roundoff of float32."""

POISON = 0xFF
"""Byte of poisoned memory: a NaN in bf16, e4m3 and float32."""

Group = tuple[Tensor, Tensor]
"""Keys and gates [kpool, index_dim] bf16 of one group, on the CPU."""


def poisoned(*shape: int, dtype: torch.dtype = torch.uint8, device: str = "cpu") -> Tensor:
    """A tensor of poison bytes."""
    *outer, inner = shape
    data = torch.full((*outer, inner * dtype.itemsize), POISON, dtype=torch.uint8, device=device)
    return data.view(dtype)


def differing_rows(actual: Tensor, expected: Tensor) -> list[int]:
    """Rows in which two tensors of one shape and type differ in any byte."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    rows = [x.cpu().contiguous().view(torch.uint8).flatten(1) for x in (actual, expected)]
    return (rows[0] != rows[1]).any(dim=1).nonzero().flatten().tolist()


def spread_ids(count: int, of: int, *, least: int = 1) -> Tensor:
    """[count] int64: shuffled ids in [least, of), the lowest and the highest among them."""
    between = torch.randperm(of - least - 2)[: count - 2] + least + 1
    ids = torch.cat((torch.tensor([least, of - 1]), between))
    return ids[torch.randperm(count)]


def pool_geometry(*, kpool: int, page: int, round_scale: bool = True) -> Geometry:
    """The least geometry around an index pool."""
    return Geometry(
        kpool=kpool,
        physical_page_size=page,
        topk=kpool,
        mamba_track_interval=page * kpool,
        round_scale=round_scale,
    )


def wrong_index_slots(
    before: Tensor, after: Tensor, written: Mapping[int, Group], ape: Tensor, geometry: Geometry
) -> list[int]:
    """Index slots of the whole pool, padding page 0 apart, that do not hold what they should.

    `written` maps a slot to the group that it must hold; all other slots must hold what they
    held `before`.
    """
    pages, page_bytes = before.shape
    dim = page_bytes // geometry.index_page_size - 4
    slots = torch.arange(geometry.index_page_size, pages * geometry.index_page_size).numpy()
    offsets = torch.from_numpy(index_byte_offsets(slots, geometry, dim))
    assert offsets.unique().numel() == (pages - 1) * page_bytes, "not the whole pool is compared"
    old, new = before.cpu().flatten()[offsets], after.cpu().flatten()[offsets]
    changed = (old != new).any(dim=1)
    wrong = []
    for row, slot in enumerate(slots.tolist()):
        if slot not in written:
            if changed[row]:
                wrong.append(slot)
        elif not is_pooled_row(new[row], written[slot], ape.cpu(), geometry):
            wrong.append(slot)
    return wrong


def is_pooled_row(stored: Tensor, group: Group, ape: Tensor, geometry: Geometry) -> bool:
    """Whether index row `stored` is the group's, by the reference.

    It must be equal in every byte, but for values so near to a boundary between two bf16
    numbers that float32 arithmetic may round them to the other side: then to one of those rows.
    """
    keys, gates = (x.double() for x in group)
    exact = pooling.pooled_rows(keys, gates, ape, geometry)[0]
    if torch.equal(stored, exact):
        return True
    logit = gates + ape.double()
    weight = logit.softmax(dim=0)
    mean = (weight * keys).sum(dim=0)
    # a weight is off by the roundings of gate + ape, of its distance from the top and of exp's
    # argument; numerator and normaliser both are; and each slot costs an exp, a rescaling, a sum
    units = 2 * 5 * logit.abs().amax(dim=0) + 8 * len(keys)
    error = units * UNIT * (weight * keys.abs()).sum(dim=0)
    hadamard = pooling.hadamard(len(mean))
    for pooled in roundings(mean, error):
        rotated = hadamard @ pooled
        for key in roundings(rotated, rotated.abs() * UNIT):
            row = quant.encode_key(key[None], round_scale=geometry.round_scale)[0]
            if torch.equal(stored, row):
                return True
    return False


def roundings(x: Tensor, error: Tensor) -> list[Tensor]:
    """All bf16 roundings of a float64 vector known up to `error`."""
    low, high = quant.round_bf16(x - error), quant.round_bf16(x + error)
    unsure = (low != high).nonzero().flatten().tolist()
    assert len(unsure) <= 8, "so many values on a boundary are no accident: the bound is too wide"
    found = []
    for choice in product((low, high), repeat=len(unsure)):
        value = low.clone()
        for channel, source in zip(unsure, choice, strict=True):
            value[channel] = source[channel]
        found.append(value)
    return found
