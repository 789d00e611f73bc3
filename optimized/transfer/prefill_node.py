"""A rank of P: sends the parts of prefilled requests to where the ranks of D want them.

A request stays with the engine until nothing reads its memory any more on any rank of P: it is
finished in the round in which all ranks have said so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from optimized.transfer import ranks
from optimized.transfer.drain import Outgoing
from optimized.transfer.node import Failed, Freed, Node, Options, checked_room
from optimized.transfer.plan import Array, Aux, Plan, encode_aux, unpack
from optimized.transfer.transport import Refused, Transport, Write, WriteEnded
from reference.contract import Engine, InvalidCall, RequestId
from reference.protocol import (
    Closed,
    Delivered,
    Drop,
    Dropped,
    Held,
    Message,
    Outcome,
    Peer,
    Post,
    Posted,
    Send,
    Settled,
    SourceFreed,
    Take,
    Taken,
    TransferKey,
)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Source:
    """A request that is kept to be sent: the length of its prompt, the token that follows it once
    that is known, and when it was submitted."""

    length: int
    since: float
    first_token: int | None = None


class PrefillNode(Node):
    """The node of a rank of P."""

    def __init__(
        self,
        rank: ranks.PrefillRank,
        engine: Engine,
        transport: Transport,
        aux: Tensor,
        plans: Mapping[int, Plan],
        **how: Unpack[Options],
    ) -> None:
        """Own the protocol's value `rank`; `plans` say how requests move to each rank of D that
        this one writes to, and `how` are the options of `Node`."""
        super().__init__(engine, transport, aux, **how)
        self.rank = rank
        self._plans = plans
        self._sources: dict[RequestId, _Source] = {}

    def submit(self, request: RequestId, room: int, length: int) -> None:
        """Keep a running request of the engine, whose prompt is `length` tokens long, for D, which
        will ask for it by this number of the router's.

        Raises:
            InvalidCall: it does not run, is here already, or the room has no number.
        """
        if request in self._sources:
            raise InvalidCall(f"request {request} is here already: submit each once.")
        checked_room(room)
        # all ranks keep its pages from the same moment on, and not from when each first sends
        self._engine.places(request)
        self._sources[request] = _Source(length, self._clock())
        self._note(Held(self.me, request, room))
        self._carry(self.rank.submit(request, room))

    def computed(self, request: RequestId, stored: int, first_token: int | None = None) -> None:
        """The engine has stored the first `stored` positions of a request that was submitted and
        not Freed, and after the last one sampled `first_token`.

        Raises:
            InvalidCall: there is no such request.
        """
        source = self._sources.get(request)
        if source is None:
            raise InvalidCall(f"request {request} is not here: submit it first.")
        source.first_token = first_token
        plan = next(iter(self._plans.values()))
        ready = [plan.required(piece, source.length) <= stored for piece in range(plan.pieces)]
        aux_too = all(ready) and first_token is not None
        self._carry(self.rank.computed(request, sum(ready) + aux_too))

    def abort(self, request: RequestId) -> None:
        """Give a request up; one that is over is not touched."""
        if request in self._sources:
            self._carry(self.rank.cancel(request))

    def connect(self, hello: bytes) -> Peer:
        reader = self.transport.connect(hello)
        for known in self.rank.readers:
            if known.rank == reader.rank and known != reader:
                self._lose(known)
        if reader not in self.rank.readers:
            self.rank = self.rank.meet(reader)
        return reader

    def _receive(self, message: Message) -> None:
        before = self.rank
        turning = before.receive(message)
        self._note(Delivered(self.me, message, turning[0] != before))
        self._carry(turning)

    def _end_write(self, ended: WriteEnded) -> None:
        self._note(Settled(self.me, ended.key, ended.to, ended.piece, ended.outcome))
        self._carry(self.rank.settled(*ended))

    def _lose(self, peer: Peer) -> None:
        self._carry(self.rank.lose(peer))

    def _fence(self, peer: Peer) -> None:
        raise AssertionError(f"{self.me} asks for no fence, so none against {peer} holds here.")

    def _watch(self, now: float) -> None:
        for source in self.rank.sources:
            waited = now - self._sources[RequestId(source.id)].since
            if not source.failed and waited >= self._timers.transfer_timeout_s:
                self._carry(self.rank.cancel(source.id))

    def _work(self) -> None:
        """Start all writes that can be started."""
        while (turning := self.rank.take())[1]:
            self._carry(turning)

    def _prepare(self, key: TransferKey, to: Peer, piece: int) -> None:
        """Plan a piece that was taken, and have it posted.  One that cannot be planned ends the
        transfer."""
        transfer, runs = self._transfer(key, to), None
        try:
            runs = self._runs(transfer, piece)
        except Refused as refusal:
            log.warning("%s is not sent to %s: %s", key, to, refusal)
            self._carry(self.rank.cancel(_source(transfer)))
        self._carry(self.rank.prepared(key, to, piece), runs)

    def _round(self) -> None:
        gathered = self._gather(self.rank.contributions())
        brought = [[ranks.SourceState(*row) for row in rows] for rows in gathered]
        turning, freed = self.rank.reduced(ranks.prefill_together(brought))
        self._carry(turning)
        for source in freed:
            request = RequestId(source)
            self._note(SourceFreed(self.me, request, self._rounds))
            self._engine.finish(request)
            del self._sources[request]
            self._news.append(Freed(request))

    def _carry(self, turning: ranks.Turning, runs: Array | None = None) -> None:
        """Become what a call of the protocol returned, and do what it asks for; a piece that is
        posted consists of `runs`."""
        before, (self.rank, actions) = self.rank, turning
        self._tell_what_ended(before)
        for action in actions:
            match action:
                case Send(to, message):
                    self._send(to, message)
                case Take(key, to, piece):
                    self._note(Taken(self.me, key, to, piece))
                    self._prepare(key, to, piece)
                case Drop(key, to, piece):
                    self._note(Dropped(self.me, key, to, piece))
                case Post(key, to, piece, note):
                    assert runs is not None, "what could not be planned is closed"
                    self._note(Posted(self.me, key, to, piece, _source(self._transfer(key, to))))
                    write = Write(key=key, to=to, piece=piece, runs=runs, note=note)
                    self._start(write)

    def _start(self, write: Write) -> None:
        """Post a write.  One that the transport refuses has a peer that errs: what that peer takes
        for its own is not to be trusted either, so the write counts as broken."""
        try:
            self.transport.post(write)
        except Refused as refusal:
            log.warning("%s is not written to %s: %s", write.key, write.to, refusal)
            self._end_write(WriteEnded(write.key, write.to, write.piece, Outcome.BROKEN))

    def _tell_what_ended(self, before: ranks.PrefillRank) -> None:
        """What was closed, and which sources were given up, since `before`."""
        was_closed = {(t.key, t.to) for t in before.transfers if t.closed}
        for t in self.rank.transfers:
            if t.closed and (t.key, t.to) not in was_closed:
                self._note(Closed(self.me, t.key, t.to))
        had_failed = {source.id for source in before.sources if source.failed}
        for source in self.rank.sources:
            if source.failed and source.id not in had_failed:
                self._news.append(Failed(RequestId(source.id)))

    def _transfer(self, key: TransferKey, to: Peer) -> Outgoing:
        return next(t for t in self.rank.transfers if (t.key, t.to) == (key, to))

    def _runs(self, transfer: Outgoing, piece: int) -> Array:
        """What a piece copies.

        Raises:
            Refused: the places at D are not those of this prompt.
        """
        plan, request = self._plans[transfer.to.rank], _source(transfer)
        here, there = self._engine.places(request), unpack(transfer.places)
        if piece < plan.pieces:
            return plan.runs(piece, here, there)
        source = self._sources[request]
        assert source.first_token is not None, "the aux row is ready when the token is known"
        row = encode_aux(Aux(transfer.key, source.length, source.first_token))
        self._aux[here.state] = torch.from_numpy(row)
        return np.array([[plan.aux_region, here.state, there.state, 1]], dtype=np.int64)


def _source(transfer: Outgoing) -> RequestId:
    assert transfer.source is not None, "pieces are taken of what is here"
    return RequestId(transfer.source)
