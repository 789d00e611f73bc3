"""Containment: an operation changes no row but those it was told to write.

All buffers are compared, whole, before and after each operation.  A row that somebody could
read before and can still read after is never to change; a row of nobody may become poison; any
other change must lie at a new position of one of the operation's own requests.  Under HiSparse
new are the host rows of what was saved, and the slots of the requests' hot buffers.  With poison
all rows of what is free are poison from the start, and from the step that frees it on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

import numpy as np
import numpy.typing as npt

from fuzz.oracles.readers import Ints, Readable, row_pages
from fuzz.oracles.standings import restoration
from fuzz.oracles.view import PLACES, Layer, View, Viewer
from fuzz.step import Step, Violation, World
from reference.contract import Component, HotBufferView, RequestId, Snapshot

Mask = npt.NDArray[np.bool_]
POISON = 0xFF


class Containment:
    """Judges engines that let their raw buffers be seen, in stamped and model runs alike."""

    name = "containment"

    def __init__(self, world: World, viewer: Viewer) -> None:
        self._world, self._viewer = world, viewer
        # What was free before the step, and so is known to be poison.
        self._free: dict[Component, Set[int]] = {}

    def check(self, step: Step) -> list[Violation]:
        """Every changed row had to change, or was nobody's and is poison now; so is every row of
        what has become free."""
        view = self._viewer.look(step)
        found = [
            violation
            for at, differs in view.differs.items()
            if differs.size
            for violation in self._judge(step, view, at, differs)
        ]
        return found + self._left(step) if self._world.options.poison else found

    def close(self) -> list[Violation]:
        """Reading has changed nothing: what the other oracles were given, and have written over,
        was a copy."""
        return [
            Violation(
                self.name,
                component.value,
                f"{PLACES[component].format(rows[0])} changed when what the engine had returned "
                "was written over; what a read returns should be the caller's own.",
            )
            for (component, _), image in self._viewer.images.items()
            if (rows := image.settle()).size
        ]

    def _left(self, step: Step) -> list[Violation]:
        """The first row of each buffer that is free now, was not before, and is not poison."""
        found = []
        for component, (units, each) in self._free_units(step.after).items():
            fresh = units - self._free.get(component, set())
            self._free[component] = units
            if not fresh:
                continue
            first = np.array(sorted(fresh), dtype=np.int64)
            rows = (first[:, None] * each + np.arange(each)).reshape(-1)
            for image in self._viewer.images_of[component].values():
                left = rows[rows < len(image)]
                left = left[np.logical_or.reduce(image[left] != POISON, axis=1)]
                if left.size:
                    place = PLACES[component].format(left[0])
                    said = f"{place} is free after '{step.text}': it should be poison, and is not."
                    parts = place, "poison", "what it held before"
                    found.append(Violation(self.name, component.value, said, *parts))
        return found

    def _free_units(self, snapshot: Snapshot) -> dict[Component, tuple[Set[int], int]]:
        """Pages, state slots and rings that nobody owns, and how many rows each has."""
        geometry, requests = self._world.geometry, snapshot.requests.values()
        rings = set(range(1, self._world.options.max_requests + 1))
        free: dict[Component, tuple[Set[int], int]] = {
            Component.KV: (snapshot.free_pages, geometry.logical_page_size),
            Component.INDEX: (snapshot.free_pages, geometry.index_page_size),
            Component.STATE: (snapshot.free_states, 1),
            Component.TAIL: (rings - {view.slot for view in requests}, geometry.ring_size),
        }
        if hot := snapshot.hot:
            free[Component.KV] = hot.free_host, geometry.logical_page_size
            free[Component.HOT] = hot.free_device, geometry.physical_page_size
        return free

    def _judge(self, step: Step, view: View, at: Layer, differs: Ints) -> Iterator[Violation]:
        """The first of a layer's changed rows that had no right to change."""
        component, image = at[0], self._viewer.images[at]
        kept = self._kept(step, view, component)[differs]
        doubtful = (kept | ~self._new(component, step, len(image))[differs]).nonzero()[0]
        if not doubtful.size:
            return
        poison = (image.actual(differs[doubtful]) == POISON).all(axis=1)
        for i in doubtful[kept[doubtful] | ~poison][:1]:
            row, owner, right = int(differs[i]), "nobody's", "it may only become poison"
            if kept[i]:
                owner, right = _unit(step, view.after, component, row), "it may not change"
            place = PLACES[component].format(row)
            sentence = f"{place} changed in '{step.text}', but it is {owner}, so {right}."
            actual = f"changed in '{step.text}'"
            yield Violation(self.name, component.value, sentence, place, owner, actual)

    def _kept(self, step: Step, view: View, component: Component) -> Mask:
        """Rows that somebody could read before and can still read after."""
        space = self._viewer.space
        if component is Component.HOT:
            kept = np.zeros(space.sizes[component], dtype=bool)
            kept[[row for row in _others_slots(step) if row < len(kept)]] = True
            return kept
        was, is_ = (space.of(r.content, component) for r in (view.before, view.after))
        same: Mask = (was == is_) & (was != 0)
        return same

    def _new(self, component: Component, step: Step, rows: int) -> Mask:
        """Rows that the step may fill: padding, and what its requests have of new places."""
        new = np.zeros(rows, dtype=bool)
        geometry, running = self._world.geometry, step.after.requests
        if component is Component.TAIL:
            ring = geometry.ring_size
            slots = (running[r].slot for r in step.calls & running.keys())
            for slot in (0, *(slot for slot in slots if slot is not None)):
                new[slot * ring : (slot + 1) * ring] = True
        elif component is Component.STATE:
            slots = _state_slots(step, step.before) | _state_slots(step, step.after)
            new[[slot for slot in slots if slot < rows]] = True
        elif component is Component.HOT:
            new[: geometry.physical_page_size] = True
            for request in step.calls & running.keys():
                new[[row for row in _slots(step.after, request) if row < rows]] = True
        else:
            self._mark_positions(new, component, step)
        return new

    def _mark_positions(self, new: Mask, component: Component, step: Step) -> None:
        geometry, kv = self._world.geometry, component is Component.KV
        kpool = 1 if kv else geometry.kpool
        new[: geometry.logical_page_size if kv else geometry.index_page_size] = True
        if came := restoration(step, geometry.logical_page_size):
            pages = row_pages(came.brought, step.after) if kv else came.brought
            rows, slots = self._viewer.finder.places(pages)
            places = rows if kv else slots
            new[places[places < len(new)]] = True
        if kv and step.after.hot:
            places = np.array([row for r in step.calls for row in _just_saved(step, r)], dtype=int)
            new[places[places < len(new)]] = True
            return
        for request, (start, stop) in step.wrote.items():
            account = step.after.requests.get(request)
            rows, slots = self._viewer.finder.places(account.pages if account else ())
            places = (rows if kv else slots)[start // kpool : stop // kpool]
            new[places[places < len(new)]] = True


def _just_saved(step: Step, request: RequestId) -> Sequence[int]:
    """Host rows of the positions of a request that went to the host in the step: those written,
    but for a newest one, and the one that was the newest; all, of a request that left."""
    was, is_ = _buffer(step.before, request), _buffer(step.after, request)
    if was is None:
        return ()
    stop = is_.saved if is_ else step.before.requests[request].length
    return (is_ or was).host_rows[was.saved : stop]


def _others_slots(step: Step) -> dict[int, str]:
    """Whose the device rows are in the hot buffers of requests that the step was not about."""
    return {
        row: f"request {request}'s slot {slot}"
        for request in step.after.requests.keys() - step.calls
        for slot, row in enumerate(_slots(step.after, request))
    }


def _slots(snapshot: Snapshot, request: RequestId) -> Sequence[int]:
    """The device rows of a request's hot buffer."""
    buffer = _buffer(snapshot, request)
    return buffer.rows if buffer else ()


def _buffer(snapshot: Snapshot, request: RequestId) -> HotBufferView | None:
    return snapshot.hot.buffers.get(request) if snapshot.hot else None


def _unit(step: Step, readable: Readable, component: Component, row: int) -> str:
    """Whose row it is, and which of the owner's."""
    if component is Component.HOT:
        return _others_slots(step)[row]
    readers = [owner.readers.get(component) for owner in readable.owners.values()]
    reader = next(reader for reader in readers if reader and row in reader.rows)
    return f"{reader.name}'s row {reader.units[int(np.flatnonzero(reader.rows == row)[0])]}"


def _state_slots(step: Step, snapshot: Snapshot) -> set[int]:
    """Padding, the states of the step's requests, and all checkpoints: those that nobody could
    read before are the step's to fill."""
    slots = {0}
    for request in step.calls & snapshot.requests.keys():
        account = snapshot.requests[request]
        slots |= set(account.state_slots)
    for node in snapshot.cached:
        slots |= set(node.checkpoints.values())
    return slots
