"""What may happen next in a world, in a fixed order: the ordinary first, the unlucky last."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from fuzz.explore.words import Around, Envelope, Event, Kind
from fuzz.explore.world import State, World
from reference.protocol import (
    Abort,
    Advertise,
    Outcome,
    Peer,
    Phase,
    Side,
    TransferKey,
)

BEFORE_LIVE = (Phase.RESERVED, Phase.ADVERTISED, Phase.LANDED)


def events(world: World, state: State) -> list[Event]:
    """All that may happen next.  Each part's share is worked out once for each of its values."""
    once, d, around = world.memo.once, len(world.decoders), state[-1]
    found = list(once(("new", state[0], state[d], around), lambda: _submissions(world, state)))
    # only rounds that change something
    if world.decode_round(state) is not None:
        found.append(Event(Kind.ROUND_D))
    if world.prefill_round(state) is not None:
        found.append(Event(Kind.ROUND_P))
    for rank in range(d):
        here = ("d", rank, state[rank], around, *state[d : world.net])
        found += once(here, lambda r=rank: tuple(_at_decode(world, state, r)))
    for rank in range(len(world.writers)):
        here = ("p", rank, state[d + rank], around)
        found += once(here, lambda r=rank: tuple(_at_prefill(world, state, r)))
    told = ("relays", *state[: world.net], around)
    found += once(told, lambda: tuple(_relays(world, state)))
    found += once(("bag", state[-3], around), lambda: tuple(_messages(world, state)))
    found += once(("air", state[-2], around), lambda: tuple(_writes(world, state)))
    if _may(world, world.around(state), Kind.LOSE):
        found += _losses(world, state)
    if world.around(state).lost:
        found += _retries(world, state)
    if world.around(state).dead:
        found += _lives(world, state)
    return found


def fair(world: World, state: State, event: Event) -> bool:
    """Whether a fair run takes such an event in the end.  A timeout is none of the faults where
    nothing else can come."""
    if event.kind is Kind.EXPIRE:
        around = world.around(state)
        return bool(around.dead) or around.broken
    return event.kind < Kind.CANCEL_D


def _may(world: World, around: Around, fault: Kind) -> bool:
    """Whether this may go wrong."""
    bounds = world.bounds
    return around.faults > 0 and (around.faults < bounds.faults or fault in bounds.first)


def _submissions(world: World, state: State) -> tuple[Event, ...]:
    """Requests come in order, to both sides; none once an instance is broken."""
    around, rooms = world.around(state), world.bounds.rooms
    decode, prefill = world.decode_rank(state, 0), world.prefill(state, 0)
    if decode is None or prefill is None or _broken(around, decode.me, prefill.rank.me):
        return ()
    at_d = {around.reserved[t.key.generation - 1] for t in decode.transfers} | {*around.waiting}
    at_p = {source.id for source in prefill.rank.sources}
    found = []
    # memory that is in quarantine for ever keeps others waiting
    left = (*around.waiting, *range(around.at_d, len(rooms)))
    refused = next((request for request in left if request not in around.given_up), None)
    if around.broken and at_d and refused is not None:
        found.append(Event(Kind.GIVE_UP, 0, refused))
    for kind, request, still_open in (
        (Kind.SUBMIT_D, around.at_d, at_d),
        (Kind.SUBMIT_P, around.at_p, at_p),
    ):
        if kind is Kind.SUBMIT_D and len(at_d) >= world.bounds.slots:
            continue  # to wait at the router or at D is the same
        if request < len(rooms) and not any(
            rooms[earlier] == rooms[request] for earlier in still_open - around.given_up
        ):
            found.append(Event(kind))
    return tuple(found)


