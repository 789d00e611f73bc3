"""Shared memory between real processes, and what is left when one of them is killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from optimized.transfer import hello as hellos
from optimized.transfer.shm_hello import offer_of
from optimized.transfer.transport import PeerFenced, Received, WriteEnded
from oracle_tests import shm_child
from oracle_tests.shm_cases import (
    KEY,
    PATIENCE_S,
    D,
    End,
    P,
    after,
    decode,
    footprint,
    is_listening,
    mappings,
    poll_until,
    prefill,
    same,
    write,
)
from reference.protocol import Landed, Outcome, Side

RUNS = ((0, 3, 10, 4), (0, 7, 2, 1), (1, 0, 31, 1))
MIXED = (*RUNS, (2, 5, 1, 6))
FORKED = multiprocessing.get_context("forkserver")
SPAWNED = multiprocessing.get_context("spawn")


@pytest.fixture(scope="module", autouse=True)
def forkserver():
    """Start the process from which children are forked: it stays, and so do its descriptors."""
    FORKED.set_forkserver_preload(["oracle_tests.shm_child"])
    first = FORKED.Process(target=os.getpid)
    first.start()
    first.join()
    first.close()


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = footprint()
    yield
    assert footprint() == before


class Child:
    """The other end, in a process of its own."""

    def __init__(self, side: Side, stop_at: str, context: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=shm_child.run, args=(theirs, side, stop_at))
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        """What the child says next.

        Raises:
            TimeoutError: where it says nothing within PATIENCE_S.
        """
        if not self.pipe.poll(PATIENCE_S):
            raise TimeoutError(f"the child said nothing for {PATIENCE_S} s")
        return self.pipe.recv()

    def ask(self, command: str, argument: object = None) -> Any:
        self.pipe.send((command, argument))
        return self.hear()

    def kill(self) -> None:
        """Kill the process, and have it reaped."""
        self.process.kill()
        self.process.join(PATIENCE_S)
        assert self.process.exitcode == -signal.SIGKILL


@contextlib.contextmanager
def child(side: Side, *, stop_at: str = "", context: Any = FORKED) -> Iterator[Child]:
    other = Child(side, stop_at, context)
    try:
        yield other
    finally:
        other.process.kill()
        other.process.join(PATIENCE_S)
        other.process.close()
        other.pipe.close()


@contextlib.contextmanager
def open_end(end: End) -> Iterator[End]:
    try:
        yield end
    finally:
        end.close()


def join(end: End, other: Child) -> bytes:
    """Exchange hellos and connect; the child's."""
    hello = other.hear()
    end.transport.connect(hello)
    other.pipe.send(end.transport.hello())
    return hello


def test_rows_land_from_another_process_and_nothing_is_left():
    with child(Side.PREFILL) as source, open_end(decode()) as target:
        join(target, source)
        assert source.hear() is None
        assert target.transport.why_not(P) is None
        posted = write(*MIXED)
        expected = after(prefill_memory(), target.memory, posted)
        assert source.ask("post", posted) == [WriteEnded(KEY, D, 0, Outcome.LANDED)]
        events = poll_until(bool, target.transport)
        assert events == [Received(Landed(KEY, P, 0))]
        assert same(target.memory, expected)
        assert target.pool.is_intact()
        before, afterwards = source.ask("close")
        assert before == afterwards
        poll_until(lambda _: target.transport.why_not(P) is not None, target.transport)


def states(pid: int) -> set[str]:
    """The letters for what each thread of a process is doing."""
    threads = Path(f"/proc/{pid}/task").glob("*/stat")
    return {thread.read_text().rpartition(")")[2].split()[0] for thread in threads}


def prefill_memory():
    """The stamps of any prefill end."""
    with open_end(prefill()) as end:
        return list(end.memory)


