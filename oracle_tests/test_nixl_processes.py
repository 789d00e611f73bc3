"""NIXL between real processes that stop, die and come back: what lands, what is reported, and what
fences.  Over tcp, where a write takes its time; inside one host it would be over within the call.

Each scenario ends with a count of the words that are there and of those that should not be.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from optimized.transfer.hello import decode as decode_hello
from optimized.transfer.transport import PeerFenced, PeerLost, Received, Refused, WriteEnded
from oracle_tests.nixl_child import (
    ITEM_BYTES,
    KEY,
    Child,
    Node,
    child,
    decode,
    prefill,
    until,
)
from reference.protocol import Outcome, Peer, Status

ITEMS = 4096
"""64 MiB: several times of what sockets and UCX hold, so that a write to a peer that does not poll
is never over."""
ALL = ITEMS * ITEM_BYTES // 8
ROUNDS = 500
"""Polls after which what could still land has landed; the control shows it."""


@pytest.fixture(autouse=True)
def _tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("NIXL_LOG_LEVEL", "ERROR")


@contextmanager
def node(me: Peer, **options: Any) -> Iterator[Node]:
    """This process's end."""
    it = Node(me, ITEMS, **options)
    try:
        yield it
    finally:
        it.close()


def target(tls: str = "tcp", incarnation: int = 1) -> Any:
    """A decode rank in a process of its own."""
    return child(tls, me=decode(incarnation), items=ITEMS)


def writer(incarnation: int = 1) -> Any:
    """A prefill rank in a process of its own, which stamps its rows with its incarnation."""
    return child("tcp", me=prefill(incarnation), items=ITEMS, stamp=incarnation)


def join(here: Node, there: Child) -> None:
    """Let both ends know each other."""
    here.connect(there.hello)
    there("connect", here.hello())


def ended(to: Peer, outcome: Outcome, piece: int = 0) -> WriteEnded:
    return WriteEnded(KEY, to, piece, outcome)


def start(p: Node, d: Child) -> None:
    """Post everything, and go on until a part of it has landed in the child."""
    p.write(decode(), 0, 0, ITEMS)
    until(lambda: d("poll") or d("landed", 1, 0, 0, ITEMS), p)
    assert 0 < d("landed", 1, 0, 0, ITEMS) < ALL


def feed(d: Node, p: Child, stamp: int = 1) -> int:
    """Let the child write everything, and go on until a part of it has landed here; returns the
    words that have.  The ends poll in turn, so that no more is on its way than sockets hold, and
    as much is again when this returns."""
    p("write", decode(), 0, 0, ITEMS)
    until(lambda: p("poll") or d.landed(stamp, 0, 0, ITEMS), d)
    assert p("poll") == []
    landed = d.landed(stamp, 0, 0, ITEMS)
    assert 0 < landed < ALL
    return landed


def kill_midway(d: Node, p: Child) -> int:
    """Kill the child when a part has landed; returns how many words.  Nothing lands while this
    process does not poll, so the rest of the write waits in the sockets."""
    landed = feed(d, p)
    p.kill()
    assert d.landed(1, 0, 0, ITEMS) == landed
    return landed


def test_a_killed_target_breaks_the_write() -> None:
    with node(prefill(), stamp=1) as p, target() as d:
        join(p, d)
        start(p, d)
        assert p.events == []
        d.kill()
        until(lambda: len(p.events) == 2, p)
        assert set(p.events) == {PeerLost(decode()), ended(decode(), Outcome.BROKEN)}
        p.write(decode(), 0, 0, 1, piece=1)
        assert p.poll()[2:] == [ended(decode(), Outcome.BROKEN, piece=1)]
        assert p.landed(1, 0, 0, ITEMS) == ALL


def test_a_target_that_dies_idle_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS")
    with node(prefill(), stamp=1) as p, target(tls="all") as d:
        join(p, d)
        p.poll()
        assert p.events == []
        d.kill()
        until(lambda: p.events, p)
        assert p.events == [PeerLost(decode())]


def test_the_end_of_an_invisible_target_stays_unknown() -> None:
    with node(prefill(), stamp=1, grace_s=0.1) as p, target() as d:
        hello = decode_hello(d.hello)
        elsewhere = msgspec.structs.replace(hello.process, namespace=hello.process.namespace + 1)
        p.connect(msgspec.structs.replace(hello, process=elsewhere).encode())
        d("connect", p.hello())
        start(p, d)
        d.kill()
        until(lambda: len(p.events) == 2, p)
        assert set(p.events) == {PeerLost(decode()), ended(decode(), Outcome.UNKNOWN)}
        p.transport.fence(decode())
        for _ in range(ROUNDS):
            p.poll()
        assert len(p.events) == 2
        assert p.transport.epoch == 0


