"""Interface between searching and measuring; the implementation is this machine, or a recording of a machine."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

from amptune.errors import NothingFeasibleError
from amptune.hardware.cuda_driver import gpu_count
from amptune.measure.bench.stillness import ProcessIdentity
from amptune.measure.results.half_effects import Half, ModuleTrace, Sensitivity
from amptune.measure.results.loop_timing import LoaderTrial
from amptune.measure.results.outcome import Effort, Failure, Measurement, Outcome
from amptune.measure.results.step_profile import StepProfile
from amptune.measure.results.subject import Prepared
from amptune.measure.results.training_runs import LossCurve, Parity, Reference
from amptune.measure.workers import worker
from amptune.measure.workers.cpu_share import CORES_PER_GRAPH, cores, graphs_at_once
from amptune.measure.workers.other_programs import OtherPrograms
from amptune.measure.workers.processes import START_LIMIT_S, Pending, WorkerProcess, stop_all, workers_that_fit
from amptune.measure.workers.setting import Setting
from amptune.measure.workers.source import Source
from amptune.policy.setting_effects import process_of
from amptune.policy.settings import STOCK, Policy

__all__ = ["Evaluator", "WorkerEvaluator"]

T = TypeVar("T")


class Evaluator(Protocol):
    """The interface that the search uses to measure policies on a machine."""

    def prepare(self, limit_s: float) -> Prepared:
        """Returns the hardware and the workload to measure, within `limit_s` seconds.

        Raises `TargetError` or `UserCodeError` for mistakes of the user, `NothingFeasibleError` if the worker failed.
        """
        ...

    def launch(self, policies: Sequence[Policy]) -> None:
        """Starts a fresh process for each policy; the policy is measured in it until the next launch.

        Processes that compile go on; all others end. One that has not built the workload in time begins anew in its
        first trial's time.
        """
        ...

    def build_ahead(self, count: int) -> None:
        """Starts processes that build the workload now, so that they can compile sooner; returns at once."""
        ...

    @property
    def graphs_at_once(self) -> int:
        """Number of graphs that can compile while others are measured; 0 if compiling would slow what is measured."""
        ...

    def begin_compiling(self, policy: Policy, limit_s: float) -> None:
        """Compiles a policy in a process of its own, where it is measured later; returns at once."""
        ...

    def stop_compiling(self, policy: Policy) -> None:
        """Ends the process that compiles a policy."""
        ...

    def compiled(self, wait_s: float = 0.0) -> Mapping[Policy, float | Failure]:
        """Returns the seconds that each graph took, or its failure, if it came since the last call.

        Waits up to `wait_s` seconds if none has come.
        """
        ...

    @property
    def compiling(self) -> Collection[Policy]:
        """The policies whose graphs are compiled now."""
        ...

    def measure(self, policy: Policy, effort: Effort) -> Outcome: ...

    def measure_alone(self, policy: Policy, effort: Effort) -> Outcome:
        """Measures the policy while no other worker uses the device's memory."""
        ...

    def judge(self, policy: Policy, fp32: Policy, seconds: float, limit_s: float) -> Parity | Failure:
        """Compares training under a policy with training in the user's FP32.

        The first call makes the reference in about `seconds`, and later calls reuse it. If it cannot be made, every
        call returns that failure. `limit_s` limits making the reference and the judgement, each.
        """
        ...

    def trace(self, policy: Policy, fp32: Policy, limit_s: float) -> tuple[ModuleTrace, ...] | Failure:
        """Traces one step under a policy module by module, to find where numbers go wrong."""
        ...

    def sense(self, policy: Policy, dtypes: tuple[Half, ...], limit_s: float) -> Sensitivity | Failure:
        """Measures half precision on each module alone, in the policy's memory format and FP32 math."""
        ...

    def profile(self, policy: Policy, limit_s: float) -> StepProfile | Failure:
        """Profiles a step while no other worker runs on the device."""
        ...

    def try_loaders(self, policy: Policy, seconds: float) -> tuple[LoaderTrial, ...] | Failure:
        """Times steps of the user's loop with other settings of its DataLoader, for about so many seconds."""
        ...

    def train_long(self, policy: Policy, steps: int, seed: int, seconds: float) -> LossCurve | Failure:
        """Trains from the initial weights in the user's loop for so many steps; fewer if the seconds are over before.

        Data and random numbers follow from `seed`: they are the same under every policy.
        """
        ...

    def close(self) -> None: ...


