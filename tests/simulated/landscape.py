"""A machine that is nowhere: over 10,000 policies a workload, the truth about each, measured in simulated time.

`Landscape` is the truth, calibrated on the recorded H200 grid; `SyntheticEvaluator` measures it as badly as a real
machine does.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from amptune.measure.results.half_effects import Half, ModuleSensitivity, ModuleTrace, Reach, Sensitivity
from amptune.measure.results.loop_timing import LoaderTrial
from amptune.measure.results.outcome import Effort, Failure, Measurement, Outcome
from amptune.measure.results.step_profile import StepProfile
from amptune.measure.results.subject import Leaf, Module, Prepared, Subject
from amptune.measure.results.training_runs import LossCurve, Parity
from amptune.policy.settings import STOCK, Fp32Rule, MemoryFormat, Policy, amp_recipe
from amptune.search.space.candidates import Candidates, Wanted, candidates_for
from amptune.search.space.module_rules import covered_by
from simulated.clock import SimulatedClock
from simulated.recorded import H200, own_batch_size, precision_of, recorded_rows

SPACE = Path(__file__).parent / "big_space.yaml"
MEMORY_MIB = 143_771


# --- the truth ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What the grid does not say of a workload.

    `fixed` is the share of a step, at the workload's own batch, that does not grow with the batch: kernel launches
    and the optimizer; first without autocast, then with it. `compiled` is the step under torch.compile over the
    eager one, where the grid has no row for it.
    """

    fixed: tuple[float, float]
    compiled: float


# SE-ResNeXt50's shares follow from 16.6 k img/s (TF32) and 13 to 16 k (bf16) at batch 256, 21 k and 80 k at 2048;
# the factors of compile for ResNet-50 and DeepLabV3+ from 29.6 -> 21.3 ms and 28.8 -> 36.5 ms (H200, torch 2.11).
# The others are set between these by how small the kernels are: plausible, not measured.
TRAITS: Mapping[str, Traits] = {
    "conv1": Traits(fixed=(0.10, 0.20), compiled=1.04),
    "resnet18": Traits(fixed=(0.05, 0.15), compiled=0.85),
    "resnet50": Traits(fixed=(0.03, 0.10), compiled=0.72),
    "vgg16_cifar": Traits(fixed=(0.25, 0.35), compiled=1.05),
    "densenet161_cifar": Traits(fixed=(0.40, 0.85), compiled=0.80),
    "seresnext50_cifar": Traits(fixed=(0.24, 0.90), compiled=0.90),
    "deeplabv3p": Traits(fixed=(0.10, 0.20), compiled=1.27),
}
WORKLOADS = tuple(TRAITS)

# (what is left of the fixed part, further factor on the rest) behind "default". CUDA graphs take SE-ResNeXt50 at
# 256 from 14.6 to 6.0 ms: nine tenths of that step are launches, and three tenths of those remain.
COMPILE_MODES = {
    "default": (1.0, 1.0),
    "reduce-overhead": (0.3, 1.0),
    "max-autotune": (0.3, 0.98),
    "max-autotune-no-cudagraphs": (1.0, 0.98),
}

# What a module in FP32 does to a step, as measured: the single convolution from 1.268 (bf16) to 0.893 ms, VGG16's large
# Linear layers by 8 %.
KNOWN_IN_FP32 = {("conv1", "stem"): 0.71, ("vgg16_cifar", "head"): 0.93}
NORMS = {"norm": "BatchNorm2d", "group": "GroupNorm"}
GAINING_SHARE, FP32_GAIN, FP32_COST, NORM_COST = 0.3, 0.03, (0.003, 0.05), (0.10, 0.25)
# In IEEE FP32 (fp32_math "stock" leaves matrix products so) an excluded Linear layer costs up to this much more.
IEEE_COST = 0.03
FUSED_EFFECT = 0.04
# What a graph takes that lies in the compiler's cache, of what it takes to compile: 2.5 s and 25 to 40 s for ResNet-50
# on an H200 (reports/h200/oracle).
FROM_DISK = 0.1
# The batch sizes of the landscape, in times of the workload's own; a tuning finds its own ones.
BATCH_FACTORS = (0.5, 1, 2, 4, 8, 16)
# How well a batch size fits the machine (waves of thread blocks, alignment): this much either way.
BATCH_RIPPLE = 0.015
# Weights, gradients and workspaces do not grow with the batch; activations do.
FIXED_MEMORY_SHARE = 0.15


