"""Rows that are not what their readers may expect, in a stamped run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fuzz.oracles.readers import Finder, Readable, Space
from fuzz.oracles.view import PLACES, Layer
from fuzz.report.contents import Content, Contents
from fuzz.report.moment import Moment, layers_of
from fuzz.report.reading import as_read
from fuzz.stamps import Bytes, mix, unit_of
from fuzz.step import World
from reference.contract import Component, Engine, Snapshot


class Wrong(NamedTuple):
    """A row that is not as one of its readers may expect.

    Fields:
        component, row: where it lies; layer: as the model counts.
        reader, should: who reads it, and what for; holds: what is there.
        read: it lies there as it should, and only comes out otherwise when it is read.
    """

    component: Component
    row: int
    layer: int
    reader: str
    should: str
    holds: Content
    read: bool = False

    @property
    def place(self) -> str:
        place = PLACES[self.component].format(self.row)
        return f"{place}, as {self.reader} reads it" if self.read else place


def wrong_rows(world: World, moment: Moment, contents: Contents) -> Iterator[Wrong]:
    """Rows of running requests and cached prefixes that are not what their tokens wrote, in a
    stamped run; places follow from the reference's addressing."""
    owners = Finder(world, Space({})).find(moment.snapshot, Readable()).owners
    for owner in owners.values():
        for reader in owner.readers.values():
            component, stamps = reader.component, reader.stamps.reshape(-1)
            units = [unit_of(component, unit, world.geometry.kpool) for unit in reader.units]
            for layer in range(len(layers_of(world, component))):
                should = world.stamper.expected(component, stamps, layer)
                for i in _differing(moment, (component, layer), reader.rows, should):
                    row = int(reader.rows[i])
                    yield Wrong(
                        component=component,
                        row=row,
                        layer=layers_of(world, component)[layer],
                        reader=reader.name,
                        should=f"{reader.name}'s {units[i]}",
                        holds=contents.of(moment, (component, layer), row),
                    )
    yield from _wrong_tags(world, moment, contents)


def _wrong_tags(world: World, moment: Moment, contents: Contents) -> Iterator[Wrong]:
    """Slots of hot buffers that do not hold the position of their tag."""
    hot = moment.snapshot.hot
    for request, view in hot.buffers.items() if hot else ():
        client = world.clients[request]
        if client.length < len(client.tokens):
            continue  # it is filled once the prompt is complete
        for layer, tags in enumerate(view.tags):
            held = [(view.rows[s], tag) for s, tag in enumerate(tags) if 0 <= tag < client.length]
            if not held:
                continue
            rows, positions = (np.array(column) for column in zip(*held, strict=True))
            should = world.stamper.expected(Component.KV, mix(client.chain)[positions], layer)
            for i in _differing(moment, (Component.HOT, layer), rows, should):
                row, position = held[i]
                yield Wrong(
                    component=Component.HOT,
                    row=row,
                    layer=world.shape.dsa_layers[layer],
                    reader=client.name,
                    should=f"{client.name}'s position {position}",
                    holds=contents.of(moment, (Component.HOT, layer), row),
                )


def wrong_reads(
    engine: Engine, world: World, snapshot: Snapshot, contents: Contents
) -> Iterator[Wrong]:
    """Rows that running requests read otherwise than they should, in a stamped run."""
    kpool = world.geometry.kpool
    for _, reader, layer, which, rows in as_read(engine, world, snapshot):
        component, stamps = reader.component, reader.stamps[which.start : which.stop]
        should = world.stamper.expected(component, stamps.reshape(-1), layer)
        if rows.shape != should.shape:
            continue
        for i in np.flatnonzero((rows != should).any(axis=1)).tolist():
            unit = unit_of(component, reader.units[which[i]], kpool)
            yield Wrong(
                component=component,
                row=int(reader.rows[which[i]]),
                layer=layers_of(world, component)[layer],
                reader=reader.name,
                should=f"{reader.name}'s {unit}",
                holds=contents.named((component, layer), rows[i]),
                read=True,
            )


def _differing(moment: Moment, at: Layer, rows: npt.NDArray[Any], should: Bytes) -> list[int]:
    """Which of the rows are not as they should be."""
    stored, places = moment.rows.get(at), np.asarray(rows)
    if stored is None or stored.shape[1:] != should.shape[1:]:
        return []  # unseen; or a rank's state, which has its own heads alone
    same = np.zeros(len(places), dtype=bool)
    inside = places < len(stored)
    at_rows = places[inside]
    same[inside] = (stored[at_rows] == should[inside]).all(axis=1) | ~moment.seen[at][at_rows]
    found: list[int] = np.flatnonzero(~same).tolist()
    return found
