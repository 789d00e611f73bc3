"""What SGLang says of its memory, in the contract's words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from torch import Tensor

from reference.contract import CachedNode, RequestId, RequestView, Snapshot
from reference.geometry import Geometry
from systems.sglang.pools import Pools


@dataclass(slots=True, kw_only=True)
class Running:
    """A request that runs.

    Fields:
        req: SGLang's own.
        tokens: prompt and what was decoded.
        length: positions stored.
        drafts: tokens that a verify has stored behind them, until it is known how many stay.
        states: those behind each of the drafts, [n, kda_layers, width].
    """

    req: Any
    tokens: list[int]
    length: int
    drafts: list[int] = field(default_factory=list)
    states: Tensor | None = None

    @property
    def started(self) -> bool:
        """Whether it has a row of the page table: SGLang gives it one with its first chunk."""
        return bool(self.req.kv.holds_kv)

    @property
    def allocated(self) -> int:
        """Positions that it has memory for; shared ones count."""
        return int(self.req.kv.kv_allocated_len) if self.started else self.length

    def prefix(self, tree: Any) -> Tensor:
        """[hit] locs: where the tree has the tokens that it has hit, before its first chunk."""
        if hasattr(tree, "prefix_device_indices"):
            found: Tensor = tree.prefix_device_indices(self.req)
            return found
        prefix: Tensor = self.req.prefix_indices
        return prefix


class Accounts:
    """Reads the tables of one engine's pools.

    Fields:
        hits: requests that found something in the tree.
    """

    def __init__(self, geometry: Geometry, pools: Pools) -> None:
        self._size, self._pools = geometry.logical_page_size, pools
        kinds = import_module("sglang.srt.mem_cache.unified_cache.component_type").ComponentType
        self._full, self._mamba = kinds.FULL, kinds.MAMBA
        self._to_pages = import_module("sglang.srt.mem_cache.common").kv_to_page_indices
        self.hits = 0

    def snapshot(self, running: Mapping[RequestId, Running]) -> Snapshot:
        """SGLang counts no references to pages: here they follow from who holds what."""
        requests = {name: self._view(each) for name, each in running.items()}
        root = self._pools.tree.tree_core.root_node
        # SGLang numbers the nodes of all trees of a process
        cached = tuple(self._nodes(root, None, 0, root.id))
        counts = Counter(page for node in cached for page in node.pages)
        for view in requests.values():
            counts.update(set(view.pages))
        return Snapshot(
            requests=requests,
            cached=cached,
            free_pages=self._pools.free_pages,
            free_states=self._pools.free_states,
            ref_counts=dict(counts),
            hits=self.hits,
            evicted_pages=self._pools.evicted,
            reused_pages=self._pools.reused,
        )

    def _view(self, each: Running) -> RequestView:
        kv, shared = each.req.kv, int(each.req.kv.cache_protected_len) // self._size
        resumed = None if kv.mamba_pool_idx is None else int(kv.mamba_pool_idx)
        if not each.started:
            return RequestView(
                length=each.length,
                pages=self._pages(each.prefix(self._pools.tree)),
                shared=shared,
                slot=None,
                state_slot=None,
                state_position=each.length,
                # the copy of a hit's state is made by the first chunk
                checkpoints={} if resumed is None else {0: resumed},
            )
        assert resumed is not None, "a request with a row has a state"
        row = self._pools.requests.req_to_token[kv.req_pool_idx, : kv.kv_allocated_len]
        return RequestView(
            length=each.length,
            pages=self._pages(row),
            shared=shared,
            slot=int(kv.req_pool_idx),
            state_slot=resumed,
            state_position=int(kv.kv_committed_len),
            pending=len(each.drafts),
            checkpoints={
                int(kv.mamba_last_track_seqlen or 0): slot
                for slot in kv.mamba_ping_pong_track_buffer.tolist()
            },
        )

    def _pages(self, locs: Tensor) -> tuple[int, ...]:
        return tuple(self._to_pages(locs, self._size).tolist())

    def _nodes(self, node: Any, parent: int | None, depth: int, first: int) -> Iterator[CachedNode]:
        """The nodes below `node`, which ends at prefix length `depth`; ids count from `first`."""
        for child in node.children.values():
            locs = child.component_data[self._full].value
            state = child.component_data[self._mamba].value
            stop = depth + len(locs)
            yield CachedNode(
                node=child.id - first,
                parent=parent,
                tokens=tuple(child.key.token_ids),
                pages=self._pages(locs),
                checkpoints={} if state is None else {stop: int(state[0])},
                locks=int(child.component_data[self._full].lock_ref),
            )
            yield from self._nodes(child, child.id - first, stop, first)
