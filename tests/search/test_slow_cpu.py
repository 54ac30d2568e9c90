"""The simulated slow CPU is one: its gains, its noise, and the time that a trial takes there."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from simulated.clock import SimulatedClock
from simulated.slow_cpu import GAIN, KINDS, BusyCpuEvaluator, SlowCpu, tunings

from amptune.measure.results.outcome import Effort, Measurement
from amptune.policy.settings import STOCK, amp_recipe

SEEDS = range(20)


@pytest.mark.parametrize("kind", KINDS)
def test_its_gains_are_in_the_layout_and_the_optimizer_and_bf16_is_slow(kind: str) -> None:
    for seed in SEEDS:
        machine = SlowCpu(kind, seed)
        stock_ms = machine.true_ms(STOCK)
        assert 1.3 <= stock_ms / machine.true_ms(replace(STOCK, memory_format="channels_last")) <= 1.8
        assert 0.14 <= stock_ms / machine.true_ms(amp_recipe("bf16")) <= 0.46
        assert machine.best_gain({}) == pytest.approx(2 * machine.best_gain({"threads": "0"}))
    assert any(SlowCpu(kind, seed).best_gain({}) > GAIN for seed in SEEDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_takes_seconds_is_contaminated_as_a_rule_and_differs_from_the_next_one(kind: str) -> None:
    seconds, loaded, spreads = [], [], []
    for seed in SEEDS:
        clock = SimulatedClock()
        evaluator = BusyCpuEvaluator(SlowCpu(kind, seed), clock, seed)
        evaluator.prepare(60.0)
        means = []
        for _ in range(10):
            started_s = clock()
            measured = evaluator.measure(STOCK, Effort())
            assert isinstance(measured, Measurement)
            seconds.append(clock() - started_s)
            loaded.append("host-load" in measured.contaminated_by)
            means.append(measured.mean_ms)
        spreads.append(statistics.stdev(means) / statistics.fmean(means))
    assert 1.5 < statistics.median(seconds) < 8
    assert statistics.fmean(loaded) > 0.5
    assert 0.1 < statistics.median(spreads) < 0.3
    assert evaluator.graphs_at_once == 0


@pytest.mark.slow  # twenty tunings, a second or two each
@pytest.mark.parametrize(("budget_s", "least"), [(60.0, 16), (300.0, 19)])
def test_a_tuning_on_a_busy_cpu_ends_with_the_large_gain_that_is_there(budget_s: float, least: int) -> None:
    found = list(tunings(budget_s))
    assert sum(one.claims_the_gain for one in found) >= least
    assert all(one.true_gain > 0.98 for one in found), "none is slower than stock"
