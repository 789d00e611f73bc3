"""What the oracles look at around each step: the rows somebody may read, and all the bytes.

The readers of a snapshot are its running requests and the nodes of its prefix tree.  Their rows'
places follow from the page tables by the reference's addressing; what a row must hold follows
from the chain of its reader's tokens (`fuzz.stamps`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fuzz.stamps import U64, Bytes
from fuzz.step import Step, World
from reference.addressing import index_slots, locs, tail_start
from reference.contract import CachedNode, Capability, Component, Snapshot

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Layer = tuple[Component, int]

PLACES = {
    Component.KV: "KV row {}",
    Component.INDEX: "index slot {}",
    Component.TAIL: "tail ring row {}",
    Component.STATE: "state slot {}",
}


@dataclass(frozen=True, slots=True)
class Reader:
    """One owner of rows: `rows` are their places, `chains` the chain value of each (of an index
    row: those of its kpool tokens), and `first` the position, group or length of the first."""

    name: str
    rows: Ints
    chains: U64
    first: int


@dataclass(slots=True)
class Readable:
    """All readable rows of a snapshot, by component."""

    readers: Mapping[Component, list[Reader]] = field(
        default_factory=lambda: {component: [] for component in Component}
    )
    _joined: dict[Component, tuple[Ints, U64]] = field(default_factory=dict)
    _content: dict[Component, U64] = field(default_factory=dict)

    def joined(self, component: Component) -> tuple[Ints, U64]:
        """Rows and chains of all readers, one after the other."""
        if component not in self._joined:
            readers = self.readers[component]
            rows = [np.empty(0, np.int64), *(r.rows for r in readers)]
            chains = [np.empty(0, np.uint64), *(r.chains for r in readers)]
            self._joined[component] = np.concatenate(rows), np.concatenate(chains)
        return self._joined[component]

    def owner(self, component: Component, at: int) -> tuple[Reader, int]:
        """The reader of row number `at` of `joined`, and which of its rows that is."""
        for reader in self.readers[component]:
            if at < len(reader.rows):
                return reader, at
            at -= len(reader.rows)
        raise IndexError(at)

    def content(self, component: Component, rows: int, kpool: int) -> U64:
        """[rows] the chain value that each of a buffer's rows must stand for, 0 for none."""
        if component not in self._content:
            at, chains = self.joined(component)
            self._content[component] = held = np.zeros(rows, dtype=np.uint64)
            # A row beyond the buffer is left to the provenance oracle.
            inside = at < rows
            last = chains[kpool - 1 :: kpool] if component is Component.INDEX else chains
            held[at[inside]] = last[inside]
        return self._content[component]


@dataclass(frozen=True, slots=True)
class View:
    """Around one step.  `rows` are all raw buffers after it, [rows, row bytes] each, and
    `changed` says which of their rows differ from before."""

    before: Readable
    after: Readable
    rows: Mapping[Layer, Bytes]
    changed: Mapping[Layer, Mask]


