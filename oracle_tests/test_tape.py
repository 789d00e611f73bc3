"""The tape: generation from a seed, total replay, and the normal form."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.tape import LIMIT, SplitMix, Tape, trimmed


def play(tape: Tape) -> list[int]:
    """A program whose later bounds depend on earlier values."""
    seen = [tape.draw(5, favour=(3, 9)), tape.choose([1, 0, 3])]
    with tape.span("inner"):
        seen += [tape.draw(1 + seen[0]) for _ in range(seen[1] + 1)]
    return seen


def test_splitmix_yields_the_published_sequence():
    """The first outputs for seed 1234567, as the author's C code prints them."""
    random = SplitMix(1234567)
    assert [random.next() for _ in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@given(st.integers(0, 2**64 - 1))
def test_a_replay_of_what_was_recorded_is_the_same_run(seed):
    generated = Tape(seed=seed)
    seen = play(generated)
    replayed = Tape(generated.values)
    assert play(replayed) == seen
    assert (replayed.values, replayed.bounds) == (generated.values, generated.bounds)
    assert replayed.spans == generated.spans
    assert play(Tape(trimmed(generated.values))) == seen


@given(st.lists(st.integers(-5, 2**40), max_size=12))
def test_every_edited_tape_is_a_run(values):
    tape = Tape(values)
    play(tape)
    assert all(0 <= value < bound for value, bound in zip(tape.values, tape.bounds, strict=True))


def test_replay_clips_to_the_bound_and_ends_in_zeros():
    tape = Tape([7, 1])
    assert [tape.draw(5), tape.draw(5), tape.draw(5), tape.choose([0, 1])] == [4, 1, 0, 0]


def test_weights_and_favours_steer_generation():
    tape = Tape(seed=3)
    choices = Counter(tape.choose([0, 1, 3]) for _ in range(4000))
    assert choices[0] == 0
    assert choices[2] / choices[1] == pytest.approx(3, rel=0.15)
    drawn = Counter(tape.draw(100, favour=(40, 41, 100, -1)) for _ in range(4000))
    assert (drawn[40] + drawn[41]) / 4000 == pytest.approx(0.755, rel=0.05)


def test_swarms_differ_by_seed_and_leave_the_choices_alone():
    with_swarm, without = Tape(seed=5), Tape(seed=5)
    weights = with_swarm.swarm(8)
    assert weights != Tape(seed=6).swarm(8)
    assert with_swarm.draw(1000) == without.draw(1000)
    assert Tape([1]).swarm(3) == [1.0, 1.0, 1.0]


def test_spans_mark_their_draws():
    tape = Tape(seed=1)
    play(tape)
    (span,) = tape.spans
    assert (span.label, span.start, span.stop) == ("inner", 2, len(tape.values))


def test_an_endless_run_gets_zeros():
    tape = Tape(seed=1)
    drawn = [tape.draw(1000) for _ in range(LIMIT + 3)]
    assert drawn[LIMIT:] == [0, 0, 0]


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(0, 2**64 - 1))
def test_a_tape_with_values_and_a_seed_replays_and_then_goes_on(values, seed):
    tape, alone = Tape(values, seed=seed), Tape(seed=seed)
    drawn = []
    for _ in range(len(values) + 8):
        assert tape.generating == (len(drawn) >= len(values))
        drawn.append(tape.draw(30, favour=(4,)))
    assert drawn[: len(values)] == [min(value, 29) for value in values]
    assert drawn[len(values) :] == [alone.draw(30, favour=(4,)) for _ in range(8)]
    assert tape.swarm(4) == Tape(seed=seed).swarm(4)
    replayed = Tape(tape.values)
    assert [replayed.draw(30) for _ in drawn] == drawn
