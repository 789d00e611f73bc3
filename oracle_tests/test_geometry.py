"""The start-up rules of a geometry: what each rejects, from which value on, and the cure named."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.geometry import Geometry, GeometryError, IndexSharding, ModelShape, RowFormat

TOKENS, SLOTS, NONE = IndexSharding.TOKENS, IndexSharding.SLOTS, IndexSharding.NONE
TINY: dict[str, Any] = {"kpool": 4, "physical_page_size": 8, "topk": 16, "mamba_track_interval": 64}
UNPOOLED: dict[str, Any] = {
    "kpool": 1,
    "physical_page_size": 8,
    "topk": 16,
    "mamba_track_interval": 8,
}


class Rejection(NamedTuple):
    """Fields that no engine may start with, what the sentence must say, and fields that follow
    the cure which it names."""

    fields: dict[str, Any]
    cause: str
    cure: str
    cured: dict[str, Any]


REJECTIONS = {
    "kpool-0": Rejection(TINY | {"kpool": 0}, "kpool is 0", "at least 1", TINY | {"kpool": 1}),
    "page-0": Rejection(
        TINY | {"physical_page_size": 0},
        "physical_page_size is 0",
        "at least 1",
        UNPOOLED | {"physical_page_size": 1},
    ),
    "topk-0": Rejection(UNPOOLED | {"topk": 0}, "topk is 0", "at least 1", UNPOOLED | {"topk": 1}),
    "interval-0": Rejection(
        UNPOOLED | {"mamba_track_interval": 0, "physical_page_size": 1},
        "mamba_track_interval is 0",
        "at least 1",
        UNPOOLED | {"mamba_track_interval": 1, "physical_page_size": 1},
    ),
    "dcp-0": Rejection(TINY | {"dcp_size": 0}, "dcp_size is 0", "at least 1", TINY),
    "drafts-negative": Rejection(
        TINY | {"max_drafts": -1}, "max_drafts is -1", "0 or more", TINY | {"max_drafts": 0}
    ),
    "dcp-pooled": Rejection(
        TINY | {"dcp_size": 2},
        "dcp_size 2 splits the 4 positions of a pooled key",
        "set dcp_size to 1 or kpool to 1",
        TINY | {"dcp_size": 1},
    ),
    "dcp-pooled-other-cure": Rejection(
        TINY | {"dcp_size": 2},
        "dcp_size 2",
        "set dcp_size to 1 or kpool to 1",
        TINY | {"dcp_size": 2, "kpool": 1},
    ),
    "page-not-whole-groups": Rejection(
        TINY | {"physical_page_size": 6},
        "physical_page_size 6 is no multiple of kpool 4",
        "choose a page size that kpool divides",
        TINY | {"physical_page_size": 4},
    ),
    "topk-not-whole-groups": Rejection(
        TINY | {"topk": 18},
        "topk 18 is no multiple of kpool 4",
        "choose a topk that kpool divides",
        TINY | {"topk": 20},
    ),
    "interval-off-the-page": Rejection(
        TINY | {"mamba_track_interval": 48},
        "mamba_track_interval 48 is no multiple of the logical page of 32 tokens",
        "set it to a multiple of 32",
        TINY | {"mamba_track_interval": 96},
    ),
    # the check must see the final page: 8 tokens would divide the interval, 32 do not
    "interval-of-the-page-before-pooling": Rejection(
        TINY | {"mamba_track_interval": 8},
        "mamba_track_interval 8 is no multiple of the logical page of 32 tokens",
        "set it to a multiple of 32",
        TINY | {"mamba_track_interval": 32},
    ),
    "index-sharded-in-tokens": Rejection(
        TINY | {"index_sharding": TOKENS},
        "sharded in token units holds one key for 4 tokens",
        "shard it in slots, or set kpool to 1",
        TINY | {"index_sharding": SLOTS},
    ),
    "buffer-of-exactly-topk": Rejection(
        TINY | {"device_buffer_size": 16},
        "device_buffer_size 16 leaves no row to evict",
        "at least 18",
        TINY | {"device_buffer_size": 18},
    ),
    "buffer-one-short": Rejection(
        TINY | {"device_buffer_size": 17},
        "device_buffer_size 17 leaves no row to evict",
        "at least 18",
        TINY | {"device_buffer_size": 18},
    ),
    "buffer-unpooled": Rejection(
        UNPOOLED | {"device_buffer_size": 15},
        "device_buffer_size 15 leaves no row to evict",
        "at least 16",
        UNPOOLED | {"device_buffer_size": 16},
    ),
}


@pytest.mark.parametrize("case", REJECTIONS.values(), ids=REJECTIONS)
def test_rejection_names_cause_and_cure_and_the_cure_works(case: Rejection) -> None:
    with pytest.raises(GeometryError) as caught:
        Geometry(**case.fields)
    sentence = str(caught.value)
    assert case.cause in sentence
    assert case.cure in sentence
    assert re.fullmatch(r"[^.]+\.", sentence), "the message is one full sentence"
    Geometry(**case.cured)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(TINY, id="tiny"),
        pytest.param({}, id="glm"),
        pytest.param(TINY | {"max_drafts": 0}, id="no-drafts"),
        pytest.param(TINY | {"topk": 4}, id="topk-one-group"),
        pytest.param(TINY | {"physical_page_size": 4, "mamba_track_interval": 16}, id="page=kpool"),
        pytest.param(TINY | {"kpool": 8}, id="page=kpool=8"),
        pytest.param({"kpool": 2, "device_buffer_size": 2048}, id="kpool-2-tail-is-the-newest"),
        pytest.param({"device_buffer_size": 2050}, id="glm-buffer"),
    ],
)
def test_the_last_legal_value_of_each_rule_is_accepted(fields: dict[str, Any]) -> None:
    assert Geometry(**fields) == Geometry(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"dcp_size": 8},
        {"index_sharding": TOKENS},
        {"topk": 17},
        {"physical_page_size": 7, "mamba_track_interval": 7},
        {"device_buffer_size": 16},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_kpool_1_is_bound_by_no_rule_of_pooling(fields: dict[str, Any]) -> None:
    """Each of these is refused with kpool 4 and legal without pooling."""
    unpooled = Geometry(**UNPOOLED | fields)
    with pytest.raises(GeometryError):
        Geometry(**UNPOOLED | {"mamba_track_interval": 32} | fields | {"kpool": 4})
    assert unpooled.logical_page_size == unpooled.physical_page_size


def is_legal(fields: dict[str, Any]) -> bool:
    """The rules of design section 1, each stated once more."""
    kpool, page, topk = fields["kpool"], fields["physical_page_size"], fields["topk"]
    interval, buffer = fields["mamba_track_interval"], fields["device_buffer_size"]
    if min(kpool, page, topk, interval, fields["dcp_size"]) < 1 or fields["max_drafts"] < 0:
        return False
    spare = 0 if buffer is None else buffer - topk
    pooled_is_legal = (
        fields["dcp_size"] == 1
        and fields["index_sharding"] is not TOKENS
        and page % kpool == topk % kpool == 0
        # a tail of kpool - 1, whose newest token has a row of its own
        and (buffer is None or spare >= kpool - 2)
    )
    return interval % (page * kpool) == 0 and spare >= 0 and (kpool == 1 or pooled_is_legal)


@settings(max_examples=400, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "kpool": st.sampled_from((0, 1, 1, 2, 3, 4, 8)),
            "physical_page_size": st.sampled_from((0, 1, 4, 6, 8, 24)),
            "topk": st.sampled_from((0, 1, 8, 24, 30)),
            "mamba_track_interval": st.sampled_from((0, 1, 8, 24, 96, 192, 384)),
            "max_drafts": st.integers(-1, 3),
            "dcp_size": st.sampled_from((0, 1, 1, 1, 2)),
            "index_sharding": st.sampled_from(IndexSharding),
            "device_buffer_size": st.none() | st.integers(0, 40),
        }
    )
)
def test_a_geometry_is_accepted_exactly_when_all_rules_hold(fields: dict[str, Any]) -> None:
    try:
        Geometry(**fields)
        accepted = True
    except GeometryError:
        accepted = False
    assert accepted == is_legal(fields)


def test_glm_sizes() -> None:
    geometry = Geometry(max_drafts=3)
    assert geometry.logical_page_size == 256
    assert geometry.index_page_size == 64
    assert geometry.index_page_bytes(128) == 64 * 132
    assert geometry.ring_size == 7
    assert (geometry.topk_groups, geometry.selection_width) == (512, 2051)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 128), st.integers(1, 4096), st.integers(0, 8), st.integers(1, 256))
def test_kpool_1_has_the_sizes_of_an_unpooled_cache(
    page: int, topk: int, drafts: int, dim: int
) -> None:
    geometry = Geometry(
        kpool=1,
        physical_page_size=page,
        topk=topk,
        mamba_track_interval=page,
        max_drafts=drafts,
    )
    assert geometry.logical_page_size == geometry.index_page_size == page
    assert geometry.topk_groups == geometry.selection_width == topk
    assert geometry.ring_size == 1 + drafts
    assert geometry.index_page_bytes(dim) == page * (dim + 4)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 200), st.integers(0, 200), st.sampled_from((1, 2, 3)))
def test_state_positions_are_the_checkpoints_and_the_end(start: int, more: int, every: int) -> None:
    geometry = Geometry(**TINY | {"mamba_track_interval": 32 * every})
    stop = start + more
    expected = [p for p in range(start + 1, stop + 1) if p % (32 * every) == 0 or p == stop]
    assert geometry.state_positions(start, stop) == tuple(expected)


def test_row_formats_store_glm_rows_in_their_published_bytes() -> None:
    """Row bytes at latent 512: bf16 1024, raw FP8 512, packed FP8 512 and four scales; a last
    block of fewer than 128 channels has a scale too."""
    assert [f.row_bytes(512) for f in RowFormat] == [1024, 512, 528]
    assert [RowFormat.FP8_PACKED.row_bytes(n) for n in (1, 128, 129)] == [5, 132, 137]


def test_geometry_and_shape_are_frozen_values() -> None:
    geometry, shape = Geometry(**TINY), ModelShape()
    assert {geometry, Geometry(**TINY)} == {geometry}
    assert Geometry(**TINY | {"topk": 8}) != geometry
    with pytest.raises(dataclasses.FrozenInstanceError):
        geometry.kpool = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        shape.layers = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        Geometry(4)  # type: ignore[call-arg]


def test_glm_shape_alternates_three_kda_layers_and_one_dsa_layer() -> None:
    shape = ModelShape()
    assert shape.dsa_layers == tuple(range(3, 45, 4))
    assert (len(shape.dsa_layers), len(shape.kda_layers)) == (11, 34)
    assert sorted(shape.dsa_layers + shape.kda_layers) == list(range(45))
    assert shape.conv_channels == 64 * 128 * 3
    assert shape.state_width == 64 * 128 * 128 + 3 * 64 * 128 * 3


@pytest.mark.parametrize(
    "name", [field.name for field in dataclasses.fields(ModelShape)], ids=lambda name: name
)
def test_every_size_of_a_shape_is_at_least_1(name: str) -> None:
    with pytest.raises(GeometryError, match=rf"^{name} is 0: set it to at least 1\.$"):
        ModelShape(**{name: 0})
    ModelShape(**{name: 1})


@pytest.mark.parametrize("dim", [3, 96, 127, 129])
def test_index_dim_must_be_a_power_of_two(dim: int) -> None:
    with pytest.raises(GeometryError, match=rf"index_dim {dim} is no power of two: choose one,"):
        ModelShape(index_dim=dim)
    ModelShape(index_dim=1 << dim.bit_length())
