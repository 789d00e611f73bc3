"""What prefix sharing means, and what a snapshot of an engine's memory may look like.

A request reuses whole logical pages of a cached prefix, up to a position with a KDA
checkpoint, and never all of its tokens (the last one must be computed to have an output).
It writes only pages that it alone holds.  Pages and states are conserved: free + held =
total.  Specifies the tree of SGLang #42178 (logical pages) and the fault of #41494.

The `judge_*` functions return sentences, each naming the page or row, what it should be and
what it is; an empty list means that nothing is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

from reference.addressing import pages_for
from reference.contract import CachedNode, RequestId, Snapshot
from reference.geometry import Geometry


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPrefix:
    """One root-to-node path.  `checkpoints`: prefix lengths on it that have a KDA state."""

    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    checkpoints: frozenset[int]


ROOT = CachedPrefix(tokens=(), pages=(), checkpoints=frozenset())


def cached_prefixes(cached: Iterable[CachedNode]) -> dict[int, CachedPrefix]:
    """The path of every node, by node id.  A node whose parent is unknown has no path."""
    paths: dict[int, CachedPrefix] = {}
    waiting = {node.node: node for node in cached}
    while ready := [n for n in waiting.values() if n.parent is None or n.parent in paths]:
        for node in ready:
            del waiting[node.node]
            above = ROOT if node.parent is None else paths[node.parent]
            paths[node.node] = CachedPrefix(
                tokens=above.tokens + node.tokens,
                pages=above.pages + node.pages,
                checkpoints=above.checkpoints.union(node.checkpoints),
            )
    return paths


def legal_hits(
    tokens: Sequence[int], prefixes: Iterable[CachedPrefix], geometry: Geometry
) -> frozenset[int]:
    """All prefix lengths of `tokens` that a request may reuse; 0 is always one."""
    hits = {0}
    for prefix in prefixes:
        same = _common(tokens, prefix.tokens)
        hits.update(
            mark
            for mark in prefix.checkpoints
            if 0 < mark <= same and mark < len(tokens) and mark % geometry.logical_page_size == 0
        )
    return frozenset(hits)


def longest_hit(tokens: Sequence[int], prefixes: Iterable[CachedPrefix], geometry: Geometry) -> int:
    """The hit that an engine should give: the longest legal one."""
    return max(legal_hits(tokens, prefixes, geometry))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    length = min(len(a), len(b))
    if list(a[:length]) == list(b[:length]):
        return length
    return next(i for i in range(length) if a[i] != b[i])


def writer_of(snapshot: Snapshot) -> dict[int, RequestId]:
    """Who may write each page: a private page's one holder.  Pages of the tree, pages with
    two holders and free pages have no writer, so they are not in the result."""
    holders = Counter(page for view in snapshot.holders.values() for page in view.pages)
    cached = {page for node in snapshot.cached for page in node.pages}
    return {
        page: request
        for request, view in snapshot.holders.items()
        for page in view.pages
        if holders[page] == 1 and page not in cached
    }


def judge_snapshot(
    snapshot: Snapshot, geometry: Geometry, *, pages: int, state_slots: int
) -> list[str]:
    """Everything below, for pools of `pages` logical pages and `state_slots` states."""
    return [
        *judge_requests(snapshot, geometry),
        *judge_tree(snapshot, geometry),
        *judge_owners(snapshot),
        *judge_pages(snapshot, pages=pages),
        *judge_states(snapshot, state_slots=state_slots),
    ]


def judge_requests(snapshot: Snapshot, geometry: Geometry) -> list[str]:
    """Each request by itself: enough pages, all different, none shared that it still has to
    write, and a state that stands for its length."""
    found: list[str] = []
    slots = [view.slot for view in snapshot.holders.values()]
    for request, view in snapshot.holders.items():
        need = pages_for(view.length + view.pending, geometry)
        if len(view.pages) < need:
            found.append(
                f"request {request} holds {len(view.pages)} pages for {view.length} positions "
                f"and {view.pending} drafts; it needs {need}."
            )
        if not 0 <= view.shared <= len(view.pages):
            found.append(f"request {request} shares {view.shared} of {len(view.pages)} pages.")
        elif view.shared * geometry.logical_page_size > view.length:
            page = view.pages[view.length // geometry.logical_page_size]
            found.append(
                f"page {page} holds the next position ({view.length}) of request {request}: it "
                "should be private, but it is shared with the tree."
            )
        if view.state_position != view.length:
            found.append(
                f"the state of request {request} should stand for {view.length} positions; it "
                f"stands for {view.state_position}."
            )
        owners = slots.count(view.slot)
        if view.slot is not None and owners > 1:
            found.append(f"ring row {view.slot} of request {request} has {owners} owners.")
    return found


def judge_tree(snapshot: Snapshot, geometry: Geometry) -> list[str]:
    """Edges of whole pages, checkpoints at page ends inside their edge, no two children of a
    node that begin with the same page."""
    found: list[str] = []
    size = geometry.logical_page_size
    nodes = {node.node: node for node in snapshot.cached}
    paths = cached_prefixes(snapshot.cached)
    heads: dict[tuple[int | None, tuple[int, ...]], int] = {}
    for node in snapshot.cached:
        name = f"node {node.node}"
        if node.node not in paths:
            found.append(f"{name} should hang on a cached node; its parent is {node.parent}.")
            continue
        if not node.pages or len(node.tokens) != len(node.pages) * size:
            found.append(
                f"{name} should spell whole pages of {size} tokens; it has {len(node.tokens)} "
                f"tokens and {len(node.pages)} pages."
            )
        stop = len(paths[node.node].tokens)
        start = stop - len(node.tokens)
        for mark in node.checkpoints:
            if not start < mark <= stop or mark % size:
                found.append(
                    f"{name} covers positions {start} to {stop} in pages of {size}, but has a "
                    f"checkpoint at {mark}."
                )
        head = (node.parent, node.tokens[:size])
        if head in heads:
            found.append(f"{name} and node {heads[head]} begin with the same page of tokens.")
        heads[head] = node.node
        if node.parent is not None and nodes[node.parent].locks < node.locks:
            found.append(
                f"{name} has {node.locks} locks but its parent {node.parent} only "
                f"{nodes[node.parent].locks}."
            )
    return found


def judge_owners(snapshot: Snapshot) -> list[str]:
    """No page has two writers, shared pages are a path of the tree, and locks count readers."""
    found: list[str] = []
    owner: dict[int, str] = {}
    for name, page in _owners(snapshot):
        if page in owner:
            found.append(f"page {page} should belong to {owner[page]} alone; {name} holds it too.")
        owner.setdefault(page, name)
    paths = [path.pages for path in cached_prefixes(snapshot.cached).values()]
    shared = {r: view.pages[: view.shared] for r, view in snapshot.holders.items()}
    for request, pages in shared.items():
        if pages and all(path[: len(pages)] != pages for path in paths):
            found.append(
                f"request {request} should share a path of the tree; its shared pages "
                f"{list(pages)} are none."
            )
    read = [frozenset(pages) for pages in shared.values()]
    for node in snapshot.cached:
        readers = sum(not pages.isdisjoint(node.pages) for pages in read)
        if node.locks != readers:
            found.append(
                f"node {node.node} should have {readers} locks, one for each request that reads "
                f"it; it has {node.locks}."
            )
    return found


def _owners(snapshot: Snapshot) -> Iterator[tuple[str, int]]:
    """(owner, page) for every page that the tree or a request owns, once for each holding."""
    for node in snapshot.cached:
        yield from zip(repeat(f"node {node.node}"), node.pages)
    for request, view in snapshot.holders.items():
        yield from zip(repeat(f"request {request}"), view.pages[view.shared :])


def judge_pages(snapshot: Snapshot, *, pages: int) -> list[str]:
    """Each page of 1 .. pages - 1 is free or held, never both, and counted right; page 0 is
    padding, which nobody holds."""
    held = dict.fromkeys((page for node in snapshot.cached for page in node.pages), 1)
    for view in snapshot.holders.values():
        for page in set(view.pages):
            held[page] = held.get(page, 0) + 1
    found = _judge_partition("page", held, snapshot.free_pages, pages)
    if held != snapshot.ref_counts:
        for page in sorted(held.keys() | snapshot.ref_counts.keys()):
            count, should = snapshot.ref_counts.get(page, 0), held.get(page, 0)
            if count != should:
                found.append(f"page {page} should have {should} references; it has {count}.")
    return found


def judge_states(snapshot: Snapshot, *, state_slots: int) -> list[str]:
    """Each state slot but padding 0 is free, or a request's, or one checkpoint's, whether the
    tree holds it or the request that took it."""
    held: dict[int, int] = {}
    views = snapshot.holders.values()
    owned = [view.state_slots for view in views]
    for slots in [*owned, *(node.checkpoints.values() for node in snapshot.cached)]:
        for slot in slots:
            held[slot] = held.get(slot, 0) + 1
    found = _judge_partition("state slot", held, snapshot.free_states, state_slots)
    found += [
        f"state slot {slot} should have one owner; it has {count}."
        for slot, count in sorted(held.items())
        if count > 1
    ]
    return found


def _judge_partition(
    what: str, held: Mapping[int, int], free: frozenset[int], total: int
) -> list[str]:
    """Free and held together are exactly 1 .. total - 1, without overlap."""
    legal, taken = set(range(1, total)), held.keys() | free
    if taken == legal and free.isdisjoint(held):
        return []
    return [
        *(f"{what} {i} should be free or held; it is both." for i in sorted(free & held.keys())),
        *(f"{what} {i} should be free or held; it is leaked." for i in sorted(legal - taken)),
        *(
            f"{what} {i} is held or free but lies outside 1 to {total - 1}."
            for i in sorted(taken - legal)
        ),
    ]
