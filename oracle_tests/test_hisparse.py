"""HiSparse's residency against a brute-force cache that keeps rows and times of use.

The cache below knows no tags and no LRU list: it looks rows up by content, and takes one victim
at a time, the one used longest ago.  Tiny geometries are walked through exhaustively.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.contract import InvalidCall
from reference.geometry import Geometry, GeometryError
from reference.hisparse import (
    EMPTY,
    HotBuffer,
    Residency,
    Saved,
    SwapIn,
    Wrote,
    judge_backup,
    judge_buffer,
    judge_overwrites,
    judge_resident,
)

SHAPES = [(kpool, groups) for kpool in (1, 2, 3, 4) for groups in (1, 2)]
"""(kpool, groups selected) of the tiny geometries that are walked through."""


def bound(kpool: int, groups: int) -> int:
    """The least size of a hot buffer: topk plus the longest tail less the newest position."""
    return kpool * groups + max(0, kpool - 2)


def selections(length: int, kpool: int, groups: int) -> Iterator[tuple[int, ...]]:
    """Every selection that the last of `length` positions can make: any groups, then the tail."""
    closed = length // kpool
    tail = range(closed * kpool, length)
    for chosen in combinations(range(closed), min(groups, closed)):
        yield (*(j * kpool + s for j in chosen for s in range(kpool)), *tail)


class BruteForce:
    """Slots that hold rows, and when each was last of use: (step, hit after load, rank)."""

    def __init__(self, size: int, length: int) -> None:
        self.size, self.step = size, 0
        self.rows: list[str | None] = [None] * (size + 1)
        self.used = [(0, 0, slot) for slot in range(size)]
        for position in range(min(length, size)):
            self.rows[position] = f"row {position}"
        self.write_newest(length)

    @classmethod
    def at(cls, tags: Sequence[int], lru: Sequence[int], length: int) -> BruteForce:
        cache = cls(len(tags), length)
        cache.rows[:-1] = [f"row {tag}" for tag in tags]
        cache.used = [(0, 0, lru.index(slot)) for slot in range(len(tags))]
        return cache

    def write_newest(self, length: int) -> None:
        slot = length - 1 if length <= self.size else self.size
        self.rows[slot] = f"row {length - 1}"

    def look_up(self, selection: Sequence[int], length: int, host: Collection[int]) -> SwapIn:
        if length <= self.size:
            inside = (p if p in range(length) else EMPTY for p in selection)
            return SwapIn(slots=tuple(inside))
        self.step += 1
        wanted = {f"row {p}" for p in selection if p in range(length)}
        ranked = sorted(range(self.size), key=self.used.__getitem__)
        hits = [slot for slot in ranked if self.rows[slot] in wanted]
        slots: list[int] = []
        misses: list[tuple[int, int]] = []
        absent: list[int] = []
        for p in selection:
            if p not in range(length):
                slots.append(EMPTY)
            elif f"row {p}" in self.rows:
                slots.append(len(self.rows) - 1 - self.rows[::-1].index(f"row {p}"))
            elif p not in host:
                slots.append(EMPTY)
                absent += [p] * (p not in absent)
            else:
                idle = [slot for slot in range(self.size) if self.rows[slot] not in wanted]
                victim = min(idle, key=self.used.__getitem__)
                self.rows[victim] = f"row {p}"
                self.used[victim] = (self.step, 0, len(misses))
                misses.append((p, victim))
                slots.append(victim)
        for rank, slot in enumerate(hits):
            self.used[slot] = (self.step, 1, rank)
        return SwapIn(slots=tuple(slots), misses=tuple(misses), absent=tuple(absent))

    def tags(self) -> list[int]:
        return [EMPTY if row is None else int(row.split()[1]) for row in self.rows[: self.size]]

    def lru(self) -> list[int]:
        return sorted(range(self.size), key=self.used.__getitem__)


Stream = tuple[int, int, list[tuple[bool, list[int], frozenset[int]]]]
"""Size, prompt length, and for each step: whether it appends, its selection, absent positions."""


SwapInRule = Callable[[HotBuffer, Sequence[int], int, Container[int]], SwapIn]


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    size = draw(st.integers(1, 6))
    length = draw(st.integers(1, 2 * size + 2))
    cell = st.integers(-2, length + 8)
    steps = st.tuples(st.booleans(), st.lists(cell, max_size=9), st.frozensets(cell, max_size=2))
    return size, length, draw(st.lists(steps, min_size=1, max_size=8))


def fitting(selection: Sequence[int], length: int, size: int) -> list[int]:
    """The selection up to the first cell that asks for one position too many."""
    older: set[int] = set()
    kept: list[int] = []
    for p in selection:
        older |= {p} & set(range(length - 1))
        if len(older) > size:
            break
        kept.append(p)
    return kept


def differs(stream: Stream, swap_in: SwapInRule = HotBuffer.swap_in) -> bool:
    """Whether the model and the brute force part ways anywhere in a stream."""
    size, length, steps = stream
    model, brute = HotBuffer(size), BruteForce(size, length)
    model.admit(length)
    for appends, cells, absent in steps:
        if appends:
            length += 1
            model.grow(length)
            brute.write_newest(length)
        selection = fitting(cells, length, size)
        host = set(range(length)) - absent
        same = swap_in(model, selection, length, host) == brute.look_up(selection, length, host)
        if not same or model.tags != brute.tags() or model.lru != brute.lru():
            return True
    return False


@settings(max_examples=600, deadline=None)
@given(streams())
def test_swap_in_is_that_of_brute_force(stream: Stream) -> None:
    assert not differs(stream)


def evicts_the_most_recent(buffer: HotBuffer, *call: Any) -> SwapIn:
    buffer.lru.reverse()
    return buffer.swap_in(*call)


def puts_loads_behind_hits(buffer: HotBuffer, *call: Any) -> SwapIn:
    plan = buffer.swap_in(*call)
    loaded = [slot for _, slot in plan.misses]
    buffer.lru = [slot for slot in buffer.lru if slot not in loaded] + loaded
    return plan


def keeps_the_old_tags(buffer: HotBuffer, *call: Any) -> SwapIn:
    tags = list(buffer.tags)
    plan = buffer.swap_in(*call)
    buffer.tags = tags
    return plan


def takes_length_for_the_newest(
    buffer: HotBuffer, selection: Sequence[int], length: int, host: Container[int]
) -> SwapIn:
    return buffer.swap_in(selection, length + 1, host)


@pytest.mark.parametrize(
    "fault",
    [
        evicts_the_most_recent,
        puts_loads_behind_hits,
        keeps_the_old_tags,
        takes_length_for_the_newest,
    ],
)
def test_brute_force_finds_what(fault: SwapInRule) -> None:
    """Two misses, then steps that depend on each of tags, order and newest."""
    whole = frozenset[int]()
    steps = [(False, [4, 0, 7], whole), (True, [5, 8, 1], whole), (True, [2, 6, 9], whole)]
    assert not differs((4, 8, steps))
    assert differs((4, 8, steps), fault)


def test_a_swap_in_worked_by_hand() -> None:
    buffer = HotBuffer(4)
    buffer.admit(6)
    assert buffer.swap_in([4, 0, 5, -1, 4, 9], 6, range(6)) == SwapIn(
        slots=(1, 0, 4, -1, 1, -1), misses=((4, 1),)
    )
    assert (buffer.tags, buffer.lru) == ([0, 4, 2, 3], [2, 3, 1, 0])
    assert buffer.grow(7) == 4
    assert buffer.swap_in([5, 1, 2], 7, range(7)).misses == ((5, 3), (1, 1))
    assert (buffer.tags, buffer.lru) == ([0, 1, 2, 5], [0, 3, 1, 2])
    assert buffer.swap_in([3, 4], 7, {0, 1, 2, 4}) == SwapIn(
        slots=(-1, 0), misses=((4, 0),), absent=(3,)
    )
    buffer.release()
    assert (buffer.tags, buffer.lru) == ([-1] * 4, [0, 1, 2, 3])


def test_nothing_is_copied_while_the_request_fits() -> None:
    buffer = HotBuffer(4)
    buffer.admit(2)
    assert buffer.tags == [0, 1, -1, -1]
    assert [buffer.grow(3), buffer.grow(4)] == [2, 3]
    assert buffer.swap_in([3, 0, 4, 0, -1], 4, ()) == SwapIn(slots=(3, 0, -1, 0, -1))
    assert buffer.grow(5) == 4
    assert (buffer.tags, buffer.lru) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert buffer.resident(5) == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}


def walk(kpool: int, groups: int, size: int) -> int:
    """Decode from every admission past `size` through every selection of eight steps; returns
    the most slots that one selection needed."""
    states: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    most = 0
    for length in range(size + 1, size + 9):
        fresh = HotBuffer(size)
        fresh.admit(length)
        states.add((tuple(fresh.tags), tuple(fresh.lru)))
        after = set()
        for (tags, lru), selection in product(states, [*selections(length, kpool, groups)]):
            buffer = HotBuffer(size)
            buffer.tags, buffer.lru = list(tags), list(lru)
            brute = BruteForce.at(tags, lru, length)
            plan = buffer.swap_in(selection, length, range(length))
            assert plan == brute.look_up(selection, length, range(length))
            assert (buffer.tags, buffer.lru) == (brute.tags(), brute.lru())
            assert not judge_buffer(buffer.tags, buffer.lru, length)
            most = max(most, len(set(plan.slots) - {size}))
            after.add((tuple(buffer.tags), tuple(buffer.lru)))
        states = after
    return most


@pytest.mark.parametrize(("kpool", "groups"), SHAPES)
def test_at_the_bound_every_selection_finds_its_slots(kpool: int, groups: int) -> None:
    """And some selection needs them all, so that the bound is tight."""
    assert walk(kpool, groups, bound(kpool, groups)) == bound(kpool, groups)


@pytest.mark.parametrize(("kpool", "groups"), SHAPES)
def test_one_slot_below_the_bound_is_impossible(kpool: int, groups: int) -> None:
    with pytest.raises(InvalidCall, match="enlarge the hot buffer"):
        walk(kpool, groups, bound(kpool, groups) - 1)
    tiny = Geometry(
        kpool=kpool,
        physical_page_size=kpool,
        topk=kpool * groups,
        mamba_track_interval=kpool * kpool,
        device_buffer_size=bound(kpool, groups),
    )
    with pytest.raises(GeometryError, match="leaves no row to evict"):
        replace(tiny, device_buffer_size=bound(kpool, groups) - 1)


def judged(request: Residency, layer: int) -> list[str]:
    """All that the judges say of one layer of a request, its rows being positions."""
    buffer = request.buffers[request.leaders[layer]]
    truth = range(request.length)
    host = {position: position for position in request.backed_up}
    return [
        *judge_buffer(buffer.tags, buffer.lru, request.length),
        *judge_resident(buffer.resident(request.length), request.held[layer], truth),
        *judge_backup(host, truth),
    ]


LEADERS = (0, 0, 2, 0, 2)


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(0, 3), st.integers(1, 20), st.data())
def test_every_layer_reads_the_rows_that_were_selected(
    shape: tuple[int, int], spare: int, length: int, data: st.DataObject
) -> None:
    request = Residency(bound(*shape) + spare, LEADERS)
    request.admit(length)
    events: list[Wrote | Saved] = [Saved(position) for position in range(length)]
    events += [Wrote(slot, p) for slot, p in enumerate(request.held[0]) if p != EMPTY]
    for _ in range(data.draw(st.integers(1, 8))):
        request.start_backup()
        request.finish_backup()
        events.append(Saved(request.length - 1))
        events.append(Wrote(request.append(), request.length - 1))
        choices = list(selections(request.length, *shape))
        chosen: dict[int, tuple[int, ...]] = {}
        for layer, leader in enumerate(LEADERS):
            if layer == leader:
                chosen[layer] = data.draw(st.sampled_from(choices))
                plan = request.swap_in(layer, chosen[layer])
                assert not plan.absent
            else:
                plan = request.replay(layer)
            if layer == 0:
                events += [Wrote(slot, position) for position, slot in plan.misses]
            read = [request.held[layer][slot] for slot in plan.slots]
            assert read == list(chosen[leader])
            assert not judged(request, layer)
    assert not judge_overwrites(events)


def decoding() -> Residency:
    """Five positions in a buffer of three slots, the last one just written."""
    request = Residency(3, LEADERS)
    request.admit(4)
    request.append()
    return request


def test_the_newest_row_is_not_written_again_before_its_backup_ends() -> None:
    request = decoding()
    with pytest.raises(InvalidCall, match="finish its backup"):
        request.append()
    request.start_backup()
    with pytest.raises(InvalidCall, match="finish its backup"):
        request.append()
    with pytest.raises(InvalidCall, match="still reads its row"):
        request.release()
    request.finish_backup()
    assert request.append() == 3
    assert request.backed_up == {0, 1, 2, 3, 4}
    request.release()
    assert request.length == 0
    assert request.held == [[EMPTY] * 4] * 5
    assert request.append() == 0


def test_a_follower_replays_every_plan_once() -> None:
    request = decoding()
    with pytest.raises(InvalidCall, match="index of layer 0"):
        request.swap_in(1, [0])
    with pytest.raises(InvalidCall, match="nothing to replay"):
        request.replay(1)
    plan = request.swap_in(0, [3, 4])
    assert any("slot 0 should hold position 3; it holds 0" in s for s in judged(request, 1))
    with pytest.raises(InvalidCall, match=r"layers \[1, 3\] have not replayed"):
        request.swap_in(0, [1])
    assert request.swap_in(2, [0]).misses == ()
    assert [request.replay(1), request.replay(3)] == [plan, plan]
    assert not judged(request, 1)
    request.start_backup()
    request.finish_backup()
    with pytest.raises(InvalidCall, match=r"layers \[4\] have not replayed"):
        request.append()


def test_too_many_positions_are_refused_and_change_nothing() -> None:
    buffer = HotBuffer(2)
    buffer.admit(5)
    with pytest.raises(
        InvalidCall, match="2 selected positions are to be loaded, but only 1 of 2 slots"
    ):
        buffer.swap_in([0, 2, 3], 5, range(5))
    assert (buffer.tags, buffer.lru) == ([0, 1], [0, 1])
    assert buffer.swap_in([0, 2, 3], 5, {0, 1, 2}).absent == (3,)


@pytest.mark.parametrize(
    ("tags", "lru", "length", "says"),
    [
        ([0, 1, 2], [0, 1, 1], 5, "each of 3 slots once"),
        ([0, 1, 1], [0, 1, 2], 5, "position 1 should be in one slot; it is in 2"),
        ([0, 1, 4], [0, 1, 2], 5, "tags should lie in 0 to 3; one is 4"),
        ([0, 1, -1], [0, 1, 2], 5, "one is -1"),
        ([0, 1, 2], [0, 1, 2], 2, "the tags should be [0, 1, -1]"),
        ([0, 1, -1], [0, 2, 1], 2, "nothing was evicted"),
        ([0, -1, -1], [0, 1, 2], 0, "the tags should be [-1, -1, -1]"),
    ],
)
def test_judge_buffer_names(tags: list[int], lru: list[int], length: int, says: str) -> None:
    (found,) = judge_buffer(tags, lru, length)
    assert says in found


def test_judge_resident_names_the_intruder() -> None:
    truth = [b"a", b"b", b"c", b"d"]
    assert judge_resident({0: 0, 2: 1, 3: 2}, [b"a", b"b", b"\xff"], truth) == [
        "slot 1 should hold position 2; it holds 1.",
        "slot 2 should hold position 3; it holds no position of this request.",
    ]


def test_judge_backup_wants_all_but_the_newest() -> None:
    truth = [b"a", b"b", b"c"]
    assert not judge_backup({0: b"a", 1: b"b"}, truth)
    assert judge_backup({1: b"x"}, truth) == [
        "position 0 should be backed up; it has no host row.",
        "the host row of position 1 differs from the row that was written.",
    ]


def test_judge_overwrites_wants_the_backup_first() -> None:
    late: list[Wrote | Saved] = [Wrote(2, 7), Wrote(0, 3), Wrote(2, 8), Saved(7)]
    assert judge_overwrites(late) == [
        "slot 2 should keep position 7 until it is backed up; it was overwritten with position 8."
    ]
    fine: list[Wrote | Saved] = [Wrote(2, 7), Saved(7), Wrote(2, 8), Wrote(2, 8)]
    assert not judge_overwrites(fine)
    assert ["position 8" in s for s in judge_overwrites([*fine, Wrote(2, 9)])] == [True]
