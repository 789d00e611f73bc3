"""Every run of a world within its bounds, breadth first, so that what is found is shortest.

A search ends in one of three ways: at an event that breaks a clause, at the fixpoint where no event
leads to a state that is new, or at its limit.  At the fixpoint it looks back: a state from which no
fair run comes to rest breaks liveness.  That is sound and complete for strong fairness on a finite
graph: a fair run takes every event that it may take again and again, so it cannot stay away for
ever from a good state that it can always still reach.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuzz.explore.judged import Court
from fuzz.explore.minimise import LIVENESS, breaks, followed, minimised
from fuzz.explore.rows import Growing, Ints, Rows
from fuzz.explore.schedule import Run, replay
from fuzz.explore.steps import CLAUSES, Next, Steps
from fuzz.explore.symmetry import Symmetry
from fuzz.explore.words import Event
from fuzz.explore.world import State, World
from reference.drain import Clause, Violation

AT_ONCE = 1 << 14
"""States whose steps are taken together: so many that the work is numpy's, and so few that it stays
in the caches of a core."""


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
    commutes with all others.  A run that breaks none of the `clauses`, but another one, ends there
    and is no finding."""

    def __init__(
        self, world: World, *, reduce: bool = True, clauses: Collection[str] = CLAUSES
    ) -> None:
        self.world = world
        self.court = Court(world)
        self.reduce = reduce
        self.clauses = frozenset(clauses)
        self._sought = np.array([clause in self.clauses for clause in CLAUSES])
        self.symmetry = Symmetry(world)
        self.steps = Steps(self.court, reduce=reduce)
        self._rows = Rows(world.around_column + 2)
        # the event by which each state was first reached, and from where
        self._reached = Growing(2)
        # edges that fair runs take, as they were found
        self._edges: list[tuple[Ints, Ints]] = []
        # states from which a fair run may break another clause
        self._over: list[Ints] = []
        self.transitions = 0

    @property
    def states(self) -> Ints:
        """[n, columns]: the states in the order in which they were reached."""
        return self._rows.rows

    def run(self, *, limit: int, progress: Callable[[int, int], None] = lambda s, d: None) -> Found:
        """Search, until there are `limit` states."""
        start = np.array([self.court.start()], np.int32)
        self._rows.add(self.symmetry.least(start) if self.reduce else start)
        self._reached.append((-1, -1))
        depth, first = 0, 0
        while first < len(self._rows) <= limit:
            level = len(self._rows)
            for begin in range(first, level, AT_ONCE):
                broken = self._take(begin, min(begin + AT_ONCE, level))
                if broken is not None:
                    return self._broken(depth + 1, *broken)
            first, depth = level, depth + 1
            progress(len(self._rows), depth)
        if len(self._rows) > limit:
            return self._found(depth, False)
        if self.clauses.isdisjoint(LIVENESS):
            return self._found(depth, True)
        stuck = self._stuck()
        if stuck is None:
            return self._found(depth, True)
        return self._found(depth, True, self._why(stuck), self.run_to(stuck))

    def run_to(self, number: int) -> tuple[Event, ...]:
        """The events by which a state was first reached, each with the names of its own state."""
        run: list[Event] = []
        while number > 0:
            number, event = self._reached.rows[number].tolist()
            run.append(self.steps.events[event])
        return tuple(reversed(run))

    def _take(self, begin: int, end: int) -> tuple[int, Event] | None:
        """Take all steps from some states; the first that breaks a clause, if one does."""
        taken = self.steps.next(self.states[begin:end])
        self.transitions += len(taken.sources)
        broken = taken.broken >= 0
        if broken.any():
            bad = np.flatnonzero(broken & self._sought[taken.broken])
            if len(bad):
                first = bad[np.argmin(taken.sources[bad])]
                number = begin + int(taken.sources[first])
                return number, self.steps.events[taken.events[first]]
            self._over.append(taken.sources[broken & taken.fair] + np.int32(begin))
            taken = Next(*(column[~broken] for column in taken))
        sources = taken.sources + np.int32(begin)
        states = self.symmetry.least(taken.states) if self.reduce else taken.states
        numbers, new = self._rows.add(states)
        self._reached.extend(np.stack([sources[new], taken.events[new]], axis=1))
        self._edges.append((sources[taken.fair], numbers[taken.fair]))
        return None

    def _broken(self, depth: int, number: int, event: Event) -> Found:
        run = (*self.run_to(number), event)
        try:
            self.court.happen(self.state(number), event)
        except Violation as violation:
            return self._found(depth, False, violation, run)
        raise AssertionError(f"{event} breaks a clause among many states, and alone it does not")

    def state(self, number: int) -> State:
        """One state."""
        return tuple(self.states[number].tolist())

    def _stuck(self) -> int | None:
        """The first state from which no fair run comes to a good rest."""
        good, before = self._resting(), -1
        for sources in self._over:
            good[sources] = True
        # most edges lead to states that came later
        while before != (before := int(good.sum())):
            for sources, targets in reversed(self._edges):
                good[sources[good[targets]]] = True
        bad = np.flatnonzero(~good)
        return int(bad[0]) if len(bad) else None

    def _resting(self) -> NDArray[np.bool_]:
        """Where nothing is left to do and nobody waits without cause."""
        world, nothing = self.world, self.world.memo.id(())
        on_its_way = self.states[:, (world.bag_column, world.air_column)]
        resting = (on_its_way == nothing).all(axis=1)
        for number in np.flatnonzero(resting):
            resting[number] = self._rests(self.state(number))
        return resting

    def _rests(self, state: State) -> bool:
        world, world_state = self.world, state[:-1]
        around, decode = world.around(world_state), world.decode_rank(world_state, 0)
        held = decode is not None and bool(decode.transfers)
        asked = min(around.at_d, around.at_p) == len(world.bounds.rooms) and not around.waiting
        return (asked or held or bool(around.dead)) and self._ended(state) is None

    def _ended(self, state: State) -> Violation | None:
        """What the judge says of a run that ends here."""
        return self.world.memo.once(("ended", state[-1]), lambda: self.court.finish(state[-1]))

    def _why(self, stuck: int) -> Violation:
        """What is wrong where a fair run from a bad state comes to stand still."""
        sources, targets = map(np.concatenate, zip(*self._edges, strict=True))
        left, seen = np.array([stuck]), np.zeros(len(self._rows), np.bool_)
        while len(left):
            seen[left] = True
            last = left[~np.isin(left, sources)]
            if len(last):
                return self._ended(self.state(last[0])) or _for_ever()
            left = np.unique(targets[np.isin(sources, left)])
            left = left[~seen[left]]
        return _for_ever()

    def _found(
        self,
        depth: int,
        fixpoint: bool,
        violation: Violation | None = None,
        run: tuple[Event, ...] = (),
    ) -> Found:
        return Found(
            states=len(self._rows),
            transitions=self.transitions,
            depth=depth,
            fixpoint=fixpoint,
            clause=violation and violation.clause.value,
            sentence=violation.sentence if violation else "",
            run=followed(self.court, self.symmetry, run) if self.reduce else run,
        )


