"""Who may read which row, and what must be in it: worked out from a snapshot alone.

The owners of rows are the running requests and the nodes of the prefix tree.  Where their rows
lie follows from the page tables by the reference's addressing; what a row must hold follows from
the chain of its owner's tokens (`fuzz.stamps`).  Most owners are the same after a step as before
it, so those are kept, and what is new is told apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fuzz.stamps import U64, mix
from fuzz.step import World
from reference.addressing import index_slots, locs, tail_start
from reference.contract import Component, RequestId, Snapshot
from reference.prefix import cached_prefixes

Ints = npt.NDArray[np.int64]

NO_ROWS: Ints = np.zeros(0, dtype=np.int64)
NO_ENDS: U64 = np.zeros(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """The rows of one component that an owner may read.

    Fields:
        rows: their places in the component's buffers.
        units: the position, group or (of a state) prefix length of each.
        stamps: [rows, tokens of a row] the mixed chain values of the tokens that each row stands
            for: kpool of an index row, one of any other.
    """

    name: str
    component: Component
    rows: Ints
    units: Sequence[int]
    stamps: U64


class Held(NamedTuple):
    """What an owner holds: pages, the positions [first, stop) in them, states by prefix length
    and, if it runs, its ring slot.  KV rows are in `rows`, pages of the KV buffer, up to `saved`:
    on the host, under HiSparse."""

    pages: tuple[int, ...]
    rows: tuple[int, ...]
    first: int
    stop: int
    saved: int
    states: Mapping[int, int]
    slot: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Owner:
    """An owner of rows.

    Fields:
        chain: of its tokens.
        readers: its rows, by component; those behind the end of their buffer are in `beyond`.
        rows: the places of all of `readers` in the space of all components' rows.
        ends: the stamp of each row's last token, which names its content.
    """

    held: Held
    chain: U64
    readers: dict[Component, Reader]
    beyond: list[Reader]
    rows: Ints
    ends: U64


class Space:
    """The rows of all components laid end to end, as many of each as its buffers have."""

    def __init__(self, sizes: Mapping[Component, int]) -> None:
        self.sizes = dict(sizes)
        self.first: dict[Component, int] = {}
        self.total = 0
        for component, size in sizes.items():
            self.first[component] = self.total
            self.total += size

    def of(self, content: U64, component: Component) -> U64:
        """The part of an array over all rows that is one component's."""
        first = self.first[component]
        return content[first : first + self.sizes[component]]


@dataclass(frozen=True, slots=True)
class Readable:
    """All that may be read after a step.

    Fields:
        owners: by name; `fresh` are those that were not the same before the step.
        content: [rows of all components] the stamp that each must stand for, 0 for none.
        clash: whether two owners want a row to be different.
    """

    owners: dict[str, Owner] = field(default_factory=dict)
    fresh: list[Owner] = field(default_factory=list)
    content: U64 = field(default_factory=lambda: NO_ENDS)
    clash: bool = False


