"""Which runs of items one rank of P copies to one rank of D, piece by piece.

Regions are those of `Handover.regions` in their order, and the aux rows behind them.  A request's
pages come in `chunks` pieces that may leave while the rest of its prompt is computed; tail and
state, which stand for the whole prompt, are one more.  What lies together at both ends is one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from optimized.transfer.transport import Refused
from reference.contract import Places
from reference.geometry import Geometry, ModelShape
from reference.protocol import TransferKey

Array = NDArray[np.int64]

KV, INDEX, TAIL = range(3)
REGIONS_PER_LAYER = 3
"""Regions of each DSA layer, in this order."""

AUX_TYPE = np.dtype("<i8")
AUX_BYTES = 5 * AUX_TYPE.itemsize
CLEARED = 0xFF
"""Every byte of an aux row that no transfer has written; it then names none that exists."""

LIMIT = 2**31
"""More than there are pages, cells, slots or positions of anything that is advertised."""

NONE = np.zeros((0, 3), dtype=np.int64)


def state_unit(shape: ModelShape) -> int:
    """float32 words of an item of the state: every part of a head's state is whole ones."""
    return gcd(shape.kda_key_dim, shape.kda_value_dim)


class Aux(NamedTuple):
    """What the aux row says: whose the parts are, of how many positions, and the first token
    that D is to decode."""

    key: TransferKey
    length: int
    first_token: int


def encode_aux(aux: Aux) -> NDArray[np.uint8]:
    """[AUX_BYTES] uint8.

    Raises:
        Refused: its key, which a peer chose, has no room in it.
    """
    try:
        row = np.array([*aux.key, aux.length, aux.first_token], dtype=AUX_TYPE)
    except OverflowError as error:
        raise Refused(f"{aux.key} is none: number rooms and lives below 2**63.") from error
    return row.view(np.uint8)


def decode_aux(row: NDArray[np.uint8]) -> Aux:
    """What [AUX_BYTES] uint8 say."""
    room, generation, incarnation, length, first_token = row.view(AUX_TYPE).tolist()
    return Aux(TransferKey(room, generation, incarnation), length, first_token)


def pack(places: Places) -> tuple[tuple[int, ...], ...]:
    """Places as they are advertised."""
    return places.kv, places.index, places.tail, (places.state, places.length)


def unpack(packed: Sequence[Sequence[int]]) -> Places:
    """Places as a peer advertised them.

    Raises:
        Refused: they cannot be those of any request.
    """
    known = len(packed) == 4 and len(packed[3]) == 2
    if not known or any(not 0 <= item < LIMIT for part in packed for item in part):
        raise Refused(
            "a peer advertised places that are not KV pages, index pages, tail cells, and a state "
            "slot with a length: run the same version at both ends."
        )
    kv, index, tail, (state, length) = packed
    return Places(kv=tuple(kv), index=tuple(index), tail=tuple(tail), state=state, length=length)


