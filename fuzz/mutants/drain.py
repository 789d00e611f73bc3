"""Faults of the drain protocol: who may acknowledge, what counts as outstanding, what is retried.

They are looked for by random runs (`fuzz.explore`), within bounds that each one names; the clause
that it breaks is the oracle that kills it.
"""

from __future__ import annotations

from typing import Any

from fuzz.mutants.registry import mutant
from reference.protocol import (
    Abort,
    Ack,
    Drop,
    Enter,
    Outcome,
    Phase,
    Post,
    ReadAux,
    Send,
    Status,
)

INCOMING = "optimized.transfer.drain.Incoming."
OUTGOING = "optimized.transfer.drain.Outgoing."
RANKS = "optimized.transfer.ranks."
LIVENESS = ("L1", "L2", "L5")
"""Which of them is named depends on who is left waiting in the run that was found."""
UNDRAINED = (Phase.ABORTED, Phase.QUARANTINED)


def drain(
    *where: str, bug: str = "own", kills: tuple[str, ...], bounds: str = "small", **more: Any
):
    """Register a mutant of the protocol."""
    return mutant(*where, bug=bug, killed_by=kills, target="drain", bounds=bounds, **more)


# The writer: when it acknowledges.


@drain(OUTGOING + "_drained", kills=("S3",))
def ack_on_receipt_of_abort(original, self):
    """A writer acknowledges an ABORT at once, with writes still on their way."""
    return self, (Send(self.to, Ack(self.key, self.me)),)


@drain(OUTGOING + "prepared", kills=("S3", "S4", "S6", "S8"))
def outstanding_until_posted(original, self, piece):
    """A piece is no longer outstanding once it is posted."""
    after, actions = original(self, piece)
    return after._replace(busy=after.busy - {piece}, landed=after.landed | {piece}), actions


def _posts_and_counts(original, self, piece):
    after, actions = original(self, piece)
    posts = any(isinstance(action, Post) for action in actions)
    return (after._replace(busy=after.busy | {piece}) if posts else after), actions


@drain(
    OUTGOING + "take",
    kills=("S3", "S8"),
    also={OUTGOING + "prepared": _posts_and_counts},
)
def not_counted_at_dequeue(original, self, piece):
    """A piece counts as outstanding from its posting, and not from when a worker took it."""
    return self, original(self, piece)[1]


@drain(OUTGOING + "_shut", kills=("S3", "order", *LIVENESS))
def acks_without_closing(original, self):
    """A writer acknowledges without closing the key."""
    return self


def _shut_but_keeps_places(original, self):
    return original(self)._replace(places=self.places)


@drain(OUTGOING + "prepared", kills=("S4",), also={OUTGOING + "_shut": _shut_but_keeps_places})
def posts_after_close(original, self, piece):
    """A piece that was taken before the key was closed is posted after it."""
    after, actions = original(self._replace(closed=False), piece)
    return after._replace(closed=self.closed), actions


@drain(OUTGOING + "settled", kills=("S3", *LIVENESS))
def poison_ignored(original, self, piece, outcome):
    """A write that broke counts as ended, though its bytes may still land."""
    after, actions = original(self, piece, outcome)
    return after._replace(stained=False), actions


@drain(OUTGOING + "settled", kills=("S3", "S6"))
def broken_taken_for_landed(original, self, piece, outcome):
    """A write that broke counts as landed."""
    return original(self, piece, Outcome.LANDED)


@drain(OUTGOING + "settled", kills=("S8",))
def unknown_no_longer_reads(original, self, piece, outcome):
    """A write of unknown outcome is taken to read its source no longer."""
    return original(self, piece, Outcome.BROKEN if outcome is Outcome.UNKNOWN else outcome)


@drain(OUTGOING + "offered_again", OUTGOING + "close", kills=LIVENESS)
def acks_only_once(original, self):
    """A writer that has closed a key does not acknowledge it again."""
    if self.closed:
        return self, ()
    return original(self)


@drain(OUTGOING + "prepared", kills=LIVENESS)
def dropped_without_ack(original, self, piece):
    """A writer forgets to acknowledge when the last thing left was a piece that it drops."""
    after, actions = original(self, piece)
    if any(isinstance(action, Drop) for action in actions):
        actions = actions[:1]
    return after, actions


