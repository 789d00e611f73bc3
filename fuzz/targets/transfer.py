"""Requests that P prefills move to D, piece by piece, while memory is used again on both ends.

Real engines and nodes over a simulated network, stamped rows, and ends that differ in all that
they may: tail rings, page orders, ranks, hot buffers.  The tape draws the setup, and then whose
turn it is: a request, a chunk of a prompt, some steps of the network, a tick of P or D, a decoded
token, an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fuzz.tape import Tape
from fuzz.targets import Target
from fuzz.targets.setup import PAGE_ORDERS, STAMPED_SHAPE
from reference.addressing import pages_for
from reference.contract import EngineOptions, HiSparse
from reference.geometry import Geometry, RowFormat
from reference.occupancy import hot_rows
from reference.protocol import Completion, Side
from systems.wiring import Wiring

if TYPE_CHECKING:
    from fuzz.targets.shared_memory import SharedSetup

SHAPE = replace(STAMPED_SHAPE, layers=4, kda_heads=2, conv_width=3)
"""Two layers of each kind, and heads that two ranks share out."""
RANKS = ((1, 1), (2, 2), (1, 2), (2, 1))
"""Of P and of D."""
RETRY, ABORT_TIMEOUT, TRANSFER_TIMEOUT = 6, 10, 4000
"""In ticks of the clock, of which a run has a few hundred at most."""
P_PAGES, P_STATES = 26, 24
MOST_REQUESTS = 5

WEIGHTS = {
    "submit": 4,
    "compute": 3,
    "network": 9,
    "tick": 9,
    "decode": 2,
    "finish": 1.5,
    "abort": 1,
    "restart": 0.4,
}

TRANSFER = Target(
    name="transfer",
    weights=WEIGHTS,
    required=frozenset(
        {
            "aborted_with_write_in_flight",
            "aux_row_reused",
            "checkpoint_live",
            "chunk_sent_before_prompt_complete",
            "decoded_beside_landing",
            "fan_in_live",
            "fan_out_live",
            "hisparse_live",
            "landed_out_of_order",
            "live",
            "page_reused",
            "page_reused_after_drain",
            "prefix_hit_sent",
            "restarted",
            "room_reused",
            "tail_wraps_at_one_end",
            "twin_live",
            "two_ranks_live",
            "waited_for_memory",
        }
    ),
    operations=60,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSetup:
    """What a run is built from.

    Fields:
        max_tokens: longest prompt; max_length: with what is decoded.
        parts: in how many parts a write lands.
        message_faults, write_faults: how many messages may be lost or doubled, and writes end
            without their writer knowing how.
        shared: what is shared between the ends; None for what goes over the network alone.
    """

    wiring: Wiring
    max_tokens: int
    max_length: int
    parts: int
    message_faults: int
    write_faults: int
    shared: SharedSetup | None = None

    def __str__(self) -> str:
        wiring = self.wiring
        here, there = (wiring.geometries[side] for side in Side)
        options = wiring.options[Side.DECODE]
        orders = " to ".join(wiring.options[side].page_order for side in Side)
        text = (
            f"kpool {here.kpool}, physical page {here.physical_page_size}, interval "
            f"{here.mamba_track_interval}, {here.row_format.value} rows, rings of {here.ring_size} "
            f"and {there.ring_size}; {wiring.ranks[Side.PREFILL]} ranks to "
            f"{wiring.ranks[Side.DECODE]}, pages in {wiring.chunks} pieces, "
            f"{wiring.completion.name.lower()} completion; D has {options.pages} pages, "
            f"{options.state_slots} states, {options.max_requests} requests, {orders} order; "
            f"writes in {self.parts} parts, {self.message_faults} messages and "
            f"{self.write_faults} writes may fail"
        )
        if hisparse := options.hisparse:
            text += f"; hot buffers at D, {hisparse.host_pages} host pages"
        return f"{text}; {self.shared}" if self.shared else text


def draw_setup(tape: Tape, *, ranks: Sequence[tuple[int, int]] = RANKS) -> TransferSetup:
    """Read a setup off the tape: always as many draws, 0 the plainest; the first, the payload, is
    stamped.  `ranks` are those of P and D to choose from."""
    with tape.span("setup"):
        tape.draw(1)
        geometries = _draw_geometries(tape)
        counts = ranks[tape.choose((6, 2, 1, 1)[: len(ranks)])]
        chunks = 1 + tape.draw(3)
        completion = (Completion.STATUS, Completion.NOTIFY)[tape.draw(2)]
        options, max_tokens = _draw_options(tape, geometries[Side.DECODE])
        hot = tape.choose((3, 1))
        if hot:
            geometries, options = _with_hot_buffers(geometries, options, max_tokens)
        parts = 1 + tape.draw(3, favour=(1, 2))
        message_faults = tape.choose((3, 1, 1))
        write_faults = tape.choose((7, 1))
    return TransferSetup(
        wiring=Wiring(
            geometries=geometries,
            options=options,
            ranks=dict(zip(Side, counts, strict=True)),
            shape=SHAPE,
            chunks=chunks,
            completion=completion,
            quarantine_limit=2,
            retry=RETRY,
            abort_timeout=ABORT_TIMEOUT,
            transfer_timeout=TRANSFER_TIMEOUT,
        ),
        max_tokens=max_tokens,
        max_length=max_tokens + geometries[Side.DECODE].kpool + 2,
        parts=parts,
        message_faults=message_faults,
        write_faults=write_faults,
    )


def _draw_geometries(tape: Tape) -> dict[Side, Geometry]:
    """Alike but for the drafts, which widen the rings."""
    kpool = (1, 2, 4)[tape.choose((1, 3, 3))]
    physical = (4, 8)[tape.choose((3, 1))]
    interval = kpool * physical * (1, 2)[tape.draw(2)]
    row_format = tuple(RowFormat)[tape.choose((2, 1, 1))]
    round_scale = (True, False)[tape.choose((3, 1))]
    drafts = {side: tape.draw(4) for side in Side}
    return {
        side: Geometry(
            kpool=kpool,
            physical_page_size=physical,
            topk=8,
            mamba_track_interval=interval,
            max_drafts=drafts[side],
            round_scale=round_scale,
            row_format=row_format,
        )
        for side in Side
    }


def _draw_options(tape: Tape, geometry: Geometry) -> tuple[dict[Side, EngineOptions], int]:
    """P with room for all, D with room for the longest prompt and little more, which follows."""
    orders = {side: PAGE_ORDERS[tape.draw(len(PAGE_ORDERS))] for side in Side}
    seed = tape.draw(256)
    requests, spare_pages, spare_states = (tape.draw(n) for n in (3, 6, 4))
    size = geometry.logical_page_size
    longest = min(3 * size, size + 2 * geometry.mamba_track_interval)
    pages = pages_for(longest, geometry) + 6 - spare_pages
    options = {
        Side.PREFILL: EngineOptions(
            pages=P_PAGES,
            state_slots=P_STATES,
            max_requests=MOST_REQUESTS,
            page_order=orders[Side.PREFILL],
            seed=seed,
        ),
        Side.DECODE: EngineOptions(
            pages=pages + 1,
            state_slots=8 - spare_states,
            max_requests=3 - requests,
            page_order=orders[Side.DECODE],
            seed=seed + 1,
        ),
    }
    return options, longest


def _with_hot_buffers(
    geometries: dict[Side, Geometry], options: dict[Side, EngineOptions], longest: int
) -> tuple[dict[Side, Geometry], dict[Side, EngineOptions]]:
    """D with a hot buffer for each request, and a host pool of its own size."""
    geometry, option = geometries[Side.DECODE], options[Side.DECODE]
    least = geometry.topk + max(0, geometry.kpool - 2)
    page = geometry.physical_page_size
    hisparse = HiSparse(
        device_pages=option.max_requests * hot_rows(least, page) // page + 1,
        host_pages=option.pages + 2,
    )
    hot = replace(geometry, device_buffer_size=least, max_drafts=0)
    return (
        {**geometries, Side.DECODE: hot},
        {**options, Side.DECODE: replace(option, hisparse=hisparse)},
    )
