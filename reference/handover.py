"""The part of the contract by which a request moves from one engine to another.

At the engine that prefilled it (P) a request runs on until its transfer is over; `places` says
where its parts lie.  At the engine that is to decode it (D) `reserve` takes all the memory that it
will need, `adopt` makes it a request as if it had been prefilled there, and `drop` gives the memory
back.  Between the two nothing else may be done with it, since bytes may land in its memory at any
time: when that has ended is decided by the drain protocol (`reference.protocol`), not by engines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from reference.views import RequestId

Tokens = Sequence[int] | NDArray[np.integer[Any]]
"""Token ids, one int64 each: a list, a tuple or a one-dimensional array of any integer width.
In a model run each is in 0 .. vocab - 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the parts of one request are at one end of a transfer, its first `length` positions.

    Fields:
        kv: pages of the KV pool, in order of positions; under HiSparse the host's.
        index: index pages, in order of positions.
        tail: the cell of each position after the last closed group, counted over the tail rings
            of all request slots.
        state: row of the state pool.
    """

    kv: tuple[int, ...]
    index: tuple[int, ...]
    tail: tuple[int, ...]
    state: int
    length: int


class Handover(Protocol):
    """What an engine with Capability.TRANSFER offers besides."""

    def places(self, request: RequestId) -> Places:
        """Where the stored positions of a running request are, its drafts not counted.  They stay
        there until the request leaves, and only its own further steps change tail, state and last
        index page.  A prompt that completes from now on is shared only at the request's end if
        some of its pages are cached already, since it would switch to those and free its own."""
        ...

    def reserve(self, request: RequestId, tokens: Tokens) -> Places:
        """Take a request slot, pages, state slots and (under HiSparse) a hot buffer for a request
        whose first `len(tokens)` positions come from another engine.  Nothing is shared with the
        cache.  Until it is adopted or dropped, every other call about it raises InvalidCall.
        Raises OutOfMemory as `submit` and `extend` do."""
        ...

    def adopt(self, request: RequestId) -> None:
        """All parts of a reserved request have landed: from now on it is a running request with
        its prompt complete.  Its whole pages are shared at once if its end is a checkpoint, unless
        the same pages are cached already: then it keeps its own until it leaves, as the transfer
        counts on them until then."""
        ...

    def drop(self, request: RequestId) -> None:
        """Free all memory of a reserved request.  The caller knows that no write can reach it."""
        ...

    def regions(self) -> Mapping[str, Tensor]:
        """The memory between which parts are copied: [items, item bytes] uint8 views by name, in
        the same order in every engine of one model.  They never move.

        For each DSA layer "kv" (an item a row), "index" (a page) and "tail" (a cell of a ring);
        then "state", whose items are the longest runs of words that lie together however the heads
        are split over ranks: gcd(kda_key_dim, kda_value_dim) float32 words."""
        ...
