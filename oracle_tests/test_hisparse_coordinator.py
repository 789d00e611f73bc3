"""HiSparse's coordinator against the reference residency, judged after every operation."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from optimized.hisparse.coordinator import Coordinator
from optimized.hisparse.pages import BackedPages
from optimized.memory.allocator import Allocator, Ids
from oracle_tests.conftest import LAUNCHES
from oracle_tests.hisparse_cases import GEOMETRIES, LEADERS, LEAST, ROOMY, UNPOOLED, build
from oracle_tests.hisparse_world import World
from oracle_tests.kernel_cases import POISON
from reference.contract import EngineOptions, HiSparse, OutOfMemory

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
            prefix = rng.choice(world.cached or [None])
            world.admit(rng.choice(idle), rng.randint(1, 3 * world.size), prefix)
        elif world.running and choice < 0.35:
            world.release(rng.choice(sorted(world.running)), keep=rng.random() < 0.6)
        elif choice < 0.4:
            world.evict()
        elif world.running:
            slots = rng.sample(sorted(world.running), rng.randint(1, len(world.running)))
            world.decode(slots, rng.choice(KINDS))
        if world.found:
            return False
    return True


@pytest.mark.parametrize("order", ["reuse", "high", "permuted"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_streams_equal_the_reference(name: str, order: str) -> None:
    """Admissions, steps, releases and evictions of four requests in memory for about three."""
    seen: dict[str, int] = {}
    for seed in range(5):
        world = World(GEOMETRIES[name], seed, order=order)
        assert wander(world, 100), world.found
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


Copies = Literal["early", "late", "random"]


def tiny(
    *, device_pages: int = 9, host_pages: int = 8, copies: Copies = "late"
) -> tuple[BackedPages, Coordinator]:
    """Hot buffers of 6 rows, in pages of 8, for prompts in pages of 8; ids in falling order."""
    sizes = HiSparse(device_pages=device_pages, host_pages=host_pages, copies=copies)
    options = EngineOptions(pages=12, state_slots=1, max_requests=2, page_order="high")
    return build(UNPOOLED, sizes, options)


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
    _, engine = tiny()
    host_rows = np.arange(40, 40 + len(resident))
    engine.pools.host[:, host_rows] = torch.tensor(resident, dtype=torch.uint8)[:, None]
    engine.admit(1)
    engine.preload(1, length, host_rows)
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
    """Logical, host and device pages are counted apart, and the message says which to raise."""
    pages, engine = tiny(device_pages=4, host_pages=4)
    with pytest.raises(OutOfMemory, match=r"needs 4 free host pages and 3 are left.*host_pages"):
        pages.require(4)
    pages, _ = tiny(host_pages=20)
    with pytest.raises(OutOfMemory, match=r"needs 12 free logical pages and 11 .*raise pages"):
        pages.require(12)
    engine.require_room()
    engine.admit(1)
    with pytest.raises(OutOfMemory, match=r"needs 2 free device pages and 1 .*device_pages"):
        engine.require_room()
    engine.release(1)
    engine.require_room()


def test_host_pages_come_and_go_with_their_logical_pages() -> None:
    """However many hold a logical page; its host page is taken once and freed once."""
    pages, _ = tiny()
    first = pages.allocate(3)
    hosts = pages.backing[first]
    assert sorted(hosts) == [5, 6, 7]
    assert pages.available == 4
    pages.retain(first[:1])
    pages.release(first)
    assert pages.hosts.free_ids() == {1, 2, 3, 4, 5, 6, 7} - {hosts[0]}
    assert pages.backing.nonzero()[0].tolist() == [first[0]]
    pages.release(first[:1])
    assert not pages.backing.any()
    assert pages.available == 7


def test_released_memory_is_reused_at_once() -> None:
    """With a backup still to come when the request ends, and the same pages in the next one."""
    world = World(ROOMY, 0, order="reuse")
    assert world.admit(1, 40)
    for _ in range(6):
        world.decode([1], "new")
        pages = set(world.engine.pages[1].tolist())
        world.release(1, keep=False)
        assert world.admit(1, world.rng.randint(30, 40))
        assert set(world.engine.pages[1].tolist()) == pages
    assert world.found == []


def copied(engine: Coordinator) -> list[int]:
    """Of each layer, the first byte of the host row of position 9."""
    return engine.pools.host[:, 49, 0].tolist()


@pytest.mark.parametrize("copies", ["early", "late", "random"])
def test_copies_are_made_when_the_options_say(copies: Copies) -> None:
    """At once, when something waits, or one by one in between; what came from the host at
    admission is not copied back."""
    seen = set()
    _, engine = tiny(copies=copies)
    engine.pools.host[:, 40:] = 0
    engine.admit(1)
    table = np.arange(40, 54)[None]
    for value in range(1, 21):
        engine.preload(1, 9, np.array([40, 41, 42, 43, 44, 45, 48]))
        engine.unsaved[1] = False
        step = engine.begin(np.array([1]), np.array([9]), table)
        assert not engine.backups.pending
        pool, rows = step.targets(0)
        assert pool.data_ptr() == engine.pools.device[0].data_ptr()
        engine.pools.device[:, rows] = value
        step = engine.begin(np.array([1]), np.array([10]), table)
        seen.add(sum(byte == value for byte in copied(engine)))
        step.targets(0)
        assert copied(engine) == [value] * len(LEADERS)
    assert seen == {"early": {3}, "late": {0}, "random": {0, 1, 2, 3}}[copies]


def no_wait(original: Body, self: Any, layer: int) -> tuple[Tensor, Tensor]:
    with patch.object(self.backups, "wait"):
        return original(self, layer)


def unclamped(original: Body, self: Coordinator, slots: Ids, newest: Ids) -> Tensor:
    rows = self.slot_rows[torch.from_numpy(slots)]
    last = torch.from_numpy(newest) % rows.shape[1]
    return rows.gather(1, last[:, None])[:, 0]


def device_page_kept(original: Body, self: Coordinator, slot: int) -> None:
    free = self.device.release
    with patch.object(self.device, "release", lambda pages: free(pages[:-1])):
        original(self, slot)


def order_kept(original: Body, self: Coordinator, slot: int, *, resident: int) -> None:
    before = self.lru[:, slot].clone()
    original(self, slot, resident=resident)
    self.lru[:, slot] = before


COORDINATOR = "optimized.hisparse.coordinator"
ENGINE = f"{COORDINATOR}.Coordinator"
PAGES = "optimized.hisparse.pages.BackedPages"
LEFT = "the host row of position .* differs from the row that was written"
FAULTS: dict[str, tuple[str, Body, str]] = {
    "no wait": ("optimized.hisparse.step.HotStep.targets", no_wait, LEFT),
    "no backup": (f"{ENGINE}.back_up", lambda o, s, *rows: None, LEFT),
    "backup of slot n": (f"{ENGINE}.newest_rows", unclamped, LEFT),
    "release does not wait": (
        "optimized.hisparse.backups.BackupQueue.drain",
        lambda o, s: None,
        f"A free host row holds something|A host row of a cached prompt is wrong|{LEFT}",
    ),
    "newest at H - 1": (
        f"{COORDINATOR}.newest_slot",
        lambda o, newest, size: o(newest, size - 1),
        "The newest row of slot . is not that of slot 10",
    ),
    "preload one short": (
        f"{ENGINE}.preload",
        lambda o, s, slot, length, rows: o(s, slot, length, rows[: max(1, len(rows) - 1)]),
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
        "optimized.hisparse.step.HotStep.follow",
        lambda o, s, layer, plan: None,
        "should hold position .*; it holds ",
    ),
    "host rows of the next layer": (
        "optimized.hisparse.pools.HotPools.of_layer",
        lambda o, s, layer: (o(s, layer)[0], o(s, (layer + 1) % 3)[1]),
        "should hold position .*; it holds no position",
    ),
    "host page kept": (
        f"{PAGES}._return",
        lambda o, s, freed: Allocator._return(s, freed),
        "host row .* should be free or owned; it is leaked",
    ),
    "device page kept": (
        f"{ENGINE}.release",
        device_page_kept,
        "device row .* should be free or owned; it is leaked",
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
