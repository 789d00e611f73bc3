"""Features: bounded, the same in every run of a tape, and different for what differs."""

from __future__ import annotations

import pytest

import systems
from fuzz import targets
from fuzz.coverage import Coverage, boundary
from fuzz.guidance import Garden, Grown, bred, grown
from fuzz.run import execute
from fuzz.tape import Tape
from reference.geometry import Geometry
from reference.protocol import Moved, Peer, Phase, Settled, Side, TransferKey
from reference.protocol import Outcome as Ending

SMALL = Geometry(kpool=4, physical_page_size=8, topk=8, mamba_track_interval=64)


@pytest.mark.parametrize(
    ("length", "where"),
    [
        (64, "at interval"),
        (32, "at page"),
        (40, "at physical page"),
        (44, "at group"),
        (65, "behind interval"),
        (33, "behind page"),
        (63, "before interval"),
        (31, "before page"),
        (39, "before physical page"),
        (43, "before group"),
        (46, "inside"),
    ],
)
def test_a_length_falls_into_the_class_of_the_largest_unit(length, where):
    assert boundary(length, SMALL) == where


def test_without_pooling_every_length_ends_a_group():
    plain = Geometry(kpool=1, physical_page_size=8, topk=8, mamba_track_interval=64)
    assert boundary(13, plain) == "at group"


def test_transfers_are_noted_beside_where_they_stand():
    read = iter(range(10, 100)).__next__
    coverage, key = Coverage(read), TransferKey(room=3, generation=1, incarnation=0)
    one, two, writer = Peer(Side.DECODE, 0, 0), Peer(Side.DECODE, 1, 0), Peer(Side.PREFILL, 0, 0)
    coverage.observe([Moved(one, key, Phase.ADVERTISED, 1), Moved(two, key, Phase.FAILED, 1)])
    coverage.observe([Settled(writer, key, one, 0, Ending.BROKEN)])
    assert coverage.standing(3) == "ADVERTISED and FAILED"
    coverage.count({"live": 1, "never": 0})
    coverage.count({"live": 5, "never": 0})
    assert list(coverage.features) == [
        "Moved to ADVERTISED where unknown",
        "Moved to FAILED where ADVERTISED",
        "Settled BROKEN where ADVERTISED and FAILED",
        "live x1",
        "live x4",
    ]
    assert coverage.features["Moved to ADVERTISED where unknown"] == 10


@pytest.mark.parametrize("name", targets.names())
def test_a_replay_shows_the_same_features(name):
    system, target = systems.load("optimized"), targets.find(name)
    first, second = (execute(system, target, Tape(seed=seed)) for seed in (3, 4))
    again = execute(system, target, Tape(first.values))
    assert again.features == first.features
    assert first.features.keys() != second.features.keys()
    assert all(0 < place <= len(first.values) for place in first.features.values())
    assert all(0 < len(feature) <= 200 for feature in first.features)


def tape_of(*operations: list[int], features: str, setup: int = 9) -> Grown:
    values, starts = [setup], [1]
    for operation in operations:
        values += operation
        starts.append(len(values))
    return Grown(
        values=values, starts=starts, features=dict.fromkeys(features.split(), len(values))
    )


def test_the_shortest_tape_of_each_feature_is_kept():
    long = tape_of([1, 2], [3, 4], features="a b")
    short = tape_of([1, 2], features="a")
    useless = tape_of([1, 2], [3, 5], features="a")
    garden = Garden([long])
    assert garden.add(short)
    assert not garden.add(short)
    assert not garden.add(useless)
    assert len(garden) == 2
    assert {tuple(tape.values) for tape in garden} == {(9, 1, 2, 3, 4), (9, 1, 2)}


def test_rare_features_are_started_from_most():
    common, rare = tape_of([1, 2], features="c"), tape_of([3, 4], features="r")
    garden = Garden([common, rare])
    garden.counts.update({"c": 1000, "r": 1})
    firsts = [garden.parents(seed)[0] for seed in range(400)]
    # one in sixteen draws the common one four times
    assert sum(tape.values == rare.values for tape in firsts) > 320
    assert any(tape.values == common.values for tape in firsts)
    assert Garden().parents(0) is None


def test_which_seeds_are_guided_has_nothing_to_do_with_what_they_generate():
    """Else guidance would take, for example, all seeds of one geometry."""
    garden = Garden([tape_of([1, 2], features="f")])
    for share in (0, 20, 50):
        guided = [seed for seed in range(4000) if garden.parents(seed, share=share)]
        assert abs(len(guided) - 40 * share) < 100
        firsts = [Tape(seed=seed).draw(1000) for seed in guided]
        assert abs(sum(firsts) - 499.5 * len(firsts)) < 5 * 289 * max(1, len(firsts)) ** 0.5


def test_a_tape_is_started_from_where_it_shows_what_is_rare():
    early = tape_of([1, 2], [3, 4], [5, 6], features="late")
    early.features["rare"] = 3
    garden = Garden([early])
    garden.counts.update({"late": 9, "rare": 1})
    assert {tuple(garden.parents(seed)[0].values) for seed in range(60)} == {
        (9, 1, 2),
        (9, 1, 2, 3, 4, 5, 6),
    }


def test_a_bred_tape_begins_like_its_parent_and_goes_on_from_its_seed():
    """Every way of changing it shows: none, one left out, one changed, another's behind it."""
    first = tape_of([1, 1], [2, 2], [3, 3], features="f")
    second = tape_of([7, 7], [8, 8], features="s", setup=5)
    seen = set()
    for seed in range(300):
        tape = bred(seed, (first, second))
        replayed = [tape.draw(100) for _ in range(12)]
        again = bred(seed, (first, second))
        assert [again.draw(100) for _ in range(12)] == replayed
        assert replayed[0] == 9
        assert [Tape(tape.values).draw(100)] == replayed[:1]
        seen.add(tuple(replayed[1:9]))
    assert any(values[:6] == (1, 1, 2, 2, 3, 3) for values in seen)
    assert any(values[:4] == (2, 2, 3, 3) for values in seen)
    assert any(values == (1, 1, 2, 2, 3, 3, 7, 7) for values in seen)
    assert any(values == (1, 1, 2, 2, 3, 3, 8, 8) for values in seen)
    assert any(values[:5] == (1, 1, 2, 2, 3) and values[5] != 3 for values in seen)
    assert len({values[6:] for values in seen if values[:6] == (1, 1, 2, 2, 3, 3)}) > 20


def test_a_guided_execution_is_its_values_alone():
    system, target = systems.load("optimized"), targets.find("prefix_split")
    parents = tuple(grown(execute(system, target, Tape(seed=seed))) for seed in (1, 2))
    for seed in range(6):
        guided = execute(system, target, bred(seed, parents))
        assert guided.values[:4] == parents[0].values[:4]
        assert execute(system, target, Tape(guided.values)).digest == guided.digest


def test_where_a_tape_drew_its_end_is_left_off():
    system, target = systems.load("optimized"), targets.find("slot_reuse")
    for seed in range(5):
        outcome = execute(system, target, Tape(seed=seed))
        tape = grown(outcome)
        assert [value for each in tape.operations for value in each] == tape.values[
            tape.starts[0] :
        ]
        assert all(each[0] for each in tape.operations)
        assert len(tape.operations) == len(outcome.operations)
