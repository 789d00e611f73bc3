"""Ranks in an order of the tape: restarts, rows that say whose they are, and faults that are found
and made short."""

from __future__ import annotations

import json
from itertools import islice
from unittest.mock import patch

import pytest

import systems
from fuzz import cli, interleave, mutants, targets
from fuzz.explore.choices import events
from fuzz.explore.memory import Memory
from fuzz.explore.words import Bounds, Event, Flight, Kind
from fuzz.explore.world import World
from fuzz.interleave import Interleaving
from fuzz.tape import Tape
from fuzz.targets.multi_rank import MULTI_RANK, TOPOLOGIES, draw_bounds, plainer
from reference.protocol import (
    Completion,
    Moved,
    Peer,
    Phase,
    Reading,
    Reserved,
    Side,
    Topology,
    TransferKey,
)

PLAIN = [0] * 16
"""A tape of the plainest world: one rank a side, one request."""
OFFERED_LATER = [*PLAIN[:11], 1, 0, 1, 0, 1]
"""The same with offers apart from reservations, one fault and one restart."""
FAN_IN = Bounds(
    topology=Topology(pieces=1, writers=((0, 1),), quarantine_limit=2),
    completion=Completion.STATUS,
    rooms=(0, 1),
    slots=2,
    faults=1,
    restarts=1,
)


def world(bounds=FAN_IN):
    return World(bounds, systems.load_ranks())


def take(here, state, *kinds):
    """The state after the first event of each kind, in turn."""
    for kind in kinds:
        event = next(event for event in events(here, state) if event.kind is kind)
        state, _ = here.happen(state, event)
    return state


def execute(seed):
    return interleave.execute(MULTI_RANK, Tape(seed=seed), most=MULTI_RANK.operations)


def found(name, *, seeds=400):
    """The first failure of a planted fault, and the same one shrunk."""
    with mutants.find(name).applied():
        bad = next(o for seed in range(seeds) if (o := execute(seed)).failed)
        return bad, interleave.shrink(MULTI_RANK, bad)


def test_a_tape_replayed_observes_the_same():
    digests = set()
    for seed in range(20):
        outcome = execute(seed)
        again = interleave.execute(MULTI_RANK, Tape(outcome.values), most=MULTI_RANK.operations)
        assert again.digest == outcome.digest
        assert again.values == outcome.values
        digests.add(outcome.digest)
    assert len(digests) == 20


def test_the_setup_covers_all_worlds():
    drawn = [draw_bounds(Tape(seed=seed)) for seed in range(300)]
    assert {bounds.topology.writers for bounds in drawn} == set(TOPOLOGIES)
    assert {bounds.completion for bounds in drawn} == set(Completion)
    assert {len(bounds.rooms) for bounds in drawn} == {1, 2, 3, 4, 5}
    assert {bounds.parts for bounds in drawn} == {1, 2, 3}
    for least in ("faults", "aborts"):
        assert {getattr(bounds, least) for bounds in drawn} == {0, 1, 2, 3}
    assert any(len(set(bounds.rooms)) < len(bounds.rooms) for bounds in drawn)


def test_an_empty_tape_is_an_ordinary_run_that_comes_to_rest():
    outcome = interleave.execute(MULTI_RANK, Tape(PLAIN), most=MULTI_RANK.operations)
    assert not outcome.failed
    assert outcome.events == {"live": 1}
    assert outcome.operations[-1].text.split(":")[0] in ("round_d", "round_p")


def test_an_instance_that_starts_again_has_another_life_and_is_met():
    here = world()
    state = take(here, here.start(), Kind.SUBMIT_D, Kind.SUBMIT_P, Kind.ROUND_D, Kind.KILL)
    assert here.lives(state, Side.DECODE) == (), "KILL begins with D"
    state = take(here, state, Kind.RESTART)
    (me,) = here.lives(state, Side.DECODE)
    assert me == Peer(Side.DECODE, 0, 1)
    assert not here.decode_rank(state, 0).transfers
    state = take(here, state, Kind.MEET, Kind.MEET)
    assert here.decode_rank(state, 0).writers == here.lives(state, Side.PREFILL)
    assert all(here.prefill(state, rank).rank.readers == (me,) for rank in (0, 1))
    assert all(event.kind not in (Kind.MEET, Kind.RESTART) for event in events(here, state))


