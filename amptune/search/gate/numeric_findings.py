"""Findings about numerics, in words: where they break first, and which modules in FP32 cure that."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from amptune.measure.results.half_effects import ModuleTrace, Reach, suspects
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.search.gate.judgement import Judgement
from amptune.search.gate.repair import Cure

__all__ = ["findings_of", "line_to_look", "sound_finding", "where_fp32_breaks", "yardstick_findings"]

# A module that multiplies the error by less than this is not its origin.
LEAST_TO_BLAME = 2.0
# The largest number each dtype holds.
LARGEST = {"fp16": 65504.0, "bf16": 3.3895e38}

_IN_UPDATE = (
    "the error comes from the loss scaler, from clipping or from the optimizer, after the backward pass, so the model "
    "is not at fault: change the step there"
)


def sound_finding(judgement: Judgement) -> Finding:
    policy = judgement.policy
    return Finding(code="sound", message=f"{_named(policy)} is {judgement}", figures=_figures(policy))


def yardstick_findings(judgement: Judgement) -> Iterator[Finding]:
    """Yields a finding if the gate's limits may be too wide, because it took all parameters as rounded."""
    because = judgement.parity.all_rounded_because
    if because is not None:
        message = (
            f"the numerics gate could not see which parameters autocast rounds ({because}): it takes all of them as "
            "rounded, so its limits for gradients may be too wide; hold longer training against FP32's with "
            f"`{_long_look(judgement.policy)}`"
        )
        yield Finding(code="yardstick-unseen", message=message, figures=_figures(judgement.policy))


def line_to_look(judgement: Judgement) -> str:
    """Returns a line of Python, or a command, that shows what a policy was refused for.

    In Python, `model` and `loss` are the workload's, and `batch` is one batch on the device. The loss is scaled by
    a constant, so that small gradients do not vanish in fp16 and no scale has to settle first. A workload with a step
    of its own has no loss to call.
    """
    own, worst = judgement.policy, judgement.shortcomings[:1]  # none, if an earlier amptune stored it
    parameter = worst[0].figures.get("parameter") if worst else None
    is_seen = parameter is not None or (worst and worst[0].code == "breaks")
    if own.float8_modules or judgement.parity.own_step or not is_seen:
        return f"`{_long_look(own)}`"
    precision = f"weights={own.weights!r}" if own.weights == "half" else f"autocast={own.autocast!r}"
    under = f"with amptune.apply(amptune.Policy({precision}), model, guard=False) as t, t.autocast(): "
    if parameter is None:
        return f"`{under}print(loss(t.model, batch))`"
    shown = f"(1024 * loss(t.model, batch)).backward(); print(model.get_parameter({parameter!r}).grad / 1024)"
    return f"`{under}{shown}`, and in FP32 with Policy()"


def _long_look(policy: Policy) -> str:
    is_preset = policy.autocast != "off" and not policy.float8_modules
    preset = f"amp-{policy.autocast}" if is_preset else "POLICY.yaml"
    return f"amptune verify {preset} TARGET --numerics"


def where_fp32_breaks(traces: Sequence[ModuleTrace]) -> tuple[str | None, str]:
    """Returns the module in which an FP32 step becomes non-finite, if any, and in words; inner modules come first."""
    for trace in traces:
        comes_finite = trace.inputs is None or math.isfinite(trace.inputs.largest)
        if trace.outputs is not None and not math.isfinite(trace.outputs.largest) and comes_finite:
            return trace.path, f"what comes into {trace.type} is finite{_size(trace.inputs)}, and what goes out is not"
    if any(trace.inputs is not None and not math.isfinite(trace.inputs.largest) for trace in traces):
        return None, "what the model is given is not finite: look at the batches"
    return (
        None,
        "what every module gives in the first step is finite: look at the loss function and at later steps",
    )


