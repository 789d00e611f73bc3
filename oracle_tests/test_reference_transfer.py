"""`reference.transfer`: what D can read after a transfer is what P had, and only then it may."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle_tests.transfer_cases import WIDE, geometries, geometry_of, places, places_at
from reference.addressing import (
    index_page_of,
    index_slot_of,
    loc_of,
    pages_for,
    tail_start,
    visible_groups,
)
from reference.contract import (
    Component,
    HotSnapshot,
    Occupancy,
    Places,
    RequestId,
    RequestView,
    Snapshot,
)
from reference.geometry import Geometry, Group, LogicalPage, ModelShape, Position
from reference.protocol import Topology, TransferKey
from reference.transfer import (
    AUX_BYTES,
    Aux,
    Cell,
    End,
    aux_row,
    heads_of,
    is_live,
    landing,
    places_of,
    read_aux,
    required,
    writers_of,
)

quick = settings(max_examples=80, deadline=None)
KEY = TransferKey(room=3, generation=2, incarnation=7)


def named(end: End, geometry: Geometry, shape: ModelShape) -> dict[Cell, str]:
    """What each cell holds that a reader looks at, found by the addresses that readers use.  A
    word of a state goes by its head and its place in the state of that head alone."""
    places, names = end.places, dict[Cell, str]()
    kv, index = ([LogicalPage(page) for page in pages] for pages in (places.kv, places.index))
    for layer in range(len(shape.dsa_layers)):
        for position in map(Position, range(places.length)):
            row = Cell(Component.KV, layer, loc_of(kv, position, geometry))
            names[row] = f"row {position} of layer {layer}"
        for group in map(Group, range(places.length // geometry.kpool)):
            slot = index_slot_of(index, group, geometry)
            page = Cell(Component.INDEX, layer, index_page_of(slot, geometry))
            ordinal = group // geometry.index_page_size
            names[page] = f"index page {ordinal} of layer {layer}"
        tail = range(tail_start(places.length, geometry), places.length)
        for position, cell in zip(tail, places.tail, strict=True):
            names[Cell(Component.TAIL, layer, cell)] = f"tail {position} of layer {layer}"
    for layer in range(len(shape.kda_layers)):
        for word, name in enumerate(state_names(end.heads, shape)):
            item = places.state * rank_width(len(end.heads), shape) + word
            names[Cell(Component.STATE, layer, item)] = f"{name} of layer {layer}"
    return names


def rank_width(heads: int, shape: ModelShape) -> int:
    return replace(shape, kda_heads=heads).state_width


def state_names(heads: range, shape: ModelShape) -> list[str]:
    """The words of a rank's state of one layer, in the order of `ModelShape.state_width`."""
    key, value = range(shape.kda_key_dim), range(shape.kda_value_dim)
    words = [f"matrix {row} {column} of head {h}" for h in heads for row in key for column in value]
    for step in range(shape.conv_width - 1):
        for part, width in (("q", key), ("k", key), ("v", value)):
            words += [f"{part} {step} {i} of head {h}" for h in heads for i in width]
    return words


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Geometry, Geometry, int, list[End], End]:
    """Geometries of P and D, chunks, the ends of all writers of a rank of D, and its own."""
    geometry = draw(geometries)
    drafting = replace(geometry, max_drafts=draw(st.integers(0, 3)))
    length = draw(st.integers(1, 4 * geometry.logical_page_size))
    prefill, decode = draw(st.sampled_from([(1, 1), (2, 2), (2, 1), (3, 1), (4, 2), (1, 4)]))
    rank = draw(st.integers(0, decode - 1))
    heres = [
        End(places=draw(places(geometry, length)), heads=heads_of(writer, prefill, WIDE))
        for writer in writers_of(prefill, decode)[rank]
    ]
    there = End(places=draw(places(drafting, length)), heads=heads_of(rank, decode, WIDE))
    return geometry, drafting, draw(st.integers(1, 3)), heres, there


@quick
@given(transfers())
def test_what_lands_is_what_is_read(
    drawn: tuple[Geometry, Geometry, int, list[End], End],
) -> None:
    """Every cell that D reads gets the bytes of the same name from exactly one writer, with a
    piece that there is; nothing else is written."""
    geometry, drafting, chunks, heres, there = drawn
    got: dict[Cell, str] = {}
    for writer, here in enumerate(heres):
        at_p = named(here, geometry, WIDE)
        for piece, source, target in landing(
            here, there, geometry, WIDE, chunks=chunks, writer=writer, writers=len(heres)
        ):
            assert 0 <= piece <= chunks
            assert target not in got
            got[target] = at_p[source]
    assert got == named(there, drafting, WIDE)


