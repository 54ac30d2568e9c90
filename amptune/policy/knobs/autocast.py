"""Autocast: the dtype in which PyTorch computes matrix products and convolutions."""

from __future__ import annotations

from typing import Literal, get_args

from amptune.policy.knobs.knob import Knob, Model, Undo

__all__ = ["AUTOCAST", "Autocast"]

Autocast = Literal["off", "bf16", "fp16"]

_SENTENCES = {
    "off": "autocast off: every operation runs in FP32.",
    "bf16": "autocast bf16: matrix products and convolutions run in bfloat16, which has FP32's range and 8 bits of "
    "precision; no loss scaling is needed.",
    "fp16": "autocast fp16: matrix products and convolutions run in float16, which has 11 bits of precision and a "
    "small range; the loss is scaled, and a step whose gradients overflow is skipped.",
}


def _keep_out_of_compiled_backward(autocast: Autocast, _: Model) -> Undo:
    """Makes compiled backward passes run like eager ones, each operation in the dtype of its forward.

    By default they are traced under the forward's autocast, and run the backward of a module that is kept
    in FP32 in half precision (https://github.com/pytorch/pytorch/issues/179804).
    """
    if autocast == "off":
        return lambda: None
    from torch._functorch import config

    if not hasattr(config, "backward_pass_autocast"):
        return lambda: None
    from amptune.changes.flags import hold

    name = "backward_pass_autocast"
    return hold(name, "off", lambda: getattr(config, name), lambda value: setattr(config, name, value))


AUTOCAST = Knob(
    name="autocast",
    stock="off",
    values=get_args(Autocast),
    is_always_written=True,
    matters=lambda value, subject: value == "off" or subject.castable,
    in_memory=lambda policy: "off" if policy.autocast == "off" else "bf16",  # both take the same
    precision="whole",
    apply=_keep_out_of_compiled_backward,
    words="{}",
    risks={
        "fp16": "fp16 overflows above 65,504: watch the loss scale, and stop if it keeps falling.",
        "bf16": "bf16 has 8 bits of precision: watch the loss beside FP32's where training is long or delicate.",
    },
    told=lambda policy: () if policy.weights == "half" else (_SENTENCES[policy.autocast],),
)
