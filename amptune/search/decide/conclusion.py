"""The decision of a tuning, from the verdict on its table, and the policy file with its evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from amptune.measure.bench.readings import noticed
from amptune.measure.results.loop_timing import WORTH_SAYING, waiting_in_words
from amptune.measure.results.subject import Prepared
from amptune.policy.findings import Finding
from amptune.policy.policy_file import PolicyFile
from amptune.policy.setting_effects import numerics_of
from amptune.policy.settings import Policy
from amptune.search.decide.decision import Decision
from amptune.search.decide.evidence import evidence_of, labels_of, parity_of
from amptune.search.decide.pareto import points_of
from amptune.search.gate.judgement import Judgement
from amptune.search.gate.judgements import Judgements, without_graph
from amptune.search.gate.numeric_findings import line_to_look, yardstick_findings
from amptune.search.plan.compile_costs import compile_findings
from amptune.search.table.ablation import ablated
from amptune.search.table.contenders import Contender
from amptune.search.table.row import Row, wait_share
from amptune.search.table.trial import Trial
from amptune.search.table.verdict import Verdict

__all__ = ["decide", "devices_findings"]


def decide(
    prepared: Prepared,
    trials: Sequence[Trial],
    rows: Sequence[Row],
    verdict: Verdict,
    judgements: Judgements[Judgement],
    *,
    amp_recipes: Sequence[Policy],
    noticed_before: Sequence[Finding] = (),
    seconds: float,
    interrupted: bool,
    timeline: Sequence[Mapping[str, Any]] = (),
) -> Decision:
    """Returns the decision that a verdict on all `rows` leads to.

    `noticed_before` are findings from before the search, `timeline` is the plan's.
    """
    policy = verdict.winner.policy
    finalists = _finalists(verdict, amp_recipes)
    unjudged = tuple(_not_judged(judgements, policy, parity_of(rows, policy, verdict.baseline.policy)))
    findings = (
        *verdict.findings,
        *noticed_before,
        *_of_the_loader(rows, verdict),
        *compile_findings(trials, policy),
        *_rejected(judgements, verdict, finalists),
        *unjudged,
        *_yardstick(judgements, policy, noticed_before),
        *_of_float8(policy),
        *noticed(row.outcome for row in rows),
    )
    decision = Decision(
        policy_file=PolicyFile(
            policy=replace(policy, batch_size=policy.batch_size or prepared.subject.batch_size),
            name=prepared.subject.name,
            valid_for=labels_of(prepared),
        ),
        verdict=verdict,
        finalists=finalists,
        ablation=ablated(verdict, policy),
        amp_recipe=next((contender for contender in finalists if contender.policy in amp_recipes), None),
        findings=findings,
        trials=tuple(trials),
        points=points_of(trials, verdict, judgements),
        hardware=prepared.hardware,
        subject=prepared.subject,
        seconds=seconds,
        provisional=interrupted
        or (verdict.confidence == "likely" and not verdict.keeps_the_baseline)
        or any(finding.code == "not-judged" for finding in unjudged),
        memory_mib=prepared.memory_mib,
        timeline=tuple(timeline),
    )
    return decision.with_evidence(evidence_of(decision, rows, judgements.known(policy)))


def devices_findings(devices: int, prepared: Prepared) -> Iterator[Finding]:
    """Yields on how many devices steps were timed, if several will train together."""
    measured = prepared.devices
    figures = {"devices": devices, "measured": measured}
    if measured > 1:
        graphs = "" if prepared.hardware.gpu is None else "; CUDA graphs were left out, which nobody has measured so"
        shared = (
            "share the model by the workload's parallel(model, tuned)"
            if prepared.own_parallel
            else "exchange gradients (DistributedDataParallel)"
        )
        copies = (
            "; each trial trained a copy, so nothing was compiled without --compile" if prepared.own_parallel else ""
        )
        message = (
            f"all steps were timed on {measured} devices that {shared}; samples per second are those of all of them, "
            f"and memory is that of one{graphs}{copies}"
        )
        yield Finding(code="devices", message=message, figures=figures)
    elif devices > 1:
        message = (
            f"{devices} devices will train together, and one was measured: communication between them was not, so a "
            f"policy may gain less there. Tune where {devices} GPUs are visible"
        )
        yield Finding(code="communication-not-measured", message=message, figures=figures)


def _of_the_loader(rows: Sequence[Row], verdict: Verdict) -> Iterator[Finding]:
    """Yields a finding if the user's loop waits for its data under the winner."""
    shares = wait_share(rows)
    share = max(shares.values(), default=0.0) if verdict.waits_for_data else shares.get(verdict.winner.policy, 0.0)
    if share > WORTH_SAYING:
        instead = "; the speeds here are those of steps that have their data" if verdict.waits_for_data else ""
        yield Finding(code="input-bound", message=waiting_in_words(share) + instead, figures={"share": share})


