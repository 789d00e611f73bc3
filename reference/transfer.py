"""What moves with a request from a prefill instance (P) to a decode instance (D), and where to.

All that a decode may read moves, and nothing else: the KV rows of every position (into the host
pool where the end has HiSparse), the index pages of the closed groups, the keys and gates of the
tail, and the KDA state.  Pages, request slots and state slots have other numbers at either end.
So have the cells of the tail: a position waits in cell `position % ring_size`, and D, which may
draft where P does not, may have the larger rings.  Index pages move in units of pages, not of
tokens (SGLang #42178); the rest specifies prefill-decode disaggregation as in SGLang 0.5.22 and
0.5.23, whose aux row is the last to come and names the room.

*Pieces.*  A writer sends the pages of a request in `chunks` pieces, 0 .. chunks - 1, each a range
of logical pages, so that one can leave while the prompt behind it is still computed.  Piece
`chunks` is what only the whole prompt has: tail and state.  The aux row is the piece after it.

*Writers.*  Every rank has all KV rows and index keys, and the KDA states of its own heads.  Where
several ranks of P write to one of D they share the pages out, each sends the heads that it has,
and the first sends the tail and the aux row.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from reference.addressing import pages_for, ring_row_of, tail_start
from reference.contract import Component, InvalidCall, Places, RequestId, Snapshot
from reference.geometry import Geometry, ModelShape, Position
from reference.protocol import Topology, TransferKey

AUX_BYTES = 40


class Cell(NamedTuple):
    """A unit of memory of one end.  `layer` counts within the DSA or KDA layers; `item` is a row
    of the KV pool, an index page, a cell of all tail rings, or a float32 word of all states."""

    component: Component
    layer: int
    item: int


class Move(NamedTuple):
    """That a cell of P is copied to a cell of D, with which piece."""

    piece: int
    source: Cell
    target: Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One rank at one end: where it has the request, and which KDA heads it has."""

    places: Places
    heads: range


def places_of(snapshot: Snapshot, request: RequestId, length: int, geometry: Geometry) -> Places:
    """Where an engine must say that the first `length` positions of a request are."""
    view = snapshot.holders[request]
    assert view.slot is not None, "it has stored positions"
    assert view.state_slot is not None, "it has stored positions"
    pages = view.pages[: pages_for(length, geometry)]
    first = view.slot * geometry.ring_size
    return Places(
        kv=tuple(snapshot.hot.backing[page] for page in pages) if snapshot.hot else pages,
        index=pages,
        tail=tuple(
            first + ring_row_of(Position(position), geometry)
            for position in range(tail_start(length, geometry), length)
        ),
        state=view.state_slot,
        length=length,
    )


def writers_of(prefill: int, decode: int) -> tuple[tuple[int, ...], ...]:
    """For each of `decode` ranks the ranks of P, `prefill` in number, that have heads of its.

    Raises:
        InvalidCall: the heads of a rank would not be shared out evenly.
    """
    if prefill % decode and decode % prefill:
        raise InvalidCall(
            f"{prefill} ranks of P cannot write to {decode} of D: let one number divide the other."
        )
    spans = [range(rank * prefill, (rank + 1) * prefill) for rank in range(decode)]
    return tuple(
        tuple(
            writer
            for writer in range(prefill)
            if set(span) & set(range(writer * decode, (writer + 1) * decode))
        )
        for span in spans
    )


def heads_of(rank: int, ranks: int, shape: ModelShape) -> range:
    """The KDA heads that a rank computes and stores."""
    each = shape.kda_heads // ranks
    return range(rank * each, (rank + 1) * each)


def required(piece: int, length: int, geometry: Geometry, *, chunks: int = 1) -> int:
    """Positions that P must have stored before it may send a data piece of a prompt."""
    if piece == chunks:
        return length
    stop = _shares(range(pages_for(length, geometry)), chunks)[piece].stop
    return min(length, stop * geometry.logical_page_size)


def landing(
    here: End,
    there: End,
    geometry: Geometry,
    shape: ModelShape,
    *,
    chunks: int = 1,
    writer: int = 0,
    writers: int = 1,
) -> frozenset[Move]:
    """All that the `writer`-th of `writers` of a rank of D copies to it, `there`, from `here`.
    `shape` is the whole model's."""
    moves = set(_page_moves(here.places, there.places, geometry, shape, chunks, writer, writers))
    if writer == 0:
        moves.update(_tail_moves(here.places, there.places, shape, chunks))
    moves.update(_state_moves(here, there, shape, chunks))
    return frozenset(moves)


