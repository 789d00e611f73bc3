"""The drain protocol in every order: nothing breaks, every planted fault does, and what is found is
short and real."""

from __future__ import annotations

import json

import pytest

import systems
from fuzz import cli, mutants
from fuzz.explore.bounds import NAMED, bounds
from fuzz.explore.choices import events
from fuzz.explore.draw import drawn
from fuzz.explore.judged import Court
from fuzz.explore.minimise import LIVENESS, breaks, minimised
from fuzz.explore.parallel import added, explore, shares
from fuzz.explore.schedule import Pct, Random, Walk, replay
from fuzz.explore.search import Search, least, shortest
from fuzz.explore.world import World
from fuzz.mutants.exploring import explore as look_for
from optimized.transfer import drain, ranks
from reference.protocol import Completion, Phase

FAULTS = [mutant for name in mutants.names() if (mutant := mutants.find(name)).target == "drain"]


def world(named):
    return World(named, systems.load_ranks())


@pytest.mark.parametrize(
    "within",
    [
        NAMED["small"],
        NAMED["notify"],
        NAMED["fan_in"],
        NAMED["reuse"],
        bounds(ranks=1, completion=Completion.NOTIFY),
        bounds(faults=0),
    ],
    ids=["2x1", "notify", "fan_in", "reuse", "reuse_notify", "2x2_no_fault"],
)
def test_every_run_keeps_the_contract_and_comes_to_rest(within):
    found = Search(world(within)).run(limit=500_000)
    assert found.clause is None, (found.sentence, found.run)
    assert found.fixpoint


def test_shares_together_are_all_runs():
    """Every state that a whole search sees is seen by some share."""
    within = bounds(ranks=1, requests=1, reuse=0)
    whole = Search(world(within), reduce=False)
    assert whole.run(limit=100_000).fixpoint
    seen = set()
    for share in shares(within):
        part = Search(world(share), reduce=False)
        found = part.run(limit=100_000)
        assert found.fixpoint
        seen |= {_values(part, state) for state in part.states}
    assert seen == {_values(whole, state) for state in whole.states}


def _values(search, state):
    values = search.world.memo.values
    transfers, instance = values[state[-1]]
    judged = tuple((key, values[number]) for key, number in transfers)
    bags = frozenset(values[state[-4]]), frozenset(values[state[-3]])
    ranks = tuple(values[part] for part in state[: search.world.bag_column])
    return (*ranks, *bags, values[state[-2]], judged, values[instance])


def test_reductions_change_no_verdict():
    within = bounds(requests=1, reuse=0, faults=0)
    full, reduced = (Search(world(within), reduce=r).run(limit=200_000) for r in (False, True))
    assert full.fixpoint
    assert reduced.fixpoint
    assert reduced.states < full.states / 2


@pytest.mark.parametrize("name", ["one_ack_fewer", "live_by_any", "source_freed_by_any"])
def test_reductions_hide_no_fault(name):
    mutant = mutants.find(name)
    with mutant.applied():
        full, reduced = (
            Search(world(NAMED["small"]), reduce=r).run(limit=60_000) for r in (False, True)
        )
    assert full.clause in mutant.killed_by
    assert reduced.clause in mutant.killed_by
    assert len(full.run) <= len(reduced.run)


@pytest.mark.parametrize("mutant", FAULTS, ids=lambda mutant: mutant.name)
def test_fault_breaks_a_named_clause_in_a_short_run(mutant):
    found = look_for(mutant, seed=1, runs=20_000, budget_s=60, shrink=True)
    assert found.bad is not None
    clause = found.bad.violation.clause.value
    assert clause in mutant.killed_by, str(found.bad.violation)
    with mutant.applied():
        court = Court(world(NAMED[mutant.bounds]))
        again = replay(court, found.bad.events, to_rest=clause in LIVENESS)
        assert breaks(again, clause)
        if clause not in LIVENESS:
            best = Search(court.world, reduce=False).run(limit=400_000)
            assert best.clause in mutant.killed_by
            if best.clause == clause:
                assert len(found.bad.events) <= len(best.run) + 2
    clean = replay(Court(world(NAMED[mutant.bounds])), found.bad.events, to_rest=True)
    assert clean.violation is None, "the faithful protocol passes the same run"


