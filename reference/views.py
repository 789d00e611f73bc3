"""What an engine says of its memory when it is asked: copies, never live views.

Words and units are those of docs/architecture.md and `reference.geometry`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

RequestId = NewType("RequestId", int)
"""Chosen by the caller, unique among the requests that are not finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """One running request.

    Fields:
        length: positions stored so far.
        pages: its logical pages, in order; the first `shared` of them belong to the tree.
        slot: its row in the tail ring; None where an engine gives it one only with its first
            chunk.
        state_slot: its row in the state pool; None as `slot`.
        state_position: positions that the state stands for.
        pending: drafts stored by a verify and not yet accepted or rejected.
        checkpoints: prefix length to state slot, for the checkpoints that it took and that the
            tree does not hold (yet); slots of those still to be written count.
    """

    length: int
    pages: tuple[int, ...]
    shared: int
    slot: int | None
    state_slot: int | None
    state_position: int
    pending: int = 0
    checkpoints: Mapping[int, int] = field(default_factory=dict)

    @property
    def state_slots(self) -> tuple[int, ...]:
        """All rows of the state pool that it holds."""
        own = () if self.state_slot is None else (self.state_slot,)
        return (*own, *self.checkpoints.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedNode:
    """One node of the prefix tree.  Its path from the root spells a cached prefix.

    Fields:
        node: identity; parent: identity of the parent, None below the root.
        tokens: the edge's tokens, a whole number of logical pages.
        pages: the edge's logical pages.
        checkpoints: prefix length to state slot, for lengths that end inside this edge.
        locks: running requests that hold this node or one below it.
    """

    node: int
    parent: int | None
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    checkpoints: Mapping[int, int]
    locks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """Tokens of each memory of an engine with HiSparse, apart; padding is in none of them.

    Fields:
        device_*: rows of the device pool; hot ones belong to a running request.
        host_*: rows of the host pool; held ones to a request, to a cached prefix, or to both.
        logical_*: token locs; owned by a request alone, or cached in the prefix tree.
    """

    device_free: int
    device_hot: int
    device_total: int
    host_free: int
    host_held: int
    host_total: int
    logical_free: int
    logical_owned: int
    logical_cached: int
    logical_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HotBufferView:
    """The hot buffer of one request.

    Fields:
        pages: its device pages, in order.
        rows: the device row of each slot, and behind them the newest position's.
        tags: for each DSA layer the position in each slot; -1 if none.
        lru: for each DSA layer the slots, the least recently used first.
        host_rows: the host row of each position of its pages, as a swap-in looks it up.
        saved: positions that are on the host, or ordered to go there: all, or all but the newest.
    """

    pages: tuple[int, ...]
    rows: tuple[int, ...]
    tags: tuple[tuple[int, ...], ...]
    lru: tuple[tuple[int, ...], ...]
    host_rows: tuple[int, ...]
    saved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HotSnapshot:
    """What an engine with HiSparse says of its device and host rows.

    Fields:
        backing: the host page of each logical page that is not free.
        free_device, free_host: device and host pages that nobody owns.
    """

    buffers: Mapping[RequestId, HotBufferView]
    backing: Mapping[int, int]
    free_device: frozenset[int]
    free_host: frozenset[int]
    occupancy: Occupancy


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredPrefix:
    """A prefix that stands whole in the host tier: its tokens, the tier's page of each of its
    logical pages, and the tier's slot of the KDA state at its end."""

    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    state: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSnapshot:
    """What the host tier holds, the least recently used first, and what is free in it.  Prefixes
    with a common beginning share its pages."""

    prefixes: tuple[TieredPrefix, ...]
    free_pages: frozenset[int]
    free_states: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that an engine says of its memory; copies, never live views.

    Fields:
        requests: those that run; reserved: those whose parts are still to land (`Engine.reserve`).
        free_pages, free_states: ids that nobody owns.
        ref_counts: for each logical page that is not free, how many hold it: the tree (1 if
            it is cached) plus each request that reads or owns it.
        hits, evicted_pages, reused_pages: totals since the start; a page counts as reused
            when it is handed out again after it was freed.
        hot: None without HiSparse; tier: None without a host tier.
    """

    requests: Mapping[RequestId, RequestView]
    cached: tuple[CachedNode, ...]
    free_pages: frozenset[int]
    free_states: frozenset[int]
    ref_counts: Mapping[int, int]
    hits: int = 0
    evicted_pages: int = 0
    reused_pages: int = 0
    hot: HotSnapshot | None = None
    tier: TierSnapshot | None = None
    reserved: Mapping[RequestId, RequestView] = field(default_factory=dict)

    @property
    def holders(self) -> Mapping[RequestId, RequestView]:
        """All requests that hold memory."""
        return {**self.requests, **self.reserved}
