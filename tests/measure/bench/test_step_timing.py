"""When warm-up and sampling end, and which steps count: driven by a clock whose time passes by steps alone."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benches import CPU, workload_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import HW_THERMAL, POWER_CAP, ScriptedClock, ScriptedHost, ScriptedMemory, ScriptedNvml
from torch import nn

from amptune.measure.bench import bench as bench_module
from amptune.measure.bench.bench import Bench
from amptune.measure.bench.clocks import CudaClock
from amptune.measure.bench.readings import Instruments
from amptune.measure.bench.step_timing import (
    MAX_REPEATS,
    Sample,
    StepTimer,
    Surroundings,
    WarmUp,
    is_steady,
    mean_half_width,
)
from amptune.measure.bench.stillness import Stillness
from amptune.measure.results.outcome import Effort, Measurement, outcome_from_dict, outcome_to_dict
from amptune.policy.settings import STOCK, Policy

EFFORT = Effort(warmup_s=5.0, measure_s=0.5, precision=0.02, min_steps=5, max_steps=200, time_limit_s=1000.0)
WHOLE = replace(EFFORT, precision=-1.0)  # a block of half a second, however precise its mean
StepMs = Callable[[int], float]
Codes = tuple[str, ...]


def sampler(clock: ScriptedClock, nvml: ScriptedNvml | None = None) -> StepTimer:
    return StepTimer(clock, Instruments(nvml.gpu() if nvml else None, ScriptedMemory(), ScriptedHost(clock).run_delays))


def sampled(clock: ScriptedClock, effort: Effort = EFFORT, nvml: ScriptedNvml | None = None, **around: Any) -> Sample:
    return sampler(clock, nvml).sample(lambda: None, clock.step_ms(0), effort, 0.0, Surroundings(**around))


def warmed_up(clock: ScriptedClock, effort: Effort = EFFORT, **around: Any) -> WarmUp:
    return sampler(clock).warm_up(lambda: None, clock.step_ms(0), effort, Surroundings(**around))


def test_the_interval_covers_the_mean_as_often_as_it_says_and_few_steps_have_none() -> None:
    rng = random.Random(0)
    covered = 0
    for _ in range(1000):
        values = [rng.gauss(10.0, 1.0) for _ in range(30)]
        mean = sum(values) / 30
        covered += abs(mean - 10.0) <= mean_half_width(values) * mean
    assert 920 <= covered <= 970
    assert mean_half_width([10.0] * 5) == math.inf
    assert len(sampled(ScriptedClock(lambda _: 100.0), replace(EFFORT, measure_s=10.0)).kept.step_ms) == 6


@given(
    times=st.lists(st.floats(0.5, 900.0), min_size=1, max_size=50),
    disturbed=st.integers(0, 4),
    lead=st.integers(0, 1),
    limits=st.tuples(st.integers(1, 12), st.integers(1, 60), st.floats(0.0, 3.0), st.floats(0.0, 0.5)),
)
def test_a_figure_is_all_steps_of_the_last_block_and_no_other(
    times: list[float], disturbed: int, lead: int, limits: tuple[int, int, float, float]
) -> None:
    """A slow step is part of it, as training pays for it; a disturbed block before it is not."""
    least, most, seconds, precision = limits
    effort = replace(EFFORT, min_steps=least, max_steps=most, measure_s=seconds, precision=precision)
    clock = ScriptedClock(lambda n: times[n % len(times)], lead=lead, idle_ms=7.0)
    begun: list[tuple[int, int]] = []
    nvml = ScriptedNvml(reasons=lambda: HW_THERMAL if len(begun) <= disturbed else 0)
    sample = sampled(clock, effort, nvml, begin=lambda: begun.append((clock.steps, len(clock.stretches))))
    (at, stretch), kept = begun[-1], sample.kept
    expected: list[float] = []
    for count in clock.stretches[stretch:]:  # the first `lead` steps of each find an idle device
        expected += [clock.step_ms(n) for n in range(at + lead, at + count)]
        at += count
    assert list(kept.step_ms) == expected
    assert at == clock.steps
    repeats = min(disturbed, MAX_REPEATS) if sum(map(clock.step_ms, range(at))) <= 1000 * seconds else len(begun) - 1
    assert sample.discarded == ("hw-thermal",) * repeats == ("hw-thermal",) * (len(begun) - 1)
    assert min(least, most) <= len(expected) <= most
    precise = mean_half_width(expected) <= precision
    assert precise or len(expected) == most or sum(expected) >= 1000 * seconds
    if len(clock.stretches) - stretch > 1 and len(expected) > least:  # it went on, as it was not precise
        before = expected[: -(clock.stretches[-1] - lead)]
        assert len(before) < least or mean_half_width(before) > precision


@pytest.mark.parametrize(("every", "share"), [(20, 1.0), (1, 2.0)])
@pytest.mark.parametrize("lead", [0, 1])
def test_steps_in_which_a_scripts_epoch_ended_are_none_of_the_figure_unless_most_are(
    every: int, share: float, lead: int
) -> None:
    clock = ScriptedClock(lambda n: 20.0 if n % every == every - 1 else 10.0, lead=lead)
    block = sampled(clock, WHOLE, turns=lambda: clock.steps // every).kept
    assert sum(block.step_ms) / len(block.step_ms) / 10.0 == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize(
    ("medians", "steady"),
    [
        ([10.0, 10.0], False),
        ([10.0, 10.29, 10.1], True),
        ([10.0, 10.4, 10.1], False),
        ([10.25, 10.12, 10.0], False),  # within 3 %, and falling by more than half of it
        ([10.14, 10.07, 10.0], True),
        ([10.0, 10.12, 10.25], False),  # rising so: a clock that sinks under the load
        ([10.0, 10.07, 10.14], True),
        ([20.0, 15.0, 10.0, 10.1, 10.0], True),
    ],
)
def test_three_successive_medians_tell_whether_steps_are_steady(medians: list[float], steady: bool) -> None:
    assert is_steady(medians) is steady


@pytest.mark.parametrize(
    ("step_ms", "warmup_s", "steady", "steps"),
    [
        (lambda n: 10.0 + 30.0 * 0.9**n, 5.0, True, (30, 100)),  # it ends soon after the steps are steady
        (lambda n: 400.0 * 0.986 ** min(n, 40), 100.0, True, (41, 60)),  # not on a slope whose neighbours agree
        (lambda n: 100.0 * 0.99**n, 1.0, False, (10, 12)),  # its time is over
        (lambda _: 7.0, 0.0, False, (0, 0)),
    ],
)
def test_warm_up_ends_when_the_step_time_is_steady_or_its_time_is_over(
    step_ms: StepMs, warmup_s: float, steady: bool, steps: tuple[int, int]
) -> None:
    clock = ScriptedClock(step_ms)
    warm_up = warmed_up(clock, replace(EFFORT, warmup_s=warmup_s))
    assert warm_up.steady is steady
    assert steps[0] <= warm_up.steps == clock.steps <= steps[1]
    assert warm_up.step_ms == pytest.approx(step_ms(clock.steps), rel=0.05)


class World:
    """What the instruments see, block by block: each has the codes of what disturbs it, and nothing else happens."""

    def __init__(self, nvml: bool = True) -> None:
        self.clock, self._host_busy, self._retries = ScriptedClock(), False, 0
        self._blocks: list[str] = []
        self._now: list[str] = []
        own = ScriptedNvml().readings["pids"]
        reasons = {"hw-thermal": 0x40, "sw-thermal": 0x20, "power-brake": 0x80, "power-cap": 0x4}
        self._nvml = ScriptedNvml(
            reasons=lambda: sum(reasons.get(code, 0) for code in self._now),
            sm_clock_mhz=lambda: 1200 if "low-clock" in self._now else 1980,
            pids=lambda: (*own, 2**22 + 1) if "foreign-process" in self._now else own,
        )
        memory = ScriptedMemory()
        memory.retries = self._count_retries
        host = ScriptedHost(self.clock, lambda: 0.5 if "host-load" in self._now else 0.01)
        self._timer = StepTimer(self.clock, Instruments(self._nvml.gpu() if nvml else None, memory, host.run_delays))

    def _count_retries(self) -> int:
        self._retries += "alloc-retries" in self._now
        return self._retries

    def _begin(self) -> None:
        self._now = self._blocks.pop(0).split()

    def trial(
        self, *blocks: str, effort: Effort = EFFORT, prepared: int = 0
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the causes of discarded blocks, and those seen in the kept one; all blocks were timed."""
        self._blocks = [*blocks]
        around = Surroundings(begin=self._begin, prepared=lambda: prepared * self.clock.steps)
        sample = self._timer.sample(lambda: None, 10.0, effort, self.clock.now_s(), around)
        assert self._blocks == []
        return sample.discarded, sample.kept.contaminated_by

    def warmed_up(self) -> WarmUp:
        return self._timer.warm_up(lambda: None, 100.0, EFFORT)


