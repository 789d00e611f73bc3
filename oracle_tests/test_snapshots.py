"""The judge of snapshots in `reference.prefix`: it is only worth what it finds.

Good snapshots have no violation; each corruption of one must be named, with the page, slot or
node that it touched, and no single wrong entry may go unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from reference import prefix
from reference.contract import CachedNode, RequestId, RequestView, Snapshot
from reference.geometry import Geometry, LogicalPage

GEOMETRY = Geometry(kpool=2, physical_page_size=2, topk=2, mamba_track_interval=4, max_drafts=3)
PAGES, STATES = 13, 11
ONE, TWO, THREE, FOUR = (RequestId(n) for n in (1, 2, 3, 4))

GOOD = Snapshot(
    requests={
        ONE: RequestView(
            length=14, pages=(3, 5, 2, 7), shared=3, slot=1, state_slot=5, state_position=14
        ),
        TWO: RequestView(
            length=9,
            pages=(3, 5, 11),
            shared=2,
            slot=2,
            state_slot=6,
            state_position=9,
            pending=3,
        ),
        THREE: RequestView(
            length=6,
            pages=(10, 12),
            shared=0,
            slot=3,
            state_slot=7,
            state_position=6,
            checkpoints={4: 8},
        ),
        FOUR: RequestView(length=0, pages=(), shared=0, slot=4, state_slot=9, state_position=0),
    },
    cached=(
        CachedNode(
            node=1,
            parent=None,
            tokens=tuple(range(8)),
            pages=(3, 5),
            checkpoints={4: 1, 8: 2},
            locks=2,
        ),
        CachedNode(node=2, parent=1, tokens=(8, 9, 8, 9), pages=(2,), checkpoints={12: 3}, locks=1),
        CachedNode(node=3, parent=1, tokens=(7, 7, 7, 7), pages=(9,), checkpoints={12: 4}, locks=0),
    ),
    free_pages=frozenset((1, 4, 6, 8)),
    free_states=frozenset((10,)),
    ref_counts={2: 2, 3: 3, 5: 3, 7: 1, 9: 1, 10: 1, 11: 1, 12: 1},
)
EMPTY = Snapshot(
    requests={},
    cached=(),
    free_pages=frozenset(range(1, PAGES)),
    free_states=frozenset(range(1, STATES)),
    ref_counts={},
)


def judge(snapshot: Snapshot) -> list[str]:
    return prefix.judge_snapshot(snapshot, GEOMETRY, pages=PAGES, state_slots=STATES)


def with_request(request: RequestId, snapshot: Snapshot = GOOD, **fields: Any) -> Snapshot:
    changed = replace(snapshot.requests[request], **fields)
    return replace(snapshot, requests={**snapshot.requests, request: changed})


def with_node(number: int, **fields: Any) -> Snapshot:
    changed = [replace(n, **fields) if n.node == number else n for n in GOOD.cached]
    return replace(GOOD, cached=tuple(changed))


def with_ref_count(page: int, count: int) -> Snapshot:
    return replace(GOOD, ref_counts={**GOOD.ref_counts, page: count})


def without(request: RequestId) -> Snapshot:
    rest = {r: view for r, view in GOOD.requests.items() if r != request}
    return replace(GOOD, requests=rest)


@pytest.mark.parametrize(
    "snapshot",
    [
        pytest.param(GOOD, id="running"),
        pytest.param(EMPTY, id="empty"),
        pytest.param(with_request(TWO, pending=0), id="no-drafts"),
        pytest.param(with_request(ONE, length=12, state_position=12), id="spare-page"),
        pytest.param(with_request(ONE, length=16, state_position=16), id="full-page"),
        # a bare junction of the tree needs no state of its own
        pytest.param(
            replace(with_node(1, checkpoints={4: 1}), free_states=GOOD.free_states | {2}),
            id="node-without-checkpoint-at-its-end",
        ),
    ],
)
def test_a_good_snapshot_has_no_violation(snapshot: Snapshot) -> None:
    assert judge(snapshot) == []


class Fault(NamedTuple):
    snapshot: Snapshot
    sentence: str


FAULTS = {
    # owners
    "two-requests-own-a-page": Fault(
        with_request(TWO, pages=(3, 5, 7)),
        "page 7 should belong to request 1 alone; request 2 holds it too.",
    ),
    "a-shared-page-in-a-private-range": Fault(
        with_request(TWO, pages=(3, 5, 9)),
        "page 9 should belong to node 3 alone; request 2 holds it too.",
    ),
    "own-shared-page-in-the-private-range": Fault(
        with_request(TWO, pages=(3, 5, 3)),
        "page 3 should belong to node 1 alone; request 2 holds it too.",
    ),
    "shared-pages-counted-as-private": Fault(
        with_request(ONE, shared=2),
        "page 2 should belong to node 2 alone; request 1 holds it too.",
    ),
    "two-nodes-hold-a-page": Fault(
        with_node(3, pages=(2,)), "page 2 should belong to node 2 alone; node 3 holds it too."
    ),
    "a-duplicate-page-in-a-table": Fault(
        with_request(THREE, pages=(10, 10)),
        "page 10 should belong to request 3 alone; request 3 holds it too.",
    ),
    "a-duplicate-page-in-the-shared-range": Fault(
        with_request(TWO, pages=(3, 3, 11)),
        "request 2 should share a path of the tree; its shared pages [3, 3] are none.",
    ),
    "shared-pages-of-two-branches": Fault(
        with_request(ONE, pages=(3, 5, 2, 9, 7), shared=4),
        "request 1 should share a path of the tree; its shared pages [3, 5, 2, 9] are none.",
    ),
    "shared-pages-not-from-the-root": Fault(
        with_request(TWO, pages=(5, 3, 11)),
        "request 2 should share a path of the tree; its shared pages [5, 3] are none.",
    ),
    "shared-page-not-cached": Fault(
        with_request(THREE, shared=1),
        "request 3 should share a path of the tree; its shared pages [10] are none.",
    ),
    # what a request has to write
    "the-next-position-in-a-shared-page": Fault(
        with_request(ONE, length=11, state_position=11),
        "page 2 holds the next position (11) of request 1: it should be private, but it is "
        "shared with the tree.",
    ),
    "too-few-pages": Fault(
        with_request(ONE, length=17, state_position=17),
        "request 1 holds 4 pages for 17 positions and 0 drafts; it needs 5.",
    ),
    "too-few-pages-for-drafts": Fault(
        with_request(TWO, length=10, state_position=10),
        "request 2 holds 3 pages for 10 positions and 3 drafts; it needs 4.",
    ),
    "more-shared-than-held": Fault(with_request(FOUR, shared=1), "request 4 shares 1 of 0 pages."),
    "negative-shared": Fault(with_request(THREE, shared=-1), "request 3 shares -1 of 2 pages."),
    "a-ring-row-of-two": Fault(with_request(TWO, slot=1), "ring row 1 of request 2 has 2 owners."),
    # pages
    "a-leaked-page": Fault(
        replace(GOOD, free_pages=GOOD.free_pages - {4}),
        "page 4 should be free or held; it is leaked.",
    ),
    "a-leaked-page-of-a-request-gone": Fault(
        without(THREE), "page 10 should be free or held; it is leaked."
    ),
    "a-held-page-is-free": Fault(
        replace(GOOD, free_pages=GOOD.free_pages | {7}),
        "page 7 should be free or held; it is both.",
    ),
    "a-cached-page-is-free": Fault(
        replace(GOOD, free_pages=GOOD.free_pages | {9}),
        "page 9 should be free or held; it is both.",
    ),
    "page-0-owned": Fault(
        with_request(THREE, pages=(10, 0)), "page 0 is held or free but lies outside 1 to 12."
    ),
    "page-0-cached": Fault(
        with_node(3, pages=(0,)), "page 0 is held or free but lies outside 1 to 12."
    ),
    "page-0-free": Fault(
        replace(GOOD, free_pages=GOOD.free_pages | {0}),
        "page 0 is held or free but lies outside 1 to 12.",
    ),
    "a-page-beyond-the-pool": Fault(
        with_request(THREE, pages=(10, 13)), "page 13 is held or free but lies outside 1 to 12."
    ),
    "a-reference-too-few": Fault(
        with_ref_count(3, 2), "page 3 should have 3 references; it has 2."
    ),
    "a-reference-too-many": Fault(
        with_ref_count(9, 2), "page 9 should have 1 references; it has 2."
    ),
    "a-reference-to-a-free-page": Fault(
        with_ref_count(4, 1), "page 4 should have 0 references; it has 1."
    ),
    # locks
    "a-lock-too-few": Fault(
        with_node(1, locks=1),
        "node 1 should have 2 locks, one for each request that reads it; it has 1.",
    ),
    "a-lock-too-many": Fault(
        with_node(3, locks=1),
        "node 3 should have 0 locks, one for each request that reads it; it has 1.",
    ),
    "a-lock-not-handed-to-the-parent": Fault(
        with_node(1, locks=0), "node 2 has 1 locks but its parent 1 only 0."
    ),
    # tree
    "an-edge-of-part-of-a-page": Fault(
        with_node(3, tokens=(7, 7, 7)),
        "node 3 should spell whole pages of 4 tokens; it has 3 tokens and 1 pages.",
    ),
    "an-edge-of-no-page": Fault(
        with_node(3, tokens=(), pages=(), checkpoints={}),
        "node 3 should spell whole pages of 4 tokens; it has 0 tokens and 0 pages.",
    ),
    "an-unknown-parent": Fault(
        with_node(3, parent=8), "node 3 should hang on a cached node; its parent is 8."
    ),
    "a-node-above-itself": Fault(
        with_node(1, parent=2), "node 1 should hang on a cached node; its parent is 2."
    ),
    "two-children-with-one-head": Fault(
        with_node(3, tokens=(8, 9, 8, 9)), "node 3 and node 2 begin with the same page of tokens."
    ),
    # checkpoints and states
    "a-checkpoint-past-its-edge": Fault(
        with_node(2, checkpoints={16: 3}),
        "node 2 covers positions 8 to 12 in pages of 4, but has a checkpoint at 16.",
    ),
    "a-checkpoint-left-on-the-parent's-depth": Fault(
        with_node(2, checkpoints={8: 3}),
        "node 2 covers positions 8 to 12 in pages of 4, but has a checkpoint at 8.",
    ),
    "a-checkpoint-inside-a-page": Fault(
        with_node(2, checkpoints={10: 3}),
        "node 2 covers positions 8 to 12 in pages of 4, but has a checkpoint at 10.",
    ),
    "a-missing-checkpoint": Fault(
        with_node(2, checkpoints={}), "state slot 3 should be free or held; it is leaked."
    ),
    "a-missing-checkpoint-of-a-request": Fault(
        with_request(THREE, checkpoints={}), "state slot 8 should be free or held; it is leaked."
    ),
    "a-checkpoint-in-a-running-state": Fault(
        with_node(2, checkpoints={12: 5}), "state slot 5 should have one owner; it has 2."
    ),
    "a-running-state-of-two": Fault(
        with_request(TWO, state_slot=5), "state slot 5 should have one owner; it has 2."
    ),
    "a-request's-checkpoint-is-its-state": Fault(
        with_request(THREE, checkpoints={4: 7}), "state slot 7 should have one owner; it has 2."
    ),
    "a-held-state-is-free": Fault(
        replace(GOOD, free_states=GOOD.free_states | {6}),
        "state slot 6 should be free or held; it is both.",
    ),
    "state-0-owned": Fault(
        with_request(TWO, state_slot=0), "state slot 0 is held or free but lies outside 1 to 10."
    ),
    "a-stale-state": Fault(
        with_request(ONE, state_position=12),
        "the state of request 1 should stand for 14 positions; it stands for 12.",
    ),
    "a-state-of-drafts-not-accepted": Fault(
        with_request(TWO, state_position=12),
        "the state of request 2 should stand for 9 positions; it stands for 12.",
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_each_corruption_is_named(fault: Fault) -> None:
    found = judge(fault.snapshot)
    assert fault.sentence in found
    assert all(re.fullmatch(r"[^.\n]+\.", sentence) for sentence in found), found


EXHAUSTIVE: dict[str, tuple[range, Callable[[int], Snapshot]]] = {
    "free-page": (
        range(PAGES + 1),
        lambda i: replace(GOOD, free_pages=GOOD.free_pages ^ {i}),
    ),
    "free-state": (
        range(STATES + 1),
        lambda i: replace(GOOD, free_states=GOOD.free_states ^ {i}),
    ),
    "reference-more": (
        range(PAGES + 1),
        lambda i: with_ref_count(i, GOOD.ref_counts.get(LogicalPage(i), 0) + 1),
    ),
    "reference-less": (
        range(PAGES + 1),
        lambda i: with_ref_count(i, GOOD.ref_counts.get(LogicalPage(i), 0) - 1),
    ),
}


@pytest.mark.parametrize("kind", EXHAUSTIVE)
def test_no_single_flip_goes_unnoticed(kind: str) -> None:
    """Every page and slot, those outside of the pool too."""
    ids, corrupt = EXHAUSTIVE[kind]
    what = "state slot" if kind == "free-state" else "page"
    for i in ids:
        found = judge(corrupt(i))
        assert any(f"{what} {i} " in sentence for sentence in found), (i, found)


@pytest.mark.parametrize("request_id", [ONE, TWO, THREE])
def test_no_wrong_page_in_a_table_goes_unnoticed(request_id: RequestId) -> None:
    """Each entry, replaced by each other page of the pool, padding included."""
    pages = GOOD.requests[request_id].pages
    for ordinal, right in enumerate(pages):
        for wrong in set(range(PAGES)) - {right}:
            table = (*pages[:ordinal], wrong, *pages[ordinal + 1 :])
            assert judge(with_request(request_id, pages=table)), (ordinal, wrong)


def test_a_page_has_a_writer_only_while_one_request_alone_holds_it() -> None:
    assert prefix.writer_of(GOOD) == {7: ONE, 11: TWO, 10: THREE, 12: THREE}
    assert prefix.writer_of(EMPTY) == {}
    # as soon as a second request or the tree holds it, nobody may write it
    assert 7 not in prefix.writer_of(with_request(TWO, pages=(3, 5, 7)))
    assert 7 not in prefix.writer_of(with_node(3, pages=(7,)))


@pytest.mark.parametrize("pages", [0, 1])
def test_an_empty_pool_has_nothing_to_judge(pages: int) -> None:
    nothing = replace(EMPTY, free_pages=frozenset(), free_states=frozenset())
    assert prefix.judge_snapshot(nothing, GEOMETRY, pages=pages, state_slots=1) == []
