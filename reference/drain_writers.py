"""The drain contract of one key at its writers: S1 for what is written, S3, S4, the aux row of S6.

Each function takes the value of a key and what was seen, and returns the next value or raises
`Violation`; `reference.drain.observe` is where they are called from.  Writes to a process that
has ended touch nobody's memory and are left out.
"""

from __future__ import annotations

from reference.drain_state import (
    Clause,
    Transfer,
    Write,
    fail,
    name,
    name_key,
    name_write,
    shrunk,
)
from reference.protocol import (
    Ack,
    Arrived,
    Closed,
    Died,
    Dropped,
    Fenced,
    Outcome,
    Phase,
    Posted,
    Sent,
    Settled,
    Side,
    Status,
    Taken,
    Topology,
    TransferKey,
)


def _check_memory(transfer: Transfer, key: TransferKey, write: Write, did: str) -> None:
    """S1: what is free, not reserved, not advertised or fenced is not written to."""
    to, writer, _ = write
    phase, what = transfer.at(to, key), f"{name_write(write)} for {name_key(key)} {did} {name(to)}"
    if phase is None or phase is Phase.FREE:
        fail(Clause.S1, f"{what}, where the key holds no page{'' if phase is None else ' now'}.")
    if (to, writer) not in transfer.told:
        fail(Clause.S1, f"{what}, which had not sent that writer the addresses.")
    if (to, writer) in transfer.fenced:
        fail(Clause.S1, f"{what}, which had a proof that the writer's writes were over.")


def _check_open(transfer: Transfer, seen: Taken | Posted, write: Write, did: str) -> None:
    """S4."""
    if write[:2] in transfer.closed:
        what = f"{name_write(write)} for {name_key(seen.key)} {did} {name(seen.to)}"
        fail(Clause.S4, f"{what} after its writer had closed it.")


def taken(transfer: Transfer, seen: Taken, topology: Topology) -> Transfer:
    """S1, S4, and order: a piece is written once a key."""
    write = (seen.to, seen.at, seen.piece)
    if seen.to in transfer.gone:
        return transfer
    _check_memory(transfer, seen.key, write, "was taken for")
    _check_open(transfer, seen, write, "was taken for")
    if write in transfer.taken or write in transfer.posted or write in transfer.landed:
        fail(Clause.ORDER, f"{name_write(write)} for {name_key(seen.key)} was taken twice.")
    return transfer._replace(taken=transfer.taken | {write})


def dropped(transfer: Transfer, seen: Dropped, topology: Topology) -> Transfer:
    """A piece that is dropped may be taken again."""
    return shrunk(transfer._replace(taken=transfer.taken - {(seen.to, seen.at, seen.piece)}))


def posted(transfer: Transfer, seen: Posted, topology: Topology) -> Transfer:
    """S1, S4, order, and S6: the aux row says that the data is there, so it goes last."""
    to, writer, piece = write = (seen.to, seen.at, seen.piece)
    if to in transfer.gone:
        return transfer
    _check_memory(transfer, seen.key, write, "was posted to")
    _check_open(transfer, seen, write, "was posted to")
    if write not in transfer.taken:
        fail(Clause.ORDER, f"{name_write(write)} for {name_key(seen.key)} was posted, not taken.")
    if piece == topology.pieces:
        for data in range(piece):
            if (to, writer, data) not in transfer.landed:
                fail(
                    Clause.S6,
                    f"{name(writer)} posted the aux row of {name_key(seen.key)} to {name(to)} "
                    f"before its piece {data} had landed there.",
                )
    return transfer._replace(taken=transfer.taken - {write}, posted=transfer.posted | {write})


def settled(transfer: Transfer, seen: Settled, topology: Topology) -> Transfer:
    """Only LANDED ends a write; after BROKEN or UNKNOWN its bytes may still land."""
    write = (seen.to, seen.at, seen.piece)
    if seen.to in transfer.gone:
        return transfer
    if write not in transfer.posted:
        fail(Clause.ORDER, f"{name_write(write)} for {name_key(seen.key)} settled, not posted.")
    if seen.outcome is not Outcome.LANDED:
        return transfer
    landed = _land(transfer, write)
    return shrunk(landed._replace(posted=transfer.posted - {write}))


