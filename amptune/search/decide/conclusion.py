"""The decision of a tuning, from its trials and comparisons, and the policy file with its evidence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from amptune.measure.bench.readings import noticed
from amptune.measure.results.subject import Prepared
from amptune.policy.findings import Finding
from amptune.policy.policy_file import PolicyFile
from amptune.policy.settings import Policy
from amptune.search.decide.comparisons import Comparisons
from amptune.search.decide.decision import Decision
from amptune.search.decide.evidence import evidence_of, labels_of
from amptune.search.decide.pareto import points_of
from amptune.search.gate.judge import Judge, numerics_of_policy, without_graph
from amptune.search.plan.compile_costs import compile_findings
from amptune.search.table.ablation import ablated, dropped
from amptune.search.table.gains import FOUND, gain_in_words, goal_of
from amptune.search.table.objective import Objective
from amptune.search.table.ratio import (
    ENOUGH_LAUNCHES,
    FEW_LAUNCHES_DOUBT,
    Round,
    is_fast_enough,
    launches_of,
    ratio_between,
)
from amptune.search.table.trial import TRIAL_NOISE, Trial, noise_of
from amptune.search.table.verdict import NEGLIGIBLE, Contender, Verdict, contenders_of, speed_not_shown

__all__ = ["decide"]


def decide(
    prepared: Prepared,
    trials: Sequence[Trial],
    comparisons: Comparisons,
    judge: Judge,
    *,
    amp_recipes: Sequence[Policy],
    noticed_before: Sequence[Finding] = (),
    seconds: float,
    provisional: bool,
) -> Decision | None:
    """Returns the decision; None if the baseline was not measured or failed, as nothing can be claimed then.

    `noticed_before` are findings from before the search.
    """
    compared = comparisons.verdict()
    if compared is None:
        verdict = _verdict_of_trials(trials, comparisons)
    else:
        verdict = _verdict_of_looks(compared, trials, comparisons) or compared
    if verdict is None:
        return None
    finalists = _finalists(comparisons, compared, verdict)
    amp_recipe = next((contender for contender in finalists if contender.policy in amp_recipes), None)
    confirmed = comparisons.confirmed
    bought = ablated(confirmed.rounds, confirmed.candidate) if confirmed else ()
    own = (*verdict.findings, *(_findings(comparisons, verdict) if verdict is compared else ()), *noticed_before)
    policy = verdict.winner.policy
    of_compiling = compile_findings(trials, policy)
    findings = (*own, *of_compiling, *_of_numerics(judge, verdict, finalists), *_of_machine(trials, comparisons))
    decision = Decision(
        policy_file=PolicyFile(
            policy=replace(policy, batch_size=policy.batch_size or prepared.subject.batch_size),
            name=prepared.subject.name,
            valid_for=labels_of(prepared),
        ),
        verdict=verdict,
        finalists=finalists,
        ablation=bought,
        amp_recipe=amp_recipe,
        findings=findings,
        trials=tuple(trials),
        hardware=prepared.hardware,
        subject=prepared.subject,
        seconds=seconds,
        provisional=provisional or verdict is not compared,
        memory_mib=prepared.memory_mib,
    )
    points = points_of(trials, comparisons.is_out, judge.has_passed)
    return decision.with_evidence(evidence_of(decision, comparisons.rounds, judge.known(policy), points))


def _finalists(comparisons: Comparisons, compared: Verdict | None, verdict: Verdict) -> tuple[Contender, ...]:
    """Returns the compared policies with the figures of the comparison, or of single trials if those alone decide.

    Figures of the two kinds contradict each other, so they are never mixed.
    """
    if compared is not None and comparisons.finals:
        return contenders_of(comparisons.finals, comparisons.setup.baseline)
    entered = {policy for one in comparisons.finals for policy in one.outcomes}
    return tuple(contender for contender in verdict.contenders if not entered or contender.policy in entered)


def _of_numerics(judge: Judge, verdict: Verdict, finalists: Sequence[Contender]) -> Iterator[Finding]:
    yield from _rejected(judge, finalists)
    yield from _not_judged(judge, verdict.winner.policy)


def _of_machine(trials: Sequence[Trial], comparisons: Comparisons) -> tuple[Finding, ...]:
    """Returns what disturbed the measurements."""
    compared = [outcome for one in comparisons.rounds for outcome in one.outcomes.values()]
    return noticed([*(trial.outcome for trial in trials), *compared])


def _findings(comparisons: Comparisons, verdict: Verdict) -> Iterator[Finding]:
    """Yields what refinements and ablations add to the verdict's own reasons."""
    confirmed = comparisons.confirmed
    if confirmed is None:
        if comparisons.finals and not verdict.keeps_the_baseline:
            message = (
                "no second comparison was finished: the claim rests on the measurements that chose the policy, "
                "which flatter it a little; more --budget confirms it"
            )
            yield Finding(code="unconfirmed", message=message)
        return
    for former, following in pairwise([*comparisons.refinements, comparisons.ablations[0]]):
        if following.candidate != former.candidate and former.candidate not in comparisons.failed:
            ratio = ratio_between(former.rounds, following.candidate, former.candidate)
            found = FOUND[comparisons.setup.objective.name]
            message = f"beside {former.candidate}, {following.candidate} was found to {found}: {ratio}"
            yield Finding(code="refined", message=message)
    for ablation in comparisons.ablations:
        if failure := comparisons.failed.get(ablation.candidate):
            message = f"{ablation.candidate} had won, and failed when it was measured anew: {failure}"
            yield Finding(code="failed-in-ablation", message=message)
    if verdict.keeps_the_baseline:
        finals = comparisons.finals_verdict()
        seen = f" ({finals.gain} in the finals)" if finals else ""
        goal = goal_of(comparisons.setup.objective)
        message = f"{confirmed.candidate} had been preferred{seen}; measured anew it was not shown {goal}"
        yield Finding(code="not-confirmed", message=message)
        return
    chain = comparisons.ablations[: comparisons.ablations.index(confirmed) + 1]
    chosen = [*(ablation.candidate for ablation in chain[1:]), verdict.winner.policy]
    for ablation, policy in zip(chain, chosen, strict=True):
        if ablation.candidate not in comparisons.failed:
            yield from dropped(ablated(ablation.rounds, ablation.candidate), policy, comparisons.setup.objective)


