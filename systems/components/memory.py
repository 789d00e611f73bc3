"""Ids and cached prefixes: lists that are searched from one end to the other.

Where a prefix may be resumed is `reference.prefix`'s.  The rest has no twin in the reference, which
has no memory to manage, and is written plainly here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from optimized.memory.allocator import PADDING, Allocator
from optimized.memory.pools import POISON, Pools
from optimized.memory.prefix_tree import EMPTY, Insertion, Match, Node, PrefixTree
from reference.contract import CachedNode
from reference.geometry import Geometry
from reference.prefix import cached_prefixes, longest_hit
from systems.components.component import Component

Array = NDArray[np.int64]
ALLOCATOR = Component("memory.allocator", "free ids, and how many hold the others")
POOLS = Component("memory.pools", "poison in freed memory, and copies of states")
PREFIX_TREE = Component("memory.prefix_tree", "cached prefixes: match, insert, evict")


@ALLOCATOR.by("Allocator.allocate")
def allocate(self: Allocator, count: int) -> Array:
    self._free.sort()
    taken, self._free[:] = self._free[:count], self._free[count:]
    assert len(taken) == count, "the caller has made room"
    ids = np.array([cell for _, cell in taken], dtype=np.int64)
    for cell in ids:
        self.counts[cell] = 1
        self.reused += bool(self._was_freed[cell])
    return ids


@ALLOCATOR.by("Allocator.retain")
def retain(self: Allocator, ids: Any) -> None:
    for cell in np.asarray(ids, dtype=np.int64):
        assert self.counts[cell] > 0, "an id that nobody holds cannot be shared"
        self.counts[cell] += 1


@ALLOCATOR.by("Allocator.release")
def release(self: Allocator, ids: Any) -> None:
    for cell in np.asarray(ids, dtype=np.int64):
        assert self.counts[cell] > 0, "only what is held can be released"
        self.counts[cell] -= 1
    freed = [cell for cell in np.asarray(ids, dtype=np.int64) if self.counts[cell] == 0]
    if freed:
        self._return(np.array(freed, dtype=np.int64))


@ALLOCATOR.by("Allocator._return")
def give_back(self: Allocator, freed: Array) -> None:
    if self._scrub is not None:
        self._scrub(freed)
    for cell in freed.tolist():
        self._was_freed[cell] = True
        self._free.append((self._rank(cell), cell))


@ALLOCATOR.by("Allocator._rank")
def rank(self: Allocator, cell: int) -> int:
    if self._ranks is not None:
        return self._ranks[cell]
    self._stamp -= 1
    return self._stamp


@POOLS.by("Pools.scrub_kv")
def scrub_kv(self: Pools, ids: Array) -> None:
    size = self._page_size
    for page in ids.tolist() if self._poison else ():
        self.kv[:, page * size : (page + 1) * size] = POISON


@POOLS.by("Pools.scrub_index")
def scrub_index(self: Pools, ids: Array) -> None:
    for page in ids.tolist() if self._poison else ():
        self.index[:, page] = POISON


@POOLS.by("Pools.scrub_states")
def scrub_states(self: Pools, ids: Array) -> None:
    for slot in ids.tolist() if self._poison else ():
        self.state[slot].view(torch.uint8)[:] = POISON


@POOLS.by("Pools.scrub_rings")
def scrub_rings(self: Pools, ids: Array) -> None:
    for slot in ids.tolist() if self._poison else ():
        self.ring[:, slot].view(torch.uint8)[:] = POISON


@POOLS.by("Pools.copy_state")
def copy_state(self: Pools, source: int, target: int) -> None:
    for layer in range(self.state.shape[1]):
        self.state[target, layer] = self.state[source, layer].clone()


def path(node: Node | None) -> list[Node]:
    """The nodes from the root, which is left out, down to `node`."""
    up = []
    while node is not None and node.parent is not None:
        up.append(node)
        node = node.parent
    return up[::-1]


def spelt(node: Node) -> Array:
    """The tokens of the prefix that ends at a node."""
    return np.concatenate([EMPTY, *(step.tokens for step in path(node))])


def below(node: Node) -> list[Node]:
    """The nodes under one."""
    return [some for child in node.children.values() for some in (child, *below(child))]


def common(self: PrefixTree, a: Array, b: Array) -> int:
    """Tokens of the whole pages with which both begin."""
    length = 0
    size = self.page_size
    while (
        length + size <= min(len(a), len(b))
        and a[length : length + size].tolist() == b[length : length + size].tolist()
    ):
        length += size
    return length


def descend(self: PrefixTree, tokens: Array) -> tuple[Node, int]:
    """Of all nodes the one whose prefix has most in common with `tokens`, the upper one of
    equals."""
    best, most = self.root, 0
    for node in below(self.root):
        same = common(self, spelt(node), tokens)
        if same > most:
            best, most = node, same
    return best, most


@PREFIX_TREE.by("PrefixTree.match")
def match(self: PrefixTree, tokens: Array) -> Match:
    node, hit = _resumed(self, tokens)
    if not hit:
        return Match(self.root, 0, PADDING)
    state = node.checkpoints[hit]
    if hit < node.depth:
        node = split(self, node, hit)
    touch(self, node)
    return Match(node, hit, state)


@PREFIX_TREE.by("PrefixTree.resumable")
def resumable(self: PrefixTree, tokens: Array) -> Match:
    """As though one more token, which no request has, were to be computed."""
    node, hit = _resumed(self, np.append(tokens, -1))
    return Match(node, hit, node.checkpoints.get(hit, PADDING))


def _resumed(self: PrefixTree, tokens: Array) -> tuple[Node, int]:
    """The longest hit by the reference's rule, and the node in whose edge it ends."""
    nodes = below(self.root)
    cached = [
        CachedNode(
            node=node.id,
            parent=node.parent.id or None if node.parent else None,
            tokens=tuple(node.tokens.tolist()),
            pages=tuple(node.pages.tolist()),
            checkpoints=dict(node.checkpoints),
            locks=node.locks,
        )
        for node in nodes
    ]
    size = self.page_size
    geometry = Geometry(kpool=1, physical_page_size=size, topk=1, mamba_track_interval=size)
    hit = longest_hit(tokens.tolist(), cached_prefixes(cached).values(), geometry)
    for node in nodes:
        if hit in node.checkpoints and spelt(node)[:hit].tolist() == tokens[:hit].tolist():
            return node, hit
    return self.root, 0


