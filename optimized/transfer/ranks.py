"""One rank of D or P: all its transfers, what its peers decide together, and whom it listens to.

Ranks are values like their transfers (`optimized.transfer.drain`).  All ranks of an instance
reserve, submit and reduce in the same order, so that the k-th value of a round is about the same
transfer on each of them; between two rounds each goes its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from optimized.transfer.drain import Contribution, Incoming, Outgoing, Step, Turn
from reference.protocol import (
    Abort,
    Ack,
    Action,
    Advertise,
    Completion,
    Landed,
    Message,
    Outcome,
    Peer,
    Phase,
    Status,
    Topology,
    TransferKey,
)

Places = tuple[tuple[int, ...], ...]


def decode_together(ranks: Sequence[Sequence[Contribution]]) -> tuple[Contribution, ...]:
    """The result of a round of D: a column of each rank's contributions, reduced."""
    return tuple(
        Contribution(
            progress=min(c.progress for c in column),
            ready=min(c.ready for c in column),
            hold=max(c.hold for c in column),
        )
        for column in zip(*ranks, strict=True)
    )


def prefill_together(ranks: Sequence[Sequence[SourceState]]) -> tuple[SourceState, ...]:
    """The result of a round of P."""
    return tuple(
        SourceState(min(s.progress for s in column), min(s.ready for s in column))
        for column in zip(*ranks, strict=True)
    )


class DecodeRank(NamedTuple):
    """A rank of D.

    Fields:
        writers: the processes that write to it, as far as they are there.
        transfers: those that are not FREE, in the order of their reservation.
        generation: of the last reservation.
        held_back: transfers that were in quarantine on some rank at the last round.
    """

    me: Peer
    topology: Topology
    writers: tuple[Peer, ...] = ()
    transfers: tuple[Incoming, ...] = ()
    generation: int = 0
    held_back: int = 0

    @property
    def admits(self) -> bool:
        """Whether quarantine leaves room for a reservation; the same on all ranks after a round."""
        return self.held_back < self.topology.quarantine_limit

    @property
    def floor(self) -> int:
        """The lowest generation that is not over."""
        return min((t.key.generation for t in self.transfers), default=self.generation + 1)

    def meet(self, writer: Peer) -> DecodeRank:
        """A writer's process is there, perhaps in another life."""
        others = {known for known in self.writers if known.rank != writer.rank}
        return self._replace(writers=tuple(sorted(others | {writer})))

    def reserve(
        self, room: int, request: int, places: Places = ()
    ) -> tuple[DecodeRank, TransferKey]:
        """Enter a transfer whose memory has been taken, of the request with the router's number
        `request`."""
        key = TransferKey(room, self.generation + 1, self.me.incarnation)
        entered = Incoming(key, self.me, Phase.RESERVED, request, places=places)
        transfers = (*self.transfers, entered)
        return self._replace(transfers=transfers, generation=key.generation), key

    def advertise(self, key: TransferKey) -> Move:
        """Offer a reserved transfer to its writers, or give it up where one is not there."""
        expected = self.topology.writers[self.me.rank]
        if not {writer.rank for writer in self.writers} >= set(expected):
            return self._on(key, Incoming.cancel)
        pieces = {
            (writer, piece)
            for writer in self.writers
            for piece in self.topology.pieces_of(self.me.rank, writer.rank)
        }
        return self._on(key, lambda t: t.advertise(self.writers, frozenset(pieces), self.floor))

    def receive(self, message: Message) -> Move:
        """A message of a writer; one about an unknown key changes nothing."""
        if not isinstance(message, Landed | Status | Ack):
            return self, ()
        return self._on(message.key, lambda t: t.receive(message))

    def aux(self, key: TransferKey, named: TransferKey | None) -> Move:
        """The answer to ReadAux."""
        return self._on(key, lambda t: t.aux(named))

    def cancel(self, key: TransferKey) -> Move:
        """Give a transfer up; its peers follow in the next round."""
        return self._on(key, Incoming.cancel)

    def expire(self, key: TransferKey) -> Move:
        """A transfer has waited too long for its writers' acknowledgements."""
        return self._on(key, Incoming.expire)

    def retry(self, key: TransferKey) -> Move:
        """Say again what a writer may have missed."""
        return self._on(key, lambda t: t.retry(self.floor))

    def end_reading(self, key: TransferKey) -> Move:
        """No reader of a live transfer is left on this rank."""
        return self._on(key, Incoming.end_reading)

    def lose(self, writer: Peer) -> Move:
        """A writer's process is gone."""
        left = self._replace(writers=tuple(w for w in self.writers if w != writer))
        return left._each([t.lose(writer) for t in self.transfers])

    def fence(self, writer: Peer) -> Move:
        """Proof that no write of `writer` can still execute on this rank."""
        return self._each([t.fence(writer) for t in self.transfers])

    def contributions(self) -> tuple[Contribution, ...]:
        """What this rank brings to the next round, a value a transfer."""
        return tuple(t.contribution() for t in self.transfers)

    def reduced(self, together: Sequence[Contribution]) -> Move:
        """The round's result; what became FREE is forgotten."""
        held = self._replace(held_back=sum(all_ranks.hold for all_ranks in together))
        turns = zip(self.transfers, together, strict=True)
        return held._each([t.reduced(all_ranks) for t, all_ranks in turns])

    def _on(self, key: TransferKey, step: Callable[[Incoming], Step]) -> Move:
        return self._each([step(t) if t.key == key else (t, ()) for t in self.transfers])

    def _each(self, steps: Sequence[Step]) -> Move:
        left = tuple(t for t, _ in steps if t.phase is not Phase.FREE)
        return self._replace(transfers=left), tuple(a for _, actions in steps for a in actions)


