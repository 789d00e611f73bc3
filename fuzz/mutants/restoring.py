"""Faults of the host tier: what a back-up copies, what a restore brings, what a failure leaves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fuzz.mutants.registry import Body, mutant
from reference.contract import OutOfMemory, proceed

Ints = npt.NDArray[np.int64]
Part = tuple[str, Tensor, Tensor]
"""A copy: its name, and the bytes on the device and in the tier."""
TIER = "optimized.memory.host_tier.HostTier"
TREE = "optimized.memory.prefix_tree.PrefixTree"
TARGET = "host_restore"
ROWS = ("provenance",)
STANDING = ("restore",)


def choosing(
    original: Body, tier: Any, *call: Any, choose: Callable[[Part], Iterator[Part]]
) -> Any:
    """Do the call with those copies that `choose` makes of each that is due."""
    parts = tier._parts

    def chosen(*where: Any) -> Iterator[Part]:
        for part in parts(*where):
            yield from choose(part)

    with patch.object(tier, "_parts", chosen):
        return original(tier, *call)


def all_but(component: str) -> Callable[[Part], Iterator[Part]]:
    """All copies but those of a component."""
    return lambda part: iter(() if part[0].startswith(component) else (part,))


# what is copied


@mutant(f"{TIER}._bring_back", bug="sglang#38031", killed_by=ROWS, target=TARGET)
def restore_without_index(original: Body, self: Any, *call: Any) -> None:
    """A restore leaves out the index rows."""
    choosing(original, self, *call, choose=all_but("index rows"))


@mutant(f"{TIER}._bring_back", bug="own", killed_by=ROWS, target=TARGET)
def restore_without_scales(original: Body, self: Any, *call: Any) -> None:
    """A restore brings the keys of index pages, and not the scales behind them."""
    scales = 4 * self._memory.geometry.index_page_size

    def keys_alone(part: Part) -> Iterator[Part]:
        name, device, host = part
        short = name.startswith("index rows")
        yield (name, device[:-scales], host[:-scales]) if short else part

    choosing(original, self, *call, choose=keys_alone)


@mutant(f"{TIER}._bring_back", bug="own", killed_by=ROWS, target=TARGET)
def restore_without_kv(original: Body, self: Any, *call: Any) -> None:
    """A restore leaves out the KV rows."""
    choosing(original, self, *call, choose=all_but("KV rows"))


@mutant(f"{TIER}._bring_back", bug="own", killed_by=ROWS, target=TARGET)
def restore_without_state(original: Body, self: Any, *call: Any) -> None:
    """A restore leaves out the KDA state: the checkpoint is what its slot held before."""
    choosing(original, self, *call, choose=all_but("state"))


@mutant(
    f"{TIER}._bring_back",
    bug="sglang#31901",
    killed_by=("provenance", "containment"),
    target=TARGET,
)
def restore_to_tier_pages(original: Body, self: Any, *call: Any) -> None:
    """A restore takes the tier's page ids for those of the device as well."""
    parts = self._parts

    def mistaken(pages: Ints, host_pages: list[int], *states: int) -> Iterator[Part]:
        last = len(self._memory.pages.counts) - 1
        return parts([min(page, last) for page in host_pages], host_pages, *states)

    with patch.object(self, "_parts", mistaken):
        original(self, *call)


@mutant(
    f"{TIER}.back_up",
    bug="own",
    killed_by=("numeric", "metamorphic", "containment"),
    target=TARGET,
    payload="model",
)
def one_layer_backed_up(original: Body, self: Any, *call: Any) -> int:
    """A back-up copies the rows of the first KDA and DSA layer alone."""

    def first(part: Part) -> Iterator[Part]:
        if part[0].endswith("in layer 0"):
            yield part

    return choosing(original, self, *call, choose=first)


@mutant(f"{TREE}.resumable", bug="sglang#38815", killed_by=ROWS, target=TARGET)
def first_checkpoint_backed_up(original: Body, self: Any, tokens: Ints) -> Any:
    """A back-up copies the state of the prefix's first checkpoint, and not that at its end."""
    match = original(self, tokens)
    path = {at: slot for node in self._path(match.node) for at, slot in node.checkpoints.items()}
    return replace(match, state_slot=path[min(path)]) if path else match


@mutant(f"{TIER}.back_up", bug="own", killed_by=ROWS, target=TARGET)
def pages_backed_up_in_reverse(original: Body, self: Any, *call: Any) -> int:
    """A back-up copies a prefix's pages to the tier's in reverse order."""
    parts = self._parts

    def reverse(pages: Ints, host_pages: Ints, *states: int) -> Iterator[Part]:
        return parts(pages[::-1], host_pages, *states)

    with patch.object(self, "_parts", reverse):
        return original(self, *call)


