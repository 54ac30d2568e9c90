"""Runs batch sizes until the largest that fits is known; every answer is a size that ran."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from amptune.measure.results.outcome import Failure, Measurement, Outcome
from amptune.policy.setting_effects import memory_of
from amptune.policy.settings import Policy
from amptune.search.batch_size.largest_size import MOST_PROBES, Outlook, Sizes
from amptune.search.batch_size.memory_model import MemoryModel
from amptune.search.plan.budget import Clock
from amptune.search.table.gains import counted
from amptune.search.table.trial import Trial

__all__ = ["LargestBatch", "Probe", "Sizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One run at one batch size, and the seconds it cost."""

    batch_size: int
    outcome: Outcome
    seconds: float

    @property
    def is_oom(self) -> bool:
        return isinstance(self.outcome, Failure) and self.outcome.kind == "oom"

    @property
    def is_refused(self) -> bool:
        """True if it failed for another reason than memory."""
        return isinstance(self.outcome, Failure) and not self.is_oom

    def seconds_for(self, batch_size: int) -> float:
        """Returns the seconds of a probe of another size: its steps take longer in proportion, the rest does not."""
        if not isinstance(self.outcome, Measurement):
            return 0.0
        steps = self.outcome.warmup_steps + len(self.outcome.step_ms)
        steps_s = min(self.seconds, steps * self.outcome.mean_ms / 1000)
        return self.seconds - steps_s + steps_s * batch_size / self.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest batch that ran within the limit, None if none did, and why no larger one was tried.

    It ran under the policy or another one of its arm, which needs about as much memory. `peak_mib` is what the
    allocator reserved in that run. `probes` are the runs of this search in order; earlier knowledge is not among them.
    """

    batch_size: int | None
    limit_mib: float
    because: str
    peak_mib: float = 0.0
    probes: tuple[Probe, ...] = ()

    @property
    def margin(self) -> float:
        """The share of the limit that is left free."""
        return 1 - self.peak_mib / self.limit_mib

    @property
    def ooms(self) -> int:
        return sum(probe.is_oom for probe in self.probes)

    def __str__(self) -> str:
        runs = f"{counted(len(self.probes), 'run')}, {self.ooms} out of memory"
        if self.batch_size is None:
            return f"no batch size is known to fit into {self.limit_mib:.0f} MiB: {self.because} ({runs})"
        return (
            f"largest batch {self.batch_size}: {self.peak_mib:.0f} of {self.limit_mib:.0f} MiB, {self.margin:.1%} "
            f"left free; {self.because} ({runs})"
        )


@dataclass
class Sizer:
    """A search for the largest batch of one policy after another; `model` keeps what it learns of memory.

    `run` measures a policy briefly at the policy's batch size and may take `left_s()` seconds; the caller enforces
    that. Sizes are those of `Sizes.around`, so the answer may be 3 % below the largest allowed size that fits.
    """

    run: Callable[[Policy], Outcome]
    model: MemoryModel
    own_batch_size: int
    allowed: Sequence[int] | None = None
    most: int | None = None
    left_s: Callable[[], float] = lambda: math.inf
    clock: Clock = time.monotonic
    most_probes: int = MOST_PROBES
    _last: Probe | None = None  # of those that ran
    _sizes: Sizes = field(init=False)

    def __post_init__(self) -> None:
        self._sizes = Sizes.around(self.own_batch_size, self.allowed, self.most)

    def learn(self, trials: Iterable[Trial]) -> None:
        """Adds what trials at any batch size say about memory."""
        sizes = ((trial, trial.policy.batch_size or self.own_batch_size) for trial in trials)
        self.model = self.model.with_outcomes((trial.policy, size, trial.outcome) for trial, size in sizes)

    def predicts_oom(self, policy: Policy) -> bool:
        """Returns True if the policy clearly does not fit at its batch size."""
        return self.model.predicts_oom(policy, policy.batch_size or self.own_batch_size)

    def largest(self, policy: Policy) -> LargestBatch:
        """Returns the largest batch of the policy, whatever batch size it has itself."""
        probes: list[Probe] = []
        because = self._next(policy, probes)
        while isinstance(because, int):
            probe = self._probe(policy, because)
            probes.append(probe)
            refused = [one for one in probes if one.is_refused]
            because = self._next_below(policy, probes, refused) if refused else self._next(policy, probes)
        return self._answer(policy, tuple(probes), because)

    def _next(self, policy: Policy, probes: Sequence[Probe]) -> int | str:
        """Returns the size to run next, or why there is none."""
        size = self._outlook(policy, probes).next_size()
        if isinstance(size, str):
            return size
        if len(probes) >= self.most_probes:
            return f"{len(probes)} runs are enough"
        if self.left_s() < (self._last.seconds_for(size) if self._last else 0.0):
            return f"there is no time to try {size}"
        return size

    def _next_below(self, policy: Policy, probes: Sequence[Probe], refused: Sequence[Probe]) -> int | str:
        """Returns a size half way down, in ratio, from one that the model or the data refuse, memory aside."""
        least = min(refused, key=lambda probe: probe.batch_size)
        because = f"a batch of {least.batch_size} fails: {least.outcome}"
        best = self._outlook(policy, probes).best
        ok = best.batch_size if best is not None else 0
        size = self._sizes.at_most(math.isqrt(max(1, ok) * least.batch_size))
        hung = isinstance(least.outcome, Failure) and least.outcome.kind == "timeout"
        is_over = hung or len(probes) >= self.most_probes
        return size if size > ok and not is_over else because

    def _outlook(self, policy: Policy, probes: Sequence[Probe]) -> Outlook:
        return Outlook(
            fit=self.model.fit(policy),
            seen=self.model.seen.get(memory_of(policy), ()),
            sizes=self._sizes,
            own=self.own_batch_size,
            limit_mib=self.model.limit_mib,
            ooms=sum(probe.is_oom for probe in probes),
            left=max(1, self.most_probes - len(probes)),
        )

    def _probe(self, policy: Policy, size: int) -> Probe:
        before_s = self.clock()
        outcome = self.run(replace(policy, batch_size=size))
        probe = Probe(batch_size=size, outcome=outcome, seconds=self.clock() - before_s)
        self.model = self.model.with_outcome(policy, size, outcome)
        self._last = probe if isinstance(outcome, Measurement) else self._last
        return probe

    def _answer(self, policy: Policy, probes: tuple[Probe, ...], because: str) -> LargestBatch:
        best = self._outlook(policy, probes).best
        answer = LargestBatch(batch_size=None, limit_mib=self.model.limit_mib, because=because, probes=probes)
        return answer if best is None else replace(answer, batch_size=best.batch_size, peak_mib=best.reserved_mib)
