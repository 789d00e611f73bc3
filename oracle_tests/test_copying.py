"""The copy experiment: stable on the faithful engine, lost with the fault."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from fuzz.mutants import find
from fuzz.verify import copying
from reference.contract import EngineOptions, HostTier
from reference.geometry import Geometry
from reference.model import forward
from reference.weights import retrieval_weights
from systems import load

GEOMETRY = Geometry(topk=copying.TOPK)


@pytest.fixture(scope="module")
def model():
    return retrieval_weights(GEOMETRY, 0, 8.0)


@pytest.fixture(scope="module")
def cases(model):
    return copying.cases(geometry=GEOMETRY, seed=0, vocab=model[0].vocab)


def run(model, cases, *, fault=None, meanwhile=copying.rival):
    shape, weights = model
    pages = 2 * len(cases) * copying.CONTEXT // 256
    tier = HostTier(pages=copying.CONTEXT // 256, states=1)
    with find(fault).applied() if fault else nullcontext():
        return copying.run_arm(
            load("optimized").factory,
            geometry=GEOMETRY,
            shape=shape,
            weights=weights,
            options=EngineOptions(pages=pages, state_slots=pages, max_requests=1, host_tier=tier),
            cases=cases,
            meanwhile=meanwhile,
        )


def test_faithful_engine_copies_as_before(model, cases):
    for copy in run(model, cases):
        assert -0.5 <= copy.before <= -0.1
        assert abs(copy.fall) < 0.05
        assert copy.reused > 0
        assert copy.reused % 256 == 0


def test_fault_makes_the_span_collapse(model, cases):
    for copy in run(model, cases, fault="page_table_41494"):
        assert -0.5 <= copy.before <= -0.1
        assert copy.fall >= 5
        assert copy.reused % 256 == 64, "the rival shares one physical page of the span's run"


def test_a_span_that_was_on_the_host_is_copied_as_before(model, cases):
    for copy in run(model, cases[:2], meanwhile=copying.round_trip):
        assert abs(copy.fall) < 0.05
        assert copy.reused == copying.CONTEXT


def test_a_restore_without_the_index_makes_the_span_collapse(model, cases):
    fault = "restore_without_index"
    for copy in run(model, cases[:2], fault=fault, meanwhile=copying.round_trip):
        assert -0.5 <= copy.before <= -0.1
        assert copy.fall >= 5
        assert copy.reused == copying.CONTEXT


def test_reference_gives_the_same_logprob(model, cases):
    shape, weights = model
    case = cases[0]
    tokens = np.concatenate([case.context, case.span]).tolist()
    logits = forward(weights, shape, GEOMETRY, tokens, outputs_from=copying.CONTEXT).logits
    logprob = logits.log_softmax(1)[range(copying.SPAN - 1), case.span[1:].tolist()].mean().item()
    [copy] = run(model, cases[:1])
    assert copy.before == pytest.approx(logprob, abs=1e-4)


def test_the_span_is_seen_through_the_index_alone(model, cases):
    """The context is longer than topk, and the span occurs in it once."""
    assert copying.CONTEXT > 8 * copying.TOPK
    for case in cases:
        start = int((case.context == case.span[0]).argmax())
        assert np.array_equal(case.context[start : start + copying.SPAN], case.span)
        assert np.isin(case.context, case.span).sum() == copying.SPAN
        assert np.array_equal(case.rival[:start], case.context[:start])
        assert case.rival[start] != case.context[start]
        assert start % GEOMETRY.kpool == 2, "mid-group"
