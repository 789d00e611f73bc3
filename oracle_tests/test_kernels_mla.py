"""MLA over selected rows: every backend against the reference, within a derived bound."""

from __future__ import annotations

import pytest
import torch

from optimized.kernels.backends import BackendError
from optimized.kernels.mla import mla
from oracle_tests.conftest import LAUNCHES
from oracle_tests.kernel_cases import UNIT, poisoned, spread_ids
from reference import quant
from reference.geometry import RowFormat
from reference.mla import attend

LOCS, STORED, BATCH, WIDTH = 400, 60, 5, 37
FORMATS = pytest.mark.parametrize("row_format", list(RowFormat), ids=lambda f: f.value)
WAYS = [*LAUNCHES, ("tilelang", "cpu")]
EVERY_LAUNCH = pytest.mark.parametrize("launch", WAYS, ids="-".join)


def case(row_format, heads, latent):
    """A poisoned pool with STORED rows spread over it, queries, and selections of every kind:
    full, partly masked, masked in between, a single row, and none."""
    torch.manual_seed(latent)
    pool = poisoned(LOCS, row_format.row_bytes(latent))
    stored = spread_ids(STORED, LOCS)
    pool[stored] = quant.encode_row(torch.randn(STORED, latent) * 3, row_format)
    chosen = torch.stack([torch.randperm(STORED)[:WIDTH] for _ in range(BATCH)])
    chosen[1, 20:] = -1
    chosen[2, ::3] = -1
    chosen[3, 1:] = -1
    chosen[4] = -1
    locs = torch.where(chosen >= 0, stored[chosen], 0)
    rows = quant.decode_row(pool[stored], row_format, latent)
    return torch.randn(BATCH, heads, latent), pool, locs, rows, chosen


def run(launch, q, pool, locs, row_format):
    backend, device = launch
    scale = q.shape[-1] ** -0.5
    q, pool, locs = (x.to(device) for x in (q, pool, locs))
    return mla(q, pool, locs, row_format=row_format, scale=scale, backend=backend).cpu()


def excess(out, q, rows, chosen):
    """By how many times its bound a float32 result left the reference, at worst.

    A score is off by at most `delta` (its products, their sum, the scale); a weight relatively by
    expm1 of twice that, and by a few units for each exp, sum and rescaling of an online softmax.
    """
    q, rows = q.double(), rows.double()
    latent, width = rows.shape[1], chosen.shape[1]
    exact = attend(q, rows, chosen)
    worst = 0.0
    for b in range(len(q)):
        seen = rows[chosen[b][chosen[b] >= 0]]
        if not len(seen):
            worst = max(worst, 0.0 if (out[b] == 0).all() else float("inf"))
            continue
        scale = latent**-0.5
        delta = (latent + 6) * UNIT * (q[b].abs() @ seen.abs().T).amax(dim=1) * scale
        weight = (q[b] @ seen.T * scale).softmax(dim=1)
        relative = torch.expm1(2 * delta) + (8 * width + 20) * UNIT
        bound = relative[:, None] * (weight @ seen.abs())
        worst = max(worst, float(((out[b].double() - exact[b]).abs() / bound).max()))
    return worst


@EVERY_LAUNCH
@FORMATS
@pytest.mark.parametrize(("heads", "latent"), [(3, 16), (2, 200)])
def test_within_bound_of_reference(launch, row_format, heads, latent):
    q, pool, locs, rows, chosen = case(row_format, heads, latent)
    out = run(launch, q, pool, locs, row_format)
    assert torch.isfinite(out).all(), "a poisoned row leaked"
    assert excess(out, q, rows, chosen) <= 1.0


def test_large_latent(launch):
    q, pool, locs, rows, chosen = case(RowFormat.BF16, 17, 512)
    assert excess(run(launch, q, pool, locs, RowFormat.BF16), q, rows, chosen) <= 1.0


@EVERY_LAUNCH
def test_a_wrong_row_leaves_the_bound(launch):
    q, pool, locs, rows, chosen = case(RowFormat.BF16, 3, 16)
    locs[0, 0] = next(x for x in locs[1].tolist() if x not in locs[0])
    assert excess(run(launch, q, pool, locs, RowFormat.BF16), q, rows, chosen) > 100.0


@EVERY_LAUNCH
@FORMATS
def test_selected_poison_is_seen(launch, row_format):
    """The mask hides padding alone: a NaN that is really selected must come out."""
    q, pool, locs, *_ = case(row_format, 3, 16)
    free = next(x for x in range(1, LOCS) if (pool[x] == 0xFF).all())
    locs[1, 0] = free
    out = run(launch, q, pool, locs, row_format)
    assert out[1].isnan().all()
    assert torch.isfinite(out[[0, 2, 3, 4]]).all()


# cuBLAS chooses its kernel by the batch, so torch makes no such promise on a GPU
@pytest.mark.parametrize("launch", [w for w in WAYS if w != ("torch", "cuda")], ids="-".join)
@pytest.mark.parametrize(("heads", "latent"), [(3, 16), (2, 200)])
def test_batch_changes_no_bit(launch, heads, latent):
    q, pool, locs, *_ = case(RowFormat.BF16, heads, latent)
    together = run(launch, q, pool, locs, RowFormat.BF16)
    for b in range(BATCH):
        alone = run(launch, q[b, None], pool, locs[b, None], RowFormat.BF16)
        assert torch.equal(alone[0], together[b])
    flipped = run(launch, q.flip(0), pool, locs.flip(0), RowFormat.BF16)
    assert torch.equal(flipped.flip(0), together)


def test_tilelang_without_a_compiler_is_an_error(monkeypatch):
    monkeypatch.setattr("optimized.kernels.mla_tilelang.get_cplus_compiler", lambda: None)
    q, pool, locs, *_ = case(RowFormat.BF16, 3, 16)
    with pytest.raises(BackendError, match=r"apt-get install g\+\+"):
        run(("tilelang", "cpu"), q, pool, locs, RowFormat.BF16)
