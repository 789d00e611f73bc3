"""The timeline of ranks: what each does, and the messages and writes between them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from fuzz.explore.draw import name, name_key
from fuzz.report.parts import Arrow, Lane, Mark, Place, Timeline
from reference.protocol import (
    Arrived,
    Closed,
    Delivered,
    Died,
    Dropped,
    Fenced,
    Message,
    Moved,
    Observation,
    Outcome,
    Peer,
    Posted,
    Reading,
    Reserved,
    Sent,
    Settled,
    SourceFreed,
    Taken,
    TransferKey,
)

Write = tuple[Peer, TransferKey, Peer, int]
"""Writer, key, rank of D, and piece."""


class Messages:
    """Draws observations into a timeline, whose lanes are those given, the ranks of P, and then
    those of D."""

    def __init__(
        self,
        writers: Sequence[Peer],
        readers: Sequence[Peer],
        *,
        pieces: int,
        lanes: Sequence[Lane] = (),
    ) -> None:
        """`pieces`: of data in a transfer; the aux row has that number."""
        self.timeline = Timeline(lanes=[*lanes])
        self._pieces = pieces
        for peer in (*writers, *readers):
            self.lane(peer)
        self._sent: dict[tuple[str, Message], list[Place]] = defaultdict(list)
        self._came: Counter[tuple[str, Message]] = Counter()
        self._posted: dict[Write, Place] = {}
        self._landed: set[Write] = set()

    def lane(self, peer: Peer) -> int:
        """That of a rank, whichever life of it."""
        return self.timeline.lane(Lane(_rank(peer), "ranks of D" if peer.side else "ranks of P"))

    def says(self, seen: Observation) -> str:
        """Who does what; nothing of rounds and counts."""
        said = self._said(seen)
        return f"{name(_where(seen))} {said}" if said else ""

    def draw(self, seen: Observation, row: int) -> None:
        """Enter what was noted into a row."""
        said, place = self._said(seen), (self.lane(_where(seen)), row)
        if said:
            kind = "end" if isinstance(seen, Died) else "done"
            self.timeline.marks.append(Mark(place, said, kind))
        match seen:
            case Sent(_, to, message):
                self._sent[_rank(to), message].append(place)
            case Delivered(at, message):
                self._handled((_rank(at), message), place)
            case Posted(at, key, to, piece):
                self._posted[at, key, to, piece] = place
            case Arrived(at, key, writer, piece):
                self._landed.add((writer, key, at, piece))
                self._flew((writer, key, at, piece), place, said)
            case Settled(at, key, to, piece, outcome):
                write = at, key, to, piece
                if write not in self._landed:
                    # what goes through shared memory lands unseen
                    stop = (self.lane(to), row) if outcome is Outcome.LANDED else None
                    self._flew(write, stop, said)

    def finish(self) -> Timeline:
        """What never came is drawn as it left."""
        for sent, places in self._sent.items():
            for place in places[self._came[sent] :]:
                self._arrow(
                    place, None, f"{words(sent[1])} had not come when the run ended", "message"
                )
        return self.timeline

    def _handled(self, sent: tuple[str, Message], place: Place) -> None:
        if starts := self._sent.get(sent):
            # one that comes twice was sent once
            start = starts[min(self._came[sent], len(starts) - 1)]
            self._arrow(start, place, words(sent[1]), "message")
        self._came[sent] += 1

    def _flew(self, write: Write, stop: Place | None, text: str) -> None:
        if write in self._posted:
            self._arrow(self._posted[write], stop, text, "write")

    def _arrow(self, start: Place, stop: Place | None, text: str, kind: str) -> None:
        self.timeline.arrows.append(Arrow(start, stop, text, kind))

    def _piece(self, piece: int) -> str:
        return "the aux row" if piece == self._pieces else f"piece {piece}"

    def _said(self, seen: Observation) -> str:
        """What a rank does, in words."""
        match seen:
            case Sent(_, to, message):
                return f"sends {words(message)} to {name(to)}"
            case Delivered(_, message, changed):
                return f"handles {words(message)}" + ("" if changed else ", which changes nothing")
            case Posted(_, key, to, piece):
                return f"posts {self._piece(piece)} of {name_key(key)} to {name(to)}"
            case Arrived(_, key, writer, piece, part, parts):
                of = f", part {part} of {parts}" if parts > 1 else ""
                return f"gets {self._piece(piece)} of {name_key(key)} from {name(writer)}{of}"
            case Settled(_, key, _, piece, outcome):
                return f"learns that {self._piece(piece)} of {name_key(key)} is {outcome.name}"
            case Taken(_, key, to, piece):
                return f"takes {self._piece(piece)} of {name_key(key)} for {name(to)}"
            case Dropped(_, key, to, piece):
                return f"drops {self._piece(piece)} of {name_key(key)} for {name(to)}"
        return _done(seen)


def words(message: Message) -> str:
    """A message in words."""
    return f"{type(message).__name__.upper()} of {name_key(message.key)}"


def _where(seen: Observation) -> Peer:
    return seen.peer if isinstance(seen, Died) else seen.at


def _rank(peer: Peer) -> str:
    """A rank, whichever life of it."""
    return f"{'PD'[peer.side]}{peer.rank}"


def _done(seen: Observation) -> str:
    """What a rank does with its own memory and state."""
    match seen:
        case Reserved(_, key, pages):
            return f"reserves {', '.join(map(str, pages)) or 'nothing'} for {name_key(key)}"
        case Moved(_, key, phase):
            return f"has {name_key(key)} {phase.name}"
        case Closed(_, key, to):
            return f"closes {name_key(key)} for {name(to)}"
        case SourceFreed(_, source):
            return f"frees the source of request {source}"
        case Reading(_, key, ended):
            return f"has read {name_key(key)}" if ended else f"begins to read {name_key(key)}"
        case Died():
            return "ends"
        case Fenced(_, writer):
            return f"has proof that the writes of {name(writer)} are over"
    return ""
