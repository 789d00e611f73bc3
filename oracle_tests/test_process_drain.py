"""What becomes of a transfer when one of 2R real processes dies, stops or gives it up midway.

Each case has a transfer under way when something happens, in one of three ways: what P posted
waits in sockets while D stands; or P is stopped between noting a write and starting it; or within
a copy into shared memory.  Afterwards other requests go the same way with the bits of an engine
that does it all alone, so nothing of theirs was written over; the judge accepts the run; and
nothing is left of it.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any, NamedTuple

import pytest

from optimized.transfer.node import Timers
from oracle_tests import rank_faults
from oracle_tests.real_world import Fault, World, must_be_clean, world
from oracle_tests.transfer_cases import PLAIN
from oracle_tests.transfer_runs import ONE_AT_A_TIME, is_done, is_move, is_right, prompt
from oracle_tests.transfer_world import Asked
from reference.drain import Clause
from reference.protocol import (
    Abort,
    Ack,
    Advertise,
    Delivered,
    Died,
    Fenced,
    Observation,
    Peer,
    Phase,
    Posted,
    Sent,
    Settled,
    Side,
)

P, D = Side
ROOM, PIECE = 1, 1
"""Of the transfer to which something happens, and of a write of it."""


class Way(NamedTuple):
    """How a transfer is caught midway: by a fault of the last rank of P, or while D stands."""

    setting: dict[str, Any]
    fault: Fault | None = None


SOCKETS = Way({"tls": "tcp"})
POST = Way({"tls": "tcp"}, partial(rank_faults.stop_before_post, ROOM, PIECE))
COPY = Way({"shared": True}, partial(rank_faults.stop_in_a_copy, ROOM, PIECE))

ways = pytest.mark.parametrize("way", [SOCKETS, POST, COPY], ids=["sockets", "post", "copy"])
rank_counts = pytest.mark.parametrize("ranks", [1, 2], ids=lambda ranks: f"{ranks} ranks")


def caught(way: Way, *, ranks: int = 1, pages: int = ONE_AT_A_TIME, **setting: Any) -> Any:
    """A world in which something will happen to the transfer of ROOM."""
    faults = {Peer(P, ranks - 1, 0): way.fault} if way.fault else {}
    return world(faults, ranks=ranks, pages=pages, **way.setting, **setting)


def sent(it: World, kind: type, room: int = ROOM) -> list[Observation]:
    """Messages of that kind about a room."""
    return [seen for seen in it.log if isinstance(seen, Sent) and is_about(seen, kind, room)]


def is_about(seen: Sent | Delivered, kind: type, room: int = ROOM) -> bool:
    """Whether its message is one of that kind about a room."""
    return isinstance(seen.message, kind) and seen.message.key.room == room


def in_flight(it: World) -> set[tuple[Any, ...]]:
    """Writes that were posted and have not ended, as far as their writers know."""
    writes: set[tuple[Any, ...]] = set()
    for seen in it.log:
        if isinstance(seen, Posted):
            writes.add((seen.at, seen.key, seen.to, seen.piece))
        elif isinstance(seen, Settled):
            writes.discard((seen.at, seen.key, seen.to, seen.piece))
    return writes


def moments(it: World, at: Peer, phase: Phase) -> list[int]:
    """Where in the run transfers of ROOM entered that phase on a rank of D."""
    return [
        n
        for n, seen in enumerate(it.log)
        if is_move(seen, phase) and seen.at == at and seen.key.room == ROOM
    ]


def first_ack(it: World, at: Peer) -> int:
    """Where in the run a rank of D first handled an ACK about ROOM."""
    return next(
        n
        for n, seen in enumerate(it.log)
        if isinstance(seen, Delivered) and seen.at == at and is_about(seen, Ack)
    )


def must_serve(it: World, n: int, **how: Any) -> None:
    """A new request goes all the way."""
    asked = it.ask(prompt(n, 39), **how)
    it.until(lambda: it.is_over)
    assert is_done(asked)
    assert is_right(asked)


def warm_up(it: World) -> None:
    """A request before the others wires all connections, so that it is sockets in which bytes wait,
    and not their sender."""
    it.run()
    must_serve(it, 0)
    it.stand(D)
    it.stand(P)


def catch(it: World, way: Way) -> Asked:
    """A request that is caught midway; D stands, and P runs or is stopped."""
    asked = it.ask(prompt(1, 39))
    assert asked.room == ROOM
    it.turns(D, lambda: len(sent(it, Advertise)) >= it.setting.ranks)
    it.run(P)
    last = it.process(P)
    if way.fault:
        it.until(lambda: it.has_stopped(last))
    else:
        it.until(lambda: {write[0] for write in in_flight(it)} == {p.me for p in it.ends[P]})
    assert last.me in {write[0] for write in in_flight(it)}
    assert not asked.sampled
    return asked


def stop(it: World, side: Side) -> None:
    """Stop a side's last process, unless it has stopped itself."""
    os.kill(it.process(side).pid, signal.SIGSTOP)
    it.until(lambda: it.has_stopped(it.process(side)))


