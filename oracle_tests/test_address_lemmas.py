"""Lemmas of pooled addressing, proved by z3 over the very code of `reference.addressing`.

Each lemma is the claim that no counterexample exists: its negation must be unsatisfiable, for
kpool 1, 2, 4 and 8, for *every* physical page size that kpool divides, and for page tables of
which nothing is known but what the lemma assumes.  Groups and positions are written as
(ordinal of the page, place in the page), which by the division theorem is each of them once.

The controls, rules that are known to be wrong, are in test_address_faults.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import z3

from oracle_tests.symbolic import PAGE_OF, AnyPageGeometry, Int, Table, solve, term
from reference import addressing
from reference.geometry import Geometry

KPOOLS = (1, 2, 4, 8)


class Some:
    """Some request, some ordinal in its table, some place in the page found there.

    `places` is how many of them a page has: logical_page_size for positions, index_page_size
    for groups.  Pages are at least 1: page 0 is padding and in no table.
    """

    def __init__(self, name: str, places: Int) -> None:
        self.request, self.ordinal, self.place = z3.Ints(f"r_{name} i_{name} o_{name}")
        self.table = Table(self.request)
        self.page = PAGE_OF(self.request, self.ordinal)
        self.index: Any = Int(self.ordinal) * places + Int(self.place)
        self.known = z3.And(
            self.ordinal >= 0, self.place >= 0, self.place < places.term, self.page >= 1
        )

    def same_entry(self, other: Some) -> z3.BoolRef:
        return z3.And(self.request == other.request, self.ordinal == other.ordinal)

    def same(self, other: Some) -> z3.BoolRef:
        return z3.And(self.same_entry(other), self.place == other.place)


class World:
    """All geometries of one kpool: the physical page is any positive multiple of it."""

    def __init__(self, kpool: int, max_drafts: int = 0) -> None:
        multiple = z3.Int("multiple")
        self.kpool = kpool
        self.page = Int(multiple) * kpool
        self.geometry: Any = AnyPageGeometry(
            kpool=kpool, physical_page_size=self.page, max_drafts=max_drafts
        )
        self.size = self.geometry.logical_page_size.term
        self.facts = [multiple >= 1]

    def position(self, name: str) -> Some:
        return Some(name, self.geometry.logical_page_size)

    def group(self, name: str) -> Some:
        return Some(name, self.geometry.index_page_size)

    def loc(self, position: Some) -> z3.ArithRef:
        """page * page size + place, after a proof that the code's loc is that."""
        code = addressing.loc_of(position.table, position.index, self.geometry)
        return self.proved(term(code), position.page * self.size + position.place, position)

    def slot(self, group: Some) -> z3.ArithRef:
        """page * page size + place, after a proof that the code's index slot is that."""
        code = addressing.index_slot_of(group.table, group.index, self.geometry)
        return self.proved(term(code), group.page * self.page.term + group.place, group)

    def proved(self, code: z3.ArithRef, form: z3.ArithRef, some: Some) -> z3.ArithRef:
        """`form`, for use in later proofs: products of symbols are what z3 finds hard."""
        self.prove(code == form, some.known)
        return form

    def prove(self, claim: z3.BoolRef, *assumptions: z3.BoolRef) -> None:
        """No counterexample to `claim`, and some case in which its assumptions hold."""
        assert self.solve(*assumptions) is not None, "the assumptions contradict each other"
        counterexample = self.solve(*assumptions, z3.Not(claim))
        assert counterexample is None, f"counterexample: {counterexample}"

    def solve(self, *assumptions: z3.BoolRef) -> z3.ModelRef | None:
        return solve(*self.facts, *assumptions)


@pytest.fixture(params=KPOOLS, ids=lambda kpool: f"kpool{kpool}")
def world(request: pytest.FixtureRequest) -> World:
    return World(request.param)


def one_owner(a: Some, b: Some) -> z3.BoolRef:
    """A page stands in one table, once."""
    return z3.Implies(a.page == b.page, a.same_entry(b))


def test_positions_of_a_page_fill_its_rows_once(world: World) -> None:
    p = world.position("p")
    loc = world.loc(p)
    world.prove(z3.And(loc / world.size == p.page, loc % world.size == p.place), p.known)


def test_no_two_positions_meet_in_a_row(world: World) -> None:
    p, q = world.position("p"), world.position("q")
    met, known = world.loc(p) == world.loc(q), z3.And(p.known, q.known)
    world.prove(z3.Implies(met, p.same(q)), known, one_owner(p, q))
    # with shared pages: who meets in a row holds the same page, and is at one place in it
    world.prove(z3.Implies(met, z3.And(p.page == q.page, p.place == q.place)), known)


def test_groups_of_a_page_fill_its_index_page_once(world: World) -> None:
    """Index page id == logical page id, and each of its rows is the slot of one group."""
    g = world.group("g")
    slot = world.slot(g)
    index_page = addressing.index_page_of(Int(slot), world.geometry)
    world.prove(term(index_page) == g.page, g.known)
    world.prove(slot % world.page.term == g.place, g.known)


