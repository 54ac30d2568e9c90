"""The answer of a study for an objective, from its trials and comparisons, without new measurements. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from amptune.errors import ObjectiveError, StudyError
from amptune.measure.results.outcome import Failure, Measurement
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.search.decide.comparisons import UNCONFIRMED_DOUBT
from amptune.search.decide.decision import Decision
from amptune.search.decide.pareto import ParetoPoint, front_of, points_of
from amptune.search.decide.samples import KeptComparison
from amptune.search.sampler.records import Basis, DecisionRecord, StudyRecord
from amptune.search.table.ablation import Ablated, ablated
from amptune.search.table.gains import gain_in_words, goal_of, seen_in_words
from amptune.search.table.objective import Objective, Yardstick
from amptune.search.table.ratio import ENOUGH_LAUNCHES, Ratio, Round
from amptune.search.table.trial import Trial, noise_of
from amptune.search.table.verdict import Contender, contenders_of, departure_count, level_with_the_best

__all__ = ["StudyReport", "command_of", "decision_record_of", "findings_of", "study_report_of"]

ONE = Ratio(value=1.0, low=1.0, high=1.0)


@dataclass(frozen=True, kw_only=True)
class StudyReport:
    """The policy that a study would choose for an objective, and the measurements behind that choice.

    `contenders` come from the comparisons, the best first; `points` are the trials that ran and were not rejected.
    """

    record: StudyRecord
    objective: Objective
    baseline: Trial
    decision: DecisionRecord
    contenders: tuple[Contender, ...]
    ablation: tuple[Ablated, ...]
    points: tuple[ParetoPoint, ...]

    @cached_property
    def front(self) -> tuple[ParetoPoint, ...]:
        """The points that no other policy beats in speed, memory and energy at once, the fastest first."""
        return front_of(self.points)

    @cached_property
    def failures(self) -> tuple[tuple[Trial, Failure], ...]:
        """The trials that failed, sorted by kind of failure."""
        failed = [(trial, trial.outcome) for trial in self.record.trials if isinstance(trial.outcome, Failure)]
        return tuple(sorted(failed, key=lambda pair: (pair[1].kind, pair[0].number)))

    @property
    def keeps_the_baseline(self) -> bool:
        return self.decision.basis == "nothing-better"

    @property
    def is_proven(self) -> bool:
        """True if enough launches support the answer, or the answer claims nothing."""
        return self.decision.basis in ("comparison", "nothing-better")

    @property
    def sentence(self) -> str:
        """The answer in words."""
        if self.keeps_the_baseline:
            return f"keep what you have: no policy was seen {goal_of(self.objective)}"
        decision = self.decision
        words = seen_in_words if decision.basis == "trial" else gain_in_words
        return f"{decision.policy}: {words(self.objective, decision.gain, decision.speedup)}"

    @property
    def grounds(self) -> str:
        """The measurements that the answer rests on, in words."""
        launches = self.decision.gain.launches
        times = "one process launch" if launches == 1 else f"{launches} process launches"
        match self.decision.basis:
            case "comparison":
                return f"by comparison with the baseline in {times}"
            case "few-launches":
                return f"by comparison with the baseline in {times}, of {ENOUGH_LAUNCHES} wanted: not proven"
            case "trial":
                return "by a trial or two beside the baseline's: not proven"
            case "nothing-better":
                compared = f" and a comparison of {len(self.contenders)} policies" if self.contenders else ""
                return f"by {len(self.record.trials)} trials{compared}"


def findings_of(study_report: StudyReport) -> tuple[Finding, ...]:
    """Returns the answer as a finding, then its limits: no proof, numerics that were not judged, rejected policies."""
    decision, record = study_report.decision, study_report.record
    figures = {"gain": decision.gain.value, "speedup": decision.speedup.value, "basis": decision.basis}
    found = [Finding(code="answer", message=f"{study_report.sentence}, {study_report.grounds}", figures=figures)]
    if not study_report.is_proven:
        message = "a comparison in fresh processes proves or refutes it: " + command_of(study_report)
        found.append(Finding(code="not-proven", message=message))
    if not record.has_passed(decision.policy):
        message = f"the numerics of {decision.policy} were not judged: watch its loss beside FP32's, or tune for it"
        found.append(Finding(code="not-judged", message=message))
    rejected = {judged.policy: judged for judged in record.judged if not judged.passes}
    found += [Finding(code="rejected", message=f"{one.policy} cannot win: {one.words}") for one in rejected.values()]
    return tuple(found)


def command_of(study_report: StudyReport) -> str:
    """Returns the command that compares the answer's policies: it tunes for the objective, in the same study.

    It repeats the options of the last tuning: other options would make it another study.
    """
    last, objective, where = study_report.record.last, study_report.objective, study_report.record.where
    share = objective.least_speed
    if last.target is None:
        least = f", least_speed={share:g}" if objective.needs_speed and share != 1 else ""
        return f'amptune.tune(workload, objective="{objective.name}"{least}, study="{where}")'
    least = f" --least-speed {share:g}" if objective.needs_speed and share != 1 else ""
    return (
        shlex.join(["amptune", "tune", last.target, *last.options, "--objective", objective.name])
        + f"{least} --study {shlex.quote(where)}"
    )


def study_report_of(record: StudyRecord, comparisons: Sequence[KeptComparison], objective: Objective) -> StudyReport:
    """Returns the best policy for the objective among all trials and comparisons.

    Only comparisons that contain the baseline count. If they show nothing, the answer for the objective of the last
    tuning is the choice of that tuning. Raises `StudyError` if the baseline was not measured, and `ObjectiveError` if
    the study lacks the figure of the objective.
    """
    baseline = _baseline_of(record, objective)
    rounds = list(_beside(baseline.policy, comparisons, objective))
    contenders = contenders_of(rounds, baseline.policy) if rounds else ()
    failed = {contender.policy for contender in contenders if contender.failure is not None}

    def is_out(policy: Policy) -> bool:
        return policy in failed or record.has_rejected(policy)

    def may_win(policy: Policy) -> bool:
        return policy not in record.outside and not is_out(policy)

    confirmed = {policy for one in comparisons if one.stage == "ablation" for r in one.rounds for policy in r.outcomes}
    shown = [s for s in contenders if may_win(s.policy) and _is_shown(s, objective, s.policy in confirmed)]
    compared = _best_compared(rounds, shown)
    last = sum(len(one.rounds) for one in comparisons if one.run == record.last.run)
    is_last = objective == record.last.objective
    own = record.decided.get(record.last.run) if is_last else None
    unproven: DecisionRecord | None = None
    if own is not None:
        unproven = own if own.basis == "trial" or not last else None
    elif not (is_last and last > 1):  # otherwise that tuning compared its best trials already
        unproven = _best_seen(record, Yardstick(objective, _measured(baseline)), contenders, may_win)
    decisions = [decision for decision in (compared, unproven) if decision is not None and not is_out(decision.policy)]
    nothing = DecisionRecord(policy=baseline.policy, gain=ONE, speedup=ONE, basis="nothing-better")
    decision = max(decisions, key=lambda one: _assured(one, objective), default=nothing)
    return StudyReport(
        record=record,
        objective=objective,
        baseline=baseline,
        decision=decision,
        contenders=contenders,
        ablation=ablated(rounds, decision.policy),
        points=points_of(record.trials, is_out, record.has_passed),
    )


def decision_record_of(decision: Decision) -> DecisionRecord:
    """Returns the decision of a tuning as a choice."""
    gain, speedup, basis = decision.gain, decision.speedup, _basis_of(decision.gain)
    if decision.verdict.keeps_the_baseline:
        basis = "nothing-better"
    elif decision.provisional:
        basis = "trial"
    return DecisionRecord(policy=decision.winner, gain=gain, speedup=speedup, basis=basis)


def _basis_of(gain: Ratio) -> Basis:
    return "comparison" if gain.launches >= ENOUGH_LAUNCHES else "few-launches"


def _baseline_of(record: StudyRecord, objective: Objective) -> Trial:
    policy = record.last.baseline
    trial = next((one for one in reversed(record.trials) if one.policy == policy), None)
    if trial is None or isinstance(trial.outcome, Failure):
        how = "was not measured" if trial is None else f"failed ({trial.outcome})"
        raise StudyError(f"the baseline of the study {record.name} ({policy}) {how}: nothing can be held against it")
    if objective.score(trial.outcome) is None:
        raise ObjectiveError(
            f"the study {record.name} knows of no energy: {record.last.hardware} reported none, or steps too short for "
            "its counter were not timed for long; `amptune tune --objective energy` with the same study does that"
        )
    return trial


def _measured(trial: Trial) -> Measurement:
    assert isinstance(trial.outcome, Measurement)  # noqa: S101  # _baseline_of raises where it is none
    return trial.outcome


def _beside(baseline: Policy, comparisons: Sequence[KeptComparison], objective: Objective) -> Iterator[Round]:
    """Yields the rounds with the baseline. Launches are renumbered, because no two comparisons share a process."""
    before = 0
    for comparison in comparisons:
        for one in comparison.rounds:
            if baseline in one.outcomes:
                yield replace(one, launch=before + one.launch, objective=objective)
        before += 1 + max((one.launch for one in comparison.rounds), default=0)


def _is_shown(contender: Contender, objective: Objective, confirmed: bool) -> bool:
    """Returns whether a policy is shown to be better; with more doubt if the same comparison chose it (no ablation)."""
    gain, doubt = contender.gain, 1.0 if confirmed else UNCONFIRMED_DOUBT
    return gain is not None and not contender.too_slow and gain.shows_more_than(1 + objective.least_gain, doubt=doubt)


def _best_compared(rounds: Sequence[Round], shown: Sequence[Contender]) -> DecisionRecord | None:
    """Returns the simplest of the policies that are level with the best."""
    if not shown:
        return None
    level = level_with_the_best(rounds, shown)
    winner = min(level, key=lambda contender: (departure_count(contender.policy), -contender.merit))
    gain, speedup = winner.gain, winner.vs_baseline
    assert gain is not None and speedup is not None  # noqa: S101, PT018  # it is shown to be better
    return DecisionRecord(policy=winner.policy, gain=gain, speedup=speedup, basis=_basis_of(gain))


def _best_seen(
    record: StudyRecord, yardstick: Yardstick, contenders: Sequence[Contender], may_win: Callable[[Policy], bool]
) -> DecisionRecord | None:
    """Returns the best policy that was measured once or twice, if its gain is larger than the noise of a trial.

    Figures measured beside the baseline are preferred to trials. Policies compared in enough launches are left out.
    """
    of = {contender.policy: contender for contender in contenders}
    alive = (trial for trial in record.trials if may_win(trial.policy))
    decisions = (_seen(trial, of.get(trial.policy), yardstick) for trial in alive)
    least = 1 + noise_of(yardstick.objective)
    better = (decision for decision in decisions if decision is not None and decision.gain.value > least)
    return max(better, key=lambda decision: decision.gain.value, default=None)


def _seen(trial: Trial, contender: Contender | None, yardstick: Yardstick) -> DecisionRecord | None:
    """Returns None if the policy is too slow, has no figure, or was compared in enough launches."""
    outcome, baseline, objective = trial.outcome, yardstick.baseline, yardstick.objective
    gain = contender.gain if contender is not None else None
    if contender is not None and gain is not None and contender.merit:
        known = contender.too_slow or gain.launches >= ENOUGH_LAUNCHES
        return None if known else _once(trial.policy, contender.merit, contender.speedup)
    if not isinstance(outcome, Measurement) or baseline is None or not yardstick.allows(outcome):
        return None
    score, own = objective.score(outcome), objective.score(baseline)
    speedup = outcome.samples_per_s / baseline.samples_per_s
    return _once(trial.policy, score / own, speedup) if score and own else None


def _once(policy: Policy, gain: float, speedup: float) -> DecisionRecord:
    return DecisionRecord(policy=policy, gain=_unsure(gain), speedup=_unsure(speedup), basis="trial")


def _unsure(value: float) -> Ratio:
    """Returns the ratio of a single pair of measurements, which has no finite interval."""
    return Ratio(value=value, low=0.0, high=math.inf, launches=1)


def _assured(decision: DecisionRecord, objective: Objective) -> float:
    """Returns the gain of a choice, reduced by the noise of a trial if it rests on trials alone."""
    return decision.gain.value / (1 + noise_of(objective)) if decision.basis == "trial" else decision.gain.value