def batch_sizes(own: int) -> set[int]:
    return {max(1, int(factor * own)) for factor in BATCH_FACTORS}


def _mode(policy: Policy) -> str:
    """The mode of the recorded rows: a loss compiled too gains nothing in these trainings."""
    return "default" if policy.compile == "step" else policy.compile


class Landscape:
    """The true step time of every policy of a workload: the same in every process, whatever was asked before."""

    def __init__(self, workload: str) -> None:
        self.workload = workload
        self.own_batch_size = own_batch_size(workload)
        self._effects: dict[tuple[Fp32Rule, ...], tuple[float, float]] = {}

    @cached_property
    def prepared(self) -> Prepared:
        subject = Subject(
            name=self.workload,
            source_digest="0" * 64,
            model_digest="sha256:" + "1" * 64,
            batch_size=self.own_batch_size,
            parameters=25 * 10**6,
            leaves=leaves(),
            modules=tuple(Module(path=leaf.path, types=(leaf.type, "Module")) for leaf in leaves()),
            convolution_dims=frozenset({2}),
        )
        return Prepared(hardware=H200, subject=subject, memory_mib=MEMORY_MIB)

    @cached_property
    def candidates(self) -> Candidates:
        return candidates_for(self.prepared, wanted(), sizes=batch_sizes(self.own_batch_size))

    def true_ms(self, policy: Policy) -> float:
        """A step of the policy, without noise."""
        row, off = self._nearest(policy, _mode(policy)), self._nearest(policy, "off")
        fixed_ms = off * self._traits.fixed[policy.autocast != "off"]
        graph, fusion = self._compile_factors(policy, off, row)
        per_batch_ms = (off - fixed_ms) * self._batch_of(policy) / self.own_batch_size * self._ripple(policy)
        return (fixed_ms * graph + per_batch_ms * fusion) * self._exclusions(policy) * self._fused(policy)

    def samples_per_s(self, policy: Policy) -> float:
        return 1000 * self._batch_of(policy) / self.true_ms(policy)

    def peak_mib(self, policy: Policy) -> float:
        """As recorded, its activations grown with the batch."""
        rows = recorded_rows(self.workload)
        precision, layout = precision_of(policy), policy.memory_format
        with_flag = rows.get((precision, layout, policy.cudnn_benchmark, "off"))
        recorded = (with_flag or rows[precision, layout, False, "off"])[1]
        grown = self._batch_of(policy) / self.own_batch_size
        return recorded * (FIXED_MEMORY_SHARE + (1 - FIXED_MEMORY_SHARE) * grown)

    def watts(self, policy: Policy) -> float:
        """Half precision and compiled kernels draw less, a larger batch a little more: plausible, not measured."""
        precision = {"off": 650.0, "bf16": 520.0, "fp16": 500.0}[policy.autocast]
        return precision * (0.93 if policy.compile != "off" else 1.0) * (1.02 if policy.batch_size else 1.0)

    def fits(self, policy: Policy) -> bool:
        return self.peak_mib(policy) <= MEMORY_MIB

    @property
    def _traits(self) -> Traits:
        return TRAITS[self.workload]

    def _batch_of(self, policy: Policy) -> int:
        return policy.batch_size or self.own_batch_size

    def _nearest(self, policy: Policy, mode: str) -> float:
        """The recorded row, or without cudnn.benchmark (FP32 was recorded without), or eager."""
        rows, key = recorded_rows(self.workload), (precision_of(policy), policy.memory_format)
        tries = ((*key, policy.cudnn_benchmark, mode), (*key, policy.cudnn_benchmark, "off"), (*key, False, "off"))
        return next(rows[one] for one in tries if one in rows)[0]

    def _compile_factors(self, policy: Policy, off_ms: float, row_ms: float) -> tuple[float, float]:
        """On the part of a step that stays as the batch grows, and on the rest."""
        if policy.compile == "off":
            return 1.0, 1.0
        default = row_ms / off_ms if row_ms != off_ms else self._traits.compiled
        graph, fusion = COMPILE_MODES[_mode(policy)]
        return default * graph, default * fusion

    def _ripple(self, policy: Policy) -> float:
        if self._batch_of(policy) == self.own_batch_size:
            return 1.0
        drawn = _drawn(self.workload, precision_of(policy), policy.memory_format, self._batch_of(policy))
        return 1 + BATCH_RIPPLE * (2 * drawn - 1)

    def _exclusions(self, policy: Policy) -> float:
        """What the FP32 rules do to a step, each by itself; stock PyTorch's matrix products are IEEE, so dearer."""
        tf32, ieee = self._effect_of_rules(policy.fp32_modules)
        return ieee if policy.fp32_math == "stock" else tf32

    def _effect_of_rules(self, rules: tuple[Fp32Rule, ...]) -> tuple[float, float]:
        if rules not in self._effects:
            modules = self.prepared.subject.modules
            paths = [module.path for module in modules]
            kept = sorted({path for rule in rules for path in covered_by(rule, paths, modules)})
            tf32 = math.prod(map(self.in_fp32, kept))
            ieee = math.prod(1 + IEEE_COST * _drawn(self.workload, "ieee", path) for path in kept)
            self._effects[rules] = tf32, tf32 * ieee
        return self._effects[rules]

    def in_fp32(self, path: str) -> float:
        """A step with this module in FP32 (TF32 for its products), over the step with none."""
        if (self.workload, path) in KNOWN_IN_FP32:
            return KNOWN_IN_FP32[self.workload, path]
        drawn = _drawn(self.workload, "in FP32", path)
        if path in NORMS:
            return 1 + _between(NORM_COST, drawn)
        if _drawn(self.workload, "gains", path) < GAINING_SHARE:
            return 1 - FP32_GAIN * drawn
        return 1 + _between(FP32_COST, drawn)

    def sensed(self, memory_format: MemoryFormat, dtypes: Sequence[Half]) -> Sensitivity:
        """The modules' times in a layout: equal shares of a step, and what FP32 saves or costs; nothing is cast."""
        step_ms = {dtype: self.true_ms(amp_recipe(dtype, memory_format=memory_format)) for dtype in dtypes}
        mean_ms = sum(step_ms.values()) / len(step_ms)
        share, gains = 1 / len(leaves()), {leaf.path: 1 - self.in_fp32(leaf.path) for leaf in leaves()}
        return Sensitivity(
            modules=tuple(
                ModuleSensitivity(
                    path=path, calls=1, stream="half", input_bytes=0, output_bytes=0,
                    fp32_ms=mean_ms * (share + max(0.0, -gain)),
                    half_ms={dtype: mean_ms * share + max(0.0, gain) * ms for dtype, ms in step_ms.items()},
                )
                for path, gain in gains.items()
            ),
            cast_ms_per_byte=0.0,
        )  # fmt: skip

    def _fused(self, policy: Policy) -> float:
        return 1 + FUSED_EFFECT * (2 * _drawn(self.workload, "fused") - 1) if policy.fused_optimizer else 1.0


