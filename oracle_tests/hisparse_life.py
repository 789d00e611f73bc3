"""Random lives of requests under HiSparse, and what must hold after each call."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from oracle_tests.tiny_engine import SHAPE, build, rows
from reference.contract import (
    Chunk,
    Component,
    Engine,
    HiSparse,
    OutOfMemory,
    RequestId,
    Rows,
    Snapshot,
    StepOutput,
)
from reference.geometry import Geometry
from reference.hisparse import HotBuffer

LEAST = Geometry(
    kpool=4, physical_page_size=4, topk=8, mamba_track_interval=16, device_buffer_size=10
)
"""The hot buffer is as small as topk and kpool allow, and no whole number of device pages."""
ROOMY = replace(LEAST, device_buffer_size=19)
PAGE, WIDTH = LEAST.logical_page_size, LEAST.selection_width
HOT_PAGES = {LEAST: 4, ROOMY: 6}
PAGES, HOST_PAGES = 20, 8
LAYERS = len(SHAPE.dsa_layers)
A, B, C = RequestId(1), RequestId(2), RequestId(3)
Copies = Literal["early", "late", "random"]


def hisparse(
    geometry: Geometry = LEAST,
    *,
    buffers: int = 3,
    host_pages: int = 30,
    copies: Copies = "late",
    **options: Any,
) -> Engine:
    """An engine with device pages for so many hot buffers."""
    sizes = HiSparse(
        device_pages=buffers * HOT_PAGES[geometry] + 1, host_pages=host_pages, copies=copies
    )
    return build(geometry=geometry, hisparse=sizes, **options)


class Life:
    """A stamped engine and random calls on it, all it shows being judged after each.

    The rows of a position depend on it alone, as if all requests had the same tokens.
    """

    def __init__(self, seed: int, order: str, copies: Copies) -> None:
        self.rng = random.Random(seed)
        self.geometry = self.rng.choice([LEAST, ROOMY])
        self.size = self.geometry.device_buffer_size
        self.engine = hisparse(
            self.geometry,
            host_pages=HOST_PAGES,
            copies=copies,
            page_order=order,
            seed=seed,
            pages=PAGES,
        )
        self.every = rows(200, 201, seed=seed)
        self.stored = self.every.kv.bfloat16().view(torch.uint8)
        self.known: dict[RequestId, int] = {}
        self.buffers: dict[RequestId, list[HotBuffer]] = {}
        self.seen = dict.fromkeys(("misses", "hits", "no room", "no buffer", "past"), 0)

    def wander(self, steps: int) -> None:
        for _ in range(steps):
            idle = sorted({A, B, C, RequestId(4)} - set(self.known))
            choice = self.rng.random()
            try:
                if idle and choice < 0.15:
                    self.submit(self.rng.choice(idle))
                elif self.known and choice < 0.22:
                    end = self.rng.choice([self.engine.finish, self.engine.abort])
                    request = self.rng.choice(sorted(self.known))
                    end(request)
                    del self.known[request]
                elif choice < 0.25:
                    self.engine.evict(1)
                elif self.known:
                    self.step()
            except OutOfMemory as error:
                kind = "no buffer" if "device pages" in str(error) else "no room"
                self.seen[kind] += 1
            self.judge()

    def submit(self, request: RequestId) -> None:
        length = self.rng.randint(1, 60)
        self.seen["hits"] += self.engine.submit(request, range(length)).hit > 0
        self.known[request] = length
        self.buffers[request] = [HotBuffer(self.size) for _ in range(LAYERS)]

    def step(self) -> None:
        """A chunk of a request whose prompt is incomplete, or a decode of some that have all."""
        views = self.engine.inspect().requests
        request = self.rng.choice(sorted(self.known))
        if views[request].length < self.known[request]:
            self.extend(request, views[request].length)
            return
        ready = [r for r in sorted(views) if views[r].length == self.known[r] < 150]
        if ready:
            batch = self.rng.sample(ready, self.rng.randint(1, len(ready)))
            self.decode(batch, [views[r].length for r in batch])

    def extend(self, request: RequestId, start: int) -> None:
        stop = self.rng.randint(start + 1, self.known[request])
        states = self.geometry.state_positions(start, stop)
        given = self.rows_at(list(range(start, stop)), list(states))
        self.engine.extend([Chunk(request=request, stop=stop, rows=given)])
        if stop == self.known[request]:
            for buffer in self.buffers[request]:
                buffer.admit(stop)

    def decode(self, batch: list[RequestId], lengths: list[int]) -> None:
        selected = torch.tensor([[self.select(n) for n in lengths] for _ in range(LAYERS)])
        given = replace(self.rows_at(lengths, [n + 1 for n in lengths]), selected=selected)
        outputs = self.engine.decode(batch, lengths, given)
        for place, output in enumerate(outputs):
            self.known[output.request] += 1
            self.compare(output, selected[:, place], lengths[place] + 1)

    def rows_at(self, positions: list[int], states: list[int]) -> Rows:
        every = self.every
        return Rows(
            kv=every.kv[:, positions],
            key=every.key[:, positions],
            gate=every.gate[:, positions],
            state=every.state[states],
        )

    def select(self, newest: int) -> list[int]:
        """Whole topk positions, duplicates and void cells among them, perhaps the newest."""
        rng = self.rng
        row = [
            rng.choice([int(newest * rng.random() ** 2), rng.randint(0, newest), -1, newest + 1])
            for _ in range(LEAST.topk)
        ]
        row += rng.choice([[newest], [], [2**40, newest]])
        rng.shuffle(row)
        return row + [-1] * (WIDTH - len(row))

    def compare(self, output: StepOutput, selected: Tensor, length: int) -> None:
        """Attention finds the rows of what is selected, and zeros in void cells."""
        void = (selected < 0) | (selected >= length)
        layer = torch.arange(LAYERS)[:, None]
        wanted = self.stored[layer, selected.masked_fill(void, 0)]
        wanted[void] = 0
        assert torch.equal(output.attended[:, 0], wanted)
        assert tuple(output.misses.shape) == (LAYERS, 1)
        for layer, buffer in enumerate(self.buffers[output.request]):
            buffer.grow(length)
            swapped = buffer.swap_in(selected[layer].tolist(), length, range(length))
            assert int(output.misses[layer]) == len(swapped.misses)
        self.seen["misses"] += int(output.misses.sum())
        self.seen["past"] += length > self.size

    def judge(self) -> None:
        seen = self.engine.inspect()
        judge_conservation(seen, self.geometry, pages=PAGES, host_pages=HOST_PAGES)
        for request, view in seen.requests.items():
            for layer in range(LAYERS):
                read = self.engine.read(request, Component.KV, layer, 0, view.length)
                assert torch.equal(read, self.stored[layer, : view.length])
                self.judge_buffer(seen, request, layer)

    def judge_buffer(self, seen: Snapshot, request: RequestId, layer: int) -> None:
        """Each slot has the row of its tag, the newest position's too, and the host all others."""
        view, buffer = seen.requests[request], seen.hot.buffers[request]
        length, tags = view.length, buffer.tags[layer]
        wanted = self.buffers[request][layer]
        assert (tags, buffer.lru[layer]) == (tuple(wanted.tags), tuple(wanted.lru))
        host = self.engine.raw(Component.KV, layer)[list(buffer.host_rows[: buffer.saved])]
        assert torch.equal(host, self.stored[layer, : buffer.saved])
        complete = length == self.known[request]
        assert complete or buffer.saved == length
        hot = self.engine.read(request, Component.HOT, layer, 0, self.size + 1)
        assert torch.equal(hot, self.engine.raw(Component.HOT, layer)[list(buffer.rows)])
        for position, slot in wanted.resident(length if complete else 0).items():
            assert torch.equal(hot[slot], self.stored[layer, position])


