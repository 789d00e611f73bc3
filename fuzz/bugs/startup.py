"""What a server must refuse or work out before it starts, and what it counts afterwards."""

from __future__ import annotations

import pkgutil
from dataclasses import replace
from typing import Any

import systems
from fuzz.bugs.registry import bug, scenario
from fuzz.bugs.scene import played, require
from fuzz.mutants.registry import Body
from fuzz.step import Violation
from fuzz.targets.setup import STAMPED_SHAPE
from fuzz.verify import capacity
from fuzz.verify.capacity import PoolLayout
from reference.contract import Component, EngineOptions, HiSparse
from reference.geometry import Geometry, GeometryError, ModelShape

# rules


def _before_the_override(original: Body, self: Geometry) -> None:
    """The interval is held against the page as it was before pooling made it larger."""
    try:
        original(self)
    except GeometryError:
        if self.mamba_track_interval % self.physical_page_size:
            raise


@scenario(
    faults={"reference.geometry.Geometry.__post_init__": _before_the_override},
    caught_by=("exact",),
)
def interval_is_held_against_the_final_page() -> list[Violation]:
    """Intervals of one and of two physical pages, where a logical page is four of them."""

    def scene() -> None:
        for interval in (64, 128):
            try:
                geometry = Geometry(kpool=4, physical_page_size=64, mamba_track_interval=interval)
            except GeometryError:
                continue
            page = geometry.logical_page_size
            said = f"A checkpoint should stand at the end of a page of {page} tokens"
            require(False, "startup", f"{said}; with an interval of {interval} some stand inside.")

    return played(scene)


