"""Requests that move over real transports decode on with the bits of an engine that does it all.

So they do over the simulated network (`test_transfer_node`), and the transports agree bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from optimized.transfer import hello
from optimized.transfer.nixl import NixlTransport
from optimized.transfer.node import Timers
from optimized.transfer.transport import Region
from oracle_tests.test_transfer_node import LENGTHS, PLAIN, SHAPE4, is_done, is_right, prompt, weights
from oracle_tests.transfer_world import World
from reference.protocol import Completion, Peer

SECONDS = Timers(retry_s=2.0, abort_timeout_s=10.0, transfer_timeout_s=60.0)


@contextmanager
def over_nixl(*, ranks: int, completion: Completion, hisparse: bool) -> Iterator[World]:
    """A world whose processes are agents of NIXL, in one process of the system."""
    instance = hello.Instance(ranks, completion, PLAIN)
    made: list[NixlTransport] = []

    def make(me: Peer, regions: Sequence[Region]) -> NixlTransport:
        made.append(NixlTransport(me, instance, regions))
        return made[-1]

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
    )
    try:
        yield world
    finally:
        world.close()


@pytest.mark.parametrize("completion", Completion, ids=lambda style: style.name.lower())
@pytest.mark.parametrize("ranks", [1, 2, 4], ids=lambda ranks: f"{ranks} ranks")
@pytest.mark.parametrize("hisparse", [False, True], ids=["flat", "hisparse"])
def test_d_decodes_what_one_engine_would_over_nixl(
    ranks: int, completion: Completion, hisparse: bool
) -> None:
    with over_nixl(ranks=ranks, completion=completion, hisparse=hisparse) as world:
        asked = [world.ask(prompt(n, length)) for n, length in enumerate(LENGTHS)]
        world.run()
        assert all(map(is_done, asked))
        assert all(map(is_right, asked))
        assert world.is_over
        assert world.verdict(arrivals=False) is None
