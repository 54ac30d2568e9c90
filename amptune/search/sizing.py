"""Finding the largest batch that fits: a few runs, a prediction after each, and never an answer that did not run."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from amptune.measure.outcome import Failure, Measurement, Outcome
from amptune.policy.settings import STOCK, Policy
from amptune.search.budget import Clock
from amptune.search.memory_model import Fit, MemoryModel, Observation, arm_of
from amptune.search.trial import Trial

__all__ = ["LargestBatch", "Outlook", "Probe", "Sizer", "Sizes", "find_largest"]

MOST_PROBES = 6
# So many sizes may fail for another reason than memory: a data set or a model that takes no more.
MOST_REFUSALS = 3
MOST_OOMS = 2
# Nobody looks at the data set, so this is the end for a model that takes next to nothing.
MOST_TIMES_OWN = 4096
# An answer this close to the largest that could run is good enough: what is left costs more than it brings.
GOOD_ENOUGH = 0.975
# The goal: an answer is good if it is at least so much of the largest that runs.
GOOD = 0.97
# Where an out-of-memory has been paid for already, another is risked only for more than this.
WORTH_AN_OOM = 0.8
# A careful step that gains less is not worth a run, even where nothing but careful steps is left.
WORTH_A_PROBE = 1.01
# Where not even the own batch runs, the next look is at this part of it.
FAR_DOWN = 32
# Workspaces may give way: that is tried where it brings this much, once the anchor is so near to what runs without.
WORTH_HOPING = 1.1
NEAR = 0.4
# Above all that was thought possible the search feels its way by this factor.
GALLOP = 1.5
# A grain may cost this much of the answer.
GRAIN_COSTS = 0.01
# Room for a probe that takes longer than expected.
SLACK = 1.2

Allowed = Sequence[int] | Callable[[int], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The batch sizes that may be tried: multiples of 8, of less where that costs 1 % or more; or those allowed."""

    cap: int
    allowed: tuple[int, ...] | None = None

    @staticmethod
    def around(own_batch_size: int, allowed: Allowed | None = None) -> Sizes:
        """Up to 4096 times the own batch size; of `allowed`, the sizes themselves or a test of one, only those."""
        cap = MOST_TIMES_OWN * own_batch_size
        if callable(allowed):
            allowed = list(filter(allowed, range(1, cap + 1)))
        if allowed is None:
            return Sizes(cap=cap)
        return Sizes(cap=cap, allowed=tuple(sorted({size for size in allowed if 1 <= size <= cap})))

    def at_most(self, n: int) -> int:
        """The largest size up to `n`; 0 if there is none."""
        n = min(n, self.cap)
        if self.allowed is None:
            return n - n % _grain(n) if n > 0 else 0
        place = bisect_right(self.allowed, n)
        return self.allowed[place - 1] if place else 0

    def at_least(self, n: int) -> int:
        """The smallest size from `n` on; 0 if there is none."""
        if self.allowed is None:
            up = n + -n % _grain(n)
            return up if up <= self.cap else 0
        place = bisect_left(self.allowed, n)
        return self.allowed[place] if place < len(self.allowed) else 0

    def holds(self, n: int) -> bool:
        """Whether the size may be an answer: any that ran, unless only some are allowed."""
        return self.allowed is None or n in self.allowed


