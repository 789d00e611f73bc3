"""One launch for all that a decode step stores: bitwise what its two halves leave, and against
the reference."""

from __future__ import annotations

import pytest
import torch

from optimized.kernels.decode_update import decode_update
from optimized.kernels.kv_store import kv_store
from optimized.kernels.store_step import store_step
from oracle_tests.conftest import CUDA
from oracle_tests.kernel_cases import (
    differing_rows,
    poisoned,
    pool_geometry,
    spread_ids,
    wrong_index_slots,
)
from reference import quant
from reference.geometry import RowFormat

PAGES, PAGE, SLOTS, LOCS, DRAFTS = 9, 4, 12, 40, 3
FAR = 3_000_000_000
"""A position beyond int32."""
FORMATS = pytest.mark.parametrize("row_format", list(RowFormat), ids=lambda f: f.value)


def case(row_format, *, kpool=4, dim=16, latent=200, kind="random"):
    """(pools and rings before, the step's inputs): requests that close a group, some that do
    not, and a padding one; poison in all that nobody may read."""
    torch.manual_seed(kpool * dim + latent)
    closing = [kpool - 1, FAR * kpool + kpool - 1, 8 * kpool - 1]
    position = torch.tensor([*closing, 0, 5 * kpool, FAR * kpool, 0])
    batch, ring_size = len(position), kpool + DRAFTS
    closes = (position + 1) % kpool == 0
    closes[-1] = False
    ring_slot, index_slot = spread_ids(batch, SLOTS), torch.zeros(batch, dtype=torch.int64)
    ring_slot[-1] = 0
    index_slot[closes] = spread_ids(int(closes.sum()), PAGES * PAGE, least=PAGE)
    size = {"random": 1.0, "extreme": 1e4, "tied": 0.0}[kind]
    ring = poisoned(2, SLOTS, ring_size, dim, dtype=torch.bfloat16)
    for request in closes.nonzero().flatten().tolist():
        rows = (position[request] - torch.arange(1, kpool)) % ring_size
        ring[:, ring_slot[request], rows] = (torch.randn(2, kpool - 1, dim) * size).bfloat16()
    loc = spread_ids(batch, LOCS)
    loc[-1] = 0
    row = torch.randn(batch, latent) * torch.logspace(-6, 6, batch)[:, None]
    row[3] = 0.0
    buffers = poisoned(PAGES, PAGE * (dim + 4)), ring, poisoned(LOCS, row_format.row_bytes(latent))
    new = (torch.randn(2, batch, dim) * size).bfloat16()
    return buffers, (*new, ring_slot, position, index_slot, torch.randn(kpool, dim), loc, row)


def run(launch, step, buffers, inputs, **options):
    """The index pool, the rings and the KV pool after `step`."""
    backend, device = launch
    index_pool, ring, kv_pool = (x.to(device, copy=True) for x in buffers)
    *update, loc, row = (x.to(device) for x in inputs)
    step(index_pool, *ring, *update, kv_pool, loc, row, backend=backend, **options)
    return index_pool, ring, kv_pool


def in_two(index_pool, ring_key, ring_gate, *inputs, row_format, backend, **options):
    """What `store_step` replaces, with its signature."""
    *update, kv_pool, loc, row = inputs
    decode_update(index_pool, ring_key, ring_gate, *update, backend=backend, **options)
    kv_store(kv_pool, loc, row, row_format=row_format, backend=backend)


def options_of(row_format, *, kpool=4, round_scale=True):
    return {
        "kpool": kpool,
        "index_page_size": PAGE,
        "round_scale": round_scale,
        "row_format": row_format,
    }


def differing(actual, expected):
    return [differing_rows(*pair) for pair in zip(actual, expected, strict=True)]


SIZES = [(1, 16, 16, True), (2, 16, 128, False), (4, 16, 200, True), (4, 128, 512, False)]
"""(kpool, index dim, latent, round_scale)."""


@FORMATS
@pytest.mark.parametrize(("kpool", "dim", "latent", "round_scale"), SIZES)
def test_equals_its_two_halves(launch, row_format, kpool, dim, latent, round_scale):
    buffers, inputs = case(row_format, kpool=kpool, dim=dim, latent=latent)
    options = options_of(row_format, kpool=kpool, round_scale=round_scale)
    together = run(launch, store_step, buffers, inputs, **options)
    assert differing(together, run(launch, in_two, buffers, inputs, **options)) == [[], [], []]
    assert differing(together, run(launch, store_step, buffers, inputs, **options)) == [[], [], []]
    assert differing_rows(together[0][1:], buffers[0][1:]) != []


