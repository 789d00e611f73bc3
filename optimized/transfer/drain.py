"""Drain before release, without IO: events in, actions out, one transfer at a time.

`Incoming` is a transfer on one rank of D, `Outgoing` the same transfer at one writer of P.  Both
are values: a method returns the next value and the actions that the owner must carry out, in
order and before it handles anything else.  Nothing here waits, and nothing trusts the order, the
number or the arrival of messages.

Why a writer's ACK is enough: it closes the key first, after which it starts no write, and
answers once all that it had started has ended as LANDED.  Why it is needed: D cannot see writes
on their way, and no timeout tells it that there are none.
"""

from __future__ import annotations

from typing import NamedTuple

from reference.protocol import (
    Abort,
    Ack,
    Action,
    Advertise,
    Completion,
    Drop,
    Enter,
    Landed,
    Outcome,
    Peer,
    Phase,
    Post,
    ReadAux,
    Send,
    Status,
    Take,
    TransferKey,
)

BEFORE_LIVE = (Phase.RESERVED, Phase.ADVERTISED, Phase.LANDED)
UNDRAINED = (Phase.ABORTED, Phase.QUARANTINED)
DRAINED = (Phase.FAILED, Phase.LOCAL_DRAINED)


class Contribution(NamedTuple):
    """What a rank brings to a collective round about one transfer.

    Fields:
        progress: 0 failed, 1 under way, 2 landed or live; reduced by MIN.
        ready: 1 where this rank could free the memory; reduced by MIN.
        hold: 1 where it is in quarantine here; reduced by MAX, and counts against admission.
    """

    progress: int
    ready: int
    hold: int


class Incoming(NamedTuple):
    """A transfer on one rank of D.

    Fields:
        request: the router's number of it, by which a writer knows what to send.
        missing: (writer, piece) whose bytes are not known to be here.
        undrained: writers that may hold the addresses and have neither acknowledged nor been
            fenced.
        reading: it is live, and a reader of it has not ended on this rank.
        places: the addresses, as they are advertised.
    """

    key: TransferKey
    me: Peer
    phase: Phase
    request: int
    missing: frozenset[tuple[Peer, int]] = frozenset()
    undrained: frozenset[Peer] = frozenset()
    reading: bool = False
    places: tuple[tuple[int, ...], ...] = ()

    def advertise(
        self, writers: tuple[Peer, ...], missing: frozenset[tuple[Peer, int]], floor: int
    ) -> Step:
        """Tell the writers where to write; only now is it known whose pieces will come."""
        offered = self._replace(undrained=frozenset(writers), missing=missing)
        return offered._enter(Phase.ADVERTISED, offered._offers(floor))

    def receive(self, message: Landed | Status | Ack) -> Step:
        """A message about this very key; one from somebody else, or too late, changes nothing."""
        if self.phase is Phase.ADVERTISED and isinstance(message, Landed | Status):
            return self._arrive(message)
        if isinstance(message, Ack) and message.writer in self.undrained:
            return self._drain(message.writer)
        return self, ()

    def _arrive(self, message: Landed | Status) -> Step:
        if isinstance(message, Landed):
            left = self.missing - {(message.writer, message.piece)}
        else:
            left = frozenset(item for item in self.missing if item[0] != message.writer)
        last = () if left or not self.missing else (ReadAux(self.key),)
        return self._replace(missing=left), last

    def aux(self, named: TransferKey | None) -> Step:
        """All pieces are here; the transfer has landed if the aux row names it."""
        if named == self.key:
            return self._enter(Phase.LANDED)
        return self._fail()

    def _drain(self, writer: Peer) -> Step:
        """A writer's writes are over for good.  One that gave up by itself fails the transfer."""
        rest = self._replace(undrained=self.undrained - {writer})
        if self.phase in UNDRAINED and not rest.undrained:
            return rest._enter(Phase.LOCAL_DRAINED)
        if self.phase is Phase.ADVERTISED:
            return rest._fail()
        return rest, ()

    def cancel(self) -> Step:
        """Give the transfer up, on this rank first.  What is live is ended by its readers."""
        return self._fail() if self.phase in BEFORE_LIVE else (self, ())

    def _fail(self) -> Step:
        """Where anybody may hold the addresses, FAILED is left at once: they are told to stop."""
        failed, actions = self._enter(Phase.FAILED)
        if self.phase is Phase.RESERVED:
            return failed, actions
        aborted, actions = failed._enter(Phase.ABORTED, (*actions, *self._aborts()))
        if not aborted.undrained:
            return aborted._enter(Phase.LOCAL_DRAINED, actions)
        return aborted, actions

    def expire(self) -> Step:
        """ABORTED for too long: keep the memory, and stop waiting for it."""
        return self._enter(Phase.QUARANTINED) if self.phase is Phase.ABORTED else (self, ())

    def retry(self, floor: int) -> Step:
        """Say again what may have been lost."""
        if self.phase is Phase.ADVERTISED:
            return self, self._offers(floor)
        return self, self._aborts() if self.phase in UNDRAINED else ()

    def lose(self, writer: Peer) -> Step:
        """A writer's process is gone; what it has not delivered will not come."""
        awaited = self.phase is Phase.ADVERTISED and any(w == writer for w, _ in self.missing)
        return self._fail() if awaited else (self, ())

    def fence(self, writer: Peer) -> Step:
        """Proof that no write of `writer` can still execute here."""
        return self._drain(writer) if writer in self.undrained else (self, ())

    def end_reading(self) -> Step:
        """No reader of it is left on this rank."""
        return self._replace(reading=False), ()

    def contribution(self) -> Contribution:
        """What this rank says of the transfer."""
        drained = self.phase in DRAINED
        return Contribution(
            progress=2
            if self.phase in (Phase.LANDED, Phase.LIVE)
            else int(self.phase in BEFORE_LIVE),
            ready=int(drained or (self.phase is Phase.LIVE and not self.reading)),
            hold=int(self.phase is Phase.QUARANTINED),
        )

    def reduced(self, all_ranks: Contribution) -> Step:
        """What the ranks said together; every rank takes the same turn in the same round."""
        if all_ranks.ready:
            if self.phase in DRAINED:
                releasable, actions = self._enter(Phase.RELEASABLE)
                return releasable._enter(Phase.FREE, actions)
            return self._enter(Phase.FREE)
        if all_ranks.progress == 2 and self.phase is Phase.LANDED:
            return self._enter(Phase.LIVE)
        if all_ranks.progress == 0:
            return self.cancel()
        return self, ()

    def _enter(self, phase: Phase, before: tuple[Action, ...] = ()) -> Step:
        entered = self._replace(phase=phase)
        if phase in (Phase.LIVE, Phase.FAILED):
            entered = entered._replace(missing=frozenset())
        if phase is Phase.LIVE:
            # whatever a writer says of it from here on is late
            entered = entered._replace(undrained=frozenset(), reading=True)
        return entered, (*before, Enter(self.key, phase))

    def _offers(self, floor: int) -> tuple[Action, ...]:
        offer = Advertise(self.key, self.me, floor, self.request, self.places)
        return tuple(Send(writer, offer) for writer in sorted(self.undrained))

    def _aborts(self) -> tuple[Action, ...]:
        return tuple(Send(writer, Abort(self.key, self.me)) for writer in sorted(self.undrained))


