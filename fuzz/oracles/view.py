"""What the oracles look at around each step: who may read which row, and all the bytes.

Of each raw buffer there is an image: what it should hold.  A row that becomes readable in a
stamped run is put into the image as its owner's tokens want it; any other is there as it was
after the step before.  So what differs from the image is wrong, or was the step's to change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fuzz.oracles.readers import Finder, Ints, Owner, Readable, Space
from fuzz.stamps import Bytes
from fuzz.step import Step, World
from reference.contract import Capability, Component, components

Layer = tuple[Component, int]

PLACES = {
    Component.KV: "KV row {}",
    Component.INDEX: "index slot {}",
    Component.TAIL: "tail ring row {}",
    Component.STATE: "state slot {}",
    Component.HOT: "hot row {}",
}


class Image:
    """What the rows of a layer's raw buffer should be."""

    def __init__(self, *parts: Bytes) -> None:
        """`parts`: views of the engine's memory that make the rows: one of [rows, bytes], or
        several of [pages, rows of a page, bytes] that belong side by side."""
        self._parts = parts
        self._page_rows = None if parts[0].ndim == 2 else parts[0].shape[1]
        self._rows = math.prod(parts[0].shape[:-1])
        self._bytes = np.concatenate([part.reshape(self._rows, -1) for part in parts], axis=1)
        # Compared in words, which are fewer than bytes.
        widths = [part.shape[-1] for part in parts]
        word = f"u{math.gcd(8, *widths)}"
        self._words, stop = [], 0
        for part in parts:
            start, stop = stop, stop + part.shape[-1]
            image = self._bytes[:, start:stop].view(word).reshape(*part.shape[:-1], -1)
            self._words.append((part.view(word), image))

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, rows: Ints) -> Bytes:
        """[n, row bytes]: what the given rows should be."""
        return self._bytes[rows]

    def __setitem__(self, rows: Ints, should: Bytes) -> None:
        self._bytes[rows] = should

    def actual(self, rows: Ints) -> Bytes:
        """[n, row bytes]: what the given rows are, copied."""
        if self._page_rows is None:
            return self._parts[0][rows]
        at = rows // self._page_rows, rows % self._page_rows
        return np.concatenate([part[at] for part in self._parts], axis=1)

    def settle(self) -> Ints:
        """The rows that are not as they should be, ascending; from now on they should."""
        differs = np.zeros(self._rows, dtype=bool)
        for now, then in self._words:
            rows = (now != then).reshape(self._rows, -1).nonzero()[0]
            if rows.size:
                differs[rows] = True
                then[...] = now
        return differs.nonzero()[0]


@dataclass(frozen=True, slots=True)
class View:
    """Around one step: who may read what, and which rows of each raw buffer are not what they
    should be after it."""

    before: Readable
    after: Readable
    differs: Mapping[Layer, Ints]


class Viewer:
    """Makes each step's view once, for all oracles.  Without Capability.RAW it has no images."""

    def __init__(self, world: World) -> None:
        self._world = world
        stored = components(world.options)
        self.layers = [(c, i) for c in stored for i in range(layers_of(world, c))]
        raw = Capability.RAW in world.engine.capabilities
        self.images = {at: self._image(*at) for at in (self.layers if raw else ())}
        self.images_of: dict[Component, dict[int, Image]] = {c: {} for c in stored}
        for (component, layer), image in self.images.items():
            self.images_of[component][layer] = image
        self.space = Space({component: len(image) for (component, _), image in self.images.items()})
        self.finder = Finder(world, self.space)
        self._step: Step | None = None
        nobody = Readable(content=np.zeros(self.space.total, dtype=np.uint64))
        self._view = View(nobody, nobody, {})

    def look(self, step: Step) -> View:
        """The view of `step`, which has just been done."""
        if self._step is not step:
            self._step, before = step, self._view.after
            after = self.finder.find(step.after, before)
            if self._world.stamped and self.images:
                for owner in after.fresh:
                    self._expect(owner, before)
            differs = {at: image.settle() for at, image in self.images.items()}
            self._view = View(before, after, differs)
        return self._view

    def _expect(self, owner: Owner, before: Readable) -> None:
        """Put the rows that an owner can read, and nobody with the same tokens could read
        before, into the images."""
        news = before.content[owner.rows] != owner.ends
        if not np.count_nonzero(news):
            return
        stop = 0
        for reader in owner.readers.values():
            start, stop = stop, stop + len(reader.rows)
            new = news[start:stop].nonzero()[0]
            if not new.size:
                continue
            rows, stamps = reader.rows[new], reader.stamps[new].reshape(-1)
            for layer, image in self.images_of[reader.component].items():
                image[rows] = self._world.stamper.expected(reader.component, stamps, layer)

    def _image(self, component: Component, layer: int) -> Image:
        """Of a layer's locs, index slots (key and scale side by side), ring rows or state slots."""
        raw: Bytes = self._world.engine.raw(component, layer).numpy()
        if component is Component.INDEX:
            size = self._world.geometry.index_page_size
            keys = size * self._world.shape.index_dim
            halves = raw[:, :keys], raw[:, keys:]
            return Image(*(half.reshape(len(raw), size, -1) for half in halves))
        return Image(raw.reshape(-1, raw.shape[-1]))


def layers_of(world: World, component: Component) -> int:
    """How many layers store a component."""
    states = component is Component.STATE
    return len(world.shape.kda_layers if states else world.shape.dsa_layers)
