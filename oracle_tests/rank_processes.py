"""Ranks as real processes that meet over gloo, for tests; each wait is bounded."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from optimized.groups import GlooGroup, meeting_point

WAIT_S = 120.0
"""How long a test waits for a process: to start one imports torch."""


def run(size: int, work: Callable[[GlooGroup], Any], *, timeout_s: float = WAIT_S) -> list[Any]:
    """Run `work`, a function of some module, on ranks of a group.

    Returns:
        What each rank returned; the exception that it raised; or None where it ended without a
        word.
    """
    spawn = multiprocessing.get_context("spawn")
    point = meeting_point()
    ends, processes = [], []
    for rank in range(size):
        here, there = spawn.Pipe(duplex=False)
        process = spawn.Process(target=_rank, args=(rank, size, point.port, timeout_s, work, there))
        process.start()
        there.close()
        ends.append(here)
        processes.append(process)
    try:
        return [_received(end) for end in ends]
    finally:
        for process in processes:
            process.join(WAIT_S)
            if process.is_alive():
                process.kill()
                process.join()


def _received(end: Connection) -> Any:
    assert end.poll(WAIT_S), "a rank neither answered nor ended"
    try:
        return pickle.loads(end.recv_bytes())
    except EOFError:
        return None


def _rank(
    rank: int,
    size: int,
    port: int,
    timeout_s: float,
    work: Callable[[GlooGroup], Any],
    end: Connection,
) -> None:
    torch.set_num_threads(1)
    group = GlooGroup(rank, size, port=port, timeout_s=timeout_s)
    try:
        answer = work(group)
    except Exception as error:
        answer = error
    # tensors by value: those that `send` shares are gone with their process
    end.send_bytes(pickle.dumps(answer))
    group.close()