def judge_conservation(seen: Snapshot, geometry: Geometry, *, pages: int, host_pages: int) -> None:
    """Every page of each memory is free or held by whom the snapshot says, and counted once."""
    hot, tokens = seen.hot, seen.hot.occupancy
    device_page = geometry.physical_page_size
    owned = [page for buffer in hot.buffers.values() for page in buffer.pages]
    assert set(hot.buffers) == set(seen.requests)
    assert len(set(owned)) == len(owned) == HOT_PAGES[geometry] * len(seen.requests)
    device = set(range(1, 3 * HOT_PAGES[geometry] + 1))
    assert set(owned) | hot.free_device == device
    assert not set(owned) & hot.free_device
    for buffer in hot.buffers.values():
        every = [page * device_page + i for page in buffer.pages for i in range(device_page)]
        assert set(buffer.rows) <= set(every)
        assert buffer.rows[-1] == buffer.pages[-1] * device_page
    backing = list(hot.backing.values())
    assert set(hot.backing) == set(seen.ref_counts)
    assert len(set(backing)) == len(backing)
    assert set(backing) | hot.free_host == set(range(1, host_pages))
    assert not set(backing) & hot.free_host
    for request, view in seen.requests.items():
        rows_of = [hot.backing[page] * PAGE + i for page in view.pages for i in range(PAGE)]
        assert hot.buffers[request].host_rows == tuple(rows_of)
    assert (tokens.device_free, tokens.device_hot, tokens.device_total) == (
        len(hot.free_device) * device_page,
        len(owned) * device_page,
        len(device) * device_page,
    )
    assert (tokens.host_free, tokens.host_held, tokens.host_total) == (
        len(hot.free_host) * PAGE,
        len(backing) * PAGE,
        (host_pages - 1) * PAGE,
    )
    cached = {page for node in seen.cached for page in node.pages}
    assert (tokens.logical_free, tokens.logical_owned, tokens.logical_cached) == (
        len(seen.free_pages) * PAGE,
        (len(seen.ref_counts) - len(cached)) * PAGE,
        len(cached) * PAGE,
    )
    assert tokens.logical_total == (pages - 1) * PAGE
