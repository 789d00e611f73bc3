"""What the oracles look at around each step: the rows somebody may read, and all the bytes.

The readers of a snapshot are its running requests and the nodes of its prefix tree.  Their rows'
places follow from the page tables by the reference's addressing; what a row must hold follows
from the chain of its reader's tokens (`fuzz.stamps`).  Most readers and most rows are the same
after a step as before it, so both are compared, and what is new is told apart.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fuzz.stamps import U64, Bytes
from fuzz.step import Step, World
from reference.addressing import index_slots, locs, tail_start
from reference.contract import CachedNode, Capability, Component, Snapshot

Ints = npt.NDArray[np.int64]
Layer = tuple[Component, int]

NONE: Ints = np.zeros(0, dtype=np.int64)
PLACES = {
    Component.KV: "KV row {}",
    Component.INDEX: "index slot {}",
    Component.TAIL: "tail ring row {}",
    Component.STATE: "state slot {}",
}


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """One owner of rows.

    Fields:
        rows: their places.
        units: the position, group or (of a state) prefix length of each.
        chains: [rows, tokens of a row] the chain values of the tokens that each row stands for:
            kpool of an index row, one of any other.
    """

    name: str
    rows: Ints
    units: Sequence[int]
    chains: U64

    @property
    def ends(self) -> U64:
        """[rows] the chain value of each row's last token, which names its content."""
        ends: U64 = self.chains[:, -1]
        return ends


Held = tuple[tuple[int, ...], int, int, Mapping[int, int], int | None]
"""What an owner holds: pages, the positions [first, stop) in them, states by prefix length and,
if it runs, its ring slot."""
Owner = tuple[Held, U64, dict[Component, Reader]]
"""An owner of the last snapshot: what it held, the chain of its tokens, and its readers."""
Readers = defaultdict[Component, list[Reader]]


@dataclass(frozen=True, slots=True)
class Readable:
    """All readable rows of a snapshot, by component.

    Fields:
        fresh: those of the readers that the snapshot before did not have.
        beyond: readers of rows behind the end of their buffer, which are not in `readers`.
        content: [rows] the chain value that each of a buffer's rows must stand for, 0 for none.
    """

    readers: Readers = field(default_factory=lambda: defaultdict(list))
    fresh: Readers = field(default_factory=lambda: defaultdict(list))
    beyond: Readers = field(default_factory=lambda: defaultdict(list))
    content: dict[Component, U64] = field(default_factory=dict)


