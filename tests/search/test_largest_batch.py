"""The largest batch on simulated devices, whose truth is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings
from measurements import took

from amptune.measure.results.outcome import Failure, FailureKind, Measurement, Outcome
from amptune.search.batch_size.batch_sizes import MOST_TIMES_OWN, rounded_sizes
from amptune.search.batch_size.largest_batch import LargestBatch, Question, find_largest

LIMIT_MIB = 140_000.0
sizes_around = cache(rounded_sizes)
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
    )


def found_with(
    run: Callable[[int], Outcome],
    own: int,
    sizes: Sequence[int] | None = None,
    *,
    limit_mib: float = LIMIT_MIB,
    **more: Any,
) -> LargestBatch:
    sizes = sizes_around(own) if sizes is None else sizes
    question = Question(sizes=sizes, ends="they end", own=own, limit_mib=limit_mib)
    return find_largest(run, question, **more)


def ooms(found: LargestBatch) -> int:
    return sum(probe.failure == "oom" for probe in found.probes)


SMALL, USUAL, FULL, TOO_LARGE = (0.0003, 0.002), (0.02, 0.3), (0.75, 0.9), (1.0, 12.0)
FRAGMENTS = {"fragments": 0.08, "caches": 0.15}
RELEASES = {"gives_mib": 0.4 * LIMIT_MIB}


@settings(deadline=None)
@given(
    device=devices([SMALL, USUAL, FULL, TOO_LARGE]),
    trouble=st.sampled_from([{}, FRAGMENTS, RELEASES]),
    times=st.sampled_from([None, 24, 210]),
)
def test_few_runs_find_a_size_that_ran_with_two_out_of_memory_at_most(
    device: Device, trouble: dict[str, Any], times: int | None
) -> None:
    """Of all sizes, or of the divisors of a global batch; no size runs twice."""
    device = replace(device, ran=set(), **trouble)
    sizes = [n for n in range(1, times * device.own + 1) if times * device.own % n == 0] if times else None
    found = found_with(device, device.own, sizes)
    tried = [probe.batch_size for probe in found.probes]
    assert len(set(tried)) == len(tried) <= 6
    assert set(tried) <= set(sizes or sizes_around(device.own))
    assert ooms(found) <= 2
    assert found.batch_size == max((n for n in device.ran), default=None)
    assert found.batch_size is not None or device.largest < 2 or ooms(found)


@settings(deadline=None)
@given(device=devices([SMALL, USUAL, FULL]), trouble=st.sampled_from([{}, FRAGMENTS]))
def test_the_answer_is_within_5_percent_of_the_largest_that_runs(device: Device, trouble: dict[str, Any]) -> None:
    device = replace(device, ran=set(), **trouble)
    assume(device.fits(device.own) and device.largest >= 64)
    found = found_with(device, device.own)
    assert (found.batch_size or 0) >= 0.95 * min(device.largest, MOST_TIMES_OWN * device.own)
    assert trouble or ooms(found) == 0


# In bf16 on an H200, limited by the allocator: allocated memory is on a line within 1 %, and the loss to fragmentation
# follows from the largest batch that ran.
REAL = {
    "bert_base": (50, Device(
        own=16, limit_mib=20 * 1024.0, fixed_mib=1527, each_mib=327.5, fragments=0.15, caches=0.075,
    )),
    "resnet50": (158, Device(
        own=128, limit_mib=7 * 1024.0, fixed_mib=290, each_mib=43.4, gives_mib=105, caches=0.2,
    )),
    "deeplabv3plus": (27, Device(
        own=4, limit_mib=24 * 1024.0, fixed_mib=620, each_mib=824, fragments=0.043, caches=0.023,
    )),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_on_recorded_models_the_answer_is_within_5_percent_with_two_out_of_memory_at_most(name: str) -> None:
    largest, device = REAL[name]
    device = replace(device, ran=set())
    assert device.largest == largest
    found = found_with(device, device.own, limit_mib=device.limit_mib)
    assert (found.batch_size or 0) >= 0.95 * largest
    assert ooms(found) <= 2


def test_small_batches_whose_peak_is_in_the_optimizer_step_mislead_little() -> None:
    """Their peaks are equal, and a line through them says that samples take nothing."""
    shares = []
    for flat_mib in (5_000.0, 20_000.0, 60_000.0):
        for each_mib in (20.0, 60.0, 110.0, 200.0, 400.0):

            def run(n: int, flat_mib: float = flat_mib, each_mib: float = each_mib) -> Outcome:
                mib = max(flat_mib, 3000 + each_mib * n)
                return measurement(mib, mib) if mib <= LIMIT_MIB else OOM

            found = found_with(run, 32)
            shares.append((found.batch_size or 0) * each_mib / (LIMIT_MIB - 3000))
    assert sum(shares) / len(shares) >= 0.75


def test_a_peak_of_memory_that_was_short_predicts_nothing() -> None:
    """Its peak is the limit, and a line through it would say that no more fits."""
    pressed = Device(own=128, fixed_mib=1000, each_mib=700.0, caches=0.6, limit_mib=LIMIT_MIB)
    found = found_with(pressed, 128)
    assert isinstance(found.probes[0].outcome, Measurement)
    assert found.probes[0].outcome.alloc_retries
    assert (found.batch_size or 0) > 1.3 * 128


@settings(max_examples=20)
@given(own=st.integers(1, 5000))
def test_rounded_sizes_are_close_and_multiples_of_8_where_that_costs_little(own: int) -> None:
    sizes = rounded_sizes(own)
    assert {own, MOST_TIMES_OWN * own} <= set(sizes)
    assert sizes[0] == 1
    assert all(b - a <= max(1, 0.0153 * a) for a, b in pairwise(sizes))
    assert all(size % 8 == 0 for size in sizes if size >= 536 and size != own)


@pytest.mark.parametrize("kind", ["error", "timeout"])
def test_sizes_that_fail_for_another_reason_are_gone_below_and_the_answer_is_what_was_confirmed(
    kind: FailureKind,
) -> None:
    device = Device(own=32, fixed_mib=1000, each_mib=100.0)
    failure = Failure(kind=kind, message="the model takes no more than 100 samples")
    found = found_with(lambda n: device(n) if n <= 100 else failure, 32)
    tried = [probe.batch_size for probe in found.probes]
    assert tried[0] == 32
    assert found.batch_size is not None
    assert (
        found.because.startswith(f"a batch of {min(n for n in tried if n > 100)} fails: {failure}") or len(tried) == 6
    )
    if kind == "timeout":  # each may take as long again
        assert (len(tried), found.batch_size) == (2, 32)
    else:
        assert 60 <= found.batch_size <= 100


@pytest.mark.parametrize(("own", "because"), [(128, "8 did not fit"), (1, "1 did not fit")])
def test_where_nothing_fits_there_is_no_answer(own: int, because: str) -> None:
    found = found_with(lambda _: OOM, own)
    assert found.batch_size is None
    assert found.because.startswith(because)
    assert str(found).startswith("no batch size is known to fit into 140000 MiB: ")


def test_a_run_that_took_more_than_the_limit_is_no_answer_where_nothing_enforces_it() -> None:
    """On a CPU, or with --max-memory: there is a peak then, and no out-of-memory."""
    unlimited = Device(own=512, fixed_mib=500, each_mib=10.0, limit_mib=10**9)
    found = found_with(unlimited, 512, limit_mib=4000.0)
    assert found.batch_size is not None
    assert 0.95 * 350 <= found.batch_size <= 350
    assert ooms(found) == 0
    assert found.peak_mib <= 4000


def test_no_probe_is_begun_that_there_is_no_time_for() -> None:
    now = [0.0]

    def run(n: int) -> Outcome:
        now[0] += 2.0 + 0.1 * n
        return replace(measurement(500 + 100.0 * n, 520 + 100.0 * n), step_ms=(10.0 * n,) * 5)

    found = found_with(run, 16, left_s=lambda: 20.0 - now[0], clock=lambda: now[0])
    assert now[0] <= 20
    assert found.batch_size == 16
    assert found.because.startswith("there is no time to try ")
    assert found.probes[0].seconds == pytest.approx(3.6)