@FORMATS
@pytest.mark.parametrize("kind", ["random", "extreme", "tied"])
def test_equals_reference(launch, row_format, kind):
    buffers, inputs = case(row_format, kind=kind)
    key, gate, ring_slot, position, index_slot, ape, loc, row = inputs
    index_pool, ring, kv_pool = run(launch, store_step, buffers, inputs, **options_of(row_format))
    expected_ring, groups = buffers[1].clone(), {}
    for request, slot in enumerate(index_slot.tolist()):
        at = ring_slot[request], position[request] % (4 + DRAFTS)
        expected_ring[0][at], expected_ring[1][at] = key[request], gate[request]
        if slot:
            rows = (position[request] - torch.arange(3, -1, -1)) % (4 + DRAFTS)
            groups[slot] = tuple(expected_ring[:, ring_slot[request], rows])
    assert len(groups) == 3
    geometry = pool_geometry(kpool=4, page=PAGE)
    assert wrong_index_slots(buffers[0], index_pool, groups, ape, geometry) == []
    assert differing_rows(ring[:, 1:].flatten(0, 1), expected_ring[:, 1:].flatten(0, 1)) == []
    expected_rows = buffers[2].clone()
    expected_rows[loc] = quant.encode_row(row, row_format)
    assert differing_rows(kv_pool, expected_rows) == []


def test_exchanged_places_are_noticed(launch):
    """One ring row, one index slot, one loc given to the wrong request."""
    buffers, inputs = case(RowFormat.FP8_RAW)
    options = options_of(RowFormat.FP8_RAW)
    expected = run(launch, in_two, buffers, inputs, **options)
    for place, changed in ((2, 1), (4, 0), (6, 2)):
        wrong = [x.clone() for x in inputs]
        wrong[place][[0, 1]] = inputs[place][[1, 0]]
        assert differing(run(launch, store_step, buffers, wrong, **options), expected)[changed]


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@FORMATS
def test_real_geometry_beyond_31_bits(row_format):
    """48 requests, with pools of more than 2**31 bytes of which they write the ends: captured, and
    replayed with other inputs, bitwise what the two kernels leave."""
    torch.manual_seed(0)
    batch, dim, latent, page, ring_size = 48, 128, 512, 64, 8
    pages = 2**31 // (page * (dim + 4)) + 100
    count = 2**31 // row_format.row_bytes(latent) + 100
    ring = torch.randn(2, batch + 1, ring_size, dim, device="cuda").bfloat16()
    new = torch.randn(2, batch, dim, device="cuda").bfloat16()
    ape = torch.randn(4, dim, device="cuda")
    row = torch.randn(batch, latent, device="cuda")
    ids = {
        name: torch.zeros(batch, dtype=torch.int64, device="cuda")
        for name in ("ring_slot", "position", "index_slot", "loc")
    }

    def draw():
        new.normal_()
        row.normal_()
        position = torch.randint(4, 140_000, (batch,))
        slots = pages * page - 1 - torch.randperm(500)[:batch]
        ids["ring_slot"].copy_(torch.randperm(batch) + 1)
        ids["position"].copy_(position)
        ids["index_slot"].copy_(torch.where((position + 1) % 4 == 0, slots, 0))
        ids["loc"].copy_(count - 1 - torch.randperm(99)[:batch])

    def buffers():
        return (
            torch.zeros(pages, page * (dim + 4), dtype=torch.uint8, device="cuda"),
            ring.clone(),
            torch.zeros(count, row_format.row_bytes(latent), dtype=torch.uint8, device="cuda"),
        )

    def step(function, index_pool, rings, kv_pool):
        function(
            index_pool,
            *rings,
            *new,
            ids["ring_slot"],
            ids["position"],
            ids["index_slot"],
            ape,
            kv_pool,
            ids["loc"],
            row,
            kpool=4,
            index_page_size=page,
            round_scale=True,
            row_format=row_format,
            backend="triton",
        )

    draw()
    actual, expected = buffers(), buffers()
    step(store_step, *buffers())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(store_step, *actual)
    draw()
    graph.replay()
    step(in_two, *expected)
    assert [torch.equal(*pair) for pair in zip(actual, expected, strict=True)] == [True] * 3
    assert actual[0][-10:].any()
    assert actual[2][-100:].any()
