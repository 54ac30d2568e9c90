"""An evaluator that stands for an H200: step times from a recorded grid, with noise, and no GPU."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from amptune.hardware.machine import Cpu, Gpu, Hardware, Software
from amptune.measure.results.half_effects import Half, ModuleTrace, Sensitivity
from amptune.measure.results.loop_timing import LoaderTrial
from amptune.measure.results.outcome import Effort, Failure, Measurement, Outcome
from amptune.measure.results.step_profile import StepProfile
from amptune.measure.results.subject import Leaf, Prepared, Subject
from amptune.measure.results.training_runs import LossCurve, Parity
from amptune.policy.settings import Policy
from simulated.clock import SimulatedClock

H200 = Hardware(
    device="cuda",
    cpu=Cpu(model="some CPU", architecture="x86_64", cores=16, memory_mib=131072),
    gpu=Gpu(
        index=0,
        name="NVIDIA H200",
        uuid="GPU-0",
        generation="hopper",
        compute_capability=(9, 0),
        memory_mib=143771,
        multiprocessors=132,
        tensor_cores=True,
        bf16=True,
        tf32=True,
        fp8=True,
    ),
    software=Software(torch="2.11.0+cu130", python="3.12.3", cuda="13.0", cudnn="9.19.0"),
    labels=(
        ("nvidia.com/gpu.product", "NVIDIA-H200"),
        ("nvidia.com/gpu.memory", "143771"),
        ("nvidia.com/gpu.compute.major", "9"),
        ("nvidia.com/gpu.compute.minor", "0"),
        ("torch", "2.11"),
        ("cudnn", "9.19"),
    ),
)

STEM = Leaf(path="stem", type="Conv2d", parameters=9408, flops=10**9, cast_numel=10**7, called=0)
BODY = Leaf(path="body.conv", type="Conv2d", parameters=10**7, flops=10**12, cast_numel=10**8, called=1)
NORM = Leaf(path="body.norm", type="BatchNorm2d", parameters=512, flops=0, cast_numel=10**8, called=2)
HEAD = Leaf(path="head", type="Linear", parameters=2 * 10**6, flops=10**9, cast_numel=10**8, called=3)

# So that the workload's own batch takes 5,000 MiB.
MEMORY_MIB, FIXED_MIB, SAMPLE_MIB = 143_000.0, 1000.0, 31.25

# What each rule that keeps modules in FP32 costs, as measured in direction: a little.
EXCLUSION_COSTS = 1.03


@cache
def _rows(workload: str) -> list[dict[str, Any]]:
    rows = json.loads((Path(__file__).parent / "h200_grid.json").read_text())["rows"]
    return [row for row in rows if row["workload"] == workload]


def own_batch_size(workload: str) -> int:
    return int(_rows(workload)[0]["batch_size"])


@cache
def recorded_rows(workload: str) -> dict[tuple[str, str, bool, str], tuple[float, float]]:
    """(step in ms, peak in MiB) by (precision, memory format, cudnn.benchmark, compile)."""
    return {
        (row["precision"], row["memory_format"], row["cudnn_benchmark"], row["compile"]): (
            row["step_ms"],
            row["peak_allocated_mib"],
        )
        for row in _rows(workload)
    }


def precision_of(policy: Policy) -> str:
    """The grid's word for it; stock is TF32 where convolutions do the work."""
    math_mode = {"ieee": "fp32", "stock": "tf32", "tf32": "tf32"}[policy.fp32_math]
    return math_mode if policy.autocast == "off" else policy.autocast


def recorded_ms(workload: str, policy: Policy) -> float:
    """The recorded step time that a policy comes closest to, without torch.compile."""
    rows, key = recorded_rows(workload), (precision_of(policy), policy.memory_format)
    ms, _ = rows.get((*key, policy.cudnn_benchmark, "off")) or rows[(*key, False, "off")]
    return ms * EXCLUSION_COSTS ** len(policy.fp32_modules)


def falling(_: Policy, steps: int, seed: int) -> LossCurve:
    """A loss that falls alike under all policies, from another height for each seed."""
    return LossCurve(losses=tuple((1 + seed / 100) / (1 + step) for step in range(steps)))


Interference = Callable[[Policy], Failure | None]