def test_a_restart_of_p_ends_all_its_ranks_and_needs_a_fence():
    here = world()
    state = take(here, here.start(), Kind.SUBMIT_D, Kind.SUBMIT_P, Kind.ROUND_D)
    first = Event(Kind.KILL, 0, here.writers[0])
    state, _ = here.happen(state, first)
    state = take(here, state, Kind.RESTART)
    assert here.around(state).dead == set(here.writers)
    assert [me.incarnation for me in here.lives(state, Side.PREFILL)] == [1, 1]
    state = take(here, state, Kind.MEET, Kind.MEET)
    (transfer,) = here.decode_rank(state, 0).transfers
    assert transfer.phase is Phase.ABORTED
    assert transfer.undrained == set(here.writers), "the new life cannot answer for the old"
    state = take(here, state, Kind.FENCE, Kind.FENCE)
    assert here.decode_rank(state, 0).transfers[0].phase is Phase.LOCAL_DRAINED


def test_an_offer_counts_on_those_to_whom_it_goes():
    """A writer that D meets between a reservation and its offer sends all the pieces."""
    run = Interleaving(OFFERED_LATER)
    assert run.world.bounds.advertise_apart
    for kind in (Kind.KILL, Kind.RESTART, Kind.SUBMIT_D, Kind.ROUND_D, Kind.MEET):
        run.happen([event for event in run.found() if event.kind is kind][-1])
    assert run.events[-1].what.incarnation == 1
    run.rest()
    assert run.violations == []
    assert run.seen["live"] == 1


def test_a_reader_names_the_intruder():
    here = world()
    memory, (me,), (writer, other) = Memory(here), here.decoders, here.writers
    mine, thine = TransferKey(0, 1, 0), TransferKey(1, 2, 0)
    memory.observe(Reserved(me, mine, (1,)))

    def land(key, by, piece, part, slot=1):
        return memory.land(Flight(key, by, me, piece, None, slot, part))

    for by, piece, part in ((writer, 0, 0), (writer, 0, 1), (writer, 1, 0), (other, 0, 0)):
        assert land(mine, by, piece, part) == []
    (lacks,) = memory.observe(Reading(me, mine))
    assert lacks.signature == "provenance/slot"
    assert lacks.sentence == (
        "Slot 1 of D0 should hold part 2 of 2 of piece 0 of room 0.1, from P1; it holds nothing."
    )
    assert land(mine, other, 0, 1) == []
    assert land(thine, other, 0, 1, slot=0) == [], "nobody reads there"
    (wrong,) = land(thine, writer, 0, 1)
    assert wrong.sentence.endswith("it holds part 2 of 2 of piece 0 of room 1.2, from P0.")
    assert memory.observe(Reading(me, mine, ended=True)) == []
    assert memory.observe(Moved(me, mine, Phase.FREE, 0)) == []
    assert (memory.rows[me][1] == -1).all()


def test_a_wrong_address_is_found_by_what_lies_there():
    """A writer that posts all to one slot breaks no clause: none speaks of addresses."""
    ranks = systems.load_ranks()
    remember = ranks.PrefillRank._remember

    def faulty(self, message):
        after = remember(self, message)
        if self.me.rank == 0:
            return after
        *kept, new = after.transfers
        return after._replace(transfers=(*kept, new._replace(places=((0,),))))

    with patch.object(ranks.PrefillRank, "_remember", faulty):
        failing = (o for seed in range(400) if (o := execute(seed)).failed)
        bad = next(o for o in failing if len(o.operations) < 50)
        short = interleave.shrink(MULTI_RANK, bad)
    assert bad.signature == short.signature == "provenance/slot"
    assert "faults 0, aborts 0, restarts 0" in short.setup, "it takes no bad luck"
    assert "of room 1.2, from P1" in short.violations[0].sentence
    assert len(short.operations) < len(bad.operations)


