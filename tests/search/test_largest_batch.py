"""The largest batch on simulated devices, whose truth is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from measurements import took

from amptune.measure.results.outcome import Failure, FailureKind, Measurement, Outcome
from amptune.policy.settings import STOCK, Policy
from amptune.search.batch_size.largest_size import MOST_TIMES_OWN
from amptune.search.batch_size.memory_model import MemoryModel
from amptune.search.batch_size.memory_runs import FixedPart
from amptune.search.batch_size.probing import LargestBatch, Sizer
from amptune.search.table.trial import Trial

LIMIT_MIB = 140_000.0


def measurement(allocated_mib: float, reserved_mib: float, *, retries: int = 0, step_ms: float = 10.0) -> Measurement:
    more = {"samples_per_step": 1, "warmup_steps": 5, "peak_reserved_mib": reserved_mib, "alloc_retries": retries}
    return took(step_ms, allocated_mib, **more)


OOM = Failure(kind="oom", message="CUDA out of memory")


@dataclass
class Device:
    """A GPU with one workload on it.

    `takes(n)` is what `n` samples take beside the weights; `gives(n)` how much of that they can do without;
    `fragments(share)` what is lost to fragmentation where that share of the memory is in use; `caches` what the
    allocator keeps beyond all that, as a share of it, and flushes under pressure.
    """

    fixed_mib: float
    takes: Callable[[int], float]
    own: int
    weights_mib: float = 100.0
    gives: Callable[[int], float] = lambda _: 0.0
    fragments: Callable[[float], float] = lambda _: 0.0
    caches: float = 0.0
    limit_mib: float = LIMIT_MIB
    swells: bool = False
    siblings: tuple[int, ...] = ()
    ran: set[int] = field(default_factory=set)

    def fits(self, n: int) -> bool:
        return self._lost(self.fixed_mib + self.takes(n) - self.gives(n)) <= self.limit_mib

    def bare(self, n: int) -> float:
        return self.fixed_mib + self.takes(n) - self.gives(n)

    def _lost(self, mib: float) -> float:
        return mib * (1 + self.fragments(min(1.0, mib / self.limit_mib)))

    def __call__(self, n: int) -> Outcome:
        if not self.fits(n):
            return OOM
        self.ran.add(n)
        wanted = self.fixed_mib + self.takes(n)
        reserved = 2 * math.ceil((1 + self.caches) * self._lost(wanted) * 1.002 / 2) + 20
        if reserved <= self.limit_mib:
            return measurement(wanted, reserved)
        allocated = min(wanted, self.limit_mib / (1 + self.fragments(1.0)))
        return measurement(allocated, self.limit_mib, retries=3)

    @property
    def largest(self) -> int:
        """The largest size up to which all fit."""
        low, high = 0, 1
        while self.fits(high) and high < 10**8:
            low, high = high, 2 * high
        first = next((n for n in self._grid(high) if not self.fits(n)), high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return min(low, first - 1)

    @staticmethod
    def _grid(high: int) -> list[int]:
        step = 1.003
        return sorted({int(step**k) for k in range(int(math.log(max(high, 2)) / math.log(step)))} - {0})

    @property
    def fixed_part(self) -> FixedPart:
        return FixedPart.of_weights(int(self.weights_mib * 2**20 / 4))


def linear(rng: random.Random, share: tuple[float, float] = (0.02, 0.3)) -> Device:
    """A device on which the own batch takes a share of the memory between these, weights and all that aside."""
    weights = LIMIT_MIB * 10 ** rng.uniform(-4, -1.7)
    fixed = weights * rng.uniform(2, 5)
    own = rng.choice([8, 16, 32, 64, 128, 256])
    each = LIMIT_MIB * math.exp(rng.uniform(*map(math.log, share))) / own
    return Device(fixed_mib=fixed, takes=lambda n: each * n, own=own, weights_mib=weights)


def jumping(device: Device, rng: random.Random) -> None:
    """Another convolution algorithm at certain sizes: up to 10 % more or less."""
    takes = device.takes
    sizes = [device.own * 2 ** rng.uniform(-2, 8) for _ in range(rng.randint(1, 5))]
    jumps = [rng.uniform(-0.1, 0.1) for _ in range(len(sizes) + 1)]
    device.takes = lambda n: takes(n) * (1 + jumps[sum(n >= size for size in sizes)])


def fragmenting(device: Device, rng: random.Random) -> None:
    """Up to 8 % lost near the limit, and reserved above allocated, which is flushed under pressure."""
    most, power = rng.uniform(0, 0.08), rng.choice([1, 2, 4, 8])
    device.fragments, device.caches = lambda share: most * share**power, rng.uniform(0, 0.15)


def elastic(device: Device, rng: random.Random) -> None:
    """cudnn.benchmark tries workspaces as large as there is room for, and takes smaller ones where there is none."""
    takes, workspace = device.takes, LIMIT_MIB * rng.uniform(0.05, 0.5)
    least = workspace * rng.uniform(0, 0.05)
    device.takes = lambda n: takes(n) + workspace
    device.gives = lambda _: workspace - least


def swelling(device: Device, rng: random.Random) -> None:
    """Convolution workspaces that grow with the batch, and give way."""
    takes, swollen = device.takes, rng.uniform(1.3, 5)
    device.takes = lambda n: swollen * takes(n)
    device.gives = lambda n: (swollen - 1.02) * takes(n)
    device.swells, device.siblings = True, (device.own,)


TROUBLES = (jumping, fragmenting, elastic, swelling)


def find_largest(
    run: Callable[[int], Outcome],
    own: int,
    limit_mib: float,
    model: MemoryModel | None = None,
    policy: Policy = STOCK,
    **of_sizer: Any,
) -> LargestBatch:
    """Searches for one policy; `run` measures it at a size."""
    known = replace(model or MemoryModel(limit_mib=limit_mib), limit_mib=limit_mib)
    return Sizer(lambda sized: run(sized.batch_size or own), known, own, **of_sizer).largest(policy)


def found_on(device: Device, *, known: bool = False) -> LargestBatch:
    """With the own batch's peak known from a trial, or not."""
    model = MemoryModel(limit_mib=device.limit_mib, fixed=device.fixed_part)
    policy = STOCK
    if device.swells:
        policy = Policy(cudnn_benchmark=True)
        model = model.with_outcomes((STOCK, n, measurement(device.bare(n), device.bare(n))) for n in device.siblings)
    if known:
        model = model.with_outcome(policy, device.own, device(device.own))
    return find_largest(device, device.own, device.limit_mib, model=model, policy=policy)


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    share=st.sampled_from([(0.0003, 0.002), (0.02, 0.3), (0.75, 0.9), (1.0, 12.0)]),
    trouble=st.sampled_from([None, *TROUBLES]),
    known=st.booleans(),
)
def test_few_runs_find_what_fits_with_two_out_of_memory_at_most(
    seed: int, share: tuple[float, float], trouble: Callable[[Device, random.Random], None] | None, known: bool
) -> None:
    rng = random.Random(seed)
    device = linear(rng, share)
    if trouble is not None:
        trouble(device, rng)
    known = known and device.fits(device.own)
    found = found_on(device, known=known)
    sizes = [probe.batch_size for probe in found.probes]
    assert len(set(sizes)) == len(sizes) <= 6
    assert found.ooms <= 2
    assert found.batch_size is None or found.batch_size in device.ran
    assert found.batch_size is not None or device.largest < 2 or found.ooms
    largest = min(device.largest, MOST_TIMES_OWN * device.own)
    if trouble is None and largest >= 64:
        assert (found.batch_size or 0) >= 0.97 * largest


