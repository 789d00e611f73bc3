"""A rank of D: reserves memory, tells the writers where it is, and gives it back when it may.

The engine's memory follows the phases: it is taken with RESERVED, may be read from LIVE on, and is
given back with FREE, which comes in a round, whoever asked for it and however early.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Unpack

from torch import Tensor

from optimized.transfer import ranks
from optimized.transfer.drain import BEFORE_LIVE, UNDRAINED, Contribution, Incoming
from optimized.transfer.node import Failed, Freed, Live, Node, Options, checked_room
from optimized.transfer.plan import CLEARED, decode_aux, pack
from optimized.transfer.transport import Transport, WriteEnded
from reference.contract import Engine, InvalidCall, OutOfMemory, RequestId, Tokens
from reference.protocol import (
    Counted,
    Delivered,
    Enter,
    Fenced,
    Message,
    Moved,
    Peer,
    Phase,
    ReadAux,
    Reading,
    Reserved,
    Send,
    TransferKey,
)

log = logging.getLogger(__name__)


class _Waiting(NamedTuple):
    """A request that has no memory yet."""

    request: RequestId
    room: int
    tokens: Tokens


@dataclass(slots=True)
class _Coming:
    """A request that has memory here.

    Fields:
        slot: of its state and of its aux row.
        length: of its prompt; `pages`: how many were reserved for it.
        since: when it was reserved, and from its failure on when it failed.
        said: when its writers were last told something.
        leave: how the engine gives its memory back.
    """

    request: RequestId
    slot: int
    length: int
    pages: int
    since: float
    said: float
    leave: Callable[[RequestId], None]
    first_token: int = -1


class DecodeNode(Node):
    """The node of a rank of D."""

    def __init__(
        self,
        rank: ranks.DecodeRank,
        engine: Engine,
        transport: Transport,
        aux: Tensor,
        **how: Unpack[Options],
    ) -> None:
        """Own the protocol's value `rank`; `how` are the options of `Node`."""
        super().__init__(engine, transport, aux, **how)
        self.rank = rank
        self._queue: deque[_Waiting] = deque()
        self._coming: dict[TransferKey, _Coming] = {}
        self._lost: set[Peer] = set()

    def submit(self, request: RequestId, room: int, tokens: Tokens) -> None:
        """Queue a request, by the router's number of it, whose prompt P will send under `room`.
        Memory is found for it in some later tick; one that is larger than all memory waits, and
        others behind it, until it is aborted.  One that the engine does not take has Failed and is
        Freed then.

        Raises:
            InvalidCall: the request is here already, or the room has no number.
        """
        if self._is_waiting(request) or self._transfer(request) is not None:
            raise InvalidCall(f"request {request} is here already: submit each once.")
        self._queue.append(_Waiting(request, checked_room(room), tokens))

    def finish(self, request: RequestId) -> None:
        """A live request is not decoded any more.  The engine finishes it as soon as that is so
        on all ranks, which is when Freed comes.

        Raises:
            InvalidCall: the request is not live.
        """
        transfer = self._transfer(request)
        if transfer is None or transfer.phase is not Phase.LIVE:
            raise InvalidCall(f"request {request} is not live: finish it once, after its Live.")
        self._end_reading(transfer.key, self._engine.finish)

    def abort(self, request: RequestId) -> None:
        """Give a request up, in whatever state it is: Freed will come.  One that is over is not
        touched."""
        if self._is_waiting(request):
            self._queue = deque(w for w in self._queue if w.request != request)
            self._news.append(Freed(request))
        transfer = self._transfer(request)
        if transfer is not None and transfer.phase is Phase.LIVE:
            self._end_reading(transfer.key, self._engine.abort)
        elif transfer is not None:
            self._carry(self.rank.cancel(transfer.key))

    def connect(self, hello: bytes) -> Peer:
        writer = self.transport.connect(hello)
        for known in self.rank.writers:
            if known.rank == writer.rank and known != writer:
                self._lose(known)
        self.rank = self.rank.meet(writer)
        return writer

    def count(self) -> None:
        """Note how many pages are free, and who has the others, as the engine knows them.  What
        it caches or decodes into beyond the prompts counts as free here."""
        snapshot = self._engine.inspect()
        live = {t.request for t in self.rank.transfers if t.phase is Phase.LIVE}
        owned = sum(
            len(snapshot.requests[coming.request].pages[: coming.pages])
            for coming in self._coming.values()
            if coming.request in live
        )
        held = sum(len(view.pages) for view in snapshot.reserved.values())
        total = len(snapshot.free_pages) + len(snapshot.ref_counts)
        self._note(Counted(self.me, total - owned - held, owned, held, total))

    def _is_waiting(self, request: RequestId) -> bool:
        return any(waiting.request == request for waiting in self._queue)

    def _transfer(self, request: RequestId) -> Incoming | None:
        return next((t for t in self.rank.transfers if t.request == request), None)

    def _end_reading(self, key: TransferKey, leave: Callable[[RequestId], None]) -> None:
        self._coming[key].leave = leave
        self._note(Reading(self.me, key, ended=True))
        self._carry(self.rank.end_reading(key))

    def _receive(self, message: Message) -> None:
        before = self.rank
        move = before.receive(message)
        self._note(Delivered(self.me, message, move[0] != before))
        self._carry(move)

    def _end_write(self, ended: WriteEnded) -> None:
        raise AssertionError(f"{self.me} posts nothing, so {ended} is not its own.")

    def _lose(self, peer: Peer) -> None:
        self._lost.add(peer)
        self._carry(self.rank.lose(peer))

    def _fence(self, peer: Peer) -> None:
        self._note(Fenced(self.me, peer))
        self._carry(self.rank.fence(peer))

    def _watch(self, now: float) -> None:
        timers = self._timers
        for transfer in self.rank.transfers:
            key, phase, coming = transfer.key, transfer.phase, self._coming[transfer.key]
            waited = now - coming.since
            if phase in BEFORE_LIVE and waited >= timers.transfer_timeout_s:
                self._carry(self.rank.cancel(key))
            elif phase is Phase.ABORTED and waited >= timers.abort_timeout_s:
                self._carry(self.rank.expire(key))
            elif now - coming.said >= timers.retry_s:
                coming.said = now
                self._carry(self.rank.retry(key))

    def _work(self) -> None:
        """Ask for the proof that a lost writer is over, where it is needed: it costs a transport
        dear."""
        for peer in sorted(self._lost):
            if any(t.phase in UNDRAINED and peer in t.undrained for t in self.rank.transfers):
                self._lost.remove(peer)
                self.transport.fence(peer)

    def _round(self) -> None:
        gathered = self._gather(self.rank.contributions())
        brought = [[Contribution(*row) for row in rows] for rows in gathered]
        self._carry(self.rank.reduced(ranks.decode_together(brought)))
        while self._queue and self.rank.admits:
            if not self._reserve(self._queue[0]):
                break
            self._queue.popleft()

    def _reserve(self, waiting: _Waiting) -> bool:
        """Take memory for a request, if there is enough: on all ranks, or on none.  Returns
        whether it waits no more."""
        request, room, tokens = waiting
        try:
            places = self._engine.reserve(request, tokens)
        except OutOfMemory:
            return False
        except InvalidCall as refusal:
            log.warning("request %s is not taken: %s", request, refusal)
            self._news += [Failed(request), Freed(request)]
            return True
        self._aux[places.state] = CLEARED
        self.rank, key = self.rank.reserve(room, request, pack(places))
        now = self._clock()
        self._coming[key] = _Coming(
            request=request,
            slot=places.state,
            length=places.length,
            pages=len(places.index),
            since=now,
            said=now,
            leave=self._engine.drop,
        )
        self._note(Reserved(self.me, key, places.index))
        self._carry(self.rank.advertise(key))
        return True

    def _carry(self, move: ranks.Move) -> None:
        """Become what a call of the protocol returned, and do what it asks for."""
        self.rank, actions = move
        for action in actions:
            match action:
                case Send(to, message):
                    self._send(to, message)
                case Enter(key, phase):
                    self._note(Moved(self.me, key, phase, self._rounds))
                    self._enter(key, phase)
                case ReadAux(key):
                    self._carry(self.rank.aux(key, self._named(key)))

    def _enter(self, key: TransferKey, phase: Phase) -> None:
        """Let the engine follow."""
        coming = self._coming[key]
        request = coming.request
        if phase is Phase.FAILED:
            coming.since = coming.said = self._clock()
            self._news.append(Failed(request))
        elif phase is Phase.LIVE:
            self._engine.adopt(request)
            self._note(Reading(self.me, key))
            self._news.append(Live(request, coming.first_token))
        elif phase is Phase.FREE:
            coming.leave(request)
            del self._coming[key]
            self._news.append(Freed(request))

    def _named(self, key: TransferKey) -> TransferKey | None:
        """The transfer that an aux row names; None where it speaks of another prompt."""
        coming = self._coming[key]
        aux = decode_aux(self._aux[coming.slot].numpy())
        coming.first_token = aux.first_token
        return aux.key if aux.length == coming.length else None
