"""How much of the activations torch.compile keeps for the backward pass; it computes the rest again."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from amptune.policy.findings import Finding
from amptune.policy.knobs.knob import Knob, Model, Settings, Undo

__all__ = ["ACTIVATION_BUDGET"]


def _apply(budget: float, _: Model) -> Undo:
    if budget == 1.0:
        return lambda: None
    from torch._functorch import config

    before = config.activation_memory_budget
    _set(budget)
    return lambda: _set(before)


def _set(budget: float) -> None:
    """Sets the compiler's budget; graphs in memory do not know theirs, so they are compiled anew."""
    import torch
    from torch._functorch import config

    config.activation_memory_budget = budget
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _idle(policy: Settings, _: Model) -> Iterator[Finding]:
    if policy.activation_budget != 1.0 and policy.compile == "off":
        message = "activation_budget is torch.compile's, and compile is off: checkpoint does the same without it"
        yield Finding(code="activation-budget-without-effect", message=message)


def _told(policy: Settings) -> Iterator[str]:
    if policy.activation_budget != 1.0 and policy.compile != "off":
        yield (
            f"activation_budget {policy.activation_budget:g}: of the memory that activations take, torch.compile keeps "
            "this share, and computes the rest again in the backward pass, the cheapest first."
        )


# AOTAutograd's partitioner chooses what to compute again (torch/_functorch/partitioners.py). The budget is part of the
# key of its cache (torch/_functorch/_aot_autograd/autograd_cache.py).
ACTIVATION_BUDGET = Knob(
    name="activation_budget",
    stock=1.0,
    is_share=True,
    # Compiled kernels round what they compute again as they like.
    numerics="none",
    in_numerics=lambda policy: _in_effect(policy),
    in_memory=lambda policy: _in_effect(policy),
    # As checkpoint: what repeated blocks keep is what there is to save.
    matters=lambda value, subject: value == 1.0 or bool(subject.blocks),
    is_optional=True,
    apply=_apply,
    idle=_idle,
    told=_told,
)


def _in_effect(policy: Settings) -> float:
    return 1.0 if policy.compile == "off" else float(policy.activation_budget)
