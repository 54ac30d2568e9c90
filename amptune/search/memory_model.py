"""How much memory a batch size needs, learned from the runs there were. Pure.

Peak memory is taken as a fixed part and a part for each sample, seen through what real GPUs do to that line:
workspaces that come and go with the size, an allocator that reserves more than is in use, a peak that small
batches have in the optimizer step, and convolution workspaces that give way where memory is short.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from amptune.measure.outcome import Outcome
from amptune.policy.settings import CompileMode, MemoryFormat, Policy, Weights
from amptune.search.memory_fit import Fit, fit_of
from amptune.search.memory_runs import FixedPart, Line, Observation, line_through, observation_of

__all__ = ["Arm", "MemoryModel", "arm_of"]

# Only what is so far above the limit is called an out-of-memory before it happened.
CLEARLY = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """The settings that decide what a sample takes. bf16 and fp16 take the same; IEEE math has workspaces of its own.

    Half weights take less than autocast, which keeps some tensors in FP32 and casts weights; masters take their part.

    On an H200 DeepLabV3+ peaks at 39.5 GB with IEEE convolutions and at 6.6 GB with TF32 ones.
    """

    half: bool = False
    weights: Weights = "fp32"
    masters: bool = False
    ieee: bool = False
    memory_format: MemoryFormat = "contiguous"
    cudnn_benchmark: bool = False
    compile: CompileMode = "off"
    cuda_graphs: bool = False

    @property
    def likes_workspaces(self) -> bool:
        """Whether convolutions may take far more than they need: DeepLabV3+ in TF32 72.6 GB with cudnn.benchmark."""
        return self.cudnn_benchmark or self.ieee

    def keeps_the_same(self, other: Arm) -> bool:
        """Whether both keep the same tensors for the backward pass, and so differ in workspaces alone."""
        same_graph = (self.compile, self.cuda_graphs) == (other.compile, other.cuda_graphs)
        return same_graph and (self.half, self.weights) == (other.half, other.weights)


def arm_of(policy: Policy) -> Arm:
    """The arm whose runs tell what the policy needs."""
    return Arm(
        half=policy.precision != "off",
        weights=policy.weights,
        masters=policy.master_weights,
        ieee=policy.precision == "off" and policy.fp32_math == "ieee",
        memory_format=policy.memory_format,
        cudnn_benchmark=policy.cudnn_benchmark,
        compile=policy.compile,
        cuda_graphs=policy.cuda_graphs,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """What is known of every arm, for a limit of what one process may allocate, in MiB."""

    limit_mib: float
    fixed: FixedPart = field(default_factory=FixedPart)
    seen: Mapping[Arm, tuple[Observation, ...]] = field(default_factory=dict)

    def with_outcome(self, policy: Policy, batch_size: int, outcome: Outcome) -> MemoryModel:
        """With what the outcome says about memory, if anything; the later of two at the same size counts."""
        new = observation_of(batch_size, outcome)
        if new is None:
            return self
        arm = arm_of(policy)
        others = tuple(one for one in self.seen.get(arm, ()) if one.batch_size != batch_size)
        return replace(self, seen={**self.seen, arm: (*others, new)})

    def with_outcomes(self, outcomes: Iterable[tuple[Policy, int, Outcome]]) -> MemoryModel:
        """The same for several, as (policy, batch size, outcome)."""
        model = self
        for policy, batch_size, outcome in outcomes:
            model = model.with_outcome(policy, batch_size, outcome)
        return model

    def fit(self, policy: Policy) -> Fit | None:
        """What is known of the policy's arm, helped by others; None where none of its runs succeeded."""
        arm = arm_of(policy)
        others = {other: points for other in self.seen if other != arm and (points := self._free(other))}
        like = [line_through(points) for other, points in others.items() if len(points) > 1]
        floors = [self._floor(points) for other, points in others.items() if other.keeps_the_same(arm)]
        fit = fit_of(
            self.seen.get(arm, ()),
            self.limit_mib,
            self.fixed,
            like=like[0] if like else None,
            floor=min(floors, key=lambda line: line.per_sample_mib, default=None),
        )
        return fit and replace(fit, may_give_more=arm.likes_workspaces and not floors)

    def predicts_oom(self, policy: Policy, batch_size: int) -> bool:
        """Whether so many samples clearly do not fit: it is not worth a run to see it."""
        fit = self.fit(policy)
        if fit is None:
            seen = self.seen.get(arm_of(policy), ())
            return any(batch_size >= CLEARLY * one.batch_size for one in seen)
        if fit.smallest_failed is not None and batch_size >= CLEARLY * fit.smallest_failed:
            return True
        return batch_size > fit.largest_run and fit.least_mib(batch_size) > CLEARLY * self.limit_mib

    def _free(self, arm: Arm) -> list[tuple[int, float]]:
        """(batch size, allocated MiB) of the runs of an arm that memory did not press on."""
        return [(one.batch_size, one.allocated_mib) for one in self.seen[arm] if one.ran and not one.alloc_retries]

    def _floor(self, points: Sequence[tuple[int, float]]) -> Line:
        """Through several; through one with a fixed part in the middle of what it may be."""
        if len(points) > 1:
            return line_through(points)
        ((n, mib),) = points
        most_mib = self.fixed.most_mib if math.isfinite(self.fixed.most_mib) else self.fixed.least_mib
        fixed_mib = min((self.fixed.least_mib + most_mib) / 2, 0.8 * mib)
        return Line(fixed_mib=fixed_mib, per_sample_mib=(mib - fixed_mib) / n)
