"""`optimized.transfer.plan` against `reference.transfer`, run by run as sets of cells."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optimized.transfer import plan as plans
from optimized.transfer.plan import INDEX, KV, TAIL, Array, Plan
from optimized.transfer.transport import Refused
from oracle_tests.transfer_cases import WIDE, geometries, geometry_of, places, places_at, targets
from reference import transfer
from reference.contract import Component, InvalidCall, Places
from reference.geometry import Geometry, ModelShape
from reference.protocol import TransferKey
from reference.transfer import Cell, End, Move

RANKS = [(prefill, decode) for prefill in (1, 2, 3, 4) for decode in (1, 2, 4)]
PAIRS = [(p, d) for p, d in RANKS if not p % d or not d % p]
PARTS = {KV: Component.KV, INDEX: Component.INDEX, TAIL: Component.TAIL}
quick = settings(max_examples=200, deadline=None)


def moves_of(plan: Plan, piece: int, runs: Array) -> list[Move]:
    """The copies that runs stand for, word by word for the state."""
    moves = []
    for region, first, at, items in runs.tolist():
        for item in range(items):
            ends = ((first + item, plan.here), (at + item, plan.there))
            if region == plan.aux_region - 1:
                cells = zip(*(words_of(plan.shape, *end) for end in ends), strict=True)
            else:
                layer, part = divmod(region, 3)
                cells = [tuple(Cell(PARTS[part], layer, where) for where, _ in ends)]
            moves += [Move(piece, source, target) for source, target in cells]
    return moves


def words_of(shape: ModelShape, item: int, heads: range) -> list[Cell]:
    """The words of an item of the state, at a rank with these heads."""
    layers, width = len(shape.kda_layers), replace(shape, kda_heads=len(heads)).state_width
    unit = plans.state_unit(shape)
    cells = []
    for word in range(item * unit, (item + 1) * unit):
        row, offset = divmod(word, width)
        slot, layer = divmod(row, layers)
        cells.append(Cell(Component.STATE, layer, slot * width + offset))
    return cells


def all_moves(plan: Plan, here: Places, there: Places) -> list[Move]:
    return [
        move
        for piece in range(plan.pieces)
        for move in moves_of(plan, piece, plan.runs(piece, here, there))
    ]


def wanted(plan: Plan, here: Places, there: Places) -> frozenset[Move]:
    """What the reference makes of the same transfer."""
    return transfer.landing(
        End(places=here, heads=plan.here),
        End(places=there, heads=plan.there),
        plan.geometry,
        plan.shape,
        chunks=plan.chunks,
        writer=plan.writer,
        writers=plan.writers,
    )


@st.composite
def transfers(draw: st.DrawFn) -> tuple[list[Plan], Places, Places]:
    """The plans of all writers of a rank of D, with the same places at each of them."""
    geometry = draw(geometries)
    length = draw(st.integers(1, 4 * geometry.logical_page_size))
    prefill, decode = draw(st.sampled_from(PAIRS))
    rank, chunks = draw(st.integers(0, decode - 1)), draw(st.integers(1, 3))
    plan_of = [
        Plan.between(
            geometry, WIDE, prefill=(writer, prefill), decode=(rank, decode), chunks=chunks
        )
        for writer in transfer.writers_of(prefill, decode)[rank]
    ]
    drafting = replace(geometry, max_drafts=draw(st.integers(0, 3)))
    return plan_of, draw(places(geometry, length)), draw(places(drafting, length))


@quick
@given(transfers())
def test_the_runs_are_the_moves_of_the_reference(
    drawn: tuple[list[Plan], Places, Places],
) -> None:
    """Of every writer, each cell once; no two writers write the same, and no run overlaps."""
    plan_of, here, there = drawn
    written = []
    for plan in plan_of:
        moves = all_moves(plan, here, there)
        assert len(moves) == len(set(moves))
        assert set(moves) == wanted(plan, here, there)
        written += targets(plan.runs(piece, here, there) for piece in range(plan.pieces))
    assert len(written) == len(set(written))


@quick
@given(geometries, st.data())
def test_a_piece_needs_what_the_reference_says(geometry: Geometry, data: st.DataObject) -> None:
    """And with so much computed at P it is the same as with all: the rest is not looked at."""
    chunks = data.draw(st.integers(1, 3))
    plan = Plan.between(geometry, WIDE, prefill=(0, 1), decode=(0, 1), chunks=chunks)
    length = data.draw(st.integers(1, 4 * geometry.logical_page_size))
    at_p, at_d = data.draw(places(geometry, length)), data.draw(places(geometry, length))
    for piece in range(plan.pieces):
        required = plan.required(piece, length)
        assert required == transfer.required(piece, length, geometry, chunks=chunks)
        count = -(-required // geometry.logical_page_size)
        early = replace(at_p, kv=at_p.kv[:count], index=at_p.index[:count], length=required)
        whole = plan.runs(piece, at_p, at_d)
        assert np.array_equal(plan.runs(piece, early, at_d), whole)
        if required:
            with pytest.raises(Refused, match="send a piece once P has computed it"):
                plan.runs(piece, replace(early, length=required - 1), at_d)


def test_what_lies_together_is_one_run() -> None:
    """All of a request in one run a region, were it not for one page that lies elsewhere; a tail
    that wraps at one end is two runs."""
    geometry, drafting = geometry_of(4, 1), geometry_of(4, 1, drafts=1)
    plan = Plan.between(geometry, WIDE, prefill=(0, 1), decode=(0, 1))
    length = 3 * geometry.logical_page_size + 7
    here = places_at(geometry, length, kv=[3, 4, 5, 6], index=[3, 4, 5, 6], slot=1, state=2)
    there = places_at(drafting, length, kv=[7, 8, 9, 10], index=[8, 9, 2, 3], slot=2, state=4)
    assert [position % 5 for position in (52, 53, 54)] == [2, 3, 4]
    pages, end = (plan.runs(piece, here, there).tolist() for piece in range(2))
    assert [run for run in pages if run[0] == KV] == [[KV, 48, 112, 55]]
    assert [run for run in pages if run[0] == INDEX] == [[INDEX, 3, 8, 2], [INDEX, 5, 2, 2]]
    assert [run for run in end if run[0] == TAIL] == [[TAIL, 4, 12, 3]]
    words = 2 * WIDE.state_width // plans.state_unit(WIDE)
    assert end[-1] == [6, 2 * words, 4 * words, words]
    later = replace(there, tail=(14, 10, 11))
    cut = [run for run in plan.runs(1, here, later).tolist() if run[0] == TAIL]
    assert cut == [[TAIL, 4, 14, 1], [TAIL, 5, 10, 2]]


def test_a_writer_without_pages_sends_none() -> None:
    """One page and four writers: the last has it, the first the tail, and all their heads."""
    geometry = geometry_of(4, 1)
    here, there = (
        places_at(geometry, 6, kv=[page], index=[page], slot=1, state=1) for page in (3, 5)
    )
    counts = []
    for writer in range(4):
        plan = Plan.between(geometry, WIDE, prefill=(writer, 4), decode=(0, 1))
        pages, end = (plan.runs(piece, here, there) for piece in range(2))
        assert (end[:, 0] == plan.aux_region - 1).any()
        counts.append((len(pages), int((end[:, 0] == TAIL).sum())))
    assert counts == [(0, 1), (0, 0), (0, 0), (4, 0)]


class Faulty:
    """Faults of a plan that its comparison with the reference must notice."""

    geometry = geometry_of(4, 2)
    length = geometry.logical_page_size + 6
    drafting = geometry_of(4, 2, drafts=1)
    here = places_at(geometry, length, kv=[3, 9], index=[3, 9], slot=1, state=2)
    there = places_at(drafting, length, kv=[4, 2], index=[6, 8], slot=2, state=1)
    plan = Plan.between(geometry, WIDE, prefill=(0, 2), decode=(0, 1))


def test_index_pages_in_units_of_tokens_are_noticed() -> None:
    case = Faulty
    runs = case.plan.runs(0, case.here, case.there)
    assert set(moves_of(case.plan, 0, runs)) <= wanted(case.plan, case.here, case.there)
    runs[runs[:, 0] == INDEX, 1:] *= case.geometry.logical_page_size
    assert not set(moves_of(case.plan, 0, runs)) <= wanted(case.plan, case.here, case.there)


def test_index_pages_for_host_pages_are_noticed() -> None:
    """Under HiSparse the KV rows go to another page than the index keys."""
    case = Faulty
    confused = replace(case.there, index=case.there.kv)
    moves = set(all_moves(case.plan, case.here, confused))
    assert moves != wanted(case.plan, case.here, case.there)


def test_a_tail_that_is_not_laid_anew_is_noticed() -> None:
    """With the cells that the rings of P would have."""
    case = Faulty
    as_at_p = places_at(case.geometry, case.length, kv=[4, 2], index=[6, 8], slot=2, state=1)
    assert as_at_p.tail != case.there.tail
    moves = set(all_moves(case.plan, case.here, as_at_p))
    assert moves != wanted(case.plan, case.here, case.there)


def test_a_share_of_the_state_that_ignores_the_layout_is_noticed() -> None:
    """One contiguous half, where a head's parts lie apart."""
    case = Faulty
    runs = case.plan.runs(1, case.here, case.there)
    state = runs[runs[:, 0] == case.plan.aux_region - 1]
    assert len(state) > len(WIDE.kda_layers)
    half = np.array([[state[0, 0], state[0, 1], state[0, 2], state[:, 3].sum()]])
    whole = wanted(case.plan, case.here, case.there)
    assert set(moves_of(case.plan, 1, state)) <= whole
    assert not set(moves_of(case.plan, 1, half)) <= whole


