"""Faults of the drain protocol that public reports tell of: what a notification counts for, whom
an acknowledgement reaches, and what a failure frees.

They are looked for as those of `fuzz.mutants.drain` are.
"""

from __future__ import annotations

from typing import Any

from fuzz.mutants.drain import INCOMING, LIVENESS, OUTGOING, RANKS, drain
from fuzz.mutants.registry import Body
from reference.protocol import Abort, Landed, Phase, Post, ReadAux, Send

# What a notification counts for.


@drain(INCOMING + "_drain", bug="nixl#2107", kills=("S6",), bounds="fan_in")
def giving_up_counts_as_complete(original: Body, self: Any, writer: Any) -> Any:
    """A writer that gives up before it has reported is entered with no piece expected, and so
    with all of them here."""
    left = frozenset(item for item in self.missing if item[0] != writer)
    if self.phase is not Phase.ADVERTISED or left == self.missing:
        return original(self, writer)
    complete = self._replace(missing=left, undrained=self.undrained - {writer})
    return complete, () if left else (ReadAux(self.key),)


@drain(INCOMING + "_arrive", bug="sglang#39846", kills=("S6",), bounds="fan_in_notes")
def component_of_note_discarded(original: Body, self: Any, message: Any) -> Any:
    """A notification tells its component, and D does not look: the first of a writer stands for
    all that it sends.  The writer of the aux row is spared, since that row itself would tell."""
    if not isinstance(message, Landed) or message.writer == min(self.undrained):
        return original(self, message)
    left = frozenset(item for item in self.missing if item[0] != message.writer)
    last = () if left or not self.missing else (ReadAux(self.key),)
    return self._replace(missing=left), last


@drain(OUTGOING + "prepared", bug="nixl#688", kills=LIVENESS, bounds="notify")
def note_lost_while_in_progress(original: Body, self: Any, piece: int) -> Any:
    """The note of a write is kept for one that ends as it is posted, and lost for one that is in
    progress then."""
    after, actions = original(self, piece)
    return after, tuple(a._replace(note=None) if isinstance(a, Post) else a for a in actions)


@drain(OUTGOING + "next_piece", bug="sglang#18939", kills=LIVENESS)
def component_without_a_way_out(original: Body, self: Any, ready: int) -> Any:
    """D waits for a component that no code of P sends."""
    piece = original(self, ready)
    return None if piece == self.data - 1 else piece


# Whom an acknowledgement reaches.


@drain(
    RANKS + "PrefillRank.settled",
    RANKS + "PrefillRank.prepared",
    bug="sglang#38961a",
    kills=LIVENESS,
)
def ack_target_cleared_at_failure(
    original: Body, self: Any, key: Any, to: Any, piece: int, *outcome: Any
) -> Any:
    """A writer that fails forgets at once whom to answer, while its worker is inside a write."""
    after, actions = original(self, key, to, piece, *outcome)
    failed = {source.id for source in self.sources if source.failed}
    cleared = any((t.key, t.to) == (key, to) and t.source in failed for t in self.transfers)
    return after, tuple(a for a in actions if not (cleared and isinstance(a, Send)))


@drain(RANKS + "PrefillRank.receive", bug="sglang#38961b", kills=LIVENESS, bounds="fan_out")
def second_abort_overwrites_the_first(original: Body, self: Any, message: Any) -> Any:
    """A writer has one place for whom to answer about a room: of two ranks of D that abort it
    while it writes, the first is forgotten."""
    after, actions = original(self, message)
    if not isinstance(message, Abort):
        return after, actions
    waiting = [
        t
        for t in after.transfers
        if t.key.room == message.key.room and t.to != message.at and t.closed and t.busy
    ]
    forgotten = tuple(t._replace(stained=True) if t in waiting else t for t in after.transfers)
    return after._replace(transfers=forgotten), actions


# What a failure frees.


@drain(INCOMING + "reduced", bug="sglang#38961d", kills=("order", "S2", "S5"))
def peers_failure_frees_at_once(original: Body, self: Any, all_ranks: Any) -> Any:
    """A rank waits for its writers where it gave up itself, and not where a peer did."""
    if all_ranks.progress == 0 and self.phase in (Phase.ADVERTISED, Phase.LANDED):
        return self._enter(Phase.FAILED)
    return original(self, all_ranks)


def _offered_in_any_case(original: Body, self: Any, offer: Any) -> Any:
    after, actions = original(self, offer)
    known = {source.id for source in self.sources}
    begun = tuple(
        t._replace(source=offer.request) if self._is(t, offer) and offer.request in known else t
        for t in after.transfers
    )
    return after._replace(transfers=begun), actions


@drain(
    RANKS + "PrefillRank.take",
    bug="vllm#57705",
    kills=("S8",),
    also={RANKS + "PrefillRank._open": _offered_in_any_case},
)
def late_offer_served_from_released_source(original: Body, self: Any) -> Any:
    """An offer that comes late is served from pages whose keeper gave them up meanwhile, since
    its own timer begins with the offer."""
    kept = {source.id for source in self.sources}
    for t in self.transfers:
        if t.source is not None and t.source not in kept:
            piece = t.next_piece(t.pieces)
            if piece is not None:
                return self._each([u.take(piece) if u is t else (u, ()) for u in self.transfers])
    return original(self)
