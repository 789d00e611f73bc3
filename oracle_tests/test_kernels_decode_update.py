"""Decode's ring write and group closing: every backend against the reference."""

from __future__ import annotations

import pytest
import torch

from optimized.kernels.decode_update import decode_update
from oracle_tests.kernel_cases import (
    differing_rows,
    poisoned,
    pool_geometry,
    spread_ids,
    wrong_index_slots,
)

PAGES, PAGE, SLOTS, DRAFTS = 7, 4, 12, 3
FAR = 3_000_000_000
"""A position beyond int32."""


def positions_of(kpool):
    """Some that close a group and some that do not; the last request is padding."""
    closing = [kpool - 1, 5 * kpool - 1, FAR * kpool + kpool - 1, 8 * kpool - 1]
    return torch.tensor([*closing, 0, 5 * kpool, FAR * kpool, kpool, 0])


def update(launch, *, kpool, dim, round_scale=True):
    """Run the kernel on a batch of requests with shuffled ring slots, and gather for each buffer
    what was, what is, and what must be."""
    backend, device = launch
    torch.manual_seed(kpool * dim)
    position = positions_of(kpool)
    batch, ring_size = len(position), kpool + DRAFTS
    closes = (position + 1) % kpool == 0
    closes[-1] = False
    ring_slot, index_slot = spread_ids(batch, SLOTS), torch.zeros(batch, dtype=torch.int64)
    ring_slot[-1] = 0
    index_slot[closes] = spread_ids(int(closes.sum()), PAGES * PAGE, least=PAGE)
    ring = poisoned(2, SLOTS, ring_size, dim, dtype=torch.bfloat16)
    new = torch.randn(2, batch, dim).bfloat16()
    ape = torch.randn(kpool, dim)
    groups = {}
    for request in closes.nonzero().flatten().tolist():
        waiting = torch.randn(2, kpool - 1, dim).bfloat16()
        for back in range(1, kpool):
            row = (position[request] - back) % ring_size
            ring[:, ring_slot[request], row] = waiting[:, kpool - 1 - back]
        group = torch.cat((waiting, new[:, request, None]), dim=1)
        groups[int(index_slot[request])] = (group[0], group[1])
    expected_ring = ring.clone()
    for request in range(batch):
        expected_ring[:, ring_slot[request], position[request] % ring_size] = new[:, request]
    before = poisoned(PAGES, PAGE * (dim + 4))
    after, after_ring = before.to(device, copy=True), ring.to(device, copy=True)
    decode_update(
        after,
        *after_ring,
        *new.to(device),
        *(ids.to(device) for ids in (ring_slot, position, index_slot)),
        ape.to(device),
        kpool=kpool,
        index_page_size=PAGE,
        round_scale=round_scale,
        backend=backend,
    )
    geometry = pool_geometry(kpool=kpool, page=PAGE, round_scale=round_scale)
    return (before, after, groups, ape, geometry), (after_ring, expected_ring)


def wrong_ring_slots(actual, expected):
    """Request slots of the ring, padding slot 0 apart, whose keys or gates differ."""
    return differing_rows(actual[0, 1:], expected[0, 1:]) + differing_rows(
        actual[1, 1:], expected[1, 1:]
    )


@pytest.mark.parametrize("round_scale", [True, False], ids=["pow2", "exact"])
@pytest.mark.parametrize("dim", [16, 128])
@pytest.mark.parametrize("kpool", [1, 2, 4])
def test_equals_reference(launch, kpool, dim, round_scale):
    index, ring = update(launch, kpool=kpool, dim=dim, round_scale=round_scale)
    assert wrong_index_slots(*index) == []
    assert wrong_ring_slots(*ring) == []


def test_stale_newest_key_is_noticed(launch):
    """What pooling the ring before its write would store."""
    (before, after, groups, ape, geometry), _ = update(launch, kpool=4, dim=16)
    slot, (keys, gates) = next(iter(groups.items()))
    groups[slot] = (keys.roll(1, dims=0), gates)
    assert wrong_index_slots(before, after, groups, ape, geometry) == [slot]


def test_ring_row_of_a_neighbour_is_noticed(launch):
    _, (actual, expected) = update(launch, kpool=4, dim=16)
    assert wrong_ring_slots(actual.roll(1, dims=2), expected) != []


def test_step_that_closes_nothing_leaves_the_pool(launch):
    backend, device = launch
    pool, ring = poisoned(3, 4 * 20, device=device), torch.zeros(2, 3, 4, 16).bfloat16().to(device)
    new = torch.ones(2, 2, 16).bfloat16().to(device)
    ids = [torch.tensor(x).to(device) for x in ([2, 1], [4, 9], [0, 0])]
    decode_update(
        pool,
        *ring,
        *new,
        *ids,
        torch.zeros(4, 16, device=device),
        kpool=4,
        index_page_size=4,
        round_scale=True,
        backend=backend,
    )
    assert differing_rows(pool[1:], poisoned(2, 80)) == []
    assert ring[:, :, :, 0].nonzero().tolist() == [[0, 1, 1], [0, 2, 0], [1, 1, 1], [1, 2, 0]]