class Buffer:
    """A layer's raw buffer as rows, with a copy of it as it was when last looked at."""

    def __init__(self, raw: Bytes, *parts: Bytes) -> None:
        """`parts`: views of the engine's memory `raw` that make the rows: one of [rows, bytes],
        or several of [pages, rows of a page, bytes] that belong side by side."""
        self._raw, self._parts = raw, parts
        self._page_rows = None if parts[0].ndim == 2 else parts[0].shape[1]
        self._rows = math.prod(parts[0].shape[:-1])
        # Compared in words, which are fewer than bytes.
        words = [part.view(f"u{math.gcd(8, part.shape[-1])}") for part in parts]
        self._words = [(now, now.copy()) for now in words]
        self._bytes = raw.tobytes()

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, rows: Ints) -> Bytes:
        """[n, row bytes]: a copy of the given rows."""
        if self._page_rows is None:
            return self._parts[0][rows]
        at = rows // self._page_rows, rows % self._page_rows
        return np.concatenate([part[at] for part in self._parts], axis=1)

    def changed(self) -> Ints:
        """The rows that differ from the last time, ascending."""
        now_bytes = self._raw.tobytes()
        if now_bytes == self._bytes:
            return NONE
        self._bytes = now_bytes
        touched = np.zeros(self._rows, dtype=bool)
        for now, then in self._words:
            touched[(now != then).ravel().nonzero()[0] // now.shape[-1]] = True
            then[...] = now
        return touched.nonzero()[0]


@dataclass(frozen=True, slots=True)
class View:
    """Around one step: who may read what, and which rows of each raw buffer it changed."""

    before: Readable
    after: Readable
    changed: Mapping[Layer, Ints]


class Viewer:
    """Makes each step's view once, for all oracles.  Without Capability.RAW it has no buffers."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.layers = [(c, i) for c in Component for i in range(layers_of(world, c))]
        raw = Capability.RAW in world.engine.capabilities
        self.buffers = {at: self._buffer(*at) for at in (self.layers if raw else ())}
        self._chains: dict[tuple[int, ...], U64] = {}
        self._places: dict[tuple[int, ...], tuple[Ints, Ints]] = {}
        self._owners: dict[str, Owner] = {}
        self._step: Step | None = None
        content = {c: np.zeros(len(b), np.uint64) for (c, _), b in self.buffers.items()}
        nobody = Readable(content=content)
        self._view = View(nobody, nobody, {})

    def look(self, step: Step) -> View:
        """The view of `step`, which has just been done."""
        if self._step is not step:
            self._step = step
            changed = {at: buffer.changed() for at, buffer in self.buffers.items()}
            self._view = View(self._view.after, self._find(step.after), changed)
        return self._view

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

    def _buffer(self, component: Component, layer: int) -> Buffer:
        """A layer's locs, index slots (key and scale side by side), ring rows or state slots."""
        raw: Bytes = self._world.engine.raw(component, layer).numpy()
        if component is Component.INDEX:
            size = self._world.geometry.index_page_size
            keys = size * self._world.shape.index_dim
            halves = raw[:, :keys], raw[:, keys:]
            return Buffer(raw, *(half.reshape(len(raw), size, -1) for half in halves))
        return Buffer(raw, raw.reshape(-1, raw.shape[-1]))

    def _find(self, snapshot: Snapshot) -> Readable:
        """Rows behind the caller's own count of a request's tokens, or behind its page table,
        are left out: such a snapshot fails the exact oracle."""
        found, seen = Readable(), self._owners
        self._owners = {}
        for request, view in snapshot.requests.items():
            client = self._world.clients[request]
            stop = min(view.length, client.length)
            states = {**view.checkpoints, view.state_position: view.state_slot}
            held: Held = (view.pages, 0, stop, states, view.slot)
            self._add(found, client.name, client.chain, held, seen.get(client.name))
        for name, node, path in _nodes(snapshot.cached):
            first = len(path) - len(node.tokens)
            held = node.pages, first, len(path), node.checkpoints, None
            self._add(found, name, self._chain(path), held, seen.get(name))
        self._fill(found, self._view.after)
        return found

    def _fill(self, found: Readable, before: Readable) -> None:
        """Work out the content of `found`, where its readers are not those of `before`."""
        for component, content in before.content.items():
            readers = found.readers[component]
            if readers != before.readers[component]:
                content = np.zeros_like(content)
                for reader in [*readers]:
                    try:
                        content[reader.rows] = reader.ends
                    except IndexError:
                        readers.remove(reader)
                        found.fresh[component].remove(reader)
                        found.beyond[component].append(reader)
            found.content[component] = content

    def _add(self, found: Readable, name: str, chain: U64, held: Held, seen: Owner | None) -> None:
        """Enter what an owner may read; `seen` is what it was in the snapshot before."""
        if seen is not None and seen[0] == held and seen[1] is chain:
            for component, reader in seen[2].items():
                found.readers[component].append(reader)
            self._owners[name] = seen
            return
        pages, first, stop, states, slot = held
        made = {**self._paged(name, pages, chain, first, stop), **_states(name, states, chain)}
        if slot is not None:
            made |= self._tail(name, slot, chain, stop)
        for component, reader in made.items():
            found.fresh[component].append(reader)
            found.readers[component].append(reader)
        self._owners[name] = held, chain, made

    def _chain(self, tokens: tuple[int, ...]) -> U64:
        if tokens not in self._chains:
            self._chains[tokens] = self._world.stamper.chain(tokens)
        return self._chains[tokens]

    def _paged(
        self, name: str, pages: tuple[int, ...], chain: U64, first: int, stop: int
    ) -> dict[Component, Reader]:
        """KV and index rows of positions first .. stop - 1, the first of them in pages[0]."""
        kpool, (rows, slots) = self._world.geometry.kpool, self.places(pages)
        stop = min(stop, first + len(rows))
        group, last = first // kpool, stop // kpool
        made = {}
        if stop > first:
            made[Component.KV] = Reader(
                name, rows[: stop - first], range(first, stop), chain[first:stop, None]
            )
        if last > group:
            chains = chain[group * kpool : last * kpool].reshape(-1, kpool)
            made[Component.INDEX] = Reader(name, slots[: last - group], range(group, last), chains)
        return made

    def _tail(self, name: str, slot: int, chain: U64, length: int) -> dict[Component, Reader]:
        geometry = self._world.geometry
        start = int(tail_start(length, geometry))
        if start == length:
            return {}
        rows = slot * geometry.ring_size + np.arange(start, length) % geometry.ring_size
        return {Component.TAIL: Reader(name, rows, range(start, length), chain[start:length, None])}


def _states(name: str, states: Mapping[int, int], chain: U64) -> dict[Component, Reader]:
    """States after the given prefix lengths; one after no token has no writer to name."""
    lengths = [length for length in states if 0 < length <= len(chain)]
    if not lengths:
        return {}
    slots = np.array([states[length] for length in lengths])
    chains = chain[np.array(lengths) - 1, None]
    return {Component.STATE: Reader(name, slots, lengths, chains)}


def _nodes(cached: Iterable[CachedNode]) -> Iterable[tuple[str, CachedNode, tuple[int, ...]]]:
    """Each node with the tokens of its path; nodes without a path are left out."""
    paths: dict[int | None, tuple[int, ...]] = {None: ()}
    waiting = list(cached)
    while ready := [node for node in waiting if node.parent in paths]:
        waiting = [node for node in waiting if node.parent not in paths]
        for node in ready:
            paths[node.node] = path = paths[node.parent] + node.tokens
            yield f"cached prefix {node.node}", node, path


def layers_of(world: World, component: Component) -> int:
    """How many layers store a component."""
    states = component is Component.STATE
    return len(world.shape.kda_layers if states else world.shape.dsa_layers)
