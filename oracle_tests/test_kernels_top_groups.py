"""Selection from scores and peaks: exactly the reference's rows, whatever lies beyond them."""

from __future__ import annotations

import pytest
import torch

from optimized.kernels import top_groups as module
from optimized.kernels.backends import BackendError
from optimized.kernels.top_groups import PEAK, peaks_of, top_groups
from oracle_tests.conftest import CUDA
from oracle_tests.kernel_cases import poisoned
from reference import addressing, index
from reference.geometry import Geometry

PAGE = 4


def geometry_of(kpool, most):
    return Geometry(
        kpool=kpool, physical_page_size=PAGE, topk=most * kpool, mamba_track_interval=PAGE * kpool
    )


def lengths(kpool, most, groups):
    """Newest positions with: no row, a tail alone, and one under, at and over each count of groups
    at which the kernel does something else, at every phase of a group."""
    marks = {0, most, most * PEAK, groups}
    counts = {m + d for m in marks for d in (-1, 0, 1)} & set(range(groups + 1))
    return torch.tensor([-1] + [c * kpool + c % kpool - 1 for c in sorted(counts)])


def run(launch, score, position, geometry, *, width=0, dtype=torch.int32, change=None):
    """(groups, selected, locs, table) with everything beyond a query's sight poisoned; `change`
    may falsify scores and peaks."""
    backend, device = launch
    batch, n = score.shape
    most, kpool = geometry.topk_groups, geometry.kpool
    visible = (position + 1) // kpool
    unseen = torch.arange(n) >= visible[:, None]
    score = score.float().masked_fill(unseen, float("nan"))
    # a row of peaks may be longer than it need be
    own = peaks_of(score.masked_fill(unseen, float("-inf")))
    peaks = torch.nn.functional.pad(own, (0, 2))
    blocks = torch.arange(peaks.shape[1]) * PEAK
    # the greatest of all keys: an unseen block that was looked at would win
    peaks.masked_fill_(blocks >= visible[:, None], 2**31 - 1)
    if change:
        change(score, peaks)
    torch.manual_seed(3)
    pages = torch.randperm(batch * -(-n // PAGE)).view(batch, -1).int() + 1
    owned = (position[:, None] // (PAGE * kpool)) >= torch.arange(pages.shape[1])
    table = pages.masked_fill(~owned | (position[:, None] < 0), -(2**30))
    groups, blocks = (
        poisoned(batch, most, dtype=torch.int32),
        poisoned(batch, most, dtype=torch.int32),
    )
    selected, locs = poisoned(2, batch, width or geometry.selection_width, dtype=dtype)
    groups, blocks, selected, locs = (x.to(device) for x in (groups, blocks, selected, locs))
    top_groups(
        *(x.to(device) for x in (score, peaks, position, table)),
        groups,
        blocks,
        selected,
        locs,
        kpool=kpool,
        index_page_size=PAGE,
        backend=backend,
    )
    return groups.cpu(), selected.cpu(), locs.cpu(), table


def expected_locs(selected, table, geometry):
    """0 where there is no position, else the reference's loc."""
    rows = [
        [int(addressing.loc_of(pages, at, geometry)) if at >= 0 else 0 for at in row]
        for pages, row in zip(table.tolist(), selected.tolist(), strict=True)
    ]
    return torch.tensor(rows)


def scores(kind, batch, n):
    torch.manual_seed(n)
    score = torch.randn(batch, n)
    match kind:
        case "near-tied":
            return 1.0 + torch.randint(0, 4, (batch, n)) * 2.0**-23
        case "tied":
            return torch.randint(-1, 2, (batch, n)).float() * 0.5
        case "equal":
            return torch.full((batch, n), -3.0)
        case "zeros of both signs":
            return torch.where(score > 0, 0.0, -0.0)
        case "minus infinity":
            return score.masked_fill(score < 1.0, float("-inf"))
        case "extreme":
            return score.sign() * torch.exp2(torch.randint(-149, 128, (batch, n)).float())
        case "infinite":
            return score.masked_fill(score > 1.5, float("inf"))
        case "ascending":
            return torch.arange(n).expand(batch, n) - 50.0
    return score


KINDS = [
    "random",
    "near-tied",
    "tied",
    "equal",
    "zeros of both signs",
    "minus infinity",
    "extreme",
    "infinite",
    "ascending",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("kpool", "most", "n"), [(4, 6, 300), (1, 8, 129), (2, 4, 29)], ids=lambda n: str(n)
)
def test_equals_reference(launch, kind, kpool, most, n):
    """With blocks to choose from, one more than must be chosen, and so few that all are."""
    geometry = geometry_of(kpool, most)
    position = lengths(kpool, most, n)
    score = scores(kind, len(position), n)
    groups, selected, locs, table = run(launch, score, position, geometry)
    rows = index.select(score.double(), position, geometry)
    assert torch.equal(selected.long(), rows)
    assert torch.equal(locs.long(), expected_locs(rows, table, geometry))
    for row, visible, found in zip(rows, (position + 1) // kpool, groups, strict=True):
        count = min(int(visible), most)
        assert found.tolist() == (row[: count * kpool : kpool] // kpool).tolist() + [-1] * (
            most - count
        )


def test_fewer_groups_than_are_selected(launch):
    geometry = geometry_of(4, 6)
    position = lengths(4, 6, 3)
    score = scores("random", len(position), 3)
    _, selected, locs, table = run(launch, score, position, geometry)
    rows = index.select(score.double(), position, geometry)
    assert torch.equal(selected.long(), rows)
    assert torch.equal(locs.long(), expected_locs(rows, table, geometry))


def test_wider_rows_end_in_minus_one(launch):
    geometry = geometry_of(4, 6)
    position = lengths(4, 6, 200)
    score = scores("random", len(position), 200)
    narrow = run(launch, score, position, geometry)
    wide = run(launch, score, position, geometry, width=40, dtype=torch.int64)
    for short, long, rest in zip(narrow[1:3], wide[1:3], (-1, 0), strict=True):
        assert torch.equal(long[:, : short.shape[1]], short.long())
        assert (long[:, short.shape[1] :] == rest).all()


def test_a_nan_in_sight_is_selected(launch):
    """Only what a query cannot see is hidden: a poisoned row that was scored must come out."""
    geometry = geometry_of(4, 6)
    position = torch.full((2,), 4 * 300 - 1)
    score = scores("random", 2, 300)
    score[0, 17], score[1, 299] = float("nan"), -float("nan")
    groups, *_ = run(launch, score, position, geometry)
    assert 17 in groups[0]
    assert 299 in groups[1]


def test_twice_the_same_bits(launch):
    geometry = geometry_of(4, 6)
    position = lengths(4, 6, 300)
    score = scores("near-tied", len(position), 300)
    once, twice = (run(launch, score, position, geometry) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


def test_a_selected_score_that_sinks_is_noticed(launch):
    """The control: one score that is wrong moves its group out of the row."""
    geometry = geometry_of(4, 6)
    position = torch.tensor([1199, 803, 77])
    score = scores("random", 3, 300)
    groups, *_ = run(launch, score, position, geometry)

    def change(score, _peaks):
        for row, best in enumerate(groups[:, 0].tolist()):
            score[row, best] = float("-inf")

    changed, *_ = run(launch, score, position, geometry, change=change)
    assert (changed[:, 0] != groups[:, 0]).all()


def test_a_peak_that_sinks_hides_its_block():
    """Triton believes the peaks, which is what makes it fast."""
    geometry = geometry_of(4, 6)
    position = torch.tensor([1199])
    score = scores("random", 1, 300)
    launch = ("triton", "cuda" if CUDA else "cpu")
    groups, *_ = run(launch, score, position, geometry)
    block = int(groups[0, 0]) // PEAK

    def change(_score, peaks):
        peaks[0, block] = -(2**31) + 1

    changed, *_ = run(launch, score, position, geometry, change=change)
    assert not (changed // PEAK == block).any()


def test_too_many_groups_are_an_error():
    n = module.MOST_CANDIDATES * PEAK + 1
    score = torch.zeros(1, n, device="cuda" if CUDA else "cpu")
    position = torch.zeros(1, dtype=torch.int64, device=score.device)
    rows = torch.zeros(1, 30, dtype=torch.int32, device=score.device)
    with pytest.raises(BackendError, match="choose backend torch"):
        top_groups(
            score,
            rows,
            position,
            rows,
            rows[:, :6],
            rows,
            rows,
            None,
            kpool=4,
            index_page_size=PAGE,
            backend="triton",
        )


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_production_size(kind):
    """512 of 65,536 groups, the last rows' scores beyond 2^31 bytes, in a replayed graph."""
    n, most, kpool, page = 65536, 512, 4, 64
    batch = 2**31 // (4 * n) + 4
    rows = [0, 1, 2, batch - 2, batch - 1]
    device = "cuda"
    position = torch.full((batch,), -1, device=device)
    newest = torch.tensor([kpool * n - 1, 137_500, 32_767, 2046, kpool * n - 2])
    score = torch.empty(batch, n, device=device)
    peaks = torch.zeros(batch, n // PEAK, dtype=torch.int32, device=device)
    table = torch.randperm(batch * n // page, device=device).view(batch, -1).int()
    groups, blocks = (torch.empty(batch, most, dtype=torch.int32, device=device) for _ in "gb")
    selected = torch.empty(batch, 2051, dtype=torch.int32, device=device)
    locs = torch.empty_like(selected, dtype=torch.int64)

    def step():
        top_groups(
            score,
            peaks,
            position,
            table,
            groups,
            blocks,
            selected,
            locs,
            kpool=kpool,
            index_page_size=page,
            backend="triton",
        )

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    drawn = scores(kind, len(rows), n)
    score[rows], position[rows] = drawn.to(device), newest.to(device)
    peaks[rows] = peaks_of(score[rows])
    graph.replay()
    geometry = Geometry(
        kpool=kpool, physical_page_size=page, topk=most * kpool, mamba_track_interval=page * kpool
    )
    expected = index.select(drawn.double(), newest, geometry)
    assert torch.equal(selected[rows].cpu().long(), expected)
    wanted = expected_locs(expected, table[rows].cpu(), geometry)
    assert torch.equal(locs[rows].cpu(), wanted)
    idle = torch.ones(batch, dtype=torch.bool)
    idle[rows] = False
    assert (selected.cpu()[idle] == -1).all()
