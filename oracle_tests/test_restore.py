"""Backing up, evicting and restoring prefixes: all parts or none, whichever copy fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.contract import Component, HostTier, InvalidCall, TieredPrefix, TierSnapshot
from reference.geometry import Geometry, ModelShape
from reference.restore import (
    MISS,
    Part,
    Prefix,
    Standing,
    Step,
    Tier,
    Tiers,
    judge_bystander,
    judge_outcome,
    judge_prefix,
    judge_tier,
    legal_outcomes,
    parts_of,
    use,
)

GEOMETRY = Geometry(kpool=2, physical_page_size=2, topk=2, mamba_track_interval=4)
SHAPE = ModelShape(layers=4, dsa_period=2)
DEVICE, HOST, BOTH = frozenset({Tier.DEVICE}), frozenset({Tier.HOST}), frozenset(Tier)
STANDINGS = [MISS, DEVICE, HOST, BOTH]
PATH = (7, 7, 8, 9)
"""One logical page of tokens: 4 KV rows and 2 index rows in 2 layers, and 2 states."""


class CopyFailed(Exception):
    """The injected fault."""


def rows_of(tokens: tuple[int, ...]) -> dict[Part, bytes]:
    """Rows that name their writer: the tokens up to them, and the part."""
    return {
        part: f"{tokens} {part.component} {part.layer} {part.row}".encode()
        for part in parts_of(len(tokens), GEOMETRY, SHAPE)
    }


def intact(part: Part, row: bytes) -> bytes:
    return row


def failing_at(count: int) -> Callable[[Part, bytes], bytes]:
    """A copy that moves `count` parts and then fails."""
    left = iter(range(count))

    def copy(part: Part, row: bytes) -> bytes:
        if next(left, None) is None:
            raise CopyFailed
        return row

    return copy


def tiers_at(standing: Standing, *, locked: bool = False) -> Tiers[bytes]:
    """A store whose one prefix stands like that."""
    tiers = Tiers[bytes](GEOMETRY, SHAPE)
    if standing:
        tiers.insert(PATH, rows_of(PATH))
    if Tier.HOST in standing:
        tiers.step(Step.BACK_UP, PATH, intact)
    if Tier.DEVICE not in standing:
        tiers.step(Step.EVICT, PATH, intact)
    if locked:
        tiers.locks.add(PATH)
    return tiers


def test_the_parts_of_a_prefix() -> None:
    parts = parts_of(8, GEOMETRY, SHAPE)
    kv = {(layer, row) for layer in (0, 1) for row in range(8)}
    assert {(p.layer, p.row) for p in parts if p.component is Component.KV} == kv
    index = {(layer, row) for layer in (0, 1) for row in range(4)}
    assert {(p.layer, p.row) for p in parts if p.component is Component.INDEX} == index
    assert {p for p in parts if p.component is Component.STATE} == {
        Part(Component.STATE, 0, 8),
        Part(Component.STATE, 1, 8),
    }
    assert len(parts) == 2 * 8 + 2 * 4 + 2


@pytest.mark.parametrize("length", [0, 3, 6, 9])
def test_a_prefix_that_ends_inside_a_page_cannot_be_cached(length: int) -> None:
    with pytest.raises(InvalidCall, match="cut it at a multiple of 4"):
        parts_of(length, GEOMETRY, SHAPE)


@pytest.mark.parametrize(
    ("step", "after"),
    [
        (Step.BACK_UP, [MISS, BOTH, HOST, BOTH]),
        (Step.RESTORE, [MISS, DEVICE, BOTH, BOTH]),
        (Step.EVICT, [MISS, MISS, HOST, HOST]),
        (Step.DROP, [MISS, DEVICE, MISS, DEVICE]),
    ],
)
def test_what_each_step_leaves(step: Step, after: list[Standing]) -> None:
    """From standing nowhere, on the device, on the host, on both."""
    for before, done in zip(STANDINGS, after, strict=True):
        assert legal_outcomes(step, before) == {done}
        assert legal_outcomes(step, before, failed=True) == {before, before - {step.tier}}
        tiers = tiers_at(before)
        assert tiers.step(step, PATH, intact) == (before != done)
        assert tiers.standing(PATH) == done


@pytest.mark.parametrize("step", list(Step))
@pytest.mark.parametrize("failed", [False, True])
def test_a_reader_keeps_the_device_copy(step: Step, failed: bool) -> None:
    for before in (DEVICE, BOTH):
        outcomes = legal_outcomes(step, before, failed=failed, locked=True)
        assert outcomes
        assert all(Tier.DEVICE in outcome for outcome in outcomes)
        tiers = tiers_at(before, locked=True)
        tiers.step(step, PATH, intact)
        assert not judge_outcome(step, before, tiers.standing(PATH), locked=True)


@pytest.mark.parametrize(("step", "before"), [(Step.BACK_UP, DEVICE), (Step.RESTORE, HOST)])
def test_a_failure_at_any_copy_leaves_what_was(step: Step, before: Standing) -> None:
    parts = len(parts_of(4, GEOMETRY, SHAPE))
    for count in range(parts):
        tiers = tiers_at(before)
        with pytest.raises(CopyFailed):
            tiers.step(step, PATH, failing_at(count))
        after = tiers.standing(PATH)
        assert after == before
        assert not judge_outcome(step, before, after, failed=True)
    tiers = tiers_at(before)
    assert tiers.step(step, PATH, failing_at(parts))
    assert tiers.stored == {tier: {PATH: rows_of(PATH)} for tier in Tier}


@pytest.mark.parametrize("step", [Step.BACK_UP, Step.RESTORE])
def test_what_is_there_already_is_not_copied_again(step: Step) -> None:
    assert not tiers_at(BOTH).step(step, PATH, failing_at(0))


PATHS = [(0,) * 4, (0,) * 8, (0,) * 4 + (1,) * 4, (1,) * 4]
"""Prefixes of one or two pages, three of which begin with the same page."""


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([*Step, "insert", "lock"]),
            st.sampled_from(PATHS),
            st.one_of(st.none(), st.integers(0, 25)),
        ),
        max_size=25,
    )
)
def test_no_sequence_makes_half_a_hit(
    steps: list[tuple[Step | str, tuple[int, ...], int | None]],
) -> None:
    """Against a set of (tier, prefix), with copies that fail anywhere."""
    tiers = Tiers[bytes](GEOMETRY, SHAPE)
    whole: set[tuple[Tier, tuple[int, ...]]] = set()
    for step, path, fail_at in steps:
        if step == "insert":
            tiers.insert(path, rows_of(path))
            whole.add((Tier.DEVICE, path))
        elif step == "lock":
            tiers.locks ^= {path}
        else:
            before = {p: tiers.standing(p) for p in PATHS}
            failed = False
            try:
                copy = intact if fail_at is None else failing_at(fail_at)
                tiers.step(Step(step), path, copy)
            except CopyFailed:
                failed = True
            else:
                follow(whole, Step(step), path, locked=path in tiers.locks)
            for p in PATHS:
                after, locked = tiers.standing(p), p in tiers.locks
                assert not (
                    judge_outcome(Step(step), before[p], after, failed=failed, locked=locked)
                    if p == path
                    else judge_bystander(Step(step), before[p], after, locked=locked)
                )
        for p, tier in product(PATHS, Tier):
            hit = tiers.hit((*p, 5), tier)
            assert hit == max(
                (len(q) for t, q in whole if t is tier and p[: len(q)] == q), default=0
            )
            if hit:
                held = tiers.stored[tier][p[:hit]]
                assert not judge_prefix(hit, held, rows_of(p[:hit]), GEOMETRY, SHAPE)


def follow(
    whole: set[tuple[Tier, tuple[int, ...]]], step: Step, path: tuple[int, ...], *, locked: bool
) -> None:
    """A step that did not fail, on the set."""
    if step is Step.BACK_UP and (Tier.DEVICE, path) in whole:
        whole.add((Tier.HOST, path))
    elif step is Step.RESTORE and (Tier.HOST, path) in whole:
        whole.add((Tier.DEVICE, path))
    elif step is Step.EVICT and not locked:
        whole.discard((Tier.DEVICE, path))
    elif step is Step.DROP:
        whole.discard((Tier.HOST, path))


def test_a_hit_leaves_a_token_to_compute() -> None:
    tiers = tiers_at(BOTH)
    assert [tiers.hit(PATH), tiers.hit((*PATH, 1)), tiers.hit((*PATH[:3], 1, 1))] == [0, 4, 0]


def test_an_incomplete_prefix_is_not_inserted() -> None:
    rows = rows_of(PATH)
    del rows[Part(Component.INDEX, 1, 0)]
    with pytest.raises(InvalidCall, match="insert all"):
        Tiers[bytes](GEOMETRY, SHAPE).insert(PATH, rows)


def test_every_part_left_behind_is_half_a_hit() -> None:
    truth = rows_of(PATH)
    for part in truth:
        stored = {other: row for other, row in truth.items() if other != part}
        assert judge_prefix(4, stored, truth, GEOMETRY, SHAPE) == [
            f"a prefix of 4 positions should have all its parts; {part.component} rows "
            f"[{part.row}] of layer {part.layer} are missing: half a hit."
        ]
    no_index = {part: row for part, row in truth.items() if part.component is not Component.INDEX}
    found = judge_prefix(4, no_index, truth, GEOMETRY, SHAPE)
    assert [s.split(";")[1] for s in found] == [
        f" index rows [0, 1] of layer {layer} are missing: half a hit." for layer in (0, 1)
    ]


def test_every_part_that_differs_is_named() -> None:
    """Keys restored without their scales, or another prefix's rows."""
    truth = rows_of(PATH)
    for part, row in truth.items():
        found = judge_prefix(4, {**truth, part: row[:-1]}, truth, GEOMETRY, SHAPE)
        assert found == [
            f"{part.component} row {part.row} of layer {part.layer} should be as it was written; "
            "it differs, in a prefix of 4 positions."
        ]


