"""The seam between searching and measuring: behind it stands this machine, or a recording of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from amptune.errors import NothingFeasibleError
from amptune.measure import worker
from amptune.measure.loop_timing import LoopTiming
from amptune.measure.numerics import Parity, Reference
from amptune.measure.outcome import Effort, Failure, Measurement, Outcome
from amptune.measure.processes import WorkerProcess, cores, stop_all, workers_that_fit
from amptune.measure.sensitivity import Half, Sensitivity
from amptune.measure.speed_profile import StepProfile
from amptune.measure.subject import Prepared
from amptune.measure.trace import ModuleTrace
from amptune.measure.worker import Setting, Source
from amptune.policy.settings import STOCK, Policy

__all__ = ["Evaluator", "WorkerEvaluator"]

# Importing torch, opening a CUDA context and building the model, for all contenders at once.
START_LIMIT_S = 120.0
# Eight graphs on sixteen cores take 1.7 times as long as one (VGG16, reports/h200/oracle).
CORES_PER_GRAPH = 3


class Evaluator(Protocol):
    """What the search needs of a machine."""

    def prepare(self, limit_s: float) -> Prepared:
        """What is to be measured, and on what, within `limit_s` seconds.

        Raises the user's mistakes (`TargetError`, `UserCodeError`), `NothingFeasibleError` if the worker died or hung.
        """
        ...

    def launch(self, policies: Sequence[Policy]) -> None:
        """Starts a fresh process for each of these policies; until the next launch it is measured in that one."""
        ...

    @property
    def graphs_at_once(self) -> int:
        """How many graphs it can compile in little more time than one."""
        ...

    def compile(self, policies: Sequence[Policy], limit_s: float) -> Mapping[Policy, float]:
        """Compiles these policies beside one another, each in a fresh process, which it is then measured in.

        The seconds that each took; not of one that failed, or was not done within `limit_s`, which its trial will tell.
        """
        ...

    def measure(self, policy: Policy, effort: Effort) -> Outcome: ...

    def measure_alone(self, policy: Policy, effort: Effort) -> Outcome:
        """The same with the device's memory to itself."""
        ...

    def judge(self, policy: Policy, fp32: Policy, seconds: float, limit_s: float) -> Parity | Failure:
        """How training under a policy differs from training in the user's FP32.

        The first call makes the reference, in about `seconds`, and all others use it; where it cannot be made, the
        answer is why. `limit_s` is the hard end of making it, and of the judgement.
        """
        ...

    def trace(self, policy: Policy, fp32: Policy, limit_s: float) -> tuple[ModuleTrace, ...] | Failure:
        """Where numbers go wrong in one step under a policy, module by module."""
        ...

    def sense(self, policy: Policy, dtypes: tuple[Half, ...], limit_s: float) -> Sensitivity | Failure:
        """What half precision does to each module by itself, in the policy's memory format and FP32 math."""
        ...

    def profile(self, policy: Policy, limit_s: float) -> StepProfile | Failure:
        """What a step spends its time on, nothing else at work on the device."""
        ...

    def train(self, policy: Policy, seconds: float, limit_s: float) -> LoopTiming | Failure:
        """The workload's own training loop under the policy, alone on the device, for `seconds` besides its warm-up."""
        ...

    def close(self) -> None: ...


