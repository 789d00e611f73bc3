"""What makes two prompts two: keys of cached prefixes that leave a part of it out.

The contract has no field for an image, an adapter or a salt.  What decides a row besides the
tokens before it is folded into the token ids by the caller, as serving engines do with the digest
of an image, and the engine must keep apart what differs there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fuzz.bugs.registry import bug, scenario
from fuzz.bugs.scene import PAGE, TURNS, Handed, Scene, played
from fuzz.mutants.registry import Body
from fuzz.step import Violation
from reference.restore import Step as TierStep

Ints = npt.NDArray[np.int64]
Seen = Callable[[Ints], Ints]
"""What a faulty key sees of some tokens."""
TREE = "optimized.memory.prefix_tree.PrefixTree"
FIELD = 16
"""Bits of a token and of each field above it."""
ONE_FIELD = (1 << FIELD) - 1
IMAGE, SALT, ADAPTER = 0x1_0005, 7, 7


def prompt(*fields: int, tokens: Sequence[int] = range(1, 2 * PAGE)) -> list[int]:
    """A prompt of a page and most of another, whose tokens all carry these fields."""
    folded = sum(value << FIELD * place for place, value in enumerate(fields, start=1))
    return [token + folded for token in tokens]


def token_alone(tokens: Ints) -> Ints:
    """Without the fields."""
    return tokens & ONE_FIELD


def low_bits(tokens: Ints) -> Ints:
    """With the low 16 bits of an image's digest."""
    return tokens & (1 << 2 * FIELD) - 1


def untagged(tokens: Ints) -> Ints:
    """With the fields that are there, in a row, and without their names."""
    first, second = tokens >> FIELD & ONE_FIELD, tokens >> 2 * FIELD
    closed = np.where(first, first | second << FIELD, second)
    return token_alone(tokens) | closed << FIELD


def in_tree(seen: Seen) -> dict[str, Body]:
    """Stand-ins for a tree that compares what is `seen` of the tokens."""
    return {
        f"{TREE}._key": lambda original, self, tokens: original(self, seen(tokens)),
        f"{TREE}.common_length": lambda original, self, edge, tokens: original(
            self, seen(edge), seen(tokens)
        ),
    }


def in_tier(seen: Seen) -> dict[str, Body]:
    """Stand-ins for a host tier that looks pages up by what is `seen` of their tokens."""

    def key(spelled: bytes) -> bytes:
        return seen(np.frombuffer(spelled, dtype=np.int64)).tobytes()

    def descend(original: Body, self: Any, tokens: Ints) -> list[int]:
        known = {(before, key(spelled)): page for (before, spelled), page in self._next.items()}
        path: list[int] = []
        for spelled in self._keys(tokens):
            page = known.get((path[-1] if path else 0, key(spelled)))
            if page is None:
                break
            path.append(page)
        return path

    return {"optimized.memory.host_tier.HostTier._descend": descend}


def after_each_other(first: Sequence[int], second: Sequence[int]) -> Callable[[], None]:
    """The second prompt comes when the first has left its pages in the cache."""

    def scene() -> None:
        one = Scene()
        one.finish(one.prompt(first))
        one.finish(one.prompt(second))

    return scene


def by_way_of_the_host(first: Sequence[int], second: Sequence[int]) -> Callable[[], None]:
    """The first prompt is in the host tier alone, when the second looks there for its own."""

    def scene() -> None:
        one = Scene()
        client = one.prompt(first)
        one.move(TierStep.BACK_UP, client)
        one.finish(client)
        one.evict(1)
        other = one.submit(second)
        one.move(TierStep.RESTORE, other)
        one.extend(other)

    return scene


@scenario(faults=in_tree(token_alone), caught_by=("exact",))
def images_keep_prompts_apart() -> list[Violation]:
    """Two prompts of the same tokens show different images."""
    return played(after_each_other(prompt(IMAGE), prompt(IMAGE + 1)))


@scenario(faults=in_tier(low_bits), caught_by=("restore", "provenance"))
def images_with_equal_low_bits_keep_prompts_apart() -> list[Violation]:
    """Two images have digests that agree in their low 16 bits, and one of them is in the tier."""
    return played(by_way_of_the_host(prompt(IMAGE), prompt(IMAGE + (1 << FIELD))))


@scenario(faults=in_tier(token_alone), caught_by=("restore", "provenance"))
def salts_keep_prompts_apart_in_the_tier() -> list[Violation]:
    """A prompt is in the host tier under one salt, and another asks for it under another."""
    return played(by_way_of_the_host(prompt(0, SALT), prompt(0, SALT + 1)))


@scenario(faults=in_tree(untagged), caught_by=("exact",))
def an_adapter_is_no_salt() -> list[Violation]:
    """One prompt has an adapter, and another a salt that reads the same."""
    return played(after_each_other(prompt(ADAPTER), prompt(0, SALT)))


def _without_image(
    original: Body, self: Any, request: Any, room: int, tokens: Sequence[int]
) -> None:
    """The decode end is told the tokens alone."""
    original(self, request, room, token_alone(np.array(tokens)))


@scenario(
    faults={"optimized.transfer.decode_node.DecodeNode.submit": _without_image},
    caught_by=("provenance",),
)
def images_keep_prompts_apart_at_the_decode_end() -> list[Violation]:
    """Two prompts of the same tokens show different images.  Both are handed over, retracted for
    want of memory and taken up again."""

    def scene() -> None:
        with Handed() as both:
            tokens = range(1, both.page + 1)
            asked = [both.submit(prompt(image, tokens=tokens)) for image in (IMAGE, IMAGE + 1)]
            for _ in range(TURNS):
                both.turn()
            for again in [both.retract(each) for each in asked]:
                both.resume(*again)

    return played(scene)


bug(
    "LMCache#4086",
    "An image is known by 16 bits of its digest, and another with the same ones gets its rows.",
    by=("images_with_equal_low_bits_keep_prompts_apart",),
)
bug(
    "sglang#24758",
    "Two models that are served under one name share a store of prefixes.",
    missing="A host tier that several engines share, and a model's identity in its keys.",
)
bug(
    "sglang#26747",
    "Keys of a storage tier are made of the tokens alone, so that a salt that keeps prompts apart "
    "on the device does not there.",
    by=("salts_keep_prompts_apart_in_the_tier",),
)
bug(
    "smg#2365",
    "On its way to the decode end a request loses which image it shows, and its blocks there have "
    "the keys of any other's.",
    by=("images_keep_prompts_apart_at_the_decode_end",),
)
bug(
    "vllm#44701",
    "The name of an adapter and a salt stand untagged in one tuple, so that one reads as the "
    "other.",
    by=("an_adapter_is_no_salt",),
)
bug(
    "vllm#54342",
    "Keys of a connector are made of token ids alone, so that another image or adapter hits.",
    by=("images_keep_prompts_apart",),
)