def test_a_copy_in_place_is_caught_at_every_failure_but_the_first() -> None:
    """The control of the all-or-none rule: parts put in place one by one, then a failure."""
    truth = rows_of(PATH)
    for count in range(len(truth) + 1):
        placed = dict(list(truth.items())[:count])
        assert bool(judge_prefix(4, placed, truth, GEOMETRY, SHAPE)) == (count < len(truth))


def test_an_illegal_outcome_is_named() -> None:
    assert judge_outcome(Step.RESTORE, HOST, DEVICE) == [
        "after a restore the prefix, which stood on host, should stand on device and host; it "
        "stands on device."
    ]
    assert judge_outcome(Step.RESTORE, HOST, BOTH, failed=True) == [
        "after a failed restore the prefix, which stood on host, should stand on host; it stands "
        "on device and host."
    ]
    assert judge_outcome(Step.BACK_UP, DEVICE, MISS, failed=True) == [
        "after a failed back_up the prefix, which stood on device, should stand on device; it "
        "stands on neither tier."
    ]
    assert judge_outcome(Step.BACK_UP, DEVICE, MISS, failed=True, locked=True)
    assert judge_outcome(Step.EVICT, DEVICE, DEVICE)
    for step, before in product(Step, STANDINGS):
        legal = legal_outcomes(step, before)
        assert [not judge_outcome(step, before, after) for after in STANDINGS] == [
            after in legal for after in STANDINGS
        ]