@drain(OUTGOING + "settled", kills=LIVENESS)
def settled_without_ack(original, self, piece, outcome):
    """A writer forgets to acknowledge when its last write settles after the ABORT."""
    after, actions = original(self, piece, outcome)
    return after, () if self.closed else actions


@drain(OUTGOING + "next_piece", kills=("S6",))
def aux_before_data(original, self, ready):
    """The aux row is posted while data is still on its way."""
    return original(self._replace(data=0), ready)


@drain(OUTGOING + "prepared", kills=("S6",))
def status_before_settled(original, self, piece):
    """A writer reports its pieces as it posts the last one."""
    after, actions = original(self, piece)
    last = piece == self.pieces - 1 and any(isinstance(action, Post) for action in actions)
    return after, (*actions, Send(self.to, Status(self.key, self.me))) if last else actions


@drain(OUTGOING + "offered_again", kills=LIVENESS)
def report_not_repeated(original, self):
    """A writer does not repeat a report that may have been lost."""
    return original(self) if self.closed else (self, ())


# The writer: keys that it does not know, and its sources.


@drain(RANKS + "PrefillRank.receive", kills=("S3", "S4"))
def abort_of_unknown_key_forgotten(original, self, message):
    """A writer acknowledges a key that it does not know, and serves it when the offer comes."""
    after, actions = original(self, message)
    if not isinstance(message, Abort):
        return after, actions
    known = {(t.key, t.to) for t in self.transfers}
    return after._replace(
        transfers=tuple(t for t in after.transfers if (t.key, t.to) in known)
    ), actions


@drain(RANKS + "PrefillRank._each", kills=("S1", "S3", "S4"), bounds="reuse")
def closed_keys_forgotten(original, self, turns):
    """A writer forgets a key as soon as nothing of it is left, and serves a late offer of it."""
    after, actions = original(self, turns)
    return after._replace(
        transfers=tuple(t for t in after.transfers if t.busy or t.stained or not t.closed)
    ), actions


@drain(RANKS + "PrefillRank._over", kills=("S8",))
def source_freed_in_flight(original, self, source):
    """A source that was given up is freed though a write still reads it."""
    idle = tuple(t._replace(busy=frozenset()) for t in self.transfers)
    return original(self._replace(transfers=idle), source)


@drain(RANKS + "prefill_together", kills=("S8", *LIVENESS))
def source_freed_by_any(original, ranks):
    """A source is freed once any rank of P is done with it."""
    return tuple(
        together._replace(ready=max(s.ready for s in column))
        for together, column in zip(original(ranks), zip(*ranks, strict=True), strict=True)
    )


@drain(RANKS + "PrefillRank._is", kills=("L1", "L2", "L5", "S1", "S4"), bounds="reuse")
def writer_knows_rooms_only(original, self, transfer, message):
    """A writer takes a message about a room's former transfer for one about the present."""
    return transfer.key.room == message.key.room and transfer.to == message.at


# D: what it takes for drained.


@drain(INCOMING + "_fail", kills=("S2",))
def one_ack_fewer(original, self):
    """A rank is drained with one acknowledgement still missing."""
    after, actions = original(self)
    if after.phase is Phase.ABORTED and len(after.undrained) == 1:
        return after._enter(Phase.LOCAL_DRAINED, actions)
    return after, actions


@drain(INCOMING + "expire", kills=("S2",))
def timeout_frees(original, self):
    """A transfer that waited too long counts as drained."""
    if self.phase is Phase.ABORTED:
        return self._enter(Phase.LOCAL_DRAINED)
    return self, ()


@drain(INCOMING + "lose", kills=("S2",))
def death_taken_for_a_fence(original, self, writer):
    """The end of a writer's process counts as the end of its writes."""
    after, actions = original(self, writer)
    fenced, more = after.fence(writer)
    return fenced, (*actions, *more)


@drain(RANKS + "DecodeRank.receive", kills=("S2", "S7"), bounds="reuse")
def key_without_generation(original, self, message):
    """A rank takes a message about a room's former transfer for one about the present."""
    for transfer in self.transfers:
        if transfer.key.room == message.key.room:
            return self._on(
                transfer.key,
                lambda t: t.receive(_about(message, t.key)),
            )
    return original(self, message)


def _about(message, key):
    return type(message)(key, *(getattr(message, f) for f in message.__struct_fields__[1:]))


