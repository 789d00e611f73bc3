"""One execution of a target without an engine: ranks, messages and writes in an order of the tape.

Each draw says what happens next, among all that may; 0 ends the drawn part, after which whatever
has waited longest happens, until nothing is left.  Two oracles look at each event: *drain*, the
judge of the contract's clauses, and *provenance*, which reads what lies in live destinations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import TypeVar

import msgspec

import systems
from fuzz.explore.choices import events, fair
from fuzz.explore.draw import sentence
from fuzz.explore.judged import Court
from fuzz.explore.memory import Memory
from fuzz.explore.minimise import fewest
from fuzz.explore.parts import State
from fuzz.explore.words import Event, Kind
from fuzz.explore.world import World
from fuzz.outcome import Operation, Outcome
from fuzz.step import Violation
from fuzz.tape import Tape
from fuzz.targets import Target
from fuzz.targets.multi_rank import described, draw_bounds
from fuzz.targets.rank_events import RankEvents
from reference import drain

UNLUCKY, RESTARTS = 0.01, 1.0
"""Weights of a fault or an abort, and of a restart, beside 1 for what is bound to happen."""
LEAST = 0.05
"""Weight of what a seed's swarm would leave out: it is only late."""
TAIL = 2_000
"""Events after the drawn ones at most."""
T = TypeVar("T")


class Interleaving:
    """A run in progress.

    Fields:
        setup: the part of its tape that draws the bounds of its world.
        events: what happened by choice; tail: what happened afterwards.
        rested: nothing is left to happen, so that a violation is one of liveness.
        violations: of the last event.
        seen: what was seen how often.
    """

    def __init__(self, setup: Sequence[int]) -> None:
        self.setup = [*setup]
        self.world = World(draw_bounds(Tape(setup)), systems.load_ranks())
        self.events: list[Event] = []
        self.tail: list[Event] = []
        self.rested = False
        self.violations: list[Violation] = []
        self.seen: Counter[str] = Counter()
        self.digest = blake2b(digest_size=16)
        self._court, self._memory = Court(self.world), Memory(self.world)
        self._account = RankEvents(self.world, self.seen)
        self._state = self._court.start()

    def found(self) -> list[Event]:
        """What may happen next; nothing once only bad luck is left."""
        found = self._guarded("events", lambda: events(self.world, self._state[:-1])) or []
        goes_on = any(self._fair(event) or event.kind is Kind.RESTART for event in found)
        return found if goes_on else []

    def happen(self, event: Event) -> None:
        """Let one of them happen, by choice."""
        self.events.append(event)
        self._happen(event)

    def rest(self) -> None:
        """Let everything that is bound to happen do so, and judge where it ends."""
        last: dict[Event, int] = {}
        visits: Counter[State] = Counter()
        for step in range(TAIL):
            bound = [event for event in self.found() if self._fair(event)]
            visits[self._state] += 1
            # one that came back so often has had each of them happen in between
            if visits[self._state] > len(bound):
                break
            event = min(bound, key=lambda event: last.get(event, -1))
            last[event] = step
            self.tail.append(event)
            self._happen(event)
            if self.violations:
                break
        if self.violations:
            return
        self.rested = True
        bad = self._court.finish(self._state[-1])
        self.violations = [Violation("drain", bad.clause.value, bad.sentence)] if bad else []

    def again(self, wanted: Sequence[Event], *, setup: Sequence[int] | None = None) -> Interleaving:
        """The run of those of the events that may happen when it is their turn, in this world or in
        another; and then of the rest, if this one rests."""
        run = Interleaving(self.setup if setup is None else setup)
        for event in wanted:
            if event in run.found():
                run.happen(event)
                if run.violations:
                    return run
        if self.rested:
            run.rest()
        return run

    def weights(self, found: Sequence[Event], swarm: Sequence[float]) -> list[float]:
        """How often each event is drawn, for generation; `swarm` is by kind."""
        return [
            max(swarm[event.kind], LEAST)
            if self._fair(event)
            else swarm[event.kind] * (RESTARTS if event.kind is Kind.RESTART else UNLUCKY)
            for event in found
        ]

    def _fair(self, event: Event) -> bool:
        return fair(self.world, self._state[:-1], event)

    def _happen(self, event: Event) -> None:
        kind = event.kind.name.lower()
        happened = self._guarded(kind, lambda: self.world.happen(self._state[:-1], event))
        if happened is None:
            return
        after, observations = happened
        judge, found = self._state[-1], []
        try:
            judge = self._court.judged(judge, observations)
        except drain.Violation as bad:
            found.append(Violation("drain", bad.clause.value, bad.sentence))
        if event.kind is Kind.ARRIVE:
            found += self._memory.land(event.what)
        for seen in observations:
            found += self._memory.observe(seen)
        self.digest.update(msgspec.msgpack.encode(observations))
        self._account.observe(event, observations, after)
        self.violations, self._state = found, (*after, judge)

    def _guarded(self, what: str, call: Callable[[], T]) -> T | None:
        """What `call` returns; where the protocol raises instead, that is what is wrong."""
        try:
            return call()
        except Exception as cause:
            crash = f"{what}.{type(cause).__name__}"
            self.violations = [Violation("crash", crash, f"{what} raised {cause!r}.")]
            return None


