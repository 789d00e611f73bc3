"""Pooled keys of a chunk: every backend against the reference, the whole index pool compared."""

from __future__ import annotations

import pytest
import torch

from optimized.kernels.pool_store import pool_store
from oracle_tests.kernel_cases import poisoned, pool_geometry, spread_ids, wrong_index_slots

PAGES, PAGE, GROUPS, RING_ROWS, CHUNK_ROWS = 9, 4, 13, 24, 40


def store(launch, *, kpool, dim, round_scale=True, groups=None, gate_spread=2.0):
    """Run the kernel on shuffled slots and sources; what `wrong_index_slots` needs to judge it."""
    backend, device = launch
    torch.manual_seed(kpool * dim)
    slots = spread_ids(GROUPS, PAGES * PAGE, least=PAGE)
    src = torch.randperm(RING_ROWS + CHUNK_ROWS)[: GROUPS * kpool].view(GROUPS, kpool)
    # rows that no group reads are poison
    keys, gates = poisoned(2, RING_ROWS + CHUNK_ROWS, dim, dtype=torch.bfloat16)
    keys[src], gates[src] = (
        torch.randn(GROUPS, kpool, dim).bfloat16(),
        (torch.randn(GROUPS, kpool, dim) * gate_spread).bfloat16(),
    )
    ape = torch.randn(kpool, dim)
    chosen = slice(None) if groups is None else groups
    before = poisoned(PAGES, PAGE * (dim + 4))
    after = before.to(device, copy=True)
    pool_store(
        after,
        slots[chosen].to(device),
        src[chosen].to(device),
        *torch.cat((keys, gates), dim=1).to(device).split([RING_ROWS, CHUNK_ROWS]),
        ape.to(device),
        index_page_size=PAGE,
        round_scale=round_scale,
        backend=backend,
    )
    written = {s: (keys[r], gates[r]) for s, r in zip(slots.tolist(), src, strict=True)}
    geometry = pool_geometry(kpool=kpool, page=PAGE, round_scale=round_scale)
    return before, after, written, ape, geometry


@pytest.mark.parametrize("round_scale", [True, False], ids=["pow2", "exact"])
@pytest.mark.parametrize("dim", [16, 128])
@pytest.mark.parametrize("kpool", [1, 2, 4])
def test_equals_reference(launch, kpool, dim, round_scale):
    result = store(launch, kpool=kpool, dim=dim, round_scale=round_scale)
    assert wrong_index_slots(*result) == []


def test_wide_gates_pick_one_key(launch):
    """With gates far apart the softmax is one-hot, as provenance stamps need it."""
    result = store(launch, kpool=4, dim=16, gate_spread=1000.0)
    assert wrong_index_slots(*result) == []


def test_exchanged_slots_are_noticed(launch):
    before, after, written, ape, geometry = store(launch, kpool=2, dim=16)
    first, second, *_ = written
    written[first], written[second] = written[second], written[first]
    assert wrong_index_slots(before, after, written, ape, geometry) == sorted([first, second])


def test_stray_write_is_noticed(launch):
    before, after, written, ape, geometry = store(launch, kpool=2, dim=16)
    stray, _ = written.popitem()
    assert wrong_index_slots(before, after, written, ape, geometry) == [stray]


@pytest.mark.parametrize("dim", [16, 128])
def test_batch_changes_no_byte(launch, dim):
    """A group's row is the same alone, in another place, and in a call of another size."""
    before, together, *_ = store(launch, kpool=4, dim=dim)
    apart = before.clone()
    for group in range(GROUPS):
        _, alone, *_ = store(launch, kpool=4, dim=dim, groups=[group])
        changed = alone.cpu() != before
        apart[changed] = alone.cpu()[changed]
    assert torch.equal(apart[1:], together.cpu()[1:])
    _, reversed_, *_ = store(launch, kpool=4, dim=dim, groups=list(range(GROUPS))[::-1])
    assert torch.equal(reversed_[1:], together[1:])


def test_one_code_off_is_noticed(launch):
    before, after, written, ape, geometry = store(launch, kpool=4, dim=128)
    slot = next(iter(written))
    byte = slot // PAGE, slot % PAGE * 128 + 5
    after[byte] ^= 1
    assert wrong_index_slots(before, after, written, ape, geometry) == [slot]
