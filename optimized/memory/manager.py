"""Who owns what: admission, growth, sharing and release of a request's memory.

Three rules hold at every return.  A page table entry is one reference on its page, and the tree
holds one more on what is cached.  The running state is never the tree's: checkpoints are copies.
A call that finds no memory has evicted, but changed nothing else.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from optimized import addressing
from optimized.addressing import Array
from optimized.kernels import gather
from optimized.kv_rows import KvRows, PagedRows
from optimized.memory.allocator import PADDING, Allocator
from optimized.memory.pools import Pools
from optimized.memory.prefix_tree import EMPTY, Match, Node, PrefixTree
from optimized.memory.requests import Request, RequestTable
from optimized.planner import DecodePlan
from reference.contract import (
    CachedNode,
    EngineOptions,
    OutOfMemory,
    RequestId,
    RequestView,
    Snapshot,
)
from reference.geometry import Geometry, ModelShape


class Memory:
    """Pools, their allocators, the prefix tree and the table of running requests."""

    def __init__(self, geometry: Geometry, shape: ModelShape, options: EngineOptions) -> None:
        self.geometry = geometry
        self.backend = options.backend
        self.pools = Pools(geometry, shape, options)
        order, seed = options.page_order, options.seed
        self.pages = self.open_pages(options)
        self.states = Allocator(
            options.state_slots,
            order=order,
            seed=seed + 1,
            scrub=self.pools.scrub_states,
            noun="state slots",
            option="state_slots",
        )
        self.rings = Allocator(
            options.max_requests + 1, order=order, seed=seed + 2, scrub=self.pools.scrub_rings
        )
        self.tree = PrefixTree(
            page_size=geometry.logical_page_size, pages=self.pages, states=self.states
        )
        self.table = RequestTable(
            slots=options.max_requests + 1, page_size=geometry.logical_page_size
        )
        self.hits = 0

    def open_pages(self, options: EngineOptions) -> Allocator:
        """The allocator of logical pages."""
        return Allocator(
            options.pages,
            order=options.page_order,
            seed=options.seed,
            scrub=self.pools.scrub_pages,
            noun="logical pages",
            option="pages",
        )

    def admit(self, request: RequestId, tokens: Array, *, share: bool = True) -> Request:
        """Enter a request with the cached prefix that it shares, if it may; its state is a copy
        of the hit's checkpoint, or zeros."""
        if not self.rings.available:
            raise OutOfMemory(
                f"request {request} finds all {self.rings.counts.size - 1} request slots taken: "
                "finish, abort or retract a request, or raise max_requests."
            )
        match = self.tree.match(tokens) if share else Match(self.tree.root, 0, PADDING)
        self.tree.lock(match.node)
        try:
            self.make_room(states=1)
        except OutOfMemory:
            self.tree.unlock(match.node)
            raise
        slot, state = int(self.rings.allocate(1)[0]), int(self.states.allocate(1)[0])
        table, shared = self.table, match.hit // self.geometry.logical_page_size
        table.widen(len(tokens))
        record = Request(request, slot, match.node, shared)
        table.add(record)
        table.tokens[slot, : len(tokens)] = tokens
        table.known[slot] = len(tokens)
        table.length[slot] = table.state_position[slot] = match.hit
        table.state[slot] = state
        table.pages_held[slot] = shared
        if match.hit:
            self.hits += 1
            pages = self.tree.path_pages(match.node)
            self.pages.retain(pages)
            table.pages[slot, :shared] = pages
            self.pools.copy_state(match.state_slot, state)
        else:
            self.pools.state[state].zero_()
        return record

    def make_room(self, *, pages: int = 0, states: int = 0, keep: Array = EMPTY) -> None:
        """Evict until so many pages and state slots are free, but no part of the prefix `keep`,
        or raise OutOfMemory."""
        lack = (pages - self.pages.available, states - self.states.available)
        if max(lack) > 0:
            self.tree.evict(pages=lack[0], states=lack[1], keep=keep)
        self.pages.require(pages)
        self.states.require(states)

    def grow(self, slots: Array, stops: Array, *, checkpoints: bool = True) -> None:
        """Give requests the pages that they need to reach `stops`, and a state slot for each
        checkpoint on the way (but in a verify, whose drafts may be rejected)."""
        table = self.table
        pages = np.maximum(addressing.pages_for(self.geometry, stops) - table.pages_held[slots], 0)
        interval = self.geometry.mamba_track_interval
        states = stops // interval - table.length[slots] // interval
        if not checkpoints:
            states[:] = 0
        places = (pages | states).nonzero()[0].tolist()
        if not places:
            return
        self.make_room(pages=int(pages.sum()), states=int(states.sum()))
        table.widen(int(stops.max()))
        for place in places:
            slot = int(slots[place])
            held, more = int(table.pages_held[slot]), int(pages[place])
            table.pages[slot, held : held + more] = self.pages.allocate(more)
            table.pages_held[slot] += more
            first = int(table.length[slot]) // interval + 1
            marks = range(first * interval, (first + int(states[place])) * interval, interval)
            record = table.by_slot[slot]
            assert record is not None, "only running requests grow"
            record.checkpoints.update(
                zip(marks, self.states.allocate(len(marks)).tolist(), strict=True)
            )

    def advance(self, slots: Array, stops: Array) -> None:
        """Note that a step has stored all positions below `stops`, and keep the states that
        stand at a checkpoint."""
        self.table.length[slots] = stops
        self.table.state_position[slots] = stops
        at_checkpoint = stops % self.geometry.mamba_track_interval == 0
        for place in at_checkpoint.nonzero()[0].tolist():
            record = self.table.by_slot[slots[place]]
            assert record is not None, "only running requests advance"
            self.keep_checkpoint(record, int(stops[place]))

    def keep_checkpoint(self, record: Request, length: int) -> None:
        """Copy the running state, which stands for `length` positions, to its checkpoint."""
        self.pools.copy_state(int(self.table.state[record.slot]), record.checkpoints[length])

    def complete(self, record: Request) -> None:
        """Note that all of a request's prompt is stored.  One that takes part in a transfer stays
        as it is where sharing would free some of its pages."""
        if not (record.placed and self._has_duplicates(record)):
            self.share(record)

    def settle(self, record: Request) -> None:
        """See to it that the KV pool has all rows of a request."""

    def share(self, record: Request) -> None:
        """Cache the request's whole pages up to its last checkpoint, with its checkpoints, and
        lock them.  Where the same pages are cached already, it switches to those and frees its
        own."""
        if not record.checkpoints:
            return
        slot, table = record.slot, self.table
        length = max(record.checkpoints)
        own = table.pages[slot, : length // self.geometry.logical_page_size]
        cached = self.tree.insert(table.tokens[slot, :length], own, record.checkpoints)
        self.states.release(cached.surplus)
        record.checkpoints = {}
        self._switch(own, cached.pages)
        self.tree.lock(cached.node)
        self.tree.unlock(record.node)
        record.node, record.shared = cached.node, len(cached.pages)

    def _has_duplicates(self, record: Request) -> bool:
        """Whether pages that a request would share are cached already, as others."""
        slot, table = record.slot, self.table
        length = max(record.checkpoints, default=0)
        _, cached = self.tree.cached_part(table.tokens[slot, :length])
        return not np.array_equal(cached, table.pages[slot, : len(cached)])

    def _switch(self, own: Array, cached: Array) -> None:
        """Let the page table read the cached pages, and free the duplicates."""
        differ = (own != cached).nonzero()[0]
        duplicates = own[differ]
        self.pages.retain(cached[differ])
        own[differ] = cached[differ]
        self.pages.release(duplicates)

    def release(self, record: Request) -> None:
        """Let go of all that a request holds."""
        slot, table = record.slot, self.table
        self.pages.release(table.pages[slot, : table.pages_held[slot]])
        self.tree.unlock(record.node)
        self.states.release([int(table.state[slot]), *record.checkpoints.values()])
        self.rings.release([slot])
        table.remove(record)

    def kv_rows(self, locs: Array) -> Array:
        """Rows of the KV pool at which the rows of these locs are; padding's is padding."""
        return locs

    def kv_page(self, layer: int, page: int) -> Tensor:
        """[logical_page_size, row bytes] uint8: view of a layer's KV rows of a logical page."""
        size = self.geometry.logical_page_size
        first = int(self.kv_rows(np.array(page * size)))
        return self.pools.kv[layer, first : first + size]

    def paged_rows(self, table: Array, rows: Array, locs: Tensor) -> KvRows:
        """Where a step finds the KV rows of requests by their `rows` of a page table; it stores
        those of `locs`."""
        stored = torch.from_numpy(self.kv_rows(locs.numpy()))
        return PagedRows(self.geometry, self.pools.kv, self.kv_rows, table, rows, stored)

    def decode_rows(self, plan: DecodePlan, slots: Array) -> KvRows:
        """Where a decode of the requests in these slots has its KV rows."""
        return self.paged_rows(plan.table.pages, np.arange(len(slots)), plan.locs)

    def read_kv(self, slot: int, layer: int, positions: Array) -> Tensor:
        """[positions, row bytes] uint8: a request's stored KV rows in one layer."""
        locs = addressing.locs(self.geometry, self.table.pages, slot, positions)
        rows = torch.from_numpy(self.kv_rows(locs))
        return gather.gather_rows(self.pools.kv[layer], rows, backend=self.backend)

    def snapshot(self) -> Snapshot:
        """Page tables, owners and counts, copied."""
        counts = enumerate(self.pages.counts.tolist())
        views: dict[bool, dict[RequestId, RequestView]] = {False: {}, True: {}}
        for record in self.table.by_id.values():
            views[record.reserved][record.id] = self._view(record)
        return Snapshot(
            requests=views[False],
            cached=tuple(_cached(node) for node in self.tree.nodes()),
            free_pages=self.pages.free_ids(),
            free_states=self.states.free_ids(),
            ref_counts={page: count for page, count in counts if count},
            hits=self.hits,
            evicted_pages=self.tree.evicted_pages,
            reused_pages=self.pages.reused,
            reserved=views[True],
        )

    def _view(self, record: Request) -> RequestView:
        slot, table = record.slot, self.table
        _, length, pending, pages_held, state, state_position = table.columns[:, slot].tolist()
        return RequestView(
            length=length,
            pages=tuple(table.pages[slot, :pages_held].tolist()),
            shared=record.shared,
            slot=slot,
            state_slot=state,
            state_position=state_position,
            pending=pending,
            checkpoints=dict(record.checkpoints),
        )


def _cached(node: Node) -> CachedNode:
    assert node.parent is not None, "the root caches nothing"
    return CachedNode(
        node=node.id,
        # the root is id 0
        parent=node.parent.id or None,
        tokens=tuple(node.tokens.tolist()),
        pages=tuple(node.pages.tolist()),
        checkpoints=dict(node.checkpoints),
        locks=node.locks,
    )
