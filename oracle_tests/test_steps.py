"""Steps taken from many states at once are those that single runs take."""

from __future__ import annotations

from contextlib import nullcontext

import msgspec
import numpy as np
import pytest

import systems
from fuzz import mutants
from fuzz.explore import footprints
from fuzz.explore.bounds import NAMED, bounds
from fuzz.explore.choices import eager, events, fair
from fuzz.explore.judged import Court
from fuzz.explore.schedule import Pct, Random, Walk
from fuzz.explore.steps import BROKEN, CLAUSES, Steps
from fuzz.explore.words import Kind
from fuzz.explore.world import World
from reference.drain import Clause, Violation
from reference.protocol import Completion

WIDE = {
    "faults": bounds(faults=3, aborts=2),
    "notify": bounds(faults=2, components=3, completion=Completion.NOTIFY),
    "fan_in": msgspec.structs.replace(NAMED["fan_in"], faults=2),
    "restart": msgspec.structs.replace(bounds(faults=2), restarts=2),
    "apart": msgspec.structs.replace(bounds(faults=2), advertise_apart=True, settle_apart=True),
}


def court(within):
    return Court(World(within, systems.load_ranks()))


def visited(judged, runs):
    """States of random runs, whatever becomes of them."""
    walk, states = Walk(judged), {}
    for number in range(runs):
        scheduler = Pct(2, depth=4) if number % 2 else Random(1, unlucky=0.5)
        state = judged.start()
        for event in walk.run(scheduler, number).events:
            states[state] = None
            try:
                state = judged.happen(state, event)
            except Violation:
                break
    return list(states)


def one_by_one(judged, state):
    """What happens next, where it leads, and whether fair runs take it."""
    for event in events(judged.world, state[:-1]):
        try:
            after = judged.happen(state, event)
        except Violation as violation:
            after = violation.clause
        yield event, after, fair(judged.world, state[:-1], event)


def at_once(judged, states):
    steps = Steps(judged, reduce=False)
    taken = steps.next(np.array(states, np.int32))
    found = [[] for _ in states]
    for source, event, after, is_fair, broken in zip(*taken, strict=True):
        assert (broken >= 0) == (after[-1] <= BROKEN)
        where = CLAUSES[broken] if broken >= 0 else tuple(after.tolist())
        found[source].append((steps.events[event], where, bool(is_fair)))
    return found


@pytest.mark.parametrize("fault", [None, "timeout_frees", "one_ack_fewer"])
@pytest.mark.parametrize("within", WIDE.values(), ids=WIDE)
def test_many_states_step_as_each_does(within, fault):
    with mutants.find(fault).applied() if fault else nullcontext():
        judged = court(within)
        states = visited(judged, 200)
        kinds, broken = set(), 0
        for state, found in zip(states, at_once(judged, states), strict=True):
            expected = list(one_by_one(judged, state))
            assert sorted(map(repr, found)) == sorted(map(repr, expected))
            kinds |= {event.kind for event, _, _ in found}
            broken += sum(isinstance(after, Clause) for _, after, _ in found)
    assert len(states) > 300
    assert bool(broken) == bool(fault)
    assert kinds >= {Kind.SUBMIT_P, Kind.DELIVER, Kind.LOSE, Kind.KILL, Kind.BREAK, Kind.NOTICE}
    if within.restarts:
        assert kinds >= {Kind.RESTART, Kind.MEET}


def test_every_kind_has_a_footprint():
    """All kinds of events were stepped through, in some world."""
    kinds = set()
    for within in WIDE.values():
        judged = court(within)
        for state in visited(judged, 200):
            kinds |= {event.kind for event in events(judged.world, state[:-1])}
    assert kinds == set(Kind)


def test_a_footprint_too_small_is_seen(monkeypatch):
    """The control: what an event looks at cannot be left out unnoticed."""
    judged = court(WIDE["faults"])
    states = visited(judged, 60)
    whole = footprints.ranks_of

    def less(world, event):
        looks = whole(world, event)
        return looks[:1] if event.kind is Kind.ROUND_P else looks

    monkeypatch.setattr("fuzz.explore.steps.ranks_of", less)
    monkeypatch.setattr(footprints, "ranks_of", less)
    with pytest.raises(AttributeError):
        at_once(judged, states)


def test_an_eager_event_is_the_only_one():
    judged = court(bounds())
    world, states = judged.world, visited(judged, 60)
    steps = Steps(judged, reduce=True)
    taken = steps.next(np.array(states, np.int32))
    alone = 0
    for place, state in enumerate(states):
        found = [steps.events[e] for e in taken.events[taken.sources == place]]
        early = [e for group in eager(world) for e in group.find(world, state[:-1])]
        assert found[:1] == early[:1] if early else found == events(world, state[:-1])
        assert len(found) == 1 or not early
        alone += bool(early)
    assert 0 < alone < len(states)
