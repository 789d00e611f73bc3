"""What must have happened for a campaign over ranks to mean something: read off observations."""

from __future__ import annotations

from collections import Counter

from fuzz.explore.parts import Parts, State
from fuzz.explore.words import Event, Kind
from reference.protocol import (
    Ack,
    Arrived,
    Delivered,
    Moved,
    Observation,
    Peer,
    Phase,
    Reserved,
    Side,
    TransferKey,
)

UNDRAINED = (Phase.ABORTED, Phase.QUARANTINED)
NOT_LIVE = (*UNDRAINED, Phase.LOCAL_DRAINED, Phase.RELEASABLE)


class RankEvents:
    """Counts events of one run into `seen`, after each thing that happened."""

    def __init__(self, world: Parts, seen: Counter[str]) -> None:
        self._world, self._seen = world, seen
        self._phases: dict[tuple[Peer, TransferKey], Phase] = {}
        self._slots: dict[tuple[Peer, TransferKey], int] = {}
        self._drained: set[tuple[Peer, int]] = set()
        """Slots whose last owner gave them back by way of a drain."""

    def observe(self, event: Event, observations: tuple[Observation, ...], after: State) -> None:
        """Count what happened with `event`, which led to `after`."""
        flights = self._world.flights(after)
        if event.kind is Kind.RESTART:
            dead = self._world.around(after).dead
            late = any(f.writer in dead and f.to not in dead for f in flights)
            self._count(restarted=True, restarted_with_write_in_flight=late)
        for seen in observations:
            match seen:
                case Reserved(at, key, (slot,)):
                    self._slots[at, key] = slot
                    self._count(
                        reuse_after_drain=(at, slot) in self._drained,
                        room_reused_with_chunk_in_flight=any(
                            (f.to, f.key.room) == (at, key.room) and f.key != key for f in flights
                        ),
                    )
                case Moved(at, key, phase):
                    self._moved(at, key, phase)
                case Arrived(at, key, writer):
                    lives = self._world.lives(after, Side.PREFILL)
                    self._count(
                        late_write_after_abort=self._phases.get((at, key)) in NOT_LIVE,
                        write_of_former_life=any(
                            me.incarnation > writer.incarnation for me in lives
                        ),
                    )
                case Delivered(at, Ack(key)):
                    self._count(ack_before_arm=self._phases.get((at, key)) is Phase.ADVERTISED)

    def _moved(self, at: Peer, key: TransferKey, phase: Phase) -> None:
        before = self._phases.get((at, key))
        self._phases[at, key] = phase
        peers = (where for where in self._phases if where[1] == key and where[0] != at)
        self._count(
            live=phase is Phase.LIVE,
            quarantined=phase is Phase.QUARANTINED,
            drained_late=before is Phase.QUARANTINED and phase is Phase.LOCAL_DRAINED,
            abort_with_one_rank_drained=phase is Phase.LOCAL_DRAINED
            and any(self._phases[peer] in UNDRAINED for peer in peers),
        )
        if phase is Phase.FREE:
            place = (at, self._slots[at, key])
            kept = self._drained - {place}
            self._drained = kept | {place} if before is Phase.RELEASABLE else kept

    def _count(self, **events: bool) -> None:
        for name, happened in events.items():
            if happened:
                self._seen[name] += 1
