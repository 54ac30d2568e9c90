"""Checks whether a policy is valid here: other hardware is an error, changed software gives findings."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping

from amptune.errors import HardwareMismatchError
from amptune.hardware.labels import is_software_label
from amptune.policy.findings import Finding
from amptune.policy.policy_file import PolicyFile

__all__ = ["drift", "is_of_this_machine", "memory_bounds", "mismatches", "require_valid"]

# Drivers and ECC take a little of a GPU's memory; one with another memory size differs by far more.
MEMORY_TOLERANCE = 0.02
# torch's figure leaves out what the driver keeps: up to 2.9 % (T4: 15,360 and 14,909 MiB; RTX 3070: 8,192 and 7,966).
TORCH_MEMORY_TOLERANCE = 0.05
OVERRIDE = "AMPTUNE_ANY_HARDWARE"


def require_valid(
    policy_file: PolicyFile, labels: Mapping[str, str], *, any_hardware: bool = False, nvml: bool = True
) -> tuple[Finding, ...]:
    """Returns a finding for each software version that changed since the policy was tuned.

    Without `nvml` the memory in `labels` is torch's figure. Raises `HardwareMismatchError` if the policy is not valid
    for this machine, unless `any_hardware` or `AMPTUNE_ANY_HARDWARE=1` allows it.
    """
    wrong = list(mismatches(policy_file.valid_for, labels, _memory_tolerance(nvml)))
    if wrong and not any_hardware and os.environ.get(OVERRIDE, "") in ("", "0"):
        name = f"policy {policy_file.name!r}" if policy_file.name else "this policy"
        raise HardwareMismatchError(
            f"{name} was not tuned on this kind of machine:\n  "
            + "\n  ".join(wrong)
            + f"\ntune here with `amptune tune`; to use it all the same, pass any_hardware=True or set {OVERRIDE}=1"
        )
    return tuple(drift(policy_file.valid_for, labels))


def is_of_this_machine(policy_file: PolicyFile, labels: Mapping[str, str], *, nvml: bool = True) -> bool:
    """Returns True if the evidence is of hardware like this and, if both have its digest, of this model."""
    wrong = any(mismatches(policy_file.valid_for, labels, _memory_tolerance(nvml)))
    return not wrong and not any(found.figures["label"] == "model" for found in drift(policy_file.valid_for, labels))


def mismatches(
    valid_for: Mapping[str, str], labels: Mapping[str, str], memory_tolerance: float = MEMORY_TOLERANCE
) -> Iterator[str]:
    """Yields a line of text for each hardware label that differs here, or that this machine lacks."""
    for name, tuned in valid_for.items():
        if is_software_label(name):
            continue
        here = labels.get(name)
        if here is None:
            yield f"{name}: {tuned} where it was tuned, and this machine has no such label"
        elif not _same(name, tuned, here, memory_tolerance):
            yield f"{name}: {tuned} where it was tuned, {here} here"


def drift(valid_for: Mapping[str, str], labels: Mapping[str, str]) -> Iterator[Finding]:
    """Yields each changed version. Skips versions this machine does not report, such as the model's digest."""
    for name, tuned in valid_for.items():
        here = labels.get(name)
        if is_software_label(name) and here is not None and here != tuned:
            if name == "model":
                change = "this policy was tuned on a model with other modules or parameter shapes"
            else:
                change = f"{name} was {tuned} when this policy was tuned, and is {here} here"
            yield Finding(
                code="drift",
                message=f"{change}; its claim may not hold",
                figures={"label": name, "tuned": tuned, "here": here},
            )


def memory_bounds(memory_mib: int) -> tuple[int, int]:
    """Returns the least and the most that any reading of a GPU with this memory gives, in MiB."""
    return int(memory_mib * (1 - TORCH_MEMORY_TOLERANCE)), math.ceil(memory_mib * (1 + MEMORY_TOLERANCE))


def _memory_tolerance(nvml: bool) -> float:
    return MEMORY_TOLERANCE if nvml else TORCH_MEMORY_TOLERANCE


def _same(name: str, tuned: str, here: str, memory_tolerance: float) -> bool:
    if name == "nvidia.com/gpu.memory" and tuned.isdecimal() and here.isdecimal():
        return abs(int(here) - int(tuned)) <= memory_tolerance * int(tuned)
    return tuned == here
