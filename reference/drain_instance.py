"""The drain contract beyond one key: S8, S9, L3, L4, and S1 for pages that change their owner.

`Instance` is what these clauses must know of the processes of P and D, and `observe_instance` a
pure function from one such value to the next, as `Transfer` and `observe` are for one key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from reference.drain_state import IN_ONE_ROUND, Clause, Line, fail, name, name_key
from reference.protocol import (
    Advertise,
    Counted,
    Died,
    Dropped,
    Fenced,
    Held,
    Moved,
    Observation,
    Outcome,
    Peer,
    Phase,
    Posted,
    Reduced,
    Reserved,
    Sent,
    Settled,
    Side,
    SourceFreed,
    Taken,
    Topology,
    TransferKey,
)


class Owner(NamedTuple):
    """Pages that a rank of D has taken for a key."""

    at: Peer
    key: TransferKey
    pages: frozenset[int]
    live: bool = False


class Read(NamedTuple):
    """A piece at a rank of P that reads a source, or will: `source` is None until it is posted."""

    at: Peer
    key: TransferKey
    to: Peer
    piece: int
    source: int | None = None


class Lockstep(NamedTuple):
    """The rounds of one life of P or D: how many each rank has done, and the newest's values.

    All ranks of D share a life, so all of them are there from its start; of P are those that have
    taken part.
    """

    side: Side
    incarnation: int
    done: tuple[tuple[int, int], ...] = ()
    values: int = 0

    @property
    def behind(self) -> int:
        """The last round that all its ranks have done."""
        return min((rounds for _, rounds in self.done), default=0)


class Instance(NamedTuple):
    """What is not about one key.

    Fields:
        lockstep: collective rounds of each life (L4).
        owners: which key has which pages (S1, S9).
        quarantined: keys in quarantine on a rank, and how many rounds it has done since, up to 2
            (L3).
        totals: pages of a rank of D, as it counted them (S9).
        held: sources that ranks of P keep: the rank, the source, its room (S8).
        reads: what reads them (S8).
        freeing: sources that some rank of P has freed and another not: life, source, round (S8).
        dead: processes that ended.
        fenced: lines whose writer is proven to be over.
    """

    lockstep: tuple[Lockstep, ...] = ()
    owners: frozenset[Owner] = frozenset()
    quarantined: frozenset[tuple[Peer, TransferKey, int]] = frozenset()
    totals: frozenset[tuple[Peer, int]] = frozenset()
    held: frozenset[tuple[Peer, int, int]] = frozenset()
    reads: frozenset[Read] = frozenset()
    freeing: frozenset[tuple[int, int, int]] = frozenset()
    dead: frozenset[Peer] = frozenset()
    fenced: frozenset[Line] = frozenset()

    def life(self, side: Side, incarnation: int) -> Lockstep:
        """The rounds of that life."""
        for life in self.lockstep:
            if (life.side, life.incarnation) == (side, incarnation):
                return life
        return Lockstep(side, incarnation)

    def relative(self) -> Instance:
        """The same with rounds counted from the last one that all ranks of a life have done."""
        return self._replace(
            lockstep=tuple(
                life._replace(done=tuple((rank, n - life.behind) for rank, n in life.done))
                for life in self.lockstep
            ),
            freeing=frozenset(
                (life, source, number - self.life(Side.PREFILL, life).behind)
                for life, source, number in self.freeing
            ),
        )


def _reserved(instance: Instance, seen: Reserved, topology: Topology) -> Instance:
    """S1: pages have one owner.  L3: a full quarantine holds admission back.

    A rank tells its peers of a quarantine in the first round that it begins afterwards, which is
    at the latest the second one that it ends; so a key counts from there.
    """
    at, key, pages = seen.at, seen.key, frozenset(seen.pages)
    for owner in instance.owners:
        if owner.at == at and not pages.isdisjoint(owner.pages):
            page = min(pages & owner.pages)
            what = f"page {page} for {name_key(key)} while {name_key(owner.key)} still held it"
            fail(Clause.S1, f"{name(at)} reserved {what}.")
    known = sum(rank == at and rounds == 2 for rank, _, rounds in instance.quarantined)
    if known >= topology.quarantine_limit:
        what = f"{name_key(key)} with {known} transfers in quarantine"
        limit = topology.quarantine_limit
        fail(Clause.L3, f"{name(at)} reserved pages for {what}; it may not from {limit} on.")
    return instance._replace(owners=instance.owners | {Owner(at, key, pages)})


def _dated(instance: Instance, seen: Moved | SourceFreed, clause: Clause, did: str) -> None:
    """What is done in a round, a rank does in the last one that it took part in: `clause` if it is
    later than that round, L4 if the rank has left that round out."""
    at = seen.at
    last = dict(instance.life(at.side, at.incarnation).done).get(at.rank, 0)
    if seen.round != last:
        broken = clause if seen.round < last else Clause.L4
        fail(broken, f"{did} in round {seen.round}, but the last of its rounds was {last}.")


def _moved(instance: Instance, seen: Moved, topology: Topology) -> Instance:
    at, key, phase = seen.at, seen.key, seen.phase
    if phase in IN_ONE_ROUND:
        clause = Clause.S6 if phase is Phase.LIVE else Clause.S5
        _dated(instance, seen, clause, f"{name(at)} moved {name_key(key)} to {phase.name}")
    if phase is Phase.QUARANTINED:
        return instance._replace(quarantined=instance.quarantined | {(at, key, 0)})
    if phase is Phase.LOCAL_DRAINED:
        kept = frozenset(entry for entry in instance.quarantined if entry[:2] != (at, key))
        return instance._replace(quarantined=kept)
    if phase not in (Phase.LIVE, Phase.FREE):
        return instance
    mine = {owner for owner in instance.owners if owner.at == at and owner.key == key}
    owners = instance.owners - mine
    if phase is Phase.LIVE:
        owners |= {owner._replace(live=True) for owner in mine}
    return instance._replace(owners=owners)


def _sent(instance: Instance, seen: Sent, topology: Topology) -> Instance:
    """S7: a writer forgets the keys below the floor, so none of them may be in use any more."""
    message = seen.message
    if not isinstance(message, Advertise):
        return instance
    for owner in sorted(instance.owners):
        if owner.at == seen.at and owner.key.generation < message.floor:
            what = f"keys below generation {message.floor}, while it holds {name_key(owner.key)}"
            fail(Clause.S7, f"{name(seen.at)} told {name(seen.to)} to forget {what}.")
    return instance


def _counted(instance: Instance, seen: Counted, topology: Topology) -> Instance:
    """S9, within one count, against the pages reserved so far, and from count to count."""
    at = seen.at
    owned = sum(len(owner.pages) for owner in instance.owners if owner.at == at and owner.live)
    held = sum(len(owner.pages) for owner in instance.owners if owner.at == at and not owner.live)
    counts = f"{seen.free} free, {seen.owned} owned and {seen.held} held"
    if seen.free + seen.owned + seen.held != seen.total or seen.free < 0:
        fail(Clause.S9, f"{name(at)} counts {counts} pages of {seen.total}.")
    if (seen.owned, seen.held) != (owned, held):
        what = f"{owned} owned and {held} held pages that it reserved"
        fail(Clause.S9, f"{name(at)} counts {counts}, but has {what}.")
    for rank, total in instance.totals:
        if rank == at and total != seen.total:
            fail(Clause.S9, f"{name(at)} counts {seen.total} pages in all, and {total} before.")
    return instance._replace(totals=instance.totals | {(at, seen.total)})


def _reduced(instance: Instance, seen: Reduced, topology: Topology) -> Instance:
    """L4: rounds 1, 2, 3, ..; nobody ends one that a peer has not begun; all with equal values."""
    at, number = seen.at, seen.round
    life = instance.life(at.side, at.incarnation)
    done = dict(life.done)
    if not done and at.side is Side.DECODE:
        peers = (at._replace(rank=rank) for rank in range(len(topology.writers)))
        done = {peer.rank: 0 for peer in peers if peer not in instance.dead}
    newest, mine = max(done.values(), default=0), done.get(at.rank, 0)
    took = f"{name(at)} took part in round {number}"
    if number != mine + 1:
        fail(Clause.L4, f"{took}, and in round {mine} before.")
    for rank, rounds in done.items():
        if rank != at.rank and rounds < number - 1:
            fail(Clause.L4, f"{took} while its peer of rank {rank} has done {rounds}.")
    if number == newest and seen.values != life.values:
        fail(Clause.L4, f"{took} with {seen.values} values, and a peer with {life.values}.")
    done[at.rank] = number
    after = life._replace(
        done=tuple(sorted(done.items())), values=seen.values if number > newest else life.values
    )
    others = (known for known in instance.lockstep if known[:2] != life[:2])
    quarantined = instance.quarantined
    if any(rank == at and rounds < 2 for rank, _, rounds in quarantined):
        quarantined = frozenset(
            (rank, key, min(rounds + (rank == at), 2)) for rank, key, rounds in quarantined
        )
    return instance._replace(lockstep=tuple(sorted((*others, after))), quarantined=quarantined)


def _held(instance: Instance, seen: Held, topology: Topology) -> Instance:
    return instance._replace(held=instance.held | {(seen.at, seen.source, seen.room)})


def _taken(instance: Instance, seen: Taken, topology: Topology) -> Instance:
    read = Read(seen.at, seen.key, seen.to, seen.piece)
    return instance._replace(reads=instance.reads | {read})


def _dropped(instance: Instance, seen: Dropped, topology: Topology) -> Instance:
    read = Read(seen.at, seen.key, seen.to, seen.piece)
    return instance._replace(reads=instance.reads - {read})


def _posted(instance: Instance, seen: Posted, topology: Topology) -> Instance:
    """S8: what is read is held."""
    at, key, source = seen.at, seen.key, seen.source
    if (at, source, key.room) not in instance.held:
        what = f"piece {seen.piece} for {name_key(key)} from source {source}"
        fail(Clause.S8, f"{name(at)} posted {what}, which it does not hold for that room.")
    read = Read(at, key, seen.to, seen.piece)
    return instance._replace(reads=(instance.reads - {read}) | {read._replace(source=source)})


def _settled(instance: Instance, seen: Settled, topology: Topology) -> Instance:
    if seen.outcome is Outcome.UNKNOWN:
        return instance
    read = (seen.at, seen.key, seen.to, seen.piece)
    return instance._replace(reads=frozenset(r for r in instance.reads if r[:4] != read))


def _source_freed(instance: Instance, seen: SourceFreed, topology: Topology) -> Instance:
    """S8: freed once, after the last read, and by all ranks that hold it in one round.

    A piece that is taken does not say what it will read; it counts where only one held source
    has its room.  Should it read another one that is freed, that shows when it is posted.
    """
    at, source = seen.at, seen.source
    freed = f"{name(at)} freed source {source}"
    mine = {hold for hold in instance.held if hold[:2] == (at, source)}
    if not mine:
        fail(Clause.S8, f"{freed}, which it does not hold.")
    rooms = {room for _, _, room in mine}
    others = {room for rank, other, room in instance.held if rank == at and other != source}
    for read in sorted(instance.reads, key=lambda read: read[:4]):
        next_up = read.source is None and read.key.room in rooms - others
        if read.at == at and (read.source == source or next_up):
            what = f"piece {read.piece} for {name_key(read.key)} to {name(read.to)}"
            fail(Clause.S8, f"{freed} while {what} may still read it.")
    held, mark = instance.held - mine, (at.incarnation, source)
    for life, other, number in instance.freeing:
        if (life, other) == mark and number != seen.round:
            fail(Clause.S8, f"{freed} in round {seen.round}; a peer did in round {number}.")
    _dated(instance, seen, Clause.S8, freed)
    return _with_held(instance._replace(freeing=instance.freeing | {(*mark, seen.round)}), held)


def _with_held(instance: Instance, held: frozenset[tuple[Peer, int, int]]) -> Instance:
    """With other holds; a source that nobody holds any more is no longer being freed."""
    left = {(rank.incarnation, source) for rank, source, _ in held}
    freeing = frozenset(mark for mark in instance.freeing if mark[:2] in left)
    return instance._replace(held=held, freeing=freeing)


def _died(instance: Instance, seen: Died, topology: Topology) -> Instance:
    """What a process owned, held or read is gone with it, and its peers' rounds with its life."""
    peer = seen.peer
    held = frozenset(hold for hold in instance.held if hold[0] != peer)
    rest = instance._replace(
        lockstep=tuple(
            life._replace(done=tuple(pair for pair in life.done if pair[0] != peer.rank))
            if life[:2] == (peer.side, peer.incarnation)
            else life
            for life in instance.lockstep
        ),
        owners=frozenset(owner for owner in instance.owners if owner.at != peer),
        quarantined=frozenset(entry for entry in instance.quarantined if entry[0] != peer),
        totals=frozenset(entry for entry in instance.totals if entry[0] != peer),
        reads=frozenset(read for read in instance.reads if read.at != peer),
        dead=instance.dead | {peer},
    )
    return _with_held(rest, held)


def _fenced(instance: Instance, seen: Fenced, topology: Topology) -> Instance:
    """S2: a fence proves nothing against a process that lives and may write again."""
    if seen.writer not in instance.dead:
        fail(Clause.S2, f"{name(seen.at)} fenced {name(seen.writer)}, which has not ended.")
    return instance._replace(fenced=instance.fenced | {(seen.at, seen.writer)})


_OBSERVE: dict[type, Callable[[Instance, Any, Topology], Instance]] = {
    Reserved: _reserved,
    Moved: _moved,
    Sent: _sent,
    Counted: _counted,
    Reduced: _reduced,
    Held: _held,
    Taken: _taken,
    Dropped: _dropped,
    Posted: _posted,
    Settled: _settled,
    SourceFreed: _source_freed,
    Died: _died,
    Fenced: _fenced,
}


def observe_instance(instance: Instance, seen: Observation, topology: Topology) -> Instance:
    """The value of what is not about one key after `seen`.

    Raises:
        Violation: S1 (of pages reserved twice), S2 (of a fence), S5 and S6 (of a round), S7 (of
            a floor), S8, S9, L3 or L4 is broken.
    """
    handler = _OBSERVE.get(type(seen))
    return instance if handler is None else handler(instance, seen, topology)
