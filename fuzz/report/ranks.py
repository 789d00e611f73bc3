"""What a run of ranks without an engine leaves behind for its report."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from fuzz.explore.draw import name, name_key, sentence
from fuzz.explore.memory import NOTHING, Memory, Rows
from fuzz.explore.words import Event
from fuzz.interleave import Interleaving
from fuzz.outcome import Outcome
from fuzz.report.blame import mark
from fuzz.report.messages import Messages
from fuzz.report.parts import Cell, Deed, Holder, Pool, Recorded, Segment
from fuzz.report.transfer import effects
from reference.protocol import Moved, Observation, Peer, Phase, Reserved, Sent, TransferKey

Held = dict[tuple[Peer, int], TransferKey]
"""Which transfer has each slot of each process of D."""


class RanksRecording:
    """Looks on at a run of `fuzz.interleave`."""

    def begin(self, run: Interleaving) -> None:
        self._run = run
        self._events: list[tuple[Event, Sequence[Observation]]] = []
        self._held: tuple[Held, Held] = {}, {}
        now = _copied(run.memory)
        self._rows = now, now

    def after(self, operation: Event, seen: Sequence[Observation] = ()) -> None:
        self._events.append((operation, seen))
        self._held = self._held[1], _followed(self._held[1], seen, self._run.memory)
        self._rows = self._rows[1], _copied(self._run.memory)

    def recorded(self, outcome: Outcome) -> Recorded:
        """All that the report shows of the run."""
        world, decoders = self._run.world, [*self._run.world.decoders]
        pieces = world.bounds.topology.pieces
        messages = Messages(world.writers, decoders, pieces=pieces)
        timeline, deeds = messages.timeline, []
        for number, (event, seen) in enumerate(self._events, start=1):
            text = sentence(world, event)
            row = timeline.row(f"{number}. {text}")
            for each in seen:
                messages.draw(each, row)
            told = [each for each in seen if isinstance(each, Sent | Moved)]
            deeds.append(Deed(f"{text[0].upper()}{text[1:]}.", tuple(effects(told))))
        messages.finish()
        if outcome.failed and self._events:
            mark(timeline, outcome.violations[0].sentence, len(self._events) - 1)
        peers = {peer for peer, _ in self._held[1]} | self._rows[1].keys() | {*decoders}
        return Recorded(
            deeds=tuple(deeds),
            blamed=len(deeds),
            timeline=timeline,
            pools=tuple(self._pool(peer) for peer in sorted(peers)),
            tables=(),
        )

    def _pool(self, peer: Peer) -> Pool:
        """The slots of a process of D."""
        slots = range(self._run.world.bounds.slots)
        before, after = (
            tuple(self._cell(peer, slot, moment) for slot in slots) for moment in (0, 1)
        )
        return Pool(
            title=f"Slots of {name(peer)}",
            note="destinations, a row for each part of each piece",
            before=before,
            after=after,
        )

    def _cell(self, peer: Peer, slot: int, moment: int) -> Cell:
        holder = self._held[moment].get((peer, slot))
        holders = () if holder is None else (_holder(holder),)
        rows = self._rows[moment].get(peer)
        then = self._rows[0].get(peer)
        segments: tuple[Segment, ...] = ()
        if rows is not None:
            read = holder is not None and (peer, holder) in self._run.memory.readers
            single = [
                _segment(
                    row,
                    holder if read and moment else None,
                    changed=bool(moment)
                    and bool((row != (NOTHING if then is None else then[slot][i])).any()),
                )
                for i, row in enumerate(rows[slot])
            ]
            segments = tuple(
                key._replace(rows=sum(1 for _ in alike)) for key, alike in groupby(single)
            )
        state = "free" if holder is None else "held"
        return Cell(name=str(slot), holders=holders, state=state, segments=segments)


def _segment(row: Rows, reader: TransferKey | None, *, changed: bool) -> Segment:
    """A row by its stamp; wrong where a reader should find its own there."""
    room, generation, life, writer, piece, part, _ = (int(value) for value in row)
    if room == NOTHING:
        return Segment(1, "nothing", "poison", None, changed, reader is not None)
    key = TransferKey(room, generation, life)
    words = f"part {part + 1} of piece {piece} of {name_key(key)}, from P{writer}"
    wrong = reader is not None and key != reader
    return Segment(1, words, "written", generation - 1, changed, wrong)


def _holder(key: TransferKey) -> Holder:
    return Holder(name_key(key), f"reserved for {name_key(key)}", key.generation - 1)


def _copied(memory: Memory) -> dict[Peer, Rows]:
    return {peer: rows.copy() for peer, rows in memory.rows.items()}


def _followed(held: Held, seen: Sequence[Observation], memory: Memory) -> Held:
    """Who has which slot after these observations."""
    held = dict(held)
    for each in seen:
        match each:
            case Reserved(at, key, (slot,)):
                held[at, slot] = key
            case Moved(at, key, Phase.FREE):
                held.pop((at, memory.slots[at, key]), None)
    return held
