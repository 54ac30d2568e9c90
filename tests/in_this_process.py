"""This machine, measured in this process: what a worker does, without the seconds that starting one takes."""

from __future__ import annotations

import gc
import io
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import torch
from simulated.clock import SimulatedClock

from amptune.measure.results.half_effects import Half, ModuleTrace, Sensitivity
from amptune.measure.results.loop_timing import LoaderTrial
from amptune.measure.results.outcome import Effort, Failure, Outcome
from amptune.measure.results.step_profile import StepProfile
from amptune.measure.results.subject import Prepared
from amptune.measure.results.training_runs import LossCurve, Parity, Reference
from amptune.measure.workers import worker
from amptune.measure.workers.setting import Setting
from amptune.measure.workers.source import Source
from amptune.policy.settings import Policy

__all__ = ["InThisProcess", "measuring_here"]

T = TypeVar("T")

# A measurement long enough to be one.
WARMUP_S, MEASURE_S = 0.02, 0.02
# What a measurement, and a launch, take by the simulated clock.
TRIAL_S, LAUNCH_S = 2.0, 2.0


@dataclass
class InThisProcess:
    """A workload on this machine's CPU, without time limits, by a clock that only measurements move.

    What the workload prints, and tracebacks, are in `log`.
    """

    source: Source
    memory_mib: float | None = None
    clock: SimulatedClock = field(default_factory=SimulatedClock)
    log: io.StringIO = field(default_factory=io.StringIO)
    graphs_at_once: int = 0
    compiling: tuple[Policy, ...] = ()
    _reference: Reference | Failure | None = None

    def prepare(self, limit_s: float) -> Prepared:  # noqa: ARG002
        worker._State.setting = Setting(
            source=self.source, device="cpu", log=Path("nowhere"), memory_mib=self.memory_mib
        )
        worker._State.bench = None
        return self._logged(worker.prepare)

    def launch(self, policies: Sequence[Policy]) -> None:  # noqa: ARG002
        self.clock.advance(LAUNCH_S)

    def build_ahead(self, count: int) -> None:
        pass

    def stop_compiling(self, policy: Policy) -> None:
        raise NotImplementedError

    def begin_compiling(self, policy: Policy, limit_s: float) -> None:
        raise NotImplementedError

    def compiled(self, wait_s: float = 0.0) -> Mapping[Policy, float | Failure]:  # noqa: ARG002
        return {}

    def measure(self, policy: Policy, effort: Effort) -> Outcome:
        self.clock.advance(TRIAL_S)
        short = replace(effort, warmup_s=WARMUP_S, measure_s=MEASURE_S)
        return self._logged(lambda: worker.measure(policy, short)).outcome

    def measure_alone(self, policy: Policy, effort: Effort) -> Outcome:
        return self.measure(policy, effort)

    def judge(self, policy: Policy, fp32: Policy, seconds: float, limit_s: float) -> Parity | Failure:  # noqa: ARG002
        if self._reference is None:
            self._reference = self._logged(lambda: worker.refer(fp32, seconds))
        reference = self._reference
        if isinstance(reference, Failure):
            return reference
        return self._logged(lambda: worker.judge(policy, reference, math.inf))

    def trace(self, policy: Policy, fp32: Policy, limit_s: float) -> tuple[ModuleTrace, ...] | Failure:  # noqa: ARG002
        return self._logged(lambda: worker.trace(policy, fp32))

    def sense(self, policy: Policy, dtypes: tuple[Half, ...], limit_s: float) -> Sensitivity | Failure:  # noqa: ARG002
        return self._logged(lambda: worker.sense(policy, dtypes))

    def profile(self, policy: Policy, limit_s: float) -> StepProfile | Failure:  # noqa: ARG002
        return self._logged(lambda: worker.profile(policy))

    def try_loaders(self, policy: Policy, seconds: float) -> tuple[LoaderTrial, ...] | Failure:  # noqa: ARG002
        return ()

    def train_long(self, policy: Policy, steps: int, seed: int, seconds: float) -> LossCurve | Failure:  # noqa: ARG002
        self.clock.advance(TRIAL_S)
        return self._logged(lambda: worker.train_long(policy, steps, seed, math.inf))

    def close(self) -> None:
        worker._State.bench = None

    def _logged(self, act: Callable[[], T]) -> T:
        with redirect_stdout(self.log), redirect_stderr(self.log):
            return act()


@contextmanager
def measuring_here(target: str, memory_mib: float | None = None) -> Iterator[InThisProcess]:
    """An evaluator of a target, on one thread of this process, whose modules, paths and random numbers are put back."""
    modules, paths, state = set(sys.modules), list(sys.path), torch.get_rng_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tests may run beside one another, and small models gain nothing from more
    gc.freeze()  # a measurement collects garbage, and the libraries' own objects are many
    try:
        yield InThisProcess(Source(target=target), memory_mib)
    finally:
        gc.unfreeze()
        torch.set_rng_state(state)
        torch.set_num_threads(threads)
        sys.path[:] = paths
        script = Path(target.rpartition(":")[0]).stem
        for name in set(sys.modules) - modules:
            if name in (script, f"amptune_target_{script}"):
                del sys.modules[name]
