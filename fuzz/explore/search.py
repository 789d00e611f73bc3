"""Every run of a world within its bounds, breadth first, so that what is found is shortest.

A search ends in one of three ways: at an event that breaks a clause, at the fixpoint where no event
leads to a state that is new, or at its limit.  At the fixpoint it looks back: a state from which no
fair run comes to rest breaks liveness.  That is sound and complete for strong fairness on a finite
graph: a fair run takes every event that it may take again and again, so it cannot stay away for
ever from a good state that it can always still reach.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

import msgspec
import numpy as np

from fuzz.explore.choices import eager, events, fair
from fuzz.explore.judged import Court
from fuzz.explore.minimise import LIVENESS, breaks, followed
from fuzz.explore.schedule import Run, replay
from fuzz.explore.symmetry import Symmetry
from fuzz.explore.words import Event
from fuzz.explore.world import State, World
from reference.drain import Clause, Violation


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found.

    Fields:
        states, transitions, depth: how much was looked at, and the longest shortest run.
        fixpoint: nothing is left to look at, and from everywhere fair runs come to rest.
        clause, sentence: of the violation, if there is one.
        run: the events that lead to it.
    """

    states: int
    transitions: int
    depth: int
    fixpoint: bool
    clause: str | None = None
    sentence: str = ""
    run: tuple[Event, ...] = ()


class Search:
    """One search; `reduce` looks at one state of each symmetry class, and at one event where it
    commutes with all others."""

    def __init__(self, world: World, *, reduce: bool = True) -> None:
        self.world = world
        self.court = Court(world)
        self.reduce = reduce
        self.symmetry = Symmetry(world)
        self.number: dict[State, int] = {}
        self.states: list[State] = []
        # the event by which each state was first reached, and from where
        self.parent = array("q")
        self.how: list[Event | None] = []
        # edges that fair runs take
        self.sources, self.targets = array("q"), array("q")
        self.transitions = 0

    def run(self, *, limit: int, progress: Callable[[int, int], None] = lambda s, d: None) -> Found:
        """Search, until there are `limit` states."""
        self._reached(self.court.start(), -1, None)
        depth, first = 0, 0
        while first < len(self.states) <= limit:
            level = len(self.states)
            for number in range(first, level):
                for event in self._events(self.states[number]):
                    self.transitions += 1
                    try:
                        after = self.court.happen(self.states[number], event)
                    except Violation as violation:
                        run = (*self.run_to(number), event)
                        return self._found(depth + 1, False, violation, run)
                    self._reached(after, number, event)
            first, depth = level, depth + 1
            progress(len(self.states), depth)
        if len(self.states) > limit:
            return self._found(depth, False)
        stuck = self._stuck()
        if stuck is None:
            return self._found(depth, True)
        return self._found(depth, True, self._why(stuck), self.run_to(stuck))

    def run_to(self, number: int) -> tuple[Event, ...]:
        """The events by which a state was first reached, each with the names of its own state."""
        run: list[Event] = []
        while self.parent[number] >= 0:
            event = self.how[number]
            assert event is not None, "every state but the first was reached by an event"
            run.append(event)
            number = self.parent[number]
        return tuple(reversed(run))

    def _events(self, state: State) -> list[Event]:
        world_state = state[:-1]
        found = events(self.world, world_state)
        return eager(self.world, world_state, found) if self.reduce else found

    def _reached(self, state: State, parent: int, event: Event | None) -> None:
        if self.reduce:
            state = self.symmetry.least(state)
        number = self.number.setdefault(state, len(self.states))
        if number == len(self.states):
            self.states.append(state)
            self.parent.append(parent)
            self.how.append(event)
        if event is not None and fair(self.world, self.states[parent][:-1], event):
            self.sources.append(parent)
            self.targets.append(number)

    def _stuck(self) -> int | None:
        """The first state from which no fair run comes to a good rest."""
        good = np.array([self._rests(state) for state in self.states])
        sources, targets = np.asarray(self.sources), np.asarray(self.targets)
        while True:
            more = sources[good[targets] & ~good[sources]]
            if not len(more):
                break
            good[more] = True
        bad = np.flatnonzero(~good)
        return int(bad[0]) if len(bad) else None

    def _rests(self, state: State) -> bool:
        """Whether nothing is left to do and nobody waits without cause."""
        world, world_state = self.world, state[:-1]
        if world.bag(world_state) or world.flights(world_state):
            return False
        around, decode = world.around(world_state), world.decode_rank(world_state, 0)
        held = decode is not None and bool(decode.transfers)
        asked = min(around.at_d, around.at_p) == len(world.bounds.rooms) and not around.waiting
        return (asked or held or bool(around.dead)) and self._ended(state) is None

    def _ended(self, state: State) -> Violation | None:
        """What the judge says of a run that ends here."""
        return self.world.memo.once(("ended", state[-1]), lambda: self.court.finish(state[-1]))

    def _why(self, stuck: int) -> Violation:
        """What is wrong where a fair run from a bad state comes to stand still."""
        follows: dict[int, list[int]] = {}
        for source, target in zip(self.sources, self.targets, strict=True):
            follows.setdefault(source, []).append(target)
        left, seen = [stuck], {stuck}
        while left:
            last = left.pop()
            if not follows.get(last):
                break
            new = [n for n in follows[last] if n not in seen]
            left += new
            seen.update(new)
        return self._ended(self.states[last]) or Violation(
            Clause.L5, "A fair run goes on for ever, and no request ends."
        )

    def _found(
        self,
        depth: int,
        fixpoint: bool,
        violation: Violation | None = None,
        run: tuple[Event, ...] = (),
    ) -> Found:
        return Found(
            states=len(self.states),
            transitions=self.transitions,
            depth=depth,
            fixpoint=fixpoint,
            clause=violation and violation.clause.value,
            sentence=violation.sentence if violation else "",
            run=followed(self.court, self.symmetry, run) if self.reduce else run,
        )


def shortest(world: World, bad: Run, *, limit: int = 20_000, live: int = 200_000) -> Run:
    """The shortest run that breaks the same clause as `bad`, if a search of so many states finds
    one that is shorter; no event can be left out of either, but `bad` may have come another way.
    What breaks liveness shows only at the fixpoint, for which `live` states are looked at."""
    assert bad.violation is not None, "a good run has nothing to show"
    lively = bad.violation.clause.value in LIVENESS
    found = Search(world, reduce=lively).run(limit=live if lively else limit)
    if found.clause is None or len(found.run) >= len(bad.events):
        return bad
    best = replay(Court(world), found.run, to_rest=lively)
    return best if breaks(best, bad.violation.clause.value) else bad
