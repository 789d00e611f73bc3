"""Paged index scores: every backend against the reference, within its own error bound."""

from __future__ import annotations

import pytest
import torch

from optimized.kernels import index_scores as module
from optimized.kernels.index_scores import FEW_TILES, TILE, TILES, index_scores
from optimized.kernels.top_groups import PEAK, peaks_of
from oracle_tests.conftest import CUDA
from oracle_tests.kernel_cases import poisoned
from reference import bounded
from reference.quant import e4m3_values, encode_key
from reference.rounding import Approx


def counts(page, columns):
    """Visible groups: none, one, and one under, at and over a peak's, a page's, a program's and
    all."""
    marks = {0, PEAK, page, FEW_TILES * min(TILE, max(16, page)), page * columns}
    return sorted({m + d for m in marks for d in (-1, 0, 1)} & set(range(page * columns + 1)))


def case(kind, *, page, columns, heads, dim):
    """Queries of every count of visible groups over a pool that is poison but for their keys."""
    torch.manual_seed(page + dim)
    visible = torch.tensor(counts(page, columns), dtype=torch.int32)
    batch = len(visible)
    pages = torch.randperm(2 * batch * columns)[: batch * columns].view(batch, columns) + 1
    group = torch.arange(page * columns)
    seen = group < visible[:, None]
    q, k = torch.randn(batch, heads, dim), torch.randn(batch, page * columns, dim)
    w = torch.randn(batch, heads)
    if kind == "near-tied":
        k[:, 1:] = k[:, :1]
        k[:, 1::2, 0] *= 1.0 + 2.0**-3
    elif kind == "extreme":
        q, k = q * torch.exp2(torch.randint(-30, 30, q.shape[:2]))[..., None], k * 1e15
        w = w * torch.exp2(torch.randint(-40, 40, w.shape))
    elif kind == "all negative":
        q, k = q.abs(), -k.abs()
    rows = encode_key(k.flatten(0, 1), round_scale=False)
    query = encode_key(q.flatten(0, 1), round_scale=False)[:, :dim].view(batch, heads, dim)
    stored = rows.view(batch, -1, dim + 4)
    pool = poisoned(2 * batch * columns + 1, page * (dim + 4))
    keys, scales = pool[:, : page * dim], pool[:, page * dim :]
    keys, scales = keys.unflatten(1, (page, dim)), scales.unflatten(1, (page, 4))
    at = pages[:, group // page][seen], (group % page).expand_as(seen)[seen]
    keys[at], scales[at] = stored[seen].split([dim, 4], dim=1)
    # one row of a wider table after another, poison from the last page on that a query sees
    table = torch.full((batch, columns + 3), -(2**30), dtype=torch.int32)
    read = torch.arange(columns) * page < visible[:, None]
    table[:, :columns] = torch.where(read, pages.int(), table[:, :columns])
    table = table[:, :columns]
    return query, w, pool, table, visible, stored


def run(launch, query, w, pool, table, visible, *, page):
    backend, device = launch
    batch, columns = table.shape
    n = page * columns
    score = poisoned(batch, n, dtype=torch.float32, device=device)
    peaks = poisoned(batch, -(-n // PEAK), dtype=torch.int32, device=device)
    inputs = (x.to(device) for x in (query, w, pool, table, visible))
    index_scores(*inputs, score, peaks, index_page_size=page, backend=backend)
    return score.cpu(), peaks.cpu()


def excess(score, query, w, visible, stored):
    """By how many times its bound a score left the reference, at worst; infinite for a finite
    score of a group that is not visible."""
    dim = query.shape[2]
    worst = 0.0
    for b, count in enumerate(visible.tolist()):
        if not (score[b, count:] == float("-inf")).all():
            return float("inf")
        keys = e4m3_values(stored[b, :count, :dim].contiguous())
        scales = stored[b, :count, dim:].clone().view(torch.float32)[:, 0].double()
        weight = Approx.exact(w[b, None].double())
        exact = bounded.scores(Approx.exact(e4m3_values(query[b, None])), weight, keys, scales)
        error = (score[b, :count].double() - exact.mid[0]).abs()
        ratio = torch.where(error == 0, 0.0, error / exact.bound[0]).nan_to_num(float("inf"))
        worst = max(worst, float(ratio.max()) if count else 0.0)
    return worst


SIZES = pytest.mark.parametrize(
    ("page", "columns", "heads", "dim"),
    [(64, 5, 5, 32), (4, 9, 2, 16), (16, 3, 32, 128)],
    ids=lambda n: str(n),
)


@SIZES
@pytest.mark.parametrize("kind", ["random", "near-tied", "extreme", "all negative"])
def test_within_bound_of_reference(launch, kind, page, columns, heads, dim):
    *inputs, stored = case(kind, page=page, columns=columns, heads=heads, dim=dim)
    score, peaks = run(launch, *inputs, page=page)
    query, w, _, _, visible = inputs
    assert excess(score, query, w, visible, stored) <= 1.0
    seen = torch.arange(peaks.shape[1]) * PEAK < visible[:, None]
    assert torch.equal(peaks[seen], peaks_of(score)[seen])


def small():
    """Two heads of 16 channels on pages of 16 groups, more of them than a program ever takes."""
    return case("random", page=16, columns=TILES + 1, heads=2, dim=16)


def test_programs_of_many_tiles_change_no_bit(launch, monkeypatch):
    *inputs, _ = small()
    few = run(launch, *inputs, page=16)
    monkeypatch.setattr(module, "RESIDENT", 0)
    many = run(launch, *inputs, page=16)
    assert torch.equal(few[0], many[0])
    seen = torch.arange(few[1].shape[1]) * PEAK < inputs[-1][:, None]
    assert torch.equal(few[1][seen], many[1][seen])


def test_batch_changes_no_bit(launch):
    """Nor does running it again."""
    query, w, pool, table, visible, _ = small()
    together, _ = run(launch, query, w, pool, table, visible, page=16)
    for b in range(0, len(visible), 4):
        own = (x[b, None] for x in (query, w))
        alone, _ = run(launch, *own, pool, table[b, None], visible[b, None], page=16)
        assert torch.equal(alone[0], together[b])


def test_a_nan_in_sight_is_seen(launch):
    """Only what a query cannot see is hidden: a poisoned row that is scored must come out."""
    *inputs, _ = small()
    _, _, pool, table, visible = inputs
    row, group = len(visible) - 1, 37
    page = pool[table[row, group // 16].item()]
    page[(group % 16) * 16 : (group % 16 + 1) * 16] = 0xFF
    page[16 * 16 + (group % 16) * 4 : 16 * 16 + (group % 16 + 1) * 4] = 0xFF
    score, peaks = run(launch, *inputs, page=16)
    wrong = score[row].isnan()
    assert wrong[group]
    assert wrong.sum() == 1
    assert peaks[row, group // PEAK] == module.top_groups.NAN_KEY.value


@pytest.mark.parametrize("change", ["a page exchanged", "a row late", "scale of the next row"])
def test_a_wrong_row_leaves_the_bound(launch, change):
    """The control, of which one group of one query is enough."""
    *inputs, stored = small()
    query, w, pool, table, visible = inputs
    row = len(visible) - 1
    if change == "a page exchanged":
        table[row, [2, 5]] = table[row, [5, 2]]
    else:
        page = pool[table[row, 3].item()]
        if change == "a row late":
            page[4 * 16 : 5 * 16] = page[5 * 16 : 6 * 16].clone()
        else:
            page[256 + 4 * 4 : 256 + 5 * 4] = page[256 + 5 * 4 : 256 + 6 * 4].clone()
    score, _ = run(launch, *inputs, page=16)
    assert excess(score, query, w, visible, stored) > 100.0


def test_sums_of_fourteen_bits_leave_the_bound():
    """What Hopper's FP8 products keep is not enough, so float16 ones are used."""
    query, w, _, _, visible, stored = case("random", page=64, columns=3, heads=32, dim=128)
    key = e4m3_values(stored[..., :128].contiguous())
    scale = stored[..., 128:].clone().view(torch.float32)[..., 0]
    dots = torch.einsum("bhd,bgd->bhg", e4m3_values(query), key).float()
    for bits, leaves in ((14, True), (24, False)):
        cut = (dots.view(torch.int32) >> (24 - bits) << (24 - bits)).view(torch.float32)
        score = torch.einsum("bh,bhg->bg", w.double(), cut.relu().double()).float() * scale
        unseen = torch.arange(score.shape[1]) >= visible[:, None]
        score.masked_fill_(unseen, float("-inf"))
        assert (excess(score, query, w, visible, stored) > 1.0) == leaves


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("batch", [2, 48])
def test_production_size(batch):
    """32 heads on a pool of more than 2^31 bytes, in a replayed graph."""
    page, columns, dim, device = 64, 540, 128, "cuda"
    page_bytes = page * (dim + 4)
    pages = 2**31 // page_bytes + columns
    torch.manual_seed(batch)
    last = torch.arange(pages - columns, pages)
    pool = poisoned(pages, page_bytes, device=device)
    stored = encode_key(torch.randn(columns * page, dim), round_scale=False)
    keys, scales = stored.unflatten(0, (columns, page)).split([dim, 4], dim=2)
    pool[last] = torch.cat((keys.flatten(1), scales.flatten(1)), dim=1).to(device)
    q = encode_key(torch.randn(batch * 32, dim), round_scale=False)[:, :dim]
    q, w = q.reshape(batch, 32, dim), torch.randn(batch, 32)
    visible = (torch.arange(batch) * 977 + 34_384) % (columns * page + 1)
    order = torch.stack([torch.randperm(columns) for _ in range(batch)])
    inputs = [q, w, pool, last[order].int(), visible.int()]
    inputs = [torch.zeros_like(x, device=device) if x is not pool else pool for x in inputs]
    score = poisoned(batch, columns * page, dtype=torch.float32, device=device)
    peaks = poisoned(batch, columns * page // PEAK, dtype=torch.int32, device=device)

    def step():
        index_scores(*inputs, score, peaks, index_page_size=page, backend="triton")

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for to, new in zip(inputs, (q, w, pool, last[order], visible), strict=True):
        to.copy_(new)
    graph.replay()
    for b in {0, 1, batch - 1}:
        own = stored.unflatten(0, (columns, page))[order[b]].flatten(0, 1)
        ratio = excess(score[b, None].cpu(), q[b, None], w[b, None], visible[b, None], own[None])
        assert ratio <= 1.0
    seen = torch.arange(peaks.shape[1], device=device) * PEAK < inputs[-1][:, None]
    assert torch.equal(peaks[seen], peaks_of(score)[seen])