class Viewer:
    """Makes each step's view once, for all oracles.  Without Capability.RAW it has no rows."""

    def __init__(self, world: World) -> None:
        self._world = world
        raw = Capability.RAW in world.engine.capabilities
        self.layers = [(c, i) for c in Component for i in range(layers_of(world, c))]
        self._raw = self.layers if raw else []
        self._chains: dict[tuple[int, ...], U64] = {}
        self._rows = self._copy()
        self._readable = Readable()
        self._step: Step | None = None
        self._view = View(self._readable, self._readable, self._rows, {})

    def look(self, step: Step) -> View:
        """The view of `step`, which has just been done."""
        if self._step is not step:
            before, rows_before = self._readable, self._rows
            self._step, self._readable, self._rows = step, self._find(step.after), self._copy()
            changed = {at: (rows != rows_before[at]).any(axis=1) for at, rows in self._rows.items()}
            self._view = View(before, self._readable, self._rows, changed)
        return self._view

    def _copy(self) -> dict[Layer, Bytes]:
        return {(c, i): self._buffer(c, i) for c, i in self._raw}

    def _buffer(self, component: Component, layer: int) -> Bytes:
        """A copy of a layer's raw buffer, row by row: locs, index slots (key and scale put
        together), ring rows or state slots."""
        raw: Bytes = self._world.engine.raw(component, layer).numpy()
        if component is Component.INDEX:
            size, dim = self._world.geometry.index_page_size, self._world.shape.index_dim
            keys = raw[:, : size * dim].reshape(-1, dim)
            return np.hstack([keys, raw[:, size * dim :].reshape(-1, 4)])
        return raw.reshape(-1, raw.shape[-1]).copy()

    def _find(self, snapshot: Snapshot) -> Readable:
        """Rows behind the caller's own count of a request's tokens, or behind its page table,
        are left out: such a snapshot fails the exact oracle."""
        found = Readable()
        for request, view in snapshot.requests.items():
            client = self._world.clients[request]
            stop = min(view.length, client.length)
            self._paged(found, client.name, view.pages, client.chain, 0, stop)
            self._tail(found, client.name, view.slot, client.chain, stop)
            states = {**view.checkpoints, view.state_position: view.state_slot}
            self._states(found, client.name, states, client.chain)
        for name, node, path in self._nodes(snapshot.cached):
            chain = self._chain(path)
            first = len(path) - len(node.tokens)
            self._paged(found, name, node.pages, chain, first, len(path))
            self._states(found, name, node.checkpoints, chain)
        return found

    def _chain(self, tokens: tuple[int, ...]) -> U64:
        if tokens not in self._chains:
            self._chains[tokens] = self._world.stamper.chain(tokens)
        return self._chains[tokens]

    def _nodes(
        self, cached: Iterable[CachedNode]
    ) -> Iterable[tuple[str, CachedNode, tuple[int, ...]]]:
        """Each node with the tokens of its path; nodes without a path are left out."""
        paths: dict[int | None, tuple[int, ...]] = {None: ()}
        waiting = list(cached)
        while ready := [node for node in waiting if node.parent in paths]:
            waiting = [node for node in waiting if node.parent not in paths]
            for node in ready:
                paths[node.node] = path = paths[node.parent] + node.tokens
                yield f"cached prefix {node.node}", node, path

    def _paged(
        self,
        found: Readable,
        name: str,
        pages: tuple[int, ...],
        chain: U64,
        first: int,
        stop: int,
    ) -> None:
        """KV and index rows of positions first .. stop - 1, the first of them in pages[0]."""
        geometry = self._world.geometry
        stop = min(stop, first + len(pages) * geometry.logical_page_size)
        if stop <= first:
            return
        rows = locs(pages, 0, stop - first, geometry)
        found.readers[Component.KV].append(Reader(name, rows, chain[first:stop], first))
        group, last = first // geometry.kpool, stop // geometry.kpool
        if last > group:
            slots = index_slots(pages, 0, last - group, geometry)
            chains = chain[group * geometry.kpool : last * geometry.kpool]
            found.readers[Component.INDEX].append(Reader(name, slots, chains, group))

    def _tail(self, found: Readable, name: str, slot: int, chain: U64, length: int) -> None:
        geometry = self._world.geometry
        start = int(tail_start(length, geometry))
        if start < length:
            rows = slot * geometry.ring_size + np.arange(start, length) % geometry.ring_size
            found.readers[Component.TAIL].append(Reader(name, rows, chain[start:length], start))

    def _states(self, found: Readable, name: str, states: Mapping[int, int], chain: U64) -> None:
        """States after the given prefix lengths; one after no token has no writer to name."""
        for length, slot in states.items():
            if 0 < length <= len(chain):
                found.readers[Component.STATE].append(
                    Reader(name, np.array([slot]), chain[length - 1 : length], length)
                )


def layers_of(world: World, component: Component) -> int:
    """How many layers store a component."""
    states = component is Component.STATE
    return len(world.shape.kda_layers if states else world.shape.dsa_layers)
