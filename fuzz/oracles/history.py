"""What the exact oracle must remember of earlier steps: uses, totals, and the last snapshot.

The contract says that the least recently used cached prefixes go first, and none without need;
how often there was a hit, an eviction and a reuse; and that snapshots are copies.  Each is
judged by the caller's own account, kept here.  Where the contract leaves an engine free, the
account has two ends, and only what lies outside them is wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from fuzz.oracles.standings import Restoration, matching, restoration
from fuzz.step import Step, World
from reference.contract import CachedNode, Capability, Snapshot
from reference.prefix import cached_prefixes


@dataclass(frozen=True, slots=True)
class Gone:
    """Pages of a cached node that have left the cache, and how many checkpoints with them."""

    node: CachedNode
    pages: Sequence[int]
    marks: int


class History:
    """The account of one run; `observe` is to be called once after each step."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._now = 0
        # Of each cached page the steps of its last certain and of its last possible use.
        self._used: dict[int, int] = defaultdict(int)
        self._perhaps_used: dict[int, int] = defaultdict(int)
        self._handed_out = self._never_seen = 0
        self._seen_pages: set[int] = set()
        self._last: bytes | None = None

    def observe(self, step: Step) -> dict[str, list[str]]:
        """What is wrong, by part; then the step's uses are entered."""
        found = {"copies": self._changed(step.before), "totals": self._totals(step)}
        self._now += 1
        # An admission evicts after its match, an insert comes after all evictions.
        self._admitted(step)
        self._cut(step)
        self._looked_up(step)
        if step.after.evicted_pages > step.before.evicted_pages and step.refused is None:
            found["evict"] = list(self._evictions(step))
        self._inserted(step)
        self._use(self._perhaps_used, _grown(step))
        if came := self._restoration(step):
            self._use(self._used, came.path)
        self._last = msgspec.msgpack.encode(step.after)
        return found

    def _changed(self, before: Snapshot) -> list[str]:
        """The snapshot before the step is as it was when it was taken."""
        if self._last in (None, msgspec.msgpack.encode(before)):
            return []
        return ["A snapshot should be a copy; one has changed since it was taken."]

    def _totals(self, step: Step) -> list[str]:
        before, after = step.before, step.after
        hits = int(step.submitted is not None and step.hit > 0)
        found = []
        if after.hits - before.hits != hits:
            found.append(
                f"'{step.text}' should count {hits} hits; it counted {after.hits - before.hits}."
            )
        both = step.calls & before.requests.keys() & after.requests.keys()
        new = [p for r in both for p in after.requests[r].pages[len(before.requests[r].pages) :]]
        self._handed_out += len(new)
        # A page that gave way to a cached one was free before and may be free again.
        self._never_seen += len(new) - len(set(new) - before.ref_counts.keys())
        if came := self._restoration(step):
            self._count_restored(came)
        self._seen_pages |= after.ref_counts.keys()
        most = self._handed_out - len(self._seen_pages)
        if not most - self._never_seen <= after.reused_pages <= most:
            found.append(
                f"{self._handed_out} pages were handed out, {len(self._seen_pages)} different "
                f"ones: {most} should count as reused; {after.reused_pages} do."
            )
        return found

    def _restoration(self, step: Step) -> Restoration | None:
        return restoration(step, self._world.geometry.logical_page_size)

    def _count_restored(self, came: Restoration) -> None:
        """Pages that a restore took count as handed out.  Those that it gave back when it failed
        were perhaps free ones, which no snapshot has shown in use."""
        self._handed_out += len(came.brought) if came.path else came.pages
        self._never_seen += 0 if came.path else came.pages

    def _admitted(self, step: Step) -> None:
        """A hit uses the prefix that it resumes; whether what matches behind it was looked at,
        or by a request that was refused, is the engine's affair."""
        size, after = self._world.geometry.logical_page_size, step.after
        for request in step.calls - step.before.requests.keys():
            tokens = self._world.clients[request].tokens
            self._use(self._perhaps_used, matching(tokens, after.cached, size))
            if request in after.requests:
                self._use(self._used, after.requests[request].pages[: step.hit // size])

    def _cut(self, step: Step) -> None:
        """Without `KEEPS_AGE` the rest of a prefix that was cut may count as used."""
        if Capability.KEEPS_AGE not in self._world.engine.capabilities:
            whole = {node.pages[0] for node in step.before.cached}
            parts = [node for node in step.after.cached if node.pages[0] not in whole]
            before = {page for node in step.before.cached for page in node.pages}
            self._use(self._perhaps_used, before.intersection(p for n in parts for p in n.pages))

    def _inserted(self, step: Step) -> None:
        """An insert uses the whole path; one that brings no checkpoint may do nothing."""
        geometry = self._world.geometry
        size, interval = geometry.logical_page_size, geometry.mamba_track_interval
        for client in step.inserted:
            stop = client.length // interval * interval
            pages = matching(client.tokens[:stop], step.after.cached, size)
            self._use(self._perhaps_used, pages)
            if stop > step.before.requests[client.request].shared * size:
                self._use(self._used, pages)

    def _looked_up(self, step: Step) -> None:
        """Whether a back-up uses what it copies, on the device, is the engine's affair, and so is
        what a failed restore does."""
        if step.tier is not None:
            size = self._world.geometry.logical_page_size
            self._use(self._perhaps_used, matching(step.tier.tokens, step.before.cached, size))

    def _use(self, used: dict[int, int], pages: Iterable[int]) -> None:
        used.update(dict.fromkeys(pages, self._now))

    def _evictions(self, step: Step) -> Iterator[str]:
        """Least recently used first, and no more than was needed."""
        gone = _gone(step.before.cached, step.after.cached)
        counted = step.after.evicted_pages - step.before.evicted_pages
        lost = sum(len(part.pages) for part in gone)
        # A step that inserts may have put an evicted prefix back on the same page.
        if lost > counted or (lost < counted and not step.inserted):
            yield f"'{step.text}' evicted {lost} pages; {counted} are counted."
        if lost == counted:
            yield from self._older_left(step, gone)
            if Capability.FRUGAL_EVICTION in self._world.engine.capabilities:
                yield from self._needless(step, gone)

    def _older_left(self, step: Step, gone: Sequence[Gone]) -> Iterator[str]:
        parents = {node.parent for node in step.after.cached}
        known = {node.node for node in step.before.cached}
        for node in step.after.cached:
            if node.node in parents or node.locks or node.node not in known:
                continue
            age = max(max(self._used[page], self._perhaps_used[page]) for page in node.pages)
            for part in gone:
                used = min(self._used[page] for page in part.pages)
                if used > age:
                    yield (
                        f"'{step.text}' evicted cached prefix {part.node.node}, used in step "
                        f"{used}; prefix {node.node}, which nobody reads and which was last used "
                        f"in step {age}, should have gone before it."
                    )

    def _needless(self, step: Step, gone: Sequence[Gone]) -> Iterator[str]:
        """The last prefix to go, one whose parent stayed, was not needed: which one it was
        cannot be seen, so it is said only where it holds for each."""
        before = step.before
        pages, states = self._needs(step)
        pages_left = spare_pages(before) + sum(len(part.pages) for part in gone) - pages
        states_left = len(before.free_states) + sum(part.marks for part in gone) - states
        nodes = {part.node.node for part in gone}
        last = [part for part in gone if part.node.parent not in nodes]
        if all(len(p.pages) <= pages_left and p.marks <= states_left for p in last):
            yield (
                f"'{step.text}' needed {pages} pages and {states} states, of which "
                f"{spare_pages(before)} and {len(before.free_states)} were free; it evicted "
                f"until {pages_left} and {states_left} were left over."
            )

    def _needs(self, step: Step) -> tuple[int, int]:
        """Free pages and state slots that the step had to find."""
        if step.evicted is not None:
            return spare_pages(step.before) + step.evicted[0], 0
        if came := self._restoration(step):
            return came.pages, came.states
        interval, pages, states = self._world.geometry.mamba_track_interval, 0, 0
        for request in step.calls & step.after.requests.keys():
            view, client = step.before.requests.get(request), self._world.clients[request]
            if view is None:
                states += 1
                continue
            pages += len(step.after.requests[request].pages) - len(view.pages)
            # A verify may hold the states of its drafts in slots of the pool.
            states += client.length // interval - view.length // interval + len(client.drafts)
        return pages, states


def spare_pages(snapshot: Snapshot) -> int:
    """How many logical pages can be handed out as it stands: each takes a host page, under
    HiSparse."""
    free = len(snapshot.free_pages)
    return free if snapshot.hot is None else min(free, len(snapshot.hot.free_host))


def _grown(step: Step) -> Iterator[int]:
    """Pages of the paths that a step put something new on: whether a chunk is cached that leaves
    its prompt unfinished is the engine's affair."""
    if step.wrote:
        old = {end for _, ends in _page_ends(step.before.cached) for end in ends}
        paths = cached_prefixes(step.after.cached)
        for node, ends in _page_ends(step.after.cached):
            if ends[-1] not in old:
                yield from paths[node.node].pages


def _gone(before: Iterable[CachedNode], after: Iterable[CachedNode]) -> list[Gone]:
    """What the cache has lost, page by page: nodes may have been cut in between."""
    left = {end for _, ends in _page_ends(after) for end in ends}
    gone = []
    for node, ends in _page_ends(before):
        lost = [end for end in ends if end not in left]
        if lost:
            kept = len(lost[0][1]) - len(node.tokens) // len(node.pages)
            marks = sum(mark > kept for mark in node.checkpoints)
            gone.append(Gone(node, [page for page, _ in lost], marks))
    return gone


def _page_ends(
    cached: Iterable[CachedNode],
) -> Iterator[tuple[CachedNode, list[tuple[int, tuple[int, ...]]]]]:
    """Each node with its pages, and the prefix that ends with each."""
    paths = cached_prefixes(cached)
    for node in cached:
        path = paths[node.node]
        size, first = len(node.tokens) // len(node.pages), len(path.pages) - len(node.pages)
        yield (
            node,
            [(page, path.tokens[: (first + i) * size]) for i, page in enumerate(node.pages, 1)],
        )
