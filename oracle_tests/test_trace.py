"""The serving loop over a small generated trace, and its negative controls."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuzz.mutants import find
from fuzz.verify.mooncake import TraceRequest, generate_trace
from fuzz.verify.trace import PoolTooSmall, TraceRunner, check_fits
from reference.contract import OutOfMemory
from systems import load


@pytest.fixture(scope="module")
def trace():
    """80 requests of a generated trace, the long ones left out."""
    return [r for r in generate_trace(200, seed=0) if r.input_length <= 8000][:80]


def serve(trace, **options):
    return TraceRunner(load("optimized").factory, trace, **options).run()


def test_every_reused_row_is_the_right_one(trace):
    seen = []
    counts = serve(trace, pages=256, batch=16, progress=seen.append)
    assert counts.requests == len(trace) == seen[-1]
    assert counts.mismatches == 0, counts.first_mismatch
    assert counts.leaked == 0
    assert counts.hits > 20
    assert counts.evicted_pages > 200
    assert counts.reused_pages > 200
    assert set(counts.hit_remainders) == {0}
    assert counts.hit_tokens + counts.computed_tokens >= sum(r.input_length for r in trace)
    # an answer's last token is never fed back
    assert counts.output_tokens == sum(r.output_length - 1 for r in trace)
    stored = sum(r.input_length + r.output_length - 1 for r in trace)
    assert counts.rows_read["kv"] == counts.hit_tokens + stored


def test_retracted_requests_resume(trace):
    counts = serve(trace, pages=128, batch=16)
    assert counts.retractions > 10
    assert counts.requests == len(trace)
    assert counts.mismatches == 0, counts.first_mismatch
    assert counts.leaked == 0


def test_same_trace_same_counts(trace):
    first, second = (serve(trace[:30], pages=256, batch=8) for _ in range(2))
    for counts in (first, second):
        assert counts.wall_s > 0
        assert counts.cpu_s > 0
        counts.wall_s = counts.cpu_s = 0.0
    assert first == second


def test_fault_of_41494_is_seen_and_named(trace):
    with find("page_table_41494").applied():
        counts = serve(trace[:40], pages=512, batch=16)
    assert counts.mismatches > 0
    assert set(counts.hit_remainders) != {0}
    assert "index row" in counts.first_mismatch
    words = counts.first_mismatch.split(" should hold ")
    reader = counts.first_mismatch.split(" ", 2)[1]
    assert words[1].startswith(f"request {reader}'s group")
    intruder = words[1].split(", holds ")[1]
    assert intruder.startswith("request ")
    assert not intruder.startswith(f"request {reader}'s")


def request_of(tokens):
    """A request that stores so many tokens in all."""
    blocks = -(-(tokens - 4) // 512)
    return TraceRequest(
        timestamp=0, input_length=tokens - 4, output_length=5, hash_ids=(*range(blocks),)
    )


def test_a_request_beyond_the_pool_is_found_before_anything_runs():
    fits, beyond = request_of(7 * 256), request_of(7 * 256 + 1)
    check_fits([fits, fits], pages=8)
    cure = "line 2 needs room for 1,793 tokens, and the pool has 1,792: shorten the request"
    with pytest.raises(PoolTooSmall, match=cure):
        check_fits([fits, beyond], pages=8)
    with pytest.raises(PoolTooSmall, match=cure):
        TraceRunner(load("optimized").factory, [fits, beyond], pages=8)


def test_a_request_that_fills_the_pool_is_served():
    counts = serve([request_of(7 * 256)] * 3, pages=8)
    assert counts.requests == 3
    assert counts.mismatches == 0
    assert counts.leaked == 0


def test_an_engine_that_refuses_a_request_alone_is_at_fault():
    def leaky(geometry, shape, options, weights=None):
        return load("optimized").factory(geometry, shape, replace(options, pages=4), weights)

    with pytest.raises(OutOfMemory, match=r"runs alone .* look for pages or states that leak"):
        TraceRunner(leaky, [request_of(7 * 256)], pages=8).run()