# Courses on an H200 in bf16, limited by the allocator: what was allocated is on a line within 1 %. How much of what
# was reserved beyond is lost, near the limit, follows from the largest batch that ran.
REAL = {
    "bert_base": (50, Device(
        own=16, limit_mib=20 * 1024.0, fixed_mib=1527, takes=lambda n: 327.5 * n, weights_mib=419.6,
        fragments=lambda share: 0.15 * share, caches=0.075,
    )),
    "resnet50": (158, Device(
        own=128, limit_mib=7 * 1024.0, fixed_mib=395, takes=lambda n: 43.4 * n, weights_mib=97.7,
        gives=lambda _: 105, caches=0.2,
    )),
    "deeplabv3plus": (27, Device(
        own=4, limit_mib=24 * 1024.0, fixed_mib=620, takes=lambda n: 824 * n, weights_mib=101.9,
        fragments=lambda share: 0.043 * share, caches=0.023,
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_on_real_courses_the_answer_is_within_3_percent(name: str) -> None:
    largest, device = REAL[name]
    assert device.largest == largest
    found = found_on(replace(device, ran=set()))
    assert found.batch_size is not None
    assert found.batch_size >= 0.97 * largest
    assert len(found.probes) <= 6
    assert found.ooms <= 1


@pytest.mark.parametrize("share", [0.2, 0.3, 0.4, 0.7])
def test_where_a_handful_of_samples_fill_the_memory_the_largest_is_found_exactly(share: float) -> None:
    device = Device(fixed_mib=2000, takes=lambda n: share * LIMIT_MIB * n, own=1)
    assert found_on(device).batch_size == device.largest == int(0.98 / share)


def test_of_allowed_sizes_the_largest_that_fits_is_found() -> None:
    """The micro-batches of a global batch: its divisors."""
    rng = random.Random(1)
    for _ in range(50):
        device = linear(rng)
        samples = device.own * rng.choice([24, 60, 210, 256])
        divisors = [n for n in range(1, samples + 1) if samples % n == 0]
        found = find_largest(device, device.own, LIMIT_MIB, allowed=divisors)
        assert found.batch_size == max(n for n in divisors if device.fits(n))
        assert found.ooms <= 1
        assert {probe.batch_size for probe in found.probes} <= set(divisors)


def test_a_known_size_that_is_not_allowed_is_no_answer() -> None:
    device = Device(fixed_mib=0, takes=lambda n: LIMIT_MIB / 110 * n, own=100, weights_mib=0)
    model = MemoryModel(limit_mib=LIMIT_MIB).with_outcome(STOCK, 100, device(100))
    assert find_largest(device, 100, LIMIT_MIB, model=model, allowed=[64, 96, 128]).batch_size == 96


def test_the_search_ends_at_4096_times_the_own_batch() -> None:
    found = find_largest(lambda n: measurement(10.0 + 1e-4 * n, 20.0 + 1e-4 * n), 2, LIMIT_MIB)
    assert found.batch_size == 8192
    assert found.because == "it is 4096 times the own batch"


@pytest.mark.parametrize("kind", ["error", "timeout", "nonfinite", "crash", "unsupported"])
def test_sizes_that_fail_for_another_reason_are_gone_below_and_the_answer_is_what_was_confirmed(
    kind: FailureKind,
) -> None:
    device = Device(fixed_mib=1000, takes=lambda n: 100.0 * n, own=32)
    failure = Failure(kind=kind, message="the model takes no more than 100 samples")
    found = find_largest(lambda n: device(n) if n <= 100 else failure, 32, LIMIT_MIB)
    tried = [probe.batch_size for probe in found.probes]
    assert tried[:2] == [32, 528]
    if kind == "timeout":  # each may take as long again
        assert (tried, found.batch_size) == ([32, 528], 32)
        assert found.because == f"a batch of 528 fails: {failure}"
    else:
        assert found.batch_size is not None
        assert 60 <= found.batch_size <= 100
        assert found.because == f"a batch of {min(n for n in tried if n > 100)} fails: {failure}"


def test_where_nothing_fits_there_is_no_answer() -> None:
    found = find_largest(lambda _: OOM, 128, LIMIT_MIB)
    assert found.batch_size is None
    assert [probe.batch_size for probe in found.probes] == [128, 2]
    assert str(found) == (
        "no batch size is known to fit into 140000 MiB: a batch of 2 does not fit, and none below was tried "
        "(2 runs, 2 out of memory)"
    )
    assert find_largest(lambda _: OOM, 1, LIMIT_MIB).because == "even a batch of 1 does not fit"


def test_a_run_that_took_more_than_the_limit_is_no_answer_where_nothing_enforces_it() -> None:
    """On a CPU, or with --max-memory: there is a peak then, and no out-of-memory."""
    unlimited = Device(fixed_mib=500, takes=lambda n: 10.0 * n, own=512, limit_mib=10**9)
    found = find_largest(unlimited, 512, 4000.0, model=MemoryModel(limit_mib=4000.0))
    assert found.batch_size is not None
    assert 340 <= found.batch_size <= 350
    assert found.ooms == 0
    assert found.peak_mib <= 4000


def test_no_probe_is_begun_that_there_is_no_time_for() -> None:
    now = [0.0]

    def run(n: int) -> Outcome:
        now[0] += 2.0 + 0.1 * n
        return measurement(500 + 100.0 * n, 520 + 100.0 * n, step_ms=10.0 * n)

    found = find_largest(run, 16, LIMIT_MIB, left_s=lambda: 20.0 - now[0], clock=lambda: now[0])
    assert now[0] <= 20
    assert found.batch_size == 16
    assert found.because == "there is no time to try 528"
    assert found.probes[0].seconds == pytest.approx(3.6)


def test_a_sizer_learns_from_trials_and_from_its_own_runs() -> None:
    device = Device(fixed_mib=1000, takes=lambda n: 100.0 * n, own=32)
    fitting = MemoryModel(limit_mib=LIMIT_MIB, fixed=device.fixed_part)
    sizer = Sizer(run=lambda policy: device(policy.batch_size or 0), model=fitting, own_batch_size=32)
    sizer.learn([Trial(number=0, policy=STOCK, outcome=device(32), seconds=1.0)])
    first = sizer.largest(STOCK)
    assert first.probes
    assert 32 not in [probe.batch_size for probe in first.probes]
    assert sizer.largest(STOCK).probes == ()
    assert sizer.largest(STOCK).batch_size == first.batch_size
    assert sizer.predicts_oom(Policy(batch_size=3000))
    assert not sizer.predicts_oom(Policy(batch_size=first.batch_size))