@mutant(
    f"{TIER}._descend",
    bug="vllm#54342",
    killed_by=("restore", "provenance", "exact"),
    target=TARGET,
)
def tier_page_matched_alone(original: Body, self: Any, tokens: Ints) -> list[int]:
    """A page of the tier is found by its own tokens, whatever precedes them."""
    known = {key: page for page, (_, key) in self._entry.items()}
    path = []
    for key in self._keys(tokens):
        if key not in known:
            break
        path.append(known[key])
    return path


# what a failure leaves


@mutant(
    f"{TIER}._bring_back",
    bug="sglang#30986",
    killed_by=("restore", "provenance"),
    target=TARGET,
)
def cached_before_it_is_copied(
    original: Body, self: Any, tokens: Ints, cached: Ints, *path: Any
) -> None:
    """A restore enters the prefix into the cache first, and copies then: if a copy fails, half of
    it can be hit."""
    tree, states, parts = self._memory.tree, self._memory.states, self._parts

    def entered(fresh: Ints, hosts: list[int], state: int, host_state: int) -> Iterator[Part]:
        tree.insert(tokens, np.concatenate([cached, fresh]), {len(tokens): state})
        states.retain([state])
        yield from parts(fresh, hosts, state, host_state)
        states.release([state])

    with patch.object(self, "_parts", entered):
        original(self, tokens, cached, *path)


@mutant(f"{TIER}.back_up", bug="dynamo#15079", killed_by=STANDING, target=TARGET)
def failed_back_up_stands(original: Body, self: Any, tokens: Ints, before: Any) -> int:
    """A back-up whose copy fails counts as done: the prefix stands in the tier."""
    parts, tokens = self._parts, tokens[: self._memory.tree.resumable(tokens).hit]

    def entered(pages: Ints, fresh: Ints, state: int, host_state: int) -> Iterator[Part]:
        path = [*self._descend(tokens), *fresh.tolist()]
        self._enter(tokens, path, host_state)
        self.pages.retain(path)
        self.states.retain([host_state])
        yield from parts(pages, fresh, state, host_state)
        self.pages.release(path)
        self.states.release([host_state])

    with patch.object(self, "_parts", entered):
        return original(self, tokens, before)


def _keeping(original: Body, tier: Any, *call: Any, of: Any) -> Any:
    """Do the call, and lose what it took of an allocator if it fails."""
    allocate, taken = of.allocate, []

    def held(count: int) -> Ints:
        ids = allocate(count)
        of.retain(ids)
        taken.append(ids)
        return ids

    with patch.object(of, "allocate", held):
        result = original(tier, *call)
    for ids in taken:
        of.release(ids)
    return result


@mutant(f"{TIER}._bring_back", bug="sglang#37103", killed_by=("exact",), target=TARGET)
def pages_lost_by_failed_restore(original: Body, self: Any, *call: Any) -> None:
    """A restore that fails keeps the logical pages that it had taken."""
    _keeping(original, self, *call, of=self._memory.pages)


@mutant(f"{TIER}._bring_back", bug="own", killed_by=("exact",), target=TARGET)
def state_lost_by_failed_restore(original: Body, self: Any, *call: Any) -> None:
    """A restore that fails keeps the state slot that it had taken."""
    _keeping(original, self, *call, of=self._memory.states)


@mutant(f"{TIER}.back_up", bug="own", killed_by=STANDING, target=TARGET)
def pages_lost_by_failed_back_up(original: Body, self: Any, *call: Any) -> int:
    """A back-up that fails keeps the pages of the tier that it had taken."""
    return int(_keeping(original, self, *call, of=self.pages))


@mutant(f"{TIER}.back_up", bug="own", killed_by=STANDING, target=TARGET)
def state_lost_by_failed_back_up(original: Body, self: Any, *call: Any) -> int:
    """A back-up that fails keeps the tier's state slot that it had taken."""
    return int(_keeping(original, self, *call, of=self.states))


@mutant(f"{TIER}.back_up", bug="own", killed_by=STANDING, target=TARGET)
def back_up_undone_for_exceptions_alone(original: Body, self: Any, *call: Any) -> int:
    """A back-up that is broken off by an interrupt, which is no Exception, is not undone."""
    release = self._release

    def of_exceptions(pages: list[int]) -> None:
        if isinstance(sys.exception(), Exception | None):
            release(pages)

    with patch.object(self, "_release", of_exceptions):
        return int(original(self, *call))


