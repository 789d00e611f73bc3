"""Transfers over shared memory within one process: what is agreed, checked, copied and said."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch

from optimized.transfer import hello as hellos
from optimized.transfer import shared_pool, shm, shm_copy
from optimized.transfer.shm_hello import visit
from optimized.transfer.transport import PeerFenced, Received, Refused, WriteEnded
from oracle_tests.conftest import CUDA
from oracle_tests.shm_cases import (
    CANARY,
    KEY,
    OPTED_IN,
    RUNS,
    D,
    P,
    after,
    both_ends,
    decode,
    ended,
    footprint,
    join,
    poll_until,
    post_and_wait,
    prefill,
    received,
    same,
    stamps,
    untouched,
    write,
)
from reference.protocol import Abort, Landed, Outcome, Peer, Side


@pytest.fixture
def ends():
    with both_ends() as pair:
        yield pair


@pytest.fixture
def gate(monkeypatch):
    """Copies wait before their last run until the gate opens; `reached` is set when one waits."""

    class Gate:
        reached, opened = threading.Event(), threading.Event()

    def copy_rows(share, here, runs, copy=shm_copy.copy_rows):
        copy(share, here, runs[:-1])
        Gate.reached.set()
        assert Gate.opened.wait(60)
        copy(share, here, runs[-1:])

    monkeypatch.setattr(shm_copy, "copy_rows", copy_rows)
    yield Gate
    Gate.opened.set()


@pytest.mark.parametrize("runs", [RUNS, RUNS[:3], RUNS[3:]], ids=["mixed", "shared", "other"])
def test_a_write_lands_where_it_should_and_nowhere_else(ends, runs):
    source, target = ends
    join(source, target)
    assert source.transport.why_not(D) is None
    assert target.transport.why_not(P) is None
    posted = write(*runs)
    expected = after(source.memory, target.memory, posted)
    events = post_and_wait(source, target, posted)
    assert ended(events) == [WriteEnded(KEY, D, 0, Outcome.LANDED)]
    assert received(events) == [Received(Landed(KEY, P, 0))]
    assert same(target.memory, expected)
    assert target.pool.is_intact()
    margin = target.pool.memory[: target.pool.offset_of(target.memory[0])]
    assert bool((margin == CANARY).all())


def test_shared_regions_do_not_go_the_other_way(ends, monkeypatch):
    source, target = ends
    join(source, target)
    other = []
    monkeypatch.setattr(source.transport._rest, "post", other.append)
    source.transport.post(write(*RUNS))
    poll_until(lambda _: other, source.transport)
    assert [posted.runs.tolist() for posted in other] == [[[2, 5, 1, 6]]]
    assert other[0].note == Landed(KEY, P, 0)


def test_messages_go_the_other_way(ends):
    source, target = ends
    join(source, target)
    target.transport.send(P, Abort(KEY, D))
    events = poll_until(received, source.transport)
    assert events == [Received(Abort(KEY, D))]


def test_nothing_is_said_before_the_last_byte(ends, gate):
    source, target = ends
    join(source, target)
    posted = write(*RUNS[:3])
    expected = after(source.memory, target.memory, posted)
    source.transport.post(posted)
    assert gate.reached.wait(60)
    for _ in range(50):
        assert not source.transport.poll()
        assert not target.transport.poll()
    assert not same(target.memory, expected)
    gate.opened.set()
    events = poll_until(received, source.transport, target.transport)
    assert same(target.memory, expected)
    assert ended(events)


@pytest.mark.parametrize("device", ["cpu", "cuda"] if CUDA else ["cpu"])
def test_a_copy_waits_for_what_produces_its_source(device, monkeypatch):
    # chunks so small that rows, and runs of them, lie across their boundaries
    monkeypatch.setattr(shared_pool, "REGISTER_BYTES", shared_pool.GUARD_BYTES)
    before = footprint().mappings
    source, target = prefill(device=device), decode(cuda=device == "cuda")
    join(source, target)
    assert source.transport.why_not(D) is None
    assert target.memory[0].is_pinned() == (device == "cuda")
    posted = write((0, 0, 0, 24), (1, 0, 4, 24))
    later = [stamps(1, i, *memory.shape) for i, memory in enumerate(source.memory)]
    expected = after(later, target.memory, posted)
    with torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else contextlib.nullcontext():
        if device == "cuda":
            torch.cuda._sleep(200_000_000)
        for memory, stamped in zip(source.memory, later, strict=True):
            memory.copy_(stamped, non_blocking=True)
        source.transport.post(posted)
    events = poll_until(ended, source.transport)
    assert events == [WriteEnded(KEY, D, 0, Outcome.LANDED)]
    assert same(target.memory, expected)
    assert target.pool.is_intact()
    source.close()
    target.close()
    assert footprint().mappings == before


def test_a_failed_device_leaves_the_outcome_unknown(ends, monkeypatch):
    source, target = ends
    join(source, target)

    def fail(share, here, runs):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(shm_copy, "copy_rows", fail)
    source.transport.post(write(*RUNS))
    events = poll_until(ended, source.transport)
    assert events == [WriteEnded(KEY, D, 0, Outcome.UNKNOWN)]
    share = source.transport._shares[D]
    assert len(share.tickets) == 1, "bytes may still be on their way"
    assert not received(target.transport.poll())
    share.tickets.close((KEY, 0))  # as the end of the process would


def test_an_older_life_stays_mapped_until_its_copies_end(ends, gate):
    source, target = ends
    join(source, target)
    before = footprint()
    source.transport.post(write(*RUNS[:3]))
    assert gate.reached.wait(60)
    again = decode(Peer(Side.DECODE, 1, 10))
    join(source, again)
    assert source.transport.why_not(D) == "the peer was started again."
    assert source.transport.why_not(again.transport.me) is None
    source.transport.poll()
    assert footprint().mappings == before.mappings + 2, "the old one is still being copied to"
    gate.opened.set()
    assert poll_until(ended, source.transport) == [WriteEnded(KEY, D, 0, Outcome.LANDED)]
    assert footprint().mappings == before.mappings + 1
    assert untouched(again)
    again.close()


def test_connecting_a_known_peer_anew_keeps_its_mapping(ends):
    source, target = ends
    join(source, target)
    before = footprint()
    join(source, target)
    assert footprint() == before
    assert source.transport.why_not(D) is None


def test_whoever_leaves_is_unmapped_by_the_other(ends):
    source, target = ends
    join(source, target)
    held = footprint()
    target.transport._host.close()
    poll_until(lambda _: source.transport.why_not(D) is not None, source.transport)
    assert "took its shared memory back" in source.transport.why_not(D)
    assert footprint().mappings == held.mappings - 1
    target.transport._host = None


def test_closing_finishes_the_copies(ends, gate):
    source, target = ends
    join(source, target)
    posted = write(*RUNS[:3])
    expected = after(source.memory, target.memory, posted)
    source.transport.post(posted)
    assert gate.reached.wait(60)
    closing = threading.Thread(target=source.transport.close)
    closing.start()
    assert not same(target.memory, expected)
    gate.opened.set()
    closing.join(60)
    assert same(target.memory, expected)
    poll_until(lambda _: target.transport.why_not(P) is not None, target.transport)
    assert "unmapped" in target.transport.why_not(P)


def test_a_fence_waits_for_every_process_that_had_the_pool(ends, monkeypatch):
    source, target = ends
    join(source, target)
    target.transport.fence(P)
    for _ in range(20):
        assert PeerFenced(P) not in target.transport.poll()
    monkeypatch.setattr(hellos.Process, "is_reaped", lambda self: True)
    assert target.transport.poll() == [PeerFenced(P)]
    assert not target.transport.poll(), "once is enough"
    monkeypatch.undo()
    mine, theirs = (hellos.decode(end.transport.hello()) for end in ends)
    with pytest.raises(Refused, match="life was fenced"):
        visit(mine, theirs, cuda=False)


def test_a_fence_waits_for_the_other_transport(ends, monkeypatch):
    source, target = ends
    join(source, target)
    monkeypatch.setattr(hellos.Process, "is_reaped", lambda self: True)
    asked = []
    monkeypatch.setattr(target.transport._rest, "fence", asked.append)
    target.transport.fence(P)
    assert not target.transport.poll()
    assert asked == [P]


def test_a_peer_that_never_had_the_pool_is_fenced_by_the_other_transport(ends):
    source, target = ends
    target.transport.connect(source.transport.hello())
    target.transport.fence(P)
    assert target.transport.poll() == [PeerFenced(P)]


def test_a_pool_with_no_region_in_it_is_refused(ends):
    source, target = ends
    with pytest.raises(ValueError, match="no region lies in the shared pool"):
        shm.ShmTransport(
            source.transport._rest,
            source.transport._rest._regions,
            setup=OPTED_IN,
            pool=target.pool,
        )
