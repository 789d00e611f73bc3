"""One execution of a target without an engine: ranks, messages and writes in an order of the tape.

Each draw says what happens next, among all that may; 0 ends the drawn part, after which whatever
has waited longest happens, until nothing is left.  Two oracles look at each event: *drain*, the
judge of the contract's clauses, and *provenance*, which reads what lies in live destinations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from typing import TypeVar

import systems
from fuzz.coverage import Coverage, several
from fuzz.digest import Digest
from fuzz.explore.choices import events, fair
from fuzz.explore.draw import sentence
from fuzz.explore.judged import Court
from fuzz.explore.memory import Memory
from fuzz.explore.minimise import LIVENESS, fewest
from fuzz.explore.parts import State
from fuzz.explore.search import least
from fuzz.explore.words import Event, Kind
from fuzz.explore.world import World
from fuzz.outcome import Operation, Outcome
from fuzz.step import Violation
from fuzz.tape import Tape
from fuzz.targets import Target
from fuzz.targets.multi_rank import described, draw_bounds, plainer
from fuzz.targets.rank_events import RankEvents
from fuzz.watch import Watch
from reference import drain

UNLUCKY, RESTARTS = 0.01, 1.0
"""Weights of a fault or an abort, and of a restart, beside 1 for what is bound to happen."""
LEAST = 0.05
"""Weight of what a seed's swarm would leave out: it is only late."""
TAIL = 2_000
"""Events after the drawn ones at most."""
SHRINKING = 30_000
"""Events played again to leave some out."""
STATES = 4_000, 30_000
"""Of each plainer world that is searched: in full, and one of each kind."""
IN_ALL, WORLDS = 80_000, 100
"""States of all of them, and how many they are."""
T = TypeVar("T")


class Interleaving:
    """A run in progress.

    Fields:
        setup: the part of its tape that draws the bounds of its world.
        events: what happened by choice; tail: what happened afterwards.
        rested: nothing is left to happen, so that a violation is one of liveness.
        violations: of the last event.
        seen: what was seen how often.
        memory: the destinations.
    """

    def __init__(self, setup: Sequence[int], watch: Watch | None = None) -> None:
        self.setup = [*setup]
        self.world = World(draw_bounds(Tape(setup)), systems.load_ranks())
        self.events: list[Event] = []
        self.tail: list[Event] = []
        self.rested = False
        self.violations: list[Violation] = []
        self.seen: Counter[str] = Counter()
        self.digest = Digest()
        self._court, self.memory = Court(self.world), Memory(self.world)
        self._account = RankEvents(self.world, self.seen)
        # each event is a value of the tape
        self.coverage = Coverage(lambda: len(self.setup) + len(self.events))
        self._state = self._court.start()
        self._watch = watch
        if watch:
            watch.begin(self)

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
        if self._watch and happened is None:
            self._watch.after(event)
        if happened is None:
            return
        after, observations = happened
        judge, found = self._state[-1], []
        try:
            judge = self._court.judged(judge, observations)
        except drain.Violation as bad:
            found.append(Violation("drain", bad.clause.value, bad.sentence))
        if event.kind is Kind.ARRIVE:
            found += self.memory.land(event.what)
        for seen in observations:
            found += self.memory.observe(seen)
        if self._watch:
            self._watch.after(event, observations)
        self.digest.add(event, observations)
        self.coverage.operation(kind, f"{several(len(self.world.flights(after)))} on the way")
        self.coverage.observe(observations)
        self._account.observe(event, observations, after)
        self.coverage.count(self.seen)
        self.violations, self._state = found, (*after, judge)

    def _guarded(self, what: str, call: Callable[[], T]) -> T | None:
        """What `call` returns; where the protocol raises instead, that is what is wrong."""
        try:
            return call()
        except Exception as cause:
            crash = f"{what}.{type(cause).__name__}"
            self.violations = [Violation("crash", crash, f"{what} raised {cause!r}.")]
            return None


