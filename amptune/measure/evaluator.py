"""The seam between searching and measuring: behind it stands this machine, or a recording of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from amptune.errors import NothingFeasibleError
from amptune.measure import worker
from amptune.measure.outcome import Effort, Failure, Outcome
from amptune.measure.processes import WorkerProcess
from amptune.measure.subject import Prepared
from amptune.measure.worker import Setting, Source
from amptune.policy.settings import Policy

__all__ = ["Evaluator", "WorkerEvaluator"]


class Evaluator(Protocol):
    """What the search needs of a machine."""

    def prepare(self, limit_s: float) -> Prepared:
        """What is to be measured, and on what, within `limit_s` seconds.

        Raises the user's mistakes (`TargetError`, `UserCodeError`), `NothingFeasibleError` if the worker died or hung.
        """
        ...

    def measure(self, policy: Policy, effort: Effort) -> Outcome: ...

    def close(self) -> None: ...


@dataclass
class WorkerEvaluator:
    """This machine, measured in worker processes: one for each `cudnn.benchmark` setting.

    PyTorch caches cuDNN's execution plans by shape, dtype and layout but not by that flag, so whichever
    setting meets a shape first decides for both (aten/src/ATen/native/cudnn/Conv_v8.cpp). The workers never
    measure at the same time, and each hands its device memory back after every trial.
    """

    source: Source
    device: str | None
    log: Path
    _arms: dict[bool, WorkerProcess] = field(default_factory=dict)

    def prepare(self, limit_s: float) -> Prepared:
        answer = self._arm(False).call(limit_s, worker.prepare)
        if isinstance(answer, Failure):
            raise NothingFeasibleError(f"the workload could not be built and run for one step: {answer}")
        return answer

    def measure(self, policy: Policy, effort: Effort) -> Outcome:
        arm = self._arm(policy.cudnn_benchmark)
        reply = arm.call(effort.time_limit_s, worker.measure, policy, effort)
        if isinstance(reply, Failure):
            return reply
        if reply.broken:
            arm.stop()
        return reply.outcome

    def close(self) -> None:
        for arm in self._arms.values():
            arm.stop()
        self._arms.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _arm(self, benchmark: bool) -> WorkerProcess:
        if benchmark not in self._arms:
            self._arms[benchmark] = WorkerProcess(Setting(source=self.source, device=self.device, log=self.log))
        return self._arms[benchmark]