def arrived(transfer: Transfer, seen: Arrived, topology: Topology) -> Transfer:
    """S1, and order: only what was posted comes."""
    write = (seen.at, seen.writer, seen.piece)
    if seen.at in transfer.gone:
        return transfer
    _check_memory(transfer, seen.key, write, "landed on")
    if write in transfer.landed:
        return transfer
    if write not in transfer.posted:
        fail(Clause.ORDER, f"{name_write(write)} for {name_key(seen.key)} landed, not posted.")
    parts = transfer.parts | {(write, seen.part)}
    if sum(whole == write for whole, _ in parts) < seen.parts:
        return transfer._replace(parts=parts)
    return _land(transfer, write)


def _land(transfer: Transfer, write: Write) -> Transfer:
    parts = frozenset(part for part in transfer.parts if part[0] != write)
    return transfer._replace(parts=parts, landed=transfer.landed | {write})


def closed(transfer: Transfer, seen: Closed, topology: Topology) -> Transfer:
    """Of a key that is free at `seen.to` it is known that nobody may write it."""
    if seen.to in transfer.gone or transfer.phases[seen.to.rank] is Phase.FREE:
        return transfer
    return transfer._replace(closed=transfer.closed | {(seen.to, seen.at)})


def acknowledged(transfer: Transfer, seen: Sent, message: Ack, topology: Topology) -> Transfer:
    """S3.  A write that ended as BROKEN or UNKNOWN is never over for its writer."""
    line = to, writer = seen.to, seen.at
    if to in transfer.gone:
        return transfer
    sent = f"{name(writer)} acknowledged {name_key(message.key)} to {name(to)}"
    if message.writer != writer:
        fail(Clause.S3, f"{sent} in the name of {name(message.writer)}.")
    for writes, state in ((transfer.taken, "still to be posted"), (transfer.posted, "not over")):
        for write in sorted(writes):
            if write[:2] == line:
                fail(Clause.S3, f"{sent} while its piece {write[2]} was {state}.")
    # who closed what is forgotten once the key is free
    if line not in transfer.closed and transfer.phases[to.rank] is not Phase.FREE:
        fail(Clause.S3, f"{sent} without having closed it.")
    return transfer


def reported(transfer: Transfer, seen: Sent, message: Status, topology: Topology) -> Transfer:
    """S6: a status message stands for all pieces of its writer."""
    to, writer = seen.to, seen.at
    if to in transfer.gone or transfer.phases[to.rank] is Phase.FREE:
        return transfer
    for piece in topology.pieces_of(to.rank, writer.rank):
        write = (to, writer, piece)
        if write not in transfer.landed or write in transfer.posted:
            fail(
                Clause.S6,
                f"{name(writer)} told {name(to)} that all of {name_key(message.key)} was there "
                f"while its piece {piece} was not over.",
            )
    return transfer


def died(transfer: Transfer, seen: Died, topology: Topology) -> Transfer:
    """A dead writer acknowledges nothing, but what it posted may go on; a dead rank of D has no
    memory that could be overwritten, and its peers cannot reach a round without it."""
    peer = seen.peer
    if peer.side is Side.PREFILL:
        over = {write for write in transfer.landed if write[1] == peer}
        return shrunk(transfer._replace(posted=transfer.posted - over))
    return transfer._replace(
        agreed=None,
        told=frozenset(line for line in transfer.told if line[0] != peer),
        closed=frozenset(line for line in transfer.closed if line[0] != peer),
        acked=frozenset(line for line in transfer.acked if line[0] != peer),
        fenced=frozenset(line for line in transfer.fenced if line[0] != peer),
        taken=frozenset(write for write in transfer.taken if write[0] != peer),
        posted=frozenset(write for write in transfer.posted if write[0] != peer),
        landed=frozenset(write for write in transfer.landed if write[0] != peer),
        parts=frozenset(part for part in transfer.parts if part[0][0] != peer),
        reading=transfer.reading - {peer},
        gone=transfer.gone | {peer},
    )


def fenced(transfer: Transfer, seen: Fenced, topology: Topology) -> Transfer:
    """The proof ends what the writer took and posted, and whatever it may still have begun."""
    line = (seen.at, seen.writer)
    return shrunk(
        transfer._replace(
            fenced=transfer.fenced | {line},
            taken=frozenset(write for write in transfer.taken if write[:2] != line),
            posted=frozenset(write for write in transfer.posted if write[:2] != line),
            parts=frozenset(part for part in transfer.parts if part[0][:2] != line),
        )
    )
