"""What every transport offers to one process of P or D, and what it reports.

A transport moves bytes and messages and decides nothing.  It is polled by the thread that owns
the protocol, so neither needs a lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from reference.protocol import Message, Outcome, Peer, TransferKey


class Refused(ValueError):
    """A peer does not fit: one sentence says in what, and nothing was registered or written."""


class Region(NamedTuple):
    """Memory that a peer may read or write, by name; peers pair regions by their place.

    `memory` is [items, item bytes] uint8, contiguous, on a CPU or a CUDA device.
    """

    name: str
    memory: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One piece on its way: copies from the writer's regions to those of `to`.

    Fields:
        runs: [n, 4] int64, each (region, first item here, first item there, items).  No two
            overlap at the destination.
        note: delivered to `to` once all bytes are there; None where nothing is to be said.
    """

    key: TransferKey
    to: Peer
    piece: int
    runs: NDArray[np.int64]
    note: Message | None = None


class Received(NamedTuple):
    """A message came.  Over any transport it may come twice, late, or out of order."""

    message: Message


class WriteEnded(NamedTuple):
    """A posted write ended, as far as its writer can know.  Reported once a write."""

    key: TransferKey
    to: Peer
    piece: int
    outcome: Outcome


class PeerLost(NamedTuple):
    """The process of `peer` is gone, or cannot be reached for good.  Its writes may go on."""

    peer: Peer


class PeerFenced(NamedTuple):
    """Proof, asked for by `fence`, that no write of `peer` can still change this process's
    memory."""

    peer: Peer


Event = Received | WriteEnded | PeerLost | PeerFenced


class Transport(Protocol):
    """One process's end."""

    me: Peer

    def hello(self) -> bytes:
        """What a peer must be given to connect to this process: who it is, how its regions are
        laid out, and how they are reached."""

    def connect(self, hello: bytes) -> Peer:
        """Get to know a peer.  A rank that is known in an older incarnation is forgotten first.

        Raises:
            Refused: where its layout, rank, page or version is another than this process's.
        """

    def send(self, to: Peer, message: Message) -> None:
        """Send a message, at best effort; to an unknown or lost peer it is dropped."""

    def post(self, write: Write) -> None:
        """Start a write to a connected peer and return at once.  What the network or the end of a
        peer does to it is a WriteEnded with BROKEN or UNKNOWN.

        Raises:
            Refused: it lies outside what the peer offered; nothing was started.
        """

    def poll(self) -> Sequence[Event]:
        """What happened since the last call, without waiting."""

    def fence(self, peer: Peer) -> None:
        """Ask for the proof that a lost peer's writes are over; PeerFenced comes when it holds,
        which may be never."""

    def close(self) -> None:
        """Give everything back; what is posted is over afterwards, or its process is."""
