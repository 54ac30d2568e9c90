"""Verifies a policy's numerics: trains for long in FP32 and under the policy, seed by seed, in the user's own loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from amptune.hardware.detect import probe
from amptune.measure.evaluator import Evaluator, WorkerEvaluator
from amptune.measure.numerics.long_comparison import LEAST_SEEDS, CurvePair
from amptune.measure.results.outcome import Failure
from amptune.measure.results.training_runs import LossCurve
from amptune.policy.hardware_match import require_valid
from amptune.policy.policy_file import PolicyFile
from amptune.policy.settings import Policy
from amptune.search.claim import baseline_of
from amptune.search.events import CurveTrained, Observer, WorkloadBuilt
from amptune.search.gate.judgements import fp32_of
from amptune.search.gate.long_look import LongLook
from amptune.search.pipeline import locked
from amptune.search.plan.budget import Budget
from amptune.search.request import source_of
from amptune.search.table.trial import error_of_baseline
from amptune.workload.workload import Workload

__all__ = ["verify_numerics"]

SPENT = "the budget was spent; give more with --budget, or fewer --steps"


def verify_numerics(
    policy_file: PolicyFile,
    workload: Workload | str,
    *,
    steps: int,
    seeds: int,
    budget: Budget,
    curves: Path,
    arguments: Sequence[str] = (),
    device: str | None = None,
    observer: Observer | None = None,
    evaluator: Evaluator | None = None,
) -> LongLook:
    """Looks long at a policy, on this machine unless an `evaluator` is given: `amptune verify --numerics`.

    `arguments` are those of a target's script. Each curve is written to the file `curves` as it ends, one JSON line
    each; the workers' log is beside it. Ctrl-C ends the look, which then holds what there is. Raises
    `HardwareMismatchError` on another machine, the workload's own errors, `NothingFeasibleError` if training in FP32
    fails, and `StudyError` while another amptune measures there.
    """
    if evaluator is None:  # checked before a model is built that may be far too large here
        require_valid(policy_file, dict(probe(device).labels))
    source = source_of(workload, arguments)
    log = curves.with_name("workers.log")
    with locked(curves.parent, device), closing(evaluator or WorkerEvaluator(source, device, log)) as machine:
        training = _LongTraining(machine, policy_file, steps, seeds, budget, observer or (lambda _: None), curves)
        return training.look()


class _StoppedError(Exception):
    """The long training ends before all seeds are trained; the message says why."""


@dataclass
class _LongTraining:
    evaluator: Evaluator
    policy_file: PolicyFile
    steps: int
    seeds: int
    budget: Budget
    observer: Observer
    curves: Path
    pairs: list[CurvePair] = field(default_factory=list)
    failure: Failure | None = None
    _fewest: int = 0
    _runs: int = 0
    _longest_s: float = 0.0

    def look(self) -> LongLook:
        prepared = self.evaluator.prepare(self.budget.left_to_prepare_s)
        self.observer(WorkloadBuilt(prepared=prepared, left_s=self.budget.left_s))
        changed = require_valid(
            self.policy_file, {**dict(prepared.hardware.labels), "model": prepared.subject.model_digest}
        )
        stopped, interrupted = None, False
        self.curves.write_text("", encoding="utf-8")
        try:
            self._train()
        except _StoppedError as error:
            stopped = str(error)
        except KeyboardInterrupt:
            stopped, interrupted = "it was interrupted", True
        return LongLook(
            policy=self.policy_file.policy,
            fp32=self._fp32,
            name=prepared.subject.name,
            hardware=prepared.hardware,
            steps=self.steps,
            seeds=self.seeds,
            pairs=tuple(self.pairs),
            tolerance=prepared.subject.tolerance,
            failure=self.failure,
            stopped=stopped,
            interrupted=interrupted,
            changed=changed,
            seconds=self.budget.spent_s,
        )

    @property
    def _fp32(self) -> Policy:
        return fp32_of(baseline_of(self.policy_file))

    def _train(self) -> None:
        """Trains the seeds, each in FP32 and under the policy, until all are done or the time is over."""
        self._fewest = self.steps
        for seed in range(self.seeds):
            fp32 = self._curve(self._fp32, seed)
            if isinstance(fp32, Failure):
                raise error_of_baseline(self._fp32, fp32)
            found = self._curve(self.policy_file.policy, seed)
            if isinstance(found, Failure):
                self.failure = found
                return
            self.pairs.append(CurvePair(seed=seed, fp32=fp32, policy=found))
        if self._fewest < self.steps:
            raise _StoppedError(SPENT)

    def _curve(self, policy: Policy, seed: int) -> LossCurve | Failure:
        """Returns one curve. Until there are enough seeds for an answer, each run gets an equal share of the time.

        No curve is longer than the shortest so far: a run ends early if its time is over.
        """
        rest, left_s = 2 * LEAST_SEEDS - self._runs, self.budget.left_s
        whole_pair_s = self._longest_s * (2 - self._runs % 2)
        if left_s <= 0 or (rest <= 0 and left_s < whole_pair_s):
            raise _StoppedError(SPENT)
        found = self.evaluator.train_long(policy, self._fewest, seed, left_s / max(1, rest))
        self._runs += 1
        self._longest_s = max(self._longest_s, left_s - self.budget.left_s)
        if isinstance(found, LossCurve):
            self._fewest = min(self._fewest, len(found.losses))
            self._keep(policy, seed, found)
        return found

    def _keep(self, policy: Policy, seed: int, curve: LossCurve) -> None:
        kind = "fp32" if self._runs % 2 else "policy"
        line = {"run": kind, "policy": str(policy), "seed": seed, "evaluated": curve.evaluated, "losses": curve.losses}
        with self.curves.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        steps, last = len(curve.losses), curve.losses[-1]
        self.observer(
            CurveTrained(
                policy=policy, seed=seed, seeds=self.seeds, steps=steps, last_loss=last, left_s=self.budget.left_s
            )
        )
