"""KV rows in every format: every backend byte for byte with the reference, whole pool."""

from __future__ import annotations

import pytest
import torch

from optimized.kernels.kv_store import kv_store, load_rows
from oracle_tests.kernel_cases import differing_rows, poisoned, spread_ids
from reference import quant
from reference.geometry import RowFormat

LOCS, COUNT = 90, 23


def hostile_rows(count, latent):
    """[count, latent] float32: ties, subnormals, saturation, zeros and ordinary values."""
    rows = torch.randn(count, latent) * torch.logspace(-4, 3, count)[:, None]
    codes = torch.arange(latent) % 126
    values = quant.e4m3_values(codes.to(torch.uint8)).float()
    midway = (values + quant.e4m3_values((codes + 1).to(torch.uint8)).float()) / 2
    rows[0] = 0.0
    rows[1] = midway * (1 - 2 * (torch.arange(latent) % 2))
    rows[2] = torch.linspace(440.0, 1e6, latent)
    rows[3] = rows[4].bfloat16().float() * (1 + 2.0**-8)
    return rows


def stored(launch, row_format, latent, *, rows=None, locs=None):
    """(pool before and after, locs, rows); only page 0's single loc may go untouched."""
    backend, device = launch
    torch.manual_seed(latent)
    all_locs, all_rows = spread_ids(COUNT, LOCS), hostile_rows(COUNT, latent)
    locs, rows = all_locs if locs is None else locs, all_rows if rows is None else rows
    before = poisoned(LOCS, row_format.row_bytes(latent))
    after = before.to(device, copy=True)
    kv_store(after, locs.to(device), rows.to(device), row_format=row_format, backend=backend)
    return before, after, locs, rows


def expected_pool(before, locs, rows, row_format):
    expected = before.clone()
    expected[locs] = quant.encode_row(rows, row_format)
    return expected


@pytest.mark.parametrize("latent", [16, 200, 512])
@pytest.mark.parametrize("row_format", list(RowFormat), ids=lambda f: f.value)
def test_equals_reference(launch, row_format, latent):
    before, after, locs, rows = stored(launch, row_format, latent)
    assert differing_rows(after, expected_pool(before, locs, rows, row_format)) == []


@pytest.mark.parametrize("row_format", list(RowFormat), ids=lambda f: f.value)
def test_exchanged_locs_are_noticed(launch, row_format):
    before, after, locs, rows = stored(launch, row_format, 16)
    swapped = locs.clone()
    swapped[[5, 9]] = locs[[9, 5]]
    wrong = differing_rows(after, expected_pool(before, swapped, rows, row_format))
    assert wrong == sorted(locs[[5, 9]].tolist())


@pytest.mark.parametrize("row_format", list(RowFormat), ids=lambda f: f.value)
def test_batch_changes_no_byte(launch, row_format):
    _, together, locs, rows = stored(launch, row_format, 200)
    apart = poisoned(*together.shape)
    for i in range(COUNT):
        _, alone, *_ = stored(launch, row_format, 200, rows=rows[i, None], locs=locs[i, None])
        apart[locs[i]] = alone[locs[i]].cpu()
    assert differing_rows(together, apart) == []


@pytest.mark.parametrize("latent", [16, 200])
@pytest.mark.parametrize("row_format", list(RowFormat), ids=lambda f: f.value)
def test_rows_read_back(launch, row_format, latent):
    _, after, locs, rows = stored(launch, row_format, latent)
    read = load_rows(after, locs.to(after.device), row_format=row_format, latent=latent)
    exact = quant.decode_row(quant.encode_row(rows, row_format), row_format, latent)
    # one float32 product, of a code and its scale
    assert torch.equal(read.cpu(), exact.float())