@pytest.mark.parametrize(
    "trials",
    [
        [(("",), (), "")],
        [(("hw-thermal", ""), ("hw-thermal",), "")],
        [(("host-load", ""), ("host-load",), "")],
        [(("alloc-retries", "alloc-retries", ""), ("alloc-retries",) * 2, "")],
        [(("power-cap",), (), "power-cap")],  # training lives in that state
        [(("low-clock",), (), "low-clock")],
        [(("power-cap hw-thermal", "power-cap"), ("hw-thermal",), "power-cap")],
        # What stays in every repeat is said, remembered and not repeated for again, unlike other causes.
        [
            (("sw-thermal",) * 3, ("sw-thermal",) * 2, "sw-thermal"),
            (("sw-thermal",), (), "sw-thermal"),
            (("sw-thermal hw-thermal", ""), ("hw-thermal",), ""),
        ],
        # Three causes in turn use up the repeats; none of them was in every block.
        [
            (("hw-thermal", "sw-thermal", "power-brake"), ("hw-thermal", "sw-thermal"), "power-brake"),
            (("power-brake",) * 2, ("power-brake",), "power-brake"),  # now it was
        ],
        # A program that has ended is noticed when it, or another, comes back; one that only rests is always there.
        *(
            [((code,) * 3, (code,) * 2, code), *[(("",), (), "")] * quiet, again]
            for code in ("foreign-process", "host-load")
            for quiet, again in (
                (0, ((code,), (), code)),
                (MAX_REPEATS, ((code,), (), code)),
                (MAX_REPEATS + 1, ((code, ""), (code,), "")),
            )
        ),
        # It leaves other lasting disturbances known.
        [
            (("sw-thermal host-load",) * 3, ("sw-thermal+host-load",) * 2, "sw-thermal host-load"),
            (("sw-thermal",), (), "sw-thermal"),
        ],
    ],
)
def test_blocks_are_repeated_for_what_disturbs_them_and_neither_lasts_nor_is_their_own_load(
    trials: list[tuple[Sequence[str], tuple[str, ...], str]],
) -> None:
    world = World()
    for blocks, discarded, kept in trials:
        assert world.trial(*blocks) == (discarded, tuple(kept.split()))


