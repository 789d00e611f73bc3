"""Options that no engine can be built with are refused, in one sentence with the cure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from oracle_tests.contract_cases import GEOMETRY, OPTIONS, PROMPT, SHAPE, A
from reference.contract import EngineOptions, HiSparse, HostTier, InvalidCall, OutOfMemory
from reference.geometry import Geometry, GeometryError
from systems import load

HISPARSE = HiSparse(device_pages=9, host_pages=9)
TIER = HostTier(pages=2, states=2)
LEAST: list[tuple[EngineOptions | HiSparse | HostTier, str, int]] = [
    (OPTIONS, "pages", 1),
    (OPTIONS, "state_slots", 1),
    (OPTIONS, "max_requests", 1),
    (OPTIONS, "seed", 0),
    (HISPARSE, "device_pages", 2),
    (HISPARSE, "host_pages", 2),
    (TIER, "pages", 0),
    (TIER, "states", 0),
]
APE = torch.zeros(len(SHAPE.dsa_layers), GEOMETRY.kpool, SHAPE.index_dim)


@pytest.mark.parametrize("bad", [-1, -99, 2.0, True, "8", None, np.int8(8)], ids=repr)
@pytest.mark.parametrize(("options", "name", "least"), LEAST)
def test_sizes_have_least_values(options: Any, name: str, least: int, bad: Any) -> None:
    for size in (bad, least - 1):
        with pytest.raises(InvalidCall, match=rf"^{name} is .* an int of at least {least}\.$"):
            replace(options, **{name: size})
    assert getattr(replace(options, **{name: least}), name) == least


def test_the_least_sizes_make_an_engine() -> None:
    """One that has room for nothing, and says so when asked."""
    least = replace(OPTIONS, pages=1, state_slots=1, max_requests=1)
    tier = HostTier(pages=0, states=0)
    engine = load("optimized").factory(GEOMETRY, SHAPE, replace(least, host_tier=tier))
    with pytest.raises(OutOfMemory, match=r"raise state_slots\.$"):
        engine.submit(A, PROMPT)
    assert engine.back_up(PROMPT) == engine.restore(PROMPT) == 0


@pytest.mark.parametrize("bad", ["newest", "", None, ["high"]])
def test_orders_are_named(bad: Any) -> None:
    with pytest.raises(InvalidCall, match=r"choose one of reuse, high, permuted\.$"):
        replace(OPTIONS, page_order=bad)
    with pytest.raises(InvalidCall, match=r"choose one of early, late, random\.$"):
        replace(HISPARSE, copies=bad)


@pytest.mark.parametrize("bad", ["cuda", None, 3])
def test_an_engine_names_its_backends_when_it_is_built(bad: Any) -> None:
    with pytest.raises(InvalidCall, match=r"choose one of torch, triton\.$"):
        load("optimized").factory(GEOMETRY, SHAPE, replace(OPTIONS, backend=bad))


@pytest.mark.parametrize("bad", [APE[:1], APE.double(), APE.to("meta"), APE.numpy(), 0])
def test_position_weights_fit_the_model(bad: Any) -> None:
    with pytest.raises(InvalidCall, match=r"^ape is .*: make it a dense float32 tensor"):
        load("optimized").factory(GEOMETRY, SHAPE, replace(OPTIONS, ape=bad))


@pytest.mark.parametrize("bad", [True, 2048.0, "2048", np.int64(2048)], ids=repr)
def test_a_hot_buffer_has_a_whole_number_of_rows(bad: Any) -> None:
    with pytest.raises(GeometryError, match=r"set it to an int, or to None without HiSparse\.$"):
        Geometry(topk=1024, device_buffer_size=bad)