class FlatLandscape(Landscape):
    """Where nothing is faster than stock: all policies equal per sample, or others slower by up to `slower_by`."""

    def __init__(self, workload: str, slower_by: float = 0.0) -> None:
        super().__init__(workload)
        self.slower_by = slower_by

    def true_ms(self, policy: Policy) -> float:
        own = replace(policy, batch_size=None)
        factor = 1.0 if own == STOCK else 1 + self.slower_by * _drawn(self.workload, str(own))
        stock_ms = self._nearest(STOCK, "off")
        return stock_ms * self._batch_of(policy) / self.own_batch_size * factor

    def in_fp32(self, path: str) -> float:  # noqa: ARG002  # no module is faster by it
        return 1.0

    def fits(self, policy: Policy) -> bool:  # noqa: ARG002  # a flat one is flat to its ends
        return True


@cache
def landscape_of(workload: str, slower_by: float | None = None) -> Landscape:
    """The same object every time: what it caches is dear. A number makes it flat."""
    return Landscape(workload) if slower_by is None else FlatLandscape(workload, slower_by)


@cache
def leaves() -> tuple[Leaf, ...]:
    """A model with twelve modules to keep in FP32: two ends, six heavy convolutions, two products, two norms."""
    products = [
        ("stem", "Conv2d", 10**4, 10**9, 10**8),
        *((f"stage{i}", "Conv2d", 3 * 10**6, 10**12, (10 + i) * 10**7) for i in range(6)),
        ("neck", "Conv2d", 10**5, 10**15, 10**7),
        ("gate", "Linear", 10**5, 10**11, 10**7),
        ("head", "Linear", 10**6, 10**9, 10**7),
    ]
    norms = [(path, kind, 512, 0, 10**8) for path, kind in NORMS.items()]
    return tuple(
        Leaf(path=path, type=kind, parameters=parameters, flops=flops, cast_numel=numel, called=called)
        for called, (path, kind, parameters, flops, numel) in enumerate([*products, *norms])
    )


