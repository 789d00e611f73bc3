"""How many tokens a KV pool holds: the capacity model, fitted on one figure of each
published pair and tested on the other.

A logical token costs one KV row on the device, and `ratio` index rows, since HiSparse
keeps the index keys of all logical tokens there while only one KV row in `ratio` has a
device row:

    bytes per device token = dsa_layers * (row_bytes + index_bytes * ratio)
    device tokens          = floor(available / bytes per token / page) * page
    logical tokens         = ratio * device tokens

The available bytes of neither machine are published.  A reported figure pins them to an
interval one page wide, so the prediction is an interval too: its lower end is the
prediction, its upper end the rounding that the unpublished remainder could still give.

Source: SGLang #42178 (index pool in pooled units) and the HiSparse page that followed it.
"""

from __future__ import annotations

from dataclasses import dataclass

DSA_LAYERS = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLayout:
    """What one token costs, and the unit in which the pool is cut.

    Fields:
        row_bytes: one KV row (1024 in bf16, 512 in raw FP8).
        index_bytes: index bytes a logical token (132 unpooled, 132 / kpool pooled).
        page: tokens of the allocator's page.
        ratio: logical tokens a device token (HiSparse), else 1.
    """

    row_bytes: int
    index_bytes: int
    page: int
    ratio: int = 1

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of device tokens over all DSA layers."""
        return DSA_LAYERS * (self.row_bytes + self.index_bytes * self.ratio) * self.page

    def tokens(self, available: int) -> int:
        """Logical tokens that `available` bytes hold."""
        return available // self.page_bytes * self.page * self.ratio

    def available(self, tokens: int) -> range:
        """The byte counts that hold exactly `tokens` logical tokens.

        Raises:
            ValueError: when no byte count does, `tokens` being no whole number of pages.
        """
        pages, rest = divmod(tokens, self.page * self.ratio)
        if rest:
            raise ValueError(
                f"{tokens} tokens are no whole number of pages: pass a multiple of "
                f"{self.page * self.ratio}."
            )
        return range(pages * self.page_bytes, (pages + 1) * self.page_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One published pair: `fitted` gives the available bytes, `published` is predicted.

    Fields:
        fitted: tokens of the baseline, from which the available bytes are inferred.
        available: bytes that this fit leaves possible.
        predicted: tokens at the lower end of `available`.
        neighbour: tokens at its upper end.
        published: tokens as reported.
    """

    name: str
    fitted: int
    available: range
    predicted: int
    neighbour: int
    published: int

    @property
    def error(self) -> int:
        """Tokens by which the prediction misses the published figure."""
        return abs(self.predicted - self.published)


def predict(
    name: str, *, baseline: PoolLayout, changed: PoolLayout, fitted: int, published: int
) -> Prediction:
    """Fit the available bytes on `fitted` tokens of `baseline`; predict `changed`."""
    available = baseline.available(fitted)
    return Prediction(
        name=name,
        fitted=fitted,
        available=available,
        predicted=changed.tokens(available[0]),
        neighbour=changed.tokens(available[-1]),
        published=published,
    )


def predictions() -> tuple[Prediction, Prediction]:
    """The two published pairs: the pooled index (#42178), and HiSparse at ratio 2."""
    return (
        predict(
            "pooled index keys, bf16 rows",
            baseline=PoolLayout(row_bytes=1024, index_bytes=132, page=64),
            changed=PoolLayout(row_bytes=1024, index_bytes=33, page=256),
            fitted=3_531_072,
            published=3_861_760,
        ),
        predict(
            "HiSparse at ratio 2, raw FP8 rows",
            baseline=PoolLayout(row_bytes=512, index_bytes=33, page=256),
            changed=PoolLayout(row_bytes=512, index_bytes=33, page=256, ratio=2),
            fitted=4_707_584,
            published=8_877_824,
        ),
    )