@pytest.mark.parametrize(("prefill", "decode"), RANKS)
def test_writers(prefill: int, decode: int) -> None:
    if (prefill, decode) in PAIRS:
        assert plans.writers_of(prefill, decode) == transfer.writers_of(prefill, decode)
        return
    with pytest.raises(Refused, match="divides the other's"):
        plans.writers_of(prefill, decode)
    with pytest.raises(InvalidCall, match="divide the other"):
        transfer.writers_of(prefill, decode)


@given(
    st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0)
)
def test_aux_rows_are_those_of_the_reference(
    room: int, generation: int, incarnation: int, length: int
) -> None:
    key = TransferKey(room, generation, incarnation)
    length %= 2**40
    row = plans.encode_aux(plans.Aux(key, length, 7))
    assert (row.dtype, row.shape) == (np.uint8, (plans.AUX_BYTES,))
    assert row.tobytes() == transfer.aux_row(transfer.Aux(key, length, 7))
    assert plans.decode_aux(row) == transfer.read_aux(row.tobytes()) == (key, length, 7)


def test_a_cleared_aux_row_names_no_transfer() -> None:
    row = np.full(plans.AUX_BYTES, plans.CLEARED, dtype=np.uint8)
    key = plans.decode_aux(row).key
    assert key.generation < 0
    assert key == transfer.read_aux(row.tobytes()).key


