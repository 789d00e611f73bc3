"""HiSparse's coordinator against the reference residency, judged after every operation."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from optimized.hisparse.coordinator import Batch, Coordinator
from optimized.hisparse.pools import HostPages, rows_of_pages
from optimized.memory.allocator import Allocator, Ids
from oracle_tests.conftest import LAUNCHES
from oracle_tests.hisparse_world import GEOMETRIES, LEAST, ROOMY, SHAPE, UNPOOLED, World
from oracle_tests.kernel_cases import POISON
from reference.contract import Occupancy, OutOfMemory
from reference.geometry import GeometryError

Body = Callable[..., Any]
"""A fault: called with the original, and then as the original is."""

KINDS = ("skewed", "repeated", "new", "duplicates", "void")


def wander(world: World, steps: int) -> bool:
    """Random operations, up to the first finding; whether there was none."""
    rng = world.rng
    for _ in range(steps):
        idle = sorted({1, 2, 3, 4} - set(world.running))
        choice = rng.random()
        if idle and choice < 0.25:
            prefix = rng.choice([None, *world.cached])
            world.admit(rng.choice(idle), rng.randint(1, 3 * world.size), prefix)
        elif world.running and choice < 0.35:
            world.release(rng.choice(sorted(world.running)), keep=rng.random() < 0.6)
        elif choice < 0.4:
            world.evict()
        elif world.running:
            slots = rng.sample(sorted(world.running), rng.randint(1, len(world.running)))
            world.decode(slots, rng.choice(KINDS), padding=rng.randint(0, 1))
        if world.found:
            return False
    return True


@pytest.mark.parametrize("order", ["reuse", "high", "permuted"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_streams_equal_the_reference(name: str, order: str) -> None:
    """Admissions, steps, releases and evictions of four requests in memory for about three."""
    seen: dict[str, int] = {}
    for seed in range(4):
        world = World(GEOMETRIES[name], seed, order=order)
        assert wander(world, 60), world.found
        seen = {event: seen.get(event, 0) + count for event, count in world.seen.items()}
    assert all(seen.values()), seen


@pytest.mark.parametrize("launch", [*LAUNCHES, ("tilelang", "cpu")], ids="-".join)
def test_every_backend(launch: tuple[str, str]) -> None:
    world = World(LEAST, 1, launch=launch)
    assert wander(world, 25), world.found
    assert world.seen["misses"] > 0


def test_ids_never_coincide() -> None:
    """In all of a run no id of a host page is one of a device row or of a logical page, so that
    a wrong kind of id reads poison."""
    world = World(ROOMY, 3, order="high", host_pages=140)
    assert wander(world, 60), world.found
    assert world.seen["misses"] > 0
    device, host, logical = world.used.values()
    assert max(device) < min(host) <= max(host) < min(logical)


def tiny(*, device_pages: int = 9, host_pages: int = 8) -> tuple[Coordinator, Allocator]:
    """Hot buffers of 6 rows, in pages of 8, for prompts in pages of 8; ids in falling order."""
    logical = Allocator(12, order="high")
    engine = Coordinator(
        UNPOOLED,
        SHAPE,
        logical=logical,
        device_pages=device_pages,
        host_pages=host_pages,
        max_requests=2,
        page_order="high",
    )
    return engine, logical


@pytest.mark.parametrize(
    ("length", "resident"),
    [
        (1, [0]),
        (5, [0, 1, 2, 3, 4]),
        (6, [0, 1, 2, 3, 4, 5]),
        (7, [0, 1, 2, 3, 4, 5, 6]),
        (8, [0, 1, 2, 3, 4, 5, 7]),
        (16, [0, 1, 2, 3, 4, 5, 15]),
    ],
)
def test_direct_admission(length: int, resident: list[int]) -> None:
    """The first positions come to the slots, the newest of a long prompt behind them, and no
    other row of the device changes."""
    engine, logical = tiny()
    pages = logical.allocate(2)
    engine.hosts.hold(pages)
    rows = engine.hosts.rows(pages)[:length]
    engine.pools.host[:, rows] = torch.arange(length, dtype=torch.uint8)[:, None]
    engine.admit(1, pages, length)
    # pages 8 and 7 of 8 rows: six slots, and the first row of the second page
    assert engine.slot_rows[1].tolist() == [64, 65, 66, 67, 68, 69, 56]
    wanted = torch.full_like(engine.pools.device, POISON)
    for slot, position in enumerate(resident):
        wanted[:, engine.slot_rows[1, slot]] = position
    assert torch.equal(engine.pools.device, wanted)
    tags = [*resident[:6], *[-1] * (6 - len(resident))]
    assert engine.tags[:, 1].tolist() == [tags] * 3
    assert engine.lru[:, 1].tolist() == [[0, 1, 2, 3, 4, 5]] * 3


def test_shortage_is_told_apart() -> None:
    """Device and host memory are counted apart, and the message says which to raise."""
    engine, logical = tiny(device_pages=5, host_pages=4)
    pages = logical.allocate(11)
    with pytest.raises(OutOfMemory, match=r"needs 4 free host pages and 3 are left.*host_pages"):
        engine.reserve(1, pages[:4])
    engine.reserve(1, pages[:1])
    engine.reserve(2, pages[1:3])
    with pytest.raises(OutOfMemory, match=r"needs 1 free host pages and 0 are left.*host_pages"):
        engine.grow(1, pages[3:4])
    engine.release(1)
    engine.grow(2, pages[3:4])
    engine.release(2)
    engine, _ = tiny(device_pages=4)
    engine.reserve(1, pages[:1])
    with pytest.raises(OutOfMemory, match=r"takes 2 device pages and 1 are free.*device_pages"):
        engine.reserve(2, pages[1:2])


def test_occupancy_is_reported_apart() -> None:
    """Of eleven logical pages three are owned and two cached, one of them by a request too."""
    engine, logical = tiny()
    pages = logical.allocate(5)
    engine.hosts.hold(pages[:2])
    engine.reserve(1, pages[1:])
    assert engine.occupancy(cached=pages[:2].tolist()) == Occupancy(
        device_free=48,
        device_hot=16,
        device_total=64,
        host_free=16,
        host_held=40,
        host_total=56,
        logical_free=48,
        logical_owned=24,
        logical_cached=16,
        logical_total=88,
    )


def test_cached_prefix_keeps_its_host_pages() -> None:
    """Those of a cached prompt outlive the request that wrote them and one that shared them; the
    newest position, on which the prompt ends, reaches the host with the release."""
    world = World(UNPOOLED, 0)
    assert world.admit(1, 15)
    world.decode([1], "new")
    before = world.engine.hosts.backing.copy()
    world.release(1, keep=True)
    assert (world.engine.hosts.backing == before).all()
    assert world.admit(2, 20, world.cached[0])
    world.release(2, keep=False)
    assert (world.engine.hosts.backing == before).all()
    world.evict()
    assert not world.engine.hosts.backing.any()
    assert world.found == []


def test_released_memory_is_reused_at_once() -> None:
    """With a backup still to come when the request ends, and the same pages in the next one."""
    world = World(ROOMY, 0, order="reuse")
    assert world.admit(1, 40)
    for _ in range(6):
        world.decode([1], "new")
        pages = set(world.engine.running[1].device_pages.tolist())
        world.release(1, keep=False)
        assert world.admit(1, world.rng.randint(30, 40))
        assert set(world.engine.running[1].device_pages.tolist()) == pages
    assert world.found == []


def test_backup_waits_for_the_scheduler() -> None:
    """Copies are made layer by layer when the scheduler says so, the rest on waiting; what came
    from the host at admission is not copied back."""
    engine, logical = tiny()
    pages = logical.allocate(2)
    engine.hosts.hold(pages)
    engine.pools.host.zero_()
    engine.admit(1, pages, 9)
    batch = engine.append([1])
    assert not engine.backups.pending
    engine.pools.device[:, engine.rows_to_write(batch)] = 77
    host = engine.pools.host[:, int(engine.host_rows[1, 9]), 0]
    batch = engine.append([1])
    assert host.tolist() == [0, 0, 0]
    engine.backups.copy_oldest()
    assert host.tolist() == [77, 0, 0]
    engine.rows_to_write(batch)
    assert host.tolist() == [77, 77, 77]
    assert not engine.backups.pending


def test_geometry_without_a_hot_buffer_is_an_error() -> None:
    with pytest.raises(GeometryError, match="set it to the rows of a hot buffer"):
        Coordinator(
            replace(ROOMY, device_buffer_size=None),
            SHAPE,
            logical=Allocator(4),
            device_pages=9,
            host_pages=4,
            max_requests=1,
        )


def no_wait(original: Body, self: Coordinator, batch: Batch) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self.backups, "wait", lambda: None)
        return original(self, batch)


def unclamped(original: Body, self: Coordinator, slots: Ids) -> tuple[Tensor, Tensor]:
    rows = self.slot_rows[torch.from_numpy(slots)]
    last = torch.from_numpy(self.length[slots] - 1) % rows.shape[1]
    return rows.gather(1, last[:, None])[:, 0], original(self, slots)[1]


def device_pages_by_length(original: Body, self: Coordinator, slot: int) -> None:
    held, page = self.running[slot], self.geometry.physical_page_size
    held.device_pages = held.device_pages[: -(-int(self.length[slot]) // page) + 1]
    original(self, slot)


def whole_pages_alone(original: Body, self: Coordinator, slot: int) -> None:
    held, page = self.running[slot], self.geometry.logical_page_size
    held.pages = held.pages[: int(self.length[slot]) // page]
    original(self, slot)


def backing_kept(original: Body, self: HostPages, pages: Ids) -> None:
    before = self.backing.copy()
    original(self, pages)
    self.backing = before


def order_kept(original: Body, self: Coordinator, slot: int, *, resident: int) -> None:
    before = self.lru[:, slot].clone()
    original(self, slot, resident=resident)
    self.lru[:, slot] = before


COORDINATOR = "optimized.hisparse.coordinator"
ENGINE = f"{COORDINATOR}.Coordinator"
POOLS = "optimized.hisparse.pools"
LEFT = "the host row of position .* differs from the row that was written"
FAULTS: dict[str, tuple[str, Body, str]] = {
    "no wait": (f"{ENGINE}.rows_to_write", no_wait, LEFT),
    "no backup": (f"{ENGINE}.unsaved", lambda o, s, slots: slots[:0], LEFT),
    "backup of slot n": (f"{ENGINE}.newest_copies", unclamped, LEFT),
    "release does not wait": (
        "optimized.hisparse.backups.BackupQueue.drain",
        lambda o, s: None,
        f"A free host row holds something|A host row of a cached prompt is wrong|{LEFT}",
    ),
    "newest at H - 1": (
        f"{COORDINATOR}.newest_slot",
        lambda o, length, size: o(length, size - 1),
        "The newest row of slot . is not that of slot 10",
    ),
    "preload one short": (
        f"{COORDINATOR}.preloaded",
        lambda o, length, size: o(length, size)[: max(1, min(length, size) - 1)],
        "should hold position .*; it holds no position",
    ),
    "tags beyond the preload": (
        f"{ENGINE}.reset",
        lambda o, s, slot, resident: o(s, slot, resident=s.size if resident else 0),
        "with . positions the tags should be",
    ),
    "tags kept": (
        f"{ENGINE}.reset",
        lambda o, s, slot, resident: o(s, slot, resident=resident) if resident else None,
        "with 0 positions the tags should be",
    ),
    "order kept": (f"{ENGINE}.reset", order_kept, "with 0 positions nothing was evicted; LRU is"),
    "follower stands still": (
        f"{ENGINE}.follow",
        lambda o, s, layer, batch, plan: None,
        "should hold position .*; it holds ",
    ),
    "host rows of the next layer": (
        f"{POOLS}.HotPools.of_layer",
        lambda o, s, layer: (o(s, layer)[0], o(s, (layer + 1) % 3)[1]),
        "should hold position .*; it holds no position",
    ),
    "map ignored": (
        f"{POOLS}.HostPages.rows",
        lambda o, s, pages: rows_of_pages(np.array(pages) % len(s.allocator.counts), s.page_size),
        "The host rows of slot . are not those of its pages",
    ),
    "backing kept": (f"{POOLS}.HostPages.drop", backing_kept, "logical tokens should add up to"),
    "device pages by length": (
        f"{ENGINE}.release",
        device_pages_by_length,
        "device row .* should be free or owned; it is leaked",
    ),
    "whole pages alone": (
        f"{ENGINE}.release",
        whole_pages_alone,
        "host row .* should be free or owned; it is leaked",
    ),
    "host in device tokens": (
        f"{ENGINE}.occupancy",
        lambda o, s, cached: replace(o(s, cached=cached), host_free=s.device.available),
        "host tokens should add up to",
    ),
}
"""Faults of the coordinator: what is patched, by what, and what a judge must say of it."""


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    path, body, sentence = FAULTS[fault]
    owner, name = path.rsplit(".", 1)
    original = getattr(pkgutil.resolve_name(owner), name)
    monkeypatch.setattr(path, lambda *args, **options: body(original, *args, **options))
    worlds = (World(LEAST, seed) for seed in range(4))
    found = next((world.found for world in worlds if not wander(world, 60)), [])
    assert any(re.search(sentence, each) for each in found), found
