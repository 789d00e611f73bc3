"""Runs of whole transfers over the simulated network, and what must hold of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from optimized.transfer.simulated import Choose, Flight, Network, ordinary
from oracle_tests.tiny_engine import SHAPE, build
from oracle_tests.transfer_cases import PLAIN
from oracle_tests.transfer_world import Asked, World
from reference.contract import Chunk, RequestId, StepOutput, Weights
from reference.protocol import Moved, Phase
from reference.weights import random_weights

SHAPE4 = replace(SHAPE, kda_heads=4)
ONE_AT_A_TIME = 5
"""Pages of D, with padding, that hold one prompt of 39 or 48 positions and no second one."""


@lru_cache
def weights() -> Weights:
    return random_weights(SHAPE4, PLAIN, 5)


def prompt(request: int, length: int) -> list[int]:
    return [(7 * position + 5 * request) % 61 for position in range(length)]


@lru_cache
def alone(tokens: tuple[int, ...], steps: int) -> tuple[list[int], list[StepOutput]]:
    """What an engine that does everything itself samples and computes."""
    engine = build(geometry=PLAIN, shape=SHAPE4, weights=weights())
    engine.submit(RequestId(0), tokens)
    [output] = engine.extend([Chunk(request=RequestId(0), stop=len(tokens))])
    sampled, outputs = [int(output.logits[-1].argmax())], []
    for _ in range(steps):
        outputs += engine.decode([RequestId(0)], sampled[-1:])
        sampled.append(int(outputs[-1].logits[-1].argmax()))
    return sampled, outputs


def is_right(asked: Asked) -> bool:
    """Whether D has decoded, so far, what an engine alone does."""
    sampled, outputs = alone(tuple(asked.tokens), asked.steps)
    if asked.sampled != sampled[: len(asked.sampled)]:
        return False
    return all(
        torch.equal(mine.logits, theirs.logits) and torch.equal(mine.selected, theirs.selected)
        for mine, theirs in zip(asked.outputs, outputs, strict=False)
    )


def is_done(asked: Asked) -> bool:
    return len(asked.outputs) == asked.steps


@contextmanager
def simulated(
    choose: Choose = ordinary, *, message_faults: int = 0, write_faults: int = 0, **how: Any
) -> Iterator[World]:
    """A world over a network that is given a few steps each turn, as `choose` says."""
    network = Network(choose=choose, message_faults=message_faults, write_faults=write_faults)

    def advance() -> None:
        for _ in range(2 + choose(12)):
            network.step()

    world = World(network.attach, PLAIN, SHAPE4, weights(), advance=advance, **how)
    world.network = network
    network.observe = world.log.append
    try:
        yield world
    finally:
        world.close()


def must_be_clean(world: World) -> None:
    """The run is judged clean, and both ends are as empty as they can be."""
    assert world.is_over
    assert (found := world.verdict(arrivals=True)) is None, found
    for end in world.ends.values():
        for engine in end.instance.engines:
            snapshot = engine.inspect()
            assert not snapshot.holders
            cached = sum(len(node.pages) for node in snapshot.cached)
            assert cached == len(snapshot.ref_counts)


def flying(world: World) -> list[Flight]:
    """Writes of which bytes are still to land."""
    return [thing for thing in world.network.way if isinstance(thing, Flight) and thing.left]


def is_move(seen: object, phase: Phase) -> bool:
    return isinstance(seen, Moved) and seen.phase is phase
