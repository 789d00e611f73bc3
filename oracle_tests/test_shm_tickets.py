"""Tickets: what a write to mapped memory may touch, checked before a byte is copied."""

from __future__ import annotations

import numpy as np
import pytest

from optimized.transfer.shm_copy import Tickets
from optimized.transfer.transport import Refused
from oracle_tests.shm_cases import (
    KEY,
    RUNS,
    SOURCE_ITEMS,
    TARGET_ITEMS,
    D,
    both_ends,
    join,
    untouched,
    write,
)
from reference.protocol import TransferKey


@pytest.fixture
def ends():
    with both_ends() as pair:
        yield pair


BAD_RUNS = {
    "past the target": ((0, 0, TARGET_ITEMS[0] - 1, 2),),
    "past the source": ((0, SOURCE_ITEMS[0] - 1, 0, 2),),
    "before the target": ((0, 0, -1, 2),),
    "before the source": ((0, -1, 0, 2),),
    "no items": ((0, 0, 0, 0),),
    "negative items": ((0, 5, 5, -2),),
    "bytes for items": ((0, 0, 96, 96),),
    "overflow": ((0, 0, 2**63 - 2, 4),),
    "overflow of items": ((0, 4, 4, 2**63 - 2),),
    "twice": ((0, 0, 4, 4), (0, 8, 7, 1)),
    "same run twice": ((1, 0, 4, 4), (1, 0, 4, 4)),
}


@pytest.mark.parametrize("runs", BAD_RUNS.values(), ids=BAD_RUNS)
def test_a_ticket_that_does_not_hold_writes_nothing(ends, runs):
    source, target = ends
    join(source, target)
    with pytest.raises(Refused, match=r"^piece 0 of .*: .*\.$"):
        source.transport.post(write((0, 0, 20, 1), *runs, (2, 0, 0, 1)))
    source.close()
    assert not target.transport.poll()
    assert untouched(target)


def test_a_ticket_for_another_life_is_refused(ends):
    source, target = ends
    join(source, target)
    stale = TransferKey(KEY.room, KEY.generation, D.incarnation - 1)
    with pytest.raises(Refused, match="another life of rank 1"):
        source.transport.post(write(*RUNS, key=stale))
    assert untouched(target)


def test_open_tickets_share_no_item():
    tickets = Tickets(D, here=(24, 24, 0), there=(32, 32, 0))
    other = TransferKey(4, 2, D.incarnation)
    tickets.open((KEY, 0), write((0, 0, 4, 4), (1, 0, 0, 8)).runs)
    with pytest.raises(Refused, match="post each piece once"):
        tickets.open((KEY, 0), write((0, 0, 20, 1)).runs)
    with pytest.raises(Refused, match="another open write"):
        tickets.open((other, 0), write((0, 0, 7, 1)).runs)
    tickets.open((other, 0), write((0, 0, 8, 1), (0, 0, 3, 1), (1, 0, 8, 8)).runs)
    assert len(tickets) == 2
    tickets.close((KEY, 0))
    tickets.open((other, 1), write((0, 0, 4, 4)).runs)


def test_the_end_of_one_region_is_not_the_start_of_the_next():
    tickets = Tickets(D, here=(24, 24), there=(32, 32))
    tickets.open((KEY, 0), write((0, 0, 31, 1)).runs)
    tickets.open((KEY, 1), write((1, 0, 0, 1)).runs)
    with pytest.raises(Refused, match="out of a region"):
        tickets.open((KEY, 2), write((0, 0, 31, 2)).runs)


@pytest.mark.parametrize("seed", range(5))
def test_tickets_agree_with_sets_of_items(seed):
    rng = np.random.default_rng(seed)
    tickets, items = Tickets(D, here=(64, 64), there=(40, 24)), {}
    refused = 0
    for piece in range(300):
        runs = np.stack(
            [
                rng.integers(0, 2, 2),
                rng.integers(0, 8, 2),
                rng.integers(-1, 40, 2),
                rng.integers(1, 4, 2),
            ],
            axis=1,
        )
        wanted = [(r, t + i) for r, _, t, n in runs.tolist() for i in range(n)]
        held = set().union(*items.values())
        fits = all(0 <= item < (40, 24)[r] for r, item in wanted)
        if fits and len(set(wanted)) == len(wanted) and not held & set(wanted):
            tickets.open((KEY, piece), runs)
            items[piece] = set(wanted)
        else:
            refused += 1
            with pytest.raises(Refused):
                tickets.open((KEY, piece), runs)
        if len(items) > 4:
            oldest = min(items)
            tickets.close((KEY, oldest))
            del items[oldest]
    assert 30 < refused < 270
