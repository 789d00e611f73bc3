"""Radix tree over whole logical pages, with KDA checkpoints by prefix length.

An edge holds a run of pages; a child is found by the bytes of its first page.
A prefix may be resumed only where a checkpoint stands, so a match is cut back
to the last one, and it leaves at least one token to compute.  Running requests
lock the path of what they read; eviction takes unlocked leaves, least recently
used first, and frees their pages and checkpoints together (SGLang #42178: all
components of a cached token live and die as one).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from optimized.memory.allocator import PADDING, Allocator

Array = NDArray[np.int64]
EMPTY = np.zeros(0, dtype=np.int64)


class Node:
    """An edge and the node below it.

    depth is the prefix length at the lower end; checkpoints maps prefix lengths that end
    inside this edge to state slots; locks counts the running requests at or below.
    """

    __slots__ = ("checkpoints", "children", "depth", "id", "locks", "pages", "parent", "tokens",
                 "used")  # fmt: skip

    def __init__(self, identity: int, parent: Node | None, tokens: Array, pages: Array) -> None:
        self.id = identity
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.depth: int = (parent.depth if parent else 0) + len(tokens)
        self.children: dict[bytes, Node] = {}
        self.checkpoints: dict[int, int] = {}
        self.locks = 0
        self.used = 0

    @property
    def start(self) -> int:
        """Prefix length at the upper end."""
        return self.depth - len(self.tokens)


@dataclass(frozen=True, slots=True)
class Match:
    """The resumable part of a request: `hit` tokens that end at `node`, whose state waits in
    `state_slot` (padding when hit is 0)."""

    node: Node
    hit: int
    state_slot: int


@dataclass(frozen=True, slots=True)
class Insertion:
    """The cached path of an inserted prefix: its last node and all its pages, and the state
    slots of the inserter's checkpoints that were there already."""

    node: Node
    pages: Array
    surplus: list[int]


