"""One engine's memory at one moment: its own account, and the rows that lie there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fuzz.oracles.view import Layer
from fuzz.report.reading import as_read
from fuzz.stamps import Bytes
from fuzz.step import World
from reference.contract import Capability, Component, Engine, Snapshot, components

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Moment:
    """All that an engine says of its memory and all that lies there, copied.

    Fields:
        rows: of each layer [rows, row bytes]; seen: which of them are known, [rows] each.
    """

    snapshot: Snapshot
    rows: Mapping[Layer, Bytes]
    seen: Mapping[Layer, Mask]

    @classmethod
    def of(cls, engine: Engine, world: World) -> Moment:
        """As it is at present.  Of an engine without raw buffers only those rows are known that
        somebody reads."""
        snapshot = engine.inspect()
        rows: dict[Layer, Bytes] = {}
        seen: dict[Layer, Mask] = {}
        if Capability.RAW in engine.capabilities:
            for component in components(world.options):
                for layer in range(len(layers_of(world, component))):
                    raw = engine.raw(component, layer).numpy()
                    at = component, layer
                    rows[at] = _by_rows(raw, component, world)
                    seen[at] = np.ones(len(rows[at]), dtype=bool)
            return cls(snapshot, rows, seen)
        sizes = _sizes(world, snapshot)
        for read in as_read(engine, world, snapshot):
            at, places = (read.reader.component, read.layer), read.places
            if at not in rows:
                rows[at] = np.zeros((sizes[at[0]], read.rows.shape[1]), dtype=np.uint8)
                seen[at] = np.zeros(sizes[at[0]], dtype=bool)
            inside = places < sizes[at[0]]
            rows[at][places[inside]], seen[at][places[inside]] = read.rows[inside], True
        return cls(snapshot, rows, seen)


def layers_of(world: World, component: Component) -> Sequence[int]:
    """The model's numbers of the layers that store a component."""
    return world.shape.kda_layers if component is Component.STATE else world.shape.dsa_layers


def pages_of(snapshot: Snapshot) -> int:
    """Logical pages, padding included: an engine may have its own idea of a page."""
    return 1 + max((*snapshot.free_pages, *snapshot.ref_counts), default=0)


def _sizes(world: World, snapshot: Snapshot) -> dict[Component, int]:
    """Rows of each component's buffers."""
    geometry, options, pages = world.geometry, world.options, pages_of(snapshot)
    return {
        Component.KV: pages * geometry.logical_page_size,
        Component.INDEX: pages * geometry.index_page_size,
        Component.TAIL: (options.max_requests + 1) * geometry.ring_size,
        Component.STATE: options.state_slots,
    }


def _by_rows(raw: Bytes, component: Component, world: World) -> Bytes:
    """[rows, row bytes] of a raw buffer; a key and its scale side by side."""
    if component is not Component.INDEX:
        return raw.reshape(-1, raw.shape[-1]).copy()
    size = world.geometry.index_page_size
    keys = size * world.shape.index_dim
    halves = raw[:, :keys], raw[:, keys:]
    return np.concatenate([half.reshape(len(raw) * size, -1) for half in halves], axis=1)
