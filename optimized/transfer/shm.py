"""Transfers through memory that both processes have mapped, for peers on one machine.

Regions that lie in the owner's shared pool (the host KV pools of D) are copied straight into it;
everything else, and every message, goes over another transport, to which a peer that cannot share
is left altogether.  The rest of a write, and its note, follow its copies: so a note never
overtakes a byte.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from optimized.transfer import hello as hellos
from optimized.transfer.shared_pool import SharedPool
from optimized.transfer.shm_copy import Copier, Copy, Share
from optimized.transfer.shm_hello import NAME, Host, Offer, Place, Setup, unmet, visit
from optimized.transfer.transport import (
    Event,
    PeerFenced,
    Refused,
    Region,
    Transport,
    Write,
    WriteEnded,
)
from reference.protocol import Message, Outcome, Peer


class ShmTransport:
    """One process's end: D's with the pool that it offers, P's without one."""

    def __init__(
        self,
        rest: Transport,
        regions: Sequence[Region],
        *,
        setup: Setup,
        pool: SharedPool | None = None,
    ) -> None:
        """Wrap `rest`, which has all the regions too, and is closed with this.  Whoever made the
        pool closes it, after this transport.

        Raises:
            ValueError: where no region lies in the pool, or one does in part.
        """
        self.me = rest.me
        self._rest = rest
        self._offer = _offer(setup, regions, pool)
        self._mine = hellos.decode(self.hello())
        self._cuda = any(region.memory.is_cuda for region in regions)
        self._host = Host(pool, self._mine) if pool is not None else None
        self._copier = Copier(regions)
        self._shares: dict[Peer, Share] = {}
        # nothing more is posted to these; they wait for their last copies
        self._retired: list[Share] = []
        self._refusals: dict[Peer, str] = {}
        self._fenced_by_rest: set[Peer] = set()

    def why_not(self, peer: Peer) -> str | None:
        """Why writes between the two do not go through shared memory; None where they do."""
        if peer in self._shares or (self._host and peer in self._host.guests):
            return None
        refusals = self._refusals | (self._host.refusals if self._host else {})
        return refusals.get(peer, "the peer has not asked for the shared memory: connect it.")

    def hello(self) -> bytes:
        """The other transport's hello, with the offer of shared memory beside its reach."""
        hello = hellos.decode(self._rest.hello())
        reach = hello.reach | {NAME: msgspec.msgpack.encode(self._offer)}
        return msgspec.structs.replace(hello, reach=reach).encode()

    def connect(self, hello: bytes) -> Peer:
        """Get to know a peer, and map its pool where everything speaks for it.

        Raises:
            Refused: where the other transport refuses the peer.
        """
        peer = self._rest.connect(hello)
        for known in list(self._shares):
            if known != peer and (known.side, known.rank) == (peer.side, peer.rank):
                self._retire(known, "the peer was started again.")
        if peer in self._shares:
            return peer
        theirs = hellos.decode(hello)
        self._refusals.pop(peer, None)
        try:
            if self._host is None:
                segment, connection = visit(self._mine, theirs, cuda=self._cuda)
                self._shares[peer] = Share(self._mine, theirs, segment, connection)
            elif sentences := unmet(self._mine, theirs):
                self._refusals[peer] = sentences[0]
        except Refused as refusal:
            self._refusals[peer] = str(refusal)
        return peer

    def send(self, to: Peer, message: Message) -> None:
        """Send a message the other way."""
        self._rest.send(to, message)

    def post(self, write: Write) -> None:
        """Start a write and return at once.

        Raises:
            Refused: where its ticket does not hold; nothing was copied, nor posted.
        """
        share = self._shares.get(write.to)
        shared = np.isin(write.runs[:, 0], list(share.rows) if share else [])
        if share is None or not shared.any():
            self._rest.post(write)
            return
        share.tickets.open((write.key, write.piece), write.runs[shared])
        self._copier.submit(share, write.runs[shared], replace(write, runs=write.runs[~shared]))

    def poll(self) -> Sequence[Event]:
        """What happened since the last call, without waiting."""
        events: list[Event] = []
        for copy, outcome in self._copier.ended():
            events.extend(self._follow(copy, outcome))
        for peer, share in list(self._shares.items()):
            if share.has_left():
                self._retire(peer, "the peer ended, or took its shared memory back.")
        self._unmap()
        for event in self._rest.poll():
            if isinstance(event, PeerFenced):
                self._fenced_by_rest.add(event.peer)
            else:
                events.append(event)
        if self._host is not None:
            self._host.watch()
        for peer in [p for p in self._fenced_by_rest if self._host is None or self._host.bar(p)]:
            self._fenced_by_rest.remove(peer)
            events.append(PeerFenced(peer))
        return events

    def fence(self, peer: Peer) -> None:
        """Ask for the proof, which takes both: the other transport's, and that every process that
        ever had the pool from this one as `peer` is reaped, and its device copies with it."""
        self._rest.fence(peer)

    def close(self) -> None:
        """Let the copies end, unmap what others own, and stop offering what this process does."""
        self._copier.close()
        for copy, outcome in self._copier.ended():
            if outcome is Outcome.LANDED:
                copy.share.tickets.close(copy.ticket)
        for peer in list(self._shares):
            self._retire(peer, "this process closed its transport.")
        self._unmap()
        if self._host is not None:
            self._host.close()
        self._rest.close()

    def _follow(self, copy: Copy, outcome: Outcome) -> list[Event]:
        """Let what is left of a write follow its copies."""
        left = copy.left
        if outcome is Outcome.LANDED:
            copy.share.tickets.close(copy.ticket)
            if len(left.runs):
                self._rest.post(left)
                return []
            if left.note is not None:
                self._rest.send(left.to, left.note)
        return [WriteEnded(left.key, left.to, left.piece, outcome)]

    def _retire(self, peer: Peer, why: str) -> None:
        self._retired.append(self._shares.pop(peer))
        self._refusals[peer] = why

    def _unmap(self) -> None:
        for share in [share for share in self._retired if not share.tickets]:
            self._retired.remove(share)
            share.close()


def _offer(setup: Setup, regions: Sequence[Region], pool: SharedPool | None) -> Offer:
    if pool is None:
        return Offer(setup=setup)
    offsets = [pool.offset_of(region.memory) for region in regions]
    places = [Place(i, offset) for i, offset in enumerate(offsets) if offset is not None]
    if not places:
        raise ValueError(
            "no region lies in the shared pool: allocate the host pools in it, or leave it out."
        )
    return Offer(
        setup=setup,
        # everybody sees the name, so it tells nothing of the nonce
        socket=f"kvoracle-{secrets.token_hex(8)}",
        nonce=pool.nonce,
        total_bytes=pool.total_bytes,
        places=tuple(places),
    )
