"""One turn of one rank: what it is told, what it becomes, and what it does to the outside.

A turn is a function of the rank's value and of the call alone, so that the world computes each
once.  Observations are made here, from the actions that the rank asks for.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from fuzz.explore.words import Envelope, Flight
from reference.protocol import (
    Action,
    Closed,
    Drop,
    Dropped,
    Enter,
    Moved,
    Observation,
    Phase,
    Post,
    Posted,
    ReadAux,
    Reading,
    Send,
    Sent,
    Take,
    Taken,
    TransferKey,
)


class Prefill(NamedTuple):
    """A rank of P, and the piece that its worker has taken."""

    rank: Any
    taken: Take | None = None


class Effects(NamedTuple):
    """What a rank did in one turn, in order.

    Fields:
        failed: transfers that it gave up, as a rank of D.
        sources: requests that it gave up, as a rank of P.
    """

    envelopes: tuple[Envelope, ...] = ()
    flights: tuple[Flight, ...] = ()
    observations: tuple[Observation, ...] = ()
    failed: tuple[TransferKey, ...] = ()
    sources: tuple[int, ...] = ()


def decode_turn(
    rank: Any, method: str, args: tuple[Any, ...], named: TransferKey | None, *, round: int
) -> tuple[Any, Effects]:
    """Call a method of a rank of D whose aux row names `named`."""
    after, actions = getattr(rank, method)(*args)
    envelopes: list[Envelope] = []
    seen: list[Observation] = []
    failed: list[TransferKey] = []
    left = list(actions)
    while left:
        action = left.pop(0)
        match action:
            case Send(to, message):
                envelopes.append(Envelope(to, message))
                seen.append(Sent(rank.me, to, message))
            case Enter(key, phase):
                seen.append(Moved(rank.me, key, phase, round))
                if phase is Phase.FAILED:
                    failed.append(key)
                if phase is Phase.LIVE:
                    seen.append(Reading(rank.me, key))
            case ReadAux(key):
                after, more = after.aux(key, named)
                left[:0] = more
    if method == "end_reading":
        seen.append(Reading(rank.me, args[0], ended=True))
    return after, Effects(tuple(envelopes), (), tuple(seen), tuple(failed))


def prefill_turn(before: Prefill, method: str, args: tuple[Any, ...]) -> tuple[Prefill, Effects]:
    """Call a method of a rank of P."""
    after, actions = getattr(before.rank, method)(*args)
    return prefill_actions(before, after, actions)


def prefill_actions(
    before: Prefill, after: Any, actions: Iterable[Action]
) -> tuple[Prefill, Effects]:
    """Carry out the actions with which a rank of P became `after`."""
    me, taken = after.me, before.taken
    envelopes: list[Envelope] = []
    flights: list[Flight] = []
    seen: list[Observation] = list(_newly_closed(before.rank, after))
    for action in actions:
        match action:
            case Send(to, message):
                envelopes.append(Envelope(to, message))
                seen.append(Sent(me, to, message))
            case Take(key, to, piece):
                taken = action
                seen.append(Taken(me, key, to, piece))
            case Drop(key, to, piece):
                taken = None
                seen.append(Dropped(me, key, to, piece))
            case Post(key, to, piece, note):
                taken = None
                transfer = next(t for t in after.transfers if (t.key, t.to) == (key, to))
                seen.append(Posted(me, key, to, piece, transfer.source))
                flights.append(Flight(key, me, to, piece, note, transfer.places[0][0]))
    had_failed = {source.id for source in before.rank.sources if source.failed}
    gave_up = tuple(s.id for s in after.sources if s.failed and s.id not in had_failed)
    return Prefill(after, taken), Effects(
        tuple(envelopes), tuple(flights), tuple(seen), sources=gave_up
    )


def _newly_closed(before: Any, after: Any) -> Iterable[Closed]:
    open_before = {(t.key, t.to): t.closed for t in before.transfers}
    for t in after.transfers:
        if t.closed and not open_before.get((t.key, t.to), False):
            yield Closed(after.me, t.key, t.to)
