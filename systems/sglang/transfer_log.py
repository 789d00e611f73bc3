"""What SGLang's transfer did, told in the words of `reference.protocol`.

So `reference.drain` judges SGLang by the clauses by which it judges our own protocol.  How its
doings are told:

- A transfer key is a request's attempt, as the harness numbers them; SGLang itself knows a room.
- A piece is all that one chunk makes SGLang write, so it holds the row of metadata as well: SGLang
  does not promise to write that row after the data, but tells of both together.
- A status message of success stands for an ACK too: after it the writer has nothing left.  Up to
  0.5.22 there is none, and NIXL's notification of the chunk stands for it.
- A request that failed on a rank of D is drained there when its pages are released.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from reference.drain import Judge, Transfer, Violation, observe, observe_instance
from reference.protocol import (
    Abort,
    Ack,
    Advertise,
    Closed,
    Delivered,
    Dropped,
    Held,
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
from systems.sglang.transfer_end import DECODE_PORT, PREFILL_PORT

P, D = Side
SUCCESS = 4
"""Of SGLang's KVPoll."""
PIECE = 0
"""The only one that a writer sends."""
_FIRST = {"round_of": 0, "landed": 1, "live": 3, "drained": 3, "released": 4}
"""In which order what several ranks did in one turn of theirs is told; 2 is for all else."""


class Asked(NamedTuple):
    """A request: its key, its name at both ends, and its pages on D and on P."""

    key: TransferKey
    name: int
    pages: list[int]
    source: list[int]


class Letter(NamedTuple):
    """A control message under way; `message` is what it says in our words, if it can be said."""

    at: Peer
    to: Peer
    frames: list[bytes]
    message: Message | None