def test_a_killed_initiator_leaves_a_part() -> None:
    with node(decode()) as d, writer() as p:
        join(d, p)
        kill_midway(d, p)
        until(lambda: d.events, d)
        for _ in range(ROUNDS):
            d.poll()
        assert d.events == [PeerLost(prefill())], "no note may come with a part"
        assert d.landed(1, 0, 0, ITEMS) < ALL
        assert d.intruders(0, ITEMS) == 0


def test_a_stopped_target_stalls_the_write() -> None:
    with node(prefill(), stamp=1) as p, target() as d:
        join(p, d)
        start(p, d)
        d("run")
        os.kill(d.process.pid, signal.SIGSTOP)
        until(lambda: Path(f"/proc/{d.process.pid}/stat").read_text().split()[2] == "T")
        p.write(decode(), 0, 0, ITEMS, piece=1)
        for _ in range(ROUNDS):
            assert ended(decode(), Outcome.LANDED, piece=1) not in p.poll()
        assert PeerLost(decode()) not in p.events
        os.kill(d.process.pid, signal.SIGCONT)
        until(lambda: len(p.events) == 2, p)
        assert set(p.events) == {ended(decode(), Outcome.LANDED, piece) for piece in (0, 1)}
        until(lambda: d("poll").count(Received(Status(KEY, prefill()))) == 2, p)
        assert d("landed", 1, 0, 0, ITEMS) == ALL
        assert d("intruders", 0, ITEMS) == 0


def test_a_target_of_the_same_name_gets_nothing_stale() -> None:
    """And none of the same life is taken for it."""
    with node(prefill(), stamp=1) as p:
        with target() as d:
            join(p, d)
            start(p, d)
        with target() as again, pytest.raises(Refused, match="a higher incarnation"):
            p.connect(again.hello)
        with target(incarnation=2) as again:
            join(p, again)
            p.write(decode(2), 0, 0, 8, piece=1)
            done = {ended(decode(), Outcome.BROKEN), ended(decode(2), Outcome.LANDED, piece=1)}
            until(lambda: again("poll") and done <= set(p.events), p)
            assert set(p.events) - {PeerLost(decode())} == done
            assert again("landed", 1, 0, 0, 8) == 8 * ITEM_BYTES // 8
            assert again("intruders", 0, 8) == 0


def test_deregistration_is_no_fence() -> None:
    """The control of the next test: as there, but with deregistration in the fence's place."""
    with node(decode()) as d, writer() as p:
        join(d, p)
        landed = kill_midway(d, p)
        d.transport.endpoint.deregister()
        assert d.landed(1, 0, 0, ITEMS) == landed
        for _ in range(ROUNDS):
            d.poll()
        assert d.landed(1, 0, 0, ITEMS) > landed


def test_a_destroyed_agent_is_a_fence() -> None:
    with node(decode()) as d:
        with writer() as p:
            join(d, p)
            landed = kill_midway(d, p)
        d.transport.fence(prefill())
        d.poll()
        assert d.events == [PeerLost(prefill()), PeerFenced(prefill())]
        for _ in range(ROUNDS):
            d.poll()
        assert d.landed(1, 0, 0, ITEMS) == landed
        assert d.intruders(0, ITEMS) == 0
        with writer(incarnation=2) as again:
            join(d, again)
            again("write", decode(), 0, 0, ITEMS)
            again("run")
            until(lambda: Received(Status(KEY, prefill(2))) in d.events, d)
            assert d.landed(2, 0, 0, ITEMS) == ALL
            assert d.intruders(0, ITEMS) == 0


def test_a_living_writer_is_not_fenced() -> None:
    with node(decode()) as d, writer() as p:
        join(d, p)
        p("run")
        d.transport.fence(prefill())
        p("write", decode(), 0, 0, ITEMS)
        until(lambda: Received(Status(KEY, prefill())) in d.events, d)
        assert d.events == [Received(Status(KEY, prefill()))]
        assert d.transport.epoch == 0
        assert d.landed(1, 0, 0, ITEMS) == ALL


def test_a_fence_costs_a_living_writer_one_write() -> None:
    with node(decode()) as d, writer() as dead, writer(incarnation=2) as p:
        join(d, dead)
        dead.kill()
        join(d, p)
        landed = feed(d, p, stamp=2)
        p("run")
        d.transport.fence(prefill())
        until(lambda: PeerFenced(prefill()) in d.events, d)
        assert d.transport.epoch == 1
        assert d.landed(2, 0, 0, ITEMS) == landed
        p("connect", d.hello())
        until(lambda: p("poll"), d)
        assert p("poll") == [ended(decode(), Outcome.BROKEN)]
        assert d.landed(2, 0, 0, ITEMS) == landed
        p("write", decode(), 0, 0, ITEMS, 1)
        until(lambda: Received(Status(KEY, prefill(2))) in d.events, d)
        until(lambda: len(p("poll")) == 2, d)
        assert p("poll")[1] == ended(decode(), Outcome.LANDED, piece=1)
        assert d.landed(2, 0, 0, ITEMS) == ALL
        assert d.intruders(0, ITEMS) == 0