def test_places_survive_their_journey() -> None:
    there = Faulty.there
    assert plans.unpack(plans.pack(there)) == there


@pytest.mark.parametrize(
    "packed", [(), ((1,), (1,), ()), ((1,), (1,), (), (1, 2, 3)), ((-1,), (1,), (), (1, 2)),
               ((1,), (2**31,), (), (1, 2)), ((1,), (1,), (), (1, 2), ())]
)  # fmt: skip
def test_places_that_are_none_are_refused(packed: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(Refused, match="run the same version at both ends"):
        plans.unpack(packed)


@pytest.mark.parametrize("wrong", [{"kv": (4,)}, {"index": (6, 8, 9)}, {"tail": ()}, {"length": 7}])
def test_places_of_another_geometry_are_refused(wrong: dict[str, object]) -> None:
    there = replace(Faulty.there, **wrong)
    with pytest.raises(Refused, match="run both ends with one geometry"):
        Faulty.plan.runs(0, Faulty.here, there)


def test_another_prompt_is_refused() -> None:
    """P has gone on decoding: its state stands for more positions than D has reserved."""
    case = Faulty
    longer = places_at(case.geometry, case.length + 1, kv=[3, 9], index=[3, 9], slot=1, state=2)
    with pytest.raises(Refused, match="reserve the prompt at D"):
        case.plan.runs(1, longer, case.there)