@rank_counts
@ways
def test_a_writer_is_killed(ranks: int, way: Way) -> None:
    """D gives the request up, fences the writer, and uses the memory for what the next life of P
    sends; P's other ranks end with it."""
    with caught(way, ranks=ranks) as it:
        warm_up(it)
        asked = catch(it, way)
        it.kill(P)
        it.run(D)
        it.until(lambda: D in asked.over)
        it.start(P)
        it.run(P)
        must_serve(it, 2)
        assert asked.failed
        assert not asked.sampled
        for writer, reader in zip(it.past, it.ends[D], strict=True):
            fenced = it.log.index(Fenced(reader.me, writer.me))
            [freed, *_] = moments(it, reader.me, Phase.FREE)
            assert it.log.index(Died(writer.me)) < fenced < freed
        must_be_clean(it)


@rank_counts
@ways
def test_a_reader_is_killed(ranks: int, way: Way) -> None:
    """P frees what it kept for it, unmaps what was its, and sends to its next life."""
    with caught(way, ranks=ranks) as it:
        warm_up(it)
        asked = catch(it, way)
        it.kill(D)
        it.resume(it.process(P))
        it.until(lambda: P in asked.over)
        it.start(D)
        it.run(D)
        must_serve(it, 2)
        assert asked.failed
        must_be_clean(it)


@rank_counts
@ways
def test_a_writer_is_stopped_and_goes_on(ranks: int, way: Way) -> None:
    """D says its offer again and again meanwhile, and the transfer completes."""
    with caught(way, ranks=ranks) as it:
        warm_up(it)
        asked = catch(it, way)
        stop(it, P)
        it.run(D)
        it.until(lambda: len(sent(it, Advertise)) >= 3 * ranks)
        assert not asked.sampled
        it.resume(it.process(P))
        it.until(lambda: it.is_over)
        assert is_done(asked)
        assert is_right(asked)
        must_be_clean(it)


@rank_counts
@pytest.mark.parametrize(
    ("way", "patience_s"),
    [(SOCKETS, 60.0), (POST, 60.0), (COPY, 60.0), (POST, 0.3)],
    ids=["sockets", "post", "copy", "post-quarantined"],
)
def test_memory_that_is_given_up_waits_for_its_writes(
    ranks: int, way: Way, patience_s: float
) -> None:
    """D has memory for one request: the next one, of the same room, gets it after the ACKs."""
    timers = Timers(retry_s=0.1, abort_timeout_s=patience_s, transfer_timeout_s=60)
    with caught(way, ranks=ranks, timers=timers) as it:
        warm_up(it)
        asked = catch(it, way)
        stop(it, P)
        it.abort(asked, D)
        after = it.ask(prompt(2, 39), room=ROOM)
        it.run(D)
        it.until(lambda: len(sent(it, Abort)) >= 3 * ranks)
        it.until(lambda: patience_s > 1 or any(is_move(s, Phase.QUARANTINED) for s in it.log))
        assert D not in asked.over
        it.resume(it.process(P))
        it.until(lambda: it.is_over)
        assert is_done(after)
        assert is_right(after)
        assert not asked.sampled
        acked = max(first_ack(it, reader.me) for reader in it.ends[D])
        for reader in it.ends[D]:
            [freed, _] = moments(it, reader.me, Phase.FREE)
            [_, taken] = moments(it, reader.me, Phase.ADVERTISED)
            assert acked < freed < taken
        must_be_clean(it)


