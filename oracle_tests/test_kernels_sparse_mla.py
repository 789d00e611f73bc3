"""Split MLA over selected rows: against the reference, within its own bound for float32."""

from __future__ import annotations

import pytest
import torch

from optimized.kernels.backends import BackendError
from optimized.kernels.sparse_mla import make_partials, sparse_mla, split_count
from oracle_tests.conftest import CUDA, LAUNCHES
from oracle_tests.kernel_cases import poisoned, spread_ids
from reference import quant
from reference.bounded import attend
from reference.geometry import RowFormat
from reference.rounding import Approx

LOCS, STORED, BATCH, HEADS = 700, 260, 5, 16
FORMATS = pytest.mark.parametrize("row_format", list(RowFormat), ids=lambda f: f.value)
OWN = [each for each in LAUNCHES if each != ("torch", "cuda")]
SPLITS = [(1, 1), (31, 1), (33, 2), (65, 2), (257, 6)]
"""(width, splits): one under and one over a tile of 32, and several tiles a split with one split
left empty, which is also wide enough for two parts a weight."""


def some_rows(kind, latent):
    """Queries [BATCH, HEADS, latent] bf16 and rows [STORED, latent] of one kind."""
    q, rows = torch.randn(BATCH, HEADS, latent), torch.randn(STORED, latent) * 3
    if kind == "tied":  # all weights nearly equal, and some rows the same
        rows = rows[:1] + 1e-3 * rows
        rows[::2] = rows[0]
    elif kind == "extreme":  # sums with one term; zeros, subnormal and saturated codes
        q, rows = 40 * q, rows * torch.logspace(-5, 4, STORED)[torch.randperm(STORED), None]
        rows[0] = 0.0
    return q.bfloat16(), rows


