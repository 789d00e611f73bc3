"""Whole transfers: engines, protocol and transport joined, over the simulated network.

Every run is judged by the reference, its memory has to add up, and what D decodes has to be bit by
bit what an engine decodes that prefilled the prompt itself.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from optimized.transfer import decode_node, drain, prefill_node
from optimized.transfer import ranks as protocol
from optimized.transfer.plan import Aux, encode_aux
from optimized.transfer.simulated import SimulatedTransport
from optimized.transfer.transport import Refused, Write
from oracle_tests.transfer_cases import PLAIN
from oracle_tests.transfer_runs import (
    ONE_AT_A_TIME,
    SHAPE4,
    flying,
    is_done,
    is_move,
    is_right,
    must_be_clean,
    prompt,
    simulated,
    weights,
)
from oracle_tests.transfer_world import Asked
from reference.bounds import Stored, audit
from reference.contract import Component, Engine, InvalidCall, RequestId
from reference.drain import Clause
from reference.protocol import (
    Abort,
    Arrived,
    Completion,
    Dropped,
    Fenced,
    Outcome,
    Peer,
    Phase,
    Sent,
    Settled,
    Side,
)

LENGTHS = [39, 5, 32, 17, 1, 48]

rank_counts = pytest.mark.parametrize("ranks", [1, 2], ids=lambda ranks: f"{ranks} ranks")
styles = pytest.mark.parametrize("completion", Completion, ids=lambda style: style.name.lower())


@pytest.mark.parametrize("ranks", [1, 2, 4], ids=lambda ranks: f"{ranks} ranks")
@styles
@pytest.mark.parametrize("hisparse", [False, True], ids=["flat", "hisparse"])
def test_d_decodes_what_one_engine_would(
    ranks: int, completion: Completion, hisparse: bool
) -> None:
    """Over a network that does nothing in order; more prompts than D has memory for at once."""
    with simulated(
        random.Random(ranks).randrange, ranks=ranks, completion=completion, hisparse=hisparse
    ) as world:
        asked = [world.ask(prompt(n, length)) for n, length in enumerate(LENGTHS)]
        world.run()
        assert all(map(is_done, asked))
        assert all(map(is_right, asked))
        must_be_clean(world)


@pytest.mark.parametrize("ranks", [2, 4])
def test_d_is_within_the_references_bounds(ranks: int) -> None:
    """The stored rows that came over, and what is decoded from them, against float64."""
    with simulated(random.Random(1).randrange, ranks=ranks) as world:
        asked = world.ask(prompt(0, 39), steps=6, kept=True)
        world.run(lambda: is_done(asked))
        engine, length = world.ends[Side.DECODE].instance, 45
        assert engine.inspect().requests[asked.request].length == length
        outputs = asked.prompt + asked.outputs
        rows = stored(engine, asked.request, length)
        tokens = (asked.tokens + asked.sampled)[:length]
        assert audit(weights(), SHAPE4, PLAIN, tokens, rows, outputs).violations == []
        # the other rank's heads are no rounding
        wrong = replace(rows, state=[row.view(ranks, -1).flip(0).view(1, -1) for row in rows.state])
        assert audit(weights(), SHAPE4, PLAIN, tokens, wrong, outputs).violations
        world.finish(asked)
        world.run()
        must_be_clean(world)


def stored(engine: Engine, request: RequestId, length: int) -> Stored:
    dsa, kda = range(len(SHAPE4.dsa_layers)), range(len(SHAPE4.kda_layers))
    groups = length // PLAIN.kpool
    return Stored(
        kv=[engine.read(request, Component.KV, layer, 0, length) for layer in dsa],
        index=[engine.read(request, Component.INDEX, layer, 0, groups) for layer in dsa],
        state=[engine.read(request, Component.STATE, layer, 0, 1) for layer in kda],
    )


@rank_counts
@styles
@pytest.mark.parametrize("seed", range(6))
def test_lost_and_doubled_messages_do_not_show(
    ranks: int, completion: Completion, seed: int
) -> None:
    """With rooms and memory that are used again and again: D has enough for one prompt."""
    choose = random.Random(seed).randrange
    with simulated(
        choose, message_faults=8, ranks=ranks, completion=completion, pages=ONE_AT_A_TIME
    ) as world:
        asked = [world.ask(prompt(n, 39 + 9 * (n % 2)), room=n % 2) for n in range(4)]
        world.run()
        assert world.network.message_faults < 8
        assert all(map(is_done, asked))
        assert all(map(is_right, asked))
        must_be_clean(world)


@rank_counts
@styles
@pytest.mark.parametrize("seed", range(6))
def test_a_write_of_unknown_end_keeps_its_memory(
    ranks: int, completion: Completion, seed: int
) -> None:
    """For ever, as nobody can prove that it is over; all others are served beside it."""
    choose = random.Random(seed).randrange
    with simulated(choose, write_faults=1, ranks=ranks, completion=completion) as world:
        asked = [world.ask(prompt(n, 39)) for n in range(4)]

        def is_at_rest() -> bool:
            quarantined = any(is_move(seen, Phase.QUARANTINED) for seen in world.log)
            return quarantined and sum(len(a.over) == len(Side) for a in asked) == 3

        world.run(is_at_rest)
        world.network.settle()
        [lost] = [a for a in asked if a.failed]
        assert Side.DECODE not in lost.over
        unknown = [s for s in world.log if isinstance(s, Settled) and s.outcome is Outcome.UNKNOWN]
        assert (Side.PREFILL in lost.over) is not bool(unknown)
        assert all(map(is_right, asked))
        assert (found := world.verdict(arrivals=True)) is None, found


@rank_counts
@pytest.mark.parametrize("side", Side, ids=lambda side: side.name.lower())
@pytest.mark.parametrize("turn", [1, 3, 5, 7, 9, 11])
def test_a_request_is_given_up_by_one_end(ranks: int, side: Side, turn: int) -> None:
    """At any time, in the midst of others, which do not suffer."""
    with simulated(random.Random(turn).randrange, ranks=ranks, pages=8) as world:
        first = world.ask(prompt(0, 48), steps=8)
        others = [world.ask(prompt(n, 20), room=first.room) for n in (1, 2)]
        for _ in range(turn):
            world.turn()
        world.abort(first, side)
        world.run()
        assert all(map(is_done, others))
        assert all(map(is_right, [first, *others]))
        must_be_clean(world)


@pytest.mark.parametrize("tokens", [[], [10**9], ["a"]], ids=["none", "unknown", "word"])
@rank_counts
def test_a_prompt_that_the_engine_does_not_take_ends_alone(ranks: int, tokens: Any) -> None:
    with simulated(ranks=ranks, pages=ONE_AT_A_TIME) as world:
        first, second = world.ask(prompt(0, 39)), world.ask(prompt(1, 39))
        bad = Asked(RequestId(2), 2, tokens, 0, over={Side.PREFILL})
        world.asked[bad.request] = bad
        for node in world.ends[Side.DECODE].nodes:
            node.submit(bad.request, bad.room, tokens)
        last = world.ask(prompt(3, 17))
        world.run()
        assert bad.failed
        assert all(map(is_right, [first, second, last]))
        assert all(map(is_done, [first, second, last]))
        must_be_clean(world)


def test_what_a_node_is_told_wrongly_changes_nothing() -> None:
    with simulated() as world:
        asked = world.ask(prompt(0, 39))
        [reader], [writer] = (world.ends[side].nodes for side in (Side.DECODE, Side.PREFILL))
        before = reader.rank, writer.rank
        for call, sentence in (
            (lambda: reader.submit(asked.request, 5, [1]), "is here already: submit each once"),
            (lambda: writer.submit(asked.request, 5, 39), "is here already: submit each once"),
            (lambda: reader.submit(RequestId(7), 2**63, [1]), "number rooms by integers from 0"),
            (lambda: writer.submit(RequestId(7), -1, 1), "number rooms by integers from 0"),
            (lambda: reader.submit(RequestId(7), "1", [1]), "number rooms by integers from 0"),
            (lambda: writer.submit(RequestId(7), 7, 1), "request 7 is not running: submit it"),
            (lambda: writer.computed(RequestId(7), 1), "request 7 is not here: submit it first"),
            (lambda: reader.finish(asked.request), "is not live"),
        ):
            with pytest.raises(InvalidCall, match=sentence):
                call()
            assert (reader.rank, writer.rank) == before
        world.run()
        assert is_done(asked)
        must_be_clean(world)


def test_a_request_that_waits_for_memory_can_be_given_up() -> None:
    """Also one that is larger than all of it, and then those behind it go on."""
    with simulated(pages=ONE_AT_A_TIME) as world:
        large, small = world.ask(prompt(0, 70)), world.ask(prompt(1, 17))
        for _ in range(20):
            world.turn()
        assert not small.outputs
        world.abort(large)
        world.run()
        assert is_done(small)
        assert is_right(small)
        must_be_clean(world)


@rank_counts
@pytest.mark.parametrize("what", ["room", "generation", "length"])
def test_a_wrong_aux_row_fails_the_transfer(
    monkeypatch: pytest.MonkeyPatch, ranks: int, what: str
) -> None:
    """On one rank alone; all drain, and the next request with that room is served."""
    wrong: list[Aux] = []

    def encode(aux: Aux) -> Any:
        if not wrong:
            other = aux.key._replace(**({} if what == "length" else {what: 7}))
            wrong.append(aux._replace(key=other, length=aux.length + (what == "length")))
            aux = wrong[0]
        return encode_aux(aux)

    monkeypatch.setattr(prefill_node, "encode_aux", encode)
    with simulated(ranks=ranks) as world:
        asked = world.ask(prompt(0, 20), room=3)
        world.run()
        assert wrong
        assert asked.failed
        assert not asked.sampled
        again = world.ask(prompt(0, 20), room=3)
        world.run()
        assert is_done(again)
        assert is_right(again)
        must_be_clean(world)


@rank_counts
def test_places_of_another_geometry_are_not_written_to(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    pack = decode_node.pack
    monkeypatch.setattr(decode_node, "pack", lambda places: ((*places.kv, 3), *pack(places)[1:]))
    with simulated(ranks=ranks) as world:
        asked = world.ask(prompt(0, 20))
        world.run()
        assert asked.failed
        assert any(isinstance(seen, Dropped) for seen in world.log)
        must_be_clean(world)


@rank_counts
def test_a_write_that_the_transport_refuses_keeps_its_memory(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """A ticket that does not hold: P goes on, nothing is written, and D takes no chance."""

    def refuse(self: SimulatedTransport, write: Write) -> None:
        raise Refused("row 7 is not on offer: advertise rows of the pool.")

    with simulated(ranks=ranks) as world:
        with monkeypatch.context() as patch:
            patch.setattr(SimulatedTransport, "post", refuse)
            asked = world.ask(prompt(0, 20))
            world.run(lambda: asked.failed)
            world.run(lambda: any(is_move(seen, Phase.QUARANTINED) for seen in world.log))
        after = world.ask(prompt(1, 20))
        world.run(lambda: is_done(after))
        assert is_right(after)
        assert not any(isinstance(s, Arrived) and s.key.room == asked.room for s in world.log)
        assert world.verdict(arrivals=True, live=False) is None


@rank_counts
@pytest.mark.parametrize("turn", [2, 4, 6, 8])
@pytest.mark.parametrize("side", Side, ids=lambda side: side.name.lower())
def test_an_instance_ends_and_is_started_again(ranks: int, turn: int, side: Side) -> None:
    """What was not live is given up, writes of the dead are fenced, and new requests are served
    from the same memory."""
    with simulated(random.Random(turn).randrange, ranks=ranks, pages=ONE_AT_A_TIME) as world:
        asked = [world.ask(prompt(n, 39), steps=8) for n in range(2)]
        for _ in range(turn):
            world.turn()
        world.kill(side, world.network.kill)
        again = [world.ask(prompt(n, 39)) for n in (5, 6)]
        world.run()
        assert all(map(is_done, again))
        assert all(map(is_right, asked + again))
        must_be_clean(world)


@rank_counts
def test_a_prompt_that_is_cached_already_keeps_the_pages_of_its_transfer(ranks: int) -> None:
    """D has cached the first one's pages when its twin goes live; a third needs what a D that freed
    the twin's duplicates would hand out, while the twin's transfer still holds them."""
    with simulated(ranks=ranks, pages=14) as world:
        twins = [world.ask(prompt(0, 32), steps=0, kept=True) for _ in range(2)]
        world.run(lambda: all(twin.live for twin in twins))
        third = world.ask(prompt(3, 32))
        world.run(lambda: is_done(third))
        assert world.verdict(arrivals=True, live=False) is None
        for twin in twins:
            world.finish(twin)
        world.run()
        assert all(map(is_right, [*twins, third]))
        must_be_clean(world)


def test_a_dead_writer_is_fenced_before_its_memory_is_used_again() -> None:
    """Its write lands after the abort, and not after the fence."""
    with simulated(pages=ONE_AT_A_TIME) as world:
        world.ask(prompt(0, 39))
        world.run(lambda: bool(flying(world)))
        world.kill(Side.PREFILL, world.network.kill)
        world.ask(prompt(1, 39))
        world.run()
        names = [type(seen).__name__ for seen in world.log]
        assert "Arrived" in names[names.index("Died") : names.index("Fenced")]
        freed = [n for n, seen in enumerate(world.log) if is_move(seen, Phase.FREE)]
        assert names.index("Fenced") < freed[0]
        assert len([seen for seen in world.log if isinstance(seen, Fenced)]) == 1
        must_be_clean(world)


@rank_counts
def test_a_writer_that_stands_still_holds_memory_and_no_more(ranks: int) -> None:
    """Quarantine, not reuse; what the writer says when it goes on ends it."""
    with simulated(ranks=ranks, quarantine_limit=1) as world:
        asked = world.ask(prompt(0, 39))
        world.run(lambda: bool(flying(world)))
        writer = Peer(Side.PREFILL, ranks - 1, 0)
        world.network.stop(writer)
        world.abort(asked, Side.DECODE)
        world.run(lambda: any(is_move(seen, Phase.QUARANTINED) for seen in world.log))
        waiting = world.ask(prompt(1, 17))
        for _ in range(50):
            world.turn()
        assert Side.DECODE not in asked.over
        assert not waiting.sampled
        world.network.resume(writer)
        world.run()
        assert is_done(waiting)
        assert is_right(waiting)
        must_be_clean(world)


@pytest.mark.parametrize("side", Side, ids=lambda side: side.name.lower())
def test_the_ranks_tell_each_other_without_a_router(
    monkeypatch: pytest.MonkeyPatch, side: Side
) -> None:
    """One rank gives a request up, and nobody relays it: its peers learn it in a round, and the
    other end from messages."""
    with simulated(ranks=2) as world:
        monkeypatch.setattr(world, "abort", lambda *asked: None)
        asked, other = world.ask(prompt(0, 39)), world.ask(prompt(1, 17))
        world.run(lambda: bool(flying(world)))
        world.ends[side].nodes[1].abort(asked.request)
        world.run(lambda: side in asked.over and is_done(other))
        assert asked.failed
        assert is_right(other)


def test_a_failure_that_does_not_reach_the_round_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: at P the best progress counts for all."""

    def best(brought: Any) -> Any:
        columns = zip(*brought, strict=True)
        return tuple(max(c)._replace(ready=min(s.ready for s in c)) for c in columns)

    monkeypatch.setattr(protocol, "prefill_together", best)
    with simulated(ranks=2) as world:
        monkeypatch.setattr(world, "abort", lambda *asked: None)
        asked = world.ask(prompt(0, 39))
        world.run(lambda: bool(flying(world)))
        world.ends[Side.PREFILL].nodes[1].abort(asked.request)
        with pytest.raises(AssertionError, match="no end after 200 turns"):
            world.run(lambda: Side.PREFILL in asked.over, turns=200)