@rank_counts
@ways
def test_a_room_is_used_again_while_its_old_transfer_is_under_way(ranks: int, way: Way) -> None:
    """D has memory for both, and takes the late write for what it is."""
    with caught(way, ranks=ranks, pages=40) as it:
        warm_up(it)
        asked = catch(it, way)
        stop(it, P)
        it.abort(asked, D)
        after = it.ask(prompt(2, 39), room=ROOM)
        it.run(D)
        it.until(lambda: len({seen.message.key for seen in sent(it, Advertise)}) == 2)
        assert D not in asked.over
        it.resume(it.process(P))
        it.until(lambda: it.is_over)
        assert is_done(after)
        assert is_right(after)
        assert not asked.sampled
        must_be_clean(it)


@rank_counts
@pytest.mark.parametrize("setting", [{"tls": "tcp"}, {"shared": True}], ids=["tcp", "shm"])
def test_an_aux_row_of_another_room_fails_the_transfer(ranks: int, setting: dict[str, Any]) -> None:
    """On one rank alone; nothing becomes live, and the next request of that room is served."""
    faults = {Peer(P, ranks - 1, 0): rank_faults.name_another_room}
    with world(faults, ranks=ranks, pages=ONE_AT_A_TIME, **setting) as it:
        it.run()
        asked = it.ask(prompt(0, 39), room=ROOM)
        it.until(lambda: it.is_over)
        assert asked.failed
        assert not asked.sampled
        must_serve(it, 0, room=ROOM)
        must_be_clean(it)


def write_late(it: World) -> Asked:
    """D decodes a request into memory that another one was given up in, and then the first write of
    that other one goes on.  Returns the one that is decoded, when it has all its tokens."""
    warm_up(it)
    growing = it.ask(prompt(3, 17), steps=30, room=ROOM + 1)
    it.run(P)
    it.turns(D, lambda: growing.live)
    asked = it.ask(prompt(1, 39), room=ROOM)
    it.turns(D, lambda: it.has_stopped(it.process(P)), "tick")
    it.abort(asked, D)
    # its first two pages are full, and in the third is a row that no choice can leave out next time
    it.turns(D, lambda: 17 + len(growing.outputs) == 2 * PLAIN.logical_page_size + 1)
    it.resume(it.process(P))
    it.turns(D, lambda: not any(write[1].room == ROOM for write in in_flight(it)), "tick")
    it.run(D)
    it.until(lambda: it.is_over)
    assert is_done(growing)
    return growing


LATE = pytest.mark.parametrize(
    "way",
    [
        Way({"tls": "tcp"}, partial(rank_faults.stop_before_post, ROOM, 0)),
        Way({"shared": True}, partial(rank_faults.stop_in_a_copy, ROOM, 0)),
    ],
    ids=["post", "copy"],
)


@rank_counts
@LATE
def test_a_late_write_lands_in_nobodys_memory(ranks: int, way: Way) -> None:
    with caught(way, ranks=ranks, pages=40) as it:
        assert is_right(write_late(it))
        must_be_clean(it)


# Controls: faults that must be named, and damage that must be seen.


@LATE
def test_memory_that_is_freed_at_once_is_named(way: Way) -> None:
    """And does damage: the late write lands in the rows of the request that goes on decoding."""
    faults = {Peer(P, 0, 0): way.fault, Peer(D, 0, 0): rank_faults.free_at_once}
    with world(faults, **way.setting) as it:
        assert not is_right(write_late(it))
        violation = it.verdict(live=False)
        assert violation is not None
        assert violation.clause is Clause.S2


def test_what_stays_mapped_is_seen() -> None:
    with world({Peer(P, 0, 0): rank_faults.keep_mappings}, shared=True) as it:
        it.run()
        must_serve(it, 0)
        leaks = it.close()
        assert len(leaks) == 2, "a descriptor and a mapping"
        assert all("memfd:kvoracle" in leak for leak in leaks)


def test_what_stays_registered_is_seen() -> None:
    with world({Peer(D, 0, 0): rank_faults.keep_registrations}) as it:
        it.run()
        must_serve(it, 0)
        [leak] = it.close()
        assert "registrations" in leak