def _at_decode(world: World, state: State, rank: int) -> Iterator[Event]:
    here, around = world.decode_rank(state, rank), world.around(state)
    if here is None:
        return
    for transfer in here.transfers:
        key, phase = transfer.key, transfer.phase
        if phase is Phase.RESERVED:
            yield Event(Kind.ADVERTISE, rank, key)
        if transfer.reading:
            yield Event(Kind.END_READING, rank, key)
        hopeless = _hopeless(world, state, transfer)
        if phase is Phase.ABORTED and (hopeless or _may(world, around, Kind.EXPIRE)):
            yield Event(Kind.EXPIRE, rank, key)
        if phase in BEFORE_LIVE:
            given_up = around.reserved[key.generation - 1] in around.given_up
            if around.aborts and not given_up:
                yield Event(Kind.CANCEL_D, rank, key)
    yield from _notices(world, around, here.me)
    if rank == 0 and _may(world, around, Kind.KILL):
        yield Event(Kind.KILL, 0, here.me)


def _relays(world: World, state: State) -> Iterator[Event]:
    """What the router tells an instance of requests that somebody gave up, and D's timeouts where
    no writer will answer."""
    around = world.around(state)
    ranks = [world.decode_rank(state, me.rank) for me in world.decoders]
    for column in zip(*(here.transfers for here in ranks if here is not None), strict=True):
        key = column[0].key
        given_up = around.reserved[key.generation - 1] in around.given_up
        # once a rank of D has failed, the others learn it in the next round
        if all(t.phase in BEFORE_LIVE for t in column) and (
            given_up or any(_hopeless(world, state, t) for t in column)
        ):
            yield Event(Kind.RELAY_D, 0, key)
    alive = [world.prefill(state, writer.rank) for writer in world.writers]
    sources = [s for prefill in alive if prefill for s in prefill.rank.sources if not s.failed]
    for request in sorted({s.id for s in sources} & around.given_up):
        yield Event(Kind.RELAY_P, 0, request)


def _hopeless(world: World, state: State, transfer: Any) -> bool:
    """Whether a writer that is waited for will not answer: it is dead, or stained."""
    for writer in transfer.undrained:
        prefill = world.prefill(state, writer.rank)
        if (
            prefill is None
            or writer in world.around(state).dead
            or any(
                t.stained
                for t in prefill.rank.transfers
                if (t.key, t.to) == (transfer.key, transfer.me)
            )
        ):
            return True
    return False


def _notices(world: World, around: Around, me: Peer) -> Iterator[Event]:
    """What a rank of D learns of writers that are dead."""
    for peer in sorted(around.dead):
        if peer.side is Side.PREFILL and peer.rank in world.bounds.topology.writers[me.rank]:
            if (me, peer) not in around.noticed:
                yield Event(Kind.NOTICE, me.rank, peer)
            elif (me, peer) not in around.fenced:
                yield Event(Kind.FENCE, me.rank, peer)


def _at_prefill(world: World, state: State, rank: int) -> Iterator[Event]:
    here, around = world.prefill(state, rank), world.around(state)
    if here is None:
        return
    if here.taken is not None:
        yield Event(Kind.PREPARE, rank, here.taken)
    elif here.rank.take()[1]:
        yield Event(Kind.TAKE, rank)
    for source in here.rank.sources:
        if around.aborts and not source.failed and source.id not in around.given_up:
            yield Event(Kind.CANCEL_P, rank, source.id)
    for peer in here.rank.readers:
        if peer in around.dead:
            yield Event(Kind.NOTICE, rank, peer)
    if _may(world, around, Kind.KILL):
        yield Event(Kind.KILL, rank, here.rank.me)


def _broken(around: Around, *ranks: Peer) -> bool:
    """Whether some process of the life of one of these has ended."""
    lives = {(peer.side, peer.incarnation) for peer in around.dead}
    return any((me.side, me.incarnation) in lives for me in ranks)


def _lives(world: World, state: State) -> Iterator[Event]:
    """Instances that may start again, and processes that then have to meet."""
    around, decode = world.around(state), world.lives(state, Side.DECODE)
    prefill = world.lives(state, Side.PREFILL)
    for side, alive, all_ranks in (
        (Side.DECODE, decode, world.decoders),
        (Side.PREFILL, prefill, world.writers),
    ):
        if around.restarts and len(alive) < len(all_ranks):
            yield Event(Kind.RESTART, 0, side)
    for reader, writer in product(decode, prefill):
        if writer.rank in world.bounds.topology.writers[reader.rank]:
            known = world.decode_rank(state, reader.rank).writers
            knows = world.prefill(state, writer.rank).rank.readers
            if writer not in known or reader not in knows:
                yield Event(Kind.MEET, reader.rank, writer)


