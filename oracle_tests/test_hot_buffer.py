"""What the target `hot_buffer` draws: pools, and what layers are told to select."""

from __future__ import annotations

from collections import Counter

import pytest

import systems
from fuzz import targets
from fuzz.campaign import Plan, run
from fuzz.run import execute
from fuzz.tape import Tape
from fuzz.targets.session import WIDTH
from fuzz.targets.setup import Pin, draw_setup
from fuzz.targets.streams import FIRST, LATEST, LITTERED, SAME, STALE, STREAMS, Streams
from reference.addressing import pages_for, tail_start
from reference.contract import RequestId
from reference.geometry import Geometry
from reference.occupancy import hot_rows

REQUEST = RequestId(0)


def geometry_of(kpool: int) -> Geometry:
    return Geometry(kpool=kpool, physical_page_size=4, topk=8, mamba_track_interval=4 * kpool)


@pytest.mark.parametrize("kpool", [1, 2, 4])
@pytest.mark.parametrize("stream", range(len(STREAMS)))
def test_what_is_selected_fits_the_least_hot_buffer_and_has_the_tail(kpool, stream):
    geometry = geometry_of(kpool)
    streams = Streams(geometry, 2)
    for length in range(1, 60):
        closed = int(tail_start(length, geometry))
        cells = streams.select(REQUEST, length, 1000 * length, stream)
        assert cells.shape == (2, geometry.selection_width)
        for row in cells.tolist():
            valid = {cell for cell in row if 0 <= cell < length}
            assert len(valid - {length - 1}) <= geometry.topk + max(0, kpool - 2)
            assert valid >= set(range(closed, length))
            if stream != LITTERED:
                assert len(valid) == min(geometry.topk, closed) + length - closed


def test_streams_select_what_their_names_say():
    def cells(stream: int, *, chain: int = 7) -> list[int]:
        row: list[int] = streams.select(REQUEST, 40, chain, stream)[0].tolist()
        return row

    streams = Streams(geometry_of(1), 1)
    assert cells(LATEST) == list(range(32, 40))
    assert cells(SAME) == cells(LATEST)
    assert sum(cells(FIRST)) < sum(cells(LATEST))
    stale = cells(STALE)
    assert not set(stale) & set(range(32, 40))
    assert not set(cells(STALE)) & set(stale)
    littered = {cell for chain in range(50) for cell in cells(LITTERED, chain=chain)}
    assert littered >= {-1, -2, 39, 40, 1 << 32}
    rows = [cells(LITTERED, chain=chain) for chain in range(50)]
    assert any(len(set(row)) < len(row) for row in rows)


def test_selections_differ_by_layer_and_by_tokens_alone():
    def select(chain: int, stream: int) -> list[list[int]]:
        rows: list[list[int]] = (
            Streams(geometry_of(4), 2).select(REQUEST, 50, chain, stream).tolist()
        )
        return rows

    for stream in (FIRST, LITTERED):
        assert select(7, stream) == select(7, stream) != select(8, stream)
        assert select(7, stream)[0] != select(7, stream)[1]


def test_the_setup_covers_what_may_be_short():
    target, seen = targets.find("hot_buffer"), Counter()
    for seed in range(300):
        setup = draw_setup(Tape(seed=seed), target.ranges, Pin())
        geometry, options = setup.geometry, setup.options
        hisparse, size = options.hisparse, geometry.device_buffer_size
        assert hisparse is not None
        assert size is not None
        least, page = geometry.topk + max(0, geometry.kpool - 2), geometry.physical_page_size
        tokens = (hisparse.device_pages - 1) * page
        buffers, rest = divmod(tokens, hot_rows(size, page))
        assert rest == 0
        assert 1 <= buffers <= options.max_requests
        assert hisparse.host_pages > pages_for(setup.max_tokens, geometry)
        assert setup.max_length >= 3 * size
        seen.update(
            {
                ("copies", hisparse.copies): True,
                ("format", geometry.row_format): True,
                ("ratio", (hisparse.host_pages - 1) * geometry.logical_page_size // tokens): True,
                "at the bound": size == least,
                "twice topk": size >= 2 * geometry.topk,
                "one buffer for more requests": buffers == 1 < options.max_requests,
                "fewer host pages than logical": hisparse.host_pages < options.pages,
                "more host pages than logical": hisparse.host_pages > options.pages,
                "drafts": geometry.max_drafts > 0,
            }
        )
    assert not seen.pop("drafts")
    assert all(count >= 5 for what, count in seen.items() if isinstance(what, str))
    assert {value for what in seen if isinstance(what, tuple) for value in what[1:]} >= {
        "early", "late", "random", "bf16", "fp8_raw", "fp8_packed", 1, 2, 4, 8
    }  # fmt: skip


def test_every_operation_takes_the_same_room_on_the_tape():
    outcome = execute(systems.load("optimized"), targets.find("hot_buffer"), Tape(seed=2))
    spans = [span for span in outcome.spans if span.label == "operation"]
    assert len(spans) > 2
    assert {span.stop - span.start for span in spans[:-1]} == {WIDTH}


def test_model_runs_owe_no_events_that_only_stamped_ones_can_show():
    target = targets.find("hot_buffer")
    seen = dict.fromkeys(target.required - {"duplicate_selected", "hit"}, 1)
    assert target.missing(seen, Pin()) == ["duplicate_selected", "hit"]
    assert target.missing(seen, Pin(payload="model")) == ["hit"]


def test_a_system_without_hot_buffers_runs_without_and_says_so():
    summary = run(Plan(target="hot_buffer", system="reference", executions=5))
    assert not summary.failures
    assert "hisparse" in summary.skipped
    assert "swapped_in" in summary.missing