@dataclass
class RecordedEvaluator:
    """Answers from the grid, or from `true_ms`; `interfere` may fail a policy, or raise, before it does.

    By its clock a measurement takes `takes_s`, and a launch `launch_s`; all else takes no time.
    """

    takes_s: ClassVar[float] = 2.0
    launch_s: ClassVar[float] = 10.0

    workload: str
    noise: float = 0.01
    seed: int = 0
    interfere: Interference = lambda _: None
    true_ms: Callable[[Policy], float] | None = None
    peak_mib: Callable[[Policy], float] = lambda policy: FIXED_MIB + SAMPLE_MIB * (policy.batch_size or 128)
    watts: Callable[[Policy], float] | None = None
    measured: list[Policy] = field(default_factory=list)
    launched: list[tuple[Policy, ...]] = field(default_factory=list)
    compiled_behind: list[Policy] = field(default_factory=list)
    in_background: dict[Policy, float] = field(default_factory=dict)
    compile_s: float = 0.0
    judged: list[Policy] = field(default_factory=list)
    parity: Callable[[Policy], Parity | Failure] = lambda _: Parity()
    curve: Callable[[Policy, int, int], LossCurve | Failure] = falling
    hardware: Hardware = H200
    batch_size: int = 128
    repeated_leaves: int = 0
    closed: bool = False
    clock: SimulatedClock = field(default_factory=SimulatedClock)

    def prepare(self, limit_s: float) -> Prepared:  # noqa: ARG002  # a recording is there at once
        subject = Subject(
            name=self.workload,
            source_digest="0" * 64,
            model_digest="sha256:" + "1" * 64,
            batch_size=self.batch_size,
            parameters=25 * 10**6,
            leaves=(STEM, BODY, NORM, HEAD),
            convolution_dims=frozenset({2}),
            repeated_leaves=self.repeated_leaves,
        )
        return Prepared(hardware=self.hardware, subject=subject, memory_mib=MEMORY_MIB)

    graphs_at_once: int = 1

    def build_ahead(self, count: int) -> None:
        pass

    @property
    def compiling(self) -> Collection[Policy]:
        return self.in_background.keys()

    def begin_compiling(self, policy: Policy, limit_s: float) -> None:  # noqa: ARG002
        on_disk = {_graph(one) for one in self.compiled_behind if one not in self.in_background}
        self.compiled_behind.append(policy)
        self.in_background[policy] = self.clock() + (0.0 if _graph(policy) in on_disk else self.compile_s)

    def stop_compiling(self, policy: Policy) -> None:
        self.in_background.pop(policy, None)

    def compiled(self, wait_s: float = 0.0) -> Mapping[Policy, float | Failure]:
        first_s = min(self.in_background.values(), default=self.clock())
        self.clock.advance(min(wait_s, max(0.0, first_s - self.clock())))
        ready = [policy for policy, at_s in self.in_background.items() if at_s <= self.clock()]
        for policy in ready:
            del self.in_background[policy]
        return dict.fromkeys(ready, self.compile_s)

    def launch(self, policies: Sequence[Policy]) -> None:
        self.clock.advance(self.launch_s)
        self.launched.append(tuple(policies))

    def measure(self, policy: Policy, effort: Effort) -> Outcome:
        self.clock.advance(self.takes_s)
        self.measured.append(policy)
        failure = self.interfere(policy)
        if failure is not None:
            return failure
        rng = random.Random(f"{self.seed} {len(self.measured)}")
        ms = self.true_ms(policy) if self.true_ms else recorded_ms(self.workload, policy)
        steps = max(effort.min_steps, 5)
        samples = policy.batch_size or self.batch_size
        if self.peak_mib(policy) > MEMORY_MIB:
            return Failure(kind="oom", message="CUDA out of memory")
        return Measurement(
            samples_per_step=samples * policy.accumulate,
            step_ms=tuple(ms * (1 + rng.gauss(0, self.noise)) for _ in range(steps)),
            warmup_s=0.2,
            warmup_steps=10,
            peak_allocated_mib=self.peak_mib(policy),
            peak_reserved_mib=1.02 * self.peak_mib(policy),
            losses=(7.0, 6.9, 6.8),
            gradient_norm=3.0,
            energy_j_per_sample=self.watts(policy) * ms / 1000 / samples if self.watts else None,
            in_loop=effort.in_loop,
        )

    def measure_alone(self, policy: Policy, effort: Effort) -> Outcome:
        return self.measure(policy, effort)

    def judge(self, policy: Policy, fp32: Policy, seconds: float, limit_s: float) -> Parity | Failure:  # noqa: ARG002
        self.judged.append(policy)
        return self.parity(policy)

    def trace(self, policy: Policy, fp32: Policy, limit_s: float) -> tuple[ModuleTrace, ...] | Failure:  # noqa: ARG002
        return ()

    def sense(self, policy: Policy, dtypes: tuple[Half, ...], limit_s: float) -> Sensitivity | Failure:  # noqa: ARG002
        return Failure(kind="unsupported", message="no module was timed by itself")

    def profile(self, policy: Policy, limit_s: float) -> StepProfile | Failure:  # noqa: ARG002
        return Failure(kind="unsupported", message="no step was profiled")

    def try_loaders(self, policy: Policy, seconds: float) -> tuple[LoaderTrial, ...] | Failure:  # noqa: ARG002
        return ()

    def train_long(self, policy: Policy, steps: int, seed: int, seconds: float) -> LossCurve | Failure:
        """Trains as `curve` says; each run takes `takes_s`, or `seconds` if these are fewer."""
        self.clock.advance(min(self.takes_s, seconds))
        return self.curve(policy, steps, seed)

    def close(self) -> None:
        self.closed = True


def _graph(policy: Policy) -> Policy:
    """Returns what torch.compile compiles: neither the optimizer nor what cuDNN does."""
    return replace(policy, fused_optimizer=False, cudnn_benchmark=False)
