"""The drain contract of one key at the ranks of D: order, S1 for what becomes free, S2, S5 to S7.

Each function takes the value of a key and what was seen, and returns the next value or raises
`Violation`; `reference.drain.observe` is where they are called from.
"""

from __future__ import annotations

from collections.abc import Callable

from reference.drain_state import (
    IN_ONE_ROUND,
    Clause,
    Transfer,
    fail,
    name,
    name_key,
    name_write,
    shrunk,
)
from reference.protocol import (
    Abort,
    Ack,
    Advertise,
    Delivered,
    Landed,
    Moved,
    Phase,
    Reading,
    Reserved,
    Sent,
    Side,
    Topology,
)

_NEXT: dict[Phase | None, tuple[Phase, ...]] = {
    None: (),  # Reserved is how a key begins
    Phase.RESERVED: (Phase.ADVERTISED, Phase.FAILED),
    Phase.ADVERTISED: (Phase.LANDED, Phase.FAILED),
    Phase.LANDED: (Phase.LIVE, Phase.FAILED),
    Phase.LIVE: (Phase.FREE,),
    Phase.FAILED: (Phase.ABORTED, Phase.RELEASABLE),
    Phase.ABORTED: (Phase.LOCAL_DRAINED, Phase.QUARANTINED),
    Phase.QUARANTINED: (Phase.LOCAL_DRAINED,),
    Phase.LOCAL_DRAINED: (Phase.RELEASABLE,),
    Phase.RELEASABLE: (Phase.FREE,),
    Phase.FREE: (),
}
_DRAINED = (None, Phase.LOCAL_DRAINED, Phase.RELEASABLE, Phase.FREE)
_OVER = (None, Phase.LIVE, Phase.RELEASABLE, Phase.FREE)


def _with(phases: tuple[Phase | None, ...], rank: int, phase: Phase) -> tuple[Phase | None, ...]:
    return (*phases[:rank], phase, *phases[rank + 1 :])


def reserved(transfer: Transfer, seen: Reserved, topology: Topology) -> Transfer:
    """Order: a key is reserved once a rank, by the life of D that it names."""
    at, key = seen.at, seen.key
    if at.incarnation != key.incarnation or transfer.phases[at.rank] is not None:
        fail(Clause.ORDER, f"{name(at)} reserved {name_key(key)}, which is not new there.")
    if Phase.FREE in transfer.phases:
        fail(Clause.S5, f"{name(at)} reserved {name_key(key)}, which another rank has freed.")
    return transfer._replace(phases=_with(transfer.phases, at.rank, Phase.RESERVED))


def moved(transfer: Transfer, seen: Moved, topology: Topology) -> Transfer:
    """Order, and the rounds of S5 and S6; `_ENTER` says what else a phase asks for."""
    at, key, phase, agreed = seen.at, seen.key, seen.phase, transfer.agreed
    was = transfer.at(at, key)
    if phase is was is Phase.FREE:
        fail(Clause.S5, f"{name(at)} freed {name_key(key)} twice.")
    if phase not in _NEXT[was]:
        before = "nothing" if was is None else was.name
        fail(Clause.ORDER, f"{name(at)} moved {name_key(key)} from {before} to {phase.name}.")
    if phase in _ENTER:
        _ENTER[phase](transfer, seen, topology)
    if phase in IN_ONE_ROUND:
        if agreed not in (None, seen.round):
            fail(
                Clause.S6 if phase is Phase.LIVE else Clause.S5,
                f"{name(at)} moved {name_key(key)} to {phase.name} in round {seen.round}, but "
                f"round {agreed} is that of another rank.",
            )
        agreed = seen.round
    result = transfer._replace(phases=_with(transfer.phases, at.rank, phase), agreed=agreed)
    if phase is Phase.LIVE and all(p is phase for _, p in result.alive(key)):
        return result._replace(agreed=None)
    return shrunk(result) if phase is Phase.FREE else result


def _enter_live(transfer: Transfer, seen: Moved, topology: Topology) -> None:
    """S6: every piece of every writer is there, the aux row too, on all ranks."""
    made = f"{name(seen.at)} made {name_key(seen.key)} live"
    landed = {(to.rank, writer.rank, piece) for to, writer, piece in transfer.landed}
    for to, phase in transfer.alive(seen.key):
        for writer in topology.writers[to.rank]:
            for piece in topology.pieces_of(to.rank, writer):
                if (to.rank, writer, piece) not in landed:
                    what = f"piece {piece} of writer P{writer}"
                    fail(Clause.S6, f"{made} before {what} had landed on {name(to)}.")
        if phase not in (Phase.LANDED, Phase.LIVE):
            fail(Clause.ORDER, f"{made} before {name(to)} took it for landed.")


def _enter_failed(transfer: Transfer, seen: Moved, topology: Topology) -> None:
    for other, phase in transfer.alive(seen.key):
        if phase is Phase.LIVE:
            what = f"{name_key(seen.key)}, which is live on {name(other)}"
            fail(Clause.ORDER, f"{name(seen.at)} failed {what}.")


