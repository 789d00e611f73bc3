"""Rows as the running requests read them, through the engine's own page tables and gathers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fuzz.oracles.readers import Finder, Ints, Readable, Reader, Space
from fuzz.oracles.view import layers_of
from fuzz.stamps import Bytes
from fuzz.step import EngineCrash, World
from reference.contract import Component, ContractError, Engine, RequestId, Snapshot


class Read(NamedTuple):
    """Rows that a request reads: those of `reader` with the numbers `which`, [n, row bytes]."""

    request: RequestId
    reader: Reader
    layer: int
    which: range
    rows: Bytes

    @property
    def places(self) -> Ints:
        """Where they lie by the reference's addressing."""
        return self.reader.rows[self.which.start : self.which.stop]


def as_read(engine: Engine, world: World, snapshot: Snapshot) -> Iterator[Read]:
    """All rows that the running requests read; a read that the engine refuses is left out."""
    owners = Finder(world, Space({})).find(snapshot, Readable()).owners
    for request in snapshot.requests:
        owner = owners.get(world.clients[request].name)
        for component, reader in owner.readers.items() if owner else ():
            which, first = range(len(reader.rows)), reader.units[0]
            if component is Component.STATE:
                length = snapshot.requests[request].length
                if length not in reader.units:
                    continue
                at = reader.units.index(length)  # the others are checkpoints
                which, first = range(at, at + 1), 0
            for layer in range(layers_of(world, component)):
                try:
                    read = engine.read(request, component, layer, first, first + len(which))
                except (EngineCrash, ContractError):
                    continue
                yield Read(request, reader, layer, which, read.numpy().copy())
