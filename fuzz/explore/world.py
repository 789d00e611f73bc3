"""A P and a D instance, the network between them, and everything that may happen next.

The ranks are the protocol's own code (`systems.load_ranks`); the world carries out their actions:
messages wait in a bag from which they are taken in any order, and posted writes land in parts
while everything else goes on.

The whole of a run is judged by `reference.drain`, from what was sent, posted and landed alone.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from msgspec.structs import replace

from fuzz.explore.parts import Parts, State
from fuzz.explore.turns import Effects, Prefill, decode_turn, prefill_actions, prefill_turn
from fuzz.explore.words import Around, Envelope, Event, Flight, Kind
from reference.protocol import (
    Arrived,
    Delivered,
    Died,
    Fenced,
    Held,
    Observation,
    Outcome,
    Peer,
    Reduced,
    Reserved,
    Sent,
    Settled,
    Side,
    SourceFreed,
    TransferKey,
)

Next = tuple[State, tuple[Observation, ...]]


class World(Parts):
    """What may happen from a state, and what the next state then is."""

    def start(self) -> State:
        """Everybody is there, and nothing has been asked for."""
        topology = self.bounds.topology
        parts: list[Any] = []
        for me in self.decoders:
            rank = self._born(me)
            for writer in topology.writers[me.rank]:
                rank = rank.meet(self.writers[writer])
            parts.append(rank)
        for me in self.writers:
            rank = self._born(me)
            for reader in sorted(rank.targets):
                rank = rank.meet(self.decoders[reader])
            parts.append(Prefill(rank))
        around = Around(self.bounds.faults, self.bounds.aborts, self.bounds.restarts)
        return tuple(map(self.memo.id, (*parts, (), (), around)))

    def _born(self, me: Peer) -> Any:
        """A rank at the start of a life, which knows nobody."""
        topology = self.bounds.topology
        if me.side is Side.DECODE:
            return self.ranks.DecodeRank(me, topology)
        return self.ranks.PrefillRank(me, topology, self.bounds.completion)

    # What happens.

    def happen(self, state: State, event: Event) -> tuple[State, tuple[Observation, ...]]:
        """The state after `event`, which must be one of those that may happen, and what an
        observer notes down of it."""
        after, seen = getattr(self, f"_{event.kind.name.lower()}")(state, event)
        return after if after[-1] == state[-1] else self._cleared(after, self.around(state)), seen

    def _submit_d(self, state: State, event: Event) -> Next:
        around = self.around(state)
        request = around.at_d
        waiting = around.waiting
        if request not in around.given_up:
            waiting = (*waiting, request)
        return self._with(state, around._replace(at_d=request + 1, waiting=waiting)), ()

    def _submit_p(self, state: State, event: Event) -> Next:
        around = self.around(state)
        request, room = around.at_p, self.bounds.rooms[around.at_p]
        state = self._with(state, around._replace(at_p=request + 1))
        if request in around.given_up:
            return state, ()
        seen: tuple[Observation, ...] = ()
        pieces = self.bounds.topology.pieces + 1
        for writer in self.writers:
            state, held = self._prefill(state, writer.rank, "submit", (request, room))
            state, more = self._prefill(state, writer.rank, "computed", (request, pieces))
            here = self.lives(state, Side.PREFILL)[writer.rank]
            seen += (Held(here, request, room), *held, *more)
        return state, seen

    def decode_round(self, state: State) -> Next | None:
        """A round of D with the reservations that follow it; None where it changes nothing."""
        ids = state[: len(self.decoders)]
        if any(self.memo.values[part] is None for part in ids):
            return None
        alone = self.only(state, (*self.d_columns, self.around_column))
        turn = self.memo.once(("round", alone), lambda: self._decode_round(alone))
        if turn is None:
            return None
        after, seen = turn
        merged = (*after[: len(ids)], *state[len(ids) : -1], after[-1])
        return self._post(merged, into=self.bag(after)), seen

    def _decode_round(self, alone: State) -> Next | None:
        """The same from a state with nothing on its way, so that it is computed once for all."""
        ranks = range(len(self.decoders))
        together = self.ranks.decode_together(
            [self.decode_rank(alone, rank).contributions() for rank in ranks]
        )
        after, seen = alone, ()
        for rank in ranks:
            after, more = self._decode(after, rank, "reduced", (together,))
            seen += more
        after, more = self._reserve(after)
        if after == alone:
            return None
        lives = self.lives(alone, Side.DECODE)
        rounds = tuple(Reduced(me, 1, len(together)) for me in lives)
        return after, rounds + seen + more

    def _reserve(self, state: State) -> Next:
        """Reserve for those that wait, as far as quarantine and destinations allow."""
        around, seen = self.around(state), ()
        waiting = tuple(r for r in around.waiting if r not in around.given_up)
        while waiting and all(self.decode_rank(state, r.rank).admits for r in self.decoders):
            held = {t.places[0][0] for t in self.decode_rank(state, 0).transfers}
            slot = next((s for s in range(self.bounds.slots) if s not in held), None)
            if slot is None:
                break
            request, *rest = waiting
            around = self.around(state)
            reserved = (*around.reserved, request)
            state = self._with(state, around._replace(reserved=reserved))
            for me in self.decoders:
                places = ((slot,),)
                rank, key = self.decode_rank(state, me.rank).reserve(
                    self.bounds.rooms[request], request, places
                )
                state = self._put(state, me.rank, rank)
                seen += (Reserved(rank.me, key, (slot,)),)
                if not self.bounds.advertise_apart:
                    state, more = self._decode(state, me.rank, "advertise", (key,))
                    seen += more
            waiting = tuple(rest)
        around = self.around(state)
        return self._with(state, around._replace(waiting=waiting)), seen

    def prefill_round(self, state: State) -> Next | None:
        """A round of P; None where it changes nothing."""
        first = len(self.decoders)
        ids = state[first : self.bag_column]
        if any(self.memo.values[part] is None for part in ids):
            return None
        turn = self.memo.once(("round", ids), lambda: self._prefill_round(state))
        if turn is None:
            return None
        parts, effects = turn
        after = (*state[:first], *parts, *state[self.bag_column :])
        return self._given_up(self._carry(after, effects), effects.sources), effects.observations

    def _prefill_round(self, state: State) -> tuple[State, Effects] | None:
        before = [self.prefill(state, writer.rank) for writer in self.writers]
        together = self.ranks.prefill_together([p.rank.contributions() for p in before if p])
        parts, turns = [], []
        for prefill in before:
            assert prefill is not None, "a round takes all ranks"
            (rank, actions), freed = prefill.rank.reduced(together)
            after, effects = prefill_actions(prefill, rank, actions)
            parts.append(self.memo.id(after))
            frees = tuple(SourceFreed(rank.me, source, 0) for source in freed)
            turns.append(effects._replace(observations=effects.observations + frees))
        if all(p == self.memo.id(b) for p, b in zip(parts, before, strict=True)):
            return None
        return tuple(parts), Effects(
            envelopes=tuple(e for effects in turns for e in effects.envelopes),
            observations=tuple(o for effects in turns for o in effects.observations),
            sources=tuple(s for effects in turns for s in effects.sources),
        )

    def _round_d(self, state: State, event: Event) -> Next:
        turn = self.decode_round(state)
        assert turn is not None, "only rounds that change something happen"
        return turn

    def _round_p(self, state: State, event: Event) -> Next:
        turn = self.prefill_round(state)
        assert turn is not None, "only rounds that change something happen"
        return turn

    def _advertise(self, state: State, event: Event) -> Next:
        return self._decode(state, event.rank, "advertise", (event.what,))

    def _take(self, state: State, event: Event) -> Next:
        return self._prefill(state, event.rank, "take", ())

    def _prepare(self, state: State, event: Event) -> Next:
        return self._prefill(state, event.rank, "prepared", tuple(event.what))

    def _arrive(self, state: State, event: Event) -> Next:
        flight: Flight = event.what
        parts = flight.parts + 1
        total = self.parts_of(flight)
        over = parts == total and (flight.settled or self._dead(state, flight.writer))
        landed = () if over else (replace(flight, parts=parts),)
        state = self._fly(state, out=(flight,), into=landed)
        seen = Arrived(flight.to, flight.key, flight.writer, flight.piece, parts, total)
        if parts < total:
            return state, (seen,)
        if flight.piece == self.bounds.topology.pieces:
            state = self._name(state, flight)
        if flight.note is not None:
            state = self._post(state, into=(Envelope(flight.to, flight.note),))
        if over or self.bounds.settle_apart:
            return state, (seen,)
        state, more = self._settle(state, Event(Kind.SETTLE, 0, *landed))
        return state, (seen, *more)

    def _settle(self, state: State, event: Event) -> Next:
        flight: Flight = event.what
        landed = flight.parts == self.parts_of(flight)
        outcome = Outcome.LANDED if landed else Outcome.BROKEN
        return self._settled(self._fly(state, out=(flight,)), flight, outcome)

    def _break(self, state: State, event: Event) -> Next:
        flight, outcome = event.what
        over = flight.parts == self.parts_of(flight)
        left = () if over else (replace(flight, settled=True),)
        state = self._fly(state, out=(flight,), into=left)
        around = self._spend(state)._replace(broken=True)
        return self._settled(self._with(state, around), flight, outcome)

    def _settled(self, state: State, flight: Flight, outcome: Outcome) -> Next:
        call = (flight.key, flight.to, flight.piece, outcome)
        known = Settled(flight.writer, flight.key, flight.to, flight.piece, outcome)
        state, seen = self._prefill(state, flight.writer.rank, "settled", call)
        return state, (known, *seen)

    def _deliver(self, state: State, event: Event) -> Next:
        envelope: Envelope = event.what
        state = self._post(state, out=(envelope,))
        to, message = envelope.to, envelope.message
        turn = self._decode if to.side is Side.DECODE else self._prefill
        part = to.rank if to.side is Side.DECODE else len(self.decoders) + to.rank
        after, seen = turn(state, to.rank, "receive", (message,))
        return after, (Delivered(to, message, after[part] != state[part]), *seen)

    def _retry(self, state: State, event: Event) -> Next:
        again = self.retried(state, event.rank, event.what)
        me = self.decode_rank(state, event.rank).me
        return self._post(state, into=again), tuple(Sent(me, e.to, e.message) for e in again)

    def retried(self, state: State, rank: int, key: TransferKey) -> tuple[Envelope, ...]:
        """What a timer of D sends again, to those that are alive."""
        _, effects = self._decode_turn(state, rank, "retry", (key,))
        return tuple(e for e in effects.envelopes if not self._dead(state, e.to))

    def _end_reading(self, state: State, event: Event) -> Next:
        return self._decode(state, event.rank, "end_reading", (event.what,))

    def _relay_d(self, state: State, event: Event) -> Next:
        """The router's word, or a timeout, reaches all ranks of D in the same step."""
        seen: tuple[Observation, ...] = ()
        for me in self.decoders:
            state, more = self._decode(state, me.rank, "cancel", (event.what,))
            seen += more
        return state, seen

    def _relay_p(self, state: State, event: Event) -> Next:
        """The router's word reaches all ranks of P in the same step."""
        seen: tuple[Observation, ...] = ()
        for writer in self.writers:
            if self.prefill(state, writer.rank) is not None:
                state, more = self._prefill(state, writer.rank, "cancel", (event.what,))
                seen += more
        return state, seen

    def _notice(self, state: State, event: Event) -> Next:
        peer: Peer = event.what
        if peer.side is Side.DECODE:
            return self._prefill(state, event.rank, "lose", (peer,))
        here, around = self.decode_rank(state, event.rank).me, self.around(state)
        around = around._replace(noticed=around.noticed | {(here, peer)})
        return self._decode(self._with(state, around), event.rank, "lose", (peer,))

    def _fence(self, state: State, event: Event) -> Next:
        peer, here = event.what, self.decode_rank(state, event.rank).me
        around = self.around(state)
        state = self._with(state, around._replace(fenced=around.fenced | {(here, peer)}))
        state, seen = self._decode(state, event.rank, "fence", (peer,))
        return state, (Fenced(here, peer), *seen)

    def _give_up(self, state: State, event: Event) -> Next:
        """The router has waited too long for D to take a request."""
        around = self.around(state)
        at_d = max(around.at_d, event.what + 1)
        around = around._replace(at_d=at_d, given_up=around.given_up | {event.what})
        return self._with(state, around), ()

    def _cancel_d(self, state: State, event: Event) -> Next:
        around = self.around(state)
        around = around._replace(aborts=around.aborts - 1)
        return self._decode(self._with(state, around), event.rank, "cancel", (event.what,))

    def _cancel_p(self, state: State, event: Event) -> Next:
        around = self.around(state)
        given_up = around.given_up | {event.what}
        around = around._replace(aborts=around.aborts - 1, given_up=given_up)
        return self._prefill(self._with(state, around), event.rank, "cancel", (event.what,))

    def _expire(self, state: State, event: Event) -> Next:
        """A timeout: because of something that went wrong already, or of a message that is late."""
        around = self.around(state)
        if not around.dead and not around.broken:
            state = self._with(state, self._spend(state))
        return self._decode(state, event.rank, "expire", (event.what,))

    def _lose(self, state: State, event: Event) -> Next:
        around = self._spend(state)._replace(lost=True)
        return self._with(self._post(state, out=(event.what,)), around), ()

    def _double(self, state: State, event: Event) -> Next:
        """A message comes, and will come again."""
        state, seen = self._deliver(self._with(state, self._spend(state)), event)
        return self._post(state, into=(event.what,)), seen

    def _kill(self, state: State, event: Event) -> Next:
        """A rank of P dies, or D as a whole.  What a dead process posted flies on."""
        peer: Peer = event.what
        dead = self.lives(state, Side.DECODE) if peer.side is Side.DECODE else (peer,)
        return self._end(self._with(state, self._spend(state)), dead)

    def _end(self, state: State, dead: tuple[Peer, ...]) -> Next:
        around = self.around(state)
        # the router sees that an instance is broken
        given_up = around.given_up | set(range(max(around.at_d, around.at_p)))
        around = around._replace(dead=around.dead | set(dead), given_up=given_up)
        for process in dead:
            part = 0 if process.side is Side.DECODE else len(self.decoders)
            state = self._put(state, part + process.rank, None)
        return self._with(state, around), tuple(map(Died, dead))

    def _restart(self, state: State, event: Event) -> Next:
        """An instance begins another life; whoever is left of the former one ends."""
        side: Side = event.what
        state, seen = self._end(state, self.lives(state, side))
        around = self.around(state)
        life = 1 + max(peer.incarnation for peer in around.dead if peer.side is side)
        around = around._replace(restarts=around.restarts - 1)
        if side is Side.DECODE:
            around = around._replace(waiting=(), reserved=(), aux=frozenset())
        for me in self.decoders if side is Side.DECODE else self.writers:
            born = self._born(me._replace(incarnation=life))
            if side is Side.DECODE:
                state = self._put(state, me.rank, born)
            else:
                state = self._put(state, len(self.decoders) + me.rank, Prefill(born))
        return self._with(state, around), seen

    def _meet(self, state: State, event: Event) -> Next:
        """A rank of D and a process of P are introduced, one of which is new: whom the other knew
        in its place is gone."""
        writer: Peer = event.what
        rank, prefill = self.decode_rank(state, event.rank), self.prefill(state, writer.rank)
        assert prefill is not None, "who meets is alive"
        reader, seen = rank.me, ()
        former = [(event.rank, old) for old in rank.writers if old.rank == writer.rank]
        former += [(writer.rank, old) for old in prefill.rank.readers if old.rank == reader.rank]
        for here, old in former:
            if old not in (writer, reader):
                state, more = self._notice(state, Event(Kind.NOTICE, here, old))
                seen += more
        rank, prefill = self.decode_rank(state, event.rank), self.prefill(state, writer.rank)
        state = self._put(state, event.rank, rank.meet(writer))
        met = prefill._replace(rank=prefill.rank.meet(reader))
        return self._put(state, len(self.decoders) + writer.rank, met), seen

    def _cleared(self, state: State, before: Around) -> State:
        """The state without what came to its end with those who have died since `before`."""
        nothing, lost = self.memo.id(()), self.lost(before, self.around(state))
        bag, air = (
            self.carried(state[column], nothing, nothing, lost)
            for column in (self.bag_column, self.air_column)
        )
        return (*state[: self.bag_column], bag, air, state[-1])

    def lost(self, before: Around, after: Around) -> int:
        """The number of what `carried` must know of those that are gone, if some are newly so."""
        gone = (after.dead, after.fenced)
        return self.memo.id(gone if gone != (before.dead, before.fenced) else ((), ()))

    def carried(self, number: int, out: int, into: int, lost: int) -> int:
        """What is on its way after some was taken out and other put in, all by their numbers.
        `lost` are all who have died, and the pairs (rank of D, process of P) between which no
        write is possible any more."""
        values = self.memo.values
        after = self.refilled(number, values[out], values[into])
        dead, fenced = values[lost]
        if not dead and not fenced:
            return after
        over = (item for item in values[after] if self._is_over(item, dead, fenced))
        return self.refilled(after, tuple(over), ())

    def _is_over(
        self,
        item: Envelope | Flight,
        dead: Collection[Peer],
        fenced: Collection[tuple[Peer, Peer]],
    ) -> bool:
        """Whether nothing is left to happen of something that was on its way."""
        if isinstance(item, Envelope):
            return item.to in dead
        can_land = item.parts < self.parts_of(item) and item.to not in dead
        will_be_told = not item.settled and item.writer not in dead
        return (item.to, item.writer) in fenced or not (can_land or will_be_told)

    # How a rank takes its turn.

    def _decode(self, state: State, rank: int, method: str, args: tuple[Any, ...]) -> Next:
        """A turn of a rank of D, and what it does to the outside."""
        part, effects = self._decode_turn(state, rank, method, args)
        state = self._carry((*state[:rank], part, *state[rank + 1 :]), effects)
        state = self._unread(state)
        reserved = self.around(state).reserved
        failed = [reserved[key.generation - 1] for key in effects.failed]
        return self._given_up(state, failed), effects.observations

    def _decode_turn(
        self, state: State, rank: int, method: str, args: tuple[Any, ...]
    ) -> tuple[int, Effects]:
        named = self._aux_of(state, rank, args) if method == "receive" else None
        # all ranks are in a round at once: what happens in one is told from all that does not
        round = 0 if method == "reduced" else -1 - rank
        before = self.decode_rank(state, rank)
        return self.memo.once(
            ("turn", state[rank], method, args, named),
            lambda: self._numbered(decode_turn(before, method, args, named, round=round)),
        )

    def _aux_of(self, state: State, rank: int, args: tuple[Any, ...]) -> Any:
        """What a rank of D would read in the aux row of the key that a message is about."""
        here = self.decode_rank(state, rank)
        for transfer in here.transfers:
            if transfer.key == args[0].key:
                place = (here.me, transfer.places[0][0])
                rows = self.around(state).aux
                return next((key for *at, key in rows if tuple(at) == place), None)
        return None

    def _prefill(self, state: State, rank: int, method: str, args: tuple[Any, ...]) -> Next:
        """A turn of a rank of P, and what it does to the outside."""
        at = len(self.decoders) + rank
        part, effects = self.memo.once(
            ("turn", state[at], method, args),
            lambda: self._numbered(prefill_turn(self.memo.values[state[at]], method, args)),
        )
        state = self._carry((*state[:at], part, *state[at + 1 :]), effects)
        return self._given_up(state, effects.sources), effects.observations

    def _numbered(self, turn: tuple[Any, Effects]) -> tuple[int, Effects]:
        return self.memo.id(turn[0]), turn[1]