@quick
@given(geometries, st.data())
def test_an_early_piece_reads_what_is_stored(geometry: Geometry, data: st.DataObject) -> None:
    """Rows below `required`, and index pages whose visible groups all lie below it; the last
    piece of pages and the piece of the end need the whole prompt."""
    length = data.draw(st.integers(1, 4 * geometry.logical_page_size))
    chunks = data.draw(st.integers(1, 4))
    here, there = (
        End(places=data.draw(places(geometry, length)), heads=range(12)) for _ in range(2)
    )
    needs = [required(piece, length, geometry, chunks=chunks) for piece in range(chunks + 1)]
    assert needs == sorted(needs)
    assert needs[-2:] == [length] * 2
    ordinals = {page: ordinal for ordinal, page in enumerate(here.places.index)}
    pages = {page: ordinal for ordinal, page in enumerate(here.places.kv)}
    size = geometry.logical_page_size
    for piece, source, _ in landing(here, there, geometry, WIDE, chunks=chunks):
        if source.component is Component.KV:
            position = pages[source.item // size] * size + source.item % size
            assert position < needs[piece]
        elif source.component is Component.INDEX:
            last = min((ordinals[source.item] + 1) * size, length) - 1
            closed = visible_groups(Position(last), geometry) * geometry.kpool
            assert closed <= needs[piece]
        else:
            assert piece == chunks


def test_the_tail_is_laid_anew() -> None:
    """Control: with the cells that P's ring size gives, D reads what is not there."""
    geometry, drafting = geometry_of(4, 1), geometry_of(4, 1, drafts=2)
    length = 4 * 4 + 11
    at_d = {"kv": [3, 1], "index": [2, 4], "slot": 2, "state": 1}
    here, there, as_at_p = (
        End(places=places_at(rings, length, **at_d), heads=range(12))
        for rings in (geometry, drafting, geometry)
    )
    assert there.places.tail == (2 * 6 + 24 % 6, 2 * 6 + 25 % 6, 2 * 6 + 26 % 6)
    at_p, wanted = named(here, geometry, WIDE), named(there, drafting, WIDE)
    for target_end, right in ((there, True), (as_at_p, False)):
        moves = landing(here, target_end, geometry, WIDE)
        assert ({target: at_p[source] for _, source, target in moves} == wanted) is right


@pytest.mark.parametrize("hot", [False, True])
def test_places_come_from_the_page_tables(hot: bool) -> None:
    """Of the first positions alone, on the host's pages under HiSparse."""
    geometry = geometry_of(2, 2, drafts=1)
    size = geometry.logical_page_size
    view = RequestView(
        length=2 * size, pages=(5, 3, 9), shared=0, slot=2, state_slot=4, state_position=2 * size
    )
    counts = dict.fromkeys(Occupancy.__slots__, 0)
    rows = HotSnapshot(
        buffers={},
        backing={5: 6, 3: 1, 9: 2},
        free_device=frozenset(),
        free_host=frozenset(),
        occupancy=Occupancy(**counts),
    )
    snapshot = Snapshot(
        requests={},
        cached=(),
        free_pages=frozenset(),
        free_states=frozenset(),
        ref_counts={},
        hot=rows if hot else None,
        reserved={RequestId(1): view},
    )
    length = size + 3
    assert places_of(snapshot, RequestId(1), length, geometry) == Places(
        kv=(6, 1) if hot else (5, 3),
        index=(5, 3),
        tail=(2 * 3 + (length - 1) % 3,),
        state=4,
        length=length,
    )
    assert pages_for(length, geometry) == 2


TOPOLOGY = Topology(pieces=2, writers=((0, 1), (2, 3)), quarantine_limit=1)


def complete() -> tuple[dict[tuple[int, int], set[int]], dict[int, TransferKey]]:
    """All that has to land on two ranks of D with two writers each."""
    landed = {
        (rank, writer): set(TOPOLOGY.pieces_of(rank, writer))
        for rank, writers in enumerate(TOPOLOGY.writers)
        for writer in writers
    }
    return landed, dict.fromkeys(range(2), KEY)


def test_alive_with_everything_and_not_without_any_piece() -> None:
    landed, aux = complete()
    assert is_live(KEY, landed, aux, TOPOLOGY)
    for by, pieces in landed.items():
        for piece in pieces:
            less = landed | {by: pieces - {piece}}
            assert not is_live(KEY, less, aux, TOPOLOGY), (by, piece)
        rest = {other: pieces for other, pieces in landed.items() if other != by}
        assert not is_live(KEY, rest, aux, TOPOLOGY)


@pytest.mark.parametrize(
    "other", [KEY._replace(room=4), KEY._replace(generation=1), KEY._replace(incarnation=6)]
)
def test_the_aux_row_of_each_rank_names_the_transfer(other: TransferKey) -> None:
    """A right room of an older generation or another life of D is not enough."""
    landed, aux = complete()
    for rank in range(2):
        assert not is_live(KEY, landed, aux | {rank: other}, TOPOLOGY)
        assert not is_live(KEY, landed, {1 - rank: KEY}, TOPOLOGY)


def test_an_aux_row_is_read_as_it_was_written() -> None:
    aux = Aux(KEY, 1000, 17)
    row = aux_row(aux)
    assert len(row) == AUX_BYTES
    assert read_aux(row) == aux
    assert row[:8] == bytes([3, 0, 0, 0, 0, 0, 0, 0])
    assert read_aux(b"\xff" * AUX_BYTES).key == (-1, -1, -1)
