"""Reference-counted ids: logical pages, KDA state slots and ring rows.

One class serves all three, since each is a set of equal cells of which id 0 is
the padding cell.  The order in which free ids are handed out is a test knob:
immediate reuse exposes stale readers, the highest id exposes narrow integers,
and a permutation keeps ids of different pools from coinciding.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from reference.contract import OutOfMemory, PageOrder

Ids = NDArray[np.int64]
NONE: Ids = np.zeros(0, dtype=np.int64)
PADDING = 0
"""The cell that masked rows read and write; never handed out."""


class Allocator:
    """Hands out ids 1 .. size - 1 and counts who holds them.

    Args:
        size: cells, the padding cell included.
        order: "reuse" (freed last comes first), "high" (highest id first) or "permuted"
            (a fixed random order).
        seed: of "permuted".
        scrub: called with the ids that became free.
        noun, option: what the ids are, and the option that makes more of them.
    """

    def __init__(
        self,
        size: int,
        *,
        order: PageOrder = "reuse",
        seed: int = 0,
        scrub: Callable[[Ids], None] | None = None,
        noun: str = "ids",
        option: str = "size",
    ) -> None:
        self.counts = np.zeros(size, dtype=np.int64)
        self.reused = 0
        self._scrub = scrub
        self._names = noun, option
        self._was_freed = np.zeros(size, dtype=bool)
        self._stamp = 0
        self._ranks: list[int] | None = None
        if order == "high":
            self._ranks = [-i for i in range(size)]
        elif order == "permuted":
            self._ranks = np.random.default_rng(seed).permutation(size).tolist()
        # a heap of (rank, id): the id with the lowest rank is handed out next
        self._free = [(self._ranks[i] if self._ranks else i, i) for i in range(1, size)]
        heapq.heapify(self._free)

    @property
    def available(self) -> int:
        """Ids that nobody holds."""
        return len(self._free)

    def free_ids(self) -> frozenset[int]:
        """The ids that nobody holds, as a copy."""
        return frozenset(map(itemgetter(1), self._free))

    def require(self, count: int) -> None:
        """Raises OutOfMemory unless so many ids are free."""
        if count > self.available:
            noun, option = self._names
            raise OutOfMemory(
                f"the step needs {count} free {noun} and {self.available} are left: finish, abort "
                f"or retract a request, or raise {option}."
            )

    def allocate(self, count: int) -> Ids:
        """[count] int64: fresh ids, each held once.  The caller has made room before."""
        if not count:
            return NONE
        assert count <= len(self._free), "allocate() was called without enough free ids"
        ids = np.array([heapq.heappop(self._free)[1] for _ in range(count)], dtype=np.int64)
        assert not self.counts[ids].any(), "a free id is still held"
        self.counts[ids] = 1
        self.reused += int(self._was_freed[ids].sum())
        return ids

    def retain(self, ids: Sequence[int] | Ids) -> None:
        """One more holder for each id."""
        ids = np.asarray(ids, dtype=np.int64)
        assert (self.counts[ids] > 0).all(), "an id that nobody holds cannot be shared"
        np.add.at(self.counts, ids, 1)

    def release(self, ids: Sequence[int] | Ids) -> None:
        """One holder less for each id; those without a holder become free."""
        ids = np.asarray(ids, dtype=np.int64)
        if not ids.size:
            return
        assert ids.min() > PADDING, "the padding cell has no holder"
        np.subtract.at(self.counts, ids, 1)
        left = self.counts[ids]
        assert left.min() >= 0, "id released twice"
        freed = ids[left == 0]
        if freed.size:
            self._return(freed)

    def _return(self, freed: Ids) -> None:
        if self._scrub is not None:
            self._scrub(freed)
        self._was_freed[freed] = True
        for cell in freed.tolist():
            heapq.heappush(self._free, (self._rank(cell), cell))

    def _rank(self, cell: int) -> int:
        """Rank of a cell that becomes free; without fixed ranks the latest is the lowest."""
        if self._ranks is not None:
            return self._ranks[cell]
        self._stamp -= 1
        return self._stamp