@dataclass
class WorkerEvaluator:
    """This machine, measured in worker processes: while searching, one for each `cudnn.benchmark` setting, and of each
    kind one that compiles and one that does not.

    PyTorch caches cuDNN's execution plans by shape, dtype and layout but not by that flag, so whichever
    setting meets a shape first decides for both (aten/src/ATen/native/cudnn/Conv_v8.cpp). The workers never
    measure at the same time, and each hands its device memory back after every trial, CUDA graphs of a moderate size
    aside. With `memory_mib` none may have more than that of it.
    """

    source: Source
    device: str | None
    log: Path
    memory_mib: float | None = None
    _workers: dict[Policy | tuple[bool, bool], WorkerProcess] = field(default_factory=dict)
    _room: int = 0
    _reference: Reference | Failure | None = None

    def prepare(self, limit_s: float) -> Prepared:
        answer = self._worker(STOCK).call(limit_s, worker.prepare)
        if isinstance(answer, Failure):
            raise NothingFeasibleError(f"the workload could not be built and run for one step: {answer}")
        return answer

    def launch(self, policies: Sequence[Policy]) -> None:
        self._room = max(2, workers_that_fit())
        self.close()
        self._start(policies, self._room, START_LIMIT_S)

    @property
    def graphs_at_once(self) -> int:
        return max(1, cores() // CORES_PER_GRAPH)

    def compile(self, policies: Sequence[Policy], limit_s: float) -> Mapping[Policy, float]:
        stop_all([self._workers.pop(policy) for policy in policies if policy in self._workers])
        started = self._start(policies, max(1, workers_that_fit()), limit_s)
        return {policy: outcome.startup_s for policy, outcome in started.items() if isinstance(outcome, Measurement)}

    def _start(self, policies: Sequence[Policy], at_most: int, limit_s: float) -> dict[Policy, Outcome | None]:
        """A fresh worker for each; what became of the first steps of those that compile, and None for the others.

        What went wrong is told by the first measurement.
        """
        self._workers |= {policy: self._new() for policy in policies}
        first = list(dict.fromkeys(policies))[:at_most]
        ready = [self._workers[policy].begin(limit_s, worker.get_ready, policy, len(first)) for policy in first]
        return {policy: answer() for policy, answer in zip(first, ready, strict=True)}

    def measure(self, policy: Policy, effort: Effort) -> Outcome:
        outcome = self._measure(policy, effort)
        if isinstance(outcome, Failure) and outcome.kind == "oom" and self._stop_others(policy):
            return self._measure(policy, effort)  # idle workers hold a CUDA context each, which training will not
        return outcome

    def measure_alone(self, policy: Policy, effort: Effort) -> Outcome:
        self._stop_others(policy)
        return self._measure(policy, effort)

    def judge(self, policy: Policy, fp32: Policy, seconds: float, limit_s: float) -> Parity | Failure:
        if self._reference is None:
            self._reference = self._worker(fp32).call(limit_s, worker.refer, fp32, seconds)
        if isinstance(self._reference, Failure):
            return self._reference
        parity = self._worker(policy).call(limit_s, worker.judge, policy, self._reference)
        return Parity(failure=parity) if isinstance(parity, Failure) else parity

    def trace(self, policy: Policy, fp32: Policy, limit_s: float) -> tuple[ModuleTrace, ...] | Failure:
        return self._worker(policy).call(limit_s, worker.trace, policy, fp32)

    def sense(self, policy: Policy, dtypes: tuple[Half, ...], limit_s: float) -> Sensitivity | Failure:
        return self._worker(policy).call(limit_s, worker.sense, policy, dtypes)

    def profile(self, policy: Policy, limit_s: float) -> StepProfile | Failure:
        self._stop_others(policy)
        return self._worker(policy).call(limit_s, worker.profile, policy)

    def train(self, policy: Policy, seconds: float, limit_s: float) -> LoopTiming | Failure:
        self._stop_others(policy)
        return self._worker(policy).call(limit_s, worker.train, policy, seconds)

    def close(self) -> None:
        stop_all(self._workers.values())
        self._workers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _measure(self, policy: Policy, effort: Effort) -> Outcome:
        process = self._worker(policy)
        reply = process.call(effort.time_limit_s, worker.measure, policy, effort)
        if isinstance(reply, Failure):
            return reply
        if reply.broken:
            process.stop()
        return reply.outcome

    def _worker(self, policy: Policy) -> WorkerProcess:
        """The policy's own worker if one was launched for it, else that of its kind."""
        key = policy if policy in self._workers else (policy.cudnn_benchmark, policy.compile != "off")
        process = self._workers.pop(key, None) or self._new()
        running = [other for other in self._workers.values() if other.runs]
        if not process.runs and len(running) >= (self._room or max(2, len(running) + workers_that_fit())):
            running[0].stop()  # the one that was idle for longest
        self._workers[key] = process
        return process

    def _stop_others(self, policy: Policy) -> bool:
        """Whether any were running."""
        mine = self._worker(policy)
        others = [process for process in self._workers.values() if process is not mine and process.runs]
        stop_all(others)
        return bool(others)

    def _new(self) -> WorkerProcess:
        setting = Setting(source=self.source, device=self.device, log=self.log, memory_mib=self.memory_mib)
        return WorkerProcess(setting)