def test_a_lost_abort_is_said_again() -> None:
    with simulated() as world:
        asked = world.ask(prompt(0, 39))
        world.run(lambda: bool(flying(world)))
        world.abort(asked, Side.DECODE)
        [lost] = world.ends[Side.DECODE].nodes[0].transport.outbox
        assert isinstance(lost.message, Abort)
        asked.failed = True  # so that the router does not tell P
        world.ends[Side.DECODE].nodes[0].transport.outbox.clear()
        world.run()
        aborts = [s for s in world.log if isinstance(s, Sent) and isinstance(s.message, Abort)]
        assert len(aborts) == 2
        must_be_clean(world)


@rank_counts
def test_the_same_choices_make_the_same_run(ranks: int) -> None:
    logs = []
    for _ in range(2):
        with simulated(
            random.Random(4).randrange, message_faults=3, write_faults=1, ranks=ranks
        ) as world:
            for n in range(3):
                world.ask(prompt(n, 30))
            for _ in range(60):
                world.turn()
            logs.append(list(world.log))
    assert len(logs[0]) > 100
    assert logs[0] == logs[1]


# Controls: faults that must be named, and damage that must be seen.


def expired_is_drained(transfer: drain.Incoming) -> drain.Step:
    """ABORTED for too long: take it for drained."""
    if transfer.phase is not Phase.ABORTED:
        return transfer, ()
    return transfer._enter(Phase.LOCAL_DRAINED)


