"""Shared pools: sealed, nameless, recognised by what is in them, and gone when closed."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile

import pytest
import torch

from optimized.transfer import shared_pool
from optimized.transfer.shared_pool import GUARD_BYTES, SharedPool, attach
from optimized.transfer.transport import Refused
from oracle_tests.shm_cases import footprint

BYTES = 3 * GUARD_BYTES + 17


@pytest.fixture
def pool():
    with SharedPool(BYTES) as pool:
        yield pool


def of(pool: SharedPool, **changes):
    announced = {"total_bytes": pool.total_bytes, "nonce": pool.nonce, "cuda": False}
    return attach(pool.descriptor, **announced | changes)


def test_a_write_of_the_mapper_is_there_for_the_owner(pool):
    segment = of(pool)
    row = torch.arange(BYTES).to(torch.uint8)
    segment.memory.copy_(row)
    assert torch.equal(pool.memory, row)
    assert pool.is_intact()
    segment.close()


@pytest.mark.parametrize("size", [0, GUARD_BYTES, 1 << 20], ids=["nothing", "less", "more"])
def test_a_sealed_pool_is_not_resized(pool, size):
    with pytest.raises(PermissionError) as refusal:
        os.ftruncate(pool.descriptor, size)
    assert refusal.value.errno == errno.EPERM


def test_the_seals_are_not_taken_off_or_added_to(pool):
    with pytest.raises(PermissionError):
        fcntl.fcntl(pool.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_all_pages_are_there_before_the_first_copy(pool):
    assert os.fstat(pool.descriptor).st_blocks * 512 >= BYTES + 2 * GUARD_BYTES


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"total_bytes": BYTES + 1}, f"announced {BYTES + 1} bytes of shared memory"),
        ({"total_bytes": BYTES - 1}, f"handed over {BYTES}"),
        ({"nonce": bytes(16)}, "does not hold the nonce"),
    ],
    ids=["larger", "smaller", "nonce"],
)
def test_another_pool_than_announced_is_not_mapped(pool, changes, sentence):
    before = footprint()
    with pytest.raises(Refused, match=sentence):
        of(pool, **changes)
    assert footprint() == before
    assert bool((pool.memory == 0).all())


def test_a_memfd_without_seals_is_not_mapped():
    descriptor = os.memfd_create("kvoracle", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, BYTES + 2 * GUARD_BYTES)
    with pytest.raises(Refused, match="can still be resized"):
        attach(descriptor, total_bytes=BYTES, nonce=bytes(16), cuda=False)
    os.close(descriptor)


def test_a_file_is_not_mapped():
    with tempfile.TemporaryFile(dir=".") as file:
        file.truncate(BYTES + 2 * GUARD_BYTES)
        with pytest.raises(Refused, match=r"no memfd|can still be resized"):
            attach(file.fileno(), total_bytes=BYTES, nonce=bytes(16), cuda=False)


@pytest.mark.parametrize("at", [-1, BYTES], ids=["before", "after"])
def test_a_byte_past_an_end_is_noticed(pool, at):
    segment = of(pool)
    segment._whole[GUARD_BYTES + at] ^= 1
    assert not pool.is_intact()
    segment.close()


def test_a_pool_is_not_closed_under_a_tensor():
    pool = SharedPool(BYTES)
    view = pool.memory[5:]
    with pytest.raises(RuntimeError, match="drop every view"):
        pool.close()
    view.fill_(1)
    del view
    pool.close()


def test_what_is_closed_leaves_nothing():
    before = footprint()
    pool = SharedPool(BYTES)
    segment = of(pool)
    held = footprint()
    assert held.mappings == before.mappings + 2
    assert held.descriptors > before.descriptors
    assert held.segments == before.segments == 0
    pool.close()
    segment.memory.fill_(1)  # no SIGBUS: the pages live as long as a mapping of them
    segment.close()
    pool.close()
    assert footprint() == before


def test_an_impossible_pool_is_refused_and_leaves_nothing():
    before = footprint()
    with pytest.raises(ValueError, match="give it some"):
        SharedPool(0)
    # well beyond any machine: the kernel itself would allocate it until it kills somebody
    with pytest.raises(MemoryError, match="are available: lower"):
        SharedPool(1 << 50)
    assert footprint() == before


def test_regions_are_found_in_a_pool(pool):
    assert pool.offset_of(pool.memory[17:40]) == 17
    assert pool.offset_of(torch.zeros(9, dtype=torch.uint8)) is None
    whole = pool._segment._whole
    with pytest.raises(ValueError, match="over an end"):
        pool.offset_of(whole[GUARD_BYTES - 1 : GUARD_BYTES + 1])
    del whole


def test_a_copy_is_cut_where_pinned_chunks_meet(pool, monkeypatch):
    monkeypatch.setattr(shared_pool, "REGISTER_BYTES", GUARD_BYTES)
    segment = of(pool)
    for start, end in (
        (0, BYTES),
        (5, 6),
        (GUARD_BYTES, 2 * GUARD_BYTES),
        (9, 2 * GUARD_BYTES + 1),
    ):
        cuts = [
            part.indices(end - start)[:2] for part in segment.chunks_of(segment.memory[start:end])
        ]
        owners = [{(start + byte) // GUARD_BYTES for byte in range(*cut)} for cut in cuts]
        assert all(len(owner) == 1 for owner in owners)
        assert len(set.union(*owners)) == len(cuts)
        assert [byte for cut in cuts for byte in range(*cut)] == list(range(end - start))
    segment.close()