def writers_of(prefill: int, decode: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of P that write to each of `decode` ranks of D: those that share KDA heads with
    it, in order.

    Raises:
        Refused: neither number of ranks divides the other.
    """
    if max(prefill, decode) % min(prefill, decode):
        raise Refused(
            f"{prefill} ranks of P cannot write to {decode} ranks of D: start one of them with a "
            "number of ranks that divides the other's."
        )
    each = max(1, prefill // decode)
    firsts = [rank * prefill // decode for rank in range(decode)]
    return tuple(tuple(range(first, first + each)) for first in firsts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How requests move from one rank of P to one rank of D.

    Fields:
        geometry: of either end; rings may have other sizes, since places name cells.
        shape: the whole model's.
        here, there: the KDA heads that the rank of P and the rank of D have.
        writer: its place among the `writers` of that rank of D.
        chunks: pieces in which pages come.
    """

    geometry: Geometry
    shape: ModelShape
    here: range
    there: range
    writer: int = 0
    writers: int = 1
    chunks: int = 1

    @classmethod
    def between(
        cls,
        geometry: Geometry,
        shape: ModelShape,
        *,
        prefill: tuple[int, int],
        decode: tuple[int, int],
        chunks: int = 1,
    ) -> Plan:
        """The plan of one rank of P and one of D, each given as (rank, number of ranks); the
        former is one of the latter's `writers_of`, and both numbers divide kda_heads."""
        here, there = (
            range(rank * shape.kda_heads // ranks, (rank + 1) * shape.kda_heads // ranks)
            for rank, ranks in (prefill, decode)
        )
        writers = writers_of(prefill[1], decode[1])[decode[0]]
        return cls(
            geometry=geometry,
            shape=shape,
            here=here,
            there=there,
            writer=writers.index(prefill[0]),
            writers=len(writers),
            chunks=chunks,
        )

    @property
    def pieces(self) -> int:
        """Pieces of data; the aux row comes behind them."""
        return self.chunks + 1

    @property
    def aux_region(self) -> int:
        """Number of the region of aux rows."""
        return REGIONS_PER_LAYER * len(self.shape.dsa_layers) + 1

    def required(self, piece: int, length: int) -> int:
        """Positions of a prompt of `length` that P must have stored to send a piece of data."""
        if piece == self.chunks:
            return length
        _, stop = _share(0, self._pages(length), piece, self.chunks)
        return min(length, stop * self.geometry.logical_page_size)

    def runs(self, piece: int, here: Places, there: Places) -> Array:
        """[n, 4] int64, each (region, first item here, first item there, items), in no order that
        matters; n is 0 where the writer has no share in the piece.

        Args:
            here: places at P, of a prompt of which at least `required` positions are stored.
            there: places that D has reserved for the whole prompt.

        Raises:
            Refused: the places at D are not those of one request of this prompt.
        """
        self._check(piece, here, there)
        if piece == self.chunks:
            return np.concatenate([self._tail(here, there), self._state(here, there)])
        start, stop = _share(0, self._pages(there.length), piece, self.chunks)
        start, stop = _share(start, stop, self.writer, self.writers)
        size, length = self.geometry.logical_page_size, there.length
        kv = _pairs(here.kv[start:stop], there.kv[start:stop])
        kv[:, :2] *= size
        kv[:, 2] = np.minimum(length - np.arange(start, stop) * size, size)
        # the last page has no index rows yet where it has no closed group
        closed = self._pages(length // self.geometry.kpool * self.geometry.kpool)
        index = _pairs(
            here.index[start : min(stop, closed)], there.index[start : min(stop, closed)]
        )
        return np.concatenate([self._of_layers(KV, kv), self._of_layers(INDEX, index)])

    def _check(self, piece: int, here: Places, there: Places) -> None:
        length = there.length
        counts = len(there.kv), len(there.index), len(there.tail)
        pages = self._pages(length)
        wanted = pages, pages, length % self.geometry.kpool
        if counts != wanted:
            raise Refused(
                f"D advertised {counts} KV pages, index pages and tail cells for {length} "
                f"positions, which need {wanted}: run both ends with one geometry."
            )
        required = self.required(piece, length)
        if here.length < required or (piece == self.chunks and here.length != length):
            raise Refused(
                f"piece {piece} of {length} positions needs {required} at P, which has "
                f"{here.length}: reserve the prompt at D, and send a piece once P has computed it."
            )

    def _pages(self, length: int) -> int:
        return -(-length // self.geometry.logical_page_size)

    def _of_layers(self, part: int, runs: Array) -> Array:
        """[n, 4] the same runs in each DSA layer, those that lie together made one."""
        runs = _coalesced(runs)
        layers = len(self.shape.dsa_layers)
        regions = np.arange(layers, dtype=np.int64) * REGIONS_PER_LAYER + part
        return np.column_stack([np.repeat(regions, len(runs)), np.tile(runs, (layers, 1))])

    def _tail(self, here: Places, there: Places) -> Array:
        cells = _pairs(here.tail, there.tail) if self.writer == 0 else NONE
        return self._of_layers(TAIL, cells)

    def _state(self, here: Places, there: Places) -> Array:
        """Runs of the heads that both ends have."""
        shape, layers = self.shape, np.arange(len(self.shape.kda_layers), dtype=np.int64)
        unit = state_unit(shape)
        both = max(self.here.start, self.there.start), min(self.here.stop, self.there.stop)
        parts = []
        for heads, slot in ((self.here, here.state), (self.there, there.state)):
            first, items, width = _head_parts(shape, heads, both)
            rows = (slot * len(layers) + layers) * width
            parts.append((rows[:, None] + first).reshape(-1) // unit)
        sizes = np.tile(items, len(layers)) // unit
        runs = _coalesced(np.column_stack([*parts, sizes]))
        return np.insert(runs, 0, self.aux_region - 1, axis=1)


def _head_parts(shape: ModelShape, heads: range, some: tuple[int, int]) -> tuple[Array, Array, int]:
    """Where `some` of the `heads` of a rank are in its state of a layer: first word and number
    of words of each part, in order, and the words of the whole state.

    The parts are the matrices, and for each input of the convolution the channels of q, k and v.
    """
    key, value, steps = shape.kda_key_dim, shape.kda_value_dim, shape.conv_width - 1
    widths = np.array([key * value, *[key, key, value] * steps], dtype=np.int64)
    ends = np.cumsum(widths * len(heads))
    starts = ends - widths * len(heads)
    skipped, taken = some[0] - heads.start, some[1] - some[0]
    return starts + skipped * widths, taken * widths, int(ends[-1])


def _share(start: int, stop: int, part: int, parts: int) -> tuple[int, int]:
    """The `part`-th of `parts` contiguous shares of start .. stop - 1."""
    count = stop - start
    return start + part * count // parts, start + (part + 1) * count // parts


def _pairs(here: Sequence[int], there: Sequence[int]) -> Array:
    """[n, 3] runs of one item each."""
    columns = (here, there, np.ones(len(here)))
    return np.column_stack([np.asarray(column, dtype=np.int64) for column in columns])


def _coalesced(runs: Array) -> Array:
    """Runs that follow one another at both ends, made one."""
    follows = (runs[1:, :2] == runs[:-1, :2] + runs[:-1, 2:]).all(1)
    firsts = np.flatnonzero(np.concatenate([np.ones(min(len(runs), 1), dtype=bool), ~follows]))
    if not firsts.size:
        return runs
    merged = runs[firsts]
    merged[:, 2] = np.add.reduceat(runs[:, 2], firsts)
    return merged