def eager(world: World, state: State, found: list[Event]) -> list[Event]:
    """The events to look at, of those that may happen: all, or one that may as well come first.

    Such a one commutes with whatever else may happen, now or later, and no clause can tell the
    two orders apart (an ample set of one; Clarke, Grumberg and Peled, "Model checking", chapter
    on partial order reduction).  They are: a request that comes to D, where it waits for a round,
    and the first part of a piece that lands, since only the last one ends the write.
    """
    for event in found:
        if event.kind is Kind.SUBMIT_D:
            return [event]
        if event.kind is Kind.ARRIVE and event.what.parts + 1 < world.parts_of(event.what):
            return [event]
    return found


def _messages(world: World, state: State) -> Iterator[Event]:
    distinct = dict.fromkeys(world.bag(state))
    for envelope in distinct:
        yield Event(Kind.DELIVER, 0, envelope)
    if _may(world, world.around(state), Kind.DOUBLE):
        for envelope in distinct:
            yield Event(Kind.DOUBLE, 0, envelope)


def _writes(world: World, state: State) -> Iterator[Event]:
    around = world.around(state)
    breaks = _may(world, around, Kind.BREAK)
    for flight in world.flights(state):
        there = flight.to not in around.dead
        alive = flight.writer not in around.dead
        if flight.parts < world.parts_of(flight) and there:
            yield Event(Kind.ARRIVE, 0, flight)
        elif alive and not flight.settled:
            yield Event(Kind.SETTLE, 0, flight)
        if breaks and alive and there and not flight.settled:
            for outcome in (Outcome.BROKEN, Outcome.UNKNOWN):
                yield Event(Kind.BREAK, 0, (flight, outcome))


def _losses(world: World, state: State) -> Iterator[Event]:
    """Messages that the network loses.  It does so once nothing else is under way between the two:
    until then one that is lost is as good as one that is late."""
    for envelope in dict.fromkeys(world.bag(state)):
        key, ends = envelope.message.key, _ends(envelope)
        if _at_rest(world, state, key, ends, but=envelope):
            yield Event(Kind.LOSE, 0, envelope)


def _retries(world: World, state: State) -> Iterator[Event]:
    """Timers of D.  They go off once nothing else is under way between a rank and its writers: a
    message repeated sooner is one that the network doubled."""
    for me in world.decoders:
        here = world.decode_rank(state, me.rank)
        for transfer in here.transfers if here is not None else ():
            again = world.retried(state, me.rank, transfer.key)
            if again and all(_at_rest(world, state, transfer.key, _ends(e)) for e in again):
                yield Event(Kind.RETRY, me.rank, transfer.key)


def _ends(envelope: Envelope) -> tuple[Peer, Peer]:
    """The rank of D and the process of P between which a message is."""
    message = envelope.message
    if isinstance(message, Advertise | Abort):
        return message.at, envelope.to
    return envelope.to, message.writer


def _at_rest(
    world: World,
    state: State,
    key: TransferKey,
    ends: tuple[Peer, Peer],
    *,
    but: Envelope | None = None,
) -> bool:
    """Whether no message and no write about `key` is under way between two ends, but one."""
    bag = list(world.bag(state))
    if but is not None:
        bag.remove(but)
    if any(e.message.key == key and _ends(e) == ends for e in bag):
        return False
    here, there = ends
    if any((f.key, f.to, f.writer) == (key, here, there) for f in world.flights(state)):
        return False
    prefill = world.prefill(state, there.rank)
    if prefill is None or prefill.rank.me != there:
        return True
    piece = prefill.taken or next(iter(prefill.rank.take()[1]), None)
    return piece is None or (piece.key, piece.to) != (key, here)
