"""The synthetic machine itself: true to the recorded grid."""

from __future__ import annotations

import pytest
from simulated.clock import SimulatedClock
from simulated.landscape import NO_TROUBLE, WORKLOADS, FlatLandscape, SyntheticEvaluator, landscape_of
from simulated.recorded import precision_of, recorded_rows

from amptune.measure.results.outcome import Effort, Measurement
from amptune.policy.settings import STOCK, amp_recipe

BF16 = amp_recipe("bf16", memory_format="channels_last")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_recorded_policy_takes_the_time_recorded(workload: str) -> None:
    landscape = landscape_of(workload)
    seen = set()
    for policy in landscape.policies:
        own = policy.batch_size == landscape.own_batch_size and not policy.fp32_modules and not policy.fused_optimizer
        key = (precision_of(policy), policy.memory_format, policy.cudnn_benchmark, policy.compile)
        if own and key in recorded_rows(workload):
            assert landscape.true_ms(policy) == pytest.approx(recorded_rows(workload)[key][0])
            seen.add(key)
    assert seen == set(recorded_rows(workload))


def test_the_best_policy_is_the_fastest_of_all_that_fit() -> None:
    landscape = landscape_of("deeplabv3p")
    best, samples_per_s = landscape.best()
    alive = [policy for policy in landscape.policies if landscape.fits(policy)]
    assert len(alive) < len(landscape.policies)
    assert samples_per_s == landscape.samples_per_s(best) == max(map(landscape.samples_per_s, alive))


def test_without_trouble_a_measurement_is_the_truth() -> None:
    landscape = landscape_of("resnet50")
    outcome = SyntheticEvaluator(landscape, SimulatedClock(), NO_TROUBLE, seed=0).measure(BF16, Effort())
    assert isinstance(outcome, Measurement)
    assert outcome.mean_ms == pytest.approx(landscape.true_ms(BF16))


@pytest.mark.slow
@pytest.mark.parametrize("slower_by", [0.0, 0.05])
def test_on_a_flat_landscape_nothing_is_faster_than_stock(slower_by: float) -> None:
    landscape = FlatLandscape("resnet50", slower_by)
    stock = landscape.samples_per_s(STOCK)
    ratios = [stock / landscape.samples_per_s(policy) for policy in landscape.policies[:500]]
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) == pytest.approx(1 + slower_by, abs=0.001)