def _rejected(judge: Judge, finalists: Sequence[Contender]) -> Iterator[Finding]:
    """Yields a finding for each compared policy that trains worse than FP32."""
    for contender in finalists:
        judgement = judge.rejection_of(contender.policy)
        if judgement is not None:
            own = without_graph(judgement.policy) == numerics_of_policy(without_graph(contender.policy))
            whose = "" if own else f"of {judgement.policy}, compiled too: "
            message = f"{contender.policy} cannot win: {whose}{judgement}"
            module = judgement.shortcomings[0].module
            yield Finding(code="rejected", message=message, module=module, figures={"speedup": contender.speedup})


def _not_judged(judge: Judge, policy: Policy) -> Iterator[Finding]:
    because = judge.unjudged_because(policy)
    why = f" ({because})" if because is not None else ""
    if not judge.is_exempt(without_graph(policy)) and judge.known(policy) is None:
        message = f"the numerics of {policy} were not judged{why}: watch its loss beside FP32's"
        yield Finding(code="not-judged", message=message)
    elif judge.is_graph_open(policy) or (policy.compile != "off" and because is not None):
        why = why or " (there was no time for it; give more with --budget)"
        message = f"numerics were judged without torch.compile, and not those of its graph{why}"
        yield Finding(code="graph-not-judged", message=message)