Step = tuple[Incoming, tuple[Action, ...]]


class Outgoing(NamedTuple):
    """A transfer at one writer of P, to rank `to` of D.

    Fields:
        request: what D wants; `source` is that request, or None while it is not here.
        pieces: how many it sends, the aux row included if it sends that.
        data: how many of them are data; an aux row is posted when these have landed.
        busy: pieces taken, posted, or of UNKNOWN outcome.
        landed: pieces that ended as LANDED.
        closed: no further piece is taken or posted.
        stained: a write ended otherwise, and may still execute: there is no ACK, ever.
    """

    key: TransferKey
    me: Peer
    to: Peer
    request: int | None
    source: int | None
    pieces: int
    data: int
    completion: Completion
    busy: frozenset[int] = frozenset()
    landed: frozenset[int] = frozenset()
    closed: bool = False
    stained: bool = False
    places: tuple[tuple[int, ...], ...] = ()

    @property
    def done(self) -> bool:
        """All pieces are at their destination."""
        return len(self.landed) == self.pieces

    def next_piece(self, ready: int) -> int | None:
        """The piece to take next, of which the first `ready` have been computed."""
        if self.closed or self.source is None:
            return None
        aux_too = self.pieces if len(self.landed) >= self.data else self.data
        begun = self.busy | self.landed
        return next((p for p in range(min(ready, aux_too)) if p not in begun), None)

    def take(self, piece: int) -> Turn:
        """A worker takes a piece; it counts as outstanding from here on."""
        return self._replace(busy=self.busy | {piece}), (Take(self.key, self.to, piece),)

    def prepared(self, piece: int) -> Turn:
        """A piece is ready to be posted, which it is unless the key was closed meanwhile."""
        if self.closed:
            dropped, acks = self._replace(busy=self.busy - {piece})._drained()
            return dropped, (Drop(self.key, self.to, piece), *acks)
        note = Landed(self.key, self.me, piece) if self.completion is Completion.NOTIFY else None
        return self, (Post(self.key, self.to, piece, note),)

    def settled(self, piece: int, outcome: Outcome) -> Turn:
        """A posted piece ended.  One that did not land ends the transfer on this side."""
        if outcome is not Outcome.LANDED:
            busy = self.busy if outcome is Outcome.UNKNOWN else self.busy - {piece}
            return self._replace(busy=busy, stained=True)._shut(), ()
        if self.closed:
            return self._replace(busy=self.busy - {piece})._drained()
        landed = self._replace(busy=self.busy - {piece}, landed=self.landed | {piece})
        last = landed.done and self.completion is Completion.STATUS
        return landed, landed._report() if last else ()

    def offered_again(self) -> Turn:
        """D repeats its offer: what it missed is repeated too."""
        return self._drained() if self.closed else (self, self._report())

    def close(self) -> Turn:
        """Start nothing more, and acknowledge when nothing is left: at once, or later."""
        return self._shut()._drained()

    def _shut(self) -> Outgoing:
        """What has landed no longer matters."""
        return self._replace(closed=True, landed=frozenset(), places=())

    def _drained(self) -> Turn:
        """Acknowledge if nothing is left that could still write."""
        left = self.busy or self.stained
        return self, () if left else (Send(self.to, Ack(self.key, self.me)),)

    def _report(self) -> tuple[Action, ...]:
        """What D should know of the pieces that have landed."""
        if self.completion is Completion.STATUS:
            return (Send(self.to, Status(self.key, self.me)),) if self.done else ()
        return tuple(Send(self.to, Landed(self.key, self.me, p)) for p in sorted(self.landed))


Turn = tuple[Outgoing, tuple[Action, ...]]