def _finalists(verdict: Verdict, amp_recipes: Sequence[Policy]) -> tuple[Contender, ...]:
    """Returns the policies that were measured more than once, the baseline, the winner, the best rival, AMP recipes."""
    named = {verdict.winner.policy, verdict.baseline.policy, *amp_recipes}
    named |= {verdict.leader.policy} if verdict.leader is not None else set()
    return tuple(contender for contender in verdict.contenders if contender.rows > 1 or contender.policy in named)


def _rejected(judgements: Judgements[Judgement], verdict: Verdict, finalists: Sequence[Contender]) -> Iterator[Finding]:
    """Yields a finding for each compared policy that trains worse than FP32, and for the best that would have won."""
    told = set()
    for contender in verdict.contenders:
        judgement = judgements.rejection_of(contender.policy)
        if judgement is None:
            continue
        if contender in finalists or (contender.merit > verdict.winner.merit and judgement.policy not in told):
            told.add(judgement.policy)
            own = without_graph(judgement.policy) == numerics_of(without_graph(contender.policy))
            whose = "" if own else f"of {judgement.policy}, compiled too: "
            message = f"{contender.policy} cannot win: {whose}{judgement}; to see it: {line_to_look(judgement)}"
            module = judgement.shortcomings[0].module
            yield Finding(code="rejected", message=message, module=module, figures={"speedup": contender.speedup})


def _yardstick(judgements: Judgements[Judgement], policy: Policy, told: Sequence[Finding]) -> Iterator[Finding]:
    """Yields a finding if the winner was judged by limits that may be too wide, unless that is told already."""
    judgement, codes = judgements.known(policy), {finding.code for finding in told}
    if judgement is not None:
        yield from (finding for finding in yardstick_findings(judgement) if finding.code not in codes)


def _of_float8(policy: Policy) -> Iterator[Finding]:
    if policy.float8_modules:
        message = (
            "products in FP8 were judged by a moment of training, and NaN can come thousands of steps later: look long "
            "before you train with it, `amptune verify POLICY.yaml TARGET --numerics --steps 5000`"
        )
        yield Finding(code="float8-judged-briefly", message=message)


def _not_judged(judgements: Judgements[Judgement], policy: Policy, parity: Mapping[str, float]) -> Iterator[Finding]:
    because = judgements.unjudged_because(policy)
    why = f" ({because})" if because is not None else ""
    if not judgements.is_exempt(without_graph(policy)) and judgements.known(policy) is None:
        message = f"the numerics of {policy} were not judged{why}: watch its loss beside FP32's"
        yield Finding(code="not-judged", message=message)
    elif judgements.is_graph_open(policy) or (policy.compile != "off" and because is not None):
        why = why or " (there was no time for it; give more with --budget)"
        message = f"numerics were judged without torch.compile, and not those of its graph{why}"
        if off := parity.get("loss_deviation"):
            message += f"; the losses of its first steps differ from the baseline's by {100 * off:.2g} % at most"
        yield Finding(code="graph-not-judged", message=message, figures=dict(parity))