def findings_of(
    judgement: Judgement, cure: Cure | None, traces: Sequence[ModuleTrace], *, out_of_time: bool = False
) -> Iterator[Finding]:
    """Yields a finding for each module at fault, the most suspicious first, then one about the cure.

    Modules at fault are those of the cure; without one the first that breaks, if any.
    """
    policy, of, ranked = judgement.policy, {trace.path: trace for trace in traces}, suspects(traces)
    if cure is not None:
        culprits = [of[path] for path in ranked if path in cure.modules]
    else:
        culprits = [of[path] for path in ranked[:1] if of[path].breaks_forward or of[path].breaks_backward]
    for culprit in culprits:
        yield _where(culprit, policy)
    if not culprits and judgement.parity.broken:  # a step that raises an error leaves no traces
        yield replace(judgement.shortcomings[0], figures=_figures(policy))
    if cure is None:
        message = _unsound(judgement, out_of_time=out_of_time)
        yield Finding(code="unsound", message=message, figures=_figures(policy))
    else:
        rules = [str(rule) for rule in cure.rules]
        figures = {"modules": list(cure.modules), "rules": rules, "judgements": cure.judgements}
        yield Finding(code="cure", message=_cured(judgement, cure), figures={**_figures(policy), **figures})
    yield from yardstick_findings(judgement)


def _cured(judgement: Judgement, cure: Cure) -> str:
    left = ", and no module of these can be left out" if len(cure.modules) > 1 else ""
    left = left if cure.minimal else " (perhaps fewer would do: there was no time to find out)"
    with_rules = f"with {' + '.join(map(str, cure.rules))} in FP32 it is{left}"
    return (
        f"{_named(judgement.policy)} is not as good as FP32 ({judgement}); {with_rules}; "
        f"to see it: {line_to_look(judgement)}"
    )


def _unsound(judgement: Judgement, *, out_of_time: bool) -> str:
    policy, failure = judgement.policy, judgement.parity.failure
    if failure is not None and failure.in_update:
        scaler = ", or use bf16 or FP32, which need no loss scaler" if policy.autocast == "fp16" else ""
        return f"{_named(policy)} cannot be used with this step ({judgement}); {_IN_UPDATE}{scaler}"
    why = (
        "there was no time to find the modules behind it; give more with --budget"
        if out_of_time
        else "no modules in FP32 cure that, so it begins outside of them: in the loss function, or in the model's own "
        "forward; compute that part under torch.autocast(device_type, enabled=False), its inputs cast with .float()"
    )
    return f"{_named(policy)} is not as good as FP32 ({judgement}); {why}; to see it: {line_to_look(judgement)}"


def _named(policy: Policy) -> str:
    return "training with half weights" if policy.weights == "half" else f"autocast {policy.autocast}"


def _figures(policy: Policy) -> dict[str, Any]:
    return {"autocast": policy.autocast} | ({"weights": "half"} if policy.weights == "half" else {})


def _where(trace: ModuleTrace, policy: Policy) -> Finding:
    reached = trace.outputs
    if trace.breaks_forward:
        code, message = "first-nonfinite", f"its inputs are finite{_size(trace.inputs)}, its output is not"
    elif trace.breaks_backward:
        came = f"the gradient that comes to it is finite{_size(trace.gradients_in)}"
        code, message = "first-nonfinite-gradient", f"{came}, what it makes of that is not"
        reached = trace.gradients_out or trace.weights
    elif trace.adds < LEAST_TO_BLAME:
        code = "breaks-behind"
        message = (
            "the module is fine; code around it, outside of any module, is not, and running the module in FP32 hides "
            "that"
        )
        reached = None
    else:
        times = f"{trace.adds:.3g} times as large"
        code, message = "first-inaccurate", f"it makes the relative error of what passes through it {times}"
        reached = None
    if reached is not None:
        message += _overflow(reached.largest_fp32, "bf16" if policy.autocast == "bf16" else "fp16")
    return Finding(
        code=code,
        message=f"{'with half weights' if policy.weights == 'half' else f'under {_named(policy)}'} {message}",
        module=trace.path,
        figures={
            **_figures(policy),
            "type": trace.type,
            "inputs_largest": trace.inputs and trace.inputs.largest,
            "outputs_largest": trace.outputs and trace.outputs.largest,
            "outputs_largest_fp32": trace.outputs and trace.outputs.largest_fp32,
            "gradients_largest": trace.gradients_in and trace.gradients_in.largest,
            "adds": trace.adds,
        },
    )


def _overflow(largest_fp32: float, dtype: str) -> str:
    """Tells by the value in FP32 whether the output itself is too large, or something computed on the way."""
    holds = f"{dtype} holds {LARGEST[dtype]:.4g} at most"
    if largest_fp32 > LARGEST[dtype]:
        return f"; in FP32 it reaches {largest_fp32:.3g}, and {holds}"
    return f"; in FP32 it reaches {largest_fp32:.3g}, so it is something computed inside that overflows ({holds})"


def _size(reach: Reach | None) -> str:
    return "" if reach is None else f" (largest {reach.largest:.3g})"
