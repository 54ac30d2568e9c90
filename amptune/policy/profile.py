"""Profiles: one file for several kinds of GPU; each entry names the labels of its machines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from amptune.errors import HardwareMismatchError
from amptune.hardware.labels import is_software_label, label_of
from amptune.hardware.slurm import FEATURE, node_features
from amptune.policy.condition import Condition, condition_of
from amptune.policy.hardware_match import memory_bounds
from amptune.policy.policy_file import PolicyFile

__all__ = [
    "Entry",
    "Profile",
    "Rejected",
    "Resolution",
    "entry_for",
    "resolve",
    "resolve_here",
    "taken_before",
    "useless",
]

MEMORY = "nvidia.com/gpu.memory"
# A job with this in its environment starts only where an entry matches.
REQUIRE = "AMPTUNE_REQUIRE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A policy for machines that have all labels in `match`: each is a value, or comparisons such as `>=80000`.

    Raises `ValueError` for a malformed comparison when its conditions are asked for.
    """

    match: Mapping[str, str] = field(hash=False)
    policy: PolicyFile

    @property
    def conditions(self) -> dict[str, Condition]:
        """The condition on each label."""
        return {name: condition_of(name, text) for name, text in self.match.items()}


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


def resolve(profile: Profile, labels: Mapping[str, str], *, require_entry: bool = False) -> Resolution:
    """Returns the first entry whose labels all match, else the default, unless an entry is required.

    Raises `HardwareMismatchError`, with each entry's mismatches, if there is neither.
    """
    rejected: list[Rejected] = []
    for index, entry in enumerate(profile.entries):
        because = tuple(_mismatches(entry, labels))
        if not because:
            return Resolution(entry=index, policy_file=entry.policy, rejected=tuple(rejected))
        rejected.append(Rejected(entry=index, because=because))
    if profile.default is not None and not require_entry:
        return Resolution(entry="default", policy_file=profile.default, rejected=tuple(rejected))
    reasons = "".join(f"\n  entry {r.entry}: {'; '.join(r.because)}" for r in rejected)
    no_default = "it has no default" if profile.default is None else f"{REQUIRE}=1 does not let it take the default"
    raise HardwareMismatchError(f"no entry of the profile matches this machine, and {no_default}:{reasons}")


def resolve_here(profile: Profile, labels: Mapping[str, str] | None = None) -> Resolution:
    """Resolves for a machine with these labels, by default this one.

    AMPTUNE_REQUIRE=1 in the environment requires an entry. Slurm is asked for the node's features only if an entry
    names one.
    """
    if labels is None:
        from amptune.hardware.detect import probe

        asks_slurm = any(name.startswith(FEATURE) for entry in profile.entries for name in entry.match)
        labels = {**(node_features() if asks_slurm else {}), **dict(probe().labels)}
    return resolve(profile, labels, require_entry=os.environ.get(REQUIRE, "") not in ("", "0"))


def entry_for(policy_file: PolicyFile) -> Entry | None:
    """Returns an entry that matches the machine a policy was tuned on; None if the policy names no machine."""
    match = {name: value for name, value in policy_file.valid_for.items() if not is_software_label(name)}
    if match.get(MEMORY, "").isdecimal():
        least, most = memory_bounds(int(match[MEMORY]))
        match[MEMORY] = f">={least},<={most}"
    return Entry(match=match, policy=policy_file) if match else None


def taken_before(entries: Sequence[Entry]) -> Iterator[tuple[int, int]]:
    """Yields (earlier, later) for each entry whose policy was tuned on a machine that an earlier entry takes."""
    for later, entry in enumerate(entries):
        takes = (n for n, one in enumerate(entries[:later]) if not any(_mismatches(one, entry.policy.valid_for)))
        yield from ((earlier, later) for earlier in list(takes)[:1])


def useless(profile: Profile) -> Iterator[tuple[int, str | None, str]]:
    """Yields each entry that no machine takes, with the label that is to blame, None for the whole, and why."""
    conditions = [entry.conditions for entry in profile.entries]
    for index, own in enumerate(conditions):
        never = [name for name, condition in own.items() if not condition.can_hold]
        for name in never:
            yield index, name, f"no value is {profile.entries[index].match[name]}, so this entry never matches"
        general = (earlier for earlier in range(index) if not never and _covers(conditions[earlier], own))
        if (earlier := next(general, None)) is not None:
            yield index, None, f"entry {earlier} stands before and takes every machine that this entry matches"


def _covers(general: Mapping[str, Condition], special: Mapping[str, Condition]) -> bool:
    return all(name in special and special[name].implies(condition) for name, condition in general.items())


def _mismatches(entry: Entry, labels: Mapping[str, str]) -> Iterator[str]:
    for name, condition in entry.conditions.items():
        value, wanted = label_of(name, labels), entry.match[name]
        if value is None:
            yield f"needs {name} {wanted}, and this machine reports none"
        elif not condition.holds(value):
            yield f"needs {name} {wanted}, and it is {value} here"
