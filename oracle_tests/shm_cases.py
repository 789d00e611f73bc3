"""Two ends of a transfer over shared memory, small enough to look at every byte."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from optimized.transfer.hello import Instance
from optimized.transfer.shared_pool import SharedPool
from optimized.transfer.shm import ShmTransport
from optimized.transfer.shm_hello import Setup
from optimized.transfer.transport import Event, Received, Region, Transport, Write, WriteEnded
from oracle_tests.datagrams import Datagrams
from reference.geometry import Geometry
from reference.protocol import Completion, Landed, Peer, Side, TransferKey

GEOMETRY = Geometry(kpool=2, physical_page_size=4, topk=8, mamba_track_interval=8)
INSTANCE = Instance(2, Completion.NOTIFY, GEOMETRY)
OPTED_IN = Setup(opted_in=True)
P, D = Peer(Side.PREFILL, 1, 7), Peer(Side.DECODE, 1, 9)
KEY = TransferKey(3, 1, D.incarnation)

NAMES = ("kv.0", "kv.1", "index")
ITEM_BYTES = (96, 96, 40)
SOURCE_ITEMS, TARGET_ITEMS = (24, 24, 12), (32, 32, 16)
SHARED = (0, 1)
"""The regions that D has in its pool, side by side after a margin."""
MARGIN_BYTES = 128
CANARY = 0xC5
PATIENCE_S = 60.0


RUNS = ((0, 3, 10, 4), (0, 7, 2, 1), (1, 0, 31, 1), (2, 5, 1, 6))
"""Of both shared regions and the one that goes the other way."""


class End(NamedTuple):
    """One process's end.  `memory` is [items, item bytes] uint8 of each region."""

    transport: ShmTransport
    memory: list[Tensor]
    pool: SharedPool | None = None

    def close(self) -> None:
        """As an owner does: the transport, then whatever looks into the pool, and the pool."""
        self.transport.close()
        self.memory.clear()
        if self.pool is not None:
            self.pool.close()


def prefill(me: Peer = P, *, setup: Setup = OPTED_IN, device: str = "cpu") -> End:
    """An end of P; its items are stamped."""
    memory = [
        stamps(0, region, items, width).to(device)
        for region, (items, width) in enumerate(zip(SOURCE_ITEMS, ITEM_BYTES, strict=True))
    ]
    return _end(me, memory, setup)


def decode(me: Peer = D, *, setup: Setup = OPTED_IN, cuda: bool = False) -> End:
    """An end of D; every byte that is not a guard's is a canary."""
    sizes = list(zip(TARGET_ITEMS, ITEM_BYTES, strict=True))
    shared_bytes = [items * width for items, width in (sizes[region] for region in SHARED)]
    pool = SharedPool(sum(shared_bytes) + 2 * MARGIN_BYTES, cuda=cuda)
    pool.memory.fill_(CANARY)
    memory, offset = [], MARGIN_BYTES
    for region, (items, width) in enumerate(sizes):
        if region in SHARED:
            rows = pool.memory[offset : offset + items * width].view(items, width)
            offset += items * width
        else:
            rows = torch.full((items, width), CANARY, dtype=torch.uint8)
        memory.append(rows)
    return _end(me, memory, setup, pool)


def _end(me: Peer, memory: list[Tensor], setup: Setup, pool: SharedPool | None = None) -> End:
    regions = [Region(*pair) for pair in zip(NAMES, memory, strict=True)]
    rest = Datagrams(me, regions, INSTANCE)
    return End(ShmTransport(rest, regions, setup=setup, pool=pool), memory, pool)


@contextlib.contextmanager
def both_ends() -> Iterator[tuple[End, End]]:
    """P and D, not joined yet; afterwards both are closed and nothing is left of them."""
    gc.collect()
    before = footprint()
    source, target = prefill(), decode()
    with contextlib.ExitStack() as stack:
        stack.callback(target.close)
        stack.callback(source.close)
        yield source, target
    assert footprint() == before


def stamps(seed: int, region: int, items: int, width: int) -> Tensor:
    """Items that name themselves: no two are alike, and none looks like a canary's."""
    generator = np.random.default_rng([seed, region])
    return torch.from_numpy(generator.integers(0, CANARY, (items, width), dtype=np.uint8))


def join(source: End, target: End) -> None:
    """Make the two ends known to each other."""
    hellos = source.transport.hello(), target.transport.hello()
    target.transport.connect(hellos[0])
    source.transport.connect(hellos[1])


def write(
    *runs: tuple[int, int, int, int], key: TransferKey = KEY, to: Peer = D, piece: int = 0
) -> Write:
    """A piece with a note; runs of (region, first item here, first item there, items)."""
    return Write(
        key=key,
        to=to,
        piece=piece,
        runs=np.array(runs, dtype=np.int64).reshape(-1, 4),
        note=Landed(key, P, piece),
    )


def after(source: list[Tensor], target: list[Tensor], *writes: Write) -> list[Tensor]:
    """What `target` has to be once these writes, and nothing else, have landed."""
    expected = [memory.clone() for memory in target]
    for posted in writes:
        for region, here, there, items in posted.runs.tolist():
            expected[region][there : there + items] = source[region][here : here + items]
    return expected


def same(target: list[Tensor], expected: list[Tensor]) -> bool:
    """Whether every byte is as expected."""
    return all(torch.equal(*pair) for pair in zip(target, expected, strict=True))


def untouched(target: End) -> bool:
    """Whether D's memory, margins and guards included, is still as it was made."""
    assert target.pool is not None
    everything = [target.pool.memory, *target.memory]
    return target.pool.is_intact() and all(bool((m == CANARY).all()) for m in everything)


def poll_until(condition: Callable[[list[Event]], object], *transports: Transport) -> list[Event]:
    """Poll until the events so far satisfy the condition, and return them.

    Raises:
        TimeoutError: where they do not within PATIENCE_S.
    """
    events: list[Event] = []
    deadline = time.monotonic() + PATIENCE_S
    while not condition(events):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_S} s and saw {events}")
        for transport in transports:
            events.extend(transport.poll())
        os.sched_yield()
    return events


class Footprint(NamedTuple):
    """What a process holds that could leak."""

    descriptors: int
    mappings: int
    segments: int


def footprint() -> Footprint:
    """Of this process; segments with a name are everybody's, and there should be none."""
    gc.collect()  # what an earlier test has left to it is not what this one holds
    return Footprint(
        len(os.listdir("/proc/self/fd")),
        mappings(os.getpid()),
        sum("kvoracle" in name for name in os.listdir("/dev/shm")),
    )


def is_listening(name: str) -> bool:
    """Whether an abstract socket of that name is there."""
    return f"@{name}" in Path("/proc/net/unix").read_text()


def mappings(pid: int) -> int:
    """How often a process has the memfd of a pool mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:kvoracle")


def ended(events: list[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, WriteEnded)]


def received(events: list[Event]) -> list[Event]:
    return [event for event in events if isinstance(event, Received)]


def post_and_wait(source: End, target: End, posted: Write) -> list[Event]:
    """Post a write, and everything up to its end and its note."""
    source.transport.post(posted)
    return poll_until(lambda e: ended(e) and received(e), source.transport, target.transport)


def assert_falls_back(source: End, target: End) -> None:
    """Nothing came through shared memory, and everything comes the other way."""
    assert untouched(target)
    posted = write(*RUNS)
    expected = after(source.memory, target.memory, posted)
    post_and_wait(source, target, posted)
    assert same(target.memory, expected)