class Finder:
    """Makes `Readable`s of one run's snapshots, in order."""

    def __init__(self, world: World, space: Space) -> None:
        self._world, self._space = world, space
        self._chains: dict[tuple[int, ...], U64] = {}
        self._places: dict[tuple[int, ...], tuple[Ints, Ints]] = {}

    def find(self, snapshot: Snapshot, before: Readable) -> Readable:
        """Rows behind the caller's own count of a request's tokens, or behind its page table,
        are left out: such a snapshot fails the exact oracle."""
        owners: dict[str, Owner] = {}
        fresh: list[Owner] = []
        for name, held, chain in self._holdings(snapshot):
            owner = before.owners.get(name)
            if owner is None or owner.held != held or owner.chain is not chain:
                owner = self._owner(name, held, chain)
                fresh.append(owner)
            owners[name] = owner
        if not fresh and len(owners) == len(before.owners):
            return Readable(owners, fresh, before.content, before.clash)
        content = np.zeros(self._space.total, dtype=np.uint64)
        rows = np.concatenate([NO_ROWS, *(owner.rows for owner in owners.values())])
        ends = np.concatenate([NO_ENDS, *(owner.ends for owner in owners.values())])
        content[rows] = ends
        return Readable(owners, fresh, content, bool(np.count_nonzero(content[rows] != ends)))

    def places(self, pages: tuple[int, ...]) -> tuple[Ints, Ints]:
        """The locs and the index slots of all that these logical pages have room for."""
        if pages not in self._places:
            geometry = self._world.geometry
            positions = len(pages) * geometry.logical_page_size
            self._places[pages] = (
                locs(pages, 0, positions, geometry),
                index_slots(pages, 0, positions // geometry.kpool, geometry),
            )
        return self._places[pages]

    def _holdings(self, snapshot: Snapshot) -> Iterable[tuple[str, Held, U64]]:
        for request, view in snapshot.requests.items():
            client = self._world.clients[request]
            states = dict(view.checkpoints)
            if view.state_slot is not None:
                states[view.state_position] = view.state_slot
            stop, rows = min(view.length, client.length), row_pages(view.pages, snapshot)
            saved = min(stop, _saved(request, snapshot))
            held = Held(view.pages, rows, 0, stop, saved, states, view.slot)
            yield client.name, held, client.chain
        paths = cached_prefixes(snapshot.cached)
        for node in snapshot.cached:
            if node.node not in paths:
                # no prefix: the exact oracle says so
                continue
            path = paths[node.node].tokens
            first, stop = len(path) - len(node.tokens), len(path)
            rows = row_pages(node.pages, snapshot)
            held = Held(node.pages, rows, first, stop, stop, node.checkpoints, None)
            yield f"cached prefix {node.node}", held, self._chain(path)

    def _chain(self, tokens: tuple[int, ...]) -> U64:
        if tokens not in self._chains:
            self._chains[tokens] = self._world.stamper.chain(tokens)
        return self._chains[tokens]

    def _owner(self, name: str, held: Held, chain: U64) -> Owner:
        readers, beyond, space = {}, [], self._space
        for reader in self._readers(name, held, mix(chain)):
            if space.total and np.maximum.reduce(reader.rows) >= space.sizes[reader.component]:
                beyond.append(reader)
            else:
                readers[reader.component] = reader
        rows, ends = NO_ROWS, NO_ENDS
        if readers and space.total:
            parts = readers.values()
            rows = np.concatenate([space.first[part.component] + part.rows for part in parts])
            ends = np.concatenate([part.stamps[:, -1] for part in parts])
        return Owner(held, chain, readers, beyond, rows, ends)

    def _readers(self, name: str, held: Held, mixed: U64) -> Iterable[Reader]:
        """KV and index rows of positions first .. stop - 1, the first of them in pages[0]; states
        after a token or more, which name a writer; and the tail."""
        geometry, (rows, _) = self._world.geometry, self.places(held.rows)
        slots = self.places(held.pages)[1]
        kpool, first = geometry.kpool, held.first
        stop = min(held.stop, first + len(rows))
        saved = min(held.saved, stop)
        group, last = first // kpool, stop // kpool
        if saved > first:
            units, stamps = range(first, saved), mixed[first:saved, None]
            yield Reader(name, Component.KV, rows[: saved - first], units, stamps)
        if last > group:
            stamps = mixed[group * kpool : last * kpool].reshape(-1, kpool)
            yield Reader(name, Component.INDEX, slots[: last - group], range(group, last), stamps)
        lengths = [length for length in held.states if 0 < length <= len(mixed)]
        if lengths:
            rows = np.array([held.states[length] for length in lengths])
            stamps = mixed[np.array(lengths) - 1, None]
            yield Reader(name, Component.STATE, rows, lengths, stamps)
        start = tail_start(held.stop, geometry)
        if held.slot is not None and start < held.stop:
            units, size = range(start, held.stop), geometry.ring_size
            rows = held.slot * size + np.arange(start, held.stop) % size
            yield Reader(name, Component.TAIL, rows, units, mixed[start : held.stop, None])


def row_pages(pages: tuple[int, ...], snapshot: Snapshot) -> tuple[int, ...]:
    """The pages of the KV buffer that hold the rows of logical pages; one that lacks a host page
    fails the residency oracle, and is the padding here."""
    if snapshot.hot is None:
        return pages
    return tuple(snapshot.hot.backing.get(page, 0) for page in pages)


def _saved(request: RequestId, snapshot: Snapshot) -> int:
    """How many positions of a running request have rows in the KV buffer."""
    if snapshot.hot is None:
        return snapshot.requests[request].length
    buffer = snapshot.hot.buffers.get(request)
    return buffer.saved if buffer else 0