@drain(INCOMING + "receive", kills=("S2",), bounds="fan_in")
def acks_counted(original, self, message):
    """Acknowledgements are counted, so that one that comes twice stands for another."""
    again = isinstance(message, Ack) and message.writer not in self.undrained
    if again and self.phase in UNDRAINED:
        return self._drain(next(iter(self.undrained)))
    return original(self, message)


@drain(INCOMING + "_drain", kills=LIVENESS)
def late_ack_ignored(original, self, writer):
    """An acknowledgement that comes after the timeout is ignored."""
    return (self, ()) if self.phase is Phase.QUARANTINED else original(self, writer)


@drain(INCOMING + "retry", kills=LIVENESS)
def abort_not_repeated(original, self, floor):
    """An ABORT that may have been lost is not sent again."""
    return (self, ()) if self.phase in UNDRAINED else original(self, floor)


@drain(INCOMING + "retry", kills=LIVENESS)
def offer_not_repeated(original, self, floor):
    """An offer that may have been lost is not sent again."""
    return (self, ()) if self.phase is Phase.ADVERTISED else original(self, floor)


@drain(INCOMING + "_aborts", kills=LIVENESS, bounds="fan_in")
def abort_to_one_writer(original, self):
    """ABORT goes to one of several writers."""
    return original(self)[:1]


@drain(INCOMING + "_fail", kills=("order", "S2", "S5"))
def failed_as_if_never_advertised(original, self):
    """A transfer that fails is given back at once, though its addresses were told."""
    return self._enter(Phase.FAILED)


# D: what it takes for landed, live and free.


@drain(INCOMING + "receive", kills=("order",))
def failed_overwritten(original, self, message):
    """A report that comes after the failure makes the transfer land."""
    if isinstance(message, Status) and self.phase in UNDRAINED:
        return self._enter(Phase.LANDED)
    return original(self, message)


@drain(INCOMING + "_arrive", kills=("S6",), bounds="fan_in")
def first_report_suffices(original, self, message):
    """One writer's report stands for all writers'."""
    if not self.missing:
        return self, ()
    return self._replace(missing=frozenset()), (ReadAux(self.key),)


@drain(RANKS + "decode_together", kills=("S6", "order", *LIVENESS))
def live_by_any(original, ranks):
    """Progress is reduced by MAX: one rank that has landed makes all live."""
    return tuple(
        together._replace(progress=max(c.progress for c in column))
        for together, column in zip(original(ranks), zip(*ranks, strict=True), strict=True)
    )


@drain(RANKS + "decode_together", kills=("order", "S5", "S2"))
def ready_by_any(original, ranks):
    """Ready is reduced by MAX: one rank that is drained frees all."""
    return tuple(
        together._replace(ready=max(c.ready for c in column))
        for together, column in zip(original(ranks), zip(*ranks, strict=True), strict=True)
    )


@drain(INCOMING + "reduced", kills=LIVENESS)
def landed_survives_peers_failure(original, self, all_ranks):
    """A rank that has landed does not follow a peer that failed."""
    if self.phase is Phase.LANDED and all_ranks.progress == 0:
        return self, ()
    return original(self, all_ranks)


@drain(INCOMING + "reduced", kills=("S5",))
def released_twice(original, self, all_ranks):
    """What a round frees is freed twice."""
    after, actions = original(self, all_ranks)
    if after.phase is Phase.FREE:
        actions = (*actions, Enter(self.key, Phase.FREE))
    return after, actions


@drain(INCOMING + "contribution", kills=("order", "S1"))
def freed_while_read(original, self):
    """A live transfer is freed though a reader of it has not ended on some rank."""
    return original(self._replace(reading=False))


@drain(INCOMING + "end_reading", kills=("S5", "order"))
def freed_alone(original, self):
    """A rank frees a live transfer as its own readers end, without the others."""
    return self._enter(Phase.FREE)


@drain(RANKS + "DecodeRank.admits", kills=("L3",), bounds="crowded")
def quarantine_admits(original, self):
    """Quarantine does not hold admission back."""
    return True


@drain(RANKS + "decode_together", kills=("L3", "L4"), bounds="crowded")
def hold_by_all(original, ranks):
    """Hold is reduced by MIN: a quarantine on one rank alone counts on none."""
    return tuple(
        together._replace(hold=min(c.hold for c in column))
        for together, column in zip(original(ranks), zip(*ranks, strict=True), strict=True)
    )
