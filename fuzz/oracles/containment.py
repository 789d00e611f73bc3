"""Containment: an operation changes no row but those it was told to write.

All buffers are compared, whole, before and after each operation.  A row that somebody could
read before and can still read after is never to change; a row of nobody may become poison; any
other change must lie at a new position of one of the operation's own requests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fuzz.oracles.view import PLACES, Viewer
from fuzz.step import Step, Violation, World
from reference.contract import Component, Snapshot

Mask = npt.NDArray[np.bool_]


class Containment:
    """Judges engines that let their raw buffers be seen, in stamped and model runs alike."""

    name = "containment"

    def __init__(self, world: World, viewer: Viewer) -> None:
        self._world, self._viewer = world, viewer

    def check(self, step: Step) -> list[Violation]:
        """Every changed row had to change, or was nobody's and is poison now."""
        view = self._viewer.look(step)
        found = []
        for (component, layer), changed in view.changed.items():
            if not changed.size:
                continue
            buffer = self._viewer.buffers[component, layer]
            was, is_ = (r.content[component][changed] for r in (view.before, view.after))
            kept = (was == is_) & (was != 0)
            new = self._new(component, step, len(buffer))[changed]
            doubtful = (kept | ~new).nonzero()[0]
            if not doubtful.size:
                continue
            poison = (buffer[changed[doubtful]] == 0xFF).all(axis=1)
            for i in doubtful[kept[doubtful] | ~poison][:1]:
                at, owner = int(changed[i]), "nobody's, so it may only become poison"
                if kept[i]:
                    reader = next(r for r in view.after.readers[component] if at in r.rows)
                    unit = reader.units[int(np.flatnonzero(reader.rows == at)[0])]
                    owner = f"{reader.name}'s row {unit}, so it may not change"
                place = PLACES[component].format(at)
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
            slots = _state_slots(step, step.before) | _state_slots(step, step.after)
            new[[slot for slot in slots if slot < rows]] = True
        else:
            self._mark_positions(new, component, step)
        return new

    def _mark_positions(self, new: Mask, component: Component, step: Step) -> None:
        geometry, kv = self._world.geometry, component is Component.KV
        kpool = 1 if kv else geometry.kpool
        new[: geometry.logical_page_size if kv else geometry.index_page_size] = True
        for request, (start, stop) in step.wrote.items():
            account = step.after.requests.get(request)
            rows, slots = self._viewer.places(account.pages if account else ())
            places = (rows if kv else slots)[start // kpool : stop // kpool]
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