def _enter_drained(transfer: Transfer, seen: Moved, topology: Topology) -> None:
    """S2, by identity: an ACK of a writer's next life says nothing of this one's writes."""
    for to, writer in sorted(transfer.told - transfer.acked - transfer.fenced):
        if to == seen.at:
            fail(
                Clause.S2,
                f"{name(to)} took {name_key(seen.key)} for drained without an ACK from "
                f"{name(writer)} or a fence against it.",
            )


def _enter_releasable(transfer: Transfer, seen: Moved, topology: Topology) -> None:
    """A rank that has advertised nothing has nothing to drain, whatever its phase before LIVE."""
    for rank, phase in transfer.alive(seen.key):
        idle = phase is not Phase.LIVE and not transfer.advertised_by(rank)
        if phase not in _DRAINED and not idle:
            what = f"{name_key(seen.key)} for releasable while it was not drained on {name(rank)}"
            fail(Clause.ORDER, f"{name(seen.at)} took {what}.")


def _enter_free(transfer: Transfer, seen: Moved, topology: Topology) -> None:
    """S1: no write is left, and no writer that holds the addresses could start one."""
    at, freed = seen.at, f"{name(seen.at)} freed {name_key(seen.key)} while"
    if at in transfer.reading:
        fail(Clause.ORDER, f"{freed} it was still reading the pages.")
    for writes, may in ((transfer.in_flight(), "land"), (transfer.taken, "be posted")):
        for write in sorted(writes):
            if write[0] == at and write[:2] not in transfer.fenced:
                fail(Clause.S1, f"{freed} {name_write(write)} may still {may}.")
    for to, writer in sorted(transfer.told - transfer.closed - transfer.fenced):
        pieces = topology.pieces_of(to.rank, writer.rank)
        if to == at and any((to, writer, piece) not in transfer.landed for piece in pieces):
            fail(
                Clause.S1,
                f"{freed} {name(writer)}, which holds the addresses, had neither closed it nor "
                "finished.",
            )
    if transfer.phases[at.rank] is Phase.LIVE:
        for other, phase in transfer.alive(seen.key):
            if phase not in (Phase.LIVE, Phase.FREE):
                fail(Clause.S5, f"{freed} {name(other)} had not made it live.")


_ENTER: dict[Phase, Callable[[Transfer, Moved, Topology], None]] = {
    Phase.LIVE: _enter_live,
    Phase.FAILED: _enter_failed,
    Phase.LOCAL_DRAINED: _enter_drained,
    Phase.RELEASABLE: _enter_releasable,
    Phase.FREE: _enter_free,
}


def reading(transfer: Transfer, seen: Reading, topology: Topology) -> Transfer:
    """Order: only a live key is read."""
    if seen.ended:
        return transfer._replace(reading=transfer.reading - {seen.at})
    if transfer.at(seen.at, seen.key) is not Phase.LIVE:
        what = f"{name_key(seen.key)}, which is not live there"
        fail(Clause.ORDER, f"{name(seen.at)} began to read {what}.")
    return transfer._replace(reading=transfer.reading | {seen.at})


def advertised(transfer: Transfer, seen: Sent, message: Advertise, topology: Topology) -> Transfer:
    """Addresses are sent of reserved pages only, and not once the key has failed or landed."""
    at, key, phase = seen.at, message.key, transfer.at(seen.at, message.key)
    if phase not in (Phase.RESERVED, Phase.ADVERTISED):
        fail(
            Clause.S1 if phase is Phase.FREE else Clause.ORDER,
            f"{name(at)} sent the addresses of {name_key(key)} to {name(seen.to)} "
            f"{'before it reserved any' if phase is None else f'in phase {phase.name}'}.",
        )
    return transfer._replace(told=transfer.told | {(at, seen.to)})


def delivered(
    transfer: Transfer, seen: Delivered, topology: Topology, *, arrivals: bool
) -> Transfer:
    """S7 at D, and what D may count on from now.  A P may note of any key that it is closed."""
    at, message = seen.at, seen.message
    if at.side is Side.PREFILL or at in transfer.gone:
        return transfer
    if isinstance(message, Advertise | Abort):
        if seen.changed:
            fail(Clause.S7, f"{name(at)} acted on a message that is for writers.")
        return transfer
    line = (at, message.writer)
    current = line in transfer.told and transfer.at(at, message.key) not in _OVER
    pieces = topology.pieces_of(at.rank, message.writer.rank)
    foreign = isinstance(message, Landed) and message.piece not in pieces
    if seen.changed and (foreign or not current):
        what = f"a stale {type(message).__name__} from {name(message.writer)}"
        fail(Clause.S7, f"{name(at)} let {what} for {name_key(message.key)} change its state.")
    if not current:
        return transfer
    if isinstance(message, Ack):
        return transfer._replace(acked=transfer.acked | {line})
    if arrivals:
        return transfer
    # nobody saw the bytes come, so the writer's word has to do, for what it did post
    said = (message.piece,) if isinstance(message, Landed) else pieces
    landed = transfer.posted.intersection((at, message.writer, piece) for piece in said)
    return transfer._replace(landed=transfer.landed | landed)
