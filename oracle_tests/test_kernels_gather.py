"""Copies out of the pools: byte for byte, at any address."""

from __future__ import annotations

import pytest
import torch

from optimized.kernels.gather import gather_index, gather_rows
from optimized.kernels.kv_store import kv_store
from oracle_tests.kernel_cases import differing_rows, pool_geometry, spread_ids
from reference.addressing import index_byte_offsets
from reference.geometry import RowFormat

COUNT = 21


def random_bytes(*shape):
    torch.manual_seed(shape[-1])
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize("row_bytes", [16, 32, 528, 1024])
def test_rows(launch, row_bytes):
    backend, device = launch
    pool = random_bytes(70, row_bytes)
    locs = torch.cat((spread_ids(COUNT, 70), torch.tensor([0, 0, 69])))
    rows = gather_rows(pool.to(device), locs.to(device), backend=backend)
    assert differing_rows(rows, torch.stack([pool[loc] for loc in locs.tolist()])) == []


@pytest.mark.parametrize("dim", [16, 128])
@pytest.mark.parametrize("page", [1, 4, 64])
def test_index_rows(launch, page, dim):
    backend, device = launch
    pages = 80 // page
    pool = random_bytes(pages, page * (dim + 4))
    slots = spread_ids(COUNT, pages * page, least=0)
    rows = gather_index(
        pool.to(device), slots.to(device), index_page_size=page, backend=backend
    ).cpu()
    geometry = pool_geometry(kpool=1, page=page)
    offsets = torch.from_numpy(index_byte_offsets(slots.numpy(), geometry, dim))
    assert differing_rows(rows, pool.flatten()[offsets]) == []
    neighbours = pool.flatten()[offsets.roll(1, dims=0)]
    assert differing_rows(rows, neighbours) == list(range(COUNT)), "a wrong slot goes unnoticed"


def test_rows_beyond_two_gigabytes(launch):
    """A store and a gather whose byte addresses do not fit int32."""
    backend, device = launch
    latent, last = 512, 2**31 // 1024 + 1
    pool = torch.empty(last + 1, 2 * latent, dtype=torch.uint8, device=device)
    locs, rows = torch.tensor([last, 3], device=device), torch.randn(2, latent, device=device)
    kv_store(pool, locs, rows, row_format=RowFormat.BF16, backend=backend)
    stored = rows.bfloat16().view(torch.uint8)
    assert torch.equal(pool[last], stored[0])
    assert torch.equal(gather_rows(pool, locs, backend=backend), stored)


def test_index_rows_beyond_two_gigabytes(launch):
    backend, device = launch
    page, dim = 64, 128
    pages = 2**31 // (page * (dim + 4)) + 2
    pool = torch.empty(pages, page * (dim + 4), dtype=torch.uint8, device=device)
    row = random_bytes(dim + 4).to(device)
    pool[-1, 5 * dim : 6 * dim] = row[:dim]
    pool[-1, page * dim + 5 * 4 : page * dim + 6 * 4] = row[dim:]
    slots = torch.tensor([(pages - 1) * page + 5], device=device)
    read = gather_index(pool, slots, index_page_size=page, backend=backend)
    assert torch.equal(read[0], row)
