"""What may happen from many states at once, and where it leads.

A state is a row of integers, one for each part (`fuzz.explore.parts`).  Most states of a search
agree with many others in the few parts that an event looks at, so each question about an event is
put once for each combination of those, and answered for all others by lookups of whole arrays.  The
answers come from the same `Group.find` and `World.happen` that walk through single runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fuzz.explore.choices import Group, Guard, eager, groups
from fuzz.explore.footprints import change, ranks_of
from fuzz.explore.judged import Court
from fuzz.explore.rows import Growing, Ints, Memo
from fuzz.explore.words import Event
from fuzz.explore.world import State
from reference.drain import Clause, Violation

UNSEEN = 0
"""Stands in a question for a part that the answer does not depend on."""

BROKEN = -2
"""Stands for the judge's value where the first clause is broken; those below, for the others."""

CLAUSES = tuple(Clause)

Found = tuple[Ints, Ints]
"""Places of states, and the numbers of events that may happen there."""


class Next(NamedTuple):
    """Transitions from n states.

    Fields:
        sources, events: [m] the place of the state that each leaves, and the number of what
            happens.
        states: [m, columns] where it leads.
        fair: [m] whether a fair run takes it.
        broken: [m] the place in CLAUSES of what it breaks, and then its state is none; else -1.
    """

    sources: Ints
    events: Ints
    states: Ints
    fair: NDArray[np.bool_]
    broken: Ints


class Steps:
    """Takes all steps from many states; with `reduce`, a single one where it commutes with all
    others."""

    def __init__(self, court: Court, *, reduce: bool) -> None:
        self.court = court
        self.world = court.world
        self.events: list[Event] = []
        self._numbers: dict[Event, int] = {}
        # the columns that an event looks at itself, and for each event, which of them
        self._own = (*range(self.world.bag_column), self.world.around_column)
        self._looks = Growing(len(self._own), dtype=np.bool_)
        self._eager = [_Finder(self, g) for g in (eager(self.world) if reduce else ())]
        self._groups = [_Finder(self, group) for group in groups(self.world)]
        # of each change: its own columns afterwards, what it does to the bag and to the flights,
        # what is seen, and whether it is fair
        self._changes = Growing(len(self._own) + 4)
        self._change = Memo(1 + len(self._own), self._changed)
        self._carry = Memo(2, self._carried)
        self._judge = Memo(2, self._judged)

    def next(self, states: Ints) -> Next:
        """All steps from `states`, [n, columns]."""
        sources, events = self._found(states)
        world, before = self.world, states[sources]
        own, looks = before[:, self._own], self._looks.rows[events]
        asked = np.concatenate([events[:, None], np.where(looks, own, UNSEEN)], axis=1)
        numbers = self._change(asked)
        changes = self._changes.rows[numbers]
        after = np.empty_like(before)
        after[:, self._own] = np.where(looks, changes[:, :-4], own)
        judge = world.around_column + 1
        net = ((world.bag_column, self._carry), (world.air_column, self._carry))
        for (column, memo), what in zip(
            (*net, (judge, self._judge)), changes.T[-4:-1], strict=True
        ):
            after[:, column] = memo(np.stack([before[:, column], what], axis=1))
        fair = changes[:, -1].astype(np.bool_)
        broken = np.maximum(BROKEN - after[:, judge], -1)
        return Next(sources, events, after, fair, broken)

    def number(self, event: Event) -> int:
        """The number of an event."""
        found = self._numbers.get(event)
        if found is None:
            found = self._numbers[event] = len(self.events)
            self.events.append(event)
            looks = (*ranks_of(self.world, event), self.world.around_column)
            self._looks.append([column in looks for column in self._own])
        return found

    def _found(self, states: Ints) -> Found:
        left, found = np.arange(len(states), dtype=np.int32), []
        for finder in self._eager:
            found.append(finder(states, left))
            left = np.setdiff1d(left, found[-1][0], assume_unique=True)
        found += [finder(states, left) for finder in self._groups]
        sources, events = zip(*found, strict=True)
        return np.concatenate(sources), np.concatenate(events)

    def _changed(self, event: int, *own: int) -> int:
        world, nothing = self.world, self.world.memo.id(())
        state = (*own[:-1], nothing, nothing, own[-1])
        done = change(world, self.events[event], state)
        bag, air = (world.memo.id((*of, done.lost)) for of in (done.bag, done.air))
        self._changes.append((*done.parts, bag, air, done.seen, done.fair))
        return self._changes.size - 1

    def _carried(self, before: int, what: int) -> int:
        return self.world.carried(before, *self.world.memo.values[what])

    def _judged(self, before: int, seen: int) -> int:
        try:
            return self.court.judged(before, self.world.memo.values[seen])
        except Violation as violation:
            return BROKEN - CLAUSES.index(violation.clause)


class _Finder:
    """A group's events of many states."""

    def __init__(self, steps: Steps, group: Group) -> None:
        self.world, self.group = steps.world, group
        self._steps = steps
        # of each list of events: where it begins, and how long it is
        self._lists, self._listed = Growing(2), Growing()
        self._list = Memo(len(group.columns), self._look)
        self._guards = [
            (guard.columns, Memo(1 + len(guard.columns), partial(self._holds, guard)))
            for guard in group.guards
        ]

    def __call__(self, states: Ints, places: Ints) -> Found:
        """What may happen at some places of `states`."""
        lists = self._list(states[places][:, self.group.columns])
        begins, counts = self._lists.rows[lists].T
        ends = np.cumsum(counts, dtype=np.int32)
        sources = np.repeat(places, counts)
        within = np.arange(len(sources), dtype=np.int32) - np.repeat(ends - counts, counts)
        events = self._listed.rows[np.repeat(begins, counts) + within]
        for columns, holds in self._guards:
            asked = np.concatenate([events[:, None], states[sources][:, columns]], axis=1)
            allowed = holds(asked) > 0
            sources, events = sources[allowed], events[allowed]
        return sources, events

    def _look(self, *parts: int) -> int:
        found = self.group.find(self.world, self._state(self.group.columns, parts))
        events = [self._steps.number(event) for event in found]
        self._lists.append((self._listed.size, len(events)))
        self._listed.extend(np.array(events, np.int32))
        return self._lists.size - 1

    def _holds(self, guard: Guard, event: int, *parts: int) -> int:
        state = self._state(guard.columns, parts)
        return int(guard.holds(self.world, state, self._steps.events[event]))

    def _state(self, columns: Iterable[int], parts: Iterable[int]) -> State:
        """A state of which only some parts are known."""
        known = dict(zip(columns, parts, strict=True))
        width = self.world.around_column + 1
        return self.world.only([known.get(column, UNSEEN) for column in range(width)], known)