class Ledger:
    """The observations of a run, in an order that respects causes.

    Fields:
        log: the observations.
        letters: control messages that were sent, and have neither arrived nor been lost.
        asked: all requests, by name.
        phases: where a request stands on a rank of D.
        tokens: what D took for the first token of a request that is live.
    """

    def __init__(self, ranks: int, *, notifies: bool) -> None:
        """`notifies`: the release has no status message of success."""
        writers = tuple((rank,) for rank in range(ranks))
        self._topology = Topology(pieces=PIECE, writers=writers, quarantine_limit=1)
        self._notifies = notifies
        self.log: list[Observation] = []
        self.letters: list[Letter] = []
        self.asked: dict[int, Asked] = {}
        self.phases: dict[tuple[Peer, TransferKey], Phase] = {}
        self.tokens: dict[int, int] = {}
        self._round = {P: 0, D: 0}
        self._served: dict[tuple[int, int], Asked] = {}  # by rank of P and room
        self._closing: dict[tuple[int, int], Asked] = {}  # whose abort a rank of P handled last
        self._armed: dict[tuple[int, int, int], Asked] = {}  # by rank of D, room, generation
        self._batches: dict[tuple[int, int], Asked | None] = {}  # by rank of P and number
        self._told: set[tuple[Peer, TransferKey]] = set()  # whose abort was sent

    # what the harness does

    def held(self, at: Peer, asked: Asked) -> None:
        """P has the request's pages."""
        self.log.append(Held(at, asked.name, asked.key.room))

    def reserved(self, at: Peer, asked: Asked) -> None:
        """D has taken pages for the request."""
        self.phases[at, asked.key] = Phase.RESERVED
        self.log.append(Reserved(at, asked.key, tuple(asked.pages)))

    def next_round(self, side: Side) -> int:
        """A turn of a side's scheduler begins; returns its number."""
        self._round[side] += 1
        return self._round[side]

    def finished(self, at: Peer, asked: Asked) -> None:
        """D has read what is live, and frees it."""
        self.log.append(Reading(at, asked.key, ended=True))
        self._enter(at, asked.key, Phase.FREE)

    def arriving(self, letter: Letter) -> None:
        """A message is about to be handled."""
        message, rank = letter.message, letter.to.rank
        if isinstance(message, Advertise):
            self._served[rank, message.key.room] = self.asked[message.request]
        elif isinstance(message, Abort):
            self._closing[rank, message.key.room] = self.asked[message.key.generation]

    def arrived(self, letter: Letter, changed: bool) -> None:
        """It was handled."""
        message = letter.message
        assert message is not None
        if isinstance(message, Ack) and self._newest(message.key.room).key == message.key:
            # SGLang may still wait for it where the memory that we watch is free already
            changed = changed and self.phases[letter.to, message.key] is not Phase.FREE
        self.log.append(Delivered(letter.to, message, changed))
        if isinstance(message, Status):
            self.log.append(Delivered(letter.to, Ack(message.key, letter.at), changed))

    # what SGLang did: the entries of the ends' journals

    def take(self, side: Side, entries: Iterable[tuple[Any, ...]]) -> None:
        """Journals of all ranks of a side, each entry behind the rank that it is of.

        A turn begins with a collective, after which each rank knows where the others stand; so
        what the ranks of D made of it is told phase by phase.
        """
        seen = list(entries)
        implied = {"live": "landed", "released": "drained"} if side is D else {}
        seen += [(at, implied[what], rest[0]) for at, what, *rest in seen if what in implied]
        for at, what, *rest in sorted(seen, key=lambda entry: _FIRST.get(entry[1], 2)):
            getattr(self, f"_{what}")(at, *rest)

    def _sent(self, at: Peer, port: int, frames: list[bytes]) -> None:
        to = Peer(Side(1 - at.side), port - (PREFILL_PORT if at.side is D else DECODE_PORT), 0)
        message = self._said(at, to, frames)
        self.letters.append(Letter(at, to, frames, message))
        if message is None:
            return
        key = message.key
        if isinstance(message, Ack | Status):
            self.log.append(Closed(at, key, to))
        self.log.append(Sent(at, to, message))
        if isinstance(message, Status):
            self.log.append(Sent(at, to, Ack(key, at)))
        elif isinstance(message, Advertise) and self.phases[at, key] is Phase.RESERVED:
            self._enter(at, key, Phase.ADVERTISED)
        elif isinstance(message, Abort):
            self._told.add((at, key))
            if self.phases[at, key] is Phase.FAILED:
                self._enter(at, key, Phase.ABORTED)

    def _said(self, at: Peer, to: Peer, frames: list[bytes]) -> Message | None:
        """A control message in our words; None for one that the contract has no word for."""
        tag, room = frames[0], int(frames[1]) if frames[1] != b"None" else -1
        if tag == b"ABORT":
            asked = self._newest(room)
            if len(frames) > 4:
                self._armed[at.rank, room, int(frames[4])] = asked
            return Abort(asked.key, at)
        if tag == b"ABORT_ACK" and len(frames) > 3:
            return Ack(self._armed[to.rank, room, int(frames[3])].key, at)
        if tag == b"ABORT_ACK":
            return Ack(self._closing[at.rank, room].key, at)
        if tag == b"KV_STATUS" and int(frames[2]) == SUCCESS and (at.rank, room) in self._served:
            return Status(self._served[at.rank, room].key, at)
        if tag == b"NixlMsgGuard" and room >= 0:
            asked = self._newest(room)
            return Advertise(asked.key, at, 0, asked.name)
        return None

    def _newest(self, room: int) -> Asked:
        """The newest request of a room at D."""
        return next(a for a in reversed(self.asked.values()) if a.key.room == room)

    def _taken(self, at: Peer, batch: int, room: int) -> None:
        asked = self._batches[at.rank, batch] = self._served.get((at.rank, room))
        if asked is not None:
            self.log.append(Taken(at, asked.key, Peer(D, at.rank, 0), PIECE))

    def _dropped(self, at: Peer, batch: int) -> None:
        if asked := self._batches[at.rank, batch]:
            self.log.append(Dropped(at, asked.key, Peer(D, at.rank, 0), PIECE))

    def _posted(self, at: Peer, batch: int) -> None:
        if asked := self._batches[at.rank, batch]:
            self.log.append(Posted(at, asked.key, Peer(D, at.rank, 0), PIECE, asked.name))

    def _settled(self, at: Peer, batch: int, outcome: str) -> None:
        asked, to = self._batches[at.rank, batch], Peer(D, at.rank, 0)
        if asked is None:
            return
        key = asked.key
        self.log.append(Settled(at, key, to, PIECE, Outcome[outcome]))
        if self._notifies and outcome == "LANDED" and self.phases[to, key] is Phase.ADVERTISED:
            ack = Ack(key, at)
            self.log += Closed(at, key, to), Sent(at, to, ack), Delivered(to, ack, False)

    def _round_of(self, at: Peer, number: int, values: int) -> None:
        self.log.append(Reduced(at, number, values))

    def _landed(self, at: Peer, name: int) -> None:
        self._enter(at, self.asked[name].key, Phase.LANDED)

    def _live(self, at: Peer, name: int, token: int) -> None:
        key = self.asked[name].key
        self.tokens[name] = token
        self._enter(at, key, Phase.LIVE)
        self.log.append(Reading(at, key))

    def _failed(self, at: Peer, name: int) -> None:
        key = self.asked[name].key
        self._enter(at, key, Phase.FAILED)
        if (at, key) in self._told:
            self._enter(at, key, Phase.ABORTED)

    def _drained(self, at: Peer, name: int) -> None:
        key = self.asked[name].key
        if self.phases[at, key] is Phase.FAILED:
            self._enter(at, key, Phase.ABORTED)
        self._enter(at, key, Phase.LOCAL_DRAINED)

    def _released(self, at: Peer, name: int) -> None:
        if at.side is P:
            self.log.append(SourceFreed(at, name, self._round[P]))
            return
        for phase in (Phase.RELEASABLE, Phase.FREE):
            self._enter(at, self.asked[name].key, phase)

    def _enter(self, at: Peer, key: TransferKey, phase: Phase) -> None:
        self.phases[at, key] = phase
        self.log.append(Moved(at, key, phase, self._round[D]))

    # what it amounts to

    def violations(self, *, live: bool = True, but: Asked | None = None) -> list[Violation]:
        """What the run breaks, in order; after each, the judge goes on with what was done.

        `live` as in `Judge.finish`, which does not ask for the end of `but`.
        """
        judge, found = Judge(self._topology, arrivals=False), list[Violation]()
        for seen in self.log:
            try:
                judge.observe(seen)
            except Violation as violation:
                found.append(violation)
                self._take_in(judge, seen)
        if but is not None:
            judge.transfers.pop(but.key, None)
        try:
            judge.finish(live=live)
        except Violation as violation:
            found.append(violation)
        return found

    def _take_in(self, judge: Judge, seen: Observation) -> None:
        """Let the judge know of what it has just condemned, as far as later clauses need it."""
        with suppress(Violation):
            judge.instance = observe_instance(judge.instance, seen, self._topology)
        if isinstance(seen, SourceFreed):
            held = {hold for hold in judge.instance.held if hold[:2] != (seen.at, seen.source)}
            judge.instance = judge.instance._replace(held=frozenset(held))
        key = getattr(seen, "key", None)
        if key is None:
            return
        before = judge.transfers.get(key) or Transfer((None,) * len(self._topology.writers))
        try:
            after = observe(before, seen, self._topology, arrivals=False)
        except Violation:
            phases = list(before.phases)
            if isinstance(seen, Moved):
                phases[seen.at.rank] = seen.phase
            after = before._replace(phases=tuple(phases))
        judge.transfers[key] = after
