"""The synthetic machine itself: true to the recorded grid, and as troublesome as it says, no more."""

from __future__ import annotations

import statistics
from dataclasses import fields, replace
from itertools import pairwise

import numpy as np
import pytest
from simulated.landscape import (
    HW_THERMAL_SLOWDOWN,
    NO_TROUBLE,
    WORKLOADS,
    FlatLandscape,
    Landscape,
    SimulatedClock,
    SyntheticEvaluator,
    Trouble,
    landscape_of,
    precision_of,
    recorded_rows,
    replay,
)

from amptune.measure.results.outcome import Effort, Failure, Measurement
from amptune.policy.settings import STOCK, Fp32Rule, Policy, amp_recipe

BF16 = amp_recipe("bf16", memory_format="channels_last")


def machine(seed: int = 0, workload: str = "resnet50", **trouble: object) -> SyntheticEvaluator:
    """A machine with no trouble but the one named."""
    return SyntheticEvaluator(
        landscape_of(workload),
        SimulatedClock(),
        replace(NO_TROUBLE, **trouble),  # type: ignore[arg-type]  # by keyword
        seed,
    )


def measured_ms(evaluator: SyntheticEvaluator, policy: Policy, effort: Effort | None = None) -> float:
    outcome = evaluator.measure(policy, effort or Effort())
    assert isinstance(outcome, Measurement)
    return outcome.mean_ms


def spread(values: list[float]) -> float:
    """Standard deviation of the logarithms."""
    return float(np.std(np.log(values), ddof=1))


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_has_ten_thousand_policies_and_twelve_groups_to_exclude(workload: str) -> None:
    landscape = landscape_of(workload)
    assert len(landscape.policies) >= 10_000
    assert len(landscape.candidates.ladder.rungs) == 12
    assert STOCK.batch_size is None
    assert landscape.candidates.baseline in landscape.policies


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


def test_throughput_rises_with_the_batch_and_saturates() -> None:
    landscape = landscape_of("seresnext50_cifar")
    speeds = [landscape.samples_per_s(replace(BF16, batch_size=256 * factor)) for factor in (1, 2, 4, 8, 16)]
    gains = [after / before for before, after in pairwise(speeds)]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] > 1.5
    assert gains[-1] < 1.4


def test_which_precision_is_fastest_depends_on_the_batch() -> None:
    landscape = landscape_of("seresnext50_cifar")
    tf32 = Policy(memory_format="channels_last")
    assert landscape.true_ms(tf32) < landscape.true_ms(BF16)
    assert landscape.true_ms(replace(tf32, batch_size=2048)) > 3 * landscape.true_ms(replace(BF16, batch_size=2048))


def test_some_groups_gain_by_exclusion_and_norms_cost_most() -> None:
    landscape = landscape_of("vgg16_cifar")
    steps = [landscape.true_ms(replace(BF16, fp32_math="tf32", fp32_modules=rules(depth))) for depth in range(13)]
    changes = [after / before for before, after in pairwise(steps)]
    assert changes[0] == pytest.approx(0.93)
    assert sum(change < 1 for change in changes) < sum(change > 1 for change in changes)
    assert min(changes[-2:]) >= 1.10


def rules(depth: int) -> tuple[Fp32Rule, ...]:
    return landscape_of("vgg16_cifar").candidates.ladder.rules(depth)


def test_the_best_policy_is_the_fastest_of_all_that_fit() -> None:
    landscape = landscape_of("deeplabv3p")
    best, samples_per_s = landscape.best()
    alive = [policy for policy in landscape.policies if landscape.fits(policy)]
    assert len(alive) < len(landscape.policies)
    assert samples_per_s == landscape.samples_per_s(best) == max(map(landscape.samples_per_s, alive))


def test_the_landscape_is_the_same_in_every_process() -> None:
    assert Landscape("resnet50").true_ms(replace(BF16, batch_size=256)) == pytest.approx(56.39034606623014)


def test_a_policy_too_large_for_the_memory_fails() -> None:
    outcome = machine(workload="deeplabv3p").measure(Policy(fp32_math="ieee", batch_size=64), Effort())
    assert isinstance(outcome, Failure)
    assert outcome.kind == "oom"


def test_without_trouble_a_measurement_is_the_truth() -> None:
    assert measured_ms(machine(), BF16) == pytest.approx(landscape_of("resnet50").true_ms(BF16))


def test_noise_is_of_the_size_asked_for() -> None:
    evaluator = machine(noise=0.02)
    assert spread([measured_ms(evaluator, BF16) for _ in range(500)]) == pytest.approx(0.02, rel=0.15)
    outcome = machine(step_noise=0.02).measure(BF16, Effort(min_steps=500, max_steps=500))
    assert isinstance(outcome, Measurement)
    assert spread(list(outcome.step_ms)) == pytest.approx(0.02, rel=0.15)


def test_drift_is_ten_percent_over_the_tuning_in_either_direction() -> None:
    changes = []
    for seed in range(10):
        evaluator = machine(seed, drift=0.10)
        before = evaluator.drift_factor()
        evaluator.clock.advance(300)
        changes.append(round(evaluator.drift_factor() / before, 2))
    assert set(changes) == {0.91, 1.11}


def test_drift_is_common_to_all_policies() -> None:
    evaluator = machine(drift=0.10)
    evaluator.clock.advance(50)
    drifted = measured_ms(evaluator, STOCK) / landscape_of("resnet50").true_ms(STOCK)
    assert drifted == pytest.approx(measured_ms(evaluator, BF16) / landscape_of("resnet50").true_ms(BF16), rel=0.01)
    assert abs(drifted - 1) > 0.04