def test_a_timeout_that_frees_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does damage: bytes of the request that was given up land in the memory's next owner."""
    monkeypatch.setattr(drain.Incoming, "expire", expired_is_drained)
    with simulated(pages=ONE_AT_A_TIME) as world:
        asked = world.ask(prompt(0, 39))
        world.run(lambda: bool(flying(world)))
        slow = flying(world)
        world.network.way = [thing for thing in world.network.way if thing not in slow]
        world.abort(asked, Side.DECODE)
        victim = world.ask(prompt(3, 39), steps=8)
        world.run(lambda: bool(victim.outputs))
        assert is_right(victim)
        world.network.way += slow
        world.network.settle()
        world.run(lambda: is_done(victim))
        assert not is_right(victim)
        violation = world.verdict(arrivals=True, live=False)
        assert violation is not None
        assert violation.clause is Clause.S2


def test_a_source_that_is_freed_too_soon_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    over = protocol.PrefillRank._over
    monkeypatch.setattr(
        protocol.PrefillRank, "_over", lambda self, source: source.failed or over(self, source)
    )
    with simulated() as world:
        asked = world.ask(prompt(0, 39))
        world.run(lambda: bool(flying(world)))
        world.abort(asked, Side.PREFILL)
        world.turn()
        violation = world.verdict(arrivals=True, live=False)
        assert violation is not None
        assert violation.clause is Clause.S8


def test_a_piece_that_is_left_out_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = prefill_node.Plan.runs
    monkeypatch.setattr(
        prefill_node.Plan, "runs", lambda plan, piece, *ends: runs(plan, piece, *ends)[piece == 1 :]
    )
    with simulated() as world:
        asked = world.ask(prompt(0, 39), steps=6)
        world.run()
        assert is_done(asked)
        assert not is_right(asked)


def test_memory_that_is_not_given_back_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with simulated() as world:
        asked = world.ask(prompt(0, 39))
        [engine] = world.ends[Side.DECODE].instance.engines
        monkeypatch.setattr(engine, "drop", lambda request: None)
        world.run(lambda: bool(flying(world)))
        world.abort(asked, Side.DECODE)
        world.run()
        violation = world.verdict(arrivals=True)
        assert violation is not None
        assert violation.clause is Clause.S9
