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

SPENT, STOPPED = "the budget was spent; give more with --budget, or fewer --steps", "it was interrupted"


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
    source, tell = source_of(workload, arguments), observer or (lambda _: None)
    log = curves.with_name("workers.log")
    with locked(curves.parent, device), closing(evaluator or WorkerEvaluator(source, device, log)) as machine:
        prepared = machine.prepare(budget.left_to_prepare_s)
        tell(WorkloadBuilt(prepared=prepared, left_s=budget.left_s))
        labels = prepared.labels
        changed = require_valid(policy_file, labels)
        curves.write_text("", encoding="utf-8")
        training = _LongTraining(machine, budget, tell, curves, seeds, fewest=steps)
        fp32 = fp32_of(baseline_of(policy_file))
        stopped = training.run(policy_file.policy, fp32)
        return LongLook(
            policy=policy_file.policy,
            name=prepared.subject.name,
            hardware=prepared.hardware,
            steps=steps,
            seeds=seeds,
            pairs=tuple(training.pairs),
            tolerance=prepared.subject.tolerance,
            failure=training.failure,
            stopped=stopped,
            interrupted=stopped == STOPPED,
            changed=changed,
            seconds=budget.spent_s,
        )


class _OutOfTimeError(Exception):
    """The budget does not last for another run."""


@dataclass
class _LongTraining:
    """Long training with each seed, in FP32 and under the policy; none is longer than the `fewest` steps so far."""

    evaluator: Evaluator
    budget: Budget
    observer: Observer
    curves: Path
    seeds: int
    fewest: int
    pairs: list[CurvePair] = field(default_factory=list)
    failure: Failure | None = None
    _runs: int = 0
    _longest_s: float = 0.0

    def run(self, policy: Policy, fp32: Policy) -> str | None:
        """Trains until all is done or the policy fails; returns in words what ended it before, else None."""
        steps = self.fewest
        try:
            for seed in range(self.seeds):
                reference = self._curve("fp32", fp32, seed)
                if isinstance(reference, Failure):
                    raise error_of_baseline(fp32, reference)
                found = self._curve("policy", policy, seed)
                if isinstance(found, Failure):
                    self.failure = found
                    return None
                self.pairs.append(CurvePair(seed=seed, fp32=reference, policy=found))
        except _OutOfTimeError:
            return SPENT
        except KeyboardInterrupt:
            return STOPPED
        return SPENT if self.fewest < steps else None

    def _curve(self, run: str, policy: Policy, seed: int) -> LossCurve | Failure:
        """Returns one curve. Until there are enough seeds for an answer, each run gets an equal share of the time.

        A run ends early if its time is over. Raises `_OutOfTimeError` if none is left for the rest of a pair.
        """
        rest, left_s = 2 * LEAST_SEEDS - self._runs, self.budget.left_s
        whole_pair_s = self._longest_s * (2 - self._runs % 2)
        if left_s <= 0 or (rest <= 0 and left_s < whole_pair_s):
            raise _OutOfTimeError
        found = self.evaluator.train_long(policy, self.fewest, seed, left_s / max(1, rest))
        self._runs += 1
        self._longest_s = max(self._longest_s, left_s - self.budget.left_s)
        if isinstance(found, LossCurve):
            self.fewest = min(self.fewest, len(found.losses))
            self._keep(run, policy, seed, found)
        return found

    def _keep(self, run: str, policy: Policy, seed: int, curve: LossCurve) -> None:
        line = {"run": run, "policy": str(policy), "seed": seed, "evaluated": curve.evaluated, "losses": curve.losses}
        with self.curves.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        steps, last, left_s = len(curve.losses), curve.losses[-1], self.budget.left_s
        self.observer(
            CurveTrained(policy=policy, seed=seed, seeds=self.seeds, steps=steps, last_loss=last, left_s=left_s)
        )
