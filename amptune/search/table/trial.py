"""A trial: one policy and its outcome; and the error to raise if the baseline's trial failed."""

from __future__ import annotations

from dataclasses import dataclass

from amptune.errors import NothingFeasibleError, TargetError, UserCodeError, told
from amptune.measure.results.outcome import Failure, Measurement, Outcome
from amptune.policy.setting_effects import process_of
from amptune.policy.settings import Policy
from amptune.search.table.row import Row

__all__ = ["Trial", "error_of_baseline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One policy's trial; `number` counts from 0 within a study, `seconds` is its cost, also if it failed.

    `run` names its tuning run, `moment_s` is its end by the run's clock.
    """

    number: int
    policy: Policy
    outcome: Outcome
    seconds: float
    run: str = ""
    moment_s: float = 0.0

    @property
    def row(self) -> Row:
        """The trial as a row of the table. Trials of one kind share a process, as `WorkerEvaluator` starts them."""
        kind = "search " + "".join(f"{is_set:d}" for is_set in process_of(self.policy))
        return Row(policy=self.policy, outcome=self.outcome, run=self.run, launch=kind, moment_s=self.moment_s)

    @property
    def samples_per_s(self) -> float:
        """Samples per second; 0 if the trial failed, which is worse than any policy that runs."""
        return self.outcome.samples_per_s if isinstance(self.outcome, Measurement) else 0.0

    @property
    def again_s(self) -> float:
        """The seconds it would cost once more, with its graphs in a cache. What is recorded is recorded anew."""
        is_recorded = self.policy.cuda_graphs and self.policy.compile == "off"
        startup_s = self.outcome.startup_s if isinstance(self.outcome, Measurement) and not is_recorded else 0.0
        return max(0.0, self.seconds - startup_s)


def error_of_baseline(baseline: Policy, failure: Failure) -> Exception:
    """Returns the user's own error if that made the baseline fail, else an error that says the baseline fails."""
    if failure.exception == "TargetError":
        return TargetError(failure.message)
    if failure.kind == "error":
        place = f" ({failure.where})" if failure.where else ""
        kind = failure.exception or "Exception"
        return UserCodeError(
            f"the training step raised {told(kind, failure.message)}{place}", kind=kind, where=failure.where
        )
    hint = "; name a smaller batch with --batch-size, or another --baseline" if failure.kind == "oom" else ""
    return NothingFeasibleError(f"the baseline ({baseline}) fails, so nothing can be held against it: {failure}{hint}")
