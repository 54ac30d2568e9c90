"""Choices for torch.compile: the policies to compile, how many at the same time, and when to give up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

from amptune.measure.results.outcome import Failure, Measurement
from amptune.policy.settings import CompileMode, Fp32Math, MemoryFormat, Policy
from amptune.search.plan.compile_costs import expected_compile_s
from amptune.search.sampler.study import Study

__all__ = ["GraphsAtOnce", "best_of_dtypes", "cannot_compile", "instead_of", "one_of_each_kind"]

# If graphs are compiled one after another, the best policies of this many dtypes are compiled.
DTYPES_COMPILED = 2
# The modes to begin with, the first that the space has: CUDA graphs save kernel launches, whatever the kernels are.
COMPILE_FIRST: tuple[CompileMode, ...] = ("reduce-overhead", "default")
# The preferred values for the first graph of a kind, compiled before anything was measured. The optimizer is in no
# graph; a fused one saves kernel launches too.
FUSED: tuple[bool, ...] = (True, False)
MATHS: tuple[Fp32Math, ...] = ("tf32", "stock", "ieee")
RECIPES = (
    Policy(autocast="bf16"),
    Policy(autocast="fp16"),
    Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True),
    Policy(),
)
LAYOUTS: tuple[MemoryFormat, ...] = ("channels_last_3d", "channels_last", "contiguous")
# A graph takes longer by this share for each other one compiled at the same time (VGG16, eight graphs, sixteen cores).
BESIDE_ANOTHER = 0.15
# The device memory that a compiling process is expected to need, relative to the eager baseline: CUDA graphs have their
# own memory pool, and the process has its own CUDA context.
OVER_EAGER = 1.5
# Compiling is given up after this many compiled policies failed and none ran.
COMPILE_ATTEMPTS = 2


def one_of_each_kind(study: Study, baseline: Policy) -> list[Policy]:
    """Returns one compiled policy, not measured yet, of each precision and memory format; half precision first.

    If a model waits for the host, its eager steps do not tell which kind is fastest when compiled.
    """
    plain = [replace(one, batch_size=baseline.batch_size, accumulate=baseline.accumulate) for one in RECIPES]
    for mode in COMPILE_FIRST:
        found: dict[tuple[str, str], Policy] = {}
        for layout, recipe, fused, fp32_math in product(LAYOUTS, plain, FUSED, MATHS):
            policy = replace(recipe, memory_format=layout, fused_optimizer=fused, compile=mode)
            policy = replace(policy, fp32_math=fp32_math) if recipe.precision == "off" else policy
            if policy in study:
                found.setdefault(_kind(policy), policy)
        if found:
            return [policy for policy in found.values() if study.trial_of(policy) is None]
    return []


def best_of_dtypes(study: Study) -> list[Policy]:
    """Returns the best policies so far of two dtypes, compiled, if no graph of their kind was measured yet."""
    scores = {trial.policy: study.yardstick.score(trial.outcome) or 0.0 for trial in study.trials}
    compiled = {_kind(policy) for policy in scores if policy.compile != "off"}
    best: dict[str, Policy] = {}
    for policy in sorted(filter(scores.get, scores), key=scores.__getitem__, reverse=True):
        best.setdefault(policy.precision, policy)
    for mode in COMPILE_FIRST:
        graphs = [policy.compiled(mode) for policy in best.values() if _kind(policy) not in compiled]
        known = [policy for policy in graphs if policy in study]
        if known:
            return known[:DTYPES_COMPILED]
    return []


def _kind(policy: Policy) -> tuple[str, str]:
    return policy.precision, policy.memory_format


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphsAtOnce:
    """The limits on compiling several graphs at the same time, for a model with this many leaf modules.

    `most` is the number of graphs that the CPU cores are enough for, `memory_mib` the device's memory.
    """

    most: int = 1
    leaves: int = 0
    memory_mib: float = math.inf

    def within(self, limit_s: Callable[[int], float], baseline: Measurement) -> int:
        """Returns how many graphs fit into memory together and into the time; `limit_s` gives the time for a number."""
        in_memory = self.memory_mib / (OVER_EAGER * max(1.0, baseline.peak_reserved_mib))
        count = int(min(self.most, in_memory))
        while count > 0 and self._compiled_s(count) > limit_s(count):
            count -= 1
        return count

    def _compiled_s(self, count: int) -> float:
        return expected_compile_s(self.leaves) * (1 + BESIDE_ANOTHER * (count - 1))


def instead_of(policy: Policy, failure: Failure, study: Study) -> list[Policy]:
    """Returns what to try if a compiled policy fails: a smaller batch (graphs need more memory) or a simpler mode."""
    if failure.kind == "oom":
        smaller = study.next_smaller(policy)
        return [] if smaller is None else [smaller]
    other = policy.compiled(COMPILE_FIRST[-1])
    return [other] if other != policy and other in study else []


def cannot_compile(study: Study) -> bool:
    """Returns whether all compiled policies failed; with two modes in each, as CUDA graphs alone may be the cause."""
    compiled = [trial for trial in study.trials if trial.policy.compile != "off"]
    broken = {
        trial.policy: trial.outcome
        for trial in compiled
        if isinstance(trial.outcome, Failure) and trial.outcome.kind != "oom"
    }
    others = any(instead_of(policy, failure, study) for policy, failure in broken.items())
    enough = len({policy.compile for policy in broken}) > 1 or not others
    return len(broken) == len(compiled) >= COMPILE_ATTEMPTS and enough
