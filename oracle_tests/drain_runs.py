"""Recorded runs made by hand: straight-line transfers and aborts, as an honest system logs them."""

from __future__ import annotations

from reference.drain import Clause, judge
from reference.protocol import (
    Abort,
    Ack,
    Advertise,
    Arrived,
    Closed,
    Completion,
    Counted,
    Delivered,
    Held,
    Landed,
    Message,
    Moved,
    Observation,
    Outcome,
    Peer,
    Phase,
    Posted,
    Reading,
    Reduced,
    Reserved,
    Sent,
    Settled,
    Side,
    SourceFreed,
    Status,
    Taken,
    Topology,
    TransferKey,
)

Run = list[Observation]
SOURCE = 7
PARTS = 2


def d(rank: int = 0, life: int = 0) -> Peer:
    return Peer(Side.DECODE, rank, life)


def p(rank: int = 0, life: int = 0) -> Peer:
    return Peer(Side.PREFILL, rank, life)


def key(room: int = 1, generation: int = 0) -> TransferKey:
    return TransferKey(room, generation, 0)


def topology(ranks: int = 1, fan_in: int = 1, pieces: int = 1, limit: int = 1) -> Topology:
    """`ranks` ranks of D, each with `fan_in` writers of its own."""
    lines = tuple(tuple(range(r * fan_in, (r + 1) * fan_in)) for r in range(ranks))
    return Topology(pieces=pieces, writers=lines, quarantine_limit=limit)


def lines(shape: Topology) -> list[tuple[Peer, Peer]]:
    """Each rank of D with each of its writers."""
    return [(d(rank), p(w)) for rank, writers in enumerate(shape.writers) for w in writers]


def message(sender: Peer, to: Peer, what: Message, *, changed: bool = True) -> Run:
    return [Sent(at=sender, to=to, message=what), Delivered(at=to, message=what, changed=changed)]


def move(shape: Topology, k: TransferKey, *phases: Phase, number: int = 0) -> Run:
    """All ranks, one after the other, through the phases."""
    ranks = range(len(shape.writers))
    return [Moved(at=d(r), key=k, phase=phase, round=number) for r in ranks for phase in phases]


def reduce(shape: Topology, number: int, *, side: Side = Side.DECODE) -> Run:
    ranks = len(shape.writers)
    if side is Side.PREFILL:
        ranks = sum(map(len, shape.writers))
    return [Reduced(at=Peer(side, r, 0), round=number, values=3) for r in range(ranks)]


def pages(rank: int, k: TransferKey) -> tuple[int, ...]:
    return (10 * k.generation + 1, 10 * k.generation + 2 + rank)


def advertise(shape: Topology, k: TransferKey) -> Run:
    """Sources held, pages reserved, addresses sent."""
    run: Run = [Held(at=writer, source=SOURCE, room=k.room) for _, writer in lines(shape)]
    run += [Reserved(at=d(r), key=k, pages=pages(r, k)) for r in range(len(shape.writers))]
    run += move(shape, k, Phase.ADVERTISED)
    for to, writer in lines(shape):
        run += message(to, writer, Advertise(k, to, 0, 0))
    return run


def post(k: TransferKey, to: Peer, writer: Peer, piece: int) -> Run:
    return [
        Taken(at=writer, key=k, to=to, piece=piece),
        Posted(at=writer, key=k, to=to, piece=piece, source=SOURCE),
    ]


def settle(
    k: TransferKey, to: Peer, writer: Peer, piece: int, outcome: Outcome = Outcome.LANDED
) -> Run:
    return [Settled(at=writer, key=k, to=to, piece=piece, outcome=outcome)]


def arrive(k: TransferKey, to: Peer, writer: Peer, piece: int) -> Run:
    return [
        Arrived(at=to, key=k, writer=writer, piece=piece, part=part, parts=PARTS)
        for part in range(PARTS)
    ]


def write(shape: Topology, k: TransferKey, style: Completion, *, arrivals: bool = True) -> Run:
    """Every piece of every writer, and what D is told of it."""
    run: Run = []
    for to, writer in lines(shape):
        for piece in shape.pieces_of(to.rank, writer.rank):
            run += post(k, to, writer, piece)
            run += arrive(k, to, writer, piece) if arrivals else []
            if style is Completion.NOTIFY:
                run += message(writer, to, Landed(k, writer, piece))
            run += settle(k, to, writer, piece)
        if style is Completion.STATUS:
            run += message(writer, to, Status(k, writer))
    return run


def live(shape: Topology, k: TransferKey, *, number: int = 1) -> Run:
    """From landed on: two rounds, reading, the counts, and both sides' pages freed."""
    ranks, run = range(len(shape.writers)), move(shape, k, Phase.LANDED)
    run += reduce(shape, number) + move(shape, k, Phase.LIVE, number=number)
    run += [Reading(at=d(r), key=k) for r in ranks]
    run += [Counted(at=d(r), free=8, owned=2, held=0, total=10) for r in ranks]
    run += [Reading(at=d(r), key=k, ended=True) for r in ranks]
    run += reduce(shape, number + 1) + move(shape, k, Phase.FREE, number=number + 1)
    run += [Counted(at=d(r), free=10, owned=0, held=0, total=10) for r in ranks]
    return run + free_sources(shape, number)


def free_sources(shape: Topology, number: int) -> Run:
    run = reduce(shape, number, side=Side.PREFILL)
    return run + [SourceFreed(at=w, source=SOURCE, round=number) for _, w in lines(shape)]


def abort(shape: Topology, k: TransferKey, *, number: int = 1, slow: bool = False) -> Run:
    """From advertised on: ABORT and ACK of everyone, after the timeout where `slow`."""
    run = move(shape, k, Phase.FAILED, Phase.ABORTED)
    run += move(shape, k, Phase.QUARANTINED) if slow else []
    for to, writer in lines(shape):
        run += message(to, writer, Abort(k, to))
        run += [Closed(at=writer, key=k, to=to)]
        run += message(writer, to, Ack(k, writer))
        run += message(writer, to, Ack(k, writer), changed=False)
    run += move(shape, k, Phase.LOCAL_DRAINED)
    run += reduce(shape, number)
    return run + move(shape, k, Phase.RELEASABLE, Phase.FREE, number=number)


def full(shape: Topology, style: Completion = Completion.NOTIFY) -> Run:
    return advertise(shape, key()) + write(shape, key(), style) + live(shape, key())


def aborted(shape: Topology, *, slow: bool = False) -> Run:
    return advertise(shape, key()) + abort(shape, key(), slow=slow) + free_sources(shape, 1)


def breaks(
    run: Run, shape: Topology, clause: Clause, *, arrivals: bool = True, live: bool = True
) -> None:
    """The run breaks `clause` and the sentence is one."""
    found = judge(run, shape, arrivals=arrivals, live=live)
    assert found is not None
    assert found.clause is clause, found
    assert found.sentence.endswith(".")