@mutant(f"{TIER}._bring_back", bug="own", killed_by=("exact",), target=TARGET)
def lock_left_by_failed_restore(
    original: Body, self: Any, tokens: Ints, cached: Ints, *path: Any
) -> None:
    """A restore that fails leaves the prefix that it was to extend locked."""
    tree = self._memory.tree
    node, _ = tree.cached_part(tokens)
    tree.lock(node)
    original(self, tokens, cached, *path)
    tree.unlock(node)


# what is announced


@mutant(f"{TIER}.back_up", f"{TIER}.restore", bug="own", killed_by=STANDING, target=TARGET)
def no_move_announced(original: Body, self: Any, tokens: Ints, before: Any) -> int:
    """Nothing is announced, so that no allocation and no copy can be made to fail."""
    return int(original(self, tokens, proceed))


@mutant(f"{TIER}.back_up", f"{TIER}.restore", bug="own", killed_by=STANDING, target=TARGET)
def copies_not_announced(original: Body, self: Any, tokens: Ints, before: Any) -> int:
    """Allocations are announced, copies are not."""

    def of_allocations(what: str) -> None:
        if what.startswith("allocate"):
            before(what)

    return int(original(self, tokens, of_allocations))


# who owns it, and who goes first


@mutant(f"{TIER}._bring_back", bug="LMCache#2772", killed_by=("exact",), target=TARGET)
def restored_pages_not_counted(original: Body, self: Any, tokens: Ints, *rest: Any) -> None:
    """The cache takes no reference on the pages that a restore brings."""
    held, pages = self._memory.pages.counts > 0, self._memory.pages
    original(self, tokens, *rest)
    pages.release(np.flatnonzero((pages.counts > 0) & ~held))


@mutant(f"{TIER}.restore", bug="LMCache#4133", killed_by=("exact", "restore"), target=TARGET)
def restore_evicts_what_it_extends(original: Body, self: Any, *call: Any) -> int:
    """Room for a restore is made of any prefix, even of the beginning that the cache has and that
    is not brought again."""
    memory = self._memory
    room, pages = memory.make_room, memory.pages

    def any_room(*, keep: Ints, **wanted: int) -> None:
        room(**wanted)

    with (
        patch.object(memory, "make_room", any_room),
        # a page that is free already is held all the same
        patch.object(pages, "retain", lambda ids: np.add.at(pages.counts, ids, 1)),
    ):
        return int(original(self, *call))


@mutant(f"{TIER}.restore", bug="own", killed_by=STANDING, target=TARGET)
def restore_makes_no_room(original: Body, self: Any, *call: Any) -> int:
    """A restore is refused where too little is free, although there is much to evict."""

    def free_alone(*, pages: int, states: int, keep: Ints) -> None:
        if pages > self._memory.pages.available or states > self._memory.states.available:
            raise OutOfMemory("nothing is evicted for a restore: free some, then call again.")

    with patch.object(self._memory, "make_room", free_alone):
        return int(original(self, *call))


@mutant(f"{TIER}.restore", bug="own", killed_by=("exact",), target=TARGET)
def restore_is_no_use(original: Body, self: Any, *call: Any) -> int:
    """What a restore brings, or finds, does not count as used: it is the next to be evicted."""
    with patch.object(self._memory.tree, "_touch"):
        return int(original(self, *call))


@mutant(f"{TIER}._touch", bug="own", killed_by=STANDING, target=TARGET)
def tier_forgets_uses(original: Body, self: Any, end: int) -> None:
    """Prefixes leave the tier in the order in which they came, however often they are used."""


@mutant(f"{TIER}._make_room", bug="own", killed_by=STANDING, target=TARGET)
def tier_evicts_most_recent(original: Body, self: Any, pages: int) -> None:
    """The tier lets the prefix go first that was used last."""
    self._state_at = dict(reversed(self._state_at.items()))
    original(self, pages)
    self._state_at = dict(reversed(self._state_at.items()))


@mutant(f"{TIER}.back_up", bug="LMCache#2772", killed_by=STANDING, target=TARGET)
def shared_tier_page_freed(original: Body, self: Any, *call: Any) -> int:
    """A page of the tier that prefixes share is freed when the first of them goes."""
    before = {end: self._path(end) for end in self._state_at}
    try:
        return int(original(self, *call))
    finally:
        stay = {page for end in before.keys() & self._state_at.keys() for page in before[end]}
        gone = {page for end in before.keys() - self._state_at.keys() for page in before[end]}
        self.pages.counts[list(stay & gone)] = 1
        self.pages.release(list(stay & gone))


@mutant(f"{TIER}._longest", bug="own", killed_by=STANDING, target=TARGET)
def only_whole_prefix_restored(original: Body, self: Any, tokens: Ints) -> list[int]:
    """A restore finds a prefix only if the tier has all whole pages of the tokens."""
    path = original(self, tokens)
    return path if len(path) == len(tokens) // self._page_size else []