@dataclass
class WorkerEvaluator(AbstractContextManager["WorkerEvaluator"]):
    """An evaluator on this machine that measures in worker processes.

    While searching there are at most four, and one for each graph that compiled in the background: one for each
    combination of `cudnn.benchmark` and compiling or not. PyTorch caches cuDNN's execution plans by shape, dtype and
    layout but not by that flag: in one process, the setting that meets a shape first would decide for both
    (aten/src/ATen/native/cudnn/Conv_v8.cpp). The workers never measure at the same time, and those that compile stand
    still while a block of steps is timed. Each frees its device memory after every trial, except CUDA graphs of a
    moderate size. `memory_mib` limits the device memory of each worker; `artifacts` is a folder for what is compiled.
    Steps are timed over so many `ranks`; nothing compiles beside them, since all wait for a rank that stands still.
    """

    source: Source
    device: str | None
    log: Path
    memory_mib: float | None = None
    artifacts: Path | None = None
    ranks: int = 1
    _workers: dict[Policy | tuple[bool, ...], WorkerProcess] = field(default_factory=dict)
    _graphs: dict[Policy, Pending[Outcome | None]] = field(default_factory=dict)
    _built: list[WorkerProcess] = field(default_factory=list)
    _has_gpu: bool = False
    _room: int = 0
    _batches: int | None = None
    _reference: Reference | Failure | None = None
    _others: OtherPrograms = field(default_factory=OtherPrograms)
    _scratch: tempfile.TemporaryDirectory[str] | None = None

    def __post_init__(self) -> None:
        """Makes the folder for what a script writes: its processes may be killed, and leave it behind."""
        if self.source.is_script:
            self._scratch = tempfile.TemporaryDirectory(prefix="amptune-scripts-", ignore_cleanup_errors=True)
            self.source = replace(self.source, scratch=Path(self._scratch.name))

    def prepare(self, limit_s: float) -> Prepared:
        answer = self._worker(STOCK).call(limit_s, worker.prepare)
        if isinstance(answer, Failure):
            raise NothingFeasibleError(f"the workload could not be built and run for one step: {answer}")
        self._has_gpu, self._batches = answer.hardware.gpu is not None, answer.batches
        if self._has_gpu:
            return answer
        stop_all(self._built)  # nothing compiles in the background
        self._built.clear()
        return answer.beside(self._others.busy_cores(), cores())

    def launch(self, policies: Sequence[Policy]) -> None:
        self._room = max(2, workers_that_fit(self.ranks))
        self._graphs = {policy: graph for policy, graph in self._graphs.items() if policy not in policies}
        ended = [key for key in self._workers if key not in self._graphs]
        stop_all([*map(self._workers.pop, ended), *self._built])
        self._built.clear()
        self._workers |= {policy: self._new() for policy in policies}
        first = list(dict.fromkeys(policies))[: self._room]
        each = (len(first), self._batches)
        for pending in [self._workers[one].begin(START_LIMIT_S, worker.get_ready, one, *each) for one in first]:
            pending.answer()  # a failure is reported again by the first measurement

    def build_ahead(self, count: int) -> None:
        if self.ranks > 1 or self.device == "cpu" or gpu_count() == 0:
            return  # nothing compiles in the background there
        for _ in range(min(count, cores() // CORES_PER_GRAPH)):
            process = self._new()
            process.begin(None, worker.get_ready, STOCK, 1 + graphs_at_once())  # the first builds beside them
            process.begin(None, worker.import_compiler)
            self._built.append(process)

    @property
    def graphs_at_once(self) -> int:
        return min(graphs_at_once(), workers_that_fit()) if self._has_gpu and self.ranks == 1 else 0

    def begin_compiling(self, policy: Policy, limit_s: float) -> None:
        if policy in self._workers:
            self._workers.pop(policy).stop()
        process = self._built.pop(0) if self._built else self._new()
        self._workers[policy] = process
        # the first is the likeliest, and the fewer compile, the more cores each has for its kernels
        self._graphs[policy] = process.begin(limit_s, worker.get_ready, policy, len(self._graphs) + 1)

    def stop_compiling(self, policy: Policy) -> None:
        if self._graphs.pop(policy, None) is not None:
            self._workers.pop(policy).stop()

    def compiled(self, wait_s: float = 0.0) -> Mapping[Policy, float | Failure]:
        if wait_s > 0 and self._graphs:
            Pending.wait_for_one(self._graphs.values(), wait_s)
        found = {one: _seconds(graph.answer()) for one, graph in self._graphs.items() if graph.is_over}
        self._graphs = {policy: graph for policy, graph in self._graphs.items() if policy not in found}
        return found

    @property
    def compiling(self) -> Collection[Policy]:
        return self._graphs.keys()

    def measure(self, policy: Policy, effort: Effort) -> Outcome:
        measure = lambda left_s: self._measure(policy, replace(effort, time_limit_s=left_s))  # noqa: E731
        return self._with_room(policy, effort.time_limit_s, measure)

    def measure_alone(self, policy: Policy, effort: Effort) -> Outcome:
        self._stop_others(policy)
        return self._measure(policy, effort)

    def judge(self, policy: Policy, fp32: Policy, seconds: float, limit_s: float) -> Parity | Failure:
        if self._reference is None:
            refer = lambda left_s: self._worker(fp32).call(left_s, worker.refer, fp32, seconds)  # noqa: E731
            self._reference = self._with_room(fp32, limit_s, refer)
        if isinstance(self._reference, Failure):
            return self._reference
        reference = self._reference

        def parity(left_s: float) -> Parity | Failure:
            found = self._worker(policy).call(left_s, worker.judge, policy, reference, left_s)
            if isinstance(found, Parity) and found.failure is not None and found.failure.kind == "oom":
                return found.failure
            return found

        found = self._with_room(policy, limit_s, parity)
        return Parity(failure=found) if isinstance(found, Failure) else found

    def trace(self, policy: Policy, fp32: Policy, limit_s: float) -> tuple[ModuleTrace, ...] | Failure:
        return self._worker(policy).call(limit_s, worker.trace, policy, fp32)

    def sense(self, policy: Policy, dtypes: tuple[Half, ...], limit_s: float) -> Sensitivity | Failure:
        return self._worker(policy).call(limit_s, worker.sense, policy, dtypes)

    def profile(self, policy: Policy, limit_s: float) -> StepProfile | Failure:
        self._stop_others(policy)
        return self._worker(policy).call(limit_s, worker.profile, policy)

    def try_loaders(self, policy: Policy, seconds: float) -> tuple[LoaderTrial, ...] | Failure:
        limit_s = seconds + START_LIMIT_S  # it ends by itself, but for what starting processes takes
        return self._worker(policy).call(limit_s, worker.try_loaders, policy, seconds)

    def train_long(self, policy: Policy, steps: int, seed: int, seconds: float) -> LossCurve | Failure:
        limit_s = seconds + START_LIMIT_S  # training ends by itself; evaluating may take a while longer

        def train(left_s: float) -> LossCurve | Failure:
            return self._worker(policy).call(left_s, worker.train_long, policy, steps, seed, seconds)

        return self._with_room(policy, limit_s, train)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._graphs.clear()
        stop_all([*self._workers.values(), *self._built])
        self._workers.clear()
        self._built.clear()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _with_room(self, policy: Policy, limit_s: float, ask: Callable[[float], T | Failure]) -> T | Failure:
        """Asks for an answer within `limit_s`, and if memory was short again with no other worker running, in the rest.

        Training will have what these took.
        """
        until_s = time.monotonic() + limit_s
        answer = ask(limit_s)
        is_short = isinstance(answer, Failure) and answer.kind == "oom"
        if not is_short or not self._stop_others(policy) or (left_s := until_s - time.monotonic()) <= 0:
            return answer
        return ask(left_s)

    def _measure(self, policy: Policy, effort: Effort) -> Outcome:
        process, effort = self._worker(policy), replace(effort, batches=self._batches)
        beside = self._beside(process)
        reply = process.call(effort.time_limit_s, worker.measure, policy, effort, beside)
        if isinstance(reply, Failure):
            return reply
        if reply.broken:
            process.stop()
        return reply.outcome

    def _beside(self, process: WorkerProcess) -> tuple[ProcessIdentity, ...]:
        """Returns the processes that may compile or build while this one measures."""
        others = [*(graph.process for graph in self._graphs.values()), *self._built]
        return tuple(filter(None, (other.identity for other in others if other is not process)))

    def _worker(self, policy: Policy) -> WorkerProcess:
        """Returns the worker launched for the policy, otherwise the one of its kind."""
        key = policy if policy in self._workers else process_of(policy)
        process = self._workers.pop(key, None) or self._new()
        running = [other for one, other in self._workers.items() if other.runs and one not in self._graphs]
        if not process.runs and len(running) >= (self._room or max(2, len(running) + workers_that_fit(self.ranks))):
            running[0].stop()  # the longest idle one
        self._workers[key] = process
        return process

    def _stop_others(self, policy: Policy) -> bool:
        """Stops all other workers; returns True if any was running."""
        mine = self._worker(policy)
        others = [one for one in (*self._workers.values(), *self._built) if one is not mine and one.runs]
        self._graphs = {one: graph for one, graph in self._graphs.items() if graph.process is mine}
        self._built.clear()
        stop_all(others)
        return bool(others)

    def _new(self) -> WorkerProcess:
        own = Setting(source=self.source, device=self.device, log=self.log, memory_mib=self.memory_mib)
        return WorkerProcess(replace(own, artifacts=self.artifacts, ranks=self.ranks))


def _seconds(outcome: Outcome | None) -> float | Failure:
    """Returns what compiling a graph took, or its failure; 0 if there was nothing to compile."""
    return outcome.startup_s if isinstance(outcome, Measurement) else outcome or 0.0
