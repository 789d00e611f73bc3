"""Containment: an operation changes no row but those it was told to write.

All buffers are compared, whole, before and after each operation.  A row that somebody could
read before and can still read after is never to change; a row of nobody may become poison; any
other change must lie at a new position of one of the operation's own requests.
"""

from __future__ import annotations

import numpy as np

from fuzz.oracles.view import PLACES, Mask, Viewer
from fuzz.step import Step, Violation, World
from reference.addressing import index_slots, locs
from reference.contract import Component, Snapshot


class Containment:
    """Judges engines that let their raw buffers be seen, in stamped and model runs alike."""

    name = "containment"

    def __init__(self, world: World, viewer: Viewer) -> None:
        self._world, self._viewer = world, viewer

    def check(self, step: Step) -> list[Violation]:
        """Every changed row had to change, or was nobody's and is poison now."""
        view, kpool = self._viewer.look(step), self._world.geometry.kpool
        found = []
        for (component, layer), changed in view.changed.items():
            if not changed.any():
                continue
            rows = view.rows[component, layer]
            was, is_ = (r.content(component, len(rows), kpool) for r in (view.before, view.after))
            kept = (was == is_) & (was != 0)
            poison = (rows == 0xFF).all(axis=1)
            allowed = ~kept & (self._new(component, step, len(rows)) | poison)
            for at in np.flatnonzero(changed & ~allowed)[:1]:
                owner = "nobody's, so it may only become poison"
                if kept[at]:
                    places, _ = view.after.joined(component)
                    first = int(np.flatnonzero(places == at)[0])
                    reader, i = view.after.owner(component, first)
                    owner = f"{reader.name}'s row {reader.first + i}, so it may not change"
                place = PLACES[component].format(int(at))
                sentence = f"{place} changed in '{step.text}', but it is {owner}."
                found.append(Violation(self.name, component.value, sentence))
        return found

    def close(self) -> list[Violation]:
        return []

    def _new(self, component: Component, step: Step, rows: int) -> Mask:
        """Rows that the step may fill: padding, and what its requests have of new places."""
        new = np.zeros(rows, dtype=bool)
        if component is Component.TAIL:
            ring, running = self._world.geometry.ring_size, step.after.requests
            for slot in (0, *(running[r].slot for r in step.calls & running.keys())):
                new[slot * ring : (slot + 1) * ring] = True
        elif component is Component.STATE:
            new[list(_state_slots(step, step.before) | _state_slots(step, step.after))] = True
        else:
            self._mark_positions(new, component, step)
        return new

    def _mark_positions(self, new: Mask, component: Component, step: Step) -> None:
        geometry, kv = self._world.geometry, component is Component.KV
        new[: geometry.logical_page_size if kv else geometry.index_page_size] = True
        for request, (start, stop) in step.wrote.items():
            account = step.after.requests.get(request)
            pages = account.pages if account else ()
            stop = min(stop, len(pages) * geometry.logical_page_size)
            if start >= stop:
                continue
            if kv:
                places = locs(pages, start, stop, geometry)
            else:
                groups = start // geometry.kpool, stop // geometry.kpool
                places = index_slots(pages, *groups, geometry)
            new[places[places < len(new)]] = True


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
