"""The capacity model against the published token counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.verify.capacity import PoolLayout, predictions

POOLED = PoolLayout(row_bytes=1024, index_bytes=33, page=256)


def test_predicts_both_published_figures():
    pooled, hisparse = predictions()
    assert pooled.predicted == pooled.neighbour == pooled.published == 3_861_760
    # 8,877,824 is no multiple of ratio * page: the model can only give its two neighbours.
    assert (hisparse.predicted, hisparse.neighbour) == (8_877_568, 8_878_080)
    assert hisparse.error == 256


def test_unpooled_index_would_miss():
    """Negative control: the page change alone does not explain the gain."""
    unpooled = PoolLayout(row_bytes=1024, index_bytes=132, page=256)
    pooled = predictions()[0]
    assert abs(unpooled.tokens(pooled.available[0]) - pooled.published) > 300_000


@given(
    st.integers(1, 10**6),
    st.sampled_from([(1024, 33, 256, 1), (512, 33, 256, 2), (1024, 132, 64, 1)]),
)
def test_available_inverts_tokens(pages, layout):
    row, index, page, ratio = layout
    pool = PoolLayout(row_bytes=row, index_bytes=index, page=page, ratio=ratio)
    tokens = pages * page * ratio
    fits = pool.available(tokens)
    assert pool.tokens(fits[0]) == pool.tokens(fits[-1]) == tokens
    assert pool.tokens(fits[0] - 1) < tokens < pool.tokens(fits[-1] + 1)


def test_names_the_cure():
    with pytest.raises(ValueError, match="pass a multiple of 256"):
        POOLED.available(1000)
