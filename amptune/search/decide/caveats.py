"""Findings that limit an answer: numerics that were not judged or failed, and a machine that training will not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from amptune.measure.results.loop_timing import (
    WORTH_SAYING,
    LoaderTrial,
    loader_gain,
    share_in_words,
    waiting_in_words,
)
from amptune.measure.results.subject import Prepared
from amptune.policy.findings import Finding
from amptune.policy.setting_effects import numerics_of
from amptune.search.decide.conclusion import Conclusion
from amptune.search.gate.judgements import without_graph
from amptune.search.gate.numeric_findings import line_to_look, yardstick_findings
from amptune.search.table.row import Row, wait_share
from amptune.search.table.verdict import Verdict

__all__ = ["devices_findings", "numeric_caveats", "of_the_loader"]


def of_the_loader(rows: Sequence[Row], verdict: Verdict, trials: Sequence[LoaderTrial] = ()) -> Iterator[Finding]:
    """Yields a finding if the user's loop waits for its data under the winner, and what other settings would gain."""
    gain = loader_gain(trials)
    if gain is not None:
        figures = {"own_ms": gain.own_ms, "step_ms": gain.step_ms, "wait_share": gain.wait_share}
        message = f"{gain}; it waits {share_in_words(gain.wait_share)} of its time then"
        yield Finding(code="loader", message=message, figures=figures)
        return
    shares = wait_share(rows)
    share = max(shares.values(), default=0.0) if verdict.waits_for_data else shares.get(verdict.winner.policy, 0.0)
    if share > WORTH_SAYING:
        instead = "; the speeds here are those of steps that have their data" if verdict.waits_for_data else ""
        tried = "".join(f"; tried: {_in_words(one)}" for one in trials[1:])
        yield Finding(code="input-bound", message=waiting_in_words(share) + instead + tried, figures={"share": share})


def _in_words(trial: LoaderTrial) -> str:
    return f"{trial.settings}, {trial.error or f'{trial.step_ms:.3g} ms a step'}"


def numeric_caveats(found: Conclusion, parity: Mapping[str, float], told: Sequence[Finding]) -> Iterator[Finding]:
    """Yields what the gate refused, and what it did not or could not well see of the winner, unless that is `told`.

    `parity` says how far the winner's first steps are from the baseline's.
    """
    yield from _rejected(found)
    yield from _not_judged(found, parity)
    judgement, codes = found.judgements.known(found.winner), {finding.code for finding in told}
    if judgement is not None:
        yield from (finding for finding in yardstick_findings(judgement) if finding.code not in codes)
    if found.winner.float8_modules:
        message = (
            "products in FP8 were judged by a moment of training, and NaN can come thousands of steps later: look long "
            "before you train with it, `amptune verify POLICY.yaml TARGET --numerics --steps 5000`"
        )
        yield Finding(code="float8-judged-briefly", message=message)


def _rejected(found: Conclusion) -> Iterator[Finding]:
    """Yields a finding for each compared policy that trains worse than FP32, and for the best that would have won."""
    told = set()
    for contender in found.verdict.contenders:
        judgement = found.judgements.rejection_of(contender.policy)
        if judgement is None:
            continue
        would_win = contender.merit > found.verdict.winner.merit and judgement.policy not in told
        if contender in found.finalists or would_win:
            told.add(judgement.policy)
            own = without_graph(judgement.policy) == numerics_of(without_graph(contender.policy))
            whose = "" if own else f"of {judgement.policy}, compiled too: "
            message = f"{contender.policy} cannot win: {whose}{judgement}; to see it: {line_to_look(judgement)}"
            module = next((one.module for one in judgement.shortcomings), None)
            yield Finding(code="rejected", message=message, module=module, figures={"speedup": contender.speedup})


def _not_judged(found: Conclusion, parity: Mapping[str, float]) -> Iterator[Finding]:
    judgements, policy = found.judgements, found.winner
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