def test_no_block_is_repeated_that_paid_for_new_graphs_or_takes_long_or_when_the_time_limit_is_near() -> None:
    """The next block would find graphs recorded, and training pays for them."""
    assert World().trial("hw-thermal", prepared=1) == ((), ("hw-thermal",))
    assert World().trial("hw-thermal", effort=replace(EFFORT, beside_compiling=True)) == ((), ("hw-thermal",))
    # The second block ends at 0.2 s; a third would end after half of the limit. The next trial's shows that it stays.
    world, near = World(), replace(EFFORT, time_limit_s=0.5)
    assert world.trial("sw-thermal", "sw-thermal", effort=near) == (("sw-thermal",), ("sw-thermal",))
    assert world.trial("sw-thermal")[0] == ()
    slow = World()
    slow.clock.step_ms = lambda _: 301.0  # five steps take longer than all blocks of a trial are meant to
    assert slow.trial("hw-thermal") == ((), ("hw-thermal",))
    without_nvml = World(nvml=False)
    assert without_nvml.trial("hw-thermal foreign-process host-load", "")[0] == ("host-load",)


class ScriptedStillness(Stillness):
    """One that has processes to stop, and notes how many steps had run when it stopped them and let them go on."""

    def __init__(self, clock: ScriptedClock, *, quiet: bool = True) -> None:
        super().__init__()
        self._clock, self._quiet = clock, quiet
        self.at: list[int] = []

    @contextmanager
    def pause(self) -> Iterator[Any]:
        self.at.append(self._clock.steps)
        yield SimpleNamespace(has_stopped=True, is_quiet=self._quiet)
        self.at.append(self._clock.steps)