@pytest.mark.parametrize("name", ["timeout_frees", "live_by_any", "ack_on_receipt_of_abort"])
def test_a_fault_of_the_protocol_is_found_and_made_short(name):
    bad, short = found(name)
    mutant = mutants.find(name)
    assert bad.violations[0].oracle == "drain"
    assert bad.violations[0].component in mutant.killed_by
    assert short.signature == bad.signature
    with mutant.applied():
        run = interleave.played(short.values)
        for place in range(len(run.events)):
            rest = run.again([*run.events[:place], *run.events[place + 1 :]])
            assert not rest.violations or rest.violations[0].signature != bad.signature
    assert not run.again(run.events).violations, "the faithful protocol passes the same run"


@pytest.mark.parametrize(
    "name", ["timeout_frees", "one_ack_fewer", "ack_on_receipt_of_abort", "poison_ignored"]
)
def test_all_runs_in_which_a_fault_breaks_a_clause_end_in_one(name):
    with mutants.find(name).applied():
        bad = list(islice((o for seed in range(400) if (o := execute(seed)).failed), 4))
        ends = [interleave.shrink(MULTI_RANK, one) for one in bad]
    assert len({one.signature for one in bad}) == 1
    assert len({one.setup for one in bad}) == 4
    assert len({(end.setup, *(op.text for op in end.operations)) for end in ends}) == 1


def test_plainer_worlds_come_first_and_end_with_the_world_itself():
    fan_in = [3, *PLAIN[1:14], 1, 0]
    setups = list(plainer(fan_in))
    assert setups[0] == PLAIN
    assert fan_in in setups
    few = [draw_bounds(Tape(setup)) for setup in setups if setup[1] < 2]
    assert len(set(few)) == len(few)
    pairs = draw_bounds(Tape([1, *PLAIN[1:]]))
    assert pairs in map(draw_bounds, map(Tape, setups)), "two processes more are one and an abort"
    assert not any(setup[6] for setup in setups), "what was plain stays so"


def test_shrinking_comes_to_an_end(monkeypatch):
    """However long a run is, no more than so many events are played again."""
    with mutants.find("released_twice").applied():
        bad = next(o for seed in range(400) if (o := execute(seed)).failed)
        monkeypatch.setattr(interleave, "SHRINKING", 0)
        monkeypatch.setattr(interleave, "IN_ALL", 0)
        monkeypatch.setattr(interleave, "STATES", (0, 0))
        short = interleave.shrink(MULTI_RANK, bad)
    assert short.signature == bad.signature
    assert short.setup == bad.setup


@pytest.mark.parametrize(
    ("method", "call"), [("take", "events"), ("prepared", "prepare"), ("submit", "submit_p")]
)
def test_a_crash_of_the_protocol_is_a_finding_of_no_oracle(method, call):
    def broken(self, *_):
        raise KeyError("piece")

    with patch.object(systems.load_ranks().PrefillRank, method, broken):
        bad = interleave.execute(MULTI_RANK, Tape(PLAIN), most=MULTI_RANK.operations)
    assert bad.signature == f"crash/{call}.KeyError"


def test_command(tmp_path, monkeypatch, capsys):
    def kvoracle(*words):
        monkeypatch.setattr("sys.argv", ["kvoracle", *words])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    fuzz = ("fuzz", "multi_rank", "--executions", "50", "--json", "result.json")
    code, printed = kvoracle(*fuzz, "--mutant", "timeout_frees")
    assert code == 1
    assert "kvoracle replay" in printed.out
    cases = sorted(tmp_path.glob("out/cases/multi_rank-timeout_frees-drain-*.json"))
    assert cases
    assert json.loads((tmp_path / "result.json").read_text())["failures"]
    code, printed = kvoracle("replay", str(cases[0]))
    assert code == 1
    for bad in (("--system", "reference"), ("--kpool", "2")):
        code, printed = kvoracle("fuzz", "multi_rank", *bad)
        assert code == 2
        assert "leave out --system, --payload" in printed.err.replace("\n", " ")
    code, printed = kvoracle("fuzz", "multi_rank", "--mutant", "gather_by_loc")
    assert code == 2
    assert "kvoracle fuzz prefix_split --mutant gather_by_loc" in printed.err
    code, printed = kvoracle("fuzz", "prefix_split", "--mutant", "timeout_frees")
    assert code == 2
    assert "kvoracle fuzz multi_rank --mutant timeout_frees" in printed.err


def test_it_is_a_target():
    assert targets.find("multi_rank") is MULTI_RANK