def _grain(n: int) -> int:
    return next((grain for grain in (8, 4, 2) if grain <= GRAIN_COSTS * n), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One run at one batch size, and what it cost."""

    batch_size: int
    outcome: Outcome
    seconds: float

    @property
    def is_oom(self) -> bool:
        return isinstance(self.outcome, Failure) and self.outcome.kind == "oom"

    @property
    def is_refused(self) -> bool:
        """Whether it failed for another reason than memory."""
        return isinstance(self.outcome, Failure) and not self.is_oom


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest batch that ran within the limit, None if none did, and why no larger one was tried.

    It ran under the policy or another of its arm: one that differs in little that takes memory. `peak_mib` is what
    the allocator reserved in that run, `allocated_mib` what of it was in use; `alloc_retries` above 0 say that it had
    to flush its cache to find room, which slows training down. No batch above `at_most` is expected to run. `probes`
    are the runs that this took, in order; what was known before is none of them.
    """

    batch_size: int | None
    limit_mib: float
    because: str
    peak_mib: float = 0.0
    allocated_mib: float = 0.0
    alloc_retries: int = 0
    at_most: int | None = None
    probes: tuple[Probe, ...] = ()

    @property
    def margin(self) -> float:
        """The share of the limit that is left free."""
        return 1 - self.peak_mib / self.limit_mib

    @property
    def ooms(self) -> int:
        return sum(probe.is_oom for probe in self.probes)

    def __str__(self) -> str:
        runs = f"{len(self.probes)} run{'' if len(self.probes) == 1 else 's'}, {self.ooms} out of memory"
        if self.batch_size is None:
            return f"no batch size is known to fit into {self.limit_mib:.0f} MiB: {self.because} ({runs})"
        return (
            f"largest batch {self.batch_size}: {self.peak_mib:.0f} of {self.limit_mib:.0f} MiB, {self.margin:.1%} "
            f"left free; {self.because} ({runs})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What is known before a run, and so which size is to be run next.

    `seen` are all runs of the arm that `fit` is of, `ooms` how many went out of memory in this search, `left` how
    many more there may be.
    """

    fit: Fit | None
    seen: tuple[Observation, ...]
    sizes: Sizes
    own: int
    limit_mib: float
    ooms: int = 0
    left: int = MOST_PROBES

    @property
    def best(self) -> Observation | None:
        """The largest run that may be the answer."""
        fitting = (one for one in self.seen if one.fits(self.limit_mib) and self.sizes.holds(one.batch_size))
        return max(fitting, key=lambda one: one.batch_size, default=None)

    def next_size(self) -> int | str:
        """The size to run next, or in words why there is none."""
        if self.fit is None or not self.sizes.at_most(self.fit.surely):
            return self._first_size()
        ok = self.best.batch_size if self.best else 0
        top = self.top(self.fit)
        if self.sizes.at_most(top) <= ok or ok >= GOOD_ENOUGH * top:
            return self._last_size(self.fit, ok) or self._why_nothing_larger(self.fit, ok, top)
        if hoped := self._hoped_for(self.fit, ok):
            return hoped
        if careful := self._careful_size(self.fit, ok, top):
            return careful
        if self.ooms >= MOST_OOMS or (self.ooms and ok >= WORTH_AN_OOM * top):
            failed = self.fit.smallest_failed or "another size"
            return f"{failed} did not fit, and nothing between the two was tried"
        return self._bold_size(self.fit, ok, top)

    def top(self, fit: Fit) -> int:
        """The largest batch that could run; once that has turned out too low, anything below what failed."""
        if not fit.was_surprised:
            return fit.at_most(self.sizes.cap)
        return self.sizes.cap if fit.smallest_failed is None else min(self.sizes.cap, fit.smallest_failed - 1)

    def _first_size(self) -> int | str:
        """While nothing fits: the own batch size, then far below what did not fit."""
        failed = min((one.batch_size for one in self.seen if not one.fits(self.limit_mib)), default=None)
        wanted = self.own if failed is None or failed > self.own else max(1, failed // FAR_DOWN)
        size = self.sizes.at_most(wanted) or self.sizes.at_least(1)
        if not size:
            return "there is no batch size to try"
        if failed is not None and size >= failed:
            return f"even a batch of {failed} does not fit"
        if self.ooms >= MOST_OOMS:
            return f"a batch of {failed} does not fit, and none below was tried"
        return size

    def _hoped_for(self, fit: Fit, ok: int) -> int:
        """A size that runs if workspaces give way, where they may and that would bring much; else 0."""
        is_near = fit.knows_its_slope and fit.anchor.batch_size >= NEAR * fit.surely
        if self.ooms or self.left < 2 or not (fit.has_workspaces and is_near):
            return 0
        hoped = self.sizes.at_most(int(GOOD * fit.likely))
        return hoped if hoped > WORTH_HOPING * max(fit.surely, ok) else 0

    def _careful_size(self, fit: Fit, ok: int, top: int) -> int:
        """A size that should run, where a bold one whose failure is forgiven would not bring as much; else 0."""
        careful = self.sizes.at_most(_careful(fit))
        may_be_last = self.ooms or careful >= GOOD_ENOUGH * top
        worth = WORTH_A_PROBE * ok if may_be_last else _forgiven(ok)
        return careful if self.ooms < MOST_OOMS and careful > ok and careful >= worth else 0

    def _bold_size(self, fit: Fit, ok: int, top: int) -> int:
        """A size that may not fit, so near that the answer is good if it does not; farther where runs are few.

        Such steps should end at what is likely. If they do not reach so far, what they lack is taken at once and
        first, where failing is least likely and all that is learned helps the steps that follow.
        """
        if fit.smallest_failed is not None:
            wanted = math.isqrt(max(1, ok) * top)
        elif fit.was_surprised:
            wanted = int(GALLOP * ok)
        else:
            wanted = int(min(top, fit.likely) * GOOD ** (self.left - 1))
        size = self.sizes.at_most(min(top, max(_forgiven(ok), wanted)))
        return size if size > ok else self.sizes.at_least(ok + 1)

    def _last_size(self, fit: Fit, ok: int) -> int:
        """One more above the answer, where nobody knows how much of the memory workspaces take; else 0."""
        settled = self.ooms or fit.smallest_failed is not None or not fit.may_give_more
        return 0 if settled else self.sizes.at_least(max(ok + 1, math.ceil(ok / GOOD_ENOUGH)))

    def _why_nothing_larger(self, fit: Fit, ok: int, top: int) -> str:
        larger = self.sizes.at_least(ok + 1)
        if not larger:
            return (
                "no larger one is to be tried" if self.sizes.allowed else f"it is {MOST_TIMES_OWN} times the own batch"
            )
        if fit.smallest_failed is not None and fit.smallest_failed <= max(larger, top + 1):
            return f"{fit.smallest_failed} did not fit"
        return f"more than {max(ok, top)} would not fit"


def _forgiven(ok: int) -> int:
    """The largest size that may fail and leave `ok` a good answer: it is GOOD of the one below."""
    return math.floor(ok / GOOD) + 1


def _careful(fit: Fit) -> int:
    """What should run even if things turn out badly; at most half way to what should have run and did not."""
    if fit.smallest_failed is None or not fit.was_contradicted:
        return fit.surely
    half_way = math.isqrt(max(1, fit.largest_run) * fit.smallest_failed)
    return min(fit.surely, max(fit.largest_run, half_way))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a probe of `batch_size` took: its steps, which take longer for a larger batch, and all the rest."""

    batch_size: int
    steps_s: float
    rest_s: float

    @staticmethod
    def of(probe: Probe) -> Pace | None:
        if not isinstance(probe.outcome, Measurement):
            return None
        steps = probe.outcome.warmup_steps + len(probe.outcome.step_ms)
        steps_s = min(probe.seconds, steps * probe.outcome.median_ms / 1000)
        return Pace(batch_size=probe.batch_size, steps_s=steps_s, rest_s=probe.seconds - steps_s)

    def seconds_for(self, batch_size: int) -> float:
        return SLACK * (self.rest_s + self.steps_s * batch_size / self.batch_size)


@dataclass
class Sizer:
    """Finds the largest batch of one policy after another, and keeps what it learns of memory in `model`.

    `run` measures a policy briefly at the batch size that it has, and may be given `left_s()` seconds; a limit on it
    is the caller's affair. Sizes are those of `Sizes.around`, so an answer among `allowed` ones may fall short of
    another that is up to 3 % larger.
    """

    run: Callable[[Policy], Outcome]
    model: MemoryModel
    own_batch_size: int
    allowed: Allowed | None = None
    left_s: Callable[[], float] = lambda: math.inf
    clock: Clock = time.monotonic
    most_probes: int = MOST_PROBES
    _pace: Pace | None = None
    _sizes: Sizes = field(init=False)

    def __post_init__(self) -> None:
        self._sizes = Sizes.around(self.own_batch_size, self.allowed)

    def learn(self, trials: Iterable[Trial]) -> None:
        """Takes in what trials at any batch size say about memory."""
        sizes = ((trial, trial.policy.batch_size or self.own_batch_size) for trial in trials)
        self.model = self.model.with_outcomes((trial.policy, size, trial.outcome) for trial, size in sizes)

    def predicts_oom(self, policy: Policy) -> bool:
        """Whether the policy clearly does not fit at its batch size."""
        return self.model.predicts_oom(policy, policy.batch_size or self.own_batch_size)

    def may_try(self, policy: Policy) -> bool:
        """Whether its batch size is one of those to be tried, and may fit."""
        size = policy.batch_size or self.own_batch_size
        return size <= self._sizes.cap and self._sizes.holds(size) and not self.predicts_oom(policy)

    def largest(self, policy: Policy) -> LargestBatch:
        """The largest batch of the policy, whatever batch size it has itself."""
        probes: list[Probe] = []
        because = self._next(policy, probes)
        while isinstance(because, int):
            probe = self._probe(policy, because)
            probes.append(probe)
            refused = [one for one in probes if one.is_refused]
            because = self._next_below(policy, probes, refused) if refused else self._next(policy, probes)
        return self._answer(policy, tuple(probes), because)

    def _next(self, policy: Policy, probes: Sequence[Probe]) -> int | str:
        """The size to run next, or why none is."""
        size = self._outlook(policy, probes).next_size()
        if isinstance(size, str):
            return size
        if len(probes) >= self.most_probes:
            return f"{len(probes)} runs are enough"
        if self.left_s() < (self._pace.seconds_for(size) if self._pace else 0.0):
            return f"there is no time to try {size}"
        return size

    def _next_below(self, policy: Policy, probes: Sequence[Probe], refused: Sequence[Probe]) -> int | str:
        """Half way down, in ratio, from a size that the model or the data refuse, which says nothing of memory."""
        least = min(refused, key=lambda probe: probe.batch_size)
        because = f"a batch of {least.batch_size} fails: {least.outcome}"
        best = self._outlook(policy, probes).best
        ok = best.batch_size if best is not None else 0
        size = self._sizes.at_most(math.isqrt(max(1, ok) * least.batch_size))
        hung = isinstance(least.outcome, Failure) and least.outcome.kind == "timeout"
        is_over = hung or len(refused) >= MOST_REFUSALS or len(probes) >= self.most_probes
        return size if size > ok and not is_over else because

    def _outlook(self, policy: Policy, probes: Sequence[Probe]) -> Outlook:
        return Outlook(
            fit=self.model.fit(policy),
            seen=self.model.seen.get(arm_of(policy), ()),
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
        self._pace = Pace.of(probe) or self._pace
        return probe

    def _answer(self, policy: Policy, probes: tuple[Probe, ...], because: str) -> LargestBatch:
        outlook = self._outlook(policy, probes)
        answer = LargestBatch(batch_size=None, limit_mib=outlook.limit_mib, because=because, probes=probes)
        if outlook.best is None or outlook.fit is None:
            return answer
        return replace(
            answer,
            batch_size=outlook.best.batch_size,
            peak_mib=outlook.best.reserved_mib,
            allocated_mib=outlook.best.allocated_mib,
            alloc_retries=outlook.best.alloc_retries,
            at_most=outlook.top(outlook.fit),
        )


def find_largest(
    run: Callable[[int], Outcome],
    own_batch_size: int,
    limit_mib: float,
    *,
    model: MemoryModel | None = None,
    policy: Policy = STOCK,
    allowed: Allowed | None = None,
    left_s: Callable[[], float] = lambda: math.inf,
    clock: Clock = time.monotonic,
) -> LargestBatch:
    """The largest batch of one policy, `run` at one size after another; `model` is what is known of memory already."""
    sizer = Sizer(
        run=lambda sized: run(sized.batch_size or own_batch_size),
        model=replace(model or MemoryModel(limit_mib=limit_mib), limit_mib=limit_mib),
        own_batch_size=own_batch_size,
        allowed=allowed,
        left_s=left_s,
        clock=clock,
    )
    return sizer.largest(policy)