def case(row_format, latent, width, kind="random"):
    """A poisoned pool with STORED rows spread over it, queries, and selections of every kind:
    full, shorter, void in between, a single row, and none."""
    torch.manual_seed(latent + width)
    q, rows = some_rows(kind, latent)
    pool = poisoned(LOCS, row_format.row_bytes(latent))
    stored = spread_ids(STORED, LOCS)
    pool[stored] = quant.encode_row(rows, row_format)
    chosen = torch.stack([torch.randperm(STORED)[:width] for _ in range(BATCH)])
    chosen[1, (width + 1) // 2 :] = -1
    chosen[2, ::3] = -1
    chosen[3, :-1] = -1
    chosen[4] = -1
    locs = torch.where(chosen >= 0, stored[chosen], -1)
    return q, pool, locs, quant.decode_row(pool[stored], row_format, latent), chosen


def run(launch, q, pool, locs, row_format, splits):
    backend, device = launch
    q, pool, locs = (x.to(device) for x in (q, pool, locs))
    batch, heads, latent = q.shape
    out = poisoned(batch, heads, latent, dtype=torch.float32, device=device)
    partials = poisoned(batch, splits, latent + 2, HEADS, dtype=torch.float32, device=device)
    scale = latent**-0.5
    sparse_mla(q, pool, locs, out, partials, row_format=row_format, scale=scale, backend=backend)
    return out.cpu()


def excess(out, q, rows, chosen):
    """[batch]: by how many times the reference's bound each request left it, at worst."""
    some = (chosen >= 0).any(dim=1)
    seen = chosen[some]
    exact = attend(Approx.exact(q[some].double()), rows[seen.clamp_min(0)], seen >= 0)
    error = (out[some].double() - exact.mid).abs()
    worst = torch.zeros(len(out), dtype=torch.float64)
    # a single row comes out as it is stored, with a bound of 0 where it is 0
    ratio = torch.where(error == 0, 0.0, error / exact.bound).nan_to_num(nan=torch.inf)
    worst[some] = ratio.flatten(1).amax(dim=1)
    worst[~some] = torch.where((out[~some] == 0).flatten(1).all(dim=1), 0.0, torch.inf).double()
    return worst


@FORMATS
@pytest.mark.parametrize(("width", "splits"), SPLITS)
def test_within_bound_of_reference(launch, row_format, width, splits):
    q, pool, locs, rows, chosen = case(row_format, 128, width)
    out = run(launch, q, pool, locs, row_format, splits)
    assert torch.isfinite(out).all(), "a poisoned row leaked"
    assert excess(out, q, rows, chosen).max() <= 1.0


@FORMATS
@pytest.mark.parametrize("kind", ["tied", "extreme"])
def test_hard_inputs_within_bound(launch, row_format, kind):
    q, pool, locs, rows, chosen = case(row_format, 128, 64, kind)
    assert excess(run(launch, q, pool, locs, row_format, 1), q, rows, chosen).max() <= 1.0


@FORMATS
def test_full_latent_and_few_heads(launch, row_format):
    q, pool, locs, rows, chosen = case(row_format, 512, 65)
    q = q[:, :3].contiguous()
    assert excess(run(launch, q, pool, locs, row_format, 1), q, rows, chosen).max() <= 1.0


@FORMATS
def test_a_wrong_row_leaves_the_bound(launch, row_format):
    q, pool, locs, rows, chosen = case(row_format, 128, 65)
    locs[0, 64] = next(x for x in locs[1].tolist() if x not in locs[0])
    worst = excess(run(launch, q, pool, locs, row_format, 2), q, rows, chosen)
    assert worst[0] > 100.0
    assert worst[1:].max() <= 1.0


@pytest.mark.parametrize("row_format", [RowFormat.FP8_RAW, RowFormat.FP8_PACKED])
def test_every_code_comes_out_as_it_is(launch, row_format):
    """A single row has the weight 1, which takes each e4m3 value through unchanged."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = torch.where(codes & 0x7F == 0x7F, 0, codes)
    pool = poisoned(3, row_format.row_bytes(256))
    pool[2, :256] = codes
    pool[2, 256:] = torch.tensor([0.5, 3.0])[: len(pool[2, 256:]) // 4].view(torch.uint8)
    q = torch.randn(1, HEADS, 256).bfloat16()
    out = run(launch, q, pool, torch.tensor([[-1, 2]]), row_format, 1)
    row = quant.decode_row(pool[2], row_format, 256)
    assert torch.equal(out.double(), row.expand(1, HEADS, 256))


@FORMATS
@pytest.mark.parametrize("sign", [0x00, 0x80])
def test_selected_nan_is_seen(launch, row_format, sign):
    """The mask hides voids alone: one NaN that is really selected must come out."""
    q, pool, locs, *_ = case(row_format, 128, 65)
    pool[locs[1, 3], 11] = 0x7F | sign
    if row_format is RowFormat.BF16:
        pool[locs[1, 3], 10] = 0xC0
    out = run(launch, q, pool, locs, row_format, 2)
    others = [b for b in range(BATCH) if not (locs[b] == locs[1, 3]).any()]
    assert out[1].isnan().all()
    assert torch.isfinite(out[others]).all()
    assert others


@FORMATS
@pytest.mark.parametrize("launch", OWN, ids="-".join)
def test_batch_and_repetition_change_no_bit(launch, row_format):
    """Of torch on CUDA the batch may: cuBLAS chooses its kernel by it."""
    q, pool, locs, *_ = case(row_format, 128, 65)
    together = run(launch, q, pool, locs, row_format, 2)
    assert torch.equal(run(launch, q, pool, locs.int(), row_format, 2), together)
    alone = run(launch, q[2, None], pool, locs[2, None], row_format, 2)
    assert torch.equal(alone[0], together[2])


@pytest.mark.parametrize("launch", [OWN[-1]], ids="-".join)
def test_unsupported_sizes_are_errors(launch):
    """Of Triton's kernels; torch takes any size."""
    for heads, latent in ((17, 128), (16, 200)):
        q, pool = torch.zeros(1, heads, latent).bfloat16(), torch.zeros(2, 2 * latent).byte()
        with pytest.raises(BackendError, match="call mla"):
            run(launch, q, pool, torch.tensor([[1]]), RowFormat.BF16, 1)


def test_splits_fill_the_machine_once():
    for batch, width in ((48, 2051), (8, 2051), (1, 2051), (300, 2051), (1, 1)):
        splits = split_count(batch, width)
        assert batch * splits <= max(264, batch)
        assert splits <= -(-width // 64)
    assert split_count(48, 2051) == 5
    assert split_count(8, 2051) == 33


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@FORMATS
def test_real_geometry_beyond_31_bits(row_format):
    """48 requests in a pool of more than 2**32 bytes, captured, and replayed with new queries and
    selections: bitwise the eager result, and within the bound."""
    torch.manual_seed(0)
    batch, width, latent = 48, 2051, 512
    row_bytes = row_format.row_bytes(latent)
    count = 2**32 // row_bytes + 5000
    pool = torch.empty(count, row_bytes, dtype=torch.uint8, device="cuda").fill_(0xFF)
    half = torch.randperm(count - 3, device="cuda")[: 2 * width] + 2
    half[:2] = torch.tensor([1, count - 1])
    stored = quant.encode_row(torch.randn(len(half), latent) * 2, row_format)
    pool[half] = stored.cuda()
    rows = quant.decode_row(stored, row_format, latent)
    q = torch.empty(batch, HEADS, latent, dtype=torch.bfloat16, device="cuda")
    locs = torch.empty(batch, width, dtype=torch.int64, device="cuda")
    out = poisoned(batch, HEADS, latent, dtype=torch.float32, device="cuda")
    partials = make_partials(batch, width, latent, device=q.device)

    def step():
        sparse_mla(
            q,
            pool,
            locs,
            out,
            partials,
            row_format=row_format,
            scale=latent**-0.5,
            backend="triton",
        )

    def draw():
        chosen = torch.stack([torch.randperm(len(half))[:width] for _ in range(batch)]).cuda()
        chosen[0, 7:] = -1
        chosen[:3, 0] = torch.tensor([0, 1, 1], device="cuda")
        q.normal_()
        locs.copy_(torch.where(chosen >= 0, half[chosen], -1))
        return chosen

    draw()
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    chosen = draw()
    graph.replay()
    replayed = out.clone()
    out.fill_(torch.nan)
    partials.fill_(torch.nan)
    step()
    assert torch.equal(out, replayed)
    # the bound takes a latent x latent covariance a head: of two requests and four heads
    some, heads = [0, 2], slice(4)
    worst = excess(out[some, heads].cpu(), q[some, heads].cpu(), rows, chosen[some].cpu())
    assert worst.max() <= 1.0
