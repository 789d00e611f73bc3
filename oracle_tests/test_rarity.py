"""What clean executions say of a fault that was found so and so often."""

import math
import random

import pytest

from fuzz.rarity import Rarity, clean_executions

MUTANTS = 2_000


def geometric(rate, rng):
    """Executions up to and with the first that shows a fault."""
    return 1 + int(math.log(1 - rng.random()) / math.log1p(-rate))


def silent(seeds, rng, confidence, shorter=1.0):
    """The share of simulated faults that stay unseen for as many executions as would say that they
    are gone; of those `shorter` times."""
    unseen = 0
    for _ in range(MUTANTS):
        rate = 10 ** rng.uniform(-5, -0.3)
        clean = clean_executions(
            [geometric(rate, rng) for _ in range(seeds)], confidence=confidence
        )
        unseen += geometric(rate, rng) > clean * shorter
    return unseen / MUTANTS


@pytest.mark.parametrize("seeds", [1, 2, 10, 30])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_the_statement_is_wrong_as_seldom_as_it_says(seeds, confidence):
    # four standard deviations of a share of 2,000: one run in 30,000 would fail by chance
    allowed = 1 - confidence + 4 * math.sqrt(confidence * (1 - confidence) / MUTANTS)
    assert silent(seeds, random.Random(seeds), confidence) <= allowed


@pytest.mark.parametrize("seeds", [1, 10])
def test_half_as_many_clean_executions_do_not_say_it(seeds):
    """The control: the statement is no wider than it must be."""
    allowed = 0.05 + 4 * math.sqrt(0.95 * 0.05 / MUTANTS)
    assert silent(seeds, random.Random(seeds), 0.95, shorter=0.5) > allowed


def test_searches_that_gave_up_count_as_executions_without_a_find():
    rng, unseen = random.Random(7), 0
    for _ in range(MUTANTS):
        rate, most = 10 ** rng.uniform(-4, -1), 2_000
        found = [geometric(rate, rng) for _ in range(10)]
        finds = sum(each <= most for each in found)
        clean = clean_executions([min(each, most) for each in found], finds=finds)
        unseen += clean is not None and geometric(rate, rng) > clean
    assert unseen / MUTANTS <= 0.05 + 4 * math.sqrt(0.95 * 0.05 / MUTANTS)


def test_a_fault_that_was_never_found_says_nothing():
    never = Rarity.of([500, 500], finds=0)
    assert never.clean() is None
    assert never.mean == math.inf
    assert never.between() == (0.0, math.inf)


def test_the_mean_lies_between_its_bounds_as_often_as_they_say():
    rng, inside = random.Random(3), 0
    for _ in range(MUTANTS):
        rate = 10 ** rng.uniform(-5, -2)
        low, high = Rarity.of([geometric(rate, rng) for _ in range(10)]).between()
        inside += low <= 1 / rate <= high
    assert inside / MUTANTS == pytest.approx(0.95, abs=4 * math.sqrt(0.95 * 0.05 / MUTANTS))


def test_known_values():
    assert clean_executions([1_000]) == 19_000
    assert clean_executions([100] * 10) == 350
    # the rule of three, once the rate is known well
    assert clean_executions([100] * 100_000) == pytest.approx(300, abs=1)
    # chi-square with 2 degrees of freedom: 2 * 100 / 7.378 and 2 * 100 / 0.0506
    assert Rarity(1, 100).between() == (
        pytest.approx(27.11, rel=1e-3),
        pytest.approx(3950, rel=1e-3),
    )


def test_the_sentence():
    assert str(Rarity(1, 1_000)) == (
        "It was found once in 1,000 executions: 19,000 clean executions would say with 95% that a "
        "fault as rare is gone."
    )
    assert "found 10 times in 1,000 executions: 350 clean" in str(Rarity(10, 1_000))
    assert "which does not say how rare it is" in str(Rarity(0, 1_000))
