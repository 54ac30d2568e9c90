"""The largest batch on simulated devices, whose truth is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
OOM = Failure(kind="oom", message="CUDA out of memory")


def measurement(allocated_mib: float, reserved_mib: float, **more: Any) -> Measurement:
    return took(10.0, allocated_mib, samples_per_step=1, warmup_steps=5, peak_reserved_mib=reserved_mib, **more)


@dataclass
class Device:
    """A GPU with one workload on it, a line of memory in the batch.

    `gives_mib` of workspaces can be done without; `fragments` is the share lost near the limit; `caches` what the
    allocator keeps beyond all that, as a share of it, and flushes under pressure.
    """

    own: int
    each_mib: float
    fixed_mib: float = 0.0
    weights_mib: float = 100.0
    gives_mib: float = 0.0
    fragments: float = 0.0
    caches: float = 0.0
    limit_mib: float = LIMIT_MIB
    ran: set[int] = field(default_factory=set)

    def takes(self, n: int) -> float:
        return self.fixed_mib + self.each_mib * n

    def lost(self, mib: float) -> float:
        return mib * (1 + self.fragments * min(1.0, mib / self.limit_mib))

    def fits(self, n: int) -> bool:
        return self.lost(self.takes(n)) <= self.limit_mib

    def __call__(self, n: int) -> Outcome:
        if not self.fits(n):
            return OOM
        self.ran.add(n)
        wanted = self.takes(n) + self.gives_mib
        reserved = 2 * math.ceil((1 + self.caches) * self.lost(wanted) * 1.002 / 2) + 20
        if reserved <= self.limit_mib:
            return measurement(wanted, reserved)
        return measurement(min(wanted, self.limit_mib / (1 + self.fragments)), self.limit_mib, alloc_retries=3)

    @property
    def largest(self) -> int:
        low, high = 0, 10**8
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low

    @property
    def model(self) -> MemoryModel:
        return MemoryModel(limit_mib=self.limit_mib, fixed=FixedPart.of_weights(int(self.weights_mib * 2**20 / 4)))


@st.composite
def devices(draw: st.DrawFn, shares: Sequence[tuple[float, float]] = ((0.02, 0.3),)) -> Device:
    """On some of them the own batch alone takes more than there is."""
    weights = LIMIT_MIB * 10 ** draw(st.floats(-4, -1.7))
    own = draw(st.sampled_from([8, 16, 32, 64, 128, 256]))
    share = draw(st.sampled_from(shares).flatmap(lambda ends: st.floats(*ends)))
    return Device(
        own=own,
        each_mib=LIMIT_MIB * share / own,
        fixed_mib=weights * draw(st.floats(2, 5)),
        weights_mib=weights,
    )


def find_largest(
    run: Callable[[int], Outcome], own: int, model: MemoryModel | None = None, policy: Policy = STOCK, **more: Any
) -> LargestBatch:
    """Searches for one policy; `run` measures it at a size."""
    known = model or MemoryModel(limit_mib=LIMIT_MIB)
    return Sizer(lambda sized: run(sized.batch_size or own), known, own, **more).largest(policy)


@settings(deadline=None)
@given(
    device=devices([(0.0003, 0.002), (0.02, 0.3), (0.75, 0.9), (1.0, 12.0)]),
    trouble=st.sampled_from([{}, {"fragments": 0.08, "caches": 0.15}, {"gives_mib": 0.4 * LIMIT_MIB}]),
    known=st.booleans(),
    times=st.sampled_from([None, 24, 210]),
)
def test_few_runs_find_what_fits_with_two_out_of_memory_at_most(
    device: Device, trouble: dict[str, Any], known: bool, times: int | None
) -> None:
    """Of all sizes, or of the divisors of a global batch."""
    device = replace(device, ran=set(), **trouble)
    model = device.model
    if known and device.fits(device.own):
        model = model.with_outcome(STOCK, device.own, device(device.own))
    divisors = [n for n in range(1, times * device.own + 1) if times * device.own % n == 0] if times else None
    found = find_largest(device, device.own, model, allowed=divisors)
    sizes = [probe.batch_size for probe in found.probes]
    assert len(set(sizes)) == len(sizes) <= 6
    assert found.ooms <= 2
    assert found.batch_size is None or found.batch_size in device.ran
    assert found.batch_size is not None or device.largest < 2 or found.ooms
    largest = min(device.largest, MOST_TIMES_OWN * device.own)
    if divisors is not None:
        assert found.batch_size is None or found.batch_size in divisors
    elif not trouble and largest >= 64:
        assert (found.batch_size or 0) >= 0.97 * largest


@pytest.mark.parametrize("kind", ["error", "timeout"])
def test_sizes_that_fail_for_another_reason_are_gone_below_and_the_answer_is_what_was_confirmed(
    kind: FailureKind,
) -> None:
    device = Device(own=32, fixed_mib=1000, each_mib=100.0)
    failure = Failure(kind=kind, message="the model takes no more than 100 samples")
    found = find_largest(lambda n: device(n) if n <= 100 else failure, 32)
    tried = [probe.batch_size for probe in found.probes]
    assert tried[:2] == [32, 528]
    assert found.batch_size is not None
    assert found.because == f"a batch of {min(n for n in tried if n > 100)} fails: {failure}"
    if kind == "timeout":  # each may take as long again
        assert (tried, found.batch_size) == ([32, 528], 32)
    else:
        assert 60 <= found.batch_size <= 100


@pytest.mark.parametrize(
    ("own", "because"), [(128, "a batch of 2 does not fit, and none below was tried"), (1, "even a batch of 1 does")]
)
def test_where_nothing_fits_there_is_no_answer(own: int, because: str) -> None:
    found = find_largest(lambda _: OOM, own)
    assert found.batch_size is None
    assert found.because.startswith(because)
    assert str(found).startswith("no batch size is known to fit into 140000 MiB: ")


def test_a_run_that_took_more_than_the_limit_is_no_answer_where_nothing_enforces_it() -> None:
    """On a CPU, or with --max-memory: there is a peak then, and no out-of-memory."""
    unlimited = Device(own=512, fixed_mib=500, each_mib=10.0, limit_mib=10**9)
    found = find_largest(unlimited, 512, MemoryModel(limit_mib=4000.0))
    assert found.batch_size is not None
    assert 340 <= found.batch_size <= 350
    assert found.ooms == 0
    assert found.peak_mib <= 4000


def test_no_probe_is_begun_that_there_is_no_time_for() -> None:
    now = [0.0]

    def run(n: int) -> Outcome:
        now[0] += 2.0 + 0.1 * n
        return replace(measurement(500 + 100.0 * n, 520 + 100.0 * n), step_ms=(10.0 * n,) * 5)

    found = find_largest(run, 16, left_s=lambda: 20.0 - now[0], clock=lambda: now[0])
    assert now[0] <= 20
    assert (found.batch_size, found.because) == (16, "there is no time to try 528")
    assert found.probes[0].seconds == pytest.approx(3.6)


def test_a_sizer_learns_from_trials_and_from_its_own_runs() -> None:
    device = Device(own=32, fixed_mib=1000, each_mib=100.0)
    sizer = Sizer(run=lambda policy: device(policy.batch_size or 0), model=device.model, own_batch_size=32)
    sizer.learn([Trial(number=0, policy=STOCK, outcome=device(32), seconds=1.0)])
    first = sizer.largest(STOCK)
    assert first.probes
    assert 32 not in [probe.batch_size for probe in first.probes]
    assert sizer.largest(STOCK).probes == ()
    assert sizer.largest(STOCK).batch_size == first.batch_size
    assert sizer.predicts_oom(Policy(batch_size=3000))
    assert not sizer.predicts_oom(Policy(batch_size=first.batch_size))