class PrefixTree:
    """Cached prefixes in whole pages of `page_size` tokens.

    The tree holds one reference on each cached page and on each checkpoint's state slot.
    """

    def __init__(self, *, page_size: int, pages: Allocator, states: Allocator) -> None:
        self.page_size = page_size
        self.pages = pages
        self.states = states
        self.evicted_pages = 0
        self.root = Node(0, None, EMPTY, EMPTY)
        self._leaves: set[Node] = set()
        self._next_id = 1
        self._clock = 0

    def match(self, tokens: Array) -> Match:
        """The longest cached prefix of `tokens` that can be resumed and is shorter than it.  An
        edge is cut where it ends, so that the rest of the edge stays evictable."""
        node, matched = self._descend(tokens)
        limit = self.longest_hit(matched, len(tokens))
        node, hit = self._last_checkpoint(node, limit)
        if node is self.root:
            return Match(node, 0, 0)
        state_slot = node.checkpoints[hit]
        if hit < node.depth:
            node = self.split(node, hit)
        self._touch(node)
        return Match(node, hit, state_slot)

    def resumable(self, tokens: Array) -> Match:
        """The longest cached prefix of `tokens`, which may be all of it, that can be resumed; it
        may end inside the edge of its node."""
        node, hit = self._last_checkpoint(*self._descend(tokens))
        return Match(node, hit, node.checkpoints.get(hit, PADDING))

    def cached_part(self, tokens: Array) -> tuple[Node, Array]:
        """The pages of the longest cached prefix of `tokens`, checkpoint or not, and the node in
        whose edge it ends."""
        node, matched = self._descend(tokens)
        return node, self.path_pages(node)[: matched // self.page_size]

    def longest_hit(self, matched: int, length: int) -> int:
        """Tokens that may be reused of `matched` cached ones: the last token of a request is
        always computed, since its output is wanted."""
        return min(matched, length - 1)

    def insert(self, tokens: Array, pages: Array, checkpoints: Mapping[int, int]) -> Insertion:
        """Cache a prefix of whole pages.  The tree takes a reference on the pages that were
        not cached yet, and takes over the checkpoints that it lacked; for pages that were
        cached the inserter is to switch to the cached ones."""
        assert len(tokens) == len(pages) * self.page_size, "only whole pages can be cached"
        node = self._cut(tokens)
        if node.depth < len(tokens):
            node = self._append(node, tokens[node.depth :], pages[node.depth // self.page_size :])
        surplus = [slot for depth, slot in checkpoints.items() if not self._keep(node, depth, slot)]
        self._touch(node)
        return Insertion(node, self.path_pages(node), surplus)

    def path_pages(self, node: Node) -> Array:
        """The pages of the prefix that ends at a node, in order."""
        path = [step.pages for step in self._path(node)]
        return np.concatenate([EMPTY, *reversed(path)])

    def split(self, node: Node, depth: int) -> Node:
        """Cut an edge at a prefix length inside it; returns the new upper node.  The lower one
        keeps its identity, so whoever holds it still holds the whole path."""
        assert node.start < depth < node.depth, "an edge is cut inside"
        assert node.parent is not None, "the root has no edge"
        cut = depth - node.start
        pages = node.pages[: cut // self.page_size]
        upper = Node(self._new_id(), node.parent, node.tokens[:cut], pages)
        upper.locks = node.locks
        upper.used = node.used
        upper.checkpoints = {at: s for at, s in node.checkpoints.items() if at <= depth}
        node.checkpoints = {at: s for at, s in node.checkpoints.items() if at > depth}
        node.parent.children[self._key(upper.tokens)] = upper
        node.tokens = node.tokens[cut:]
        node.pages = node.pages[len(upper.pages) :]
        node.parent = upper
        upper.children[self._key(node.tokens)] = node
        return upper

    def lock(self, node: Node) -> None:
        """Hold the path of a running request."""
        for step in self._path(node):
            step.locks += 1

    def unlock(self, node: Node) -> None:
        """Let go of a path held by `lock`."""
        for step in self._path(node):
            assert step.locks > 0, "path unlocked twice"
            step.locks -= 1

    def evict(self, *, pages: int = 0, states: int = 0, keep: Array = EMPTY) -> int:
        """Free at least so many pages and state slots, least recently used leaves first, or
        all that is unlocked and no part of the prefix `keep`; returns how many pages went."""
        kept = set(self._path(self._cut(keep)))
        gone = slots = 0
        heap = [(leaf.used, leaf.id, leaf) for leaf in self._leaves - kept if self.evictable(leaf)]
        heapq.heapify(heap)
        while heap and (gone < pages or slots < states):
            leaf = heapq.heappop(heap)[2]
            gone += len(leaf.pages)
            slots += len(leaf.checkpoints)
            parent = self._remove(leaf)
            if parent in self._leaves and parent not in kept and self.evictable(parent):
                heapq.heappush(heap, (parent.used, parent.id, parent))
        self.evicted_pages += gone
        return gone

    def evictable(self, leaf: Node) -> bool:
        """Whether no running request reads the leaf."""
        return leaf.locks == 0

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _descend(self, tokens: Array) -> tuple[Node, int]:
        """The deepest node that shares at least a page with `tokens`, and the shared length."""
        node, matched = self.root, 0
        while child := node.children.get(self._key(tokens[matched:])):
            node = child
            matched += self.common_length(child.tokens, tokens[matched:])
            if matched < node.depth:
                break
        return node, matched

    def _cut(self, tokens: Array) -> Node:
        """The node at which the cached part of `tokens` ends, cut there if need be."""
        node, matched = self._descend(tokens)
        return self.split(node, matched) if matched < node.depth else node

    def common_length(self, edge: Array, tokens: Array) -> int:
        """Tokens in the common whole pages of an edge and of the rest of a request."""
        length = min(len(edge), len(tokens))
        differs = edge[:length] != tokens[:length]
        first = int(differs.argmax())
        if differs[first]:
            length = first
        return length // self.page_size * self.page_size

    def _last_checkpoint(self, node: Node, limit: int) -> tuple[Node, int]:
        """The node and length of the last checkpoint on the path at or before `limit`."""
        for step in self._path(node):
            depth = max((at for at in step.checkpoints if at <= limit), default=0)
            if depth:
                return step, depth
        return self.root, 0

    def _keep(self, node: Node, depth: int, slot: int) -> bool:
        """Give a checkpoint to the node whose edge it ends in, unless one is there."""
        while depth <= node.start:
            assert node.parent is not None, "a checkpoint stands at a positive length"
            node = node.parent
        return node.checkpoints.setdefault(depth, slot) == slot

    def _append(self, parent: Node, tokens: Array, pages: Array) -> Node:
        leaf = Node(self._new_id(), parent, tokens.copy(), pages.copy())
        self.pages.retain(leaf.pages)
        parent.children[self._key(leaf.tokens)] = leaf
        self._leaves.discard(parent)
        self._leaves.add(leaf)
        return leaf

    def _remove(self, leaf: Node) -> Node:
        parent = leaf.parent
        assert parent is not None, "the root stays"
        assert not leaf.children, "only leaves are evicted"
        del parent.children[self._key(leaf.tokens)]
        self._leaves.discard(leaf)
        if not parent.children and parent is not self.root:
            self._leaves.add(parent)
        self.pages.release(leaf.pages)
        self.states.release(list(leaf.checkpoints.values()))
        return parent

    def _path(self, node: Node | None) -> Iterator[Node]:
        """The nodes from `node` up, the root left out."""
        while node is not None and node is not self.root:
            yield node
            node = node.parent

    def _touch(self, node: Node) -> None:
        self._clock += 1
        for step in self._path(node):
            step.used = self._clock

    def _key(self, tokens: Array) -> bytes:
        """Name of a child: its first page's tokens."""
        return tokens[: self.page_size].tobytes()

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1