def _not_repeated_in_quarantine(monkeypatch):
    """A rank that has waited too long for an ACK asks for it no more."""
    retry = drain.Incoming.retry

    def quiet(self, floor):
        return retry(self, floor) if self.phase is not Phase.QUARANTINED else (self, ())

    monkeypatch.setattr(drain.Incoming, "retry", quiet)


def _floor_of_the_last_offer(monkeypatch):
    """A late offer lowers a writer's floor, and what is over at D begins anew."""
    forget = ranks.PrefillRank._forget

    def last(self, offer):
        after = forget(self, offer)
        floors = tuple((at, offer.floor if at == offer.at else f) for at, f in after.floors)
        return after._replace(floors=floors)

    monkeypatch.setattr(ranks.PrefillRank, "_forget", last)


@pytest.mark.parametrize(
    ("plant", "within", "clauses"),
    [
        (_not_repeated_in_quarantine, {"requests": 1, "reuse": 0, "faults": 2}, LIVENESS),
        (_floor_of_the_last_offer, {"requests": 3, "faults": 0}, {"S1"}),
    ],
)
def test_what_random_runs_hardly_meet_is_found_by_looking_at_all(
    monkeypatch, plant, within, clauses
):
    within = bounds(ranks=1, parts=1, **within)
    assert explore(within, limit=200_000).fixpoint
    plant(monkeypatch)
    found = explore(within, limit=200_000)
    assert found.clause in clauses


def test_there_are_enough_faults():
    assert len(FAULTS) >= 30


def test_a_run_of_a_reduced_search_is_real():
    with mutants.find("failed_overwritten").applied():
        found = explore(NAMED["small"], limit=100_000)
        end = replay(Court(world(NAMED["small"])), found.run)
    assert end.violation is not None
    assert end.violation.clause.value == found.clause == "order"
    assert end.events == found.run


def test_no_event_of_a_minimised_run_can_be_left_out():
    with mutants.find("live_by_any").applied():
        court = Court(world(NAMED["small"]))
        walk = Walk(court)
        bad = next(r for n in range(1000) if (r := walk.run(Random(3), n)).violation)
        short = minimised(court, bad.events, bad.violation.clause.value)
        for place in range(len(short.events)):
            rest = short.events[:place] + short.events[place + 1 :]
            assert not breaks(replay(court, rest), short.violation.clause.value)
        with pytest.raises(ValueError, match="does not break S3"):
            minimised(court, bad.events, "S3")


@pytest.mark.parametrize(
    "name",
    [
        "outstanding_until_posted",
        "acks_without_closing",
        "poison_ignored",
        "broken_taken_for_landed",
        "unknown_no_longer_reads",
        "ready_by_any",
        "abort_to_one_writer",
    ],
)
def test_all_runs_of_a_fault_end_in_one(name):
    mutant = mutants.find(name)
    found, ends = set(), set()
    for seed in range(4):
        first, short = (
            look_for(mutant, seed=seed, runs=20_000, budget_s=60, shrink=shrink)
            for shrink in (False, True)
        )
        assert short.clause == first.clause == first.bad.violation.clause.value
        found.add(first.steps)
        ends.add(short.steps)
    assert len(found) == 4
    assert len(ends) == 1


def test_what_breaks_liveness_is_more_than_what_breaks_at_once():
    """Its events are fewer, since those that come by themselves are not counted."""
    with mutants.find("poison_ignored").applied():
        court = Court(world(NAMED["small"]))
        (lively, _), (safe, _) = (
            least(court.world, clauses=clauses) for clauses in (LIVENESS, {"S3"})
        )
        assert len(lively.events) < len(safe.events)
        assert shortest(court, lively.events, "L1").events == safe.events


