"""All stages against the clock, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from optimized.bench import attention, indexer, kda, storing, swap
from optimized.bench.stage import A, B, Stage
from optimized.bench.timing import timed
from reference.geometry import RowFormat

SEED = 1
Build = Callable[[torch.Generator], Stage]

STAGES: Mapping[str, Sequence[Build]] = {
    "store": [partial(storing.store_stage, point) for point in (A, B)],
    "index scores": [partial(indexer.scores_stage, point) for point in (A, B)],
    "scores and top-k": [partial(indexer.selection_stage, point) for point in (A, B)],
    "sparse MLA": [
        partial(attention.mla_stage, point, row_format)
        for row_format in (RowFormat.FP8_RAW, RowFormat.FP8_PACKED, RowFormat.BF16)
        for point in (A, B)
    ],
    "KDA decode": [partial(kda.decode_stage, point) for point in (A, B)],
    "KDA prefill": [
        partial(kda.prefill_stage, tokens, sequences, us)
        for tokens, sequences, us in ((16_384, 8, 234), (8_192, 1, 250))
    ],
    "swap-in": [
        *(partial(swap.swap_stage, batch, 204, us) for batch, us in ((1, 8), (16, 34), (48, 96))),
        *(partial(swap.swap_stage, batch, 0, 4) for batch in (1, 16, 48)),
    ],
}
MOST_ERROR = 0.05
"""Of a relative norm: FP8 rows are at 0.03."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured of a stage: as the stage's fields, and

    us, spread: as of `Timing`.
    peak_bytes: device memory while it ran, its inputs included.
    """

    name: str
    at: str
    us: float
    spread: float
    floor_us: float
    target_us: float
    bytes: int
    error: float
    peak_bytes: int


def measured(names: Sequence[str]) -> Iterator[Row]:
    """A row for each stage of these names, at each size."""
    for name in names:
        for build in STAGES[name]:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            stage = build(torch.Generator(device="cuda").manual_seed(SEED))
            error = stage.error()
            time = timed(stage.launches)
            yield Row(
                name=name,
                at=stage.at,
                us=time.us,
                spread=time.spread,
                floor_us=stage.floor_us,
                target_us=stage.target_us,
                bytes=stage.bytes,
                error=error,
                peak_bytes=torch.cuda.max_memory_allocated(),
            )
            del stage
