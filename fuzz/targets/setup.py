"""The part of the tape that comes before the operations: geometry, pools and payload.

Each draw's 0 is the plainest choice, and the number of draws is always the same, so that
pinning one of them (`Pin`) or shrinking another leaves the operations where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Literal, TypeVar

import msgspec

from fuzz.tape import Tape
from reference.addressing import pages_for
from reference.contract import EngineOptions, HiSparse, HostTier, PageOrder, Sizes, Weights
from reference.geometry import PACKED_BLOCK, Geometry, ModelShape, RowFormat
from reference.occupancy import hot_rows
from reference.weights import random_weights

KPool = Literal[1, 2, 4]
PhysicalPageSize = Literal[4, 8, 16, 32, 64]
"""Every pooling ratio divides every page size, so any two may be pinned."""
Positive = Annotated[int, msgspec.Meta(ge=1, le=1000)]
NonNegative = Annotated[int, msgspec.Meta(ge=0, le=1000)]
T = TypeVar("T")
Payload = Literal["stamped", "model"]
PAGE_ORDERS: tuple[PageOrder, ...] = ("reuse", "high", "permuted")
CapacityRatio = Literal[1, 2, 4, 8]
Copies = Literal["late", "early", "random"]
COPIES: tuple[Copies, ...] = ("late", "early", "random")

STAMPED_SHAPE = ModelShape(
    layers=2,
    dsa_period=2,
    vocab=2,
    hidden=2,
    heads=1,
    latent=16,
    q_lora=2,
    index_heads=1,
    index_dim=16,
    kda_heads=1,
    kda_key_dim=2,
    kda_value_dim=4,
    conv_width=2,
)
TWO_BLOCKS = replace(STAMPED_SHAPE, latent=PACKED_BLOCK + STAMPED_SHAPE.latent)
"""Rows of two packed blocks, each with a scale of its own."""
MODEL_SHAPE = ModelShape(
    layers=4,
    dsa_period=2,
    vocab=61,
    hidden=32,
    heads=2,
    latent=16,
    q_lora=16,
    index_heads=2,
    index_dim=16,
    kda_heads=2,
    kda_key_dim=8,
    kda_value_dim=8,
    conv_width=4,
)
CLOSE = 4
"""Most tokens between two checkpoints that are close."""
SEVERAL_LAYERS = 4
"""Layers of a stamped run with HiSparse or a host tier, two of each kind: one may have what
another lacks."""
MODEL_ODDS = 64
"""One execution in so many computes a model; the others are stamped."""


class Pin(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Choices taken out of the tape's hands; None leaves them to it.

    Fields:
        max_tokens: longest prompt; operations: most operations of a run.
        hisparse: whether to use it; the next four are of no use without it.
        spare_slots: slots of a hot buffer beyond the fewest that the geometry allows.
        hot_buffers: requests for which there are device rows.
        capacity_ratio: host tokens for each device token, as nearly as pages allow.
        copies: when copies on the side stream are made.
    """

    payload: Payload | None = None
    kpool: KPool | None = None
    physical_page_size: PhysicalPageSize | None = None
    interval_pages: Annotated[int, msgspec.Meta(ge=1, le=8)] | None = None
    max_drafts: Annotated[int, msgspec.Meta(ge=0, le=16)] | None = None
    row_format: RowFormat | None = None
    round_scale: bool | None = None
    page_order: PageOrder | None = None
    seed: NonNegative | None = None
    pages: Positive | None = None
    max_requests: Positive | None = None
    spare_states: NonNegative | None = None
    max_tokens: Positive | None = None
    operations: Positive | None = None
    hisparse: bool | None = None
    spare_slots: NonNegative | None = None
    hot_buffers: Positive | None = None
    capacity_ratio: CapacityRatio | None = None
    copies: Copies | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """The pool sizes that a target draws from, both ends included; the tape's 0 is the larger,
    roomier end.  `pages` counts usable pages, `spare_states` the states beyond one a request.
    `tier`: of those targets that have a host tier, its pages and its states.  `hisparse` lists
    whether a run may be with it or without."""

    pages: tuple[int, int]
    spare_states: tuple[int, int]
    max_requests: tuple[int, int]
    tier: tuple[tuple[int, int], tuple[int, int]] | None = None
    hisparse: tuple[bool, ...] = (False,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What an engine is built from, and how long prompts may get."""

    geometry: Geometry
    shape: ModelShape
    options: EngineOptions
    payload: Payload
    max_tokens: int
    max_length: int

    def __str__(self) -> str:
        geometry, options = self.geometry, self.options
        scales = "rounded" if geometry.round_scale else "exact"
        text = (
            f"kpool {geometry.kpool}, physical page {geometry.physical_page_size}, "
            f"interval {geometry.mamba_track_interval}, drafts {geometry.max_drafts}, "
            f"{geometry.row_format.value} rows, {scales} scales; {options.pages} pages, "
            f"{options.state_slots} states, {options.max_requests} requests, "
            f"{options.page_order} order; {self.payload}"
        )
        if hisparse := options.hisparse:
            text += (
                f"; hot buffers of {geometry.device_buffer_size} slots, {hisparse.device_pages} "
                f"device pages, {hisparse.host_pages} host pages, {hisparse.copies} copies"
            )
        if tier := options.host_tier:
            text += f"; host tier of {tier.pages} pages and {tier.states} states"
        return text


def draw_setup(tape: Tape, ranges: Ranges, pin: Pin, sizes: Sequence[Sizes] = ()) -> Setup:
    """Read a setup off the tape, with one of `sizes` if there are any.  `options.ape` is still to
    be filled in."""
    with tape.span("setup"):
        setup = _draw_plain(tape, ranges, pin, sizes)
        # Only targets that may use them pay for these draws.
        if ranges.tier:
            setup = _with_tier(setup, tape, ranges.tier)
        if any(ranges.hisparse) and _pick(tape, pin.hisparse, ranges.hisparse):
            setup = _with_hisparse(setup, tape, pin)
    return setup


def _draw_plain(tape: Tape, ranges: Ranges, pin: Pin, sizes: Sequence[Sizes]) -> Setup:
    """A setup without HiSparse."""
    payload: Payload = _pick(tape, pin.payload, ("stamped", "model"), (MODEL_ODDS - 1, 1))
    kpool = _pick(tape, pin.kpool, (1, 2, 4), (1, 3, 3))
    physical = _pick(tape, pin.physical_page_size, (4, 8), (3, 1))
    interval = kpool * physical * _pick(tape, pin.interval_pages, (1, 2))
    # So many that one accept can cross two checkpoints, where they stand close.
    most = 2 * interval if interval <= CLOSE else 3
    odds = (1, 1, 1, 1 if most == 3 else 3)
    drafts = _pick(tape, pin.max_drafts, (0, 1, 2, most), odds)
    row_format = _pick(tape, pin.row_format, tuple(RowFormat), (2, 1, 1))
    round_scale = _pick(tape, pin.round_scale, (True, False), (3, 1))
    order = _pick(tape, pin.page_order, PAGE_ORDERS)
    seed = _pick(tape, pin.seed, range(256))
    max_requests = _between(tape, pin.max_requests, *ranges.max_requests)
    pages = _between(tape, pin.pages, *ranges.pages)
    states = max_requests + _between(tape, pin.spare_states, *ranges.spare_states)
    packed = row_format is RowFormat.FP8_PACKED
    two_blocks = _pick(tape, None, (False, True) if packed else (False,))
    geometry = Geometry(
        kpool=kpool,
        physical_page_size=physical,
        topk=8,
        mamba_track_interval=interval,
        max_drafts=drafts,
        round_scale=round_scale,
        row_format=row_format,
    )
    shape = MODEL_SHAPE
    if payload == "stamped":
        shape = TWO_BLOCKS if two_blocks else STAMPED_SHAPE
    if fits := fitting(sizes, pin):
        # what was drawn of them above counts for nothing
        built = fits[tape.draw(len(fits))]
        geometry, shape, interval = built.geometry, built.shape, built.geometry.mamba_track_interval
    longest = min(pages * geometry.logical_page_size, interval * 2 + geometry.logical_page_size)
    prompt = min(longest, pin.max_tokens or longest)
    return Setup(
        geometry=geometry,
        shape=shape,
        options=EngineOptions(
            pages=pages + 1,
            state_slots=states + 1,
            max_requests=max_requests,
            page_order=order,
            seed=seed,
        ),
        payload=payload,
        max_tokens=prompt,
        max_length=prompt + geometry.logical_page_size,
    )


def settled(pin: Pin, sizes: Sequence[Sizes]) -> Pin:
    """`pin`, and with it what is the same in all of `sizes`: that is as good as pinned."""
    same = {}
    for name in ("kpool", "physical_page_size"):
        values = {getattr(each.geometry, name) for each in sizes}
        if len(values) == 1:
            same[name] = values.pop()
    return msgspec.structs.replace(pin, **same)


def fitting(sizes: Sequence[Sizes], pin: Pin) -> list[Sizes]:
    """Those of `sizes` whose geometry is as pinned."""
    names = ("kpool", "physical_page_size", "row_format", "round_scale", "max_drafts")
    pinned = {name: value for name in names if (value := getattr(pin, name)) is not None}
    return [
        each
        for each in sizes
        if all(getattr(each.geometry, name) == value for name, value in pinned.items())
        and _slots_fit(each.geometry, pin)
    ]


def _slots_fit(geometry: Geometry, pin: Pin) -> bool:
    slots, spare = geometry.device_buffer_size, pin.spare_slots
    if slots is None:
        return True
    return pin.hisparse is not False and spare in (None, slots - least_slots(geometry))


def least_slots(geometry: Geometry) -> int:
    """Of a hot buffer: the fewest that the geometry allows."""
    return geometry.topk + max(0, geometry.kpool - 2)


def _with_tier(setup: Setup, tape: Tape, sizes: Sequence[tuple[int, int]]) -> Setup:
    """`setup` with a host tier; `sizes`: the ranges of its pages and its states."""
    pages, states = (_between(tape, None, *size) for size in sizes)
    return replace(
        setup,
        shape=replace(setup.shape, layers=SEVERAL_LAYERS),
        options=replace(setup.options, host_tier=HostTier(pages=pages, states=states)),
    )


def _with_hisparse(setup: Setup, tape: Tape, pin: Pin) -> Setup:
    """`setup` with hot buffers, for one request at least, a host pool that holds the longest
    prompt at least, and lengths that leave the buffer size far behind."""
    geometry, options = setup.geometry, setup.options
    spare = range(geometry.topk + 1)
    drawn = _pick(tape, pin.spare_slots, spare, (len(spare) // 2, *[1] * geometry.topk))
    slots = geometry.device_buffer_size or least_slots(geometry) + drawn
    buffers = _between(tape, pin.hot_buffers, 1, options.max_requests)
    ratio = _pick(tape, pin.capacity_ratio, (8, 4, 2, 1))
    copies = _pick(tape, pin.copies, COPIES)
    device_rows = buffers * hot_rows(slots, geometry.physical_page_size)
    prompt = setup.max_tokens
    if pin.max_tokens is None:
        prompt = max(prompt, min(2 * slots, (options.pages - 1) * geometry.logical_page_size))
    host_pages = max(pages_for(prompt, geometry), ratio * device_rows // geometry.logical_page_size)
    hisparse = HiSparse(
        device_pages=device_rows // geometry.physical_page_size + 1,
        host_pages=host_pages + 1,
        copies=copies,
    )
    stamped = setup.payload == "stamped"
    return replace(
        setup,
        geometry=replace(geometry, device_buffer_size=slots, max_drafts=0),
        shape=replace(setup.shape, layers=SEVERAL_LAYERS) if stamped else setup.shape,
        options=replace(options, hisparse=hisparse),
        max_tokens=prompt,
        max_length=max(prompt + geometry.logical_page_size, 3 * slots),
    )


def _pick(tape: Tape, pinned: T | None, choices: Sequence[T], weights: Sequence[float] = ()) -> T:
    """One of `choices`, the plainest first; a pinned one costs a draw all the same."""
    if pinned is not None:
        tape.draw(1)
        return pinned
    return choices[tape.choose(weights or [1.0] * len(choices))]


def _between(tape: Tape, pinned: int | None, low: int, high: int) -> int:
    return _pick(tape, pinned, range(high, low - 1, -1))


def outputs_from(options: EngineOptions, start: int, stop: int) -> int | None:
    """`Chunk.outputs_from` of a model run's chunk from `start` to `stop`.  Two runs in three want
    all outputs, since only those can be audited; the others vary them with the stop."""
    if options.seed % 3 < 2:
        return start
    return (None, start, (start + stop) // 2)[stop % 3]


@lru_cache(maxsize=16)
def model_weights(geometry: Geometry) -> Weights:
    """The random weights of all model runs under `geometry`."""
    return random_weights(MODEL_SHAPE, geometry, seed=1)


@lru_cache(maxsize=64)
def boundaries(geometry: Geometry, limit: int) -> tuple[int, ...]:
    """Lengths up to `limit` at, one before and one after the ends of groups, physical pages,
    logical pages and checkpoint intervals; the rarer the boundary, the likelier its draw."""
    units = (geometry.physical_page_size, geometry.logical_page_size, geometry.mamba_track_interval)
    found = [
        end + off
        for unit in units
        for end in range(unit, limit + 2, unit)
        for off in (-1, 0, 1)
        if 0 < end + off <= limit
    ]
    return tuple(found + list(range(geometry.kpool, limit + 1, geometry.kpool))[:4])
