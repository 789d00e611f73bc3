"""Copies of cached prefixes on the host, which outlive their eviction from the device.

A prefix stands here whole or not at all: the KV and index rows of its logical pages, and the KDA
state at its end.  What is restored enters the prefix tree once its last byte is there, so that no
request can hit half of it.  (SGLang #42178 lists a host copy without index rows as a known issue.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from optimized.addressing import Array
from optimized.memory.allocator import NONE, Allocator, Ids
from optimized.memory.manager import Memory
from optimized.memory.pools import POISON
from reference.contract import EngineOptions, TieredPrefix, TierSnapshot
from reference.contract import HostTier as Sizes

ROOT = 0
"""The page before the first of every prefix: the padding cell, which no prefix holds."""
Before = Callable[[str], None]


class HostTier:
    """A trie of pages, in which some are the last of a prefix and have a KDA state.

    Each prefix holds all pages from the root to its last, so those of a common beginning are
    held by several.  The least recently used prefix goes when another needs room.

    Fields:
        kv: [pages + 1, dsa_layers, logical_page_size, row bytes] uint8.
        index: [pages + 1, dsa_layers, index page bytes] uint8.
        state: [states + 1, kda_layers, state_width] float32.
    """

    def __init__(self, sizes: Sizes, options: EngineOptions, memory: Memory) -> None:
        self._sizes = sizes
        self._memory = memory
        self._page_size = memory.geometry.logical_page_size
        self._poison = options.poison
        index, state, kv_page = memory.pools.index, memory.pools.state, memory.kv_page(0, 0)
        pages, states, layers = sizes.pages + 1, sizes.states + 1, len(index)
        self.kv = torch.zeros(pages, layers, *kv_page.shape, dtype=torch.uint8)
        self.index = torch.zeros(pages, layers, index.shape[-1], dtype=torch.uint8)
        self.state = torch.zeros(states, *state.shape[1:])
        self._scrub_pages(np.arange(pages))
        self._scrub_states(np.arange(states))
        order, seed = options.page_order, options.seed
        self.pages = Allocator(pages, order=order, seed=seed + 5, scrub=self._scrub_pages)
        self.states = Allocator(states, order=order, seed=seed + 6, scrub=self._scrub_states)
        # a page by the one before it and its own tokens, and back
        self._next: dict[tuple[int, bytes], int] = {}
        self._entry: dict[int, tuple[int, bytes]] = {}
        # the state at each prefix's last page, the least recently used prefix first
        self._state_at: dict[int, int] = {}

    def back_up(self, tokens: Array, before: Before) -> int:
        """Copy the longest cached prefix of `tokens` that can be resumed, less the pages that
        are here already.  Returns its length, or 0 where the tier is too small for it."""
        tree = self._memory.tree
        found = tree.resumable(tokens)
        tokens, count = tokens[: found.hit], found.hit // self._page_size
        if not 0 < count <= self._sizes.pages or not self._sizes.states:
            return 0
        shared = self._descend(tokens)
        lack = count - len(shared)
        if not lack and shared[-1] in self._state_at:
            self._touch(shared[-1])
            return found.hit
        fresh, slots = NONE, NONE
        tree.lock(found.node)
        self.pages.retain(shared)
        try:
            self._make_room(lack)
            if lack:
                before(f"allocate {lack} pages of the host tier")
                fresh = self.pages.allocate(lack)
            before("allocate a state slot of the host tier")
            slots = self.states.allocate(1)
            pages = tree.path_pages(found.node)[len(shared) : count]
            for what, device, host in self._parts(pages, fresh, found.state_slot, slots.item()):
                before(f"copy {what} to the host")
                host.copy_(device)
        except BaseException:
            self._release([*shared, *fresh.tolist()])
            self.states.release(slots)
            raise
        finally:
            tree.unlock(found.node)
        self._enter(tokens, [*shared, *fresh.tolist()], slots.item())
        return found.hit

    def restore(self, tokens: Array, before: Before) -> int:
        """Cache the longest prefix of `tokens` that stands here, less the pages that are cached
        already.  Returns its length.

        Raises:
            OutOfMemory: the device has too little room even after eviction.
        """
        path = self._longest(tokens)
        if not path:
            return 0
        memory, tree = self._memory, self._memory.tree
        tokens = tokens[: len(path) * self._page_size]
        _, cached = tree.cached_part(tokens)
        if tree.resumable(tokens).hit < len(tokens):
            memory.make_room(pages=len(path) - len(cached), states=1, keep=tokens)
            self._bring_back(tokens, cached, path, before)
        else:
            tree.insert(tokens, cached, {})  # nothing new, but a use
        self._touch(path[-1])
        return len(tokens)

    def _bring_back(self, tokens: Array, cached: Array, path: list[int], before: Before) -> None:
        """Cache `tokens` from the tier's pages `path`, of which the tree has `cached` already."""
        memory, tree = self._memory, self._memory.tree
        node, _ = tree.cached_part(tokens)
        hosts = path[len(cached) :]
        fresh, slots = NONE, NONE
        tree.lock(node)
        try:
            if hosts:
                before(f"allocate {len(hosts)} logical pages")
                fresh = memory.pages.allocate(len(hosts))
            before("allocate a state slot")
            slots = memory.states.allocate(1)
            state, host_state = slots.item(), self._state_at[path[-1]]
            for what, device, host in self._parts(fresh, hosts, state, host_state):
                before(f"copy {what} from the host")
                device.copy_(host)
            added = tree.insert(tokens, np.concatenate([cached, fresh]), {len(tokens): state})
            slots = np.array(added.surplus, dtype=np.int64)  # the tree took the others over
        finally:
            # the tree has its own references on the pages that it took
            memory.pages.release(fresh)
            memory.states.release(slots)
            tree.unlock(node)

    def snapshot(self) -> TierSnapshot:
        """The prefixes and what is free, copied."""
        return TierSnapshot(
            prefixes=tuple(self._view(end, state) for end, state in self._state_at.items()),
            free_pages=self.pages.free_ids(),
            free_states=self.states.free_ids(),
        )

    def _view(self, end: int, state: int) -> TieredPrefix:
        path = self._path(end)
        spelled = b"".join(self._entry[page][1] for page in path)
        tokens = np.frombuffer(spelled, dtype=np.int64).tolist()
        return TieredPrefix(tokens=tuple(tokens), pages=tuple(path), state=state)

    def _parts(
        self, pages: Iterable[int], host_pages: Iterable[int], state: int, host_state: int
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name, device bytes and host bytes of all that is stored of some pages and a state."""
        memory, pools = self._memory, self._memory.pools
        for page, host in zip(pages, host_pages, strict=True):
            for layer in range(len(pools.index)):
                where = f"of page {page} in layer {layer}"
                yield f"KV rows {where}", memory.kv_page(layer, page), self.kv[host, layer]
                yield f"index rows {where}", pools.index[layer, page], self.index[host, layer]
        for layer, device in enumerate(pools.state[state]):
            yield f"state {state} in layer {layer}", device, self.state[host_state, layer]

    def _descend(self, tokens: Array) -> list[int]:
        """The pages of the longest beginning of `tokens` that is here."""
        path: list[int] = []
        for key in self._keys(tokens):
            page = self._next.get((path[-1] if path else ROOT, key))
            if page is None:
                break
            path.append(page)
        return path

    def _longest(self, tokens: Array) -> list[int]:
        """The pages of the longest prefix of `tokens` that is here."""
        path = self._descend(tokens)
        while path and path[-1] not in self._state_at:
            path.pop()
        return path

    def _path(self, end: int) -> list[int]:
        """The pages from the root to `end`."""
        path = []
        while end != ROOT:
            path.append(end)
            end = self._entry[end][0]
        return path[::-1]

    def _keys(self, tokens: Array) -> Iterator[bytes]:
        """The tokens of each whole page."""
        for stop in range(self._page_size, len(tokens) + 1, self._page_size):
            yield tokens[stop - self._page_size : stop].tobytes()

    def _enter(self, tokens: Array, path: list[int], state: int) -> None:
        """Let a prefix be found, whose pages hold all of it."""
        for before, page, key in zip([ROOT, *path], path, self._keys(tokens), strict=False):
            self._next[before, key] = page
            self._entry[page] = before, key
        self._state_at[path[-1]] = state

    def _touch(self, end: int) -> None:
        """Make the prefix that ends at a page the last to go."""
        self._state_at[end] = self._state_at.pop(end)

    def _make_room(self, pages: int) -> None:
        """Let prefixes go until so many pages and a state slot are free."""
        while pages > self.pages.available or not self.states.available:
            end = next(iter(self._state_at))
            self.states.release([self._state_at.pop(end)])
            self._release(self._path(end))

    def _release(self, pages: list[int]) -> None:
        """Let go of pages; those that no prefix holds any more are not found again."""
        self.pages.release(pages)
        for page in pages:
            if not self.pages.counts[page] and page in self._entry:
                del self._next[self._entry.pop(page)]

    def _scrub_pages(self, ids: Ids) -> None:
        """Poison freed pages."""
        if self._poison:
            for pool in (self.kv, self.index):
                pool.index_fill_(0, torch.from_numpy(ids), POISON)

    def _scrub_states(self, ids: Ids) -> None:
        """Poison freed states."""
        if self._poison:
            self.state.view(torch.uint8).index_fill_(0, torch.from_numpy(ids), POISON)
