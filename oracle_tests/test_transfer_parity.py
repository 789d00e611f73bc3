"""Requests that move over real transports decode on with the bits of an engine that does it all.

So they do over the simulated network (`test_transfer_node`), and the transports agree bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from torch import Tensor

from optimized.transfer import hello
from optimized.transfer.nixl import NixlTransport
from optimized.transfer.node import Node, Timers
from optimized.transfer.shared_pool import SharedPool
from optimized.transfer.shm import ShmTransport
from optimized.transfer.shm_hello import Setup
from optimized.transfer.transport import Region, Transport
from oracle_tests.test_transfer_node import (
    LENGTHS,
    PLAIN,
    SHAPE4,
    is_done,
    is_right,
    prompt,
    weights,
)
from oracle_tests.transfer_world import World
from reference.protocol import Completion, Peer, Side

SECONDS = Timers(retry_s=2.0, abort_timeout_s=10.0, transfer_timeout_s=60.0)


@contextmanager
def over(transport: str, *, ranks: int, completion: Completion, hisparse: bool) -> Iterator[World]:
    """A world whose processes, in one process of the system, are agents of NIXL; D's KV pools are
    shared memory into which P writes itself, or NIXL moves their rows as well."""
    instance = hello.Instance(ranks, completion, PLAIN)
    pools: dict[int, SharedPool] = {}

    def share(rank: int, size: int) -> Tensor | None:
        if transport == "nixl":
            return None
        pools[rank] = SharedPool(size)
        return pools[rank].memory

    def make(me: Peer, regions: Sequence[Region]) -> Transport:
        rest = NixlTransport(me, instance, regions)
        if transport == "nixl":
            return rest
        pool = pools[me.rank] if me.side is Side.DECODE else None
        return ShmTransport(rest, regions, setup=Setup(opted_in=True), pool=pool)

    world = World(
        make,
        PLAIN,
        SHAPE4,
        weights(),
        ranks=ranks,
        completion=completion,
        hisparse=hisparse,
        clock=time.monotonic,
        timers=SECONDS,
        share=share,
    )
    try:
        yield world
    finally:
        world.close()


@pytest.mark.parametrize("completion", Completion, ids=lambda style: style.name.lower())
@pytest.mark.parametrize("ranks", [1, 2, 4], ids=lambda ranks: f"{ranks} ranks")
@pytest.mark.parametrize("hisparse", [False, True], ids=["flat", "hisparse"])
@pytest.mark.parametrize("transport", ["nixl", "shm"])
def test_d_decodes_what_one_engine_would(
    transport: str, ranks: int, completion: Completion, hisparse: bool
) -> None:
    with over(transport, ranks=ranks, completion=completion, hisparse=hisparse) as world:
        asked = [world.ask(prompt(n, length)) for n, length in enumerate(LENGTHS)]
        world.run()
        assert all(map(is_done, asked))
        assert all(map(is_right, asked))
        assert world.is_over
        if transport == "shm":
            shared = [node.transport.why_not(peer) for node, peer in _pairs(world)]
            assert shared == [None] * ranks
        assert world.verdict(arrivals=False) is None


def _pairs(world: World) -> list[tuple[Node, Peer]]:
    """Each rank of P with the rank of D to which it writes."""
    readers = world.ends[Side.DECODE].nodes
    return [(node, readers[node.me.rank].me) for node in world.ends[Side.PREFILL].nodes]
