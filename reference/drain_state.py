"""What the drain contract must know of one transfer key, and how a run breaks it.

`Transfer` is a value over all ranks and writers.  Nothing is kept in it that no clause asks for,
and a key that is over everywhere is one constant, so that a search may memoise and hash it.
`reference.drain` lists the clauses.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, NoReturn

from reference.protocol import Peer, Phase, Side, TransferKey

IN_ONE_ROUND = (Phase.LIVE, Phase.RELEASABLE, Phase.FREE)
"""Phases that all ranks of D enter in the same collective round (S5, S6)."""


class Clause(StrEnum):
    """The clauses by name; `reference.drain` says what each asks for."""

    ORDER = "order"
    S1 = "S1"
    S2 = "S2"
    S3 = "S3"
    S4 = "S4"
    S5 = "S5"
    S6 = "S6"
    S7 = "S7"
    S8 = "S8"
    S9 = "S9"
    L1 = "L1"
    L2 = "L2"
    L3 = "L3"
    L4 = "L4"
    L5 = "L5"


class Violation(Exception):
    """A run broke `clause`; `sentence` says who did what, and what was in the way."""

    def __init__(self, clause: Clause, sentence: str) -> None:
        super().__init__(clause, sentence)
        self.clause = clause
        self.sentence = sentence

    def __str__(self) -> str:
        return f"{self.clause}: {self.sentence}"


def fail(clause: Clause, sentence: str) -> NoReturn:
    """Raise a Violation of `clause`."""
    raise Violation(clause, sentence)


def name(peer: Peer) -> str:
    """How sentences call a process: "rank 1 of D", "writer P0", with its life if not the first."""
    life = f" (life {peer.incarnation})" if peer.incarnation else ""
    side = "rank {} of D" if peer.side is Side.DECODE else "writer P{}"
    return side.format(peer.rank) + life


def name_key(key: TransferKey) -> str:
    """How sentences call a key: "room 3 (generation 2)"."""
    return f"room {key.room} (generation {key.generation})"


Line = tuple[Peer, Peer]  # a rank of D, and a process of P that may write to it
Write = tuple[Peer, Peer, int]  # a line, and the piece


def name_write(write: Write) -> str:
    """How sentences call a write: "piece 0 of writer P0"."""
    return f"piece {write[2]} of {name(write[1])}"


class Transfer(NamedTuple):
    """One key on all ranks, as far as its future can be judged by it.

    Fields:
        phases: of each rank of D; None where it has not reserved.
        agreed: the round in which some rank took a step that all must take in the same one; None
            while no such step is under way.
        told: lines whose rank sent the addresses.
        closed, acked, fenced: lines whose writer closed the key, whose rank has handled its ACK,
            and whose rank has proof that the writer's writes are over.
        taken: pieces that may be posted at any time.
        posted: posted pieces of which the writer does not know that they landed.
        landed: pieces whose bytes are all there.
        parts: what has arrived of other pieces: the write, and the part's number.
        reading: ranks that read the pages.
        gone: processes of D that ended, and their memory with them.
    """

    phases: tuple[Phase | None, ...]
    agreed: int | None = None
    told: frozenset[Line] = frozenset()
    closed: frozenset[Line] = frozenset()
    acked: frozenset[Line] = frozenset()
    fenced: frozenset[Line] = frozenset()
    taken: frozenset[Write] = frozenset()
    posted: frozenset[Write] = frozenset()
    landed: frozenset[Write] = frozenset()
    parts: frozenset[tuple[Write, int]] = frozenset()
    reading: frozenset[Peer] = frozenset()
    gone: frozenset[Peer] = frozenset()

    def in_flight(self) -> frozenset[Write]:
        """Posted writes whose bytes may still land."""
        return self.posted - self.landed

    def at(self, peer: Peer, key: TransferKey) -> Phase | None:
        """Where `key`, of which this is the value, stands at `peer`; nowhere in other lives."""
        return self.phases[peer.rank] if peer.incarnation == key.incarnation else None

    def alive(self, key: TransferKey) -> list[tuple[Peer, Phase | None]]:
        """The ranks of D that have not ended, and where `key` stands there."""
        ranks = (Peer(Side.DECODE, rank, key.incarnation) for rank in range(len(self.phases)))
        return [(rank, self.phases[rank.rank]) for rank in ranks if rank not in self.gone]

    def advertised_by(self, rank: Peer) -> bool:
        """Whether anybody may hold the addresses of `rank`."""
        return any(to == rank for to, _ in self.told)


def shrunk(transfer: Transfer) -> Transfer:
    """The constant for a key that is free everywhere with no write left, but for who is gone: what
    was written to them may still settle.  Others as they are."""
    if transfer.taken or transfer.posted or any(p is not Phase.FREE for p in transfer.phases):
        return transfer
    return Transfer(transfer.phases, gone=transfer.gone)
