"""Profiles: one file for several kinds of GPU; each entry names the labels of its machines."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from amptune.errors import HardwareMismatchError
from amptune.hardware.labels import is_software_label
from amptune.policy.policy_file import PolicyFile

__all__ = ["Entry", "Profile", "Rejected", "Resolution", "entry_for", "resolve"]

_COMPARISON = re.compile(r"\s*(>=|<=|!=|>|<)\s*(.+?)\s*")
_ORDER = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A policy for machines that have all labels in `match`: each is a value, or a comparison such as `>=80000`."""

    match: Mapping[str, str] = field(hash=False)
    policy: PolicyFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Entries in the order they are tried, and a default for machines that match none."""

    entries: tuple[Entry, ...]
    default: PolicyFile | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """Index of an entry that was rejected, and each label that did not match."""

    entry: int
    because: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """The choice from a profile: `entry` is the chosen index or "default", `rejected` the entries tried before it."""

    entry: int | str
    policy_file: PolicyFile
    rejected: tuple[Rejected, ...]


def resolve(profile: Profile, labels: Mapping[str, str]) -> Resolution:
    """Returns the first entry whose labels all match, else the default.

    Raises `HardwareMismatchError`, with each entry's mismatches, if no entry matches and there is no default.
    """
    rejected: list[Rejected] = []
    for index, entry in enumerate(profile.entries):
        because = tuple(_mismatches(entry.match, labels))
        if not because:
            return Resolution(entry=index, policy_file=entry.policy, rejected=tuple(rejected))
        rejected.append(Rejected(entry=index, because=because))
    if profile.default is not None:
        return Resolution(entry="default", policy_file=profile.default, rejected=tuple(rejected))
    reasons = "".join(f"\n  entry {r.entry}: {'; '.join(r.because)}" for r in rejected)
    raise HardwareMismatchError(f"no entry of the profile matches this machine, and it has no default:{reasons}")


def entry_for(policy_file: PolicyFile) -> Entry | None:
    """Returns an entry that matches the machine a policy was tuned on; None if the policy names no machine."""
    match = {
        name: value
        for name, value in policy_file.valid_for.items()
        if not is_software_label(name) and name != "nvidia.com/gpu.memory"
    }
    memory = policy_file.valid_for.get("nvidia.com/gpu.memory", "")
    if memory.isdecimal():  # readings of one GPU differ by up to 3 % (hardware_match.py); less memory is another GPU
        match["nvidia.com/gpu.memory"] = f">={int(int(memory) * 0.95)}"
    return Entry(match=match, policy=policy_file) if match else None


def _mismatches(match: Mapping[str, str], labels: Mapping[str, str]) -> Iterator[str]:
    for name, wanted in match.items():
        if name not in labels:
            yield f"{name} is wanted to be {wanted}, and this machine has no such label"
        elif not _holds(name, wanted, labels[name]):
            yield f"{name} is wanted to be {wanted}, and is {labels[name]} here"


def _holds(name: str, wanted: str, value: str) -> bool:
    comparison = _COMPARISON.fullmatch(wanted)
    if comparison is None:
        return wanted == value
    sign, limit = comparison[1], comparison[2]
    if sign == "!=":
        return value != limit
    try:
        return bool(_ORDER[sign](_size(name, value), _size(name, limit)))
    except ValueError:  # "80GB" has no order against ">=80000"
        return False


def _size(name: str, text: str) -> tuple[float, ...]:
    """Returns the sort key: a number, or a tuple for software versions, where 2.10 comes after 2.9."""
    if not is_software_label(name):
        return (float(text),)
    parts = [int(part) for part in text.split(".")]
    while parts and not parts[-1]:  # 2.0 equals 2
        parts.pop()
    return tuple(parts)
