"""The destinations of a world as memory: every row that lands says whose it is.

A row stands for the bytes of one part of one piece.  What a writer posts carries its stamp wherever
it lands, so that a reader of a live transfer that finds a row of somebody else names the intruder,
though no clause of the drain contract speaks of addresses.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fuzz.explore.draw import name, name_key
from fuzz.explore.parts import Parts
from fuzz.explore.words import Flight
from fuzz.step import Violation
from reference.protocol import Moved, Observation, Peer, Phase, Reading, Reserved, TransferKey

COLUMNS = 7
"""Of a stamp: room, generation and life of the key; the writer's rank; the piece, the part, and in
how many parts it comes."""
NOTHING = -1
Rows = npt.NDArray[np.int64]


class Memory:
    """All slots of all processes of D.

    Fields:
        rows: of each process, stamps [slots, rows of a slot, COLUMNS] int64; NOTHING where nothing
            has landed since the slot was freed.
        slots: where each transfer lies, or lay, at each process.
        readers: the transfers that are read.
    """

    def __init__(self, world: Parts) -> None:
        self.world = world
        self.rows: dict[Peer, Rows] = {}
        self.slots: dict[tuple[Peer, TransferKey], int] = {}
        self.readers: set[tuple[Peer, TransferKey]] = set()
        self._layouts = [self._layout(me.rank) for me in world.decoders]

    def land(self, flight: Flight) -> list[Violation]:
        """The next part of a write lands, in the slot to which it was posted."""
        whose = (flight.writer.rank, flight.piece, flight.parts, self.world.parts_of(flight))
        row = self._layouts[flight.to.rank].index(whose)
        self._of(flight.to)[flight.slot, row] = (*_stamp(flight.key), *whose)
        return self._read(flight.to)

    def observe(self, seen: Observation) -> list[Violation]:
        """Follow what a rank does with its slots; what it frees is wiped."""
        match seen:
            case Reserved(at, key, (slot,)):
                self.slots[at, key] = slot
            case Moved(at, key, Phase.FREE):
                self._of(at)[self.slots[at, key]] = NOTHING
            case Reading(at, key, ended=False):
                self.readers.add((at, key))
                return self._read(at)
            case Reading(at, key):
                self.readers.discard((at, key))
        return []

    def _read(self, at: Peer) -> list[Violation]:
        """Read all that is being read at a process; of each transfer the first wrong row."""
        found = []
        for key in sorted(key for where, key in self.readers if where == at):
            slot, layout = self.slots[at, key], self._layouts[at.rank]
            rows = self._of(at)[slot]
            should = np.array([(*_stamp(key), *whose) for whose in layout])
            wrong = np.flatnonzero((rows != should).any(axis=1))
            if wrong.size:
                row = int(wrong[0])
                place = f"Slot {slot} of {name(at)}"
                wanted, holds = _words(should[row]), _words(rows[row])
                sentence = f"{place} should hold {wanted}; it holds {holds}."
                found.append(Violation("provenance", "slot", sentence, place, wanted, holds))
        return found

    def _of(self, at: Peer) -> Rows:
        if at not in self.rows:
            shape = (self.world.bounds.slots, len(self._layouts[at.rank]), COLUMNS)
            self.rows[at] = np.full(shape, NOTHING, np.int64)
        return self.rows[at]

    def _layout(self, rank: int) -> list[tuple[int, int, int, int]]:
        """The rows of a slot: writer, piece, part, and parts of the piece."""
        topology, parts = self.world.bounds.topology, self.world.bounds.parts
        return [
            (writer, piece, part, of)
            for writer in topology.writers[rank]
            for piece in topology.pieces_of(rank, writer)
            for of in ((1,) if piece == topology.pieces else (parts,))
            for part in range(of)
        ]


def _stamp(key: TransferKey) -> tuple[int, int, int]:
    return key.room, key.generation, key.incarnation


def _words(row: Rows) -> str:
    """A stamp in words."""
    room, generation, life, writer, piece, part, of = (int(value) for value in row)
    if room == NOTHING:
        return "nothing"
    whose = name_key(TransferKey(room, generation, life))
    return f"part {part + 1} of {of} of piece {piece} of {whose}, from P{writer}"
