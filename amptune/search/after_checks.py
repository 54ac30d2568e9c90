"""After the decision: the speed of a larger batch."""

from __future__ import annotations

from dataclasses import replace

from amptune.measure.results.outcome import Effort, Measurement
from amptune.measure.results.subject import Prepared
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.search.batch_size.batch_sizes import Runner, sizer_for
from amptune.search.decide.decision import Decision
from amptune.search.plan.budget import Budget
from amptune.search.plan.compile_costs import compiled_s

__all__ = ["LOOK", "larger_batch"]

# Twice the batch is reported if it trains this many times as fast, and four times the batch if it gains that again.
WORTH_TELLING = 1.05
# A short measurement of a step.
LOOK = Effort(warmup_s=0.5, measure_s=0.2, min_steps=3)


def larger_batch(runner: Runner, decision: Decision, budget: Budget) -> Finding | None:
    """Returns a finding on the speed of a larger batch under the winner; None if it gains little or is unknown.

    The batch is doubled while there is time, it fits into memory, and the last doubling gained speed. A policy whose
    graph takes longer to compile than there is time is not looked at.
    """
    prepared = Prepared(hardware=decision.hardware, subject=decision.subject, memory_mib=decision.memory_mib)
    sizer = sizer_for(runner, prepared, None, left_s=lambda: budget.left_s)
    policy, own = decision.policy, decision.policy.batch_size or decision.subject.batch_size
    tried = {trial.policy: trial.outcome for trial in decision.trials}
    if sizer is None or compiled_s(policy, tried) > budget.left_s:
        return None
    sizer.learn(decision.trials)
    first = best = _look(runner, replace(policy, batch_size=own), budget)
    while best is not None:
        larger = replace(policy, batch_size=2 * _batch_size(best, policy))
        found = _look(runner, larger, budget) if sizer.may_try(larger) else None
        if found is None or found.samples_per_s < WORTH_TELLING * best.samples_per_s:
            break
        best = found
    if first is None or best is None or best is first:
        return None
    size, gain = _batch_size(best, policy), best.samples_per_s / first.samples_per_s
    before_mib = decision.baseline.peak_memory_mib or 0.0
    freed_mib = before_mib - first.peak_allocated_mib
    freed = f"the policy frees {freed_mib:,.0f} of {before_mib:,.0f} MiB: " if freed_mib > 0 else ""
    return Finding(
        code="larger-batch",
        message=f"{freed}batches of {size} instead of {own} would train {gain:.2f} times as many samples a second, "
        f"with a peak of {best.peak_allocated_mib:,.0f} MiB: --batch-size auto searches that (what training learns "
        "from a larger batch is another question; --global-batch N keeps it as it is)",
        figures={"batch_size": size, "gain": gain, "peak_memory_mib": best.peak_allocated_mib, "freed_mib": freed_mib},
    )


def _batch_size(measured: Measurement, policy: Policy) -> int:
    return measured.samples_per_step // (policy.accumulate * measured.devices)


def _look(runner: Runner, policy: Policy, budget: Budget) -> Measurement | None:
    """Returns a short measurement; None if there is no time for it, or it fails."""
    if budget.left_s < 1:
        return None
    outcome = runner.measure_alone(policy, replace(LOOK, time_limit_s=budget.left_s))
    return outcome if isinstance(outcome, Measurement) else None
