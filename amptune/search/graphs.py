"""Which policies to compile first, how many beside one another, and when to give compiling up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from amptune.measure.outcome import Failure, Measurement
from amptune.policy.settings import CompileMode, Policy
from amptune.search.compile_costs import COMPILE_S
from amptune.search.study import Study

__all__ = [
    "DTYPES_COMPILED",
    "MEASURED_S",
    "beside_one_another_s",
    "cannot_compile",
    "instead_of",
    "that_fit",
    "to_compile",
]

# The best policies of so many dtypes are compiled; or of more kinds, each a dtype and a memory format, where
# several graphs can be compiled beside one another: which of them is fastest compiled, the eager times of a model that
# waits for the host do not tell. The mode to begin with, where the space has it: CUDA graphs save launches, whatever
# the kernels are.
DTYPES_COMPILED = 2
COMPILE_FIRST: tuple[CompileMode, ...] = ("reduce-overhead", "default")
# A graph takes longer by this share for each other one compiled beside it (VGG16, eight graphs on sixteen cores), and
# then a moment to be measured.
BESIDE_ANOTHER, MEASURED_S = 0.15, 2.0
# What a process that compiles is reckoned to need of the device's memory, over that of the eager policy: CUDA graphs
# have a pool of their own, and its context comes on top.
OVER_EAGER = 1.5
# Compiling is given up when so many compiled policies failed, none having run.
COMPILE_ATTEMPTS = 2


def to_compile(study: Study, count: int = DTYPES_COMPILED) -> list[Policy]:
    """The best policies so far of two dtypes, compiled; or of more kinds: what is fastest then often was not before."""
    scores = {trial.policy: study.yardstick.score(trial.outcome) or 0.0 for trial in study.trials}
    best: dict[tuple[str, ...], Policy] = {}
    for policy in sorted(filter(scores.get, scores), key=scores.__getitem__, reverse=True):
        layout = (policy.memory_format,) if count > DTYPES_COMPILED else ()
        best.setdefault((policy.precision, *layout), policy)
    for mode in COMPILE_FIRST:
        compiled = (replace(policy, compile=mode) for policy in best.values())
        known = [policy for policy in compiled if policy in study]
        if known:
            return known[:count]
    return []


def beside_one_another_s(count: int) -> float:
    """What it is expected to take to compile and to measure so many."""
    return COMPILE_S * (1 + BESIDE_ANOTHER * (count - 1)) + count * MEASURED_S


def that_fit(study: Study, policies: Sequence[Policy], memory_mib: float) -> list[Policy]:
    """The first ones whose first steps, taken while they are compiled, fit into the device's memory together."""
    trials = (study.trial_of(replace(policy, compile="off")) for policy in policies)
    peaks = (trial.outcome.peak_reserved_mib for trial in trials if trial and isinstance(trial.outcome, Measurement))
    together = accumulate(OVER_EAGER * peak for peak in peaks)
    return list(policies[: sum(1 for mib in together if mib <= memory_mib)])


def instead_of(policy: Policy, failure: Failure, study: Study) -> list[Policy]:
    """What to try where a compiled policy fails: a smaller batch, since graphs hold more; or a mode that does less."""
    if failure.kind == "oom":
        smaller = study.next_smaller(policy)
        return [] if smaller is None else [smaller]
    other = replace(policy, compile=COMPILE_FIRST[-1])
    return [other] if other != policy and other in study else []


def cannot_compile(study: Study) -> bool:
    """Whether all that was compiled failed, in two modes where there are two: CUDA graphs alone may be what fails."""
    compiled = [trial for trial in study.trials if trial.policy.compile != "off"]
    broken = {
        trial.policy: trial.outcome
        for trial in compiled
        if isinstance(trial.outcome, Failure) and trial.outcome.kind != "oom"
    }
    others = any(instead_of(policy, failure, study) for policy, failure in broken.items())
    enough = len({policy.compile for policy in broken}) > 1 or not others
    return len(broken) == len(compiled) >= COMPILE_ATTEMPTS and enough
