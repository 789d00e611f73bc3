"""What SGLang's scheduler makes sure of before a step: that its memory is there.

Behind that check SGLang asserts what it did not find.  Room counts as SGLang counts it: what is
free, and what its tree could evict.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from reference.contract import OutOfMemory
from reference.geometry import Geometry
from systems.sglang.accounts import Running
from systems.sglang.pools import Pools


class Budget:
    """Refuses what the pools of one engine have no room for."""

    def __init__(self, geometry: Geometry, pools: Pools) -> None:
        self._geometry, self._pools = geometry, pools

    def require_request(self, running: Collection[Running]) -> None:
        """Raises OutOfMemory unless one more request may run."""
        if len(running) >= self._pools.requests.size:
            raise OutOfMemory(
                f"all {len(running)} request slots are taken: finish, abort or retract a request."
            )
        # a hit copies its state at once
        self._require_states(1)

    def require_prefill(self, running: Sequence[Running], stops: Sequence[int]) -> None:
        """Raises OutOfMemory unless each request can grow to its stop.  A first chunk takes a
        state slot, another for the state that is tracked, and caching that one a third."""
        self._require_pages(
            [(each.allocated, stop) for each, stop in zip(running, stops, strict=True)]
        )
        tracking = self._pools.requests.mamba_ping_pong_track_buffer_size
        states = 0
        for each in running:
            kv = each.req.kv
            states += not kv.holds_mamba
            states += tracking * (kv.mamba_ping_pong_track_buffer is None)
        self._require_states(states + len(running))

    def require_decode(self, running: Sequence[Running]) -> None:
        """Raises OutOfMemory unless each request can store one position more."""
        self._require_pages([(each.allocated, each.length + 1) for each in running])

    def require_verify(self, running: Sequence[Running]) -> None:
        """Raises OutOfMemory unless each request can store its drafts, for which SGLang reserves
        twice the room."""
        ahead = 2 * self._geometry.max_drafts
        self._require_pages([(each.allocated, each.length + ahead) for each in running])

    def _require_pages(self, spans: Sequence[tuple[int, int]]) -> None:
        size = self._geometry.logical_page_size
        needed = sum(-(-stop // size) - -(-start // size) for start, stop in spans)
        there = self._pools.pages.available_size() + self._pools.tree.full_evictable_size()
        if needed * size > there:
            raise OutOfMemory(
                f"{needed} pages are needed and {there // size} free or evictable: finish, abort "
                "or retract a request."
            )

    def _require_states(self, needed: int) -> None:
        there = self._pools.states.available_size() + self._pools.tree.mamba_evictable_size()
        if needed > there:
            raise OutOfMemory(
                f"{needed} state slots are needed and {there} free or evictable: finish, abort or "
                "retract a request."
            )
