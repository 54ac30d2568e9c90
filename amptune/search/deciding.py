"""From trials and final rounds to what is written down: the decision, and the policy file with its evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from amptune.hardware.machine import Hardware
from amptune.measure.outcome import Measurement
from amptune.measure.subject import Prepared, Subject
from amptune.policy.file import PolicyFile
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.search.decision import Ratio, Round, Standing, Verdict, standings_of, verdict_of
from amptune.search.evidence import evidence_of, labels_of
from amptune.search.trial import Trial

__all__ = ["Decision", "decide"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What tuning found. `provisional` means the final comparison is missing or was cut short.

    `amp_recipe` is the faster of the AMP recipes that ran, or the failure of the last.
    """

    policy_file: PolicyFile
    verdict: Verdict
    amp_recipe: Standing | None
    trials: tuple[Trial, ...]
    hardware: Hardware
    subject: Subject
    seconds: float
    provisional: bool

    @property
    def policy(self) -> Policy:
        return self.policy_file.policy

    @property
    def speedup(self) -> Ratio:
        """Samples per second under the policy over those of the baseline."""
        return self.verdict.speedup

    @property
    def baseline(self) -> Standing:
        return self.verdict.baseline

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.verdict.findings


def decide(
    prepared: Prepared,
    trials: Sequence[Trial],
    rounds: Sequence[Round],
    *,
    baseline: Policy,
    amp_recipes: Sequence[Policy],
    eligible: Callable[[Policy], bool],
    seconds: float,
    provisional: bool,
) -> Decision | None:
    """None where the baseline was not measured or failed: then nothing can be claimed.

    Only the baseline and `eligible` policies can win; the others stand in the comparison.
    """
    verdict = verdict_of(rounds, baseline, eligible) if rounds else None
    provisional = provisional or verdict is None
    verdict = verdict or _verdict_of_trials(trials, baseline, eligible)
    if verdict is None:
        return None
    policy = verdict.winner.policy
    amp_recipe = next((standing for standing in verdict.standings if standing.policy in amp_recipes), None)
    evidence = evidence_of(verdict, amp_recipe, trials, rounds, seconds=seconds, provisional=provisional)
    return Decision(
        policy_file=PolicyFile(
            policy=replace(policy, batch_size=policy.batch_size or prepared.subject.batch_size),
            name=prepared.subject.name,
            valid_for=labels_of(prepared),
            evidence=evidence,
        ),
        verdict=verdict,
        amp_recipe=amp_recipe,
        trials=tuple(trials),
        hardware=prepared.hardware,
        subject=prepared.subject,
        seconds=seconds,
        provisional=provisional,
    )


def _verdict_of_trials(trials: Sequence[Trial], baseline: Policy, eligible: Callable[[Policy], bool]) -> Verdict | None:
    """The fastest trial wins, without an interval: what can be said before the final comparison."""
    by_policy = {trial.policy: trial.outcome for trial in trials}
    if not isinstance(by_policy.get(baseline), Measurement):
        return None
    standings = standings_of([by_policy], baseline)
    of = {standing.policy: standing for standing in standings}
    winner = next(s for s in standings if s.policy == baseline or (s.failure is None and eligible(s.policy)))
    return Verdict(winner=winner, baseline=of[baseline], standings=standings, findings=(_without_finals(trials),))


def _without_finals(trials: Sequence[Trial]) -> Finding:
    if len(trials) == 1:
        message = "only the baseline was measured: the budget (or --trials) was spent before anything else was tried"
        return Finding(code="budget-too-small", message=message)
    message = "the final comparison was not finished: this is the fastest trial, measured once"
    return Finding(code="provisional", message=message)
