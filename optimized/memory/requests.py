"""The requests, as a structure of arrays indexed by ring slot.

Decode asks the same few numbers of every request of a batch, so they are columns; what only the
life cycle needs is in a record of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from optimized.addressing import Array
from optimized.memory.prefix_tree import Node
from reference.contract import RequestId


@dataclass(slots=True)
class Request:
    """What one request holds.

    Fields:
        slot: its ring row, and its row in the tables.
        node: the end of the cached path that it locks; `shared` pages long.
        checkpoints: prefix length to state slot, of those that the tree does not have yet.
        draft_states: [n, kda_layers, state_width] KDA state after each draft of a verify that
            waits for `accept`.
        placed: its pages must stay its own until it leaves: another engine may be reading them, or
            they came in a transfer, which gives them back as one.
        reserved: its parts are still to come from another engine; it does not run.
    """

    id: RequestId
    slot: int
    node: Node
    shared: int
    checkpoints: dict[int, int] = field(default_factory=dict)
    draft_states: Tensor | None = None
    placed: bool = False
    reserved: bool = False


class RequestTable:
    """Columns of all requests; row 0 is padding.

    Fields:
        tokens: [slots, columns] token ids, pending drafts behind the known ones.
        pages: [slots, columns] logical pages.
        known: tokens submitted or appended; length: positions stored; pending: drafts stored
            and not accepted; pages_held: entries of the page row; state: state slot;
            state_position: positions that it stands for.
    """

    def __init__(self, *, slots: int, page_size: int) -> None:
        self.page_size = page_size
        self.by_id: dict[RequestId, Request] = {}
        self.by_slot: list[Request | None] = [None] * slots
        self.tokens = np.zeros((slots, page_size), dtype=np.int64)
        self.pages = np.zeros((slots, 1), dtype=np.int64)
        self.columns = np.zeros((6, slots), dtype=np.int64)
        self.known, self.length, self.pending = self.columns[:3]
        self.pages_held, self.state, self.state_position = self.columns[3:]

    def add(self, request: Request) -> None:
        """Enter a request, whose columns the caller fills."""
        self.by_id[request.id] = request
        self.by_slot[request.slot] = request

    def remove(self, request: Request) -> None:
        """Strike a request out; its columns become those of an empty row."""
        del self.by_id[request.id]
        self.by_slot[request.slot] = None
        self.columns[:, request.slot] = 0

    def widen(self, tokens: int) -> None:
        """Make room for requests of so many tokens."""
        have = self.tokens.shape[1]
        if tokens > have:
            pages = -(-max(tokens, 2 * have) // self.page_size)
            self.tokens = _widened(self.tokens, pages * self.page_size)
            self.pages = _widened(self.pages, pages)


def _widened(old: Array, columns: int) -> Array:
    new = np.zeros((len(old), columns), dtype=np.int64)
    new[:, : old.shape[1]] = old
    return new
