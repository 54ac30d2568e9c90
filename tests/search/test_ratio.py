from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amptune.search.table.ratio import Ratio

logs = st.floats(-5, 5)
deviations = st.floats(1e-4, 2)
freedoms = st.floats(1, 1000) | st.just(math.inf)
ratios = st.builds(
    lambda log, deviation, freedom: Ratio.of_log(log, deviation, freedom=freedom, launches=3),
    logs,
    deviations,
    freedoms,
)


@given(ratios)
def test_the_ends_of_the_interval_hold_95_percent_between_them(ratio: Ratio) -> None:
    assert ratio.low < ratio.value < ratio.high
    assert ratio.chance_above(ratio.low) == pytest.approx(0.975, abs=1e-3)
    assert ratio.chance_above(ratio.value) == pytest.approx(0.5)
    assert ratio.chance_above(ratio.high) == pytest.approx(0.025, abs=1e-3)


@given(ratios)
def test_the_inverse_of_the_inverse_is_the_ratio(ratio: Ratio) -> None:
    back = ratio.inverse.inverse
    assert (back.value, back.low, back.high) == pytest.approx((ratio.value, ratio.low, ratio.high))
    assert (back.launches, back.deviation, back.freedom) == (3, ratio.deviation, ratio.freedom)


@given(ratios, st.floats(0.1, 10))
def test_a_ratio_is_above_what_its_inverse_is_below(ratio: Ratio, value: float) -> None:
    assert ratio.chance_above(value) + ratio.inverse.chance_above(1 / value) == pytest.approx(1.0)


def test_the_inverse_is_that_of_the_policies_in_the_other_order() -> None:
    inverse = Ratio(value=2.0, low=1.6, high=2.5, launches=4).inverse
    assert inverse == Ratio(value=0.5, low=0.4, high=0.625, launches=4)


def test_an_end_at_nothing_is_at_infinity_in_the_inverse() -> None:
    inverse = Ratio(value=2.0, low=0.0, high=math.inf).inverse
    assert (inverse.low, inverse.high) == (0.0, math.inf)


def test_fewer_degrees_of_freedom_make_the_interval_wider() -> None:
    widths = [Ratio.of_log(0.0, 0.01, freedom=freedom, launches=1).half_width for freedom in (1, 2, 5, 50, math.inf)]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] == pytest.approx(1.96 * 0.01, rel=0.01)


def test_less_than_one_degree_of_freedom_counts_as_one() -> None:
    assert Ratio.of_log(0.1, 0.01, freedom=0.2, launches=1).high == Ratio.of_log(0.1, 0.01, freedom=1, launches=1).high


def test_an_interval_beyond_all_numbers_ends_at_infinity() -> None:
    ratio = Ratio.of_log(0.0, 500.0, freedom=1, launches=1)
    assert (ratio.low, ratio.high) == (0.0, math.inf)


@pytest.mark.parametrize(("value", "chance"), [(1.0, 1.0), (2.0, 0.0), (1.1, 0.0)])
def test_a_ratio_that_is_known_exactly_is_above_or_not(value: float, chance: float) -> None:
    assert Ratio(value=1.1, low=1.1, high=1.1).chance_above(value) == chance


@pytest.mark.parametrize(
    ("value", "text"), [(2.0, "2.00× [1.96, 2.04]"), (1.004, "1.004× [0.984, 1.024]"), (0.6, "0.60× [0.59, 0.61]")]
)
def test_a_ratio_near_1_has_a_digit_more(value: float, text: str) -> None:
    assert str(Ratio(value=value, low=value * 0.98, high=value * 1.02)) == text
