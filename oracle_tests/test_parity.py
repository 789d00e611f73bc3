"""The parity experiment of `kvoracle verify`: it compares what it says, and sees a difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fuzz.targets.setup import MODEL_SHAPE
from fuzz.verify import parity
from reference.contract import EngineOptions, StepOutput, Weights
from reference.geometry import Geometry, ModelShape, RowFormat
from reference.weights import random_weights
from systems import load

WEIGHTS = random_weights(MODEL_SHAPE, parity.GEOMETRY, 0)
FACTORY = load("optimized").factory


@pytest.mark.parametrize("size", parity.SIZES)
@pytest.mark.parametrize("row_format", RowFormat)
def test_hisparse_changes_no_token_and_no_logprob(row_format: RowFormat, size: int) -> None:
    counts = parity.run_arm(
        FACTORY, weights=WEIGHTS, row_format=row_format, size=size, steps=40, seed=1
    )
    assert (counts.steps, counts.different, counts.first) == (40, 0, "")
    assert counts.missing >= 0.3
    assert counts.tokens >= counts.steps


class Nudged:
    """An engine with HiSparse whose logits are off by one bit in one decode."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._decodes = engine, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def decode(self, requests: Sequence[Any], tokens: Sequence[int]) -> list[StepOutput]:
        outputs: list[StepOutput] = self._engine.decode(requests, tokens)
        self._decodes += 1
        if self._decodes == 20:
            outputs[-1].logits.view(-1)[3] *= 1 + 2**-20
        return outputs


def test_one_bit_is_seen() -> None:
    def factory(
        geometry: Geometry,
        shape: ModelShape,
        options: EngineOptions,
        weights: Weights | None = None,
    ) -> Any:
        engine = FACTORY(geometry, shape, options, weights)
        return Nudged(engine) if options.hisparse else engine

    counts = parity.run_arm(
        factory, weights=WEIGHTS, row_format=RowFormat.BF16, size=18, steps=40, seed=1
    )
    assert counts.different == 1
    assert "differs" in counts.first
    assert counts.steps < 40