def execute(target: Target, tape: Tape, *, most: int) -> Outcome:
    """Let happen what `tape` says, at most so many events, and then the rest; stop at the first
    that breaks something."""
    bounds = draw_bounds(tape)
    run, swarm = Interleaving(tape.values), tape.swarm(len(Kind))
    while len(run.events) < most and (found := run.found()) and not run.violations:
        with tape.span("operation"):
            choice = tape.choose([0.0, *run.weights(found, swarm)])
        if not choice:
            break
        run.happen(found[choice - 1])
    if not run.violations:
        run.rest()
    return Outcome(
        target=target.name,
        values=tape.values,
        bounds=tape.bounds,
        spans=tape.spans,
        operations=[
            Operation(f"{event.kind.name.lower()}: {sentence(run.world, event)}", [], 0, False)
            for event in (*run.events, *run.tail)
        ],
        violations=run.violations,
        digest=run.digest.hexdigest(),
        events=dict(run.seen),
        ratios={},
        requests=len(bounds.rooms),
        tokens=0,
        skipped=[],
        setup=described(bounds),
    )


def shrink(target: Target, failing: Outcome) -> Outcome:
    """The same failure in fewer events, of a plainer world, and in an order that is as ordinary
    as it can be.  What is left out of a run makes others impossible, which are left out as well,
    so that runs shrink as events and only then become a tape again."""
    signature = failing.signature

    def shows(run: Interleaving) -> bool:
        return bool(run.violations) and run.violations[0].signature == signature

    run, before = played(failing.values), None
    while before != (before := _taped(run)):
        run = fewest(run.again, run, shows)
        run = _plainer(run, shows)
        run = _ordinary(run, shows)
    smallest = execute(target, Tape(_taped(run)), most=target.operations)
    return smallest if smallest.signature == signature else failing


def played(values: Sequence[int]) -> Interleaving:
    """The run of a tape, all of it chosen as far as that is what breaks something."""
    tape = Tape(values)
    draw_bounds(tape)
    run = Interleaving(tape.values)
    while (found := run.found()) and not run.violations:
        choice = tape.draw(len(found) + 1)
        if not choice:
            break
        run.happen(found[choice - 1])
    if not run.violations:
        run.rest()
    return run if run.violations and run.rested else run.again([*run.events, *run.tail])


def _plainer(run: Interleaving, shows: Callable[[Interleaving], bool]) -> Interleaving:
    """Each value of the bounds as low as it gets."""
    for place, value in enumerate(run.setup):
        for lower in range(value):
            setup = [*run.setup[:place], lower, *run.setup[place + 1 :]]
            tried = run.again(run.events, setup=setup)
            if shows(tried) and len(tried.events) <= len(run.events):
                run = tried
                break
    return run


def _ordinary(run: Interleaving, shows: Callable[[Interleaving], bool]) -> Interleaving:
    """Neighbours change places as long as that makes the tape smaller."""
    values, place = _taped(run), 0
    while place + 1 < len(run.events):
        first, second = run.events[place : place + 2]
        tried = run.again([*run.events[:place], second, first, *run.events[place + 2 :]])
        if shows(tried) and len(tried.events) <= len(run.events):
            smaller = _taped(tried)
            if smaller < values:
                values, run, place = smaller, tried, max(0, place - 1)
                continue
        place += 1
    return run


def _taped(run: Interleaving) -> list[int]:
    """The tape of a run."""
    again, values = Interleaving(run.setup), [*run.setup]
    for event in run.events:
        values.append(1 + again.found().index(event))
        again.happen(event)
    return values
