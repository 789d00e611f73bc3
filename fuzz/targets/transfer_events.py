"""What must have happened for a campaign over transfers to mean something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from fuzz.router import Asked, Router
from fuzz.targets.shared_memory import Hostility
from reference.contract import RequestId
from reference.protocol import (
    Advertise,
    Arrived,
    Moved,
    Observation,
    Peer,
    Phase,
    Posted,
    Reserved,
    Sent,
    Settled,
    Side,
    TransferKey,
)

Where = tuple[Peer, TransferKey]


class TransferEvents:
    """Counts the events of one run.

    Fields:
        seen: what was seen how often.
        flying: the request of each write that was posted and has not settled.
    """

    def __init__(self, router: Router) -> None:
        self.seen: Counter[str] = Counter()
        self._router, self._wiring = router, router.wiring
        self.flying: dict[tuple[Where, Peer, int], RequestId] = {}
        self._came: dict[Where, tuple[int, int]] = {}
        self._memory: dict[Where, tuple[frozenset[int], int]] = {}
        self._pages: dict[Peer, set[int]] = {}
        self._drained: dict[Peer, set[int]] = {}
        self._slots: dict[Peer, set[int]] = {}
        self._phases: dict[Where, Phase] = {}
        self._waited: Counter[RequestId] = Counter()
        self._offered: set[RequestId] = set()

    def count(self, **events: bool) -> None:
        """Count those that happened."""
        for name, happened in events.items():
            if happened:
                self.seen[name] += 1

    def submitted(self, asked: Asked) -> None:
        rooms = [other.room for other in self._router.asked.values() if other is not asked]
        self.count(room_reused=asked.room in rooms)

    def aborted(self, asked: Asked) -> None:
        flying = asked.request in self.flying.values()
        self.count(
            aborted_with_write_in_flight=flying,
            aborted_with_copy_waiting=flying and bool(self._router.copies()),
        )

    def decoded(self, batch: Sequence[Asked]) -> None:
        beside = set(self.flying.values()) - {asked.request for asked in batch}
        self.count(decoded_beside_landing=bool(batch and beside))

    def met(self, hostility: Hostility) -> None:
        self.count(
            intruded=hostility is Hostility.INTRUDER, misrouted=hostility is Hostility.MISROUTED
        )

    def copied(self, me: Peer, to: Peer, *, failed: bool) -> None:
        lives = self._router.lives
        waits = self._router.sharing.devices[me].waits
        self.count(
            copy_failed=failed,
            copy_of_former_life=me.incarnation < lives[Side.PREFILL].incarnation,
            copy_to_former_life=to.incarnation < lives[Side.DECODE].incarnation,
            copy_waited_for_event=waits > 0,
        )

    def went_live(self, asked: Asked) -> None:
        here, there = (self._wiring.geometries[side] for side in Side)
        prompt, ranks = asked.tokens[: asked.length], self._wiring.ranks
        tail = range(asked.length // here.kpool * here.kpool, asked.length)
        wraps = [
            any(position % end.ring_size == 0 for position in tail[1:]) for end in (here, there)
        ]
        shared = self._router.setup.shared
        self.count(
            live=True,
            shared_live=shared is not None and shared.is_shared,
            fell_back_live=shared is not None and not shared.is_shared,
            checkpoint_live=asked.length % here.mamba_track_interval == 0,
            fan_in_live=ranks[Side.PREFILL] > ranks[Side.DECODE],
            fan_out_live=ranks[Side.PREFILL] < ranks[Side.DECODE],
            two_ranks_live=ranks[Side.PREFILL] == ranks[Side.DECODE] == 2,
            hisparse_live=self._wiring.options[Side.DECODE].hisparse is not None,
            prefix_hit_sent=asked.hit > 0,
            tail_wraps_at_one_end=wraps[0] != wraps[1],
            twin_live=any(
                other is not asked and other.tokens[: other.length] == prompt
                for other in self._router.asked.values()
            ),
        )

    def observe(self, seen: Sequence[Observation], *, ticked: bool) -> None:
        """Count what was noted; if D has `ticked`, what has no memory now waits for it."""
        for each in seen:
            match each:
                case Posted(at, key, to, piece, source):
                    asked = self._router.asked[RequestId(source)]
                    self.flying[(to, key), at, piece] = asked.request
                    self.count(chunk_sent_before_prompt_complete=asked.stored < asked.length)
                case Settled(at, key, to, piece):
                    self.flying.pop(((to, key), at, piece), None)
                case Arrived(at, key, _, piece, part):
                    before = self._came.get((at, key), (-1, -1))
                    self.count(landed_out_of_order=(piece, part) < before)
                    self._came[at, key] = max(before, (piece, part))
                case Sent(at, _, Advertise(key, request=request, places=places)):
                    self._offer(at, key, RequestId(request), places[3][0])
                case Reserved(at, key, pages):
                    self._reserve(at, key, frozenset(pages))
                case Moved(at, key, phase):
                    self._move(at, key, phase)

        if ticked:
            self._waited.update(self._router.asked.keys() - self._offered)

    def _offer(self, at: Peer, key: TransferKey, request: RequestId, slot: int) -> None:
        if (at, key) not in self._memory or self._memory[at, key][1] >= 0:
            return
        self.count(
            aux_row_reused=slot in self._slots.get(at, ()),
            waited_for_memory=self._waited[request] > 0,
        )
        self._offered.add(request)
        self._memory[at, key] = self._memory[at, key][0], slot

    def _reserve(self, at: Peer, key: TransferKey, pages: frozenset[int]) -> None:
        self._memory[at, key] = pages, -1
        drained = self._drained.setdefault(at, set())
        self.count(
            page_reused=bool(pages & self._pages.setdefault(at, set())),
            page_reused_after_drain=bool(pages & drained),
        )
        drained -= pages

    def _move(self, at: Peer, key: TransferKey, phase: Phase) -> None:
        before, self._phases[at, key] = self._phases.get((at, key)), phase
        if phase is Phase.FREE and (at, key) in self._memory:
            pages, slot = self._memory[at, key]
            self._pages[at] |= pages
            self._slots.setdefault(at, set()).add(slot)
            if before is Phase.RELEASABLE:
                self._drained[at] |= pages
