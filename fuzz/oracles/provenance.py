"""Provenance: every row that somebody may read holds what its position's tokens wrote there.

In a stamped run the payload names its writer, so a wrong row is told with its owner, the writer
that it should have and the one that it has.  Rows are looked at in two ways: in the raw buffers,
at the places where the reference's addressing puts them, and through the engine's own read path.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fuzz.oracles.view import PLACES, Layer, Reader, View, Viewer
from fuzz.stamps import U64, Bytes, Registry, unit_of
from fuzz.step import Client, Step, Violation, World
from reference.contract import Capability, Component, RequestId


class Provenance:
    """Judges stamped runs; a model run's rows are the numeric oracle's business.

    `_verified` remembers which chain value each raw row was found to hold, so that only rows
    that changed, or changed hands, are looked at again."""

    name = "provenance"

    def __init__(self, world: World, viewer: Viewer) -> None:
        self._world, self._viewer = world, viewer
        self._raw = Capability.RAW in world.engine.capabilities
        self._verified: dict[Layer, U64] = {}
        self._last: Step | None = None

    def check(self, step: Step) -> list[Violation]:
        """All readable rows in the raw buffers, and the paged ones of the step's requests as the
        engine reads them.  An engine without raw buffers has every running request read whole."""
        if not self._world.stamped:
            return []
        self._last, view = step, self._viewer.look(step)
        found = [v for at in view.rows for v in self._in_buffer(view, at)]
        if found or not self._raw:
            return found or self._all_read(step, only=None, components=set(Component))
        return self._all_read(step, only=step.calls, components={Component.KV, Component.INDEX})

    def close(self) -> list[Violation]:
        """All running requests, as the engine reads them."""
        if self._last is None:
            return []
        return self._all_read(self._last, only=None, components=set(Component))

    def _all_read(
        self, step: Step, *, only: set[RequestId] | None, components: set[Component]
    ) -> list[Violation]:
        """What the running requests of the step (of `only` these) read."""
        asked = {
            client.name: client
            for client in self._world.running()
            if client.request in step.after.requests and (only is None or client.request in only)
        }
        view = self._viewer.look(step)
        return [
            violation
            for component, layer in self._viewer.layers
            if component in components
            for reader in view.after.readers[component]
            if reader.name in asked
            for violation in self._as_read(asked[reader.name], reader, view, (component, layer))
        ]

    def _in_buffer(self, view: View, at: Layer) -> Iterator[Violation]:
        """The first wrong row of a layer's buffer."""
        component, layer = at
        raw, kpool = view.rows[at], self._world.geometry.kpool
        rows, chains = view.after.joined(component)
        if rows.size and rows.max() >= len(raw):
            reader, i = view.after.owner(component, int(rows.argmax()))
            place = PLACES[component].format(int(rows.max()))
            sentence = f"{place}, {reader.name}'s row {reader.first + i}, lies behind the buffer."
            yield Violation(self.name, component.value, sentence)
            return
        verified = self._verified.setdefault(at, np.zeros(len(raw), dtype=np.uint64))
        verified[view.changed[at]] = 0
        ends = chains[kpool - 1 :: kpool] if component is Component.INDEX else chains
        news = np.flatnonzero(verified[rows] != ends)
        if component is Component.INDEX:
            chains = chains.reshape(-1, kpool)[news].reshape(-1)
        else:
            chains = chains[news]
        if not news.size:
            return
        wrong = (raw[rows[news]] != self._expected(component, chains, layer)).any(axis=1)
        verified[rows[news[~wrong]]] = ends[news[~wrong]]
        for i in news[wrong][:1]:
            reader, unit = view.after.owner(component, int(i))
            place = PLACES[component].format(int(rows[i]))
            yield self._wrong(component, place, reader, unit, raw[rows[i]])

    def _as_read(
        self, client: Client, reader: Reader, view: View, at: Layer
    ) -> Iterator[Violation]:
        """The first row that the engine's read path gets wrong."""
        component, layer = at
        first, stop = reader.first, reader.first + len(reader.rows)
        if component is Component.STATE:
            if reader.first != client.length:
                return  # a checkpoint, which a request cannot read
            first, stop = 0, 1
        engine = self._world.engine
        actual = engine.read(client.request, component, layer, first, stop).numpy()
        # The raw rows have just been found right, and are cheaper than to stamp anew.
        raw = view.rows.get(at)
        if raw is None:
            expected = self._expected(component, reader.chains, layer)
        else:
            expected = raw[reader.rows]
        if actual.shape != expected.shape:
            sentence = (
                f"Reading {component.value} rows {first} to {stop} of {client.name} gave shape "
                f"{actual.shape}, not {expected.shape}."
            )
            yield Violation(self.name, component.value, sentence)
        elif not np.array_equal(actual, expected):
            i = int(np.flatnonzero((actual != expected).any(axis=1))[0])
            place = f"What {client.name} reads as {component.value} row {first + i}"
            yield self._wrong(component, place, reader, i, actual[i])

    def _expected(self, component: Component, chains: U64, layer: int) -> Bytes:
        """What rows with these chain values hold."""
        stamper, n = self._world.stamper, len(chains)
        if component is Component.KV:
            return stamper.expected_kv(chains, 0, n, layer)
        if component is Component.INDEX:
            return stamper.expected_index(chains, 0, n // self._world.geometry.kpool, layer)
        if component is Component.TAIL:
            return stamper.expected_tail(chains, 0, n, layer)
        return stamper.expected_state(chains, np.arange(1, n + 1), layer)

    def _wrong(
        self, component: Component, place: str, reader: Reader, i: int, row: Bytes
    ) -> Violation:
        world, kpool, unit = self._world, self._world.geometry.kpool, reader.first + i
        what = unit_of(component, unit, kpool)
        registry = Registry(world.stamper, {c.name: c.chain for c in world.clients.values()})
        holds = registry.writer(component, row)
        sentence = f"{place} should hold {reader.name}'s {what}, holds {holds}."
        return Violation(self.name, component.value, sentence)
