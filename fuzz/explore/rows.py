"""Sets and memos of rows of small integers, asked about many rows at once.

A search asks the same few questions of millions of states.  Here a whole level of them is one
array, a question is a lookup in an exact hash table that numpy walks through, and only rows that
were never asked about reach Python.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]

_NOBODY = -1


class Growing:
    """An array to which rows are appended."""

    def __init__(self, *shape: int, dtype: type = np.int32) -> None:
        """Rows of that `shape`; none at first."""
        self._rows = np.empty((64, *shape), dtype)
        self.size = 0

    @property
    def rows(self) -> NDArray:
        """[size, *shape]: a view, until the next append."""
        return self._rows[: self.size]

    def extend(self, rows: NDArray) -> None:
        """Append many."""
        size = self.size + len(rows)
        if size > len(self._rows):
            grown = np.empty((2 * size, *self._rows.shape[1:]), self._rows.dtype)
            grown[: self.size] = self.rows
            self._rows = grown
        self._rows[self.size : size] = rows
        self.size = size

    def append(self, row: object) -> None:
        """Append one."""
        self.extend(np.asarray([row], self._rows.dtype))


class Rows:
    """Distinct rows, numbered in the order in which they came.

    Open addressing with linear probing.  Equal hashes decide nothing: rows are compared.
    """

    def __init__(self, width: int) -> None:
        self._store = Growing(width)
        self._hashes = Growing(dtype=np.uint64)
        self._factors = np.random.default_rng(width).integers(1 << 63, size=width, dtype=np.uint64)
        self._factors |= np.uint64(1)
        self._resize(10)

    def __len__(self) -> int:
        return self._store.size

    @property
    def rows(self) -> Ints:
        """[number of rows, width]."""
        return self._store.rows

    def add(self, rows: Ints) -> tuple[Ints, Ints]:
        """The numbers of `rows`, [n, width], and the places in it of those that are new."""
        while 2 * (len(self) + len(rows)) > len(self._slots):
            self._resize(self._bits + 1)
        hashes = self._hashed(rows)
        slots = (hashes >> self._shift).astype(np.int64)
        numbers = np.empty(len(rows), np.int32)
        left, fresh = np.arange(len(rows), dtype=np.int32), []
        while len(left):
            free = self._slots[slots[left]] == _NOBODY
            new = self._claimed(slots, left[free])
            numbers[new] = self._slots[slots[new]] = np.arange(len(new)) + len(self)
            self._store.extend(rows[new])
            self._hashes.extend(hashes[new])
            fresh.append(new)
            numbers[left] = self._slots[slots[left]]
            other = (self.rows[numbers[left]] != rows[left]).any(axis=1)
            left = left[other]
            slots[left] = (slots[left] + 1) & (len(self._slots) - 1)
        return numbers, np.concatenate(fresh) if fresh else left

    def _claimed(self, slots: NDArray, wanted: Ints) -> Ints:
        """Of those that want a free slot, the first one for each slot."""
        at = slots[wanted]
        # of writes to one place the last one stays
        self._slots[at[::-1]] = wanted[::-1]
        return wanted[self._slots[at] == wanted]

    def _hashed(self, rows: Ints) -> NDArray:
        hashes = np.zeros(len(rows), np.uint64)
        for column, factor in zip(rows.T, self._factors, strict=True):
            hashes += column.astype(np.uint64) * factor
        # the high bits choose the slot: they depend on all bits of all columns
        hashes ^= hashes >> np.uint64(29)
        hashes *= np.uint64(0x9E3779B97F4A7C15)
        return hashes

    def _resize(self, bits: int) -> None:
        self._bits, self._shift = bits, np.uint64(64 - bits)
        self._slots = np.full(1 << bits, _NOBODY, np.int32)
        slots = (self._hashes.rows >> self._shift).astype(np.int64)
        left = np.arange(len(self), dtype=np.int32)
        while len(left):
            free = self._slots[slots[left]] == _NOBODY
            self._claimed(slots, left[free])
            left = left[self._slots[slots[left]] != left]
            slots[left] = (slots[left] + 1) & (len(self._slots) - 1)


class Memo:
    """A function of a row, to an integer, computed once for each row."""

    def __init__(self, width: int, compute: Callable[..., int]) -> None:
        """`compute` takes the row's items as arguments."""
        self._rows = Rows(width)
        self._compute = compute
        self._results = Growing()

    def __call__(self, rows: Ints) -> Ints:
        """The results for `rows`, [n, width]."""
        numbers, fresh = self._rows.add(rows)
        if len(fresh):
            # in the order of their numbers
            new = rows[fresh].tolist()
            self._results.extend(np.array([self._compute(*row) for row in new], np.int32))
        return self._results.rows[numbers]


class Dense:
    """A function of one small integer, computed once for each."""

    def __init__(self, compute: Callable[[int], int]) -> None:
        self._compute = compute
        self._results = np.full(64, _NOBODY, np.int32)

    def __call__(self, numbers: Ints) -> Ints:
        """The results, which must not be negative, for `numbers`."""
        most = int(numbers.max(initial=0))
        if most >= len(self._results):
            more = np.full(2 * most - len(self._results), _NOBODY, np.int32)
            self._results = np.concatenate([self._results, more])
        results = self._results[numbers]
        unknown = numbers[results == _NOBODY]
        if len(unknown):
            for number in np.unique(unknown).tolist():
                self._results[number] = self._compute(number)
            results = self._results[numbers]
        return results
