"""The drain contract as an executable state machine that judges recorded runs.

No buffer of D is used again while a write may still land in it, on any rank; no source of P while
it may still be read; and nothing waits for ever without cause.  The clauses:

    order  phases follow the diagram of `reference.protocol.Phase`, only a live key is read, and
           what settles or arrives was posted, what is posted was taken, each once.
    S1     nothing of a key is allocatable while a write of it may still execute.
    S2     LOCAL_DRAINED needs an ACK, or a fence proof, of every identity that was advertised to.
    S3     a writer ACKs only what it closed, and with no write of it left.
    S4     no write starts after its writer closed the key.
    S5     FREE at most once a rank, and on all ranks in the same collective round.
    S6     LIVE needs all bytes and the aux row on all ranks, in one round; the aux row goes last.
    S7     stale messages change nothing.
    S8     source pages outlive the reads of them.
    S9     free, owned and held pages add up, to what was reserved.
    L1     with live peers ABORTED leads to FREE.
    L2     a lost ABORT or ACK is sent again.
    L3     quarantine is bounded and holds back admission.
    L4     all ranks issue the same sequence of collectives.
    L5     every request ends, and every source is freed: no abort blocks another room for ever.

What S5, S6 and S8 ask for in one round, a rank does in the last that it took part in.

A run is its observations, in an order that respects causes.  Per key they make a `Transfer`
(`observe`), for the rest an `Instance` (`observe_instance`); `Judge` keeps both.

Source: drain before release in SGLang's HiSparse transfer, and the abort protocol of its NIXL
backend (0.5.22 and 0.5.23), stated over sets of identities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from reference import drain_ranks, drain_writers
from reference.drain_instance import Instance, observe_instance
from reference.drain_state import Clause, Transfer, Violation, fail, name, name_key
from reference.protocol import (
    Ack,
    Advertise,
    Arrived,
    Closed,
    Delivered,
    Died,
    Dropped,
    Fenced,
    Moved,
    Observation,
    Phase,
    Posted,
    Reading,
    Reserved,
    Sent,
    Settled,
    Side,
    Status,
    Taken,
    Topology,
    TransferKey,
)

__all__ = [
    "Clause",
    "Instance",
    "Judge",
    "Transfer",
    "Violation",
    "judge",
    "observe",
    "observe_instance",
]

_OBSERVE: dict[type, Callable[[Transfer, Any, Topology], Transfer]] = {
    Reserved: drain_ranks.reserved,
    Moved: drain_ranks.moved,
    Reading: drain_ranks.reading,
    Taken: drain_writers.taken,
    Dropped: drain_writers.dropped,
    Posted: drain_writers.posted,
    Settled: drain_writers.settled,
    Arrived: drain_writers.arrived,
    Closed: drain_writers.closed,
    Died: drain_writers.died,
    Fenced: drain_writers.fenced,
}
_SENT: dict[type, Callable[[Transfer, Sent, Any, Topology], Transfer]] = {
    Advertise: drain_ranks.advertised,
    Ack: drain_writers.acknowledged,
    Status: drain_writers.reported,
}


def observe(
    transfer: Transfer, seen: Observation, topology: Topology, *, arrivals: bool = True
) -> Transfer:
    """The value of a key after `seen`, which is about it or the end of a process of its life.

    `arrivals` says whether Arrived is observed.  Where it is not, a message of the writer counts
    for the bytes, as the writer may come to note only later that a piece settled.

    Raises:
        Violation: S1 to S7 or order is broken.
    """
    kind = type(seen)
    if kind in _OBSERVE:
        return _OBSERVE[kind](transfer, seen, topology)
    if isinstance(seen, Delivered):
        return drain_ranks.delivered(transfer, seen, topology, arrivals=arrivals)
    if isinstance(seen, Sent) and type(seen.message) in _SENT:
        return _SENT[type(seen.message)](transfer, seen, seen.message, topology)
    return transfer


def _key(seen: Observation) -> TransferKey | None:
    if isinstance(seen, Sent | Delivered):
        return seen.message.key
    return getattr(seen, "key", None)


@dataclass(slots=True)
class Judge:
    """Judges a run while it happens; the pieces are values, so a copy of the dict is a fork.

    Fields:
        topology: who writes to whom.
        arrivals: whether Arrived is observed, as in simulations (see `observe`).
        transfers: the value of each key seen.
        instance: what is not about one key.
    """

    topology: Topology
    _: KW_ONLY
    arrivals: bool = True
    transfers: dict[TransferKey, Transfer] = field(default_factory=dict)
    instance: Instance = field(default_factory=Instance)

    def observe(self, seen: Observation) -> None:
        """Take in the next observation; after a Violation this judge is where it was before.

        Raises:
            Violation: with the clause that `seen` breaks.
        """
        key = _key(seen)
        if key is not None:
            before = self.transfers.get(key) or self._fresh(key)
            after = observe(before, seen, self.topology, arrivals=self.arrivals)
            self.instance = observe_instance(self.instance, seen, self.topology)
            self.transfers[key] = after
            return
        self.instance = observe_instance(self.instance, seen, self.topology)
        if isinstance(seen, Died | Fenced):
            peer = seen.peer if isinstance(seen, Died) else seen.at
            for key, transfer in self.transfers.items():
                if peer.side is Side.PREFILL or peer.incarnation == key.incarnation:
                    self.transfers[key] = observe(transfer, seen, self.topology)

    def _fresh(self, key: TransferKey) -> Transfer:
        life = key.incarnation
        return Transfer(
            (None,) * len(self.topology.writers),
            fenced=frozenset(line for line in self.instance.fenced if line[0].incarnation == life),
            gone=frozenset(
                peer
                for peer in self.instance.dead
                if peer.side is Side.DECODE and peer.incarnation == life
            ),
        )

    def state(self) -> tuple[frozenset[tuple[TransferKey, Transfer]], Instance]:
        """A hashable value that is equal for judges with the same future: rounds are counted from
        the last one that all ranks of a life have done, since only differences matter."""
        transfers = set(self.transfers.items())
        for key, transfer in self.transfers.items():
            if transfer.agreed is not None:
                base = self.instance.life(Side.DECODE, key.incarnation).behind
                transfers.remove((key, transfer))
                transfers.add((key, transfer._replace(agreed=transfer.agreed - base)))
        return frozenset(transfers), self.instance.relative()

    def finish(self, *, live: bool = True) -> None:
        """Judge the end of a run that came to rest under fair scheduling: L1, L2 and L5.

        A handle that never settles, one of BROKEN or UNKNOWN end, and a dead writer that is not
        fenced excuse a quarantine for ever.  The end of a rank ends the collectives of its life,
        and excuses its peers.  With `live` False the run was only cut short: judged is what time
        cannot mend, a step in one round that a rank has missed (S5, S6).

        Raises:
            Violation: with the first clause found broken.
        """
        for key, transfer in sorted(self.transfers.items(), key=lambda item: item[0]):
            self._check_agreed(key, transfer)
            if live and len(transfer.alive(key)) == len(transfer.phases):
                self._check_ended(key, transfer)
        if live:
            self._check_sources()

    def _check_agreed(self, key: TransferKey, transfer: Transfer) -> None:
        if transfer.agreed is None:
            return
        taken = (Phase.FREE, Phase.RELEASABLE, Phase.LIVE)
        step = next(phase for phase in taken if phase in transfer.phases)
        rounds = dict(self.instance.life(Side.DECODE, key.incarnation).done)
        for rank, phase in transfer.alive(key):
            if phase not in (step, Phase.FREE, None) and rounds.get(rank.rank, 0) > transfer.agreed:
                fail(
                    Clause.S6 if step is Phase.LIVE else Clause.S5,
                    f"{name(rank)} went past round {transfer.agreed}, in which {name_key(key)} "
                    f"became {step.name} elsewhere, and left it {phase.name}.",
                )

    def _check_ended(self, key: TransferKey, transfer: Transfer) -> None:
        """L5 for what should have become live or failed, L1 and L2 for what failed."""
        unsettled = {write[:2] for write in transfer.posted}
        waited = transfer.told - transfer.acked - transfer.fenced
        excused = {line for line in waited if line[1] in self.instance.dead or line in unsettled}
        for rank, phase in transfer.alive(key):
            if phase is None or phase is Phase.FREE:
                continue
            left = f"{name_key(key)} on {name(rank)} is left {phase.name}"
            if phase in (Phase.RESERVED, Phase.ADVERTISED, Phase.LANDED, Phase.LIVE):
                fail(Clause.L5, f"{left} for ever.")
            silent = [writer for to, writer in sorted(waited - excused) if to == rank]
            if silent and phase in (Phase.ABORTED, Phase.QUARANTINED):
                fail(Clause.L2, f"{left}, as no ACK of {name(silent[0])} came, which lives.")
            if any(to == rank for to, _ in excused):
                rests = phase is Phase.QUARANTINED
            else:  # it may wait for a peer that is in quarantine
                idle = phase is Phase.FAILED and not transfer.advertised_by(rank)
                rests = bool(excused) and (phase is Phase.LOCAL_DRAINED or idle)
            if not rests:
                fail(Clause.L1, f"{left}, with nothing to wait for there.")

    def _check_sources(self) -> None:
        instance = self.instance
        ended = {peer.incarnation for peer in instance.dead if peer.side is Side.PREFILL}
        read = {(r.at.incarnation, r.source) for r in instance.reads if r.source is not None}
        for peer, source, room in sorted(instance.held):
            if peer.incarnation not in ended and (peer.incarnation, source) not in read:
                fail(Clause.L5, f"{name(peer)} keeps source {source} of room {room} for ever.")


def judge(
    run: Iterable[Observation], topology: Topology, *, arrivals: bool = True, live: bool = True
) -> Violation | None:
    """The first violation of a run, or None; `arrivals` and `live` as in Judge."""
    judge_of_run = Judge(topology, arrivals=arrivals)
    try:
        for seen in run:
            judge_of_run.observe(seen)
        judge_of_run.finish(live=live)
    except Violation as violation:
        return violation
    return None
