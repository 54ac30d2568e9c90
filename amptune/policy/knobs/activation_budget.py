"""The share of the activations that torch.compile keeps; the backward pass computes the rest again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import ClassVar

from amptune.policy.findings import Finding
from amptune.policy.knobs.knob import Knob, Model, Settings, Undo

__all__ = ["ACTIVATION_BUDGET"]


class _Process:
    """The budgets of the policies that are applied, the last one in force; that before them, and that of the graphs."""

    applied: ClassVar[list[tuple[float]]] = []
    before: float = 1.0
    of_graphs: float = 1.0


def _apply(budget: float, _: Model) -> Undo:
    if budget == _Process.of_graphs == 1.0 and not _Process.applied:
        return lambda: None
    from torch._functorch import config

    if not _Process.applied:
        _Process.before = config.activation_memory_budget
    own = (budget,)
    _Process.applied.append(own)
    config.activation_memory_budget = budget
    _forget_graphs_of_others(budget)

    def undo() -> None:
        _Process.applied[:] = [one for one in _Process.applied if one is not own]
        config.activation_memory_budget = _Process.applied[-1][0] if _Process.applied else _Process.before

    return undo


def _forget_graphs_of_others(budget: float) -> None:
    """Graphs in memory do not know their budget, so those of another one are compiled anew."""
    if budget != _Process.of_graphs and "torch._dynamo" in sys.modules:
        import torch._dynamo

        torch._dynamo.reset_code_caches()  # who listens for graphs that are compiled goes on listening
    _Process.of_graphs = budget


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
