"""Address rules that are known to be wrong: z3 must find where two owners meet.

These are the controls of test_address_lemmas.py, and the exact account of #41494: which rule
loses keys, under which sharing, and why it works as long as nothing is shared.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import z3

from oracle_tests.symbolic import PAGE_OF, AnyPageGeometry, Int, Table, solve, term
from reference import addressing

KPOOLS = (1, 2, 4, 8)
POOLED = (2, 4, 8)

Rule = Callable[[Any, Any, int, int], Any]
"""(page table, group, kpool, page size) -> index slot, on integers or symbols."""


def group_for_first_token(table: Any, group: Any, kpool: int, page: int) -> Any:
    geometry: Any = AnyPageGeometry(kpool=kpool, physical_page_size=page)
    return addressing.loc_of(table, group, geometry) // kpool


def slot_in_token_units(table: Any, group: Any, kpool: int, page: int) -> Any:
    geometry: Any = AnyPageGeometry(kpool=kpool, physical_page_size=page)
    return addressing.loc_of(table, group * kpool, geometry)


def head_page_rule(table: Any, group: Any, kpool: int, page: int) -> Any:
    """Before #42178: the pooled keys of kpool physical pages, in the first of them."""
    return table[group // page * kpool] * page + group % page


def reader_of_contiguous_pages(table: Any, group: Any, kpool: int, page: int) -> Any:
    """Every kpool-th physical page, taken for the head of a logical one."""
    return table[group // page * kpool] // kpool * page + group % page


def slot_of_logical_pages(table: Any, group: Any, kpool: int, page: int) -> Any:
    """The code's rule."""
    geometry: Any = AnyPageGeometry(kpool=kpool, physical_page_size=page)
    return addressing.index_slot_of(table, group, geometry)


def slot_of_physical_pages(table: Any, group: Any, kpool: int, page: int) -> Any:
    """The code's rule, with an allocator in physical pages."""
    geometry: Any = SimpleNamespace(kpool=kpool, logical_page_size=page)
    return addressing.index_slot_of(table, group, geometry)


class Pair:
    """Groups of two requests whose tables hold physical pages of 64, as before #42178.

    slots: where a rule puts the two keys; own: the physical pages that hold their tokens;
    heads: the first of the kpool physical pages that a head-page rule treats as one.
    """

    PAGE = 64

    def __init__(self, rule: Rule, kpool: int) -> None:
        self.kpool = kpool
        self.requests, self.groups = z3.Ints("r s"), z3.Ints("j k")
        self.slots, self.own, self.heads = [], [], []
        for request, group in zip(self.requests, self.groups, strict=True):
            self.slots.append(term(rule(Table(request), Int(group), kpool, self.PAGE)))
            self.own.append(PAGE_OF(request, group * kpool / self.PAGE))
            self.heads.append(group / self.PAGE * kpool)

    def collide(self, *assumptions: z3.BoolRef) -> z3.ModelRef | None:
        """A way for two groups in different pages to have one slot."""
        live = [*(group >= 0 for group in self.groups), *(page >= 1 for page in self.own)]
        return solve(
            *live, *assumptions, self.slots[0] == self.slots[1], self.own[0] != self.own[1]
        )

    def run(self, which: int) -> list[z3.ArithRef]:
        """The kpool physical pages from the head on."""
        return [PAGE_OF(self.requests[which], self.heads[which] + t) for t in range(self.kpool)]


@pytest.mark.parametrize("kpool", POOLED)
def test_two_owners_meet_under_the_head_page_rule(kpool: int) -> None:
    """#41494: they share the head page and then diverge, inside the run of kpool pages."""
    pair = Pair(head_page_rule, kpool)
    model = pair.collide(pair.requests[0] != pair.requests[1], pair.heads[0] == pair.heads[1])
    assert model is not None

    def number(symbol: z3.ArithRef) -> int:
        return model.eval(symbol, model_completion=True).as_long()

    pages: list[dict[int, int]] = []
    for which, (head, own) in enumerate(zip(pair.heads, pair.own, strict=True)):
        ordinals = (number(head), number(pair.groups[which]) * kpool // 64)
        pages.append(dict(zip(ordinals, (number(pair.run(which)[0]), number(own)), strict=True)))
    groups = [number(group) for group in pair.groups]
    slots = [head_page_rule(t, j, kpool, 64) for t, j in zip(pages, groups, strict=True)]
    own_pages = [t[j * kpool // 64] for t, j in zip(pages, groups, strict=True)]
    assert slots[0] == slots[1]
    assert own_pages[0] != own_pages[1]


@pytest.mark.parametrize("kpool", POOLED)
def test_the_head_page_rule_is_sound_while_runs_are_not_split(kpool: int) -> None:
    """Unshared, or shared in whole runs of kpool pages: why the fault hid for so long."""
    pair = Pair(head_page_rule, kpool)
    heads = [pair.run(which)[0] for which in (0, 1)]
    entries = z3.And(pair.requests[0] == pair.requests[1], pair.heads[0] == pair.heads[1])
    assert pair.collide(z3.Implies(heads[0] == heads[1], entries)) is None
    whole_runs = z3.And([a == b for a, b in zip(pair.run(0), pair.run(1), strict=True)])
    assert pair.collide(z3.Implies(heads[0] == heads[1], whole_runs)) is None


def test_the_head_page_rule_is_the_right_one_without_pooling() -> None:
    assert Pair(head_page_rule, 1).collide() is None


@pytest.mark.parametrize("kpool", KPOOLS)
def test_the_new_rule_on_64_token_pages_lets_no_owners_meet(kpool: int) -> None:
    assert Pair(slot_of_physical_pages, kpool).collide() is None


@pytest.mark.parametrize("kpool", POOLED)
def test_there_it_is_the_reader_that_breaks(kpool: int) -> None:
    """It finds another slot than was written, unless the run of pages is contiguous."""
    pair = Pair(slot_of_physical_pages, kpool)
    group, request = pair.groups[0], pair.requests[0]
    read = term(reader_of_contiguous_pages(Table(request), Int(group), kpool, 64))
    run = pair.run(0)
    broken = [group >= 0, read != pair.slots[0]]
    contiguous = [run[0] % kpool == 0, *(run[t] == run[0] + t for t in range(kpool))]
    assert solve(*broken) is not None
    assert solve(*broken, *contiguous) is None


@pytest.mark.parametrize("kpool", POOLED)
@pytest.mark.parametrize("rule", [group_for_first_token, slot_in_token_units])
def test_wrong_rules_break_a_lemma(rule: Rule, kpool: int) -> None:
    """Two groups of one request meet, or a slot lies outside of the page's index page."""
    request, page, j, k = z3.Ints("r page j k")
    slot_j, slot_k = (term(rule(Table(request), Int(g), kpool, 64)) for g in (j, k))
    in_page = [j >= 0, k >= 0, j < 64, k < 64, j != k, PAGE_OF(request, 0) == page, page >= 1]
    assert solve(*in_page, z3.Or(slot_j == slot_k, slot_j / 64 != page)) is not None
    right = slot_of_logical_pages(Table(request), Int(j), kpool, 64)
    assert solve(*in_page, term(right) / 64 != page) is None


def test_the_published_case_of_41494() -> None:
    """Release 0.5.21: A holds 384 tokens in pages of 64, B shares 320 of them and diverges;
    then exactly the groups 80 to 95 of A hold B's keys.  Pages of 256 share 256 tokens, and
    no key of A is lost."""

    def lost(rule: Rule, first: list[int], second: list[int], page: int) -> list[int]:
        """Groups of `first` in whose slot `second` wrote a key; all pages but the last are
        shared, so only the groups of its last page are its own."""
        groups = len(first) * page // 4
        written = {rule(second, j, 4, 64) for j in range(groups - page // 4, groups)}
        return [j for j in range(groups) if rule(first, j, 4, 64) in written]

    a, b = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7]
    assert lost(head_page_rule, a, b, 64) == list(range(80, 96))
    assert lost(slot_of_physical_pages, a, b, 64) == []
    assert lost(slot_of_logical_pages, [1, 2], [1, 3], 256) == []