def test_no_two_groups_meet_in_an_index_slot(world: World) -> None:
    g, h = world.group("g"), world.group("h")
    met, known = world.slot(g) == world.slot(h), z3.And(g.known, h.known)
    world.prove(z3.Implies(met, g.same(h)), known, one_owner(g, h))
    world.prove(z3.Implies(met, z3.And(g.page == h.page, g.place == h.place)), known)


def test_a_group_lies_in_one_logical_page_in_a_run(world: World) -> None:
    """So a kernel may find the slot from whichever token of the group it has at hand."""
    g, step = world.group("g"), z3.Int("step")
    g.known = z3.And(g.known, step >= 0, step < world.kpool)
    position = g.index * world.kpool + Int(step)
    loc = world.proved(
        term(addressing.loc_of(g.table, position, world.geometry)),
        g.page * world.size + g.place * world.kpool + step,
        g,
    )
    world.prove(loc / world.size == g.page, g.known)
    world.prove(loc / world.kpool == world.slot(g), g.known)


def test_slots_stay_in_the_pool_and_out_of_padding(world: World) -> None:
    g, pages = world.group("g"), z3.Int("pages")
    slot, page = world.slot(g), world.page.term
    world.prove(z3.And(slot >= page, slot < pages * page), g.known, g.page < pages)


def test_kpool_1_has_one_slot_a_token() -> None:
    world = World(1)
    g = world.group("g")
    code = addressing.index_slot_of(g.table, g.index, world.geometry)
    loc = addressing.loc_of(g.table, g.index, world.geometry)
    world.prove(term(code) == term(loc), g.known)


def test_a_group_is_seen_from_its_last_position_on(world: World) -> None:
    """visible_groups is exact, and the tail begins where it ends."""
    p, j = z3.Ints("p j")
    visible = term(addressing.visible_groups(Int(p), world.geometry))
    last = j * world.kpool + world.kpool - 1
    world.prove((j < visible) == (last <= p), p >= 0, j >= 0)
    tail = term(addressing.tail_start(Int(p + 1), world.geometry))
    world.prove(tail == visible * world.kpool, p >= 0)
    world.prove(z3.And(tail <= p + 1, p + 1 < tail + world.kpool), p >= 0)


@pytest.mark.parametrize("kpool", KPOOLS)
@pytest.mark.parametrize(("page", "index_dim"), [(8, 16), (24, 128), (64, 16), (64, 128)])
def test_no_two_slots_meet_in_a_byte(kpool: int, page: int, index_dim: int) -> None:
    """Keys and scales of any two slots are apart, and inside the page of their slot.  Page
    sizes are numbers here: as symbols they make the byte offsets cubic."""
    geometry = Geometry(
        kpool=kpool, physical_page_size=page, topk=kpool, mamba_track_interval=page * kpool
    )
    page_bytes = page * (index_dim + 4)

    def prove(claim: z3.BoolRef, *assumptions: z3.BoolRef) -> None:
        assert solve(*assumptions, z3.Not(claim)) is None

    spans = []
    for name in ("a", "b"):
        index_page, row = z3.Ints(f"page_{name} row_{name}")
        slot: Any = Int(index_page * page + row)
        start = index_page * page_bytes
        key = term(addressing.key_offset(slot, geometry, index_dim))
        scale = term(addressing.scale_offset(slot, geometry, index_dim))
        known = z3.And(index_page >= 0, row >= 0, row < page)
        prove(z3.And(start <= key, key + index_dim <= scale), known)
        prove(scale + 4 <= start + page_bytes, known)
        spans.append((known, index_page, row, key, scale))
    # slots of two pages are apart, since each stays inside its page; now within one page
    (known_a, page_a, row_a, key_a, scale_a), (known_b, page_b, row_b, key_b, scale_b) = spans
    before = z3.And(known_a, known_b, page_a == page_b, row_a < row_b)
    prove(z3.And(key_a + index_dim <= key_b, scale_a + 4 <= scale_b), before)
    prove(key_b + index_dim <= scale_a, before)


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("kpool", KPOOLS)
def test_waiting_positions_never_share_a_ring_row(kpool: int, drafts: int) -> None:
    """The open tail waits beside the token of a decode, or beside all drafts of a verify."""
    world = World(kpool, max_drafts=drafts)
    length, p, q = z3.Ints("length p q")
    tail = term(addressing.tail_start(Int(length), world.geometry))
    stop = length + max(drafts, 1)
    waiting = [length >= 0, tail <= p, p < stop, tail <= q, q < stop]
    rows = [term(addressing.ring_row_of(Int(x), world.geometry)) for x in (p, q)]
    world.prove(z3.Implies(rows[0] == rows[1], p == q), *waiting)


def test_without_an_owner_rule_two_requests_meet(world: World) -> None:
    """The lemmas of meeting are not true of anything: their assumption bears them."""
    g, h = world.group("g"), world.group("h")
    met = world.slot(g) == world.slot(h)
    assert world.solve(g.known, h.known, met, z3.Not(g.same(h))) is not None
