"""What may happen next in a world, in a fixed order: the ordinary first, the unlucky last."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from itertools import islice, product
from typing import Any, NamedTuple

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


class Group(NamedTuple):
    """Events that are found together.

    Fields:
        name: tells the group from others, in what is remembered.
        columns: the parts of a state in which they are found; `find` looks at no others.
        guards: conditions on single events of the group.
    """

    name: Hashable
    columns: tuple[int, ...]
    find: Callable[[World, State], Iterable[Event]]
    guards: tuple[Guard, ...] = ()


class Guard(NamedTuple):
    """A condition on an event, which depends on `columns` of the state alone."""

    columns: tuple[int, ...]
    holds: Callable[[World, State, Event], bool]


def groups(world: World) -> tuple[Group, ...]:
    """All groups of a world, the ordinary first."""
    return world.memo.once("groups", lambda: _groups(world))


def events(world: World, state: State) -> list[Event]:
    """All that may happen next.  Each group is looked at once for each value of its parts."""
    once, found = world.memo.once, []
    for group in groups(world):
        here = (group.name, *[state[column] for column in group.columns])
        some = once(here, lambda g=group: tuple(g.find(world, state)))
        found += [e for e in some if _allowed(world, state, e, group)] if group.guards else some
    return found


def _allowed(world: World, state: State, event: Event, group: Group) -> bool:
    for number, guard in enumerate(group.guards):
        here = (group.name, number, event, *[state[column] for column in guard.columns])
        if not world.memo.once(here, lambda g=guard: g.holds(world, state, event)):
            return False
    return True


def _groups(world: World) -> tuple[Group, ...]:
    d, p = world.d_columns, world.p_columns
    bag, air, around = world.bag_column, world.air_column, world.around_column
    ranks = (*d, *p)
    return (
        Group("new", (d[0], p[0], around), _submissions),
        Group("round d", (*d, around), _decode_round),
        Group("round p", (*p, around), _prefill_round),
        *(Group(("d", r), (d[r], *p, around), partial(_at_decode, rank=r)) for r in range(len(d))),
        *(Group(("p", r), (p[r], around), partial(_at_prefill, rank=r)) for r in range(len(p))),
        Group("relays", (*ranks, around), _relays),
        Group("bag", (bag, around), _messages),
        Group("air", (air, around), _writes),
        Group("lost", (bag, around), _losses, _rests(world)),
        Group("again", (*d, around), _retries, _rests(world, *d, around)),
        Group("lives", (*ranks, around), _lives),
    )


def _rests(world: World, *also: int) -> tuple[Guard, ...]:
    """That nothing else is under way between the ends of an event, which `also` tell."""
    return (
        Guard((*also, world.bag_column), _bag_rests),
        Guard((*also, world.air_column), _air_rests),
        Guard((*also, *world.p_columns), _writers_rest),
    )


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


def _decode_round(world: World, state: State) -> Iterator[Event]:
    # only rounds that change something
    if world.decode_round(state) is not None:
        yield Event(Kind.ROUND_D)


def _prefill_round(world: World, state: State) -> Iterator[Event]:
    if world.prefill_round(state) is not None:
        yield Event(Kind.ROUND_P)


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
    if not world.around(state).dead:
        return
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


def eager(world: World) -> tuple[Group, ...]:
    """Groups of an event that may as well come first: where there is one, no other need be looked
    at.

    Such a one commutes with whatever else may happen, now or later, and no clause can tell the
    two orders apart (an ample set of one; Clarke, Grumberg and Peled, "Model checking", chapter
    on partial order reduction).  They are: a request that comes to D, where it waits for a round,
    and the first part of a piece that lands, since only the last one ends the write.
    """
    found = {group.name: group for group in groups(world)}
    return (
        Group("request", found["new"].columns, _request),
        Group("part", found["air"].columns, _part),
    )


def _request(world: World, state: State) -> Iterable[Event]:
    return (event for event in _submissions(world, state) if event.kind is Kind.SUBMIT_D)


def _part(world: World, state: State) -> Iterable[Event]:
    early = (
        event
        for event in _writes(world, state)
        if event.kind is Kind.ARRIVE and event.what.parts + 1 < world.parts_of(event.what)
    )
    return islice(early, 1)


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
    if _may(world, world.around(state), Kind.LOSE):
        for envelope in dict.fromkeys(world.bag(state)):
            yield Event(Kind.LOSE, 0, envelope)


def _retries(world: World, state: State) -> Iterator[Event]:
    """Timers of D.  They go off once nothing else is under way between a rank and its writers: a
    message repeated sooner is one that the network doubled."""
    if not world.around(state).lost:
        return
    for me in world.decoders:
        here = world.decode_rank(state, me.rank)
        for transfer in here.transfers if here is not None else ():
            if world.retried(state, me.rank, transfer.key):
                yield Event(Kind.RETRY, me.rank, transfer.key)


Ends = tuple[TransferKey, Peer, Peer]
"""A rank of D and a process of P, and what they talk about."""


def _ends(envelope: Envelope) -> Ends:
    message = envelope.message
    if isinstance(message, Advertise | Abort):
        return message.key, message.at, envelope.to
    return message.key, envelope.to, message.writer


def _all_ends(world: World, state: State, event: Event) -> set[Ends]:
    """Between whom messages are lost or said again."""
    if event.kind is Kind.LOSE:
        return {_ends(event.what)}
    return set(map(_ends, world.retried(state, event.rank, event.what)))


def _bag_rests(world: World, state: State, event: Event) -> bool:
    bag = list(world.bag(state))
    if event.kind is Kind.LOSE:
        bag.remove(event.what)
    return _all_ends(world, state, event).isdisjoint(map(_ends, bag))


def _air_rests(world: World, state: State, event: Event) -> bool:
    flying = ((flight.key, flight.to, flight.writer) for flight in world.flights(state))
    return _all_ends(world, state, event).isdisjoint(flying)


def _writers_rest(world: World, state: State, event: Event) -> bool:
    """Whether no writer is about to send what would come between."""
    alive = [world.prefill(state, writer.rank) for writer in world.writers]
    begun = set()
    for prefill in filter(None, alive):
        piece = prefill.taken or next(iter(prefill.rank.take()[1]), None)
        if piece is not None:
            begun.add((piece.key, piece.to, prefill.rank.me))
    return _all_ends(world, state, event).isdisjoint(begun)