Move = tuple[DecodeRank, tuple[Action, ...]]


class Source(NamedTuple):
    """A request of P whose pages are kept to be sent.

    Fields:
        id: the router's number.
        ready: how many of its pieces have been computed, the aux row included.
        failed: given up on this rank.
    """

    id: int
    room: int
    ready: int
    failed: bool = False


class SourceState(NamedTuple):
    """What a rank of P brings to a collective round about one source.

    Fields:
        progress: 0 given up, 1 not; reduced by MIN.
        ready: 1 where nothing reads it any more and nothing will; reduced by MIN.
    """

    progress: int
    ready: int


class PrefillRank(NamedTuple):
    """A rank of P.

    Fields:
        readers: the ranks of D to which it writes, as far as they are there.
        sources: in the order of their submission.
        transfers: at most one a key and rank of D.  One that is over stays as a record of that,
            until D says that the key is over there too.
        floors: for each reader the highest floor that it has told.
    """

    me: Peer
    topology: Topology
    completion: Completion
    readers: tuple[Peer, ...] = ()
    sources: tuple[Source, ...] = ()
    transfers: tuple[Outgoing, ...] = ()
    floors: tuple[tuple[Peer, int], ...] = ()

    @property
    def targets(self) -> frozenset[int]:
        """Ranks of D to which this one writes."""
        rows = enumerate(self.topology.writers)
        return frozenset(rank for rank, writers in rows if self.me.rank in writers)

    def meet(self, reader: Peer) -> PrefillRank:
        """A rank of D is there, perhaps in another life."""
        others = {known for known in self.readers if known.rank != reader.rank}
        floors = tuple(told for told in self.floors if told[0].rank != reader.rank)
        return self._replace(
            readers=tuple(sorted(others | {reader})), floors=(*floors, (reader, 0))
        )

    def submit(self, source: int, room: int) -> Turning:
        """Keep a request's pages for a transfer of `room`, of which nothing is computed yet.  An
        offer that came before it is taken up now."""
        entered = self._replace(sources=(*self.sources, Source(source, room, 0)))
        waiting = [
            t._replace(source=source) if t.request == source and not t.closed else t
            for t in self.transfers
        ]
        return entered._replace(transfers=tuple(waiting)), ()

    def computed(self, source: int, ready: int) -> Turning:
        """The first `ready` pieces of a request can be sent."""
        grown = [s._replace(ready=ready) if s.id == source else s for s in self.sources]
        return self._replace(sources=tuple(grown)), ()

    def receive(self, message: Message) -> Turning:
        """An offer or an abort of a rank of D that is there, about a key that may not be over
        there; anything else changes nothing."""
        if not isinstance(message, Advertise | Abort):
            return self, ()
        floor = dict(self.floors).get(message.at)
        if floor is None or message.key.generation < floor:
            return self, ()
        known = any(self._is(t, message) for t in self.transfers)
        if isinstance(message, Advertise):
            return self._on(message, Outgoing.offered_again) if known else self._open(message)
        heard = self if known else self._remember(message)
        return heard._on(message, Outgoing.close)

    def take(self) -> Turning:
        """The worker takes the next piece of the oldest transfer that has one; it takes no other
        before it has called `prepared` for it."""
        ready = {source.id: source.ready for source in self.sources}
        for t in self.transfers:
            piece = t.next_piece(ready.get(t.source, 0)) if t.source is not None else None
            if piece is not None:
                return self._each([u.take(piece) if u is t else (u, ()) for u in self.transfers])
        return self, ()

    def prepared(self, key: TransferKey, to: Peer, piece: int) -> Turning:
        """A piece that was taken is ready to be posted."""
        return self._at(key, to, lambda t: t.prepared(piece))

    def settled(self, key: TransferKey, to: Peer, piece: int, outcome: Outcome) -> Turning:
        """A posted piece ended; one that did not land gives its source up."""
        ended, actions = self._at(key, to, lambda t: t.settled(piece, outcome))
        if outcome is Outcome.LANDED:
            return ended, actions
        lost = {t.source for t in self.transfers if (t.key, t.to) == (key, to)}
        given_up, more = ended._give_up({s for s in lost if s is not None})
        return given_up, (*actions, *more)

    def cancel(self, source: int) -> Turning:
        """Give a request up; the other ranks follow in the next round."""
        return self._give_up({source})

    def lose(self, reader: Peer) -> Turning:
        """A rank of D is gone, and so is its instance: what was on its way to it is given up."""
        left = self._replace(
            readers=tuple(known for known in self.readers if known != reader),
            floors=tuple(told for told in self.floors if told[0] != reader),
        )
        cut = {t.source for t in self.transfers if t.to == reader}
        given_up, actions = left._give_up({source for source in cut if source is not None})
        closed = [t.close() if t.to == reader else (t, ()) for t in given_up.transfers]
        ended, more = given_up._each(closed)
        return ended, (*actions, *more)

    def contributions(self) -> tuple[SourceState, ...]:
        """What this rank brings to the next round, a value a source."""
        return tuple(SourceState(int(not s.failed), int(self._over(s))) for s in self.sources)

    def reduced(self, together: Sequence[SourceState]) -> tuple[Turning, tuple[int, ...]]:
        """The round's result, and the sources whose pages are free now on all ranks."""
        turns = list(zip(self.sources, together, strict=True))
        freed = tuple(source.id for source, all_ranks in turns if all_ranks.ready)
        left = self._replace(sources=tuple(s for s in self.sources if s.id not in freed))
        failed = {source.id for source, all_ranks in turns if not all_ranks.progress}
        return left._give_up(failed - set(freed)), freed

    def _over(self, source: Source) -> bool:
        """Whether nothing reads a source's pages and nothing will: it was sent to all its ranks
        of D, or given up."""
        mine = [t for t in self.transfers if t.source == source.id]
        sent = {t.to.rank for t in mine if t.done}
        return (source.failed or sent >= self.targets) and not any(t.busy for t in mine)

    def _give_up(self, sources: set[int]) -> Turning:
        failed = [s._replace(failed=True) if s.id in sources else s for s in self.sources]
        steps = [
            t.close() if t.source in sources and not t.closed else (t, ()) for t in self.transfers
        ]
        return self._replace(sources=tuple(failed))._each(steps)

    def _open(self, offer: Advertise) -> Turning:
        """Begin a transfer.  Where its request is not here, it waits: that may come later, and D
        has a timeout.  A room says nothing of the request, since it may be used again."""
        opened = self._forget(offer)._remember(offer)
        here = {source.id for source in self.sources if not source.failed}
        source = offer.request if offer.request in here else None
        begun = [t._replace(source=source) if self._is(t, offer) else t for t in opened.transfers]
        return opened._replace(transfers=tuple(begun)), ()

    def _forget(self, offer: Advertise) -> PrefillRank:
        """Without what the offer says to be over, but for what a source is waiting for."""
        floors = [(at, max(f, offer.floor)) if at == offer.at else (at, f) for at, f in self.floors]
        sources = {source.id for source in self.sources}
        kept = tuple(t for t in self.transfers if t.source in sources or not _below(t, offer))
        return self._replace(transfers=kept, floors=tuple(floors))

    def _remember(self, message: Advertise | Abort) -> PrefillRank:
        offered = isinstance(message, Advertise)
        entered = Outgoing(
            key=message.key,
            me=self.me,
            to=message.at,
            request=message.request if offered else None,
            source=None,
            pieces=len(self.topology.pieces_of(message.at.rank, self.me.rank)),
            data=self.topology.pieces,
            completion=self.completion,
            places=message.places if offered else (),
        )
        return self._replace(transfers=(*self.transfers, entered))

    @staticmethod
    def _is(transfer: Outgoing, message: Advertise | Abort) -> bool:
        return transfer.key == message.key and transfer.to == message.at

    def _on(self, message: Advertise | Abort, turn: Callable[[Outgoing], Turn]) -> Turning:
        return self._at(message.key, message.at, turn)

    def _at(self, key: TransferKey, to: Peer, turn: Callable[[Outgoing], Turn]) -> Turning:
        return self._each(
            [turn(t) if t.key == key and t.to == to else (t, ()) for t in self.transfers]
        )

    def _each(self, turns: Sequence[Turn]) -> Turning:
        # of a reader that is gone only what may still read is remembered
        left = tuple(t for t, _ in turns if t.busy or t.to in self.readers)
        return self._replace(transfers=left), tuple(a for _, actions in turns for a in actions)


Turning = tuple[PrefillRank, tuple[Action, ...]]


def _below(transfer: Outgoing, offer: Advertise) -> bool:
    """Whether an offer says that a transfer to its rank is over."""
    return transfer.to == offer.at and transfer.key.generation < offer.floor and not transfer.busy
