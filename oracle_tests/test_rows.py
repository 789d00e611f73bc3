"""Sets and memos of rows agree with a dict, also where all hashes collide."""

from __future__ import annotations

import numpy as np
import pytest

from fuzz.explore.rows import Dense, Growing, Memo, Rows


def batches(seed, width, most):
    """Rows with many repetitions, some at once and some later."""
    draw = np.random.default_rng(seed)
    for size in (0, 1, 7, 500, 3000, 3000):
        yield draw.integers(most, size=(size, width), dtype=np.int32)


def must_agree(rows, width, most):
    known: dict[tuple[int, ...], int] = {}
    for batch in batches(1, width, most):
        numbers, fresh = rows.add(batch)
        before = len(known)
        for row, number in zip(map(tuple, batch.tolist()), numbers.tolist(), strict=True):
            assert known.setdefault(row, number) == number
        assert sorted(known.values()) == list(range(len(rows)))
        assert [numbers[place] for place in fresh] == list(range(before, len(known)))
        for row, number in known.items():
            assert tuple(rows.rows[number].tolist()) == row


@pytest.mark.parametrize(("width", "most"), [(1, 50), (2, 60), (8, 3)])
def test_rows_are_numbered_as_they_come(width, most):
    must_agree(Rows(width), width, most)


@pytest.mark.parametrize("bits", [0, 3])
def test_equal_hashes_decide_nothing(monkeypatch, bits):
    def poor(self, rows):
        hashes = rows.sum(axis=1).astype(np.uint64) & np.uint64((1 << bits) - 1)
        return hashes << np.uint64(60)

    monkeypatch.setattr(Rows, "_hashed", poor)
    must_agree(Rows(2), 2, 12)


def test_memo_computes_each_row_once():
    asked = []

    def total(*row):
        asked.append(row)
        return sum(row)

    memo = Memo(3, total)
    for batch in batches(2, 3, 6):
        assert memo(batch).tolist() == batch.sum(axis=1).tolist()
    assert len(asked) == len(set(asked)) <= 6**3


def test_dense_computes_each_number_once():
    asked = []

    def double(number):
        asked.append(number)
        return 2 * number

    dense = Dense(double)
    for batch in batches(3, 1, 900):
        assert dense(batch[:, 0]).tolist() == (2 * batch[:, 0]).tolist()
    assert len(asked) == len(set(asked))


def test_growing_keeps_what_it_has():
    growing = Growing(2)
    for number in range(200):
        growing.append((number, -number))
    growing.extend(np.zeros((1000, 2), np.int32))
    assert growing.rows[:200].tolist() == [[n, -n] for n in range(200)]
    assert growing.size == 1200