def _any_number(original: Body, prefill: int, decode: int) -> tuple[tuple[int, ...], ...]:
    """Ranks of P and of D in any numbers are taken to share heads as they do where one number
    divides the other."""
    each = max(1, prefill // decode)
    firsts = [rank * prefill // decode for rank in range(decode)]
    return tuple(tuple(range(first, first + each)) for first in firsts)


@scenario(faults={"optimized.transfer.plan.writers_of": _any_number}, caught_by=("exact",))
def heads_that_nobody_sends_are_refused() -> list[Violation]:
    """Two ranks of P have three heads each, and three of D two: the second needs some of both."""
    plan = pkgutil.resolve_name("optimized.transfer.plan")
    refused = pkgutil.resolve_name("optimized.transfer.transport").Refused
    shape = replace(STAMPED_SHAPE, kda_heads=6)

    def scene() -> None:
        try:
            writers = plan.writers_of(2, 3)
        except refused:
            return
        for rank, sending in enumerate(writers):
            plans = [
                plan.Plan.between(Geometry(), shape, prefill=(writer, 2), decode=(rank, 3))
                for writer in sending
            ]
            sent = {head for each in plans for head in each.here if head in each.there}
            lacking = sorted(set(plans[0].there) - sent)
            said = f"Rank {rank} of D should be sent all its heads; nobody sends {lacking}."
            require(not lacking, "startup", said)

    return played(scene)


# budgets

HOT = Geometry(
    kpool=4, physical_page_size=4, topk=8, mamba_track_interval=16, device_buffer_size=12
)
RATIOS = (1, 2, 4)
PAGES = 5
"""Logical pages of device rows in a scene of budgets."""


def _allocated(ratio: int) -> dict[str, int]:
    """Bytes that an engine has taken, less padding, for PAGES pages of device rows: for those and
    the index, and for the rows on the host."""
    options = EngineOptions(
        pages=ratio * PAGES + 1,
        state_slots=4,
        max_requests=1,
        hisparse=HiSparse(device_pages=HOT.kpool * PAGES + 1, host_pages=ratio * PAGES + 1),
    )
    engine = systems.load("optimized").factory(HOT, STAMPED_SHAPE, options)
    layers = range(len(STAMPED_SHAPE.dsa_layers))

    def taken(component: Component, padding: int) -> int:
        return sum(engine.raw(component, layer)[padding:].numel() for layer in layers)

    return {
        "device": taken(Component.HOT, HOT.physical_page_size) + taken(Component.INDEX, 1),
        "host": taken(Component.KV, HOT.logical_page_size),
    }


def _budgets_hold() -> None:
    """What is counted for a page is what an engine takes for it, at every ratio."""
    for ratio in RATIOS:
        layout = capacity.pool_layout(HOT, STAMPED_SHAPE, ratio=ratio)
        budget = {
            "device": PAGES * layout.page_bytes,
            "host": ratio * PAGES * layout.host_page_bytes,
        }
        for memory, taken in _allocated(ratio).items():
            said = f"At ratio {ratio} the {memory} should take the {budget[memory]} bytes budgeted"
            require(taken == budget[memory], "budget", f"{said}; it takes {taken}.")


def _index_of_device_tokens(
    original: Body, geometry: Geometry, shape: ModelShape, *, ratio: int = 1
) -> PoolLayout:
    """The index is counted for the tokens that have a device row, whatever the ratio."""
    layout: PoolLayout = original(geometry, shape, ratio=ratio)
    return replace(layout, index_bytes=layout.index_bytes / ratio)


@scenario(
    faults={"fuzz.verify.capacity.pool_layout": _index_of_device_tokens}, caught_by=("exact",)
)
def index_is_budgeted_at_every_ratio() -> list[Violation]:
    """The index has a key for every logical token, of which there are `ratio` a device row."""
    return played(_budgets_hold)


def _rows_alone(original: Body, *pool: Any, **ratio: int) -> PoolLayout:
    """A token is counted as its KV row."""
    layout: PoolLayout = original(*pool, **ratio)
    return replace(layout, index_bytes=0)


@scenario(faults={"fuzz.verify.capacity.pool_layout": _rows_alone}, caught_by=("exact",))
def index_is_budgeted_beside_the_rows() -> list[Violation]:
    """A token takes its KV row and its share of an index page."""
    return played(_budgets_hold)


bug(
    "TensorRT-LLM#17658",
    "Where memory cannot be pinned it is left pageable, and a kernel reads it all the same.",
    missing="A device that cannot read all memory of the host.",
)
bug(
    "sglang#25116",
    "A rule is checked before a later setting overrides what it is about: it refuses what is "
    "fine, and the flag that it advises takes three slots a request.",
    missing="Settings that override one another: a geometry has its final values alone.",
)
bug(
    "sglang#36409",
    "Heads that are split otherwise at the other end, and pipeline stages, are not refused: keys "
    "name tokens, and not which part of their rows it is.",
    by=("heads_that_nobody_sends_are_refused",),
)
bug(
    "sglang#42178r",
    "The interval of checkpoints is checked before pooling makes a page four times as large, so "
    "that one passes that no longer fits.",
    by=("interval_is_held_against_the_final_page",),
)
bug(
    "vllm#50427",
    "An offset is computed in 32 bits, which nothing forbids at the start for a large pool.",
    by=("loc_in_32_bits",),
)

# counts

bug(
    "sglang#10637",
    "Sizes are counted by a key's length where its pages' count; and a key that is cut to whole "
    "pages may be empty.",
    by=("part_of_page_inserted",),
)
bug(
    "sglang#23704",
    "Requests are admitted by their prompts alone, though each token decoded takes a host row.",
    by=("host_rows_not_counted",),
)
bug(
    "sglang#28753",
    "A prompt is refused that is longer than the device's pool, though the host's would hold it.",
    by=("capacity_of_device_pool",),
)
bug(
    "sglang#30601",
    "Layers with a window are given places for all of a prompt, and hold admission back.",
    missing="Layers with a sliding window, which need a tail of the prompt alone.",
)
bug(
    "sglang#40743",
    "The index is allocated for all logical tokens, and budgeted for those of the device.",
    by=("index_is_budgeted_at_every_ratio",),
)
bug(
    "sglang#42918",
    "Index pools on the host are not in its budget, and rows of a draft model have another shape.",
    missing="A budget of the host tier in bytes, which is given in pages; and a draft model.",
)
bug(
    "sglang-jax#1532",
    "The bytes of a token are counted without its index key.",
    by=("index_is_budgeted_beside_the_rows",),
)
bug(
    "vllm#52495",
    "A bound on what all requests have in flight together is reserved for each of them.",
    by=("room_for_everybody_wanted",),
)