def test_a_fork_of_the_mapper_cannot_write():
    with child(Side.PREFILL) as source, open_end(decode()) as target:
        join(target, source)
        assert source.hear() is None
        assert source.ask("mappings of a fork") == (1, 0)


def test_a_mapper_killed_in_a_copy_has_touched_its_ticket_only():
    with child(Side.PREFILL, stop_at="copy") as source, open_end(decode()) as target:
        join(target, source)
        assert source.hear() is None
        expected = after(prefill_memory(), target.memory, write(*RUNS[:-1]))
        source.pipe.send(("post", write(*RUNS)))
        assert source.hear() == shm_child.HELD
        assert same(target.memory, expected)
        target.transport.fence(P)
        assert not target.transport.poll(), "the writer lives"
        source.kill()
        assert poll_until(bool, target.transport) == [PeerFenced(P)]
        assert same(target.memory, expected)
        assert target.pool.is_intact()
        assert "unmapped the shared memory, or ended" in target.transport.why_not(P)


def test_a_dead_mapper_that_is_not_reaped_is_not_fenced():
    with child(Side.PREFILL, context=SPAWNED) as source, open_end(decode()) as target:
        join(target, source)
        assert source.hear() is None
        target.transport.fence(P)
        os.kill(source.process.pid, signal.SIGKILL)
        poll_until(lambda _: "Z" in states(source.process.pid))
        assert not target.transport.poll()
        source.kill()
        assert poll_until(bool, target.transport) == [PeerFenced(P)]


def test_a_visitor_that_never_says_it_mapped_counts_as_a_mapper():
    with child(Side.PREFILL, stop_at="mapped") as source, open_end(decode()) as target:
        join(target, source)
        assert source.hear() == shm_child.HELD
        assert mappings(source.process.pid) == 1
        assert target.transport.why_not(P) is not None
        target.transport.fence(P)
        assert not target.transport.poll()
        source.kill()
        assert poll_until(bool, target.transport) == [PeerFenced(P)]
        poll_until(lambda _: "broke off" in target.transport.why_not(P))


def test_the_mapper_outlives_a_killed_owner():
    with child(Side.DECODE) as target, open_end(prefill()) as source:
        name = offer_of(hellos.decode(join(source, target))).socket
        # the child connects only once it has our hello, and is connected already
        assert source.transport.why_not(D) is None
        assert target.hear() is None
        assert is_listening(name)
        target.kill()
        assert not is_listening(name)
        source.transport.post(write(*RUNS))
        events = poll_until(bool, source.transport)
        assert events == [WriteEnded(KEY, D, 0, Outcome.LANDED)]
        poll_until(lambda _: source.transport.why_not(D) is not None, source.transport)
        assert "the peer ended" in source.transport.why_not(D)
        assert mappings(os.getpid()) == 0
        source.transport.post(write(*RUNS, piece=1))
        events = poll_until(bool, source.transport)
        assert events == [WriteEnded(KEY, D, 1, Outcome.BROKEN)], "it goes the other way now"


def test_an_owner_killed_in_the_visit_is_left():
    with child(Side.DECODE) as target, open_end(prefill()) as source:
        hello = target.hear()
        target.kill()
        source.transport.connect(hello)
        assert "is not the one" in source.transport.why_not(D) or (
            "could not be reached" in source.transport.why_not(D)
        )
        assert mappings(os.getpid()) == 0


def test_a_stopped_owner_is_left_in_bounded_time(monkeypatch):
    monkeypatch.setattr("optimized.transfer.shm_hello.TIMEOUT_S", 0.2)
    with child(Side.DECODE) as target, open_end(prefill()) as source:
        hello = target.hear()
        os.kill(target.process.pid, signal.SIGSTOP)
        poll_until(lambda _: states(target.process.pid) == {"T"})
        source.transport.connect(hello)
        assert "timed out" in source.transport.why_not(D)
        os.kill(target.process.pid, signal.SIGCONT)
        assert mappings(os.getpid()) == 0
