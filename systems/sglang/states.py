"""KDA states: what SGLang's linear attention writes into the slots that its scheduler names.

The states are given, but for one thing that a recurrence does: what starts from a NaN is NaN.  So a
request that resumes memory which nobody has filled is seen to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reference.geometry import Geometry
from systems.sglang.pools import POISON, Pools


class States:
    """Writes given states to SGLang's pool."""

    def __init__(self, geometry: Geometry, pools: Pools) -> None:
        self._geometry, self._pools = geometry, pools

    def begin(self, batch: Any) -> None:
        """What the model runner does before a prefill: clear slots that are new, and copy cached
        states to the requests that resume them."""
        pool = self._pools.requests
        if batch.mamba_clear_indices is not None:
            pool.mamba_pool.clear_slots(pool.translate_mamba_indices(batch.mamba_clear_indices))
        if batch.mamba_cow_src_indices is not None:
            pool.copy_mamba_state(
                pool.translate_mamba_indices(batch.mamba_cow_src_indices),
                pool.translate_mamba_indices(batch.mamba_cow_dst_indices),
            )

    def prefilled(
        self,
        batch: Any,
        starts: Sequence[int],
        stops: Sequence[int],
        given: Sequence[Tensor],
        kept: Sequence[tuple[int, int, int]],
    ) -> None:
        """Write the state behind each request's chunk, and those that are kept on the way.

        given: of each request the states of `Geometry.state_positions`, [n, kda_layers, width].
        kept: (place in the batch, position, state slot).  One at a position whose state is not
            among those given is poison: it stands for a prefix that ends in the middle of a page.
        """
        slots = self._pools.requests.get_mamba_indices(batch.req_pool_indices).tolist()
        spans = [
            dict(zip(self._geometry.state_positions(start, stop), states, strict=True))
            for start, stop, states in zip(starts, stops, given, strict=True)
        ]
        for place, position, slot in kept:
            state = spans[place].get(position, _unknown(given[place][0]))
            self._write(slot, state, behind=slots[place])
        for slot, stop, states in zip(slots, stops, spans, strict=True):
            self._write(slot, states[stop], behind=slot)

    def stepped(self, batch: Any, given: Tensor) -> None:
        """Write the state behind the new position of each request, [n, kda_layers, width], and
        copy those that SGLang tracks."""
        pool = self._pools.requests
        slots = pool.get_mamba_indices(batch.req_pool_indices)
        for slot, state in zip(slots.tolist(), given, strict=True):
            self._write(slot, state, behind=slot)
        taken = batch.mamba_track_mask
        pool.copy_mamba_state(slots[taken].long(), batch.mamba_track_indices[taken])

    def accepted(self, batch: Any, given: Tensor, last: int, cached: int) -> None:
        """Write the state behind the last draft that the one request of a batch keeps, and the one
        for its cache; `given` are those behind each of its drafts, [n, kda_layers, width]."""
        (slot,) = self._pools.requests.get_mamba_indices(batch.req_pool_indices).tolist()
        if cached >= 0:
            self._write(int(batch.mamba_track_indices[0]), given[cached], behind=slot)
        self._write(slot, given[last], behind=slot)

    def _write(self, slot: int, state: Tensor, *, behind: int) -> None:
        """Store a state [kda_layers, width], its matrix and then its convolution window, which
        follows from the one in the slot `behind`."""
        for layer, words in enumerate(state):
            parts = self._pools.state_parts(layer)
            if any(part[behind].isnan().any() for part in parts):
                words = _unknown(words)
            for part in parts:
                own, words = words[: part[slot].numel()], words[part[slot].numel() :]
                part[slot] = own.view_as(part[slot])


def _unknown(state: Tensor) -> Tensor:
    """A state of this shape that nobody has given."""
    return torch.full_like(state.view(torch.uint8), POISON).view(state.dtype)
