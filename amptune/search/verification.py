"""Verifies a policy's claim: measures the policy and its baseline again on this machine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from amptune.errors import NothingFeasibleError, NotMeasuredError
from amptune.hardware.detect import probe
from amptune.hardware.machine import Hardware
from amptune.measure.bench.readings import noticed
from amptune.measure.evaluator import Evaluator, WorkerEvaluator
from amptune.measure.results.outcome import Failure, Measurement, Outcome
from amptune.measure.results.subject import Prepared
from amptune.policy.findings import Finding
from amptune.policy.hardware_match import require_valid
from amptune.policy.policy_file import PolicyFile
from amptune.policy.settings import Policy
from amptune.search.claim import (
    MARGIN,
    Answer,
    Claim,
    Figure,
    Round,
    answer_of,
    claim_of,
    is_missed_by,
    is_settled,
)
from amptune.search.events import ComparisonStarted, Observer
from amptune.search.measuring import RoundMeasurer
from amptune.search.plan.budget import Budget
from amptune.search.request import ranks_of, source_of, workers_log
from amptune.search.table.contenders import PROCESSES, Contender
from amptune.search.table.effects import Machine, machine_of
from amptune.search.table.gains import counted, use_of
from amptune.search.table.ratio import Ratio
from amptune.search.table.row import Row, waits_for_data
from amptune.workload.workload import Workload

__all__ = ["Verification", "verify", "verify_with"]

# At least this share of the rounds is in fresh processes, which differ more than blocks of one.
FRESH_SHARE = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The claim and what was measured now: the figures after each round, none if the policy failed."""

    claim: Claim
    policy: Contender
    baseline: Contender
    rounds: tuple[Round, ...]
    findings: tuple[Finding, ...]
    hardware: Hardware
    seconds: float

    @property
    def answer(self) -> Answer:
        """The answer of the rounds to the claim; "missed" if the policy failed."""
        return answer_of(self.rounds) if self.rounds else "missed"

    @property
    def holds(self) -> bool:
        """True if the claim is met."""
        return self.answer == "met"

    @property
    def speedup(self) -> Ratio | None:
        """The speed of the policy over the baseline's in this sitting; None if the policy failed."""
        return self.rounds[-1][0].here if self.rounds else None

    @property
    def gain(self) -> Ratio | None:
        """The gain by the claim's objective in this sitting; None if none is claimed or it was not measured."""
        return self.rounds[-1][1].here if self.rounds and self.claim.gain is not None else None

    @property
    def open_figures(self) -> list[Figure]:
        """The figures of the claim that the last round does not meet."""
        return [figure for figure in self.rounds[-1] if not figure.is_met]


def verify(
    policy_file: PolicyFile,
    workload: Workload | str,
    *,
    budget: Budget,
    arguments: Sequence[str] = (),
    device: str | None = None,
    observer: Observer | None = None,
    evaluator: Evaluator | None = None,
    ranks: int | None = None,
) -> Verification:
    """Measures a policy's claim again, on this machine unless an `evaluator` is given: `amptune verify` as a function.

    `arguments` are those of a target's script. Steps are timed over so many `ranks`; by default over as many as in the
    file's evidence, if so many GPUs are visible. Raises `ClaimError` for malformed evidence,
    `HardwareMismatchError` on another machine, `NothingFeasibleError` if the baseline fails, `NotMeasuredError` if
    there was no time to measure both, and any error that the workload raises.
    """
    claim_of(policy_file)
    if evaluator is None:  # checked before a model is built that may be far too large here
        require_valid(policy_file, dict(probe(device).labels))
    source = source_of(workload, arguments)
    ranks = ranks or ranks_of(policy_file.evidence.get("devices", 1), device)
    with (
        workers_log() as log,
        closing(evaluator or WorkerEvaluator(source, device, log, ranks=ranks)) as machine,
    ):
        return verify_with(machine, policy_file, budget, observer or (lambda _: None))


def verify_with(evaluator: Evaluator, policy_file: PolicyFile, budget: Budget, observer: Observer) -> Verification:
    """Verifies on any evaluator: policy and baseline in turn, until the claim is met or missed."""
    claim = claim_of(policy_file)
    prepared = evaluator.prepare(budget.left_to_prepare_s)
    labels = prepared.labels
    sized = replace(claim, policy=_sized(claim.policy, prepared), baseline=_sized(claim.baseline, prepared))
    machine = machine_of(prepared.hardware.device)
    rows, rounds = _measured(evaluator, sized, machine, prepared.start_s, budget, observer)
    verdict = sized.verdict(rows, machine)
    if verdict is None:
        raise _not_measured([row.outcome for row in rows if row.policy == sized.baseline], claim)
    policy = verdict.contender_of(sized.policy)
    if policy is None:
        raise _no_time_for(claim.policy)
    found = Verification(
        claim=claim,
        policy=policy,
        baseline=verdict.baseline,
        rounds=() if policy.failure is not None else tuple(rounds),
        findings=(),
        hardware=prepared.hardware,
        seconds=budget.spent_s,
    )
    changed = (*require_valid(policy_file, labels), *_other_devices(policy_file, prepared))
    disturbed = noticed(row.outcome for row in rows)
    return replace(found, findings=(_answer(found), *prepared.noticed, *changed, *disturbed))