def execute(target: Target, tape: Tape, *, most: int, watch: Watch | None = None) -> Outcome:
    """Let happen what `tape` says, at most so many events, and then the rest; stop at the first
    that breaks something.  `watch` looks on."""
    bounds = draw_bounds(tape)
    run, swarm = Interleaving(tape.values, watch), tape.swarm(len(Kind))
    while len(run.events) < most and (found := run.found()) and not run.violations:
        with tape.span("operation"):
            choice = tape.choose([0.0, *run.weights(found, swarm)])
        if not choice:
            break
        run.happen(found[choice - 1])
    if not run.violations:
        run.rest()
    run.digest.add(tape.values, [v.signature for v in run.violations])
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
        exact=run.digest.exact,
        digest=run.digest.full,
        events=dict(run.seen),
        features=run.coverage.features,
        requests=len(bounds.rooms),
        setup=described(bounds),
    )


def shrink(target: Target, failing: Outcome) -> Outcome:
    """The same failure in fewer events, of a plainer world, and in an order that is as ordinary
    as it can be.

    What is left out of a run makes others impossible, which are left out as well, so that runs
    shrink as events and only then become a tape again.  Where a clause breaks, the worlds that are
    no less plain than what is left are then searched, the plainest first: so all runs in which a
    fault breaks a clause end in one.
    """
    tries = _Tries(played(failing.values), failing.signature)
    with suppress(_Spent):
        tries.shrink()
    for run in (_plainest(tries.least, failing), tries.least):
        if run is not None:
            smallest = execute(target, Tape(_taped(run)), most=target.operations)
            if _same(smallest.signature, failing.signature):
                return smallest
    return failing


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


def _same(signature: str | None, other: str | None) -> bool:
    """Whether two failures are one: which clause of liveness is named depends on who is looked at
    first."""
    lively = {f"drain/{clause}" for clause in LIVENESS}
    return signature == other or {signature, other} <= lively


class _Spent(Exception):
    """Enough was tried."""


class _Tries:
    """Runs that might show a failure in less; `least` is the least that did."""

    def __init__(self, run: Interleaving, signature: str | None) -> None:
        self.least, self._tape = run, _taped(run)
        self._signature = signature
        self._left = SHRINKING

    def shrink(self) -> None:
        """Leave events out, make the world plainer, and the order ordinary, as long as that helps.

        Raises:
            _Spent: where there would be more to try.
        """
        before: list[int] = []
        while before != (before := self._tape):
            fewest(self._again, self.least, self._shows)
            self._plainer()
            self._ordinary()

    def _again(self, wanted: Sequence[Event], setup: Sequence[int] | None = None) -> Interleaving:
        self._left -= len(wanted)
        if self._left < 0:
            raise _Spent
        return self.least.again(wanted, setup=setup)

    def _shows(self, run: Interleaving) -> bool:
        """Whether a run fails alike in fewer events, or in as many of a lesser tape: it is kept."""
        if not run.violations or not _same(run.violations[0].signature, self._signature):
            return False
        tape = _taped(run)
        if (len(run.events), tape) >= (len(self.least.events), self._tape):
            return False
        self.least, self._tape = run, tape
        return True

    def _plainer(self) -> None:
        """Each value of the bounds as low as it gets."""
        for place, value in enumerate(self.least.setup):
            for lower in range(value):
                setup = [*self.least.setup]
                setup[place] = lower
                if self._shows(self._again(self.least.events, setup)):
                    break

    def _ordinary(self) -> None:
        """Neighbours change places as long as that makes the tape smaller."""
        place = 0
        while place + 1 < len(self.least.events):
            events = self.least.events
            first, second = events[place : place + 2]
            if self._shows(self._again([*events[:place], second, first, *events[place + 2 :]])):
                place = max(0, place - 1)
            else:
                place += 1


def _plainest(run: Interleaving, failing: Outcome) -> Interleaving | None:
    """The least run in the plainest world in which the same clause breaks, if a search of so many
    states comes to it."""
    oracle, _, clause = (failing.signature or "").partition("/")
    if oracle != "drain":
        return None
    clauses = LIVENESS if clause in LIVENESS else {clause}
    limit, more = STATES
    left = IN_ALL
    for setup in islice(plainer(run.setup), WORLDS):
        world = World(draw_bounds(Tape(setup)), run.world.ranks)
        found, states = least(world, clauses=clauses, limit=limit, more=more)
        if found is not None:
            shown = Interleaving(setup)
            for event in found.events:
                shown.happen(event)
            return shown
        left -= states
        if left < 0:
            break
    return None


def _taped(run: Interleaving) -> list[int]:
    """The tape of a run."""
    again, values = Interleaving(run.setup), [*run.setup]
    for event in run.events:
        values.append(1 + again.found().index(event))
        again.happen(event)
    return values
