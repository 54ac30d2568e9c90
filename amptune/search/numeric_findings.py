"""What was found of the numerics, in words: where they break first, and which modules in FP32 cure that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from amptune.measure.trace import ModuleTrace, Reach, suspects
from amptune.policy.findings import Finding
from amptune.search.gate import Judgement
from amptune.search.repairing import Cure

__all__ = ["findings_of", "sound_finding"]

# A module that makes an error less than so many times as large is not where it begins.
LEAST_TO_BLAME = 2.0
# The largest number each dtype holds.
LARGEST = {"fp16": 65504.0, "bf16": 3.3895e38}


def sound_finding(judgement: Judgement) -> Finding:
    autocast = judgement.policy.autocast
    return Finding(code="sound", message=f"autocast {autocast} is {judgement}", figures={"autocast": autocast})


def findings_of(
    judgement: Judgement, cure: Cure | None, traces: Sequence[ModuleTrace], *, out_of_time: bool = False
) -> Iterator[Finding]:
    """The modules in which it begins, the most suspicious first, and what cures it."""
    for culprit in _culprits(cure, traces):
        yield _where(culprit, judgement.policy.autocast)
    yield _unsound(judgement, out_of_time=out_of_time) if cure is None else _cure(judgement, cure)


def _culprits(cure: Cure | None, traces: Sequence[ModuleTrace]) -> list[ModuleTrace]:
    """The modules that cure it, the most suspicious first; without a cure the first that breaks, if one does."""
    of = {trace.path: trace for trace in traces}
    ranked = suspects(traces)
    if cure is not None:
        return [of[path] for path in ranked if path in cure.modules]
    return [of[path] for path in ranked[:1] if of[path].breaks_forward or of[path].breaks_backward]


def _cure(judgement: Judgement, cure: Cure) -> Finding:
    autocast, rules = judgement.policy.autocast, [str(rule) for rule in cure.rules]
    named = " + ".join(rules)
    left = ", and no module of these can be left out" if len(cure.modules) > 1 else ""
    left = left if cure.minimal else " (perhaps fewer would do: there was no time to find out)"
    return Finding(
        code="cure",
        message=f"autocast {autocast} is not as good as FP32 ({judgement}); with {named} in FP32 it is{left}",
        figures={"autocast": autocast, "modules": list(cure.modules), "rules": rules, "judgements": cure.judgements},
    )


def _unsound(judgement: Judgement, *, out_of_time: bool) -> Finding:
    autocast = judgement.policy.autocast
    why = (
        "there was no time to find the modules behind it; give more with --budget"
        if out_of_time
        else "no modules in FP32 cure that, so it begins outside of them: in the loss function, or in the model's own "
        "forward; compute that part under torch.autocast(device_type, enabled=False), its inputs cast with .float()"
    )
    message = f"autocast {autocast} is not as good as FP32 ({judgement}); {why}"
    return Finding(code="unsound", message=message, figures={"autocast": autocast})


def _where(trace: ModuleTrace, autocast: str) -> Finding:
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
            "nothing goes wrong in it by itself, but in what is computed outside of any module, around it: in FP32 it "
            "takes and gives FP32"
        )
        reached = None
    else:
        times = f"{trace.adds:.3g} times as large"
        code, message = "first-inaccurate", f"it makes the relative error of what passes through it {times}"
        reached = None
    if reached is not None:
        message += _overflow(reached.largest_fp32, autocast)
    return Finding(
        code=code,
        message=f"under autocast {autocast} {message}",
        module=trace.path,
        figures={
            "autocast": autocast,
            "type": trace.type,
            "inputs_largest": trace.inputs and trace.inputs.largest,
            "outputs_largest": trace.outputs and trace.outputs.largest,
            "outputs_largest_fp32": trace.outputs and trace.outputs.largest_fp32,
            "gradients_largest": trace.gradients_in and trace.gradients_in.largest,
            "adds": trace.adds,
        },
    )


def _overflow(largest_fp32: float, autocast: str) -> str:
    """What FP32 makes of it says whether what comes out is too large, or something on the way."""
    holds = f"{autocast} holds {LARGEST[autocast]:.4g} at most"
    if largest_fp32 > LARGEST[autocast]:
        return f"; in FP32 it reaches {largest_fp32:.3g}, and {holds}"
    return f"; in FP32 it reaches {largest_fp32:.3g}, so it is something computed inside that overflows ({holds})"


def _size(reach: Reach | None) -> str:
    return "" if reach is None else f" (largest {reach.largest:.3g})"