def test_a_search_for_one_clause_goes_on_past_the_others():
    within = bounds(ranks=1, requests=1, reuse=0, faults=0)
    with mutants.find("released_twice").applied():
        found = Search(world(within), clauses={"S5"}).run(limit=10_000)
        assert found.clause == "S5"
        past = Search(world(within), clauses=LIVENESS).run(limit=10_000)
    assert past.clause is None, "a run that ends in S5 is not one that goes on for ever"
    assert past.fixpoint
    with mutants.find("outstanding_until_posted").applied():
        for clause in ("S3", "S6", "S8"):
            run, _ = least(world(NAMED["small"]), clauses={clause})
            assert run.violation.clause.value == clause


@pytest.mark.parametrize("scheduler", [Random, lambda seed: Pct(seed, depth=3)])
def test_same_seed_same_run(scheduler):
    court = Court(world(NAMED["reuse"]))
    first, again = (Walk(court).run(scheduler(7), 11) for _ in range(2))
    assert first.events == again.events
    others = {Walk(court).run(scheduler(7), n).events for n in range(20)}
    assert len(others) > 10


def test_pct_finds_what_needs_two_orderings():
    with mutants.find("not_counted_at_dequeue").applied():
        walk = Walk(Court(world(NAMED["small"])))
        pct = Pct(1, depth=3)
        assert any(walk.run(pct, n).violation for n in range(2000))


def test_events_are_possible_and_fixed():
    """What may happen is a function of the state, and happens."""
    here = world(NAMED["small"])
    state = here.start()
    for _ in range(12):
        found = events(here, state)
        assert found == events(here, state)
        nexts = [here.happen(state, event)[0] for event in found]
        assert all(after != state for after in nexts)
        state = nexts[0]


def test_diagram_has_a_line_for_each_event():
    here = world(NAMED["small"])
    run = Walk(Court(here)).run(Random(1), 5).events
    heading, *lines = drawn(here, run)
    assert heading.split() == ["P0", "P1", "D0", "D1"]
    assert len(lines) == len(run)


def test_added_searches_keep_the_shortest_run():
    with mutants.find("timeout_frees").applied():
        long = Search(world(NAMED["fan_in"])).run(limit=10_000)
        short = Search(world(NAMED["small"])).run(limit=10_000)
    clean = Search(world(bounds(ranks=1, requests=1, reuse=0, faults=0))).run(limit=10_000)
    together = added([clean, long, short])
    assert together.clause == "S2"
    assert len(together.run) == min(len(long.run), len(short.run))
    assert together.states == clean.states + long.states + short.states


def test_command(tmp_path, monkeypatch, capsys):
    def kvoracle(*words):
        monkeypatch.setattr("sys.argv", ["kvoracle", "explore", "drain", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, capsys.readouterr()

    small = ("--ranks", "1", "--requests", "1", "--reuse", "0", "--processes", "1")
    code, printed = kvoracle(*small, "--seconds", "1")
    assert code == 0, printed
    assert "No clause breaks" in printed.out
    assert "runs a second and core" in printed.out
    result = tmp_path / "result.json"
    code, printed = kvoracle(*small, "--mutant", "timeout_frees", "--json", str(result))
    assert code == 1
    assert "S2: rank 0 of D" in printed.out
    assert json.loads(result.read_text())["clause"] == "S2"
    code, printed = kvoracle(*small, "--limit", "10")
    assert code == 1
    assert "raise --limit" in printed.out
    for bad, cure in (
        (("--requests", "1", "--reuse", "1"), "set reuse below requests"),
        (("--components", "1"), "set it to at least 2"),
        (("--faults", "-1"), "set it to at least 0"),
        (("--reuse", "-1"), "reuse is -1: set it to at least 0"),
        (("--seconds", "-1"), "Must be >= 0"),
        (("--mutant", ""), "There is no mutant ''"),
        (("--mutant", "tail_one_short"), "kvoracle fuzz prefix_split --mutant"),
    ):
        code, printed = kvoracle(*bad)
        assert code == 2
        assert cure in printed.err.replace("\n", " ")