def _verdict_of_looks(compared: Verdict, trials: Sequence[Trial], comparisons: Comparisons) -> Verdict | None:
    """Returns a provisional verdict if there are too few launches for a proof; None if there is no such winner.

    The winner is the best policy that was better in every look: its trial and each round, those of an unfinished
    ablation too. It must gain more than the noise of a single trial, as when trials alone decide, and more than the
    spread of all contenders from round to round makes likely.
    """
    few = launches_of(comparisons.finals) < ENOUGH_LAUNCHES
    if not (compared.keeps_the_baseline and few and comparisons.confirmed is None):
        return None
    setup, is_out = comparisons.setup, comparisons.is_out
    outcomes = {trial.policy: trial.outcome for trial in trials}
    in_trials = Round(launch=0, outcomes=outcomes, objective=setup.objective)

    def is_better(contender: Contender) -> bool:
        stood = contender.policy in comparisons.finals[-1].outcomes
        likely = contender.gain is not None and contender.gain.shows_more_than(1.0, doubt=1 / FEW_LAUNCHES_DOUBT)
        return (
            stood and likely and _gained_in([in_trials, *_rounds_with(contender, comparisons)], contender, comparisons)
        )

    alive = (s for s in compared.contenders if s.failure is None and not s.too_slow)
    may_win = (s for s in alive if setup.eligible(s.policy) and not is_out(s.policy))
    winner = next(filter(is_better, may_win), None)
    if winner is None:
        return None
    objective = setup.objective
    message = (
        f"{winner.policy}: {gain_in_words(objective, winner.gain, winner.vs_baseline)}, which is not proven; "
        f"in each look, its trial included, it gained more than {noise_of(objective):.0%}; more --budget tells"
    )
    findings = [Finding(code="provisional", message=message)]
    findings += [finding for finding in compared.findings if finding.code != "keep"]
    if not is_fast_enough(comparisons.finals, winner.policy, setup.baseline, surely=True):
        findings.append(speed_not_shown(winner, setup.objective))
    return replace(compared, winner=winner, findings=tuple(findings))


def _gained_in(looks: Sequence[Round], contender: Contender, comparisons: Comparisons) -> bool:
    """Returns whether the policy was fast enough and gained more than the noise of a trial in every look."""
    policy, baseline = contender.policy, comparisons.setup.baseline
    least = 1 + noise_of(comparisons.setup.objective)
    return all(
        ratio_between([look], policy, baseline).value > least and is_fast_enough([look], policy, baseline)
        for look in looks
    )


def _rounds_with(contender: Contender, comparisons: Comparisons) -> list[Round]:
    """Returns the rounds of all comparisons, also of former runs, that have both the policy and the baseline."""
    both = {contender.policy, comparisons.setup.baseline}
    return [one for one in (*comparisons.setup.earlier, *comparisons.rounds) if both <= one.outcomes.keys()]


def _verdict_of_trials(trials: Sequence[Trial], comparisons: Comparisons) -> Verdict | None:
    """Returns the verdict before a comparison: the best trial wins, of equals the fastest, without an interval.

    A policy that did not gain enough in a round of an unfinished or former comparison cannot win.
    """
    baseline, eligible = comparisons.setup.baseline, comparisons.setup.eligible
    failed = {policy: failure for policy, failure in comparisons.failed.items() if policy != baseline}
    by_policy = {trial.policy: trial.outcome for trial in trials} | failed
    objective = comparisons.setup.objective
    contenders = contenders_of([Round(launch=0, outcomes=by_policy, objective=objective)], baseline)
    of = {contender.policy: contender for contender in contenders}
    if baseline not in of or not of[baseline].merit:
        return None
    is_out = comparisons.is_out
    alive = (s for s in contenders if s.failure is None and not s.too_slow)
    allowed = (s for s in alive if eligible(s.policy) and not is_out(s.policy) and s.merit > 1 + noise_of(objective))
    better = [s for s in allowed if _gained_in(_rounds_with(s, comparisons), s, comparisons)]
    level = [s for s in better if better[0].merit <= (1 + NEGLIGIBLE) * s.merit]
    return Verdict(
        winner=max(level, key=lambda contender: contender.speedup, default=of[baseline]),
        baseline=of[baseline],
        contenders=contenders,
        findings=(
            _without_finals(trials, objective, has_looked=bool(comparisons.rounds or comparisons.setup.earlier)),
        ),
        objective=objective,
    )


def _without_finals(trials: Sequence[Trial], objective: Objective, *, has_looked: bool) -> Finding:
    if len(trials) == 1:
        message = "only the baseline was measured: the budget (or --trials) was spent before anything else was tried"
        return Finding(code="budget-too-small", message=message)
    which = {
        "throughput": f"the fastest is taken where it is {TRIAL_NOISE:.0%} faster than the baseline",
        "memory": "the fastest of those that use least memory is taken, where it seems fast enough",
        "energy": f"the one that uses least energy is taken where it is {TRIAL_NOISE:.0%} less than the baseline's",
    }
    message = f"the final comparison was not finished: single trials decide, of which {which[objective.name]}"
    message += ", and where no round of a comparison speaks against it" if has_looked else ""
    return Finding(code="provisional", message=message)
