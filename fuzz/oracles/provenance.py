"""Provenance: every row that somebody may read holds what its position's tokens wrote there.

In a stamped run the payload names its writer, so a wrong row is told with its owner, the writer
that it should have and the one that it has.  Rows are looked at in two ways: in the raw buffers,
at the places where the reference's addressing puts them, and through the engine's own read path.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fuzz.oracles.readers import Readable, Reader
from fuzz.oracles.view import PLACES, Layer, View, Viewer
from fuzz.stamps import Bytes, Registry, unit_of
from fuzz.step import SPOILT, Client, Step, Violation, World
from fuzz.tape import SplitMix
from reference.contract import Component, RequestId


class Provenance:
    """Judges stamped runs; a model run's rows are the numeric oracle's business."""

    name = "provenance"

    def __init__(self, world: World, viewer: Viewer) -> None:
        self._world, self._viewer = world, viewer
        self._last: Step | None = None
        # Steps so far; none in the end, when all is read whole.
        self._turn = 0

    def check(self, step: Step) -> list[Violation]:
        """All readable rows in the raw buffers, and the paged ones of the step's requests as the
        engine reads them.  An engine without raw buffers has every running request read whole."""
        if not self._world.stamped:
            return []
        self._last, view = step, self._viewer.look(step)
        self._turn += 1
        found = [v for at in self._viewer.images for v in self._in_buffer(view, at)]
        if found or not self._viewer.images:
            return found or self._all_read(step, only=None, components=set(Component))
        return self._all_read(step, only=step.calls, components={Component.KV, Component.INDEX})

    def close(self) -> list[Violation]:
        """All running requests, as the engine reads them."""
        if self._last is None:
            return []
        self._turn = 0
        return self._all_read(self._last, only=None, components=set(Component))

    def _all_read(
        self, step: Step, *, only: set[RequestId] | None, components: set[Component]
    ) -> list[Violation]:
        """What the running requests of the step (of `only` these) read."""
        asked = [
            client
            for client in self._world.running()
            if client.request in step.after.requests and (only is None or client.request in only)
        ]
        owners = self._viewer.look(step).after.owners
        return [
            violation
            for component, layer in self._viewer.layers
            if component in components
            for client in asked
            if (reader := owners[client.name].readers.get(component))
            for violation in self._as_read(client, reader, layer)
        ]

    def _in_buffer(self, view: View, at: Layer) -> Iterator[Violation]:
        """The first wrong row of each reader of a layer's buffer."""
        component, space = at[0], self._viewer.space
        for owner in view.after.fresh:
            for reader in owner.beyond:
                if reader.component is component:
                    i = int(reader.rows.argmax())
                    place = PLACES[component].format(int(reader.rows[i]))
                    row = f"{reader.name}'s row {reader.units[i]}"
                    sentence = f"{place}, {row}, lies behind the buffer."
                    yield Violation(self.name, component.value, sentence)
        differs = view.differs[at]
        if differs.size and np.count_nonzero(space.of(view.after.content, component)[differs]):
            for reader in _readers(view.after, component):
                wrong = np.isin(reader.rows, differs).nonzero()[0]
                if wrong.size:
                    yield self._wrong_row(reader, int(wrong[0]), at)
        elif view.after.clash:
            for reader in _readers(view.after, component):
                yield from self._judge(reader, at)

    def _judge(self, reader: Reader, at: Layer) -> Iterator[Violation]:
        """The first wrong one of a reader's rows, whatever others want them to be."""
        should = self._world.stamper.expected(reader.component, reader.stamps.reshape(-1), at[1])
        wrong = (self._viewer.images[at].actual(reader.rows) != should).any(axis=1).nonzero()[0]
        if wrong.size:
            yield self._wrong_row(reader, int(wrong[0]), at)

    def _wrong_row(self, reader: Reader, i: int, at: Layer) -> Violation:
        place = PLACES[reader.component].format(int(reader.rows[i]))
        row = self._viewer.images[at].actual(reader.rows[[i]])[0]
        return self._wrong(place, reader, i, row)

    def _as_read(self, client: Client, reader: Reader, layer: int) -> Iterator[Violation]:
        """The first row that the engine's read path gets wrong."""
        component = reader.component
        rows, stamps, first, skipped = reader.rows, reader.stamps, reader.units[0], 0
        if component is Component.STATE:
            if client.length not in reader.units:
                return
            # The others are checkpoints, which a request cannot read.
            skipped = reader.units.index(client.length)
            rows, stamps, first = rows[[skipped]], stamps[[skipped]], 0
        elif component is Component.KV and (part := self._part(len(rows), layer)):
            skipped, first = part.start, first + part.start
            rows, stamps = rows[part], stamps[part]
        stop = first + len(rows)
        read = self._world.engine.read(client.request, component, layer, first, stop)
        actual = read.numpy()
        # The raw rows have just been found right, and are cheaper than to stamp anew.
        image = self._viewer.images.get((component, layer))
        if image is None:
            expected = self._world.stamper.expected(component, stamps.reshape(-1), layer)
        else:
            expected = image[rows]
        if actual.shape != expected.shape:
            sentence = (
                f"Reading {component.value} rows {first} to {stop} of {client.name} gave shape "
                f"{actual.shape}, not {expected.shape}."
            )
            yield Violation(self.name, component.value, sentence)
        elif actual.tobytes() != expected.tobytes():
            i = int((actual != expected).any(axis=1).argmax())
            place = f"What {client.name} reads as {component.value} row {first + i}"
            yield self._wrong(place, reader, skipped + i, actual[i])
        read.fill_(SPOILT)

    def _part(self, rows: int, layer: int) -> slice | None:
        """Every other time a part of a request's rows, without the first and the last."""
        turn = self._turn + layer
        if not self._turn or turn % 2 or rows < 3:
            return None
        start = 1 + SplitMix(turn).below(rows - 2)
        return slice(start, start + 1 + SplitMix(turn + 1).below(rows - 1 - start))

    def _wrong(self, place: str, reader: Reader, i: int, row: Bytes) -> Violation:
        world, component = self._world, reader.component
        what = unit_of(component, reader.units[i], world.geometry.kpool)
        registry = Registry(world.stamper, {c.name: c.chain for c in world.clients.values()})
        should, holds = f"{reader.name}'s {what}", registry.writer(component, row)
        sentence = f"{place} should hold {should}, holds {holds}."
        return Violation(self.name, component.value, sentence, place, should, holds)


def _readers(readable: Readable, component: Component) -> Iterator[Reader]:
    """All readers of a component."""
    for owner in readable.owners.values():
        if component in owner.readers:
            yield owner.readers[component]
