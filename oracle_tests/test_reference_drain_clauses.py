"""Each clause of the drain contract is broken by a legal run with one small change."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from oracle_tests.drain_runs import (
    SOURCE,
    Run,
    aborted,
    arrive,
    breaks,
    d,
    full,
    key,
    move,
    p,
    pages,
    post,
    reduce,
    settle,
    topology,
)
from reference.drain import Clause, judge
from reference.protocol import (
    Abort,
    Ack,
    Advertise,
    Arrived,
    Closed,
    Completion,
    Counted,
    Delivered,
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
    Taken,
    Topology,
)

ONE, TWO, FAN = topology(), topology(ranks=2), topology(fan_in=2)
K, NEXT = key(), key(generation=1)

# Each clause is broken by a run that is a legal one but for a small change; the place of the
# change is the first observation that `at` accepts, and `new` stands there instead.

Place = Callable[[Observation], bool]


def change(run: Run, at: Place, new: Callable[[Observation], Run]) -> Run:
    index = next(i for i, seen in enumerate(run) if at(seen))
    return [*run[:index], *new(run[index]), *run[index + 1 :]]


def moved(phase: Phase, rank: int = 0) -> Place:
    return lambda seen: isinstance(seen, Moved) and seen.phase is phase and seen.at.rank == rank


def sent(kind: type) -> Place:
    return lambda seen: isinstance(seen, Sent) and isinstance(seen.message, kind)


def first(kind: type) -> Place:
    return lambda seen: isinstance(seen, kind)


def before(*new: Observation) -> Callable[[Observation], Run]:
    return lambda seen: [*new, seen]


def after(*new: Observation) -> Callable[[Observation], Run]:
    return lambda seen: [seen, *new]


def instead(*new: Observation) -> Callable[[Observation], Run]:
    return lambda seen: list(new)


CHANGES: list[tuple[str, Clause, Topology, Run, Place, Callable[[Observation], Run]]] = [
    (
        "a phase skipped",
        Clause.ORDER, ONE, full(ONE), moved(Phase.LANDED), instead(),
    ),
    (
        "failed overwritten",
        Clause.ORDER, ONE, aborted(ONE), moved(Phase.ABORTED),
        instead(*move(ONE, K, Phase.LANDED)),
    ),
    (
        "a timeout frees",
        Clause.ORDER, ONE, aborted(ONE, slow=True), moved(Phase.QUARANTINED),
        after(*move(ONE, K, Phase.RELEASABLE)),
    ),
    (
        "ready reduced by MAX",
        Clause.ORDER, TWO, aborted(TWO), moved(Phase.LOCAL_DRAINED, 1), instead(),
    ),
    (
        "released though advertised",
        Clause.ORDER, ONE, aborted(ONE), moved(Phase.ABORTED),
        instead(*move(ONE, K, Phase.RELEASABLE)),
    ),
    ("read before live", Clause.ORDER, ONE, full(ONE), moved(Phase.LIVE),
     before(Reading(at=d(), key=K))),
    (
        "freed under a reader",
        Clause.ORDER, ONE, full(ONE),
        lambda seen: isinstance(seen, Reading) and seen.ended, instead(),
    ),
    ("a piece taken twice", Clause.ORDER, ONE, full(ONE), first(Settled),
     after(*post(K, d(), p(), 0))),
    ("reserved twice", Clause.ORDER, ONE, full(ONE), first(Reserved),
     after(Reserved(at=d(), key=K, pages=(5,)))),
    ("read without being posted", Clause.ORDER, ONE, full(ONE), first(Posted), instead()),
    (
        "posted without being taken",
        Clause.ORDER, ONE, full(ONE), first(Taken), instead(),
    ),
    (
        "settled twice",
        Clause.ORDER, ONE, full(ONE), first(Settled), after(*settle(K, d(), p(), 0)),
    ),
    (
        "live before landed elsewhere",
        Clause.ORDER, TWO, full(TWO), moved(Phase.LANDED, 1), instead(),
    ),
    (
        "failed while live elsewhere",
        Clause.ORDER, TWO, full(TWO), moved(Phase.LIVE, 1),
        instead(Moved(at=d(1), key=K, phase=Phase.FAILED, round=1)),
    ),
    (
        "a write after free",
        Clause.S1, ONE, full(ONE), moved(Phase.FREE), after(*post(K, d(), p(), 0)),
    ),
    (
        "bytes after free",
        Clause.S1, ONE, full(ONE), moved(Phase.FREE), after(*arrive(K, d(), p(), 0)),
    ),
    (
        "an address sent after free",
        Clause.S1, ONE, full(ONE), moved(Phase.FREE),
        after(Sent(at=d(), to=p(), message=Advertise(K, d(), 0, 0))),
    ),
    ("no address sent", Clause.S1, ONE, full(ONE), sent(Advertise), instead()),
    (
        "a piece in the queue",
        Clause.S1, FAN, full(FAN), moved(Phase.FREE),
        before(*post(K, d(), p(0), 2)[:1]),
    ),
    (
        "pages of another",
        Clause.S1, ONE, full(ONE), first(Posted),
        before(Reserved(at=d(), key=NEXT, pages=pages(0, K)[:1])),
    ),
    ("no ACK", Clause.S2, ONE, aborted(ONE), moved(Phase.ABORTED),
     after(*move(ONE, K, Phase.LOCAL_DRAINED))),
    ("an ACK for closing", Clause.S3, ONE, aborted(ONE), first(Closed), instead()),
    (
        "an ACK for another",
        Clause.S3, FAN, aborted(FAN), sent(Ack),
        instead(Sent(at=p(1), to=d(), message=Ack(K, p(0)))),
    ),
    (
        "an ACK while posted",
        Clause.S3, ONE, aborted(ONE), moved(Phase.FAILED), before(*post(K, d(), p(), 0)),
    ),
    (
        "an ACK while taken",
        Clause.S3, ONE, aborted(ONE), moved(Phase.FAILED), before(*post(K, d(), p(), 0)[:1]),
    ),
    *(
        (
            f"an ACK after {outcome.name}",
            Clause.S3, ONE, aborted(ONE), moved(Phase.FAILED),
            before(*post(K, d(), p(), 0), *settle(K, d(), p(), 0, outcome)),
        )
        for outcome in (Outcome.BROKEN, Outcome.UNKNOWN)
    ),
    ("taken after close", Clause.S4, ONE, aborted(ONE), first(Closed),
     after(*post(K, d(), p(), 0))),
    (
        "posted after close",
        Clause.S4, ONE, aborted(ONE), first(Closed),
        lambda seen: [*post(K, d(), p(), 0)[:1], seen, *post(K, d(), p(), 0)[1:]],
    ),
    (
        "freed before live elsewhere",
        Clause.S5, TWO, full(TWO), moved(Phase.LIVE),
        after(Moved(at=d(), key=K, phase=Phase.FREE, round=1)),
    ),
    ("freed twice", Clause.S5, ONE, full(ONE), moved(Phase.FREE),
     after(*move(ONE, K, Phase.FREE, number=2))),
    (
        "freed in another round",
        Clause.S5, TWO, full(TWO), moved(Phase.FREE, 1),
        instead(*reduce(TWO, 3), Moved(at=d(1), key=K, phase=Phase.FREE, round=3)),
    ),
    (
        "live in another round",
        Clause.S6, TWO, full(TWO), moved(Phase.LIVE, 1),
        instead(Moved(at=d(1), key=K, phase=Phase.LIVE, round=2)),
    ),
    (
        "a part missing",
        Clause.S6, TWO, full(TWO),
        lambda seen: isinstance(seen, Posted) and seen.piece == 1 and seen.at == p(1),
        lambda seen: [seen, *move(TWO, K, Phase.LANDED)[:1], *move(TWO, K, Phase.LIVE)[:1]],
    ),
    ("aux before KV", Clause.S6, ONE, full(ONE), first(Posted), after(*post(K, d(), p(), 1))),
    (
        "a status before the end",
        Clause.S6, ONE, full(ONE, Completion.STATUS), first(Posted),
        after(Sent(at=p(), to=d(), message=Status(K, p()))),
    ),
    (
        "a note after live",
        Clause.S7, ONE, full(ONE), moved(Phase.LIVE),
        after(Delivered(at=d(), message=Landed(K, p(), 0), changed=True)),
    ),
    (
        "an ACK after free",
        Clause.S7, ONE, aborted(ONE), moved(Phase.FREE),
        after(Delivered(at=d(), message=Ack(K, p()), changed=True)),
    ),
    (
        "an abort that D acts on",
        Clause.S7, ONE, full(ONE), first(Posted),
        after(Delivered(at=d(), message=Abort(K, d()), changed=True)),
    ),
    (
        "a note of another life",
        Clause.S7, ONE, full(ONE), first(Posted),
        after(Delivered(at=d(), message=Landed(K._replace(incarnation=1), p(), 0), changed=True)),
    ),
    (
        "a note from a stranger",
        Clause.S7, ONE, full(ONE), first(Posted),
        after(Delivered(at=d(), message=Landed(K, p(1), 0), changed=True)),
    ),
    (
        "a floor above a key in use",
        Clause.S7, ONE, full(ONE), sent(Advertise),
        instead(Sent(at=d(), to=p(), message=Advertise(K, d(), 1, 0))),
    ),
    ("an unheld source", Clause.S8, ONE, full(ONE), first(Held), instead()),
    (
        "a source freed under a read",
        Clause.S8, ONE, full(ONE), first(Arrived),
        before(SourceFreed(at=p(), source=SOURCE, round=1)),
    ),
    (
        "a source freed before its read",
        Clause.S8, ONE, full(ONE), first(Posted),
        before(SourceFreed(at=p(), source=SOURCE, round=1)),
    ),
    ("a source freed twice", Clause.S8, ONE, full(ONE), first(SourceFreed),
     after(SourceFreed(at=p(), source=SOURCE, round=1))),
    (
        "sources freed in two rounds",
        Clause.S8, TWO, full(TWO),
        lambda seen: isinstance(seen, SourceFreed) and seen.at == p(1),
        instead(SourceFreed(at=p(1), source=SOURCE, round=2)),
    ),
    (
        "a page lost",
        Clause.S9, ONE, full(ONE), first(Counted),
        instead(Counted(at=d(), free=7, owned=2, held=0, total=10)),
    ),
    (
        "a page owned too early",
        Clause.S9, ONE, full(ONE), first(Posted),
        before(Counted(at=d(), free=8, owned=2, held=0, total=10)),
    ),
    (
        "a page more than before",
        Clause.S9, ONE, full(ONE), first(Counted),
        after(Counted(at=d(), free=9, owned=2, held=0, total=11)),
    ),
    (
        "a full quarantine",
        Clause.L3, ONE, aborted(ONE, slow=True), moved(Phase.QUARANTINED),
        after(*reduce(ONE, 1), *reduce(ONE, 2), Reserved(at=d(), key=NEXT, pages=(9,))),
    ),
    ("a round left out", Clause.L4, ONE, full(ONE), first(Reduced), instead()),
    (
        "live in a round that nobody took part in",
        Clause.L4, ONE, full(ONE), moved(Phase.LIVE),
        instead(Moved(at=d(), key=key(), phase=Phase.LIVE, round=99)),
    ),
    (
        "freed after its round",
        Clause.S5, ONE, full(ONE), moved(Phase.FREE),
        instead(Moved(at=d(), key=key(), phase=Phase.FREE, round=1)),
    ),
    (
        "a source freed outside of any round",
        Clause.S8, ONE, full(ONE), first(SourceFreed),
        instead(SourceFreed(at=p(), source=SOURCE, round=0)),
    ),
    (
        "a round too far",
        Clause.L4, TWO, full(TWO), first(Reduced), after(Reduced(at=d(), round=2, values=3)),
    ),
    (
        "other values",
        Clause.L4, TWO, full(TWO),
        lambda seen: isinstance(seen, Reduced) and seen.at == d(1),
        instead(Reduced(at=d(1), round=1, values=4)),
    ),
]  # fmt: skip


@pytest.mark.parametrize("change_of", CHANGES, ids=[row[0] for row in CHANGES])
def test_each_clause_is_broken_by_a_small_change(
    change_of: tuple[str, Clause, Topology, Run, Place, Callable[[Observation], Run]],
) -> None:
    _, clause, shape, run, at, new = change_of
    assert judge(run, shape) is None
    breaks(change(run, at, new), shape, clause)


def test_every_clause_is_broken_by_some_run() -> None:
    early = {Clause.L1, Clause.L2, Clause.L5}  # by runs that stop early, in test_reference_drain
    broken = {row[1] for row in CHANGES} | early
    assert broken == set(Clause)
