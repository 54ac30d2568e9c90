from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amptune.search.table.ratio import Ratio

ratios = st.builds(
    lambda log, deviation, freedom: Ratio.of_log(log, deviation, freedom=freedom, launches=3),
    st.floats(-5, 5),
    st.floats(1e-4, 2),
    st.floats(1, 1000) | st.just(math.inf),
)


@given(ratios, st.floats(0.1, 10))
def test_an_interval_holds_95_percent_and_says_what_its_inverse_says(ratio: Ratio, value: float) -> None:
    assert ratio.low < ratio.value < ratio.high
    chances = [ratio.chance_above(end) for end in (ratio.low, ratio.value, ratio.high)]
    assert chances == pytest.approx([0.975, 0.5, 0.025], abs=1e-3)
    assert ratio.chance_above(value) + ratio.inverse.chance_above(1 / value) == pytest.approx(1.0)
    assert (ratio.inverse.low, ratio.inverse.high) == pytest.approx((1 / ratio.high, 1 / ratio.low))
    assert (ratio.inverse.launches, ratio.inverse.deviation) == (3, ratio.deviation)


def test_an_interval_beyond_all_numbers_ends_at_infinity_and_so_does_its_inverse() -> None:
    ratio = Ratio.of_log(0.0, 500.0, freedom=1, launches=1)
    for one in (ratio, ratio.inverse):
        assert (one.low, one.high) == (0.0, math.inf)
