"""The drain contract judges runs: legal ones pass, and each clause is broken by one that does."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oracle_tests.drain_runs import (
    PARTS,
    Run,
    abort,
    aborted,
    advertise,
    arrive,
    breaks,
    d,
    free_sources,
    full,
    key,
    lines,
    live,
    message,
    move,
    p,
    post,
    reduce,
    settle,
    topology,
    write,
)
from reference.drain import Clause, Judge, Violation, judge
from reference.protocol import (
    Ack,
    Arrived,
    Closed,
    Completion,
    Counted,
    Delivered,
    Died,
    Dropped,
    Fenced,
    Held,
    Landed,
    Moved,
    Observation,
    Outcome,
    Phase,
    Posted,
    Reading,
    Reduced,
    Reserved,
    Sent,
    Settled,
    SourceFreed,
    Status,
    Topology,
)

ONE, TWO, FAN = topology(), topology(ranks=2), topology(fan_in=2)
K, NEXT = key(), key(generation=1)


@pytest.mark.parametrize(
    ("ranks", "fan_in", "pieces", "style", "arrivals"),
    list(product((1, 2, 3), (1, 2), (1, 3), Completion, (True, False))),
)
def test_a_straight_transfer_is_legal(
    ranks: int, fan_in: int, pieces: int, style: Completion, arrivals: bool
) -> None:
    shape = topology(ranks, fan_in, pieces)
    run = advertise(shape, K) + write(shape, K, style, arrivals=arrivals) + live(shape, K)
    run += advertise(shape, NEXT) + write(shape, NEXT, style, arrivals=arrivals)
    run += live(shape, NEXT, number=3)[: -2 * len(lines(shape))]
    assert judge(run, shape, arrivals=arrivals, live=False) is None


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("posted", [False, True])
@pytest.mark.parametrize("shape", [ONE, TWO, FAN, topology(ranks=3, fan_in=2)])
def test_a_straight_abort_is_legal(shape: Topology, posted: bool, slow: bool) -> None:
    run = advertise(shape, K)
    for to, writer in lines(shape) if posted else ():
        run += post(K, to, writer, 0) + arrive(K, to, writer, 0)[:1]
        run += arrive(K, to, writer, 0)[1:] + settle(K, to, writer, 0)
    run += abort(shape, K, slow=slow) + free_sources(shape, 1)
    assert judge(run, shape) is None


@given(st.data())
def test_ranks_may_interleave(data: st.DataObject) -> None:
    """Between their rounds, ranks and their writers owe each other no order."""
    shape = topology(ranks=2, fan_in=2, pieces=2)
    whole = write(shape, K, Completion.STATUS) + move(shape, K, Phase.LANDED)
    by_rank = [[seen for seen in whole if _rank(seen) == rank] for rank in range(2)]
    mixed: Run = []
    while any(by_rank):
        rank = data.draw(st.sampled_from([r for r in range(2) if by_rank[r]]))
        mixed.append(by_rank[rank].pop(0))
    run = advertise(shape, K) + mixed + live(shape, K)[2:]
    assert judge(run, shape) is None


def _rank(seen: Observation) -> int:
    """The rank of D that an observation is about."""
    if isinstance(seen, Moved | Arrived | Delivered):
        return seen.at.rank
    assert not isinstance(seen, Reserved | Reading | Reduced | Counted | Held | SourceFreed)
    assert not isinstance(seen, Died | Fenced)
    return seen.to.rank


def test_a_failure_before_anything_was_advertised_frees_at_once() -> None:
    run: Run = [Reserved(at=d(r), key=K, pages=(1,)) for r in range(2)]
    run += move(TWO, K, Phase.FAILED) + reduce(TWO, 1)
    run += move(TWO, K, Phase.RELEASABLE, Phase.FREE, number=1)
    assert judge(run, TWO) is None


DEAD: Run = [
    *advertise(ONE, K),
    *post(K, d(), p(), 0),
    *arrive(K, d(), p(), 0)[:1],
    Died(peer=p()),
    *move(ONE, K, Phase.FAILED, Phase.ABORTED, Phase.QUARANTINED),
]
FENCE = Fenced(at=d(), writer=p())
DRAIN: Run = [
    *move(ONE, K, Phase.LOCAL_DRAINED),
    *reduce(ONE, 1),
    *move(ONE, K, Phase.RELEASABLE, Phase.FREE, number=1),
]


def test_a_dead_writer_is_waited_for_until_its_fence() -> None:
    assert judge(DEAD, ONE) is None
    assert judge([*DEAD, FENCE, *DRAIN], ONE) is None
    breaks([*DEAD, *DRAIN], ONE, Clause.S2)
    breaks([*DEAD, *message(p(life=1), d(), Ack(K, p(life=1)))], ONE, Clause.S3)
    breaks([*DEAD, FENCE], ONE, Clause.L1)
    breaks([*DEAD, FENCE, *arrive(K, d(), p(), 0)[1:]], ONE, Clause.S1)
    alive = [seen for seen in DEAD if not isinstance(seen, Died)]
    breaks([*alive, FENCE, *DRAIN], ONE, Clause.S2)


def test_an_ack_of_the_next_life_is_stale() -> None:
    other = p(life=1)
    run = [*DEAD, Closed(at=other, key=K, to=d()), *message(other, d(), Ack(K, other))]
    breaks(run, ONE, Clause.S7)
    run[-1] = Delivered(at=d(), message=Ack(K, other), changed=False)
    assert judge(run, ONE) is None
    breaks([*run, *DRAIN], ONE, Clause.S2)


def test_a_dead_rank_of_d_excuses_its_peers_and_its_writers() -> None:
    run = [*advertise(TWO, K), *post(K, d(1), p(1), 0), Died(peer=d(1))]
    run += post(K, d(1), p(1), 1)
    late = settle(K, d(1), p(1), 0, Outcome.BROKEN) + settle(K, d(1), p(1), 1, Outcome.BROKEN)
    late += [Closed(at=p(1), key=K, to=d(1)), *message(p(1), d(1), Ack(K, p(1)))]
    late += [*message(p(1), d(1), Status(K, p(1))), *free_sources(TWO, 1)]
    assert judge([*run, *arrive(K, d(1), p(1), 0), *late], TWO) is None
    breaks([*advertise(TWO, K), *free_sources(TWO, 1)], TWO, Clause.L5)


def test_a_writer_may_hear_of_its_writes_after_their_reader_and_another_writer_died() -> None:
    """The key is free at D, which knows that all is there, before the writer has asked."""
    shape = topology(fan_in=2)
    run, late = full(shape), settle(K, d(), p(1), 0)
    run.remove(*late)
    run = [seen for seen in run if not isinstance(seen, SourceFreed)]
    assert judge([*run, *late, *free_sources(shape, 2)], shape) is None
    assert judge([*run, Died(peer=d()), Died(peer=p(0)), *late], shape, live=False) is None
    breaks([*run, *late, *late], shape, Clause.ORDER, live=False)


@pytest.mark.parametrize("outcome", [Outcome.BROKEN, Outcome.UNKNOWN])
def test_only_a_handle_of_unknown_end_keeps_a_source(outcome: Outcome) -> None:
    run = advertise(ONE, K) + post(K, d(), p(), 0) + settle(K, d(), p(), 0, outcome)
    run += move(ONE, K, Phase.FAILED, Phase.ABORTED, Phase.QUARANTINED)
    freed = [*run, *free_sources(ONE, 1)]
    if outcome is Outcome.BROKEN:
        breaks(run, ONE, Clause.L5)
        assert judge(freed, ONE) is None
    else:
        assert judge(run, ONE) is None
        breaks(freed, ONE, Clause.S8)


def _is(seen: Observation, phase: Phase, rank: int = 0) -> bool:
    return isinstance(seen, Moved) and seen.phase is phase and seen.at.rank == rank


@pytest.mark.parametrize("phase", [Phase.ABORTED, Phase.QUARANTINED])
def test_a_lost_abort_must_be_sent_again(phase: Phase) -> None:
    whole = aborted(ONE, slow=True)
    end = next(i for i, seen in enumerate(whole) if _is(seen, phase)) + 1
    ack = next(
        i
        for i, seen in enumerate(whole)
        if isinstance(seen, Sent) and isinstance(seen.message, Ack)
    )
    acked = whole[: ack + 2]
    breaks(whole[:end], ONE, Clause.L2)
    breaks([*acked, *free_sources(ONE, 1)], ONE, Clause.L1)
    assert judge(whole[:end], ONE, live=False) is None


def test_everything_reserved_or_held_ends() -> None:
    whole = full(ONE)
    for phase in (Phase.ADVERTISED, Phase.LANDED, Phase.LIVE):
        end = next(i for i, seen in enumerate(whole) if _is(seen, phase)) + 1
        breaks(whole[:end], ONE, Clause.L5)
    breaks(whole[:-1], ONE, Clause.L5)


def test_a_step_that_one_rank_missed_is_no_matter_of_time() -> None:
    for phase, clause in ((Phase.LIVE, Clause.S6), (Phase.FREE, Clause.S5)):
        whole = full(TWO)
        end = next(i for i, seen in enumerate(whole) if _is(seen, phase, 1))
        number = 2 if phase is Phase.LIVE else 3
        assert judge(whole[:end], TWO, live=False) is None
        breaks(whole[:end] + reduce(TWO, number), TWO, clause, live=False)


def test_a_dropped_piece_is_as_if_never_taken() -> None:
    taken = post(K, d(), p(), 0)[:1]
    whole = [*advertise(ONE, K), *taken, Dropped(at=p(), key=K, to=d(), piece=0)]
    assert judge(whole + abort(ONE, K) + free_sources(ONE, 1), ONE) is None


def test_without_arrivals_a_note_stands_for_the_bytes_of_what_was_posted() -> None:
    run = advertise(ONE, K) + write(ONE, K, Completion.NOTIFY, arrivals=False)
    late = [seen for seen in run if isinstance(seen, Settled) and seen.piece == 1]
    run = [seen for seen in run if seen not in late]
    assert judge([*run, *live(ONE, K)[:-2], *late, *live(ONE, K)[-2:]], ONE, arrivals=False) is None
    lost = [seen for seen in run if not (isinstance(seen, Posted) and seen.piece == 1)]
    breaks(lost + live(ONE, K), ONE, Clause.S6, arrivals=False)


def test_a_key_that_is_over_is_one_constant_and_rounds_count_from_the_last_common_one() -> None:
    def state(run: Run, shape: Topology = ONE) -> tuple[object, object]:
        seen_by = Judge(shape)
        for seen in run:
            seen_by.observe(seen)
        return seen_by.state()

    after_live, after_abort = state(full(ONE)), state(aborted(ONE))
    assert after_live[0] == after_abort[0]
    idle = state([*full(ONE), *reduce(ONE, 3)])
    assert idle == after_live
    assert hash(idle) == hash(after_live)
    assert state(full(ONE)[:-1]) != after_live
    split = [
        [*advertise(TWO, K), *idle, *abort(TWO, K, number=number)[:-1]]
        for number, idle in ((1, []), (2, reduce(TWO, 1)))
    ]
    assert state(split[0], TWO) == state(split[1], TWO)
    assert state(split[0][:-1], TWO) != state(split[1], TWO)


def test_a_judge_that_found_a_violation_is_where_it_was() -> None:
    seen_by = Judge(ONE)
    for seen in advertise(ONE, K):
        seen_by.observe(seen)
    kept = seen_by.state()
    with pytest.raises(Violation, match=r"S1: piece 0 of writer P1 .* had not sent that writer"):
        seen_by.observe(post(K, d(), p(1), 0)[0])
    assert seen_by.state() == kept


def test_sentences_name_rank_key_writer_and_piece() -> None:
    shape = topology(ranks=2, fan_in=2)
    run = advertise(shape, K) + write(shape, K, Completion.NOTIFY) + live(shape, K)
    run = [
        seen
        for seen in run
        if not (isinstance(seen, Arrived) and seen.writer == p(3) and seen.part == PARTS - 1)
        and not (isinstance(seen, Settled) and seen.at == p(3))
    ]
    assert str(judge(run, shape)) == (
        "S6: rank 0 of D made room 1 (generation 0) live before piece 0 of writer P3 had landed "
        "on rank 1 of D."
    )
    fenced = [*DEAD, *message(p(), d(), Landed(K, p(), 0)), *DRAIN]
    assert str(judge(fenced, ONE)) == (
        "S2: rank 0 of D took room 1 (generation 0) for drained without an ACK from writer P0 or "
        "a fence against it."
    )


def test_an_ack_that_nobody_sent_does_not_hide_a_write() -> None:
    forged = [Delivered(at=d(), message=Ack(K, p()), changed=True), *DRAIN]
    run = [*advertise(ONE, K), *move(ONE, K, Phase.FAILED, Phase.ABORTED)]
    breaks([*run, *forged], ONE, Clause.S1)
    breaks([*run, *post(K, d(), p(), 0)[:1], *forged], ONE, Clause.S1)
    breaks([*run, *post(K, d(), p(), 0), *forged], ONE, Clause.S1)
    breaks([*run, *post(K, d(), p(), 0), *arrive(K, d(), p(), 0)[:1], *forged], ONE, Clause.S1)
    assert judge([*run, Died(peer=p()), FENCE, *forged], ONE) is None