def _for_ever() -> Violation:
    return Violation(Clause.L5, "A fair run goes on for ever, and no request ends.")


def shortest(court: Court, bad: Sequence[Event], clause: str) -> Run:
    """A run to show for `bad`, which breaks `clause`: the least within its world's bounds, whatever
    it breaks, unless what is left of `bad` itself is less."""
    left = minimised(court, bad, clause)
    best, _ = least(court.world)
    return min(left if best is None else best, left, key=_length)


def _length(run: Run) -> tuple[bool, int]:
    """What makes a run less: that it ends in what is wrong, and then its length.  One that breaks
    liveness goes on after its events, and shows nothing before its rest."""
    assert run.violation is not None, "a good run has nothing to show"
    return run.violation.clause.value in LIVENESS, len(run.events)


def least(
    world: World, *, clauses: Collection[str] = CLAUSES, limit: int = 20_000, more: int = 200_000
) -> tuple[Run | None, int]:
    """The first of the shortest runs within the bounds of `world` that break one of the `clauses`,
    if `limit` states show one, or else a short one, if `more` states of a search that reduces do;
    and how many states were looked at.

    It is the same for all runs that a fault was met in, since it depends on none of them.
    """
    states = 0
    for reduce, most in ((False, limit), (True, more)):
        # numbers of parts decide between equals, so the search gives all of them itself
        fresh = World(world.bounds, world.ranks)
        found = Search(fresh, reduce=reduce, clauses=clauses).run(limit=most)
        states += found.states
        if found.clause is not None:
            court, lively = Court(World(world.bounds, world.ranks)), found.clause in LIVENESS
            if breaks(replay(court, found.run, to_rest=lively), found.clause):
                return minimised(court, found.run, found.clause), states
        if found.fixpoint:
            break
    return None, states
