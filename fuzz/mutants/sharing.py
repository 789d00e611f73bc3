"""Faults of prefix sharing: match, insert, split, locks, eviction and page counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from fuzz.mutants.registry import Body, mutant

Ints = npt.NDArray[np.int64]
TREE = "optimized.memory.prefix_tree.PrefixTree"
MEMORY = "optimized.memory.manager.Memory"
ENGINE = "optimized.engine.OptimizedEngine"
OWNED = ("exact",)


@mutant(f"{TREE}.common_length", bug="sglang#42178", killed_by=OWNED)
def match_cut_at_half_page(original: Body, self: Any, edge: Ints, tokens: Ints) -> int:
    """Prefixes are compared, and nodes cut, in units smaller than a logical page."""
    length = min(len(edge), len(tokens))
    same = int((edge[:length] == tokens[:length]).cumprod().sum())
    half = self.page_size // 2
    return same // half * half


@mutant(f"{TREE}.common_length", bug="LMCache#4086", killed_by=OWNED)
def match_skips_last_token_of_page(original: Body, self: Any, edge: Ints, tokens: Ints) -> int:
    """A page counts as the same though its last token differs."""
    tokens = tokens[: len(edge)].copy()
    last = slice(self.page_size - 1, len(tokens), self.page_size)
    tokens[last] = edge[: len(tokens)][last]
    return original(self, edge, tokens)


@mutant(f"{TREE}.longest_hit", bug="own", killed_by=OWNED)
def hit_covers_whole_request(original: Body, self: Any, matched: int, length: int) -> int:
    """A hit may leave no token to compute."""
    return matched


@mutant(f"{TREE}.match", bug="sglang#38815", killed_by=OWNED)
def match_ignores_checkpoint(original: Body, self: Any, tokens: Ints) -> Any:
    """A hit goes on behind its last checkpoint, as far as there are pages."""
    match = original(self, tokens)
    node, matched = self._descend(tokens)
    hit = self.longest_hit(matched, len(tokens)) // self.page_size * self.page_size
    if not 0 < match.hit < hit:
        return match
    while hit <= node.start:
        node = node.parent
    return replace(match, hit=hit, node=self.split(node, hit) if hit < node.depth else node)


@mutant(f"{MEMORY}.share", bug="sglang#10637", killed_by=("exact", "provenance"))
def part_of_page_inserted(original: Body, self: Any, record: Any) -> None:
    """What a request leaves in the cache is not cut to whole pages: the last is half full."""
    stored, size = int(self.table.length[record.slot]), self.geometry.logical_page_size
    end = -(-stored // size) * size
    if end > stored and self.states.available:
        record.checkpoints[end] = int(self.states.allocate(1)[0])
    original(self, record)


@mutant(f"{MEMORY}._switch", bug="LMCache#5095", killed_by=OWNED)
def cached_pages_freed_for_duplicates(original: Body, self: Any, own: Ints, cached: Ints) -> None:
    """Where its pages are cached already a request lets go of the cached ones, not of its own."""
    differ = np.flatnonzero(own != cached)
    self.pages.retain(cached[differ])
    own[differ] = cached[differ]
    self.pages.release(cached[differ])


@mutant(f"{TREE}._append", bug="LMCache#2772", killed_by=OWNED)
def cached_page_not_counted(original: Body, self: Any, *edge: Any) -> Any:
    """The tree takes no reference on the pages that it caches."""
    leaf = original(self, *edge)
    self.pages.release(leaf.pages)
    return leaf


@mutant(f"{TREE}.lock", f"{TREE}.unlock", bug="TensorRT-LLM#12542", killed_by=OWNED)
def hit_not_locked(original: Body, self: Any, node: Any) -> None:
    """A running request does not lock the cached prefix that it reads."""


@mutant(f"{TREE}.evictable", bug="LMCache#4133", killed_by=OWNED)
def locked_page_evicted(original: Body, self: Any, leaf: Any) -> bool:
    """Eviction takes prefixes that running requests read."""
    return True


@mutant(f"{TREE}._remove", bug="vllm#52234", killed_by=OWNED)
def evicted_page_found_again(original: Body, self: Any, leaf: Any) -> Any:
    """An evicted prefix can still be found, and its pages are somebody else's by then."""
    parent = original(self, leaf)
    parent.children[self._key(leaf.tokens)] = leaf
    return parent


@mutant(f"{ENGINE}.abort", bug="vllm#24268", killed_by=OWNED)
def freed_twice_at_abort(original: Body, self: Any, request: Any) -> None:
    """An aborted request lets go of its pages twice."""
    table, pages = self.memory.table, self.memory.pages
    slot = self._find(request).slot
    held = table.pages[slot, : table.pages_held[slot]].copy()
    original(self, request)
    pages.release(held[pages.counts[held] > 0])


def _last_token(original: Body, self: Any, tokens: Ints) -> bytes:
    return original(self, tokens)[-tokens.itemsize :]


@mutant(f"{TREE}.common_length", bug="own", killed_by=OWNED, also={f"{TREE}._key": _last_token})
def page_compared_by_last_token(original: Body, self: Any, edge: Ints, tokens: Ints) -> int:
    """Two pages count as the same where their last tokens are."""
    ends = slice(self.page_size - 1, min(len(edge), len(tokens)), self.page_size)
    same = (edge[ends] == tokens[ends]).cumprod()
    return int(same.sum()) * self.page_size


@mutant(f"{TREE}.evict", bug="own", killed_by=OWNED)
def most_recently_used_evicted(original: Body, self: Any, **wanted: int) -> int:
    """Eviction begins with the prefix that was used last."""
    nodes = list(self.nodes())
    for node in nodes:
        node.used = -node.used
    gone = original(self, **wanted)
    for node in nodes:
        node.used = -node.used
    return gone


@mutant(f"{MEMORY}.admit", bug="own", killed_by=OWNED, target="slot_reuse")
def hit_locked_after_room(original: Body, self: Any, request: Any, tokens: Any) -> Any:
    """Room is made for a request before its hit is locked, so that the hit may be evicted."""
    tree, pages, matched = self.tree, self.pages, []
    room, lock = self.make_room, tree.lock

    def room_then_lock(**wanted: int) -> None:
        room(**wanted)
        lock(*matched)

    with (
        patch.object(tree, "lock", matched.append),
        patch.object(tree, "unlock"),
        patch.object(self, "make_room", room_then_lock),
        # a page that is free already is held all the same
        patch.object(pages, "retain", lambda ids: np.add.at(pages.counts, ids, 1)),
    ):
        return original(self, request, tokens)