@PREFIX_TREE.by("PrefixTree.cached_part")
def cached_part(self: PrefixTree, tokens: Array) -> tuple[Node, Array]:
    node, matched = descend(self, tokens)
    return node, path_pages(self, node)[: matched // self.page_size]


@PREFIX_TREE.by("PrefixTree.insert")
def insert(
    self: PrefixTree, tokens: Array, pages: Array, checkpoints: Mapping[int, int]
) -> Insertion:
    assert len(tokens) == len(pages) * self.page_size, "only whole pages can be cached"
    node = cut(self, tokens)
    if node.depth < len(tokens):
        rest = pages[node.depth // self.page_size :].copy()
        self.pages.retain(rest)
        leaf = Node(self._new_id(), node, tokens[node.depth :].copy(), rest)
        node.children[_name(self, leaf.tokens)] = leaf
        self._leaves.discard(node)
        self._leaves.add(leaf)
        node = leaf
    surplus = []
    for depth, slot in checkpoints.items():
        (holder,) = (step for step in path(node) if step.start < depth <= step.depth)
        if holder.checkpoints.setdefault(depth, slot) != slot:
            surplus.append(slot)
    touch(self, node)
    return Insertion(node, path_pages(self, node), surplus)


@PREFIX_TREE.by("PrefixTree.path_pages")
def path_pages(self: PrefixTree, node: Node) -> Array:
    return np.concatenate([EMPTY, *(step.pages for step in path(node))])


def cut(self: PrefixTree, tokens: Array) -> Node:
    node, matched = descend(self, tokens)
    return split(self, node, matched) if matched < node.depth else node


def split(self: PrefixTree, node: Node, depth: int) -> Node:
    above, at = node.parent, depth - node.start
    assert above is not None, "the root has no edge"
    pages = at // self.page_size
    upper = Node(self._new_id(), above, node.tokens[:at], node.pages[:pages])
    upper.locks, upper.used = node.locks, node.used
    for mark in [mark for mark in node.checkpoints if mark <= depth]:
        upper.checkpoints[mark] = node.checkpoints.pop(mark)
    node.tokens, node.pages, node.parent = node.tokens[at:], node.pages[pages:], upper
    above.children[_name(self, upper.tokens)] = upper
    upper.children[_name(self, node.tokens)] = node
    return upper


@PREFIX_TREE.by("PrefixTree.lock")
def lock(self: PrefixTree, node: Node) -> None:
    for step in path(node):
        step.locks += 1


@PREFIX_TREE.by("PrefixTree.unlock")
def unlock(self: PrefixTree, node: Node) -> None:
    for step in path(node):
        step.locks -= 1


@PREFIX_TREE.by("PrefixTree.evict")
def evict(self: PrefixTree, *, pages: int = 0, states: int = 0, keep: Array = EMPTY) -> int:
    """The least recently used leaf that nobody reads, again and again."""
    kept = path(cut(self, keep))
    gone = slots = 0
    while gone < pages or slots < states:
        free = [n for n in below(self.root) if not n.children and not n.locks and n not in kept]
        if not free:
            break
        leaf = min(free, key=lambda node: (node.used, node.id))
        parent = leaf.parent
        assert parent is not None, "the root is no leaf"
        del parent.children[_name(self, leaf.tokens)]
        self._leaves.discard(leaf)
        if not parent.children and parent is not self.root:
            self._leaves.add(parent)
        self.pages.release(leaf.pages)
        self.states.release(list(leaf.checkpoints.values()))
        gone += len(leaf.pages)
        slots += len(leaf.checkpoints)
    self.evicted_pages += gone
    return gone


def touch(self: PrefixTree, node: Node) -> None:
    self._clock += 1
    for step in path(node):
        step.used = self._clock


def _name(self: PrefixTree, tokens: Array) -> bytes:
    return tokens[: self.page_size].tobytes()
