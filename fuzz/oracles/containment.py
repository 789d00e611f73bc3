"""Containment: an operation changes no row but those it was told to write.

All buffers are compared, whole, before and after each operation.  A row that somebody could
read before and can still read after is never to change; a row of nobody may become poison; any
other change must lie at a new position of one of the operation's own requests.  Under HiSparse
new are the host rows of what was saved, and the slots of the requests' hot buffers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from fuzz.oracles.readers import Ints, Readable
from fuzz.oracles.standings import restoration
from fuzz.oracles.view import PLACES, Layer, View, Viewer
from fuzz.step import Step, Violation, World
from reference.contract import Component, HotBufferView, RequestId, Snapshot

Mask = npt.NDArray[np.bool_]


class Containment:
    """Judges engines that let their raw buffers be seen, in stamped and model runs alike."""

    name = "containment"

    def __init__(self, world: World, viewer: Viewer) -> None:
        self._world, self._viewer = world, viewer

    def check(self, step: Step) -> list[Violation]:
        """Every changed row had to change, or was nobody's and is poison now."""
        view = self._viewer.look(step)
        return [
            violation
            for at, differs in view.differs.items()
            if differs.size
            for violation in self._judge(step, view, at, differs)
        ]

    def close(self) -> list[Violation]:
        return []

    def _judge(self, step: Step, view: View, at: Layer, differs: Ints) -> Iterator[Violation]:
        """The first of a layer's changed rows that had no right to change."""
        component, image = at[0], self._viewer.images[at]
        kept = self._kept(step, view, component)[differs]
        doubtful = (kept | ~self._new(component, step, len(image))[differs]).nonzero()[0]
        if not doubtful.size:
            return
        poison = (image.actual(differs[doubtful]) == 0xFF).all(axis=1)
        for i in doubtful[kept[doubtful] | ~poison][:1]:
            row, owner = int(differs[i]), "nobody's, so it may only become poison"
            if kept[i]:
                owner = f"{_unit(step, view.after, component, row)}, so it may not change"
            place = PLACES[component].format(row)
            sentence = f"{place} changed in '{step.text}', but it is {owner}."
            yield Violation(self.name, component.value, sentence)

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
            for slot in (0, *(running[r].slot for r in step.calls & running.keys())):
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
            rows, slots = self._viewer.finder.places(_rows_in(step, component, came.brought))
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


def _rows_in(step: Step, component: Component, pages: tuple[int, ...]) -> tuple[int, ...]:
    """The pages of a component's buffer in which these logical pages have their rows."""
    if component is Component.KV and step.after.hot:
        return tuple(step.after.hot.backing.get(page, 0) for page in pages)
    return pages


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
        slots |= {account.state_slot, *account.checkpoints.values()}
    for node in snapshot.cached:
        slots |= set(node.checkpoints.values())
    return slots