def _page_moves(
    here: Places,
    there: Places,
    geometry: Geometry,
    shape: ModelShape,
    chunks: int,
    writer: int,
    writers: int,
) -> Iterator[Move]:
    size, layers = geometry.logical_page_size, range(len(shape.dsa_layers))
    for piece, chunk in enumerate(_shares(range(pages_for(there.length, geometry)), chunks)):
        for ordinal in _shares(chunk, writers)[writer]:
            for layer in layers:
                for position in range(ordinal * size, min((ordinal + 1) * size, there.length)):
                    source, target = (
                        Cell(Component.KV, layer, end.kv[ordinal] * size + position % size)
                        for end in (here, there)
                    )
                    yield Move(piece, source, target)
                if ordinal * size + geometry.kpool <= there.length:  # it has a closed group
                    source, target = (
                        Cell(Component.INDEX, layer, end.index[ordinal]) for end in (here, there)
                    )
                    yield Move(piece, source, target)


def _tail_moves(here: Places, there: Places, shape: ModelShape, piece: int) -> Iterator[Move]:
    for layer in range(len(shape.dsa_layers)):
        for cells in zip(here.tail, there.tail, strict=True):
            source, target = (Cell(Component.TAIL, layer, cell) for cell in cells)
            yield Move(piece, source, target)


def _state_moves(here: End, there: End, shape: ModelShape, piece: int) -> Iterator[Move]:
    for layer in range(len(shape.kda_layers)):
        for head in sorted(set(here.heads) & set(there.heads)):
            for words in zip(
                *(_head_words(head, end, shape) for end in (here, there)), strict=True
            ):
                source, target = (Cell(Component.STATE, layer, word) for word in words)
                yield Move(piece, source, target)


def _head_words(head: int, end: End, shape: ModelShape) -> list[int]:
    """Where a head's words are among all states of a layer at one end, in an order of their own:
    its matrix, then for each input of the convolution its channels of q, k and v."""
    heads, local = len(end.heads), head - end.heads.start
    key, value = shape.kda_key_dim, shape.kda_value_dim
    matrix, channels = key * value, heads * (2 * key + value)
    words = list(range(local * matrix, (local + 1) * matrix))
    for step in range(shape.conv_width - 1):
        first = heads * matrix + step * channels
        for width in (key, key, value):
            words += range(first + local * width, first + (local + 1) * width)
            first += heads * width
    width = heads * matrix + (shape.conv_width - 1) * channels
    return [end.places.state * width + word for word in words]


def _shares(whole: range, parts: int) -> list[range]:
    """Contiguous shares of a range, as even as can be; some are empty if it is short."""
    cuts = [whole.start + part * len(whole) // parts for part in range(parts + 1)]
    return [range(*cut) for cut in pairwise(cuts)]


class Aux(NamedTuple):
    """What the aux row says: whose the parts are, how many positions they stand for, and the
    first token to decode, which P has sampled."""

    key: TransferKey
    length: int
    first_token: int


def aux_row(aux: Aux) -> bytes:
    """The row as it is stored: five little-endian int64."""
    return struct.pack("<5q", *aux.key, aux.length, aux.first_token)


def read_aux(row: bytes) -> Aux:
    """What a row says.  One that was cleared (all bytes 0xFF) names no transfer that exists."""
    *key, length, first_token = struct.unpack("<5q", row)
    return Aux(TransferKey(*key), length, first_token)


def is_live(
    key: TransferKey,
    landed: Mapping[tuple[int, int], Collection[int]],
    aux: Mapping[int, TransferKey],
    topology: Topology,
) -> bool:
    """Whether D may read a request: all pieces of all writers have landed on all ranks, and the
    aux row of each names this transfer.

    Args:
        landed: by (rank of D, writer), the pieces of `key` that have landed whole.
        aux: by rank of D, the key that the request's aux row names.
    """
    return all(
        aux.get(rank) == key
        and all(
            set(topology.pieces_of(rank, writer)) <= set(landed.get((rank, writer), ()))
            for writer in writers
        )
        for rank, writers in enumerate(topology.writers)
    )
