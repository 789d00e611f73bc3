"""Single runs of a world, where there are too many to see all: at random, or by PCT.

A scheduler has three methods: `begin` a run, `choose` the next of the events that may happen, and
be told `done`.  PCT gives each actor a priority and lowers the running one's at d - 1 random steps:
a fault that needs d such orderings in a run of k steps by n actors is met with a chance of at
least 1 / (n * k^(d-1)) (Burckhardt et al., "A randomized scheduler with probabilistic guarantees
of finding bugs", ASPLOS 2010).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from fuzz.explore.choices import events, fair
from fuzz.explore.judged import Court
from fuzz.explore.words import Event, Kind
from fuzz.explore.world import State
from reference.drain import Violation


class Scheduler(Protocol):
    """Decides what happens next; a fair one keeps nothing waiting for ever."""

    fair: bool

    def begin(self, run: int) -> None:
        """Start run number `run`, which with the scheduler's seed decides everything."""

    def choose(self, found: Sequence[Event], fair: Sequence[Event], step: int) -> Event:
        """One of the events that may happen, of which some are fair."""

    def done(self, steps: int) -> None:
        """A run ended after so many steps."""


class Run(NamedTuple):
    """One run: what happened, how it ended, and what is wrong with it."""

    events: tuple[Event, ...]
    state: State
    violation: Violation | None = None


class Random:
    """All events alike, except that what is unlucky is rare, and ends: an abort that comes by
    chance must not be what helps a run to its end."""

    fair = True
    LUCKY_FROM = 60

    def __init__(self, seed: int, *, unlucky: float = 0.1) -> None:
        self.seed = seed
        self.unlucky = unlucky

    def begin(self, run: int) -> None:
        self.draw = random.Random(f"{self.seed}/{run}")

    def choose(self, found: Sequence[Event], fair: Sequence[Event], step: int) -> Event:
        draw = self.draw.random
        among = found if step < self.LUCKY_FROM and draw() < self.unlucky else fair
        return among[int(draw() * len(among))]

    def done(self, steps: int) -> None:
        """Nothing is learnt from a run."""


class Pct:
    """Priorities for actors, and `depth` - 1 points at which the running one's falls.  A run is
    taken to be as long as the longest before it."""

    fair = False

    def __init__(self, seed: int, *, depth: int) -> None:
        self.seed = seed
        self.depth = depth
        self.longest = 1

    def begin(self, run: int) -> None:
        self.draw = random.Random(f"{self.seed}/{run}")
        self.priority: dict[object, float] = {}
        self.changes = {self.draw.randrange(self.longest) for _ in range(self.depth - 1)}

    def choose(self, found: Sequence[Event], fair: Sequence[Event], step: int) -> Event:
        for event in found:
            if actor(event) not in self.priority:
                # every change point ranks below all that started
                self.priority[actor(event)] = self.depth + self.draw.random()
        best = max(found, key=lambda event: self.priority[actor(event)])
        if step in self.changes:
            self.priority[actor(best)] = self.draw.random()
            best = max(found, key=lambda event: self.priority[actor(event)])
        if best.kind is Kind.RETRY:
            # a timer that always goes first would keep all others waiting
            self.priority[actor(best)] = -step
        return best

    def done(self, steps: int) -> None:
        self.longest = max(self.longest, steps)


def actor(event: Event) -> object:
    """Who does something: a rank, its worker, a message, a write, or bad luck of one kind."""
    if event.kind in (Kind.DELIVER, Kind.ARRIVE, Kind.SETTLE):
        return event.what if event.kind is Kind.DELIVER else (event.what.writer, event.what.piece)
    return event.kind, event.rank


class Walk:
    """Runs through one world.  What may happen from a state, and where it leads, is kept: most
    runs go mostly where others went."""

    KEPT = 300_000
    """States remembered; beyond, all are forgotten."""

    def __init__(self, court: Court) -> None:
        self.court = court
        self._next: dict[State, tuple[list[Event], list[Event], dict[Event, State]]] = {}

    def run(self, scheduler: Scheduler, number: int, *, most: int = 1_000) -> Run:
        """One run to its end, or until a clause breaks.  One of `most` steps goes round in circles
        if the scheduler is fair, and is judged as if it had ended; else it was cut short."""
        scheduler.begin(number)
        state, done = self.court.start(), []
        for step in range(most):
            found, fair_ones, known = self._choices(state)
            if not fair_ones:
                scheduler.done(step)
                return Run(tuple(done), state, self.court.finish(state[-1]))
            event = scheduler.choose(found, fair_ones, step)
            done.append(event)
            after = known.get(event)
            if after is None:
                try:
                    after = known[event] = self.court.happen(state, event)
                except Violation as violation:
                    return Run(tuple(done), state, violation)
            state = after
        return Run(tuple(done), state, self.court.finish(state[-1]) if scheduler.fair else None)

    def _choices(self, state: State) -> tuple[list[Event], list[Event], dict[Event, State]]:
        choices = self._next.get(state)
        if choices is None:
            if len(self._next) >= self.KEPT:
                self._next.clear()
            world, world_state = self.court.world, state[:-1]
            found = events(world, world_state)
            fair_ones = [event for event in found if fair(world, world_state, event)]
            choices = self._next[state] = (found, fair_ones, {})
        return choices


def replay(court: Court, wanted: Sequence[Event], *, to_rest: bool = False) -> Run:
    """The run of these events, without those that may not happen by then.  With `to_rest`, what a
    fair run does from there on is judged at its end, and is no part of `events`."""
    state, done = court.start(), []
    for event in wanted:
        if event not in events(court.world, state[:-1]):
            continue
        done.append(event)
        try:
            state = court.happen(state, event)
        except Violation as violation:
            return Run(tuple(done), state, violation)
    return Run(tuple(done), state, _rested(court, state) if to_rest else None)


def _rested(court: Court, state: State, *, most: int = 500) -> Violation | None:
    """What is wrong once everything fair has happened, the most ordinary first."""
    for _ in range(most):
        found = events(court.world, state[:-1])
        ordinary = next((e for e in found if fair(court.world, state[:-1], e)), None)
        if ordinary is None:
            break
        try:
            state = court.happen(state, ordinary)
        except Violation as violation:
            return violation
    return court.finish(state[-1])
