"""Who holds each page, slot and ring, by an engine's own account of its memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from fuzz.report.parts import Holder
from reference.contract import RequestId, Snapshot


class Held(NamedTuple):
    """The holders of each cell that is not free, and the engine's own counts of them, where it
    counts."""

    by: Mapping[int, tuple[Holder, ...]]
    counts: Mapping[int, int] | None = None


Account = Callable[[Snapshot], Held]
"""Reads who holds what off a snapshot."""


def logical(snapshot: Snapshot) -> Held:
    """Of logical pages, and so of index pages."""
    held = [
        (page, _request(request, "reads it with others" if at < view.shared else "owns it"))
        for request, view in snapshot.requests.items()
        for at, page in enumerate(view.pages)
    ]
    held += [
        (page, _request(request, "waits for what is to land here"))
        for request, view in snapshot.reserved.items()
        for page in view.pages
    ]
    held += [
        (page, Holder("cache", f"cached prefix {node.node}"))
        for node in snapshot.cached
        for page in node.pages
    ]
    return Held(_grouped(held), snapshot.ref_counts)


def device(snapshot: Snapshot) -> Held:
    """Of device pages, under HiSparse: hot buffers."""
    buffers = snapshot.hot.buffers if snapshot.hot else {}
    return Held(
        _grouped(
            (page, _request(request, "has its hot buffer here"))
            for request, view in buffers.items()
            for page in view.pages
        )
    )


def host(snapshot: Snapshot) -> Held:
    """Of host pages, under HiSparse: those of the logical pages that they back."""
    backing = snapshot.hot.backing if snapshot.hot else {}
    return Held(
        _grouped(
            (
                page,
                Holder(f"page {backed}", f"backs logical page {backed}", _first(snapshot, backed)),
            )
            for backed, page in backing.items()
        )
    )


def tier(snapshot: Snapshot) -> Held:
    """Of the host tier's pages."""
    prefixes = snapshot.tier.prefixes if snapshot.tier else ()
    return Held(
        _grouped(
            (page, Holder(f"prefix {n}", f"prefix of {len(prefix.tokens)} tokens"))
            for n, prefix in enumerate(prefixes)
            for page in prefix.pages
        )
    )


def rings(snapshot: Snapshot) -> Held:
    """Of tail rings."""
    return Held(
        _grouped(
            (view.slot, _request(request, "keeps its tail here"))
            for request, view in snapshot.holders.items()
            if view.slot is not None
        )
    )


def states(snapshot: Snapshot) -> Held:
    """Of KDA state slots."""
    held = [
        (view.state_slot, _request(request, f"state after {view.state_position} tokens"))
        for request, view in snapshot.holders.items()
        if view.state_slot is not None
    ]
    held += [
        (slot, _request(request, f"checkpoint at {length}"))
        for request, view in snapshot.holders.items()
        for length, slot in view.checkpoints.items()
    ]
    held += [
        (slot, Holder("cache", f"checkpoint at {length} of cached prefix {node.node}"))
        for node in snapshot.cached
        for length, slot in node.checkpoints.items()
    ]
    return Held(_grouped(held))


def _request(request: RequestId, what: str) -> Holder:
    return Holder(f"r{request}", f"request {request} {what}", int(request))


def _first(snapshot: Snapshot, page: int) -> int | None:
    """The first request that holds a logical page."""
    return next((int(r) for r, view in snapshot.holders.items() if page in view.pages), None)


def _grouped(held: Iterable[tuple[int, Holder]]) -> dict[int, tuple[Holder, ...]]:
    by: dict[int, list[Holder]] = defaultdict(list)
    for cell, holder in held:
        by[cell].append(holder)
    return {cell: tuple(holders) for cell, holders in by.items()}