def test_a_launch_gives_every_policy_another_process() -> None:
    evaluator = machine(launch_noise=0.005)
    ratios = []
    for _ in range(400):
        evaluator.launch([STOCK, BF16])
        first = measured_ms(evaluator, STOCK)
        assert measured_ms(evaluator, STOCK) == first
        ratios.append(first / measured_ms(evaluator, BF16))
    assert spread(ratios) == pytest.approx(0.005 * 2**0.5, rel=0.15)


def test_while_searching_a_process_is_shared_by_policies_of_one_cudnn_benchmark_setting() -> None:
    evaluator = machine(launch_noise=0.005)
    truth = landscape_of("resnet50").true_ms

    def factor(policy: Policy) -> float:
        return round(measured_ms(evaluator, policy) / truth(policy), 6)

    assert factor(STOCK) == factor(BF16)
    assert factor(replace(BF16, cudnn_benchmark=True)) != factor(BF16)


def test_one_measurement_in_twenty_is_an_outlier_and_slower() -> None:
    evaluator = machine(outliers=0.05)
    truth = landscape_of("resnet50").true_ms(BF16)
    factors = [measured_ms(evaluator, BF16) / truth for _ in range(1000)]
    outliers = [factor for factor in factors if factor > 1 + 1e-6]
    assert 30 <= len(outliers) <= 70
    assert 1.1 <= min(outliers) <= max(outliers) <= 1.6
    assert min(factors) == pytest.approx(1)


def test_throttling_is_an_episode_that_the_clock_event_reasons_tell() -> None:
    evaluator = machine(seed=3, throttlings=2.0)
    truth = landscape_of("resnet50").true_ms(BF16)
    seen = set()
    while evaluator.clock() < 300:
        outcome = evaluator.measure(BF16, Effort())
        assert isinstance(outcome, Measurement)
        slower = outcome.mean_ms / truth > 1.19
        seen.add(slower)
        assert outcome.clock_event_reasons == (HW_THERMAL_SLOWDOWN if slower else 0)
    assert seen == {True, False}


@pytest.mark.slow
def test_a_share_of_the_policies_can_be_made_to_fail_but_not_the_known_good() -> None:
    evaluator = machine(oom=0.2)
    policies = landscape_of("resnet50").policies
    fit = [policy for policy in policies if landscape_of("resnet50").fits(policy)]
    assert statistics.fmean(not evaluator.runs(policy) for policy in fit) == pytest.approx(0.2, abs=0.02)
    assert evaluator.runs(STOCK)
    assert evaluator.runs(BF16)
    assert evaluator.runs(evaluator.best())


def test_time_passes_as_on_a_machine() -> None:
    evaluator = machine()
    costs = []
    for policy in (STOCK, STOCK, replace(BF16, compile="default"), replace(BF16, compile="default")):
        before_s = evaluator.clock()
        evaluator.measure(policy, Effort())
        costs.append(evaluator.clock() - before_s)
    assert costs[0] - costs[1] == pytest.approx(8)
    assert costs[2] - costs[3] == pytest.approx(15)
    benchmarked = replace(BF16, cudnn_benchmark=True)
    evaluator.launch([benchmarked])
    before_s = evaluator.clock()
    evaluator.measure(benchmarked, Effort())
    middle_s = evaluator.clock()
    evaluator.measure(benchmarked, Effort())
    assert (middle_s - before_s) - (evaluator.clock() - middle_s) == pytest.approx(6)


def test_a_time_limit_ends_a_measurement_at_that_time_and_its_process() -> None:
    evaluator = machine()
    outcome = evaluator.measure(replace(BF16, compile="default"), Effort(time_limit_s=12))
    assert isinstance(outcome, Failure)
    assert outcome.kind == "timeout"
    assert evaluator.clock() == pytest.approx(12)
    evaluator.measure(BF16, Effort())
    assert evaluator.clock() > 12 + 8


def test_a_policy_slower_than_the_limit_is_left_after_few_steps() -> None:
    evaluator = machine()
    measured_ms(evaluator, STOCK)
    before_s = evaluator.clock()
    outcome = evaluator.measure(STOCK, Effort(abandon_above_ms=50))
    assert isinstance(outcome, Measurement)
    assert outcome.abandoned
    assert len(outcome.step_ms) == 2
    assert evaluator.clock() - before_s < 1.4


@pytest.mark.slow
def test_a_seed_gives_the_same_tuning_and_another_gives_another() -> None:
    first, again, other = (replay("resnet18", seed) for seed in (1, 1, 2))
    assert replace(first, wall_s=0.0) == replace(again, wall_s=0.0)
    assert (first.simulated_s, first.chosen) != (other.simulated_s, other.chosen)


@pytest.mark.slow
@pytest.mark.parametrize("slower_by", [0.0, 0.05])
def test_on_a_flat_landscape_nothing_is_faster_than_stock(slower_by: float) -> None:
    landscape = FlatLandscape("resnet50", slower_by)
    stock = landscape.samples_per_s(STOCK)
    ratios = [stock / landscape.samples_per_s(policy) for policy in landscape.policies[:500]]
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) == pytest.approx(1 + slower_by, abs=0.001)


def test_every_trouble_can_be_switched_on_alone() -> None:
    assert {field.name for field in fields(Trouble)} >= {"noise", "drift", "launch_noise", "outliers", "throttlings"}
    assert all(getattr(NO_TROUBLE, name) == 0 for name in ("noise", "step_noise", "launch_noise", "drift", "outliers"))
