"""A slow CPU of two cores that is nowhere; another program keeps one of them busy.

    PYTHONPATH=.:tests python -m simulated.slow_cpu [-v]

`SlowCpu` is the truth about each policy there, `BusyCpuEvaluator` measures it in simulated time, and `tunings` says how
many whole tunings end with the gain that is there. All draws follow from the seed. Their ranges are what tunings of
small networks showed on two busy cores without bf16 instructions: bf16 at 0.14 to 0.46 times the speed, channels_last
at 1.3 to 1.8 times, one thread at twice, blocks of one policy that differ by 10 to 30 % and processes by 5 to 20 %.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from optuna.storages import InMemoryStorage

from amptune.errors import AmptuneError
from amptune.hardware.machine import Cpu, Hardware, Software
from amptune.measure.results.outcome import Measurement
from amptune.measure.results.subject import Leaf, Module, Prepared, Subject
from amptune.measure.workers.source import Source
from amptune.policy.settings import STOCK, Policy
from amptune.search.decide.decision import Decision
from amptune.search.pipeline import tune_with
from amptune.search.plan.budget import Budget
from amptune.search.request import TuningRequest
from amptune.search.space.candidates import Candidates, Wanted, candidates_for
from amptune.search.space.knobs import points
from simulated.clock import SimulatedClock
from simulated.landscape import Landscape, SyntheticEvaluator, Trouble, _between, _drawn

__all__ = ["KINDS", "BusyCpuEvaluator", "SlowCpu", "Tuned", "in_words", "tuned", "tunings"]

TWO_CORES = Hardware(
    device="cpu",
    cpu=Cpu(model="some CPU", architecture="x86_64", cores=2, memory_mib=8192),
    gpu=None,
    software=Software(torch="2.13.0+cpu", python="3.11.9"),
    labels=(("torch", "2.13"),),
)

# Milliseconds of a stock step: the small network that is bundled, and a convolutional one of somebody else's.
KINDS: Mapping[str, tuple[float, float]] = {"small": (60.0, 150.0), "convolutional": (200.0, 500.0)}
# The ranges of how much faster a step becomes, and of a step's time over that without the setting.
BF16, CHANNELS_LAST, FUSED, ONE_THREAD = (0.14, 0.46), (1.3, 1.8), (1.05, 1.15), 2.0
COMPILED_TIME, FP16_TIME, CHECKPOINT_TIME = (0.9, 1.2), 10.0, 1.3
# Each module that is kept in FP32 takes this share of the heavy work out of bf16.
KEPT_SHARE = 0.2
# A gain that a tuning must not miss, and the share of the best that the chosen policy must have.
GAIN, SHARE_OF_BEST = 1.5, 0.8


class SlowCpu(Landscape):
    """The true step time of every policy of one kind of network on one such machine."""

    def __init__(self, kind: str, seed: int) -> None:  # not the landscape's, which reads a recorded grid
        self.workload = kind
        self.own_batch_size = 64
        self._seed = seed

    @cached_property
    def prepared(self) -> Prepared:
        depth = {"small": 3, "convolutional": 8}[self.workload]
        convolutions = [(f"conv{i}", "Conv2d", 10**5, 10**9 + i * 10**7, 10**6) for i in range(depth)]
        norms = [(f"norm{i}", "BatchNorm2d", 128, 0, 10**6) for i in range(depth)]
        all_of = [*itertools.chain.from_iterable(zip(convolutions, norms, strict=True))]
        leaves = tuple(
            Leaf(path=path, type=kind, parameters=parameters, flops=flops, cast_numel=numel, called=called)
            for called, (path, kind, parameters, flops, numel) in enumerate(
                [*all_of, ("fc", "Linear", 2 * 10**4, 10**6, 10**5)]
            )
        )
        subject = Subject(
            name=self.workload, source_digest="0" * 64, model_digest="sha256:" + "1" * 64, parameters=10**6,
            batch_size=self.own_batch_size, leaves=leaves, convolution_dims=frozenset({2}), threads=2,
            modules=tuple(Module(path=leaf.path, types=(leaf.type, "Module")) for leaf in leaves),
        )  # fmt: skip
        return Prepared(hardware=TWO_CORES, subject=subject, memory_mib=6000)

    @cached_property
    def candidates(self) -> Candidates:
        return candidates_for(self.prepared, _wanted({}))

    def true_ms(self, policy: Policy) -> float:
        ms = self._of(KINDS[self.workload], "stock") * (policy.batch_size or self.own_batch_size) / self.own_batch_size
        heavy = max(0.0, 1 - KEPT_SHARE * len(policy.fp32_modules))
        if policy.autocast != "off" or policy.weights != "fp32":
            slower = FP16_TIME if "fp16" in (policy.autocast, policy.precision) else 1 / self._of(BF16, "bf16")
            ms *= 1 + heavy * (slower - 1)
        ms /= self._of(CHANNELS_LAST, "channels_last") if policy.memory_format == "channels_last" else 1.0
        ms /= self._of(FUSED, "fused") if policy.fused_optimizer else 1.0
        ms /= ONE_THREAD if policy.threads == 1 else 1.0
        ms *= self._of(COMPILED_TIME, "compiled") if policy.compile != "off" else 1.0
        return ms * (CHECKPOINT_TIME if policy.checkpoint != STOCK.checkpoint else 1.0)

    def peak_mib(self, policy: Policy) -> float:
        return 300 + 100 * (policy.batch_size or self.own_batch_size) / self.own_batch_size

    def fits(self, policy: Policy) -> bool:  # noqa: ARG002  # such networks always do
        return True

    def best_gain(self, pins: Mapping[str, str]) -> float:
        """The true speedup of the fastest policy of the machine's space."""
        candidates = candidates_for(self.prepared, _wanted(pins))
        fastest_ms = min(self.true_ms(candidates.policy_of(point)) for point in points(candidates.space))
        return self.true_ms(STOCK) / fastest_ms

    def _of(self, limits: tuple[float, float], what: str) -> float:
        return _between(limits, _drawn(self.workload, self._seed, what))