def test_what_compiles_stands_still_for_each_block_and_the_gpu_finishes_its_work_first() -> None:
    clock = ScriptedClock()
    nvml = ScriptedNvml(reasons=lambda: HW_THERMAL if clock.steps <= 20 else 0, energy_mj=lambda: 10_000 * clock.steps)
    stillness = ScriptedStillness(clock)
    sample = sampled(clock, WHOLE, nvml, stillness=stillness)
    assert stillness.at == [0, 60, 60, 120]  # twice, as the first block is disturbed: a stretch, then the block
    assert (sample.discarded, sample.kept.contaminated_by) == (("hw-thermal",), ())
    assert len(sample.kept.step_ms) == 50
    assert sample.kept.step_j == pytest.approx(10.0)


def test_a_block_during_which_graphs_compiled_says_so_and_is_not_repeated() -> None:
    clock = ScriptedClock()
    sample = sampled(clock, stillness=ScriptedStillness(clock, quiet=False))
    assert (sample.discarded, sample.kept.contaminated_by) == ((), ("compiling",))


def test_the_gpu_is_read_while_it_is_busy_and_one_stretch_counts_for_the_block() -> None:
    clock = ScriptedClock(lambda n: 15.0 - 10.0 * (n % 2))
    nvml = ScriptedNvml(
        reasons=lambda: 0x1 if not clock.busy else POWER_CAP if 0 < clock.steps <= 12 else 0,
        sm_clock_mhz=lambda: 1500 if clock.busy else 345,
    )
    after = sampled(clock, replace(EFFORT, precision=0.0), nvml).kept.after
    assert (after.clock_event_reasons, after.sm_clock_mhz) == (POWER_CAP, 1500)


