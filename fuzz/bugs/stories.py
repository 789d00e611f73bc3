"""Scenes of ends that come early, of lengths that are whole pages, and of peers that do not fit."""

from __future__ import annotations

import pkgutil
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from fuzz.bugs.registry import scenario
from fuzz.bugs.scene import OPTIONS, PAGE, Handed, Scene, played, require
from fuzz.mutants.registry import Body
from fuzz.step import Violation
from reference.contract import InvalidCall
from reference.geometry import Geometry
from reference.protocol import Completion, Peer, Phase, Side


def _remembering(original: Body, self: Any, request: Any) -> Any:
    """Find a request that has left by the pointer of when it was there."""
    seen = vars(self).setdefault("seen", {})
    try:
        seen[request] = original(self, request)
    except InvalidCall:
        if request not in seen:
            raise
    return seen[request]


@scenario(
    faults={"optimized.engine.OptimizedEngine._find": _remembering},
    caught_by=("exact", "provenance", "containment"),
)
def aborted_prompt_does_not_go_on() -> list[Violation]:
    """A prompt is aborted behind its first chunk, another takes its slot, and then its second
    chunk comes."""

    def scene() -> None:
        one = Scene(replace(OPTIONS, max_requests=1))
        first = one.submit(range(100, 100 + 2 * PAGE))
        one.extend(first, 3)
        one.abort(first)
        second = one.submit(range(200, 200 + 2 * PAGE))
        one.extend(second, 3)
        with suppress(InvalidCall):
            one.engine.extend([one.chunk(first, 3, 6)])
        one.nothing("the second chunk of an aborted prompt changes nothing")
        one.extend(second)

    return played(scene)


def _not_left(original: Body, self: Any, key: Any, phase: Phase) -> None:
    """A transfer that failed is over, and the engine keeps what was reserved for it."""
    coming = self._coming[key]
    if phase is Phase.FREE and coming.first_token < 0:
        coming.leave = lambda request: None
    original(self, key, phase)


@scenario(
    faults={"optimized.transfer.decode_node.DecodeNode._enter": _not_left},
    caught_by=("exact", "drain"),
)
def probe_after_a_burst_of_aborts() -> list[Violation]:
    """More requests are aborted on their way than memory has room for at once, and then one comes
    that must be served."""

    def scene() -> None:
        with Handed() as both:
            for burst in range(4):
                asked = both.submit(range(100 * burst + 1, 100 * burst + 1 + 2 * both.page))
                both.turn()
                both.abort(asked)
                for _ in range(4):
                    both.turn()
            probe = both.submit(range(1001, 1001 + 2 * both.page))
            both.rest()
            require(probe.was_live, "live", f"{probe.name} should have become live; it did not.")

    return played(scene)


def _last_checkpoint_alone(
    original: Body, self: Any, tokens: Any, pages: Any, checkpoints: Any
) -> Any:
    """Of the checkpoints that a prompt brings only the one at its end is kept."""
    last = dict(sorted(checkpoints.items())[-1:])
    insertion = original(self, tokens, pages, last)
    dropped = [slot for length, slot in checkpoints.items() if length not in last]
    return replace(insertion, surplus=[*insertion.surplus, *dropped])


@scenario(
    faults={"optimized.memory.prefix_tree.PrefixTree.insert": _last_checkpoint_alone},
    caught_by=("exact",),
)
def repeat_of_whole_pages_hits() -> list[Violation]:
    """A prompt that ends with a page comes again; since its last token has to be computed, the hit
    ends a page before, where a state must have been kept."""

    def scene() -> None:
        one = Scene()
        tokens = range(1, 1 + 3 * PAGE)
        one.finish(one.prompt(tokens))
        hit = one.submit(tokens).length
        require(hit == 2 * PAGE, "hit", f"The repeat should hit {2 * PAGE} tokens; it hit {hit}.")

    return played(scene)


def _any_width(original: Body, what: str, *sides: object) -> None:
    """The width of an item is each end's own affair."""
    if not what.startswith("item size"):
        original(what, *sides)


@scenario(faults={"optimized.transfer.hello._same": _any_width}, caught_by=("exact",))
def items_of_another_width_are_refused() -> list[Violation]:
    """The rows of one end are twice as wide as the other's."""
    hello = pkgutil.resolve_name("optimized.transfer.hello")
    transport = pkgutil.resolve_name("optimized.transfer.transport")

    def introduced(side: Side, width: int) -> Any:
        region = transport.Region("kv 0", torch.zeros(8, width, dtype=torch.uint8))
        instance = hello.Instance(1, Completion.STATUS, Geometry())
        return hello.introduce(Peer(side, 0, 0), instance, [region], reach={})

    def scene() -> None:
        with suppress(transport.Refused):
            hello.check(introduced(Side.DECODE, 64), introduced(Side.PREFILL, 32))
            require(False, "handshake", "Rows of 64 and of 32 bytes should not fit; they did.")

    return played(scene)
