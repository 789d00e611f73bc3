"""What the layers of a stamped decode select under HiSparse.

A row of cells is a function of the stream that the tape names, of the request's tokens and past
selections, and of the layer.  At most `topk` of its positions lie before the tail, and the tail
is always selected, so that a hot buffer of the least legal size has room for them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fuzz.tape import SplitMix
from reference.addressing import tail_start
from reference.contract import RequestId
from reference.geometry import Geometry

STREAMS = (
    "the latest positions",
    "mostly the first positions",
    "what they selected before",
    "what they have not selected for long",
    "any positions",
    "few positions among void and repeated cells",
)
"""In the order of their tape values, the plainest first."""
LATEST, FIRST, SAME, STALE, ANY, LITTERED = range(len(STREAMS))
BEYOND = 1 << 32
"""As a 32-bit integer, position 0."""


@dataclass(slots=True)
class _Past:
    """What one layer selected for one request.

    Fields:
        picks: the positions selected last, the tail left out.
        used: for each position the length of the request when it was last selected.
    """

    picks: list[int] = field(default_factory=list)
    used: dict[int, int] = field(default_factory=dict)


class Streams:
    """The selections of one run."""

    def __init__(self, geometry: Geometry, layers: int) -> None:
        self._geometry, self._layers = geometry, range(layers)
        self._past: dict[tuple[RequestId, int], _Past] = {}

    def select(
        self, request: RequestId, length: int, chain: int, stream: int
    ) -> npt.NDArray[np.int64]:
        """[dsa_layers, selection_width]: cells for the newest of `length` positions, whose chain
        value is `chain`."""
        return np.array(
            [
                self._cells(
                    self._past.setdefault((request, layer), _Past()),
                    length,
                    SplitMix(chain + layer),
                    stream,
                )
                for layer in self._layers
            ]
        )

    def _cells(self, past: _Past, length: int, random: SplitMix, stream: int) -> list[int]:
        geometry = self._geometry
        closed = tail_start(length, geometry)
        most = geometry.topk // 2 if stream == LITTERED else geometry.topk
        past.picks = _ranked(past, closed, random, stream)[:most]
        if stream in (LATEST, FIRST):
            past.picks.sort()
        cells = [*past.picks, *range(closed, length)]
        past.used.update(dict.fromkeys(cells, length))
        if stream != LITTERED:
            return cells + [-1] * (geometry.selection_width - len(cells))
        while len(cells) < geometry.selection_width:
            again = cells[random.below(len(cells))]
            litter = (-1, again, length - 1, length + random.below(3), -2, BEYOND)
            cells.append(litter[random.below(len(litter))])
        return sorted(cells, key=lambda _: random.next())


def _ranked(past: _Past, closed: int, random: SplitMix, stream: int) -> list[int]:
    """The first `closed` positions, those that the stream prefers first."""
    if stream == LATEST:
        return list(range(closed - 1, -1, -1))
    if stream == FIRST:
        return sorted(range(closed), key=lambda position: position * (1 + random.below(4)))
    if stream == SAME:
        return [*past.picks, *(p for p in range(closed) if p not in past.picks)]
    if stream == STALE:
        return sorted(range(closed), key=lambda position: past.used.get(position, -1))
    return sorted(range(closed), key=lambda _: random.next())
