"""Selected groups to selected positions, the tail always with them (SGLang #42178)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.kernels.backends import use_triton


def expand(groups: Tensor, position: Tensor, *, kpool: int, width: int, backend: str) -> Tensor:
    """[queries, width] int64: the positions of the groups, the tail, then -1.

    Args:
        groups: [queries, most groups] int64, ascending, then -1.
        position: [queries] int64; the tail runs from (position + 1) // kpool * kpool to it.
        width: columns, at least most groups * kpool + kpool - 1.
    """
    queries, most = groups.shape
    if use_triton(backend, expand_kernel, groups):
        out = groups.new_empty((queries, width))
        expand_kernel[(queries,)](
            groups,
            position,
            out,
            most,
            width,
            KPOOL=kpool,
            GROUPS=triton.next_power_of_2(most),
            WIDTH=triton.next_power_of_2(width),
        )
        return out
    slot = torch.arange(kpool, device=groups.device)
    out = groups.new_empty((queries, width))
    inside, rest = out.tensor_split((most * kpool,), dim=1)
    # a group of -1 gives negative positions only
    inside = inside.unflatten(1, (most, kpool))
    torch.add((groups * kpool)[..., None], slot, out=inside)
    inside.clamp_min_(-1)
    rest.fill_(-1)
    # a tail has kpool - 1 places behind the groups; those past `position` stay -1
    position, slot = position[:, None], slot[:-1]
    tail = (position + 1) // kpool * kpool + slot
    column = (groups >= 0).sum(dim=1, keepdim=True) * kpool + slot
    return out.scatter_(1, column, tail.masked_fill_(tail > position, -1))


@triton.jit
def expand_kernel(
    groups,
    position,
    out,
    most,
    width,
    KPOOL: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program for one query."""
    query = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    found = tl.load(groups + query * most + group, mask=group < most, other=-1) >= 0
    selected = tl.sum(found.to(tl.int64)) * KPOOL
    column = tl.arange(0, WIDTH)
    own = tl.load(groups + query * most + column // KPOOL, mask=column < selected, other=0)
    newest = tl.load(position + query)
    tail = (newest + 1) // KPOOL * KPOOL + column - selected
    tail = tl.where(tail <= newest, tail, -1)
    place = tl.where(column < selected, own * KPOOL + column % KPOOL, tail)
    tl.store(out + query * width + column, place, mask=column < width)
