"""An engine's end of a transfer: where the parts of a request are, and memory for one to come.

A reserved request holds all its memory from the start, so that nothing can fail once its parts
have landed, and it is a request like any other from then on (`reference.handover`).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from optimized import addressing
from optimized.addressing import Array
from optimized.memory.manager import Memory
from optimized.memory.requests import Request
from optimized.transfer.plan import state_unit
from reference.contract import Places, RequestId
from reference.geometry import ModelShape


def regions(memory: Memory, shape: ModelShape) -> dict[str, Tensor]:
    """[items, item bytes] uint8 views of all that is moved, by name, in their common order."""
    pools = memory.pools
    views: dict[str, Tensor] = {}
    for layer in range(len(pools.kv)):
        views[f"kv {layer}"] = pools.kv[layer]
        views[f"index {layer}"] = pools.index[layer]
        views[f"tail {layer}"] = pools.ring[layer].view(torch.uint8).flatten(0, 1)
    views["state"] = pools.state.view(torch.uint8).view(-1, 4 * state_unit(shape))
    return views


def places(memory: Memory, record: Request) -> Places:
    """Where the stored positions of a running request are, from now on until it leaves."""
    memory.settle(record)
    record.placed = True
    return _places(memory, record, int(memory.table.length[record.slot]))


def _places(memory: Memory, record: Request, length: int) -> Places:
    geometry, table, slot = memory.geometry, memory.table, record.slot
    size = geometry.logical_page_size
    pages = table.pages[slot, : -(-length // size)]
    tail = np.arange(length // geometry.kpool * geometry.kpool, length)
    return Places(
        kv=tuple((memory.kv_rows(pages * size) // size).tolist()),
        index=tuple(pages.tolist()),
        tail=tuple(addressing.ring_rows(geometry, slot, tail).tolist()),
        state=int(table.state[slot]),
        length=length,
    )


def reserve(memory: Memory, request: RequestId, tokens: Array) -> Places:
    """Take all memory of a request that is to come, and say where.

    Raises:
        OutOfMemory: there is too little; nothing but evictions has happened.
    """
    length = np.array([len(tokens)])
    at_checkpoint = len(tokens) % memory.geometry.mamba_track_interval == 0
    pages = int(addressing.pages_for(memory.geometry, length)[0])
    memory.make_room(pages=pages, states=1 + at_checkpoint)
    record = memory.admit(request, tokens, share=False)
    record.reserved = True
    # of the checkpoints on the way none will come
    memory.grow(np.array([record.slot]), length, checkpoints=False)
    if at_checkpoint:
        record.checkpoints[len(tokens)] = int(memory.states.allocate(1)[0])
    return _places(memory, record, len(tokens))


def adopt(memory: Memory, record: Request) -> None:
    """Let a reserved request run, all of whose parts have landed."""
    record.reserved = False
    # its pages were reserved as one, and are given back as one
    record.placed = True
    slots = np.array([record.slot])
    memory.advance(slots, memory.table.known[slots])
    memory.complete(record)
