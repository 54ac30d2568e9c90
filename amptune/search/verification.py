"""Verifies a policy's claim: measures the policy and its baseline again on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from amptune.errors import ClaimError, NothingFeasibleError, ObjectiveError
from amptune.hardware.detect import probe
from amptune.hardware.machine import Hardware
from amptune.measure.bench.readings import noticed
from amptune.measure.evaluator import Evaluator, WorkerEvaluator
from amptune.measure.results.outcome import Failure
from amptune.measure.results.subject import Prepared
from amptune.policy.findings import Finding
from amptune.policy.hardware_match import require_valid
from amptune.policy.policy_file import PolicyFile
from amptune.policy.serialization import policy_from_dict
from amptune.policy.settings import STOCK, Policy
from amptune.search.events import Observer
from amptune.search.narrowing import Narrowing
from amptune.search.plan.budget import Budget
from amptune.search.request import source_of
from amptune.search.table.effects import machine_of
from amptune.search.table.gains import use_of
from amptune.search.table.objective import THROUGHPUT, Objective
from amptune.search.table.ratio import Ratio
from amptune.search.table.row import Row
from amptune.search.table.verdict import Contender, Verdict, verdict_of
from amptune.workload.workload import Workload

__all__ = ["MARGIN", "Claim", "Verification", "claim_of", "verify", "verify_with"]

# The new interval has to reach the claimed speed-up less this share of it.
MARGIN = 0.02
# If a claim fails, the policy's or the baseline's step time is named if it moved by more than this share.
MOVED = 0.03
# An interval wider than this (half its width, relative) does not confirm a claim by reaching it.
TELLING = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The claim of a policy file: its speed as a multiple of the baseline's, and the ms per step of both.

    A policy tuned for memory or energy also claims a `gain` in that figure: the baseline's over its own.
    """

    policy: Policy
    baseline: Policy
    speedup: float
    step_ms: float | None
    baseline_ms: float | None
    objective: Objective = THROUGHPUT
    gain: float | None = None

    @property
    def needed(self) -> float:
        """The speed-up that an interval has to reach for the claim to hold."""
        return (1 - MARGIN) * self.speedup

    def is_met_by(self, speedup: Ratio, gain: Ratio | None) -> bool:
        """Returns True if both intervals reach what is claimed less 2 %."""
        return all(ratio is not None and ratio.high >= needed for ratio, needed in self._beside(speedup, gain))

    def is_clear(self, speedup: Ratio, gain: Ratio | None) -> bool:
        """Returns True if each interval is entirely on one side of what is needed."""
        known = [(ratio, needed) for ratio, needed in self._beside(speedup, gain) if ratio is not None]
        return all(not r.low < needed <= r.high for r, needed in known)

    def is_left_open_by(self, speedup: Ratio, gain: Ratio | None) -> bool:
        """Returns True if an interval reaches what is needed but is so wide that it also misses it by far."""
        known = [(ratio, needed) for ratio, needed in self._beside(speedup, gain) if ratio is not None]
        return any(r.low < needed <= r.high and not r.half_width <= TELLING for r, needed in known)

    def _beside(self, speedup: Ratio, gain: Ratio | None) -> list[tuple[Ratio | None, float]]:
        """Returns each measured ratio with the ratio that is needed."""
        return [(speedup, self.needed)] + ([] if self.gain is None else [(gain, (1 - MARGIN) * self.gain)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The claim and what was measured now; `speedup` is None if the policy failed."""

    claim: Claim
    policy: Contender
    baseline: Contender
    speedup: Ratio | None
    findings: tuple[Finding, ...]
    hardware: Hardware
    seconds: float
    gain: Ratio | None = None

    @property
    def holds(self) -> bool:
        """True if the new intervals reach what is claimed less 2 %, and are narrow enough to confirm it."""
        return self.speedup is not None and self.claim.is_met_by(self.speedup, self.gain) and not self.undecided

    @property
    def undecided(self) -> bool:
        """True if the claim may be met, and may be missed by far."""
        speedup, gain = self.speedup, self.gain
        met = speedup is not None and self.claim.is_met_by(speedup, gain)
        return met and speedup is not None and self.claim.is_left_open_by(speedup, gain)


def claim_of(policy_file: PolicyFile) -> Claim:
    """Returns the claim to verify. Raises `ClaimError` if the file claims nothing."""
    evidence: Any = policy_file.evidence
    if "speedup" not in evidence:
        name = f"policy {policy_file.name!r}" if policy_file.name else "this policy"
        raise ClaimError(f"{name} claims nothing: there is no evidence.speedup in its file; `amptune tune` writes one")
    baseline = evidence.get("baseline", {})
    try:
        return Claim(
            policy=policy_file.policy,
            baseline=policy_from_dict(baseline["policy"]) if "policy" in baseline else STOCK,
            speedup=evidence["speedup"],
            step_ms=evidence.get("step_ms"),
            baseline_ms=float(baseline["step_ms"]) if "step_ms" in baseline else None,
            objective=Objective(evidence.get("objective", "throughput"), evidence.get("least_speed", 1.0)),
            gain=evidence.get("gain"),
        )
    except ObjectiveError as error:
        raise ClaimError(f"evidence.objective is not what `amptune tune` writes: {error}") from error
    except (TypeError, ValueError) as error:
        raise ClaimError(f"evidence.baseline is not what `amptune tune` writes: {error}") from error


def verify(
    policy_file: PolicyFile,
    workload: Workload | str,
    *,
    budget: Budget,
    device: str | None = None,
    observer: Observer | None = None,
    evaluator: Evaluator | None = None,
) -> Verification:
    """Measures a policy's claim again, on this machine unless an `evaluator` is given: `amptune verify` as a function.

    Raises `ClaimError` if the file claims nothing, `HardwareMismatchError` on another machine,
    `NothingFeasibleError` if the baseline fails, and any error that the workload raises.
    """
    claim_of(policy_file)
    if evaluator is None:  # checked before a model is built that may be far too large here
        require_valid(policy_file, dict(probe(device).labels))
    source = source_of(workload)
    with (
        tempfile.TemporaryDirectory(prefix="amptune-") as folder,
        closing(evaluator or WorkerEvaluator(source, device, Path(folder) / "workers.log")) as machine,
    ):
        return verify_with(machine, policy_file, budget, observer or (lambda _: None))


def verify_with(evaluator: Evaluator, policy_file: PolicyFile, budget: Budget, observer: Observer) -> Verification:
    """Verifies on any evaluator: policy and baseline in turn, until the claim is known to hold or not."""
    claim = claim_of(policy_file)
    prepared = evaluator.prepare(budget.left_to_prepare_s)
    labels = {**dict(prepared.hardware.labels), "model": prepared.subject.model_digest}
    policy, baseline = (_sized(each, prepared) for each in (claim.policy, claim.baseline))
    rows = _measured(evaluator, claim, (baseline, policy), prepared, budget, observer)
    verdict = verdict_of(rows, baseline, machine_of(prepared.hardware.device), claim.objective)
    if verdict is None:
        raise _not_measured(rows, claim, baseline)
    found_policy = verdict.contender_of(policy)
    if found_policy is None:
        raise NothingFeasibleError(f"{claim.policy} could not be measured within the budget; give more with --budget")
    found = Verification(
        claim=claim,
        policy=found_policy,
        baseline=verdict.baseline,
        speedup=found_policy.vs_baseline,
        findings=(),
        hardware=prepared.hardware,
        seconds=budget.spent_s,
        gain=found_policy.gain if claim.gain is not None else None,
    )
    changed = require_valid(policy_file, labels)
    disturbed = noticed(row.outcome for row in rows)
    return replace(found, findings=(_answer(found), *_moved(found), *changed, *disturbed))


def _measured(
    evaluator: Evaluator,
    claim: Claim,
    pair: tuple[Policy, Policy],
    prepared: Prepared,
    budget: Budget,
    observer: Observer,
) -> list[Row]:
    """Returns rows of baseline and policy, measured in turn until the claim is known to hold or not."""
    rows: list[Row] = []
    baseline, policy = pair
    narrowing = Narrowing(
        evaluator=evaluator,
        budget=budget,
        observer=observer,
        run="verify",
        verdict=lambda: verdict_of(rows, baseline, machine_of(prepared.hardware.device), claim.objective),
        keep=rows.append,
        stage="verify",
        objective=claim.objective,
        start_s=prepared.start_s,
    )
    narrowing.round_of(tuple(dict.fromkeys(pair)))

    def enough(verdict: Verdict) -> bool:
        found = verdict.contender_of(policy)
        known = found is None or found.vs_baseline is None or claim.is_clear(found.vs_baseline, found.gain)
        return policy == baseline or (known and len(rows) > len(pair))

    narrowing.until_known(enough)
    return rows


def _not_measured(rows: Sequence[Row], claim: Claim, baseline: Policy) -> NothingFeasibleError:
    failure = next((row.outcome for row in rows if row.policy == baseline and isinstance(row.outcome, Failure)), None)
    if failure is not None:
        return NothingFeasibleError(f"the baseline ({claim.baseline}) fails here: {failure}")
    return NothingFeasibleError(f"{claim.baseline} could not be measured within the budget; give more with --budget")


def _sized(policy: Policy, prepared: Prepared) -> Policy:
    return replace(policy, batch_size=policy.batch_size or prepared.subject.batch_size)


def _answer(found: Verification) -> Finding:
    """Returns the verdict as a finding, with the two figures."""
    claimed = f"{found.claim.speedup:g}× claimed"
    if found.speedup is None:
        return Finding(code="policy-fails", message=f"the policy fails here: {found.policy.failure}; {claimed}")
    figures = {"claimed": found.claim.speedup, "measured": found.speedup.value, "margin": MARGIN}
    if found.policy.policy == found.baseline.policy:
        return Finding(
            code="holds", message="the policy is the baseline: nothing is claimed, and it runs", figures=figures
        )
    gain = _gain_in_words(found)
    if found.holds:
        message = f"the claim holds: {found.speedup} measured here, {claimed}{gain}"
        return Finding(code="holds", message=message, figures=figures)
    if found.undecided:
        more = "give more with --budget, or a quieter machine"
        message = f"undecided: {found.speedup} measured here, {claimed}{gain}; {more}"
        return Finding(code="undecided", message=message, figures=figures)
    missed = f"; the interval does not reach {found.claim.needed:.2f}×, the claim less {MARGIN:.0%}"
    message = (
        f"the claim does not hold: {found.speedup} measured here, {claimed}"
        f"{missed if found.speedup.high < found.claim.needed else ''}{gain}"
    )
    return Finding(code="does-not-hold", message=message, figures=figures)


def _gain_in_words(found: Verification) -> str:
    """Returns the gain in words; "" for a claim of speed alone."""
    if found.gain is None or found.claim.gain is None:
        return ""
    now, claimed = use_of(found.claim.objective, found.gain), 1 / found.claim.gain
    return f"; it {now}, {claimed:.3g} times claimed"


def _moved(found: Verification) -> Iterator[Finding]:
    """Yields a finding for each of the two whose step time has changed, to tell which one to look at."""
    before_and_now = (
        ("policy", found.claim.step_ms, found.policy.step_ms),
        ("baseline", found.claim.baseline_ms, found.baseline.step_ms),
    )
    for who, before_ms, now_ms in before_and_now:
        if before_ms and now_ms and abs(now_ms / before_ms - 1) > MOVED:
            longer = now_ms / before_ms
            change = f"{longer:.3g} times as long" if longer > 1 else f"{1 / longer:.3g} times as fast"
            yield Finding(
                code=f"{who}-moved",
                message=f"the {who}'s step takes {now_ms:.4g} ms here, {before_ms:.4g} ms when it was tuned: {change}",
                figures={"tuned_step_ms": before_ms, "step_ms": now_ms},
            )
