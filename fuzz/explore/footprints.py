"""Which parts of a state an event depends on, so that it happens once for all states that agree.

Of what is on its way an event sees no more than the message or the write that it is about: it takes
that out and puts others in, whatever else there is.  So an event is made to happen in a state of
which nothing else is left, and the difference is noted.
"""

from __future__ import annotations

from typing import NamedTuple

from fuzz.explore.choices import fair
from fuzz.explore.words import Envelope, Event, Flight, Kind
from fuzz.explore.world import State, World
from reference.protocol import Side

ALL_OF_D = {
    Kind.ROUND_D,
    Kind.ADVERTISE,
    Kind.END_READING,
    Kind.RELAY_D,
    Kind.FENCE,
    Kind.CANCEL_D,
    Kind.EXPIRE,
}
ALL_OF_P = {Kind.SUBMIT_P, Kind.ROUND_P, Kind.RELAY_P}
ONE_OF_P = {Kind.TAKE, Kind.PREPARE, Kind.CANCEL_P}
NO_RANK = {Kind.SUBMIT_D, Kind.GIVE_UP, Kind.LOSE}


def ranks_of(world: World, event: Event) -> tuple[int, ...]:
    """The columns of the ranks that an event looks at or changes.  What one rank of D does may
    make another's aux row one that nobody will read, so all of D are looked at."""
    d, p, what = world.d_columns, world.p_columns, event.what
    match event.kind:
        case kind if kind in ALL_OF_D:
            return d
        case kind if kind in ALL_OF_P:
            return p
        case kind if kind in ONE_OF_P:
            return (p[event.rank],)
        case kind if kind in NO_RANK:
            return ()
        case Kind.RETRY:
            return (d[event.rank],)
        case Kind.ARRIVE:
            return (*d, p[what.writer.rank])
        case Kind.SETTLE:
            return (p[what.writer.rank],)
        case Kind.BREAK:
            return (p[what[0].writer.rank],)
        case Kind.DELIVER | Kind.DOUBLE:
            return d if what.to.side is Side.DECODE else (p[what.to.rank],)
        case Kind.NOTICE:
            return d if what.side is Side.PREFILL else (p[event.rank],)
        case Kind.KILL:
            return d if what.side is Side.DECODE else (p[event.rank],)
        case Kind.RESTART:
            return d if what is Side.DECODE else p
        case Kind.MEET:
            return (*d, p[what.rank])
    raise AssertionError(f"say what {event.kind.name} looks at")


class Change(NamedTuple):
    """What an event does to every state that agrees on what it looks at.

    Fields:
        parts: the ranks and `Around` afterwards; those that it does not look at stay as they are.
        bag, air: the numbers of what it takes out and of what it puts in.
        lost: the number of who and what has come to its end (`World.clear`).
        seen: the number of the observations.
        fair: whether fair runs take it.
    """

    parts: tuple[int, ...]
    bag: tuple[int, int]
    air: tuple[int, int]
    lost: int
    seen: int
    fair: bool


def taken(event: Event) -> tuple[tuple[Envelope, ...], tuple[Flight, ...]]:
    """The message, or the write, that an event takes from what is on its way."""
    what = event.what
    match event.kind:
        case Kind.DELIVER | Kind.DOUBLE | Kind.LOSE:
            return (what,), ()
        case Kind.ARRIVE | Kind.SETTLE:
            return (), (what,)
        case Kind.BREAK:
            return (), (what[0],)
    return (), ()


def change(world: World, event: Event, state: State) -> Change:
    """What `event` does; of `state` no more is looked at than its ranks and `Around`."""
    id = world.memo.id
    bag, air = map(id, taken(event))
    here = world.only(state, (*ranks_of(world, event), world.around_column))
    here = (*here[: world.bag_column], bag, air, here[world.around_column])
    after, seen = world.happen(here, event)
    return Change(
        parts=(*after[: world.bag_column], after[world.around_column]),
        bag=(bag, after[world.bag_column]),
        air=(air, after[world.air_column]),
        lost=world.lost(world.around(here), world.around(after)),
        seen=id(seen),
        fair=fair(world, here, event),
    )
