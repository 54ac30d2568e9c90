"""Every pair of figures that is shown divides to the ratio that is shown, whatever the noise."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import BF16, FP16, Drawn, decided

from amptune.policy.settings import STOCK
from amptune.report.markup import number
from amptune.search.table.effects import CPU, GPU
from amptune.search.table.objective import Objective
from amptune.search.table.ratio import Ratio


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    factors=st.tuples(st.floats(0.2, 5.0), st.floats(0.2, 5.0)),
    launches=st.integers(1, 3),
    objective=st.sampled_from(["throughput", "memory"]),
    machine=st.sampled_from([CPU, GPU]),
)
def test_figures_of_two_policies_divide_to_the_ratio_that_is_told(
    seed: int, factors: tuple[float, float], launches: int, objective: str, machine: object
) -> None:
    times = {STOCK: 10.0, BF16: 10.0 * factors[0], FP16: 10.0 * factors[1]}
    drawn = Drawn(machine, times, spread=0.2, seed=seed, wide=2.0)  # type: ignore[arg-type]
    for launch in range(launches):
        drawn.rounds(2, launch=str(launch), start_s=1000.0 * launch)
    verdict = decided(drawn.rows, machine, Objective(objective))  # type: ignore[arg-type]
    own = verdict.baseline
    for one in verdict.contenders:
        assert one.samples_per_s and own.samples_per_s and one.step_ms and own.step_ms and one.vs_baseline  # noqa: PT018
        assert math.isclose(one.samples_per_s / own.samples_per_s, one.vs_baseline.value, rel_tol=1e-9)
        assert math.isclose(own.step_ms / one.step_ms, one.vs_baseline.value, rel_tol=1e-9)
        if objective == "memory" and one.gain:
            assert own.peak_memory_mib
            assert one.peak_memory_mib
            assert math.isclose(own.peak_memory_mib / one.peak_memory_mib, one.gain.value, rel_tol=1e-9)


@given(value=st.floats(0.05, 50.0), width=st.floats(0.0, 5.0))
def test_a_ratio_has_the_digits_that_its_interval_carries(value: float, width: float) -> None:
    ratio = Ratio(value=value, low=value / (1 + width), high=value * (1 + width))
    half = (ratio.high - ratio.low) / 2
    shown = str(ratio)
    assert ("too noisy to tell" in shown) == (ratio.high > 4 * ratio.value and ratio.low < 1 < ratio.high)
    if "noisy" not in shown and half >= 0.5:
        assert len(shown.partition("×")[0].partition(".")[2]) == 1


@pytest.mark.parametrize(("ms", "shown"), [(2830.4, "2,830"), (0.81234, "0.8123"), (123456.7, "123,457")])
def test_numbers_are_written_out(ms: float, shown: str) -> None:
    assert number(ms) == shown
