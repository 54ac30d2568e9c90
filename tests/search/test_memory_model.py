"""Memory as a function of the batch size, from few observations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measurements import took

from amptune.measure.results.outcome import Failure, Measurement, Outcome
from amptune.policy.setting_effects import memory_of
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.batch_size.memory_fit import Fit
from amptune.search.batch_size.memory_model import MemoryModel
from amptune.search.batch_size.memory_runs import FixedPart, Observation, observation_of

LIMIT_MIB = 140_000.0
WEIGHTS = FixedPart.of_weights(25_000_000)
OOM = Failure(kind="oom", message="CUDA out of memory")


def measured(allocated_mib: float, reserved_mib: float | None = None, *, retries: int = 0) -> Measurement:
    reserved_mib = reserved_mib or 1.01 * allocated_mib
    return took(1.0, allocated_mib, peak_reserved_mib=reserved_mib, alloc_retries=retries)


def model_of(*seen: tuple[int, Outcome], policy: Policy = STOCK, fixed: FixedPart = WEIGHTS) -> MemoryModel:
    model = MemoryModel(limit_mib=LIMIT_MIB, fixed=fixed)
    return model.with_outcomes((policy, n, outcome) for n, outcome in seen)


def fit_to(*seen: tuple[int, Outcome], fixed: FixedPart = WEIGHTS) -> Fit:
    fit = model_of(*seen, fixed=fixed).fit(STOCK)
    assert fit is not None
    return fit


def on_a_line(*sizes: int, fixed_mib: float = 300.0, each_mib: float = 100.0) -> list[tuple[int, Outcome]]:
    return [(n, measured(fixed_mib + each_mib * n)) for n in sizes]


def test_only_a_peak_and_an_out_of_memory_say_something_about_memory() -> None:
    assert observation_of(8, OOM) == Observation(batch_size=8)
    assert observation_of(8, Failure(kind="nonfinite", message="the loss is nan")) is None
    assert observation_of(8, measured(10.0, 12.0, retries=2)) == Observation(
        batch_size=8, allocated_mib=10.0, reserved_mib=12.0, alloc_retries=2
    )
    assert model_of((8, Failure(kind="timeout", message=""))).fit(STOCK) is None


@given(
    fixed_mib=st.floats(0, 60_000),
    each_mib=st.floats(0.05, 10_000),
    sizes=st.lists(st.integers(1, 4096), min_size=1, max_size=4, unique=True),
)
def test_bounds_hold_what_a_clean_line_does(fixed_mib: float, each_mib: float, sizes: list[int]) -> None:
    """Whatever is seen of it, if what is fixed is explained by the prior."""
    fixed = FixedPart(least_mib=fixed_mib / 2, most_mib=2 * fixed_mib + 1)
    seen = [(n, peak) for n, peak in on_a_line(*sizes, fixed_mib=fixed_mib, each_mib=each_mib)]
    fit = model_of(*seen, fixed=fixed).fit(STOCK)
    assert fit is not None
    for n in (max(sizes), max(sizes) + 1, 2 * max(sizes), 7 * max(sizes)):
        assert fit.least_mib(n) <= fixed_mib + each_mib * n <= fit.most_mib(n) + 1e-6
    largest = int((LIMIT_MIB - fixed_mib) / each_mib)
    if max(sizes) <= largest / 1.02:
        assert fit.surely <= largest <= fit.at_most(10**9)


JUMPS = ((100, 1.05), (300, 0.95), (600, 1.05), (900, 1.0))
SQUEEZED = [(n, measured(138_000, LIMIT_MIB, retries=3)) for n in (100, 200, 300)]
FLAT = [(4, measured(60_000)), (9, measured(60_000)), (72, measured(70_000))]
PRESSED = (1800, measured(139_000, LIMIT_MIB, retries=3))


@pytest.mark.parametrize(
    ("seen", "slopes", "sizes"),
    [
        (on_a_line(32, 500, 1300), (99.29, 100.7), (1369, 1393, 1418)),
        # From one run the weights bound what a sample takes.
        ([(10, measured(WEIGHTS.most_mib + 1000, WEIGHTS.most_mib + 1000))], (100.0, 147.7), (445, 80, 1600)),
        (on_a_line(1, 2, fixed_mib=10, each_mib=1), (0.9717, 0.9717), (11_551, 16, 165_388)),
        ([(n, measured(300 + 100 * n * jump)) for n, jump in JUMPS], (95.4, 101.2), (1323, 1401, 1505)),
        # Small batches with the same peak, that of the optimizer step, say little of what a sample takes.
        (FLAT, (137.1, 386.6), (221, 493, 1025)),
        # An out-of-memory bounds from above, unless more ran later.
        ([*on_a_line(32, 500), (2000, OOM)], (97.85, 101.4), (1277, 1396, 1556)),
        ([*on_a_line(32, 500), (900, OOM)], (97.85, 223.0), (866, 899, 899)),
        # A run under pressure counts as one that ran, but its peak does not: workspaces gave way. If there are no
        # others, the weights bound the slope.
        ([*on_a_line(32, 500), PRESSED], (97.85, 101.4), (1800, 1396, 1800)),
        (SQUEEZED, (458.1, 458.1), (300, 304, 306)),
        # What the weights do not explain may give way, as 60 GB that cudnn.benchmark took.
        (on_a_line(32, 200, 500, fixed_mib=60_300), (98.13, 101.9), (724, 1377, 1540)),
    ],
)
def test_runs_bound_what_a_sample_takes_and_the_sizes_that_surely_likely_and_at_most_fit(
    seen: list[tuple[int, Outcome]], slopes: tuple[float, float], sizes: tuple[int, int, int]
) -> None:
    fit = fit_to(*seen)
    assert (fit.least_slope, fit.most_slope) == pytest.approx(slopes, rel=1e-3)
    assert (fit.surely, fit.likely, fit.at_most(10**6)) == sizes
    assert fit.was_contradicted is ((900, OOM) in seen)
    assert fit.was_surprised is (PRESSED in seen)


def test_from_one_run_another_arm_helps() -> None:
    """Its fixed part: IEEE math and stock have the same weights, gradients and optimizer state."""
    model = model_of(*on_a_line(16, 64, 256, fixed_mib=20_000))
    alone = model_of((64, measured(26_000)), policy=amp_recipe("bf16"), fixed=FixedPart()).fit(amp_recipe("bf16"))
    helped = replace(model, fixed=FixedPart()).with_outcome(amp_recipe("bf16"), 64, measured(26_000))
    fit = helped.fit(amp_recipe("bf16"))
    assert alone is not None
    assert fit is not None
    assert alone.least_slope == 0.0
    assert alone.most_slope == pytest.approx(1.01 * 26_000 / 64)
    assert fit.least_slope < 6000 / 64 < fit.most_slope < 1.2 * 6000 / 64


def test_workspaces_that_another_arm_does_without_may_give_way() -> None:
    """DeepLabV3+ at 4 samples in TF32: 6.6 GB, with cudnn.benchmark 72.6 GB; what fits is decided by the former."""
    searching = Policy(cudnn_benchmark=True)
    model = model_of((4, measured(72_623)), policy=searching)
    alone = model.fit(searching)
    assert alone is not None
    assert alone.may_give_more
    assert alone.at_most(10**6) < 16
    both = model.with_outcome(STOCK, 4, measured(6614)).fit(searching)
    assert both is not None
    assert not both.may_give_more
    assert both.at_most(10**6) > 70
    assert not model.with_outcome(STOCK, 4, measured(6614)).predicts_oom(searching, 60)


def test_an_out_of_memory_is_predicted_only_where_it_is_clear() -> None:
    model = model_of(*on_a_line(32, 64))
    assert not model.predicts_oom(STOCK, 1397)
    assert not model.predicts_oom(STOCK, 1450)
    assert model.predicts_oom(STOCK, 2000)
    assert not model.predicts_oom(amp_recipe("bf16"), 10**6)
    for model in (model_of((64, OOM)), model_of(*on_a_line(8, each_mib=1), (64, OOM))):
        assert [model.predicts_oom(STOCK, n) for n in (32, 65, 128)] == [False, False, True]


def test_the_fixed_part_of_weights_explains_no_workspaces_beyond_it() -> None:
    assert FixedPart.of_weights(2**20) == FixedPart(least_mib=4.0, most_mib=24.0)
    assert fit_to(*on_a_line(32, 200, 500, fixed_mib=60_300), fixed=FixedPart()).gives_mib == 0
    assert fit_to(*on_a_line(32, 200, 500, fixed_mib=60_300)).has_workspaces


def test_every_choice_that_keeps_other_tensors_takes_a_memory_of_its_own() -> None:
    o2 = Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True)
    others = Policy(weights="half"), o2, Policy(checkpoint=("layers",)), Policy(cuda_graphs=True)
    assert len({memory_of(policy) for policy in (STOCK, amp_recipe("fp16"), *others)}) == 6