def wanted(baseline: Policy = STOCK) -> Wanted:
    return Wanted(baseline=baseline, space=SPACE, pins={}, batch_size="auto")


def _drawn(*what: object) -> float:
    """A number in [0, 1) that depends on nothing but what it is for."""
    digest = hashlib.blake2b(" ".join(map(str, what)).encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def _between(limits: tuple[float, float], drawn: float) -> float:
    return limits[0] + (limits[1] - limits[0]) * drawn


# --- measuring it ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """All that stands between a measurement and the truth, and what measuring costs. `Trouble()` is an ordinary day.

    Noise is Gaussian on the logarithm: `noise` is common to the steps of a measurement, `step_noise` is each step's
    own, `launch_noise` is a process's. `drift` is the change of all speeds over a tuning, 95 % of it in `drift_s`,
    up or down by the seed. `outliers` is the share of measurements slower by `outlier_by`. While one of the
    `throttlings` (their mean number within `throttle_within_s`) lasts, all is slower by `throttle_by`, and NVML says
    so. `oom` is the share of policies that fail so, the baseline and known-good ones excepted.
    """

    noise: float = 0.02
    step_noise: float = 0.02
    launch_noise: float = 0.005
    drift: float = 0.10
    drift_s: float = 300.0
    outliers: float = 0.05
    outlier_by: tuple[float, float] = (0.10, 0.60)
    throttlings: float = 0.0
    throttle_by: tuple[float, float] = (0.20, 0.40)
    throttle_s: tuple[float, float] = (10.0, 40.0)
    throttle_within_s: float = 300.0
    oom: float = 0.0
    # Whether fp16 trains worse than FP32 unless the module `BREAKS` is kept out of it.
    fp16_breaks: bool = False
    # The host is busy for this share of the time, in spells.
    busy: float = 0.0
    busy_by: tuple[float, float] = (0.10, 0.50)
    busy_s: float = 30.0
    # Costs in simulated seconds, in the size of those on an H200.
    trial_s: float = 1.0
    warmup_s: float = 0.3
    benchmark_s: float = 6.0
    compile_s: float = 15.0
    launch_s: float = 8.0
    sense_s: float = 4.0
    # How many graphs can be compiled beside one another, each taking so much longer for every other one.
    graphs_at_once: int = 1
    beside_another: float = 0.1


# The module that fp16 breaks in, where it does.
BREAKS = "stage2"

FINE = Reach(largest=2.0, largest_fp32=2.0, error=0.001)
LOST = Reach(largest=math.inf, largest_fp32=2.0, error=math.inf)
# The 95 % point of a Gaussian.
GAUSSIAN_95 = 1.96
# So many slow steps are run before a trial that is far behind is abandoned, and so many more are timed.
FIRST_STEPS, ABANDONED_STEPS = 3, 2


@dataclass
class Process:
    """A worker: its own factor on every time, and what it has compiled or looked for before."""

    factor: float
    known: set[object]


@dataclass(frozen=True)
class Throttling:
    start_s: float
    end_s: float
    factor: float


class SyntheticEvaluator:
    """Stands behind the seam between searching and measuring. The same seed and questions give the same answers."""

    def __init__(self, landscape: Landscape, clock: SimulatedClock, trouble: Trouble, seed: int) -> None:
        self.landscape = landscape
        self.clock = clock
        self.trouble = trouble
        self.asked: list[tuple[str, tuple[Policy, ...]]] = []
        self._seed = seed
        self._rng = np.random.default_rng([seed, *landscape.workload.encode()])
        self._drift_sign = 1.0 if self._rng.random() < 0.5 else -1.0
        self._throttlings = [self._throttling() for _ in range(self._rng.poisson(trouble.throttlings))]
        self._processes: dict[Policy | bool, Process] = {}
        self._on_disk: set[Policy] = set()
        self._ready_at_s: dict[Policy, float] = {}

    def prepare(self, limit_s: float) -> Prepared:  # noqa: ARG002  # it takes less than any limit there is
        self._process_of(STOCK)
        return replace(self.landscape.prepared, start_s=self.trouble.launch_s)

    def launch(self, policies: Sequence[Policy]) -> None:
        """Ends all processes but those that compile, and starts a fresh one for each of these, all at once."""
        self.asked.append(("launch", tuple(policies)))
        self._processes = {policy: self._new_process() for policy in policies}
        self.clock.advance(self.trouble.launch_s)

    @property
    def graphs_at_once(self) -> int:
        return self.trouble.graphs_at_once

    def build_ahead(self, count: int) -> None:
        pass

    @property
    def compiling(self) -> Collection[Policy]:
        return self._ready_at_s.keys()

    def begin_compiling(self, policy: Policy, limit_s: float) -> None:  # noqa: ARG002
        """In the background: a process is started, the graph compiled, each slower beside others."""
        self.asked.append(("compile", (policy,)))
        beside = 1 + self.trouble.beside_another * len(self._ready_at_s)
        self._ready_at_s[policy] = self.clock() + self.trouble.launch_s + self.trouble.compile_s * beside

    def stop_compiling(self, policy: Policy) -> None:
        self._ready_at_s.pop(policy, None)

    def compiled(self, wait_s: float = 0.0) -> Mapping[Policy, float | Failure]:
        first_s = min(self._ready_at_s.values(), default=self.clock())
        self.clock.advance(min(wait_s, max(0.0, first_s - self.clock())))
        ready = [policy for policy, at_s in self._ready_at_s.items() if at_s <= self.clock() + 1e-9]
        for policy in ready:
            del self._ready_at_s[policy]
            self._processes[policy] = self._new_process()
            self._processes[policy].known.add(policy)
        self._on_disk.update(ready)
        return dict.fromkeys(ready, self.trouble.compile_s)

    def measure_alone(self, policy: Policy, effort: Effort) -> Outcome:
        return self.measure(policy, effort)

    def measure(self, policy: Policy, effort: Effort) -> Outcome:
        self.asked.append(("measure", (policy,)))
        start_s = self.clock()
        process = self._process_of(policy)
        if not self.runs(policy):
            self.clock.advance(self.trouble.trial_s)
            return Failure(kind="oom", message="CUDA out of memory")
        self.clock.advance(self.trouble.trial_s + self._first_s(policy, process))
        ms = self.landscape.true_ms(policy) * self._interference(process)
        abandoned = effort.abandon_above_ms is not None and ms > effort.abandon_above_ms
        warmup_s = 0.0 if abandoned else min(effort.warmup_s, max(self.trouble.warmup_s, 10 * ms / 1000))
        steps = ABANDONED_STEPS if abandoned else self._steps(ms, effort)
        self.clock.advance(warmup_s + (FIRST_STEPS + steps) * ms / 1000)
        if self.clock() - start_s > effort.time_limit_s:
            return self._timed_out(policy, start_s + effort.time_limit_s)
        step_ms = ms * self._step_noise(steps)
        measured = self._measurement(policy, step_ms, warmup_s, abandoned=abandoned)
        joules = self.landscape.watts(policy) / measured.samples_per_s
        return replace(measured, energy_j_per_sample=joules, in_loop=effort.in_loop)

    def judge(self, policy: Policy, fp32: Policy, seconds: float, limit_s: float) -> Parity:  # noqa: ARG002
        """The reference takes its time, a judgement a third of that."""
        has_reference = any(what == "judge" for what, _ in self.asked)
        self.asked.append(("judge", (policy,)))
        self.clock.advance(seconds / 3 if has_reference else seconds)
        self._process_of(policy)
        if self.is_sound(policy):
            return Parity()
        return Parity(failure=Failure(kind="nonfinite", message="the loss is nan in the first step of batch 1"))

    def trace(self, policy: Policy, fp32: Policy, limit_s: float) -> tuple[ModuleTrace, ...]:  # noqa: ARG002
        """Sound numbers; where fp16 breaks, `BREAKS` gives what is not finite, and what follows it gets that."""
        self.asked.append(("trace", (policy,)))
        paths = [leaf.path for leaf in leaves()]
        first = len(paths) if self.is_sound(policy) else paths.index(BREAKS)
        return tuple(
            ModuleTrace(
                path=leaf.path, type=leaf.type, inputs=LOST if place > first else FINE,
                outputs=LOST if place >= first else FINE, gradients_in=FINE, gradients_out=FINE, weights=FINE,
            )
            for place, leaf in enumerate(leaves())
        )  # fmt: skip

    def sense(self, policy: Policy, dtypes: tuple[Half, ...], limit_s: float) -> Sensitivity | Failure:
        self.asked.append(("sense", (policy,)))
        self.clock.advance(min(self.trouble.sense_s, limit_s))
        if self.trouble.sense_s > limit_s:
            return Failure(kind="timeout", message="the modules were not timed in time")
        return self.landscape.sensed(policy.memory_format, dtypes)

    def profile(self, policy: Policy, limit_s: float) -> StepProfile:  # noqa: ARG002
        """A step of which a GPU runs two thirds."""
        ms = self.landscape.true_ms(policy)
        return StepProfile(
            device="cuda", steps=5, step_ms=ms, host_ms=0.9 * ms, gpu_busy_ms=2 * ms / 3, kernels=400.0,
            optimizer_ms=0.1 * ms,
        )  # fmt: skip

    def try_loaders(self, policy: Policy, seconds: float) -> tuple[LoaderTrial, ...] | Failure:  # noqa: ARG002
        return ()

    def train_long(self, policy: Policy, steps: int, seed: int, seconds: float) -> LossCurve | Failure:  # noqa: ARG002
        return Failure(kind="unsupported", message="no long training was recorded")

    def close(self) -> None:
        self._processes.clear()

    def runs(self, policy: Policy) -> bool:
        """Whether a policy can be measured; where the known-good ones failed too, there would be nothing to test."""
        if not self.trouble.oom:
            return self.landscape.fits(policy)
        own = replace(policy, batch_size=None)
        unlucky = own not in self._known_good and _drawn("oom", self._seed, own) < self.trouble.oom
        return self.landscape.fits(policy) and not unlucky

    @cached_property
    def _known_good(self) -> set[Policy]:
        return {replace(one, batch_size=None) for one in (STOCK, *self.landscape.candidates.known_good)}

    def is_sound(self, policy: Policy) -> bool:
        """Whether a policy trains as well as FP32."""
        excluded = {rule.path for rule in policy.fp32_modules}
        return not self.trouble.fp16_breaks or policy.autocast != "fp16" or BREAKS in excluded

    def drift_factor(self) -> float:
        """On every time at this moment: it falls or rises, and ends at 1."""
        left = math.exp(-3 * self.clock() / self.trouble.drift_s)
        return 1 + self._drift_sign * self.trouble.drift * left

    def _process_of(self, policy: Policy) -> Process:
        """Its own if it was launched, else the search's for its cudnn.benchmark setting, started if need be."""
        key = policy if policy in self._processes else policy.cudnn_benchmark
        if key not in self._processes:
            self.clock.advance(self.trouble.launch_s)
            self._processes[key] = self._new_process()
        return self._processes[key]

    def _new_process(self) -> Process:
        factor = self._lognormal(self.trouble.launch_noise)
        return Process(factor=factor, known=set())

    def _first_s(self, policy: Policy, process: Process) -> float:
        """What a process does once: plans for each dtype, layout and batch size; a graph for each policy."""
        plans = (policy.autocast, policy.memory_format, policy.batch_size) if policy.cudnn_benchmark else None
        graph = policy if policy.compile != "off" else None
        seconds = self.trouble.benchmark_s * (plans not in process.known and plans is not None)
        if graph is not None and graph not in process.known:
            seconds += self.trouble.compile_s * (FROM_DISK if graph in self._on_disk else 1.0)
            self._on_disk.add(graph)
        process.known |= {plans, graph}
        return seconds

    def _interference(self, process: Process) -> float:
        """On the time of every step of one measurement."""
        factor = process.factor * self.drift_factor() * self._throttle_factor() * self._lognormal(self.trouble.noise)
        factor *= self._busy_factor()
        is_outlier, by = self._rng.random() < self.trouble.outliers, self._rng.uniform(*self.trouble.outlier_by)
        return factor * (1 + by if is_outlier else 1.0)

    def _throttle_factor(self) -> float:
        now = self.clock()
        return math.prod(one.factor for one in self._throttlings if one.start_s <= now < one.end_s)

    def _busy_factor(self) -> float:
        """Above 1 while the host is busy; spells of `busy_s` are busy or not by the draw."""
        spell = int(self.clock() / self.trouble.busy_s)
        if _drawn("busy", self._seed, spell) >= self.trouble.busy:
            return 1.0
        return 1 + _between(self.trouble.busy_by, _drawn("busy by", self._seed, spell))

    def _throttling(self) -> Throttling:
        start_s = self._rng.uniform(0, self.trouble.throttle_within_s)
        length_s, by = self._rng.uniform(*self.trouble.throttle_s), self._rng.uniform(*self.trouble.throttle_by)
        return Throttling(start_s, start_s + length_s, 1 + by)

    def _steps(self, ms: float, effort: Effort) -> int:
        """As many as it takes for the precision asked for, within the limits asked for."""
        for_precision = (GAUSSIAN_95 * self.trouble.step_noise / effort.precision) ** 2
        in_time = 1000 * effort.measure_s / ms
        return max(effort.min_steps, min(effort.max_steps, math.ceil(min(for_precision, in_time))))

    def _step_noise(self, steps: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.exp(self._rng.normal(0.0, self.trouble.step_noise, steps))

    def _lognormal(self, spread: float) -> float:
        return math.exp(self._rng.normal(0.0, spread))

    def _timed_out(self, policy: Policy, at_s: float) -> Failure:
        """The worker is ended at its limit; the next measurement starts another."""
        self.clock.advance(at_s - self.clock())
        self._processes.pop(policy, None) or self._processes.pop(policy.cudnn_benchmark, None)
        return Failure(kind="timeout", message="the trial did not end in time")

    def _measurement(
        self, policy: Policy, step_ms: np.ndarray[Any, np.dtype[np.float64]], warmup_s: float, *, abandoned: bool
    ) -> Measurement:
        throttled, busy = self._throttle_factor() > 1, self._busy_factor() > 1
        return Measurement(
            samples_per_step=policy.batch_size or self.landscape.own_batch_size,
            step_ms=tuple(step_ms.tolist()),
            warmup_s=warmup_s,
            warmup_steps=0 if abandoned else 10,
            peak_allocated_mib=self.landscape.peak_mib(policy),
            peak_reserved_mib=self.landscape.peak_mib(policy),
            losses=(7.0, 6.9, 6.8),
            gradient_norm=3.0,
            contaminated_by=(*(("hw-thermal",) if throttled else ()), *(("host-load",) if busy else ())),
            abandoned=abandoned,
        )
