"""The long look's answer: does a policy train like FP32 over thousands of steps of the user's own loop? Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from amptune.hardware.machine import Hardware
from amptune.measure.numerics.comparison import LEAST_DEVIATION
from amptune.measure.numerics.limits import buffer_limit
from amptune.measure.numerics.long_comparison import (
    LEAST_LOOK_STEPS,
    LEAST_SEEDS,
    Agreement,
    CurvePair,
    Gap,
    buffers_of,
    gaps_of,
)
from amptune.measure.results.outcome import Failure
from amptune.measure.results.training_runs import TIMES_SPREAD, BufferParity
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.search.gate.judgement import is_own_fault

__all__ = ["LongLook"]


@dataclass(frozen=True, kw_only=True)
class LongLook:
    """Long training under a policy beside FP32: the curves of each seed, and what they differ by.

    `steps` and `seeds` were asked for. `failure` is what ended the policy's training; `stopped` says in words why there
    are fewer seeds or steps. `changed` holds findings about other software. `tolerance` is the workload's own for
    `evaluate`.
    """

    policy: Policy
    name: str
    hardware: Hardware
    steps: int
    seeds: int
    pairs: tuple[CurvePair, ...]
    tolerance: float | None = None
    failure: Failure | None = None
    stopped: str | None = None
    interrupted: bool = False
    changed: tuple[Finding, ...] = ()
    seconds: float = 0.0

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """The figures that can be told from so many seeds and steps; none from too few."""
        return gaps_of(self.pairs, self.tolerance) if self._are_enough else ()

    @cached_property
    def buffers(self) -> tuple[BufferParity, ...]:
        return buffers_of(self.pairs) if self._are_enough else ()

    @property
    def _are_enough(self) -> bool:
        return len(self.pairs) >= LEAST_SEEDS and self.steps_seen >= LEAST_LOOK_STEPS

    @property
    def steps_seen(self) -> int:
        """The steps that all curves have."""
        return min((pair.steps for pair in self.pairs), default=0)

    @property
    def agreement(self) -> Agreement:
        """Returns "met" if the policy trains like FP32, "missed" if it does not, "open" if nobody can tell."""
        is_broken = self.failure is not None and is_own_fault(self.policy, self.failure)
        if is_broken or self.buffers_off or any(gap.agreement == "missed" for gap in self.gaps):
            return "missed"
        is_whole = self.failure is None and self.steps_seen >= self.steps
        return "met" if self.gaps and is_whole and all(gap.agreement == "met" for gap in self.gaps) else "open"

    @property
    def worst(self) -> Gap | None:
        """The gap that decides: one that is missed, else one that is open, else any; of these the largest."""
        ranks = ("met", "open", "missed").index
        return max(self.gaps, key=lambda gap: (ranks(gap.agreement), gap.times_allowed), default=None)

    @property
    def shown(self) -> tuple[Gap, ...]:
        """The gaps of the first and the last part of the loss, of all of it, and of what `evaluate` gave."""
        parts = [gap for gap in self.gaps if gap.what.startswith("loss in steps")]
        return (*parts[:1], *parts[-1:], *self.gaps[len(parts) :])

    @property
    def buffers_off(self) -> list[BufferParity]:
        """The buffers that end further from FP32's than is allowed, the worst first."""
        off = [buffer for buffer in self.buffers if not buffer.off <= buffer_limit(buffer)]
        return sorted(off, key=lambda buffer: buffer.off / buffer_limit(buffer), reverse=True)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The answer, then what it rests on."""
        return (_answer(self), *_further(self), *self.changed)


def _answer(look: LongLook) -> Finding:
    worst = {} if look.worst is None else look.worst.as_dict()
    figures = {"steps": look.steps_seen, "seeds": len(look.pairs), **worst}
    over = f"over {look.steps_seen:,} steps and {len(look.pairs)} seeds"
    match look.agreement:
        case "met":
            code, message = "trains-like-fp32", f"trains like FP32, {over}; at most, {_in_words(look.worst)}"
        case "missed":
            code, message = "trains-unlike-fp32", f"does not train like FP32: {_miss(look)}"
        case "open":
            code, message = "undecided", f"could not tell: {_why_open(look)}"
    return Finding(code=code, message=message, figures=figures)


def _miss(look: LongLook) -> str:
    """Returns what misses: the failure, else the worst figure, else the worst buffer."""
    if look.failure is not None and look.failure.kind == "nonfinite":
        return f"with seed {len(look.pairs) + 1}, {look.failure.message}, and not in FP32"
    if look.failure is not None:
        return f"with seed {len(look.pairs) + 1} it raises what FP32 does not: {look.failure}"
    if look.worst is not None and look.worst.agreement == "missed":
        return _in_words(look.worst)
    buffer = look.buffers_off[0]
    return (
        f"the buffer {buffer.path} ends {buffer.off:.0%} off FP32's, where FP32's seeds are {buffer.apart:.0%} apart; "
        f"{buffer_limit(buffer):.0%} is allowed"
    )


def _why_open(look: LongLook) -> str:
    if look.failure is not None:
        return f"training under the policy ended with seed {len(look.pairs) + 1}: {look.failure}"
    stopped = "" if look.stopped is None else f"; {look.stopped}"
    if look.worst is None and len(look.pairs) >= LEAST_SEEDS:
        return f"an answer needs {LEAST_LOOK_STEPS} steps (trained: {look.steps_seen}){stopped}"
    if look.worst is None:
        return f"an answer needs {LEAST_SEEDS} seeds (trained: {len(look.pairs)}){stopped}"
    if look.worst.agreement == "open":
        return f"{_in_words(look.worst)}: the interval reaches beyond; give more --seeds{stopped}"
    return f"the first {look.steps_seen:,} of {look.steps:,} steps are like FP32's ({_in_words(look.worst)}){stopped}"


def _in_words(gap: Gap | None) -> str:
    if gap is None:
        return ""
    side, allowed = ("above", gap.above) if gap.difference > 0 else ("below", gap.below)
    return (
        f"{gap.what} is {gap.policy:.4g}, and {gap.fp32:.4g} in FP32 (±{gap.spread:.2g} between seeds): "
        f"{abs(gap.difference):.2g} ± {gap.error:.2g} {side}, {allowed:.2g} is allowed"
    )


def _further(look: LongLook) -> Iterator[Finding]:
    """Yields what limits the answer: seeds that are missing, and seeds of FP32 that do not differ."""
    if look.agreement != "open" and look.stopped is not None:
        message = f"{len(look.pairs)} of {look.seeds} seeds were trained; {look.stopped}"
        yield Finding(code="fewer-seeds", message=message)
    first = look.pairs[:1]
    if len(look.pairs) > 1 and all(pair.fp32.losses == first[0].fp32.losses for pair in look.pairs):
        message = (
            "the seeds of FP32 are all the same, as the workload gives the same batches in the same order each time; "
            f"so {TIMES_SPREAD * LEAST_DEVIATION:.1%} is allowed; shuffle the loader, or draw new data in batch(n)"
        )
        yield Finding(code="no-spread", message=message)
