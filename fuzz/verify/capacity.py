"""How many tokens a KV pool holds: the capacity model, for `kvoracle capacity`, and fitted on
one figure of each published pair and tested on the other.

A logical token costs one KV row on the device, and `ratio` index rows, since HiSparse
keeps the index keys of all logical tokens there while only one KV row in `ratio` has a
device row:

    bytes per device token = dsa_layers * (row_bytes + index_bytes * ratio)
    device tokens          = floor(available / bytes per token / page) * page
    logical tokens         = ratio * device tokens

With HiSparse each logical token has its KV row on the host too, so that a host budget can hold
fewer: logical tokens <= floor(host bytes / (dsa_layers * row_bytes) / page) * page.  Padding
pages, KDA states and tail buffers are in neither budget.

The available bytes of neither machine are published.  A reported figure pins them to an
interval one page wide, so the prediction is an interval too: its lower end is the
prediction, its upper end the rounding that the unpublished remainder could still give.

Source: SGLang #42178 (index pool in pooled units) and the HiSparse page that followed it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from reference.geometry import Geometry, ModelShape

DSA_LAYERS = 11


class CapacityError(ValueError):
    """A pool that holds nothing; the message names the cure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLayout:
    """What one token costs, and the unit in which the pool is cut.

    Fields:
        row_bytes: one KV row (1024 in bf16, 512 in raw FP8).
        index_bytes: index bytes a logical token (132 unpooled, 132 / kpool pooled), which need
            not be a whole number; those of a page are.
        page: tokens of the allocator's page.
        ratio: logical tokens a device token (HiSparse), else 1.
        dsa_layers: layers that have a KV row and index keys.
    """

    row_bytes: int
    index_bytes: int | Fraction
    page: int
    ratio: int = 1
    dsa_layers: int = DSA_LAYERS

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of device tokens over all DSA layers."""
        page_bytes = self.dsa_layers * (self.row_bytes + self.index_bytes * self.ratio) * self.page
        assert page_bytes == int(page_bytes)
        return int(page_bytes)

    @property
    def host_page_bytes(self) -> int:
        """Bytes of one page of host rows over all DSA layers."""
        return self.dsa_layers * self.row_bytes * self.page

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


def pool_layout(geometry: Geometry, shape: ModelShape, *, ratio: int = 1) -> PoolLayout:
    """The pool of a pooled index with this geometry and shape.

    Raises:
        CapacityError: when no layer of the shape is a DSA layer.
    """
    if not shape.dsa_layers:
        raise CapacityError(
            f"{shape.layers} layers with dsa_period {shape.dsa_period} hold no DSA layer, and so "
            f"no KV rows: set layers to at least {shape.dsa_period}."
        )
    page = geometry.logical_page_size
    return PoolLayout(
        row_bytes=geometry.row_format.row_bytes(shape.latent),
        index_bytes=Fraction(geometry.index_page_bytes(shape.index_dim), page),
        page=page,
        ratio=ratio,
        dsa_layers=len(shape.dsa_layers),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the two budgets hold in one setting.

    Fields:
        ratio: logical tokens a device token; None without HiSparse.
        device_tokens: tokens that have a KV row on the device.
        indexed_tokens: tokens that have index keys there: as many as the device allows.
        logical_tokens: tokens that fit, the host budget regarded too.
        host_bytes_needed: host rows of all indexed tokens; 0 without HiSparse.
        gain: logical tokens over those without HiSparse, less 1.
        binds: the budget that limits logical_tokens.
    """

    ratio: int | None
    device_tokens: int
    indexed_tokens: int
    logical_tokens: int
    host_bytes_needed: int
    gain: float
    binds: Literal["device", "host"]


def capacities(
    geometry: Geometry,
    shape: ModelShape,
    *,
    device_budget: int,
    host_budget: int,
    ratios: Iterable[int],
) -> tuple[Capacity, ...]:
    """The engine without HiSparse, then with each of `ratios`, ascending.

    Args:
        device_budget: bytes for KV rows and index keys on the device.
        host_budget: bytes for KV rows on the host.

    Raises:
        CapacityError: when a budget holds not one page, or no layer is a DSA layer.
    """
    plain = pool_layout(geometry, shape)
    off = plain.tokens(_holding("device", device_budget, plain.page_bytes, "without HiSparse"))
    found = [
        Capacity(
            ratio=None,
            device_tokens=off,
            indexed_tokens=off,
            logical_tokens=off,
            host_bytes_needed=0,
            gain=0.0,
            binds="device",
        )
    ]
    for ratio in sorted(set(ratios)):
        pool = pool_layout(geometry, shape, ratio=ratio)
        setting = f"at ratio {ratio}"
        indexed = pool.tokens(_holding("device", device_budget, pool.page_bytes, setting))
        host_bytes = _holding("host", host_budget, pool.host_page_bytes, setting)
        backed = host_bytes // pool.host_page_bytes * pool.page
        logical = min(indexed, backed)
        found.append(
            Capacity(
                ratio=ratio,
                device_tokens=indexed // ratio,
                indexed_tokens=indexed,
                logical_tokens=logical,
                host_bytes_needed=indexed // pool.page * pool.host_page_bytes,
                gain=logical / off - 1,
                binds="host" if backed < indexed else "device",
            )
        )
    return tuple(found)


def _holding(memory: str, budget: int, page_bytes: int, setting: str) -> int:
    """`budget`, if it holds a page."""
    if budget < page_bytes:
        raise CapacityError(
            f"a {memory} budget of {budget:,} bytes holds not one page of {page_bytes:,} bytes "
            f"{setting}: raise it to at least {page_bytes} bytes."
        )
    return budget


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
