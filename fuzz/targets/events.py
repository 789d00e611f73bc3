"""What must have happened for a campaign to mean something: events read off the steps."""

from __future__ import annotations

from collections import Counter

from fuzz.step import Step, World
from fuzz.targets.hot_events import HotEvents
from fuzz.targets.move_events import MoveEvents
from reference.contract import RequestView, Snapshot


class Events:
    """Counts events of one run into `seen`, after each of its steps."""

    def __init__(self, world: World, seen: Counter[str]) -> None:
        self._world, self._seen = world, seen
        self._ring_slots: set[int] = set()
        self._state_slots: set[int] = set()
        self._just_freed: frozenset[int] = frozenset()
        self._moves, self._hot = MoveEvents(world, seen), HotEvents(world, seen)

    def observe(self, step: Step) -> None:
        """Count what `step` shows."""
        self._admission(step)
        self._slots(step)
        self._writes(step)
        self._memory(step)
        self._moves.observe(step)
        self._hot.observe(step)

    def _count(self, **events: bool) -> None:
        for name, happened in events.items():
            if happened:
                self._seen[name] += 1

    def _admission(self, step: Step) -> None:
        client = step.submitted
        if client is None:
            return
        geometry, resumed = self._world.geometry, not step.text.startswith("submit")
        beyond = 0 < step.hit < step.shared
        self._count(
            hit=step.hit > 0 and not resumed,
            resumed_with_hit=step.hit > 0 and resumed,
            hit_then_diverged_inside_group=beyond and step.shared % geometry.kpool != 0,
            hit_then_diverged_inside_physical_page=(
                beyond and step.shared % geometry.physical_page_size != 0
            ),
            hit_then_diverged_inside_logical_page=(
                beyond and step.shared % geometry.logical_page_size != 0
            ),
            hit_after_eviction=step.hit > 0 and step.before.evicted_pages > 0,
        )

    def _slots(self, step: Step) -> None:
        """Of requests that have just got a ring and a state."""
        for request in step.calls & step.after.requests.keys():
            before, view = step.before.requests.get(request), step.after.requests[request]
            if view.slot is not None and (before is None or before.slot is None):
                self._count(
                    ring_slot_reused=view.slot in self._ring_slots,
                    state_slot_reused=view.state_slot in self._state_slots,
                )
                self._ring_slots.add(view.slot)
                self._state_slots.add(view.state_slot)

    def _writes(self, step: Step) -> None:
        kpool = self._world.geometry.kpool
        extends, decodes = step.text.startswith("extend"), step.text.startswith("decode")
        for request, (start, stop) in step.wrote.items():
            client = self._world.clients[request]
            closes = stop // kpool > start // kpool
            self._count(
                chunk_inside_prompt=extends and stop < len(client.tokens),
                group_mixing_ring_and_chunk=extends and closes and start % kpool != 0,
                decode_closed_group=decodes and closes,
            )
        ends = {stop for _, stop in step.wrote.values()}
        self._count(
            batched_extend=extends and len(step.wrote) > 1,
            uneven_decode_batch=decodes and len(ends) > 1,
            out_of_memory=step.refused is not None,
        )

    def _memory(self, step: Step) -> None:
        before, after = step.before, step.after
        taken = before.free_pages - after.free_pages
        self._count(
            evicted=after.evicted_pages > before.evicted_pages,
            page_shared_by_running_requests=any(n > 2 for n in after.ref_counts.values()),
            page_reused=after.reused_pages > before.reused_pages,
            page_reused_at_once=not taken.isdisjoint(self._just_freed),
            duplicate_freed=any(
                _swapped(view, after.requests[request])
                for request, view in before.requests.items()
                if request in after.requests
            ),
            node_split=_split(before, after),
        )
        self._just_freed = after.free_pages - before.free_pages


def _swapped(before: RequestView, after: RequestView) -> bool:
    """Whether a page of a request's table gave way to another."""
    return before.pages != after.pages[: len(before.pages)]


def _split(before: Snapshot, after: Snapshot) -> bool:
    """Whether a cached node has become shorter."""
    tokens = {node.node: len(node.tokens) for node in before.cached}
    return any(len(node.tokens) < tokens.get(node.node, 0) for node in after.cached)