class BusyCpuEvaluator(SyntheticEvaluator):
    """Measures a `SlowCpu` badly: a trial takes 2 to 6 s, a process 4 to 6 s; nothing compiles beside trials."""

    def __init__(self, landscape: SlowCpu, clock: SimulatedClock, seed: int) -> None:
        rng = np.random.default_rng(seed)
        trouble = Trouble(
            noise=rng.uniform(0.10, 0.30), launch_noise=rng.uniform(0.05, 0.20), step_noise=0.05,
            outliers=0.0, drift=0.0, busy=0.85, busy_by=(0.0, 0.10), busy_s=10.0, trial_s=rng.uniform(0.5, 1.5),
            launch_s=rng.uniform(4.0, 6.0), compile_s=rng.uniform(30.0, 60.0), graphs_at_once=0,
        )  # fmt: skip
        super().__init__(landscape, clock, trouble, seed)

    def _measurement(self, *args: Any, **kwargs: Any) -> Measurement:
        measured = super()._measurement(*args, **kwargs)
        return replace(measured, host_delay=self._rng.uniform(0.3, 0.7) if measured.contaminated_by else 0.05)


# --- whole tunings ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """One tuning: the true gain of what it chose, and of the best; `codes` are its findings, or the error's class."""

    kind: str
    seed: int
    policy: Policy | None
    claim: tuple[float, float, float]
    true_gain: float
    best_gain: float
    codes: tuple[str, ...]
    trials: int
    seconds: float

    @property
    def claims_the_gain(self) -> bool:
        """Whether it chose another policy than stock, and one with nearly the best gain."""
        return self.policy not in (None, STOCK) and self.true_gain >= SHARE_OF_BEST * self.best_gain


def tunings(budget_s: float, count: int = 20, pins: Mapping[str, str] | None = None) -> Iterator[Tuned]:
    """Yields the tunings of the first `count` seeds whose best gain is large; the kinds take turns."""
    seeds = itertools.count()
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        seed = next(seed for seed in seeds if SlowCpu(kind, seed).best_gain(pins or {}) > GAIN)
        yield tuned(kind, seed, budget_s, pins)


def tuned(kind: str, seed: int, budget_s: float, pins: Mapping[str, str] | None = None) -> Tuned:
    """Tunes once in simulated time."""
    clock, landscape = SimulatedClock(), SlowCpu(kind, seed)
    evaluator = BusyCpuEvaluator(landscape, clock, seed)
    decision: Decision | None = None
    try:
        with tempfile.TemporaryDirectory() as folder:
            request = TuningRequest(
                source=Source(target="synthetic"),
                wanted=_wanted(pins or {}),
                budget=Budget(seconds=budget_s, started=clock(), clock=clock),
                folder=Path(folder),
                study=InMemoryStorage(),  # type: ignore[arg-type]  # Optuna takes one
                seed=seed,
            )
            decision = tune_with(evaluator, request, lambda _: None)
        codes = tuple(finding.code for finding in decision.findings)
    except AmptuneError as error:
        codes = (type(error).__name__,)
    gain = decision.speedup if decision else None
    return Tuned(
        kind=kind,
        seed=seed,
        policy=decision.policy if decision else None,
        claim=(gain.value, gain.low, gain.high) if gain else (1.0, 1.0, 1.0),
        true_gain=landscape.true_ms(STOCK) / landscape.true_ms(decision.policy if decision else STOCK),
        best_gain=landscape.best_gain(pins or {}),
        codes=codes,
        trials=len(decision.trials) if decision else 0,
        seconds=clock(),
    )


def in_words(budget_s: float, found: list[Tuned]) -> str:
    """Says in how many tunings the gain that is there is claimed, and how the others ended."""
    claimed = sum(one.claims_the_gain for one in found)
    small = sum("budget-too-small" in one.codes for one in found)
    worse = sum(one.true_gain < 1 for one in found)
    endings = Counter(one.codes[0] if one.codes else "-" for one in found if not one.claims_the_gain)
    rest = ", ".join(f"{code} {count}" for code, count in endings.most_common()) or "none"
    return (
        f"{budget_s:g} s: the gain is claimed in {claimed} of {len(found)}; 'budget too small' in {small}; "
        f"slower than stock {worse}; the first finding of the others: {rest}"
    )


def _wanted(pins: Mapping[str, str]) -> Wanted:
    return Wanted(baseline=STOCK, space=None, pins=dict(pins), batch_size=None)


def main() -> None:
    for pins in ({}, {"threads": "1"}):
        print(f"pins: {pins}")
        for budget_s in (60.0, 300.0):
            found = list(tunings(budget_s, pins=pins))
            print(in_words(budget_s, found))
            for one in found if "-v" in sys.argv else ():
                print(
                    f"  {one.kind} {one.seed}: {one.policy}, true {one.true_gain:.2f} of {one.best_gain:.2f}, "
                    f"claim {one.claim[0]:.2f} [{one.claim[1]:.2f}, {one.claim[2]:.2f}], {one.trials} trials, "
                    f"{one.seconds:.0f} s, {' '.join(one.codes)}"
                )


if __name__ == "__main__":
    main()