@pytest.mark.parametrize(
    ("step", "before", "after", "locked", "sentence"),
    [
        (Step.RESTORE, BOTH, BOTH, False, None),
        (Step.RESTORE, BOTH, HOST, False, None),
        (Step.RESTORE, DEVICE, MISS, False, None),
        (Step.RESTORE, BOTH, HOST, True, "a locked prefix should keep its device copy"),
        (Step.RESTORE, BOTH, DEVICE, False, "makes room on device alone; .* gone from host"),
        (Step.BACK_UP, BOTH, DEVICE, True, None),
        (Step.BACK_UP, BOTH, HOST, False, "makes room on host alone; .* gone from device"),
        (Step.BACK_UP, DEVICE, BOTH, False, "stood on device should not appear on host"),
        (Step.RESTORE, HOST, BOTH, False, "stood on host should not appear on device"),
        (Step.RESTORE, MISS, DEVICE, False, "stood on neither tier should not appear on device"),
    ],
)
def test_what_may_happen_to_another_prefix(
    step: Step, before: Standing, after: Standing, locked: bool, sentence: str | None
) -> None:
    found = judge_bystander(step, before, after, locked=locked)
    assert [bool(re.search(sentence or "", s)) for s in found] == [True] * (sentence is not None)


ROOM = HostTier(pages=3, states=2)
A, AB, AC, B = PATHS[0], PATHS[1], PATHS[2], PATHS[3]