def _measured(
    evaluator: Evaluator, claim: Claim, machine: Machine, start_s: float, budget: Budget, observer: Observer
) -> tuple[list[Row], list[Round]]:
    """Returns rows of baseline and policy, and the figures after each round, until these answer the claim.

    What misses the claim is measured again in fresh processes: one that is slow by chance stays so.
    """
    rows: list[Row] = []
    rounds: list[Round] = []
    measurer = RoundMeasurer(
        evaluator=evaluator,
        budget=budget,
        observer=observer,
        run="verify",
        keep=rows.append,
        purpose="verify",
        objective=claim.objective,
    )
    observer(ComparisonStarted(stage="verify", policies=claim.both, left_s=budget.left_s))
    _measure(measurer, claim.both, rows, fresh=True)
    if waits_for_data(rows):  # such rows are left out of a verdict
        measurer.in_loop = False
        _measure(measurer, claim.both, rows, fresh=True)
    while (figures := claim.figures(rows, machine)) is not None:
        rounds.append(figures)
        if any(figure.here is None for figure in figures) or is_settled(rounds):
            break
        turns_s = sum(measurer.costs_s.values())
        has_time = budget.left_s >= max(start_s, measurer.launch_s) + turns_s
        fresh = is_missed_by(figures) or measurer.launches < max(PROCESSES, len(rounds) * FRESH_SHARE)
        if budget.left_s < turns_s or not _measure(measurer, claim.both, rows, fresh=fresh and has_time):
            break
    return rows, rounds


def _measure(measurer: RoundMeasurer, both: Sequence[Policy], rows: Sequence[Row], *, fresh: bool) -> bool:
    """Measures both once; returns False if the budget ended that. The first round is measured whatever is left."""
    measured = [row for row in rows if isinstance(row.outcome, Measurement)]
    steps_ms = {row.policy: row.outcome.mean_ms for row in measured if isinstance(row.outcome, Measurement)}
    until_s = measurer.budget.seconds if measured else math.inf
    return measurer.measure(both, steps_ms, fresh=fresh, until_s=until_s)


def _other_devices(policy_file: PolicyFile, prepared: Prepared) -> Iterator[Finding]:
    claimed, here = policy_file.evidence.get("devices", 1), prepared.devices
    if claimed != here:
        yield Finding(
            code="drift",
            message=f"the claim is of steps on {counted(claimed, 'device')} at once, and these ran on {here}",
            figures={"label": "devices", "tuned": claimed, "here": here},
        )


def _not_measured(outcomes: Sequence[Outcome], claim: Claim) -> NothingFeasibleError:
    """Returns why there is no verdict, by the outcomes of the baseline."""
    if any(isinstance(outcome, Measurement) for outcome in outcomes):
        return NothingFeasibleError(f"the {claim.objective.name} that is claimed cannot be measured on this machine")
    failure = next((outcome for outcome in outcomes if isinstance(outcome, Failure)), None)
    if failure is not None:
        return NothingFeasibleError(f"the baseline ({claim.baseline}) fails here: {failure}")
    return _no_time_for(claim.baseline)


def _no_time_for(policy: Policy) -> NotMeasuredError:
    why = f"{policy} could not be measured within the budget"
    return NotMeasuredError(f"could not tell: {why}; give more with --budget")


def _sized(policy: Policy, prepared: Prepared) -> Policy:
    return replace(policy, batch_size=policy.batch_size or prepared.subject.batch_size)


def _answer(found: Verification) -> Finding:
    """Returns the answer as a finding, with the two figures."""
    claimed = "nothing is claimed" if found.claim.speedup is None else f"{found.claim.speedup:g}× claimed"
    if found.speedup is None:
        return Finding(code="policy-fails", message=f"the policy fails here: {found.policy.failure}; {claimed}")
    figures = {"claimed": found.claim.speedup, "measured": found.speedup.value, "margin": MARGIN}
    both = f"{found.speedup} measured here, {claimed}{_gain_in_words(found)}"
    match found.answer:
        case _ if found.claim.speedup is None:
            message = f"measured here: {found.speedup} the speed of the baseline ({found.claim.baseline}); {claimed}"
            code = "measured"
        case "met" if found.policy.policy == found.baseline.policy:
            code, message = "holds", "the policy is the baseline: nothing is claimed, and it runs"
        case "met":
            code, message = "holds", f"the claim holds: {both}"
        case "missed":
            needed = found.rounds[-1][0]
            missed = f"; the interval does not reach {needed.needed or 0.0:.2f}×, the claim less {MARGIN:.0%}"
            code, message = "does-not-hold", f"the claim does not hold: {both}{missed if needed.is_missed else ''}"
        case "open":
            code, message = "undecided", f"could not tell: {both}; {_why_open(found)}"
    return Finding(code=code, message=message, figures=figures)


def _why_open(found: Verification) -> str:
    """Returns why the rounds did not answer the claim: how wide the interval is, and what it rests on."""
    figure = found.open_figures[0]
    here = figure.here
    if here is None or figure.needed is None:
        return f"its {figure.name} was not measured here"
    needed = f"{figure.needed:.2f}×, the claim less {MARGIN:.0%}"
    if here.half_width > 1:
        why = "the timings differ too much from each other"
    elif here.high >= figure.needed:
        why = f"the interval is too wide (±{here.half_width:.0%}) to tell if it is {needed}"
    else:
        why = f"this is below {needed}, and a second round, or a later sitting, may not be"
    rows, launches = counted(found.policy.rows, "measurement"), counted(max(1, here.launches), "process")
    return f"{figure.name}: {why}, after {rows} in {launches} of each; give more with --budget, or a quieter machine"


def _gain_in_words(found: Verification) -> str:
    """Returns the gain in words; "" for a claim of speed alone."""
    if found.gain is None or found.claim.gain is None:
        return ""
    now, claimed = use_of(found.claim.objective, found.gain), 1 / found.claim.gain
    return f"; it {now}, {claimed:.3g} times claimed"
