from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
from measurements import took

from amptune.policy.settings import STOCK
from amptune.search.table.ratio import ENOUGH_LAUNCHES, Ratio, Round, ratio_between, ratio_of


def launches(rng: random.Random, truth: float, *, count: int, between: float, within: float) -> list[list[float]]:
    """Pairs' ratios: three a launch, each launch with an offset of its own."""
    offsets = [rng.gauss(0, between) for _ in range(count)]
    return [[truth * math.exp(offset + rng.gauss(0, within)) for _ in range(3)] for offset in offsets]


@pytest.mark.parametrize("count", [3, 5])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(count: int) -> None:
    rng = random.Random(1)
    found = [ratio_of(launches(rng, 1.1, count=count, between=0.01, within=0.02)) for _ in range(1000)]
    assert 0.93 <= sum(ratio.low <= 1.1 <= ratio.high for ratio in found) / 1000 <= 0.97


def test_an_interval_over_blocks_of_few_launches_would_not() -> None:
    """Why three launches are wanted: what differs between launches is not seen within one."""
    rng = random.Random(1)
    found = [ratio_of(launches(rng, 1.1, count=1, between=0.02, within=0.005)) for _ in range(1000)]
    assert sum(ratio.low <= 1.1 <= ratio.high for ratio in found) / 1000 < 0.8


@pytest.mark.parametrize("noisier", [1.0, 4.0])
@pytest.mark.parametrize(("policies", "looks"), [(3, 2), (6, 2), (6, 3)])
def test_rounds_of_one_launch_hold_the_truth_by_the_spread_of_all_policies(
    policies: int, looks: int, noisier: float
) -> None:
    """Two pairs say nothing of their spread; all policies do, one of which may be noisier than the others."""
    rng = random.Random(1)
    ratios = [
        ratio_between(rounds_of_one_launch(rng, policies, looks, noisier), POLICIES[1], STOCK) for _ in range(1000)
    ]
    assert sum(ratio.low <= 1.0 <= ratio.high for ratio in ratios) / 1000 >= 0.95
    own = [ratio_of([[rng.lognormvariate(0, 0.03 * math.sqrt(2)) for _ in range(looks)]]) for _ in range(1000)]
    if policies > 3 and looks == 2 and noisier == 1.0:
        assert statistics.median(r.half_width for r in ratios) < 0.5 * statistics.median(r.half_width for r in own)


POLICIES = [STOCK, *(replace(STOCK, batch_size=n) for n in range(1, 6))]


def rounds_of_one_launch(rng: random.Random, policies: int, looks: int, noisier: float) -> list[Round]:
    """Policies that are equally fast, in rounds that drift; the second may be noisier than the others."""
    rounds = []
    for _ in range(looks):
        drift = rng.gauss(0, 0.05)
        sd = [0.03 * (noisier if i == 1 else 1.0) for i in range(policies)]
        times = [10 * math.exp(drift + rng.gauss(0, one)) for one in sd]
        outcomes = {policy: took(ms, 100.0) for policy, ms in zip(POLICIES, times, strict=False)}
        rounds.append(Round(launch=0, outcomes=outcomes))
    return rounds


def test_what_one_launch_cannot_show_is_in_its_interval() -> None:
    """Rounds of one launch may agree to 0.05 %, and the next launch differ by 0.5 %."""
    rng = random.Random(1)
    held = 0
    for _ in range(500):
        launch = [rng.gauss(0, 0.005 / math.sqrt(2)) for _ in POLICIES]
        times = [{p: 10 * math.exp(a + rng.gauss(0, 0.0005)) for p, a in zip(POLICIES, launch, strict=True)}] * 3
        rounds = [Round(launch=0, outcomes={p: took(ms, 100.0) for p, ms in one.items()}) for one in times]
        ratio = ratio_between(rounds, POLICIES[1], STOCK)
        held += ratio.low <= 1.0 <= ratio.high
    assert held / 500 >= 0.93


def test_a_policy_beside_itself_is_as_fast() -> None:
    rounds = rounds_of_one_launch(random.Random(1), 4, 2, 1.0)
    ratio = ratio_between(rounds, STOCK, STOCK)
    assert (ratio.value, ratio.low, ratio.high) == (1.0, 1.0, 1.0)


def test_an_outlier_in_a_launch_does_not_move_the_ratio() -> None:
    clean = [[1.1, 1.1, 1.1]] * 3
    assert ratio_of([[1.1, 1.1, 5.0], *clean[1:]]).value == pytest.approx(ratio_of(clean).value)


def test_with_few_launches_the_interval_holds_what_each_of_them_showed() -> None:
    ratio = ratio_of([[1.00, 1.00, 1.00], [1.10, 1.10, 1.10]])
    assert ratio.low <= 1.0
    assert ratio.high >= 1.1
    assert ratio.launches == 2 < ENOUGH_LAUNCHES


def test_one_pair_claims_nothing() -> None:
    ratio = ratio_of([[2.0]])
    assert ratio.value == pytest.approx(2.0)
    assert (ratio.low, ratio.high) == (0.0, math.inf)
    assert not ratio.shows_a_difference
    assert str(ratio) == "2.00× (measured once, which claims nothing)"


def test_no_pair_at_all_gives_no_ratio() -> None:
    assert math.isnan(ratio_of([]).value)


def test_a_ratio_near_one_has_a_digit_more() -> None:
    assert str(ratio_of([[2.0, 2.0]])) == "2.00× [2.00, 2.00]"
    assert str(ratio_of([[1.004, 1.004]])) == "1.004× [1.004, 1.004]"


@pytest.mark.parametrize(
    ("ratio", "shows"),
    [
        (Ratio(value=2.59, low=1.83, high=3.66), True),
        (Ratio(value=1.05, low=1.04, high=1.06), True),
        (Ratio(value=1.05, low=1.02, high=1.08), False),
        (Ratio(value=2.0, low=0.0, high=math.inf), False),
    ],
)
def test_a_large_gain_outlives_a_doubt_that_a_small_one_does_not(ratio: Ratio, *, shows: bool) -> None:
    """2.59 in [1.83, 3.66] is 1.09 at the least with an interval 2.5 times as wide on the logarithm."""
    assert ratio.shows_more_than(1.0, doubt=2.5) is shows
    assert ratio.shows_more_than(1.0) is (ratio.low > 1)
