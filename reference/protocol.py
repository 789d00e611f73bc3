"""The words of a transfer: keys, phases, messages, and what an observer of a run notes down.

It is the part of the contract that is about moving a request from a prefill instance (P) to a
decode instance (D).  Each has R tensor-parallel ranks; a rank is one process.  Rank r of P writes
straight into the memory of ranks of D, which know of it only what they are told, so that every
rule here is about when memory may be used again.

A run is judged by its observations alone (`reference.drain`).  They say what was done to the
outside, messages sent and writes posted, and never what an implementation thinks of it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import msgspec


class Side(IntEnum):
    """Which instance a process belongs to."""

    PREFILL = 0
    DECODE = 1


class Peer(NamedTuple):
    """One life of one rank's process; a process that is started again has another incarnation.
    All ranks of an instance of D share theirs."""

    side: Side
    rank: int
    incarnation: int


class TransferKey(NamedTuple):
    """One attempt to move one request: kappa.

    `room` is the request's name, which may be used again; `generation` counts the attempts of
    one life of D over all rooms, so that no two keys are ever equal; `incarnation` is that life.
    """

    room: int
    generation: int
    incarnation: int


class Phase(IntEnum):
    """Where a transfer stands on one rank of D; RELEASABLE is left in the round that reaches it.

    RESERVED -> ADVERTISED -> LANDED -> (all ranks) LIVE -> FREE once its readers ended.  Any phase
    before LIVE may become FAILED, and one rank's failure fails its peers.  FAILED -> RELEASABLE
    where nothing was advertised; else FAILED -> ABORTED -> LOCAL_DRAINED -> (all ranks)
    RELEASABLE -> FREE.  ABORTED becomes QUARANTINED at its timeout, and QUARANTINED becomes
    LOCAL_DRAINED by a complete set of ACKs, however late, or by a fence proof.
    """

    RESERVED = 0
    ADVERTISED = 1
    LANDED = 2
    LIVE = 3
    FAILED = 4
    ABORTED = 5
    QUARANTINED = 6
    LOCAL_DRAINED = 7
    RELEASABLE = 8
    FREE = 9


class Completion(IntEnum):
    """How D learns that bytes are there: a notification with each piece (SGLang 0.5.22 and
    older), or one status message of each writer after all its handles settled (0.5.23)."""

    NOTIFY = 0
    STATUS = 1


class Outcome(IntEnum):
    """How a posted write ended for its writer.

    LANDED   all its bytes are at the destination, and the source is no longer read.
    BROKEN   the source is no longer read; bytes may still land.
    UNKNOWN  nothing is known: the source may still be read, and bytes may still land.
    """

    LANDED = 0
    BROKEN = 1
    UNKNOWN = 2


# Messages.  A writer sends the pieces 0 .. n - 1 of data and then piece n, the aux row, which
# names the transfer.


class Advertise(msgspec.Struct, frozen=True, tag=True, array_like=True, cache_hash=True):
    """D to a writer: the addresses (`places`, in the layout's own form) of `key` at rank `at`, for
    the request that the router gave that number on both sides; a room may be used again, such a
    number may not.  Keys of this life of D with a generation below `floor` are all over."""

    key: TransferKey
    at: Peer
    floor: int
    request: int
    places: tuple[tuple[int, ...], ...] = ()


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True, cache_hash=True):
    """D to a writer: close `key` for rank `at`, and acknowledge once no write of it is left."""

    key: TransferKey
    at: Peer


class Landed(msgspec.Struct, frozen=True, tag=True, array_like=True, cache_hash=True):
    """Writer to D, with a write: its bytes are all there (Completion.NOTIFY)."""

    key: TransferKey
    writer: Peer
    piece: int


class Status(msgspec.Struct, frozen=True, tag=True, array_like=True, cache_hash=True):
    """Writer to D: all its pieces are there (Completion.STATUS)."""

    key: TransferKey
    writer: Peer


class Ack(msgspec.Struct, frozen=True, tag=True, array_like=True, cache_hash=True):
    """Writer to D: it closed `key`, and no write of it can still execute.  Sent as the answer to
    an Abort, and unasked by a writer that gave the transfer up itself."""

    key: TransferKey
    writer: Peer


Message = Advertise | Abort | Landed | Status | Ack


# Actions: what a rank's protocol asks its owner to do, in order.


class Send(NamedTuple):
    """Send a message."""

    to: Peer
    message: Message


class Enter(NamedTuple):
    """Note that the transfer is in another phase; memory follows: LIVE may be read, FREE may be
    handed out again."""

    key: TransferKey
    phase: Phase


class ReadAux(NamedTuple):
    """Read the transfer's aux row and answer with the key in it."""

    key: TransferKey


class Take(NamedTuple):
    """Get a piece ready, then say that it is prepared."""

    key: TransferKey
    to: Peer
    piece: int


class Post(NamedTuple):
    """Start to write a piece that was taken.  `note` goes with it."""

    key: TransferKey
    to: Peer
    piece: int
    note: Message | None


class Drop(NamedTuple):
    """Forget a piece that was taken."""

    key: TransferKey
    to: Peer
    piece: int


Action = Send | Enter | ReadAux | Take | Post | Drop


# Observations.  `at` is the process at which something happened.


class Reserved(msgspec.Struct, frozen=True, tag=True, cache_hash=True):
    """D took `pages` from its free ones for `key`."""

    at: Peer
    key: TransferKey
    pages: tuple[int, ...]


class Sent(msgspec.Struct, frozen=True, tag=True, cache_hash=True):
    """A message left; from an Advertise on, `to` may hold the addresses."""

    at: Peer
    to: Peer
    message: Message


class Delivered(msgspec.Struct, frozen=True, tag=True, cache_hash=True):
    """A message was handled; `changed` says whether the receiver's state is now another."""

    at: Peer
    message: Message
    changed: bool


class Moved(msgspec.Struct, frozen=True, tag=True, cache_hash=True):
    """A rank of D gave `key` another phase, in the collective round with that number (the last
    one that it took part in)."""

    at: Peer
    key: TransferKey
    phase: Phase
    round: int


class Taken(msgspec.Struct, frozen=True, tag=True, cache_hash=True):
    """A worker of P took a piece from the queue: it may be posted from now on."""

    at: Peer
    key: TransferKey
    to: Peer
    piece: int


class Dropped(msgspec.Struct, frozen=True, tag=True, cache_hash=True):
    """A piece that was taken will not be posted."""

    at: Peer
    key: TransferKey
    to: Peer
    piece: int


class Posted(msgspec.Struct, frozen=True, tag=True, cache_hash=True):
    """A piece that was taken was handed to the transport, which reads `source` (the request's
    id at P) from now on."""

    at: Peer
    key: TransferKey
    to: Peer
    piece: int
    source: int


class Settled(msgspec.Struct, frozen=True, tag=True, cache_hash=True):
    """The writer learnt how a posted piece ended."""

    at: Peer
    key: TransferKey
    to: Peer
    piece: int
    outcome: Outcome


class Arrived(msgspec.Struct, frozen=True, tag=True, cache_hash=True):
    """Bytes of a posted piece came to lie at `at`: part `part` of `parts`.  After the last one
    the write is over.  Known in simulations only; elsewhere Settled with LANDED says it."""

    at: Peer
    key: TransferKey
    writer: Peer
    piece: int
    part: int
    parts: int


class Closed(msgspec.Struct, frozen=True, tag=True, cache_hash=True):
    """A writer will start no further write of `key` to `to`."""

    at: Peer
    key: TransferKey
    to: Peer


class Held(msgspec.Struct, frozen=True, tag=True, cache_hash=True):
    """P keeps the pages of request `source`, the router's number, for a transfer of `room`."""

    at: Peer
    source: int
    room: int


class SourceFreed(msgspec.Struct, frozen=True, tag=True, cache_hash=True):
    """P freed the pages of request `source`, in the collective round with that number."""

    at: Peer
    source: int
    round: int


class Reduced(msgspec.Struct, frozen=True, tag=True, cache_hash=True):
    """A rank took part in its instance's collective round with that number, with so many
    values."""

    at: Peer
    round: int
    values: int


class Reading(msgspec.Struct, frozen=True, tag=True, cache_hash=True):
    """A rank of D began to read `key`'s pages, or (`ended`) has stopped for good."""

    at: Peer
    key: TransferKey
    ended: bool = False


class Counted(msgspec.Struct, frozen=True, tag=True, cache_hash=True):
    """Pages of a rank of D: free, owned by a live transfer, held by one that is not live yet or
    not drained yet, and all."""

    at: Peer
    free: int
    owned: int
    held: int
    total: int


class Died(msgspec.Struct, frozen=True, tag=True, cache_hash=True):
    """A process ended.  Its posted writes may go on until a fence."""

    peer: Peer


class Fenced(msgspec.Struct, frozen=True, tag=True, cache_hash=True):
    """Proof that no write of `writer` can still execute at `at`: its process was reaped, and then
    the destination's agent destroyed or its address range retired (over shared memory: every
    mapper reaped and its device copies ended)."""

    at: Peer
    writer: Peer


Observation = (
    Reserved
    | Sent
    | Delivered
    | Moved
    | Taken
    | Dropped
    | Posted
    | Settled
    | Arrived
    | Closed
    | Held
    | SourceFreed
    | Reduced
    | Reading
    | Counted
    | Died
    | Fenced
)


class Topology(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """Who writes to whom, which every judge of a run must know.

    Fields:
        pieces: data pieces of each writer; the aux row, piece number `pieces`, comes on top, from
            the first writer of a rank only.
        writers: for each rank of D the ranks of P that write to it, in order.
        quarantine_limit: transfers in quarantine from which on D reserves nothing more.
    """

    pieces: int
    writers: tuple[tuple[int, ...], ...]
    quarantine_limit: int

    def pieces_of(self, rank: int, writer: int) -> range:
        """The pieces that rank `writer` of P sends to `rank` of D; the aux row is the last."""
        first = self.writers[rank][0] == writer
        return range(self.pieces + first)
