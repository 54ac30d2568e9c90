"""The parts of a policy that decide one effect: its numerics, its memory, torch.compile's graph, its process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from amptune.policy.knobs.knob import Knob
from amptune.policy.settings import KNOBS, Policy

__all__ = [
    "graph_of",
    "memory_of",
    "numerics_of",
    "ordered_as",
    "process_of",
    "rounding_of",
    "whole_step_of",
]


@cache
def numerics_of(policy: Policy) -> Policy:
    """Returns the policy with only the settings that its numerics depend on."""
    as_numerics_tell = {knob.name: knob.in_numerics(policy) for knob in KNOBS if knob.in_numerics is not None}
    return replace(_with(policy, lambda knob: knob.numerics != "none"), **as_numerics_tell)


@cache
def rounding_of(policy: Policy) -> Policy:
    """Returns the policy with only the settings that round values otherwise: stock PyTorch's are FP32."""
    return _with(policy, lambda knob: knob.numerics == "rounding")


@cache
def memory_of(policy: Policy) -> Policy:
    """Returns the policy with only the settings that its memory depends on, but for the batch's size."""
    as_memory_tells = {knob.name: knob.in_memory(policy) for knob in KNOBS if knob.in_memory is not None}
    return replace(_with(policy, lambda knob: knob.memory), **as_memory_tells)


def ordered_as(recipe: Policy, policy: Policy) -> Policy:
    """Returns a precision's plain recipe with the policy's settings that change only the order of sums."""
    return replace(recipe, **{knob.name: knob.of(policy) for knob in KNOBS if knob.numerics == "order"})


@cache
def graph_of(policy: Policy) -> Policy:
    """Returns the policy with only the settings that torch.compile's graph depends on: equal ones share the cache."""
    return _with(policy, lambda knob: knob.graph)


@cache
def process_of(policy: Policy) -> tuple[bool, ...]:
    """Returns the kind of process that a policy needs; policies of one kind can be measured in one."""
    return tuple(knob.departs(policy) for knob in KNOBS if knob.process)


@cache
def whole_step_of(policy: Policy) -> Policy | None:
    """Returns the policy that records whole steps in place of passes; None for others."""
    return replace(policy, cuda_graphs="step") if policy.cuda_graphs is True and policy.weights == "fp32" else None


def _with(policy: Policy, is_kept: Callable[[Knob], bool]) -> Policy:
    """Returns the policy with all other settings at stock PyTorch's."""
    return replace(policy, **{knob.name: knob.stock for knob in KNOBS if not is_kept(knob)})
