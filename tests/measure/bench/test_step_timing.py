"""When warm-up and sampling end, and which steps count: driven by a clock whose time passes by steps alone."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from benches import CPU, workload_of
from scripted import (
    HW_THERMAL,
    POWER_BRAKE,
    POWER_CAP,
    SW_THERMAL,
    ScriptedClock,
    ScriptedHost,
    ScriptedMemory,
    ScriptedNvml,
)
from torch import nn

from amptune.measure.bench import bench as bench_module
from amptune.measure.bench.bench import Bench
from amptune.measure.bench.clocks import CpuClock, CudaClock
from amptune.measure.bench.readings import Instruments
from amptune.measure.bench.step_timing import (
    MAX_REPEATS,
    Sample,
    StepTimer,
    Surroundings,
    is_steady,
    mean_half_width,
)
from amptune.measure.bench.stillness import Stillness, StoppedTrees
from amptune.measure.results.outcome import Effort, Measurement, outcome_from_dict, outcome_to_dict
from amptune.policy.settings import STOCK

EFFORT = Effort(warmup_s=5.0, measure_s=0.5, precision=0.02, min_steps=5, max_steps=200, time_limit_s=1000.0)
SEARCH = Effort()


def sampler(
    clock: ScriptedClock,
    nvml: ScriptedNvml | None = None,
    memory: ScriptedMemory | None = None,
    host: ScriptedHost | None = None,
) -> StepTimer:
    host = host or ScriptedHost(clock)
    return StepTimer(clock, Instruments(nvml.gpu() if nvml else None, memory or ScriptedMemory(), host.run_delays))


def sampled(clock: ScriptedClock, effort: Effort = EFFORT, nvml: ScriptedNvml | None = None) -> Sample:
    return sampler(clock, nvml).sample(lambda: None, clock.step_ms(0), effort, clock.now_s())


def noisy(spread: float, ms: float = 10.0) -> Callable[[int], float]:
    return lambda n: ms * (1 + spread * random.Random(n).uniform(-1, 1))


# The interval on the mean.


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_steps_have_no_interval(count: int) -> None:
    assert mean_half_width([10.0] * count) == math.inf


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = random.Random(0)
    covered = 0
    for _ in range(1000):
        values = [rng.gauss(10.0, 1.0) for _ in range(30)]
        mean = sum(values) / 30
        covered += abs(mean - 10.0) <= mean_half_width(values) * mean
    assert 920 <= covered <= 970


def test_one_slow_step_of_many_is_part_of_the_mean_and_widens_its_interval() -> None:
    calm, hit = [10.0, 10.1] * 10, [10.0, 10.1] * 9 + [10.0, 200.0]
    assert mean_half_width(calm) < 0.01
    assert mean_half_width(hit) > 0.5


# Sampling.


def test_sampling_stops_as_soon_as_the_mean_is_precise_enough() -> None:
    clock = ScriptedClock(noisy(0.005))
    sample = sampled(clock)
    assert len(sample.kept.step_ms) == 10  # one stretch of 0.1 s
    assert mean_half_width(sample.kept.step_ms) <= 0.02


def test_noisy_steps_are_sampled_until_the_mean_is_precise_enough() -> None:
    few = sampled(ScriptedClock(noisy(0.1)), replace(EFFORT, measure_s=100.0))
    many = sampled(ScriptedClock(noisy(0.1)), replace(EFFORT, measure_s=100.0, precision=0.01, max_steps=10_000))
    assert 10 < len(few.kept.step_ms) < len(many.kept.step_ms) < 10_000
    assert mean_half_width(few.kept.step_ms) <= 0.02
    assert mean_half_width(many.kept.step_ms) <= 0.01


def test_sampling_ends_with_its_time_however_wide_the_interval() -> None:
    sample = sampled(ScriptedClock(noisy(0.5)), replace(EFFORT, precision=0.0))
    assert 500 <= sum(sample.kept.step_ms) < 650


def test_slow_steps_are_taken_min_steps_times_even_past_the_time() -> None:
    sample = sampled(ScriptedClock(noisy(0.1, ms=900.0)))
    assert len(sample.kept.step_ms) == EFFORT.min_steps


def test_five_steps_alike_are_not_yet_an_interval() -> None:
    sample = sampled(ScriptedClock(lambda _: 100.0), replace(EFFORT, measure_s=10.0))
    assert len(sample.kept.step_ms) == 6


def test_sampling_never_takes_more_than_max_steps() -> None:
    sample = sampled(ScriptedClock(noisy(0.5)), replace(EFFORT, max_steps=13, measure_s=100.0, precision=0.0))
    assert len(sample.kept.step_ms) == 13
    sample = sampled(ScriptedClock(noisy(0.5)), replace(EFFORT, max_steps=3))
    assert len(sample.kept.step_ms) == 3


# Warm-up.


@pytest.mark.parametrize(
    ("medians", "steady"),
    [
        ([10.0, 10.0], False),
        ([10.0, 10.0, 10.0], True),
        ([10.0, 10.29, 10.1], True),
        ([10.0, 10.4, 10.1], False),
        ([10.25, 10.12, 10.0], False),  # within 3 %, and falling by more than half of it
        ([10.14, 10.07, 10.0], True),
        ([10.0, 10.12, 10.25], False),  # rising so: a clock that sinks under the load
        ([10.0, 10.07, 10.14], True),
        ([20.0, 15.0, 10.0, 10.1, 10.0], True),
        ([10.0, 10.0, 10.0, 20.0], False),
    ],
)
def test_three_successive_medians_tell_whether_steps_are_steady(medians: list[float], steady: bool) -> None:
    assert is_steady(medians) is steady


def test_warm_up_ends_when_the_step_time_is_steady() -> None:
    clock = ScriptedClock(lambda n: 10.0 + 30.0 * 0.9**n)
    warm_up = sampler(clock).warm_up(lambda: None, 40.0, EFFORT)
    assert warm_up.steady
    assert warm_up.steps == clock.steps
    assert warm_up.step_ms < 10.4
    assert clock.now_s() < 2.0


def test_warm_up_does_not_stop_on_a_slope_whose_neighbours_agree() -> None:
    """Each stretch is 1.4 % faster than the one before, so that three of them lie within 3 %."""
    clock = ScriptedClock(lambda n: 400.0 * 0.986 ** min(n, 40))
    warm_up = sampler(clock).warm_up(lambda: None, 400.0, replace(EFFORT, warmup_s=100.0))
    assert warm_up.steady
    assert warm_up.steps > 40


def test_a_warm_up_that_runs_out_of_time_says_so() -> None:
    clock = ScriptedClock(lambda n: 100.0 * 0.99**n)
    warm_up = sampler(clock).warm_up(lambda: None, 100.0, replace(EFFORT, warmup_s=1.0))
    assert not warm_up.steady
    assert 1.0 <= clock.now_s() < 1.2


def test_no_time_for_warm_up_is_no_warm_up() -> None:
    clock = ScriptedClock()
    warm_up = sampler(clock).warm_up(lambda: None, 7.0, replace(EFFORT, warmup_s=0.0))
    assert (warm_up.steps, warm_up.step_ms, warm_up.steady) == (0, 7.0, False)


# Disturbed blocks.


def until(steps: int, clock: ScriptedClock, reasons: int) -> Callable[[], int]:
    """`reasons` while the first `steps` steps ran, then none."""
    return lambda: reasons if clock.steps <= steps else 0


def test_a_disturbed_block_is_discarded_and_repeated() -> None:
    clock = ScriptedClock()
    sample = sampled(clock, nvml=ScriptedNvml(reasons=until(10, clock, HW_THERMAL)))
    assert sample.discarded == ("hw-thermal",)
    assert sample.kept.contaminated_by == ()
    assert (len(sample.kept.step_ms), sample.steps, clock.steps) == (10, 20, 20)


def test_a_block_that_paid_for_new_graphs_is_kept_though_it_was_disturbed() -> None:
    """The next one would find them recorded, and training pays for them."""
    clock = ScriptedClock()
    one = sampler(clock, ScriptedNvml(reasons=until(10, clock, HW_THERMAL)))
    sample = one.sample(lambda: None, 10.0, EFFORT, 0.0, Surroundings(prepared=lambda: clock.steps))
    assert (sample.discarded, sample.kept.contaminated_by) == ((), ("hw-thermal",))


def test_a_clean_block_is_not_repeated() -> None:
    sample = sampled(ScriptedClock(), nvml=ScriptedNvml())
    assert (sample.discarded, sample.kept.contaminated_by, sample.steps) == ((), (), 10)


class ScriptedStillness(Stillness):
    """One that has processes to stop, and notes how many steps had run when it stopped them and let them go on."""

    def __init__(self, clock: ScriptedClock, *, quiet: bool = True) -> None:
        super().__init__()
        self._clock, self._quiet = clock, quiet
        self.at: list[int] = []

    @contextmanager
    def pause(self) -> Iterator[StoppedTrees]:
        self.at.append(self._clock.steps)
        yield ScriptedTrees(self._quiet)
        self.at.append(self._clock.steps)


class ScriptedTrees(StoppedTrees):
    has_stopped = True
    is_quiet = True

    def __init__(self, quiet: bool) -> None:
        self.is_quiet = quiet


def test_what_compiles_stands_still_for_each_block_and_the_gpu_finishes_its_work_first() -> None:
    clock = ScriptedClock()
    nvml = ScriptedNvml(reasons=until(20, clock, HW_THERMAL), energy_mj=lambda: 10_000 * clock.steps)
    stillness = ScriptedStillness(clock)
    one = sampler(clock, nvml)
    sample = one.sample(
        lambda: None, 10.0, replace(EFFORT, precision=-1.0), clock.now_s(), Surroundings(stillness=stillness)
    )
    assert stillness.at == [0, 60, 60, 120]  # twice, as the first block is disturbed: a stretch, then the block
    assert (sample.discarded, sample.kept.contaminated_by) == (("hw-thermal",), ())
    assert (len(sample.kept.step_ms), sample.kept.untimed, sample.steps) == (50, 10, 120)
    assert sample.kept.step_j == pytest.approx(10.0)


def test_the_first_step_after_each_wait_finds_an_idle_gpu_and_is_not_timed() -> None:
    clock = ScriptedClock(lambda n: 45.0 + 0.2 * (n % 2), lead=1, idle_ms=7.0)
    nvml = ScriptedNvml(energy_mj=lambda: 10_000 * clock.steps)
    sample = sampler(clock, nvml).sample(lambda: None, 45.0, replace(EFFORT, precision=-1.0), 0.0)
    assert max(sample.kept.step_ms) < 46.0
    assert clock.stretches[0] == 1 + EFFORT.min_steps  # all that a block has at least is timed without a wait
    assert sample.steps == clock.steps == len(sample.kept.step_ms) + len(clock.stretches)
    assert sample.kept.step_j == pytest.approx(10.0)


def test_a_block_during_which_graphs_compiled_says_so_and_is_not_repeated() -> None:
    clock = ScriptedClock()
    sample = sampler(clock).sample(
        lambda: None, 10.0, EFFORT, 0.0, Surroundings(stillness=ScriptedStillness(clock, quiet=False))
    )
    assert (sample.discarded, sample.kept.contaminated_by) == ((), ("compiling",))


def test_the_gpu_is_read_while_it_is_busy_and_not_when_it_waits() -> None:
    clock = ScriptedClock()
    nvml = ScriptedNvml(
        reasons=lambda: POWER_CAP if clock.busy else 0x1,
        sm_clock_mhz=lambda: 1500 if clock.busy else 345,
        temperature_c=lambda: 70 if clock.busy else 60,
    )
    after = sampled(clock, nvml=nvml).kept.after
    assert (after.clock_event_reasons, after.sm_clock_mhz, after.temperature_c) == (POWER_CAP, 1500, 70)


def test_a_reason_seen_in_one_stretch_of_the_block_counts_for_all_of_it() -> None:
    clock = ScriptedClock(noisy(0.5))
    nvml = ScriptedNvml(reasons=lambda: SW_THERMAL if clock.busy and 0 < clock.steps <= 12 else 0)
    sample = sampled(clock, replace(EFFORT, precision=0.0), nvml)
    assert sample.discarded == ("sw-thermal",)


@pytest.mark.parametrize(
    ("readings", "code"), [({"reasons": POWER_CAP}, "power-cap"), ({"sm_clock_mhz": 1200}, "low-clock")]
)
def test_the_state_that_training_lives_in_is_said_and_no_block_repeated_for_it(
    readings: dict[str, int], code: str
) -> None:
    sample = sampled(ScriptedClock(), nvml=ScriptedNvml(**readings))
    assert (sample.discarded, sample.kept.contaminated_by, sample.steps) == ((), (code,), 10)


def test_a_disturbance_beside_that_state_is_repeated() -> None:
    clock = ScriptedClock()
    nvml = ScriptedNvml(reasons=lambda: POWER_CAP | (HW_THERMAL if clock.steps <= 10 else 0))
    sample = sampled(clock, nvml=nvml)
    assert (sample.discarded, sample.kept.contaminated_by) == (("hw-thermal",), ("power-cap",))


def test_what_stays_in_every_repeat_is_kept_and_said() -> None:
    sample = sampled(ScriptedClock(), nvml=ScriptedNvml(reasons=SW_THERMAL))
    assert sample.discarded == ("sw-thermal",) * MAX_REPEATS
    assert sample.kept.contaminated_by == ("sw-thermal",)


def test_what_stayed_is_remembered_and_later_trials_are_not_repeated_for_it() -> None:
    clock, nvml = ScriptedClock(), ScriptedNvml(reasons=SW_THERMAL)
    one = sampler(clock, nvml)
    one.sample(lambda: None, 10.0, EFFORT, clock.now_s())
    again = one.sample(lambda: None, 10.0, EFFORT, clock.now_s())
    assert (again.discarded, again.kept.contaminated_by) == ((), ("sw-thermal",))
    nvml.readings["reasons"] = until(clock.steps + 10, clock, SW_THERMAL | HW_THERMAL)
    other = one.sample(lambda: None, 10.0, EFFORT, clock.now_s())
    assert other.discarded == ("hw-thermal",)  # and not the other one, which is known


def test_a_cause_that_came_and_went_is_not_taken_for_the_steady_state() -> None:
    """Three causes in turn use up the repeats; none of them was in every block."""
    clock = ScriptedClock()
    turns = {1: HW_THERMAL, 2: SW_THERMAL}
    nvml = ScriptedNvml(reasons=lambda: turns.get(clock.steps // 10, POWER_BRAKE))
    one = sampler(clock, nvml)
    first = one.sample(lambda: None, 10.0, EFFORT, clock.now_s())
    assert (first.discarded, first.kept.contaminated_by) == (("hw-thermal", "sw-thermal"), ("power-brake",))
    assert one.sample(lambda: None, 10.0, EFFORT, clock.now_s()).discarded == ("power-brake",) * MAX_REPEATS


def test_a_foreign_process_that_left_is_noticed_when_it_comes_back() -> None:
    clock, stranger = ScriptedClock(), 2**22 + 1
    nvml = ScriptedNvml()
    own = nvml.readings["pids"]
    one = sampler(clock, nvml)
    discarded = []
    for pids in ((*own, stranger), (*own, stranger), own, (*own, stranger)):
        nvml.readings["pids"] = pids
        discarded.append(one.sample(lambda: None, 10.0, EFFORT, clock.now_s()).discarded)
    assert discarded == [("foreign-process",) * 2, (), (), ("foreign-process",) * 2]


def test_a_block_beside_a_busy_program_is_repeated_until_that_program_has_ended() -> None:
    clock = ScriptedClock()
    host = ScriptedHost(clock, lambda: 0.5 if clock.steps <= 10 else 0.01)
    sample = sampler(clock, host=host).sample(lambda: None, 10.0, EFFORT, clock.now_s())
    assert (sample.discarded, sample.kept.contaminated_by) == (("host-load",), ())
    assert sample.kept.host_delay == pytest.approx(0.01)


@pytest.mark.parametrize("delay", [None, 0.0, 0.09])
def test_a_block_is_kept_where_no_thread_waited_long_for_a_cpu_or_nothing_counts_it(delay: float | None) -> None:
    clock = ScriptedClock()
    sample = sampler(clock, host=ScriptedHost(clock, lambda: delay)).sample(lambda: None, 10.0, EFFORT, clock.now_s())
    assert (sample.discarded, sample.kept.contaminated_by) == ((), ())
    assert sample.kept.host_delay == (None if delay is None else pytest.approx(delay))


def test_a_busy_program_that_ended_is_noticed_when_another_begins() -> None:
    clock = ScriptedClock()
    host = ScriptedHost(clock)
    one = sampler(clock, host=host)
    samples = []
    for delay in (0.5, 0.5, 0.0, 0.5):
        host.delay = lambda delay=delay: delay  # type: ignore[misc]  # mypy cannot infer it
        samples.append(one.sample(lambda: None, 10.0, EFFORT, clock.now_s()))
    assert [sample.discarded for sample in samples] == [("host-load",) * 2, (), (), ("host-load",) * 2]
    assert [sample.kept.contaminated_by for sample in samples] == [("host-load",), ("host-load",), (), ("host-load",)]


def test_a_busy_program_that_ended_leaves_other_lasting_disturbances_known() -> None:
    clock = ScriptedClock()
    host = ScriptedHost(clock, lambda: 0.5)
    one = sampler(clock, ScriptedNvml(reasons=SW_THERMAL), host=host)
    first = one.sample(lambda: None, 10.0, EFFORT, clock.now_s())
    host.delay = lambda: 0.0
    second = one.sample(lambda: None, 10.0, EFFORT, clock.now_s())
    assert first.discarded == ("sw-thermal+host-load",) * 2
    assert (second.discarded, second.kept.contaminated_by) == ((), ("sw-thermal",))


def test_a_block_in_which_the_allocator_retried_is_repeated() -> None:
    clock, memory = ScriptedClock(), ScriptedMemory()
    memory.retries = lambda: min(clock.steps, 15)
    sample = sampler(clock, None, memory).sample(lambda: None, 10.0, EFFORT, clock.now_s())
    assert (sample.discarded, sample.kept.contaminated_by) == (("alloc-retries",) * 2, ())


def test_nothing_is_repeated_where_the_time_limit_is_near() -> None:
    clock = ScriptedClock()
    nvml = ScriptedNvml(reasons=SW_THERMAL)
    one = sampler(clock, nvml)
    sample = one.sample(lambda: None, 10.0, replace(EFFORT, time_limit_s=0.5), clock.now_s())
    assert sample.discarded == ("sw-thermal",)  # the second ends at 0.2 s, a third would end after half of the limit
    assert sample.kept.contaminated_by == ("sw-thermal",)
    in_time = one.sample(lambda: None, 10.0, EFFORT, clock.now_s())
    assert in_time.discarded == ("sw-thermal",) * MAX_REPEATS  # it had not been shown to stay


def test_energy_is_that_of_the_kept_block_alone() -> None:
    """A step uses 10 J, in the disturbed block 100 J."""
    clock = ScriptedClock()
    nvml = ScriptedNvml(
        reasons=until(50, clock, HW_THERMAL),
        energy_mj=lambda: 10_000 * clock.steps + 90_000 * min(clock.steps, 50),
    )
    sample = sampled(clock, replace(EFFORT, precision=-1.0), nvml)
    assert sample.discarded == ("hw-thermal",)
    assert sample.kept.step_j == pytest.approx(10.0)


def test_energy_of_a_block_too_short_for_its_counter_is_unknown() -> None:
    clock = ScriptedClock()
    nvml = ScriptedNvml(energy_mj=lambda: 10_000 * clock.steps)
    assert sampled(clock, nvml=nvml).kept.step_j is None
    assert sampled(clock, replace(EFFORT, precision=-1.0), nvml).kept.step_j is not None


def test_on_a_device_that_counts_its_energy_a_block_lasts_as_long_as_the_counter_needs() -> None:
    clock = ScriptedClock()
    nvml = ScriptedNvml(energy_mj=lambda: 10_000 * clock.steps)
    kept = sampled(clock, replace(EFFORT, energy_s=0.3), nvml).kept
    assert kept.step_j == pytest.approx(10.0)
    assert 300 <= sum(kept.step_ms) < 420
    assert sum(sampled(ScriptedClock(), replace(EFFORT, energy_s=0.3)).kept.step_ms) < 300
    glance = replace(EFFORT, energy_s=0.3, measure_s=0.0)
    assert sum(sampled(ScriptedClock(), glance, ScriptedNvml()).kept.step_ms) < 300


# Real clocks.


def test_the_cpus_clock_looks_once_after_the_last_step() -> None:
    seen: list[str] = []
    clock = CpuClock()
    before = clock.now_s()
    times = clock.time_steps(lambda: seen.append("step"), 3, lambda: seen.append("look"))
    assert seen == ["step", "step", "step", "look"]
    assert len(times) == 3
    assert clock.now_s() > before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpus_clock_looks_while_steps_are_still_running() -> None:
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    idle: list[bool] = []
    CudaClock().time_steps(lambda: matrix @ matrix, 50, lambda: idle.append(torch.cuda.current_stream().query()))
    assert idle == [False]


# The whole bench.


def measured(bench: Bench, effort: Effort = EFFORT) -> Measurement:
    outcome = bench.measure(STOCK, effort)
    assert isinstance(outcome, Measurement), outcome
    return outcome


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> ScriptedHost:
    scripted = ScriptedHost(ScriptedClock())
    monkeypatch.setattr(bench_module, "Instruments", partial(Instruments, run_delays=scripted.run_delays))
    return scripted


@pytest.fixture
def clock(host: ScriptedHost, monkeypatch: pytest.MonkeyPatch) -> ScriptedClock:
    """The clock of each bench, whose host counts no delays of its own: a busy machine would have blocks repeated."""
    monkeypatch.setattr(bench_module, "clock_for", lambda _: host.clock)
    return host.clock


def bench_with(nvml: ScriptedNvml | None) -> Bench:
    return Bench(workload_of(nn.Linear(8, 2)), CPU, nvml.gpu() if nvml else None)


def test_a_measurement_carries_what_the_instruments_said(clock: ScriptedClock) -> None:
    nvml = ScriptedNvml(reasons=POWER_CAP, sm_clock_mhz=1500, temperature_c=70, energy_mj=lambda: 8_000 * clock.steps)
    outcome = measured(bench_with(nvml), replace(EFFORT, precision=-1.0))
    assert (outcome.clock_event_reasons, outcome.sm_clock_mhz, outcome.temperature_c) == (POWER_CAP, 1500, 70)
    assert (outcome.discarded, outcome.contaminated_by) == ((), ("power-cap",))
    assert outcome.energy_j_per_sample == pytest.approx(8.0 / 4)
    assert outcome.steady


@pytest.mark.usefixtures("clock")
def test_a_measurement_carries_how_long_a_thread_waited_for_a_cpu(host: ScriptedHost) -> None:
    host.delay = lambda: 0.05
    assert measured(bench_with(None)).host_delay == pytest.approx(0.05)
    host.delay = lambda: 0.5
    outcome = measured(bench_with(None))
    assert (outcome.discarded, outcome.contaminated_by) == (("host-load",) * MAX_REPEATS, ("host-load",))
    assert outcome.host_delay == pytest.approx(0.5)


def test_a_bench_without_instruments_measures_all_the_same(clock: ScriptedClock) -> None:
    outcome = measured(bench_with(None))
    assert (outcome.clock_event_reasons, outcome.sm_clock_mhz, outcome.temperature_c) == (None, None, None)
    assert (outcome.discarded, outcome.contaminated_by, outcome.energy_j_per_sample) == ((), (), None)
    assert outcome.host_delay is None
    assert outcome.step_ms == (10.0,) * 10
    assert clock.steps == outcome.warmup_steps - 1 + 10  # the first step is not timed


def test_the_bench_remembers_from_trial_to_trial_what_lasts(clock: ScriptedClock) -> None:
    assert clock.steps == 0
    bench = bench_with(ScriptedNvml(reasons=SW_THERMAL))
    assert [measured(bench).discarded for _ in range(3)] == [("sw-thermal",) * 2, (), ()]


def test_a_trial_that_never_becomes_steady_says_so(clock: ScriptedClock) -> None:
    clock.step_ms = lambda n: 100.0 * 0.99**n
    outcome = measured(bench_with(None), replace(EFFORT, warmup_s=1.0))
    assert not outcome.steady
    assert 1.0 <= outcome.warmup_s < 1.2


def test_a_hopeless_policy_gets_a_glance_and_no_repeats(clock: ScriptedClock) -> None:
    clock.step_ms = lambda _: 300.0
    outcome = measured(bench_with(ScriptedNvml(reasons=POWER_CAP)), replace(EFFORT, abandon_above_ms=200.0))
    assert (outcome.abandoned, outcome.steady) == (True, False)
    assert (len(outcome.step_ms), outcome.discarded) == (2, ())
    assert outcome.contaminated_by == ("power-cap",)


def test_slow_first_steps_are_few(clock: ScriptedClock) -> None:
    clock.step_ms = lambda _: 1500.0
    assert len(measured(bench_with(None)).losses) == 3


def test_a_search_looks_for_half_a_second_at_most_and_two_percent() -> None:
    assert (SEARCH.precision, SEARCH.measure_s, SEARCH.warmup_s) == (0.02, 0.5, 5.0)


# The journal.


FULL = Measurement(
    samples_per_step=8,
    devices=2,
    step_ms=(10.0, 10.1),
    warmup_s=0.3,
    warmup_steps=8,
    peak_allocated_mib=10.0,
    peak_reserved_mib=20.0,
    losses=(1.0, 0.9),
    gradient_norm=2.0,
    skipped_share=0.1,
    alloc_retries=1,
    energy_j_per_sample=0.5,
    clock_event_reasons=0x44,
    abandoned=True,
    steady=False,
    discarded=("hw-thermal+foreign-process", "hw-thermal"),
    contaminated_by=("power-cap",),
    startup_s=12.5,
    graph_breaks=("a call to print",),
    recompiled=2,
    settled=False,
    in_loop=True,
    wait_share=0.2,
    sm_clock_mhz=1500,
    temperature_c=70,
    host_delay=0.02,
)


def test_a_measurement_survives_the_journal_field_by_field() -> None:
    unchanged = {
        name for name, field in Measurement.__dataclass_fields__.items() if getattr(FULL, name) == field.default
    }
    assert unchanged == set(), "the example has to set every field"
    assert outcome_from_dict(json.loads(json.dumps(outcome_to_dict(FULL)))) == FULL


def test_a_measurement_of_an_older_journal_still_loads() -> None:
    data = outcome_to_dict(FULL)
    for name in ("steady", "discarded", "contaminated_by", "sm_clock_mhz", "temperature_c", "host_delay"):
        del data[name]
    outcome = outcome_from_dict(data)
    assert isinstance(outcome, Measurement)
    assert (outcome.steady, outcome.discarded, outcome.contaminated_by) == (True, (), ())
    assert outcome.host_delay is None
    assert outcome.step_ms == FULL.step_ms


# Graphs that keep coming.


def coming(clock: ScriptedClock, at: Sequence[int]) -> Surroundings:
    """Graphs are compiled before the steps with these numbers."""
    return Surroundings(prepared=lambda: sum(clock.steps > n for n in at))


def test_a_block_goes_on_until_no_graph_came_in_its_second_half() -> None:
    clock = ScriptedClock(lambda n: 500.0 if n == 3 else 10.0)
    one, around = sampler(clock), coming(clock, [3])
    kept = one.sample(lambda: None, 10.0, EFFORT, 0.0, around).kept
    assert kept.settled
    assert kept.step_ms[3] == 500.0  # it is part of the mean
    assert sum(kept.step_ms) >= 2 * sum(kept.step_ms[:4])


def test_a_policy_whose_graphs_keep_coming_is_not_settled_and_not_timed_for_ever() -> None:
    clock = ScriptedClock(lambda _: 10.0)
    around = Surroundings(prepared=lambda: clock.steps)
    warm = sampler(clock).warm_up(lambda: None, 10.0, replace(EFFORT, settle_s=1.0, warmup_s=0.5), around)
    assert 1500 <= 10.0 * warm.steps < 1700
    kept = sampler(clock).sample(lambda: None, 10.0, replace(EFFORT, settle_s=1.0), 0.0, around).kept
    assert not kept.settled
    assert 1500 <= sum(kept.step_ms) < 1700


def test_a_warm_up_with_a_graph_in_it_goes_on_after_it() -> None:
    clock = ScriptedClock(lambda n: 3000.0 if n == 5 else 10.0)
    warm = sampler(clock).warm_up(lambda: None, 10.0, replace(EFFORT, warmup_s=2.0), coming(clock, [5]))
    assert warm.steady
    assert warm.steps > 30


def test_each_block_begins_anew() -> None:
    clock, begun = ScriptedClock(), []
    nvml = ScriptedNvml(reasons=lambda: HW_THERMAL if clock.steps < 5 else 0)
    sampler(clock, nvml).sample(
        lambda: None, 10.0, EFFORT, clock.now_s(), Surroundings(begin=lambda: begun.append(clock.steps))
    )
    assert begun[0] == 0
