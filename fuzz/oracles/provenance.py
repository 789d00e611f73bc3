"""Provenance: every row that somebody may read holds what its position's tokens wrote there.

In a stamped run the payload names its writer, so a wrong row is told with its owner, the writer
that it should have and the one that it has.  Rows are looked at in two ways: in the raw buffers,
at the places where the reference's addressing puts them, and through the engine's own read path.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fuzz.oracles.view import PLACES, Ints, Layer, Reader, View, Viewer
from fuzz.stamps import U64, Bytes, Registry, unit_of
from fuzz.step import Client, Step, Violation, World
from reference.contract import Component, RequestId


class Provenance:
    """Judges stamped runs; a model run's rows are the numeric oracle's business.

    `_verified` remembers which chain value each raw row was found to hold, so that only rows
    that changed, or changed hands, are looked at again."""

    name = "provenance"

    def __init__(self, world: World, viewer: Viewer) -> None:
        self._world, self._viewer = world, viewer
        self._verified = {
            at: np.zeros(len(buffer), dtype=np.uint64) for at, buffer in viewer.buffers.items()
        }
        self._last: Step | None = None

    def check(self, step: Step) -> list[Violation]:
        """All readable rows in the raw buffers, and the paged ones of the step's requests as the
        engine reads them.  An engine without raw buffers has every running request read whole."""
        if not self._world.stamped:
            return []
        self._last, view = step, self._viewer.look(step)
        found = [v for at in self._viewer.buffers for v in self._in_buffer(view, at)]
        if found or not self._viewer.buffers:
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
        readers = self._viewer.look(step).after.readers
        return [
            violation
            for component, layer in self._viewer.layers
            if component in components
            for reader in readers[component]
            if reader.name in asked
            for violation in self._as_read(asked[reader.name], reader, (component, layer))
        ]

    def _in_buffer(self, view: View, at: Layer) -> Iterator[Violation]:
        """The first wrong row of each reader of a layer's buffer."""
        component, changed, verified = at[0], view.changed[at], self._verified[at]
        for reader in view.after.beyond[component]:
            i = int(reader.rows.argmax())
            place = PLACES[component].format(int(reader.rows[i]))
            sentence = f"{place}, {reader.name}'s row {reader.units[i]}, lies behind the buffer."
            yield Violation(self.name, component.value, sentence)
        verified[changed] = 0
        # Old readers are right still, unless a row changed that somebody could read.
        touched = changed.size and view.before.content[component][changed].any()
        for reader in (view.after.readers if touched else view.after.fresh)[component]:
            news = (verified[reader.rows] != reader.ends).nonzero()[0]
            if news.size:
                yield from self._judge(reader, news, at)

    def _judge(self, reader: Reader, news: Ints, at: Layer) -> Iterator[Violation]:
        """The first wrong one of a reader's rows `news`; if there is none they are verified."""
        (component, layer), rows = at, reader.rows[news]
        actual = self._viewer.buffers[at][rows]
        expected = self._expected(component, reader.chains[news].reshape(-1), layer)
        if actual.tobytes() == expected.tobytes():
            self._verified[at][rows] = reader.ends[news]
            return
        first = int((actual != expected).any(axis=1).argmax())
        place = PLACES[component].format(int(rows[first]))
        yield self._wrong(component, place, reader, int(news[first]), actual[first])

    def _as_read(self, client: Client, reader: Reader, at: Layer) -> Iterator[Violation]:
        """The first row that the engine's read path gets wrong."""
        component, layer = at
        rows, chains, first, skipped = reader.rows, reader.chains, reader.units[0], 0
        if component is Component.STATE:
            if client.length not in reader.units:
                return
            # The others are checkpoints, which a request cannot read.
            skipped = reader.units.index(client.length)
            rows, chains, first = rows[[skipped]], chains[[skipped]], 0
        stop = first + len(rows)
        actual = self._world.engine.read(client.request, component, layer, first, stop).numpy()
        # The raw rows have just been found right, and are cheaper than to stamp anew.
        buffer = self._viewer.buffers.get(at)
        expected = (
            self._expected(component, chains.reshape(-1), layer) if buffer is None else buffer[rows]
        )
        if actual.shape != expected.shape:
            sentence = (
                f"Reading {component.value} rows {first} to {stop} of {client.name} gave shape "
                f"{actual.shape}, not {expected.shape}."
            )
            yield Violation(self.name, component.value, sentence)
        elif actual.tobytes() != expected.tobytes():
            i = int((actual != expected).any(axis=1).argmax())
            place = f"What {client.name} reads as {component.value} row {first + i}"
            yield self._wrong(component, place, reader, skipped + i, actual[i])

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
        world = self._world
        what = unit_of(component, reader.units[i], world.geometry.kpool)
        registry = Registry(world.stamper, {c.name: c.chain for c in world.clients.values()})
        holds = registry.writer(component, row)
        sentence = f"{place} should hold {reader.name}'s {what}, holds {holds}."
        return Violation(self.name, component.value, sentence)
