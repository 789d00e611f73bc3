"""What must have happened in a campaign over the host tier: events read off the steps."""

from __future__ import annotations

from collections import Counter

from fuzz.oracles.standings import Restoration, in_tier, restoration
from fuzz.step import Step, World
from reference.restore import Step as TierStep


class MoveEvents:
    """Counts events of one run into `seen`, after each of its steps."""

    def __init__(self, world: World, seen: Counter[str]) -> None:
        self._size = world.geometry.logical_page_size
        self._seen = seen
        # Cached pages whose rows came from the tier.
        self._restored: set[int] = set()

    def observe(self, step: Step) -> None:
        """Count what `step` shows."""
        if step.after.tier is None:
            return
        if step.tier is not None and step.tier.step is TierStep.BACK_UP:
            self._back_up(step)
        came = restoration(step, self._size)
        if came is not None:
            self._restore(step, came)
        if step.submitted is not None:
            pages = step.after.requests[step.submitted.request].pages[: step.hit // self._size]
            self._count(hit_after_restore=not self._restored.isdisjoint(pages))
        held = [page for prefix in step.after.tier.prefixes for page in prefix.pages]
        self._count(shared_pages_in_tier=len(held) > len(set(held)))
        self._restored &= {page for node in step.after.cached for page in node.pages}

    def _back_up(self, step: Step) -> None:
        call, held = step.tier, in_tier(step.before)
        assert call is not None
        copied = len(set(in_tier(step.after)) - set(held))
        self._count(
            backed_up=copied > 0,
            backed_up_again=bool(call.returned) and not copied,
            failed_back_up=call.raised,
            tier_evicted=len(in_tier(step.after)) < len(held) + copied,
        )

    def _restore(self, step: Step, came: Restoration) -> None:
        call, views = step.tier, step.before.requests.values()
        assert call is not None
        read = {page for view in views for page in view.pages[: view.shared]}
        part = came.held != () and came.brought != ()
        self._count(
            restored=bool(call.returned) and came.pages + came.states > 0,
            restored_after_eviction=came.brought != (),
            restored_part=part,
            restored_while_shared=part and not read.isdisjoint(came.held),
            restored_state_alone=bool(call.returned) and came.pages < came.states,
            failed_restore=call.raised,
            restore_evicted=step.after.evicted_pages > step.before.evicted_pages,
            restore_refused=step.refused is not None,
        )
        self._restored |= set(came.brought)

    def _count(self, **events: bool) -> None:
        self._seen.update(name for name, happened in events.items() if happened)
