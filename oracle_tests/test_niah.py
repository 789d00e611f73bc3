"""The needle experiment at small size, with its faulty arm and its control."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from fuzz.mutants import find
from fuzz.verify import niah
from reference.contract import EngineOptions
from reference.geometry import Geometry
from reference.weights import retrieval_weights
from systems import load

LENGTH = 2048
GEOMETRY = Geometry(topk=128)


@pytest.fixture(scope="module")
def model():
    return retrieval_weights(GEOMETRY, 0, 8.0)


def run(model, *, order="random", shared=True, faulty=False):
    shape, weights = model
    samples = niah.samples(order=order, shared=shared, seed=0, length=LENGTH)
    pages = len(samples) * (LENGTH // 256 + 1) + 1
    with find("page_table_41494").applied() if faulty else nullcontext():
        return niah.run_arm(
            load("optimized").factory,
            geometry=GEOMETRY,
            shape=shape,
            weights=weights,
            options=EngineOptions(pages=pages, state_slots=pages + 1, max_requests=1),
            samples=samples,
        )


@pytest.mark.parametrize("order", ["random", "increasing"])
def test_faithful_engine_finds_every_needle(model, order):
    arm = run(model, order=order)
    assert arm.score == niah.SAMPLES
    assert all(hit % 256 == 0 for hit in arm.hits)
    assert all(hit == LENGTH for hit in arm.hits[niah.SAMPLES :]), (
        "every question hits its document"
    )


@pytest.mark.parametrize("order", ["random", "increasing"])
def test_fault_loses_needles(model, order):
    arm = run(model, order=order, faulty=True)
    assert arm.score <= 15
    assert any(hit % 256 for hit in arm.hits), "the fault shares in physical pages"


def test_fault_is_harmless_while_nothing_is_shared(model):
    arm = run(model, shared=False, faulty=True)
    assert arm.score == niah.SAMPLES
    assert not any(arm.hits[: niah.SAMPLES])


def test_reference_finds_what_the_engine_finds(model):
    shape, weights = model
    sample = niah.samples(order="random", shared=True, seed=0, length=LENGTH)[0]
    arm = niah.run_arm(
        load("reference").factory,
        geometry=GEOMETRY,
        shape=shape,
        weights=weights,
        options=EngineOptions(pages=64, state_slots=64, max_requests=1),
        samples=[sample],
    )
    assert arm.found == (True,)


def test_samples_are_what_the_experiment_says():
    samples = niah.samples(order="increasing", shared=True, seed=7)
    depths = [sample.needle.depth for sample in samples]
    assert depths == sorted(depths)
    assert len(set(depths)) == niah.DEPTHS
    assert all(depth % niah.PHYSICAL_PAGE for depth in depths)
    again = niah.samples(order="random", shared=True, seed=7)
    assert sorted(s.needle.depth for s in again) == depths
    assert [s.needle.depth for s in again] != depths
    for sample in samples:
        assert len(sample.document) == niah.LENGTH
        # the key occurs once, and nothing but the needle tells the documents apart
        assert (sample.document == sample.needle.key).sum() == 1
        differs = np.flatnonzero(sample.document != samples[0].document)
        places = {sample.needle.depth, samples[0].needle.depth}
        assert set(differs) <= {p + i for p in places for i in (0, 1)}