@pytest.mark.parametrize(
    ("held", "used", "stay"),
    [
        ([], A, [A]),
        ([A, B], A, [B, A]),
        ([A, B], AB, [B, AB]),
        ([B, AB], AC, [AB, AC]),
        ([AB, AC], B, [AC, B]),
        ([B, A], (2,) * 8, [A, (2,) * 8]),
        ([AB, B], (2,) * 12, [(2,) * 12]),
        ([AB, B], (2,) * 16, [AB, B]),
    ],
)
def test_what_a_tier_holds_after_a_use(
    held: list[Prefix], used: Prefix, stay: list[Prefix]
) -> None:
    """Three pages and two states, each page once: the oldest go, and no more than have to."""
    assert use(held, used, ROOM, GEOMETRY) == stay
    assert use(held, used, replace(ROOM, states=0), GEOMETRY) == held


def holds(*prefixes: tuple[Prefix, tuple[int, ...], int], **free: Iterable[int]) -> TierSnapshot:
    """A tier with these prefixes, and their pages and states."""
    return TierSnapshot(
        prefixes=tuple(TieredPrefix(tokens=t, pages=p, state=s) for t, p, s in prefixes),
        free_pages=frozenset(free.get("pages", ())),
        free_states=frozenset(free.get("states", ())),
    )


@pytest.mark.parametrize(
    ("tier", "sentences"),
    [
        (holds((AB, (5, 6), 0), (A, (5,), 1), pages=[7]), []),
        (holds(pages=[5, 6, 7], states=[0, 1]), []),
        (
            holds((AB, (5, 6), 0), (A, (7,), 1)),
            ["pages 5 and 7 of the tier hold the same: .* should share"],
        ),
        (
            holds((A, (5,), 0), (B, (5,), 1), pages=[6, 7]),
            ["page 5 of the tier should stand for one beginning, not two"],
        ),
        (
            holds((AB, (5,), 0), pages=[6, 7], states=[1]),
            ["a prefix of 8 tokens should have 2 pages of the tier; it has 1"],
        ),
        (
            holds((A, (5,), 0), (B, (6,), 0), pages=[7], states=[1]),
            ["state 0 of the tier should have one owner; it has 2"],
        ),
        (
            holds((A, (5,), 0), pages=[6], states=[1]),
            ["3 pages of the tier should be free or held; 2 are"],
        ),
        (
            holds((A, (5,), 0), pages=[5, 6, 7], states=[0, 1]),
            [r"pages \[5\] of the tier are held and free", r"states \[0\] of the tier are held"],
        ),
    ],
)
def test_what_a_tier_may_look_like(tier: TierSnapshot, sentences: list[str]) -> None:
    found = judge_tier(tier, ROOM, GEOMETRY)
    assert len(found) == len(sentences)
    assert all(re.search(want, said) for want, said in zip(sentences, found, strict=True))