def test_a_block_lasts_as_long_as_the_counter_of_energy_needs_where_there_is_one() -> None:
    def kept(*, counts: bool = True, **changes: float) -> tuple[float, bool]:
        clock = ScriptedClock()
        nvml = ScriptedNvml(energy_mj=lambda: 10_000 * clock.steps) if counts else None
        block = sampled(clock, replace(EFFORT, **changes), nvml).kept  # type: ignore[arg-type]  # fields by name
        return round(sum(block.step_ms)), block.step_j is not None

    assert kept() == (100, False)  # too short for its counter
    assert kept(energy_s=0.3) == (300, True)
    assert kept(energy_s=0.3, counts=False) == kept(energy_s=0.3, measure_s=0.0) == (100, False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpus_clock_looks_while_steps_are_still_running() -> None:
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    idle: list[bool] = []
    CudaClock().time_steps(lambda: matrix @ matrix, 50, lambda: idle.append(torch.cuda.current_stream().query()))
    assert idle == [False]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> ScriptedHost:
    """The host and clock of each bench."""
    scripted = ScriptedHost(ScriptedClock())
    monkeypatch.setattr(bench_module, "Instruments", partial(Instruments, run_delays=scripted.run_delays))
    monkeypatch.setattr(bench_module, "clock_for", lambda _: scripted.clock)
    return scripted


def measured(effort: Effort = EFFORT, nvml: ScriptedNvml | None = None) -> Measurement:
    bench = Bench(workload_of(nn.Linear(8, 2)), CPU, nvml.gpu() if nvml else None)
    outcome = bench.measure(STOCK, effort)
    assert isinstance(outcome, Measurement), outcome
    return outcome


def test_a_measurement_carries_what_the_instruments_said_and_does_without_them(host: ScriptedHost) -> None:
    outcome = measured()
    assert (outcome.discarded, outcome.contaminated_by, outcome.energy_j_per_sample) == ((), (), None)
    assert (outcome.host_delay, outcome.step_ms, outcome.steady) == (None, (10.0,) * 10, True)
    assert host.clock.steps == outcome.warmup_steps - 1 + 10  # the first step is not timed
    host.delay = lambda: 0.05
    energy_mj = lambda: 8_000 * host.clock.steps  # noqa: E731
    outcome = measured(WHOLE, ScriptedNvml(reasons=POWER_CAP, sm_clock_mhz=1500, energy_mj=energy_mj))
    assert (outcome.discarded, outcome.contaminated_by) == ((), ("power-cap",))
    assert outcome.energy_j_per_sample == pytest.approx(8.0 / 4)
    assert outcome.host_delay == pytest.approx(0.05)


def test_a_trial_says_whether_it_became_steady_or_is_slow(host: ScriptedHost) -> None:
    host.clock.step_ms = lambda n: 100.0 * 0.99**n
    outcome = measured(replace(EFFORT, warmup_s=1.0))
    assert not outcome.steady
    assert 1.0 <= outcome.warmup_s < 1.2
    host.clock.step_ms = lambda _: 1500.0
    assert len(measured().losses) == 3


class Slow(nn.Linear):
    """Its first forward pass that trains takes so long on a scripted clock."""

    def __init__(self, host: ScriptedHost, seconds: float) -> None:
        super().__init__(8, 2)
        self.host, self.seconds = host, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.host.clock.wait(self.seconds)
        self.seconds = 0.0
        return super().forward(x)


LIMITED = replace(EFFORT, abandon_above_ms=200.0)


@pytest.mark.parametrize(
    ("first_s", "step_ms", "policy", "steps", "losses"),
    [
        (6.0, lambda _: 300.0, STOCK, 1, 1),  # no kernel loads for so long
        (4.0, lambda _: 6000.0, STOCK, 2, 2),
        (4.0, lambda n: (1300.0, 500.0)[n % 2], STOCK, 3, 3),
        (6.0, lambda _: 500.0, Policy(cudnn_benchmark=True), 6, 6),  # the first ones search
        (0.0, lambda _: 300.0, STOCK, 7, 5),  # just above: two more without what disturbs
    ],
)
def test_a_lost_trial_ends_after_as_few_steps_as_show_it(
    host: ScriptedHost, first_s: float, step_ms: StepMs, policy: Policy, steps: int, losses: int
) -> None:
    host.clock.step_ms = step_ms
    bench = Bench(workload_of(lambda: Slow(host, first_s)), CPU)
    lost = bench.measure(policy, LIMITED)
    assert isinstance(lost, Measurement), lost
    assert (lost.abandoned, lost.steady, lost.discarded) == (True, False, ())
    assert (1 + host.clock.steps, len(lost.losses)) == (steps, losses)
    assert min(lost.step_ms) > 200.0
    assert lost.gradient_norm is not None
    host.clock.steps = 0
    unlimited = bench.measure(policy, EFFORT)
    assert isinstance(unlimited, Measurement)
    assert not unlimited.abandoned


@pytest.mark.parametrize(
    "step_ms",
    [
        lambda n: 900.0 if n == 0 else 10.0,  # the second step collects garbage
        lambda n: 900.0 if n % 2 else 190.0,  # batches differ
        lambda n: 300.0 if n < 4 else 10.0,  # what disturbed it has ended when it is looked at again
    ],
)
def test_no_trial_ends_for_steps_that_are_slow_once(host: ScriptedHost, step_ms: StepMs) -> None:
    host.clock.step_ms = step_ms
    assert not measured(LIMITED).abandoned


def test_a_program_that_just_began_ends_no_trial_unless_steps_are_far_behind(host: ScriptedHost) -> None:
    host.clock.step_ms, host.delay = lambda _: 300.0, lambda: 0.5
    assert not measured(LIMITED).abandoned
    host.clock.step_ms = lambda _: 700.0
    assert measured(LIMITED).abandoned


@pytest.mark.parametrize(("quiet", "lost"), [(True, True), (False, False)])
def test_steps_just_behind_are_looked_at_again_in_stillness_and_on_their_own_batches(quiet: bool, lost: bool) -> None:
    clock, begun = ScriptedClock(lambda _: 300.0), list[int]()
    stillness = ScriptedStillness(clock, quiet=quiet)
    around = Surroundings(begin=lambda: begun.append(clock.steps), stillness=stillness)
    found = sampler(clock).bound(lambda: None, [300.0] * 2, LIMITED, around)
    assert (found is not None, begun, len(stillness.at)) == (lost, [], 2)


def test_warm_up_ends_at_steps_that_are_all_behind_unless_graphs_come_in_them() -> None:
    clock = ScriptedClock(lambda n: 10.0 if n < 12 else 300.0 + 100.0 * (n % 2))
    warm = warmed_up(clock, LIMITED)
    assert (warm.behind_ms, warm.steps) == ((300.0, 400.0), 22)
    clock = ScriptedClock(lambda n: 300.0 + 100.0 * (n % 2))
    assert warmed_up(clock, LIMITED, prepared=lambda: clock.steps).behind_ms == ()


def test_a_policy_that_falls_behind_in_its_warm_up_is_timed_no_further(host: ScriptedHost) -> None:
    host.clock.step_ms = lambda n: 10.0 if n < 12 else 700.0
    outcome = measured(LIMITED)
    assert (outcome.abandoned, len(outcome.losses)) == (True, 8)
    assert set(outcome.step_ms) == {700.0}
    assert host.clock.steps < 40


def test_warm_up_beside_programs_that_are_always_there_ends_when_it_can_tell_no_more() -> None:
    world = World()
    noisy = random.Random(0)
    world.clock.step_ms = lambda _: noisy.uniform(90.0, 115.0)
    quiet = world.warmed_up()
    for _ in range(MAX_REPEATS + 1):
        world.trial(*["host-load"] * (1 if _ else MAX_REPEATS + 1))
    beside = world.warmed_up()
    assert beside.steps < quiet.steps == pytest.approx(50, abs=3)
    assert not beside.steady


FIGURE, SHARE = st.floats(1e-3, 1e9), st.floats(0.0, 1.0)


@given(
    st.builds(
        Measurement,
        samples_per_step=st.integers(1, 10**6),
        step_ms=st.lists(FIGURE, min_size=1, max_size=9).map(tuple),
        devices=st.integers(1, 64),
        **dict.fromkeys(("warmup_s", "startup_s", "peak_allocated_mib", "peak_reserved_mib"), FIGURE),
        **dict.fromkeys(("skipped_share", "wait_share"), SHARE),
        host_delay=st.none() | SHARE,
        energy_j_per_sample=st.none() | FIGURE,
    )
)
@settings(max_examples=20)
def test_a_measurement_survives_the_journal_and_older_ones_have_the_usual_values(one: Measurement) -> None:
    written = json.loads(json.dumps(outcome_to_dict(one)))
    assert repr(outcome_from_dict(written)) == repr(one)  # NaN is not equal to itself
    later = {"steady": True, "discarded": (), "contaminated_by": ()}
    for name in (*later, "host_delay"):
        del written[name]
    older = replace(one, **later, host_delay=None)  # type: ignore[arg-type]  # fields by name
    assert repr(outcome_from_dict(written)) == repr(older)


def test_a_block_and_a_warm_up_go_on_until_no_graph_came_in_their_second_half() -> None:
    clock = ScriptedClock(lambda n: 500.0 if n == 3 else 10.0)
    kept = sampled(clock, prepared=lambda: clock.steps > 3).kept
    assert kept.settled
    assert kept.step_ms[3] == 500.0  # it is part of the mean
    assert sum(kept.step_ms) >= 2 * sum(kept.step_ms[:4])
    clock = ScriptedClock(lambda n: 3000.0 if n == 5 else 10.0)
    warm = warmed_up(clock, replace(EFFORT, warmup_s=2.0), prepared=lambda: clock.steps > 5)
    assert warm.steady
    assert warm.steps > 30


def test_a_policy_whose_graphs_keep_coming_is_not_settled_and_not_timed_for_ever() -> None:
    clock = ScriptedClock()
    few = replace(EFFORT, settle_s=1.0, warmup_s=0.5)
    warm = warmed_up(clock, few, prepared=lambda: clock.steps)
    assert 1500 <= 10.0 * warm.steps < 1700
    kept = sampled(clock, few, prepared=lambda: clock.steps).kept
    assert not kept.settled
    assert 1500 <= sum(kept.step_ms) < 1700
