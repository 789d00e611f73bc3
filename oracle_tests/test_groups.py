"""Collectives of ranks: in rank order, in whatever order they come, and never left waiting."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from optimized.groups import ALONE, GlooGroup, Group, RankLost, ThreadGroup
from oracle_tests import rank_processes

WAIT_S = 30.0


def in_threads(groups: Sequence[ThreadGroup], work: Callable[[ThreadGroup], Any]) -> list[Future]:
    """Start `work` for each rank in a thread, the last rank first."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return [pool.submit(work, group) for group in reversed(groups)][::-1]


def three_of_each(group: Group) -> list[Any]:
    """Some collectives of a rank, and what they gave."""
    out: list[Any] = []
    for turn in range(3):
        mine = torch.full((2, 2), float(10 * turn + group.rank))
        out.append([tensor.clone() for tensor in group.gather(mine)])
        values = np.array([group.rank, -group.rank, 7 + turn])
        out += [group.reduce_min(values), group.reduce_max(values)]
    return out


def expected(size: int) -> list[Any]:
    out: list[Any] = []
    for turn in range(3):
        out.append([torch.full((2, 2), float(10 * turn + rank)) for rank in range(size)])
        out += [np.array([0, 1 - size, 7 + turn]), np.array([size - 1, 0, 7 + turn])]
    return out


def must_be_expected(given: list[Any], size: int) -> None:
    for mine, theirs in zip(given, expected(size), strict=True):
        if isinstance(theirs, list):
            assert all(map(torch.equal, mine, theirs))
            assert len(mine) == size
        else:
            assert mine.dtype == np.int64
            assert mine.tolist() == theirs.tolist()


def test_one_rank_gets_back_what_it_brings() -> None:
    must_be_expected(three_of_each(ALONE), 1)
    values = np.array([1, 2])
    assert ALONE.reduce_min(values) is not values


@pytest.mark.parametrize("size", [1, 2, 4])
def test_threads_get_everything_in_rank_order(size: int) -> None:
    for answer in in_threads(ThreadGroup.of(size), three_of_each):
        must_be_expected(answer.result(WAIT_S), size)


def test_processes_get_everything_in_rank_order() -> None:
    for answer in rank_processes.run(2, three_of_each):
        must_be_expected(answer, 2)


def test_many_rounds_of_threads_never_mix() -> None:
    """The ranks are far apart in speed at times; a round still gives only what it was brought."""
    rounds = 2000

    def work(group: ThreadGroup) -> list[list[int]]:
        return [group.reduce_max(np.array([turn, -turn])).tolist() for turn in range(rounds)]

    for answer in in_threads(ThreadGroup.of(3), work):
        assert answer.result(WAIT_S) == [[turn, -turn] for turn in range(rounds)]


def test_what_a_rank_brought_may_be_overwritten_at_once() -> None:
    def work(group: ThreadGroup) -> list[int]:
        values, out = np.array([group.rank]), []
        for _ in range(200):
            out += group.reduce_max(values).tolist()
            values[0] = group.rank
        return out

    for answer in in_threads(ThreadGroup.of(2), work):
        assert answer.result(WAIT_S) == [1] * 200


def test_a_rank_that_leaves_is_named_to_those_who_wait() -> None:
    def work(group: ThreadGroup) -> None:
        group.reduce_min(np.array([0]))
        if group.rank == 1:
            group.leave()
        else:
            group.gather(torch.zeros(1))

    groups = ThreadGroup.of(3)
    answers = in_threads(groups, work)
    assert answers[1].exception(WAIT_S) is None
    for answer in (answers[0], answers[2]):
        with pytest.raises(RankLost, match=r"rank 1 .*of 3 left.*build the instance anew"):
            answer.result(WAIT_S)
    # the ranks stand in different places now: nothing makes up for that
    for group in groups:
        group.enter()
    for answer in in_threads(groups, three_of_each):
        with pytest.raises(RankLost):
            answer.result(WAIT_S)


def test_a_rank_that_ended_its_part_does_not_spoil_a_round_that_is_over() -> None:
    """It leaves before the others have even seen the round's result."""

    def work(group: ThreadGroup) -> int:
        result = group.reduce_max(np.array([group.rank]))
        group.leave()
        return int(result[0])

    for _ in range(100):
        answers = in_threads(ThreadGroup.of(3), work)
        assert [answer.result(WAIT_S) for answer in answers] == [2, 2, 2]


def test_threads_wait_for_a_bounded_time() -> None:
    groups = ThreadGroup.of(2, timeout_s=0.01)
    with pytest.raises(RankLost, match=r"rank 1 of 2 did not come.*anew"):
        groups[0].gather(torch.zeros(1))
    with pytest.raises(RankLost, match="rank 1 of 2 did not come"):
        groups[1].gather(torch.zeros(1))


def die_as_rank_1(group: GlooGroup) -> None:
    group.reduce_min(np.array([0]))
    if group.rank == 1:
        os._exit(0)
    group.gather(torch.zeros(1))


def test_a_process_that_dies_is_noticed() -> None:
    survivor, dead = rank_processes.run(2, die_as_rank_1)
    assert dead is None
    assert isinstance(survivor, RankLost)
    assert "rank 0 of 2 lost another one" in str(survivor)
    assert str(survivor).endswith("build the instance anew.")
