"""What must have happened in a campaign with HiSparse: events read off the steps."""

from __future__ import annotations

from collections import Counter
from typing import get_args

from fuzz.step import Step, World
from fuzz.targets.setup import CapacityRatio
from reference.addressing import tail_start
from reference.contract import HotSnapshot, StepOutput

MANY_MISSES = 0.3
"""Of the columns of a selection: so many that results hang on the rows swapped in."""


class HotEvents:
    """Counts events of one run into `seen`, after each of its steps."""

    def __init__(self, world: World, seen: Counter[str]) -> None:
        self._world, self._seen = world, seen
        self._size = world.geometry.device_buffer_size or 0
        # Device and host pages that were given back at some time.
        self._device_freed: set[int] = set()
        self._host_freed: set[int] = set()
        self._ratio = ""

    def observe(self, step: Step) -> None:
        """Count what `step` shows."""
        before, after = step.before.hot, step.after.hot
        if before is None or after is None:
            return
        self._ratio = _capacity_ratio(after)
        for (context, output), cells in zip(step.outputs, step.selections, strict=False):
            self._count(crossed_buffer_size=len(context) == self._size + 1)
            if len(context) > self._size:
                for layer, row in enumerate(cells.tolist()):
                    self._looked_up(len(context), row, output, layer)
        self._memory(step, before, after)

    def _looked_up(self, length: int, row: list[int], output: StepOutput, layer: int) -> None:
        """What a layer selected for the newest of `length` positions, all of which a hot buffer
        cannot hold."""
        world, hisparse = self._world, self._world.options.hisparse
        assert hisparse is not None
        assert output.misses is not None, "the residency oracle has looked at them"
        newest, misses = length - 1, int(output.misses[layer, 0])
        valid = [cell for cell in row if 0 <= cell <= newest]
        wanted = set(valid) - {newest}
        least = world.geometry.topk + max(0, world.geometry.kpool - 2)
        self._count(
            swapped_in=misses > 0,
            hit_in_buffer=misses < len(wanted),
            all_selected_missed=0 < len(wanted) == misses,
            most_columns_missed=misses > MANY_MISSES * len(valid),
            duplicate_selected=len(set(valid)) < len(valid),
            void_selected=-1 in row,
            out_of_range_selected=any(cell < -1 or cell > newest for cell in row),
            newest_selected=newest in valid,
            tail_selected=any(cell >= tail_start(length, world.geometry) for cell in wanted),
            at_lower_bound=misses > 0 and self._size == least,
            **{f"{hisparse.copies}_copies": misses > 0, self._ratio: misses > 0},
        )

    def _memory(self, step: Step, before: HotSnapshot, after: HotSnapshot) -> None:
        left = step.before.requests.keys() - step.after.requests.keys()
        refused = step.refused is not None
        new_device = before.free_device - after.free_device
        new_host = before.free_host - after.free_host
        submits = refused and not step.calls & step.before.requests.keys()
        self._count(
            refused_for_device=submits and len(before.free_device) < self._world.hot_pages,
            refused_for_host=refused and not after.free_host and bool(step.after.free_pages),
            hot_pages_reused=not new_device.isdisjoint(self._device_freed),
            host_page_reused=not new_host.isdisjoint(self._host_freed),
            released_past_buffer_size=any(
                step.before.requests[request].length > self._size for request in left
            ),
            ids_differ=any(
                all(after.backing.get(page) not in (page, *hot.pages) for page in view.pages)
                for request, hot in after.buffers.items()
                if (view := step.after.requests[request]).pages
            ),
        )
        self._device_freed |= after.free_device - before.free_device
        self._host_freed |= after.free_host - before.free_host

    def _count(self, **events: bool) -> None:
        self._seen.update(name for name, happened in events.items() if happened)


def _capacity_ratio(hot: HotSnapshot) -> str:
    """The event of a run at the nearest ratio of host to device tokens that a setup draws."""
    ratio = hot.occupancy.host_total / hot.occupancy.device_total
    nearest = min(get_args(CapacityRatio), key=lambda drawn: max(ratio / drawn, drawn / ratio))
    return f"capacity_ratio_{nearest}"
