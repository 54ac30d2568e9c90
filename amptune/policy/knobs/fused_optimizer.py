"""The optimizer's fused kernel; `Tuned.optimizer` switches to it."""

from __future__ import annotations

from amptune.policy.knobs.knob import TRUTH, Knob

__all__ = ["FUSED_OPTIMIZER"]

FUSED_OPTIMIZER = Knob(
    name="fused_optimizer",
    stock=False,
    values=TRUTH,
    numerics="none",
    memory=False,
    graph=False,
    matters=lambda value, subject: subject.fusable or not value,
    sentences={True: "fused_optimizer true: one kernel updates all parameters."},
)
