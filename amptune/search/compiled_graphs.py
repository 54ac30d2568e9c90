"""Graphs of torch.compile: which to compile in the background, while other policies are measured."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import median_low

from amptune.measure.evaluator import Evaluator
from amptune.measure.results.outcome import Failure, Measurement
from amptune.policy.settings import AUTOTUNED_MODES, CompileMode, Float8Rule, Fp32Math, MemoryFormat, Policy
from amptune.search.events import Compiling, Observer
from amptune.search.plan.budget import Budget
from amptune.search.plan.compile_costs import cold_s, expected_compile_s
from amptune.search.plan.plan import WORTHWHILE, Step
from amptune.search.sampler.study import Study
from amptune.search.sampler.suggestion import UNTRIED_GAIN, Suggestion

__all__ = ["BEHIND", "IN_A_TRIAL", "CompiledGraphs", "cannot_compile", "instead_of", "typical_s"]

# The modes compiled in the background; the others time kernels, which would disturb and be disturbed.
BEHIND: tuple[CompileMode, ...] = ("blocks", "reduce-overhead", "default")
# The modes in which a trial compiles its own graph, if it has one.
IN_A_TRIAL: tuple[CompileMode, ...] = ("off", *sorted(AUTOTUNED_MODES))
# What to compile before anything was measured: half precision in the format that suits its kernels. The optimizer is in
# no graph; a fused one saves kernel launches too.
FUSED: tuple[bool, ...] = (True, False)
MATHS: tuple[Fp32Math, ...] = ("tf32", "stock", "ieee")
RECIPES = (
    Policy(autocast="bf16"),
    Policy(autocast="fp16"),
    Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True),
    Policy(),
)
LAYOUTS: tuple[MemoryFormat, ...] = ("channels_last_3d", "channels_last", "contiguous")
# A host may need so many times what is expected: Swin-T's graph came after 91 s in place of 27 (reports/h100/foreign).
SLOW_HOST = 4.0
# The device memory that a compiling process is expected to need, relative to the eager baseline: CUDA graphs have their
# own memory pool, and the process has its own CUDA context.
OVER_EAGER = 1.5
# Compiling is given up after this many compiled policies failed and none ran.
COMPILE_ATTEMPTS = 2
# The sampler is asked for another graph after this many trials, if it knew none that is worth its time.
ASK_AGAIN = 10
# Before a trial was made.
GUESSED_TRIAL_S = 3.0


@dataclass
class CompiledGraphs:
    """The graphs that compile in the background, and those that are ready to be measured.

    The model has this many `leaves`, of which `repeated_leaves` are compiled with others if blocks are. `memory_mib` is
    the device's memory. `float8` names the Linears that may pay in FP8.
    """

    study: Study
    evaluator: Evaluator
    budget: Budget
    baseline: Policy
    observer: Observer
    leaves: int = 0
    repeated_leaves: int = 0
    memory_mib: float = math.inf
    float8: tuple[Float8Rule, ...] = ()
    held: Suggestion | None = None
    """The graph that is to be compiled next, and is not begun."""

    _ask_at: int = 0
    _running: dict[Policy, tuple[Suggestion, float]] = field(default_factory=dict)
    _ready: deque[tuple[Suggestion, float | Failure]] = field(default_factory=deque)

    @property
    def behind(self) -> bool:
        """True if graphs compile in the background; else a trial compiles its own."""
        return self.evaluator.graphs_at_once > 0

    @property
    def may_come(self) -> bool:
        """True if a graph is expected in time to be measured, or overdue."""
        return any(self._remaining_s(policy) < self.budget.left_s for policy in self._running)

    @property
    def is_awaited(self) -> bool:
        """True if the first one may come, and is not later than on a slow host: others are worth less."""
        is_first = self.may_come and not self._measured_modes
        return is_first and any(self._longest_s(policy) > 0 for policy in self._running)

    def is_urgent(self, free_s: float) -> bool:
        """Returns True if a graph that compiles may come too late to be measured within `free_s`."""
        return any(self._longest_s(policy) > free_s for policy in self._running)

    def next_ready(self) -> tuple[Suggestion, float | Failure] | None:
        """Returns a compiled policy with the seconds that took, or its failure; it stays the next until it is taken."""
        self.collect()
        return self._ready[0] if self._ready else None

    def taken(self, policy: Policy) -> tuple[Suggestion, float | Failure] | None:
        """Returns a policy's graph, which is measured now, as `next_ready` does; None if it is not the next."""
        return self._ready.popleft() if self._ready and self._ready[0][0].policy == policy else None

    def wants(self, free_s: float) -> Step | None:
        """Returns the step that begins the likeliest graph, if there is a place and enough time for it."""
        self.collect()
        if not self.behind or len(self._running) + len(self._ready) >= min(self._places, self._trials_left):
            return None
        if self.is_urgent(free_s):  # another beside it would make it later still
            return None
        held = self.suggestion(free_s)
        if held is None:
            return None
        own = (held.policy,)
        return Step(stage="compile", what=str(held.policy), seconds=0.0, worth=math.inf, policies=own)

    def suggestion(self, free_s: float) -> Suggestion | None:
        """Returns the likeliest graph, the same one until another trial has ended; None if none is worth its time."""
        if cannot_compile(self.study):
            self.drop()
            return None
        count, best = len(self.study.trials), next(self._open_likeliest(), None)
        if count >= self._ask_at or (best is not None and (self.held is None or best != self.held.policy)):
            self.drop()
            self.held, self._ask_at = self._asked(best, free_s), count + ASK_AGAIN
        held = self.held
        if held is not None and self.gain(held) < WORTHWHILE * (self.seconds(held.policy) + typical_s(self.study)):
            self.drop()
        return self.held

    def gain(self, suggestion: Suggestion) -> float:
        """Returns what a graph is expected to gain, on the logarithm of the score."""
        return min(suggestion.gain, UNTRIED_GAIN)

    def release(self, suggestion: Suggestion) -> None:
        """Says that a suggestion is being compiled or measured."""
        self.held, self._ask_at = None if self.held is suggestion else self.held, 0

    def wait(self, free_s: float) -> Step | None:
        """Returns the step that waits for a graph, when there is nothing better to do."""
        if not self._running or free_s <= 0 or self._trials_left <= 0:
            return None
        seconds = min(free_s, max(1.0, min(map(self._remaining_s, self._running))))
        return Step(stage="wait", what="for a graph", seconds=seconds, worth=math.inf)

    def forget(self) -> None:
        """Gives up the graphs that are not measured."""
        self.drop()
        for suggestion, _ in [*self._running.values(), *self._ready]:
            self.study.forget(suggestion)
        self._running.clear()
        self._ready.clear()

    def seconds(self, policy: Policy) -> float:
        """Returns the seconds that compiling a policy is expected to take."""
        if not self._has_compiled(policy) and policy.compile not in AUTOTUNED_MODES:
            return expected_compile_s(self.leaves - self.repeated_leaves * (policy.compile == "blocks"))
        return cold_s(policy, self.study.history.outcomes)

    def _has_compiled(self, policy: Policy) -> bool:
        """Returns True if it is known how long compiling takes here, of blocks or of the whole model."""
        compiled = self._measured_modes
        return bool(compiled & {"blocks"} if policy.compile == "blocks" else compiled - {"blocks"})

    @property
    def _measured_modes(self) -> set[str]:
        """The modes of torch.compile that were measured."""
        measured = (one.policy.compile for one in self.study.trials if isinstance(one.outcome, Measurement))
        return {str(mode) for mode in measured if mode != "off"}

    def take(self, _step: Step, _limit_s: float) -> None:
        """Begins the graph that is held."""
        suggestion = self.held
        if suggestion is None:
            return
        self.release(suggestion)
        self._running[suggestion.policy] = suggestion, self.budget.spent_s
        self.observer(Compiling(policy=suggestion.policy, left_s=self.budget.left_s))
        self.evaluator.begin_compiling(suggestion.policy, max(self.budget.left_s, 1.0))

    def drop(self) -> None:
        """Gives back the policy that was suggested and is not begun."""
        if self.held is not None:
            self.study.forget(self.held)
            self.held = None

    def collect(self, wait_s: float = 0.0) -> None:
        """Notes the graphs that have come. One that was stopped for another's memory can be asked for again."""
        came = self.evaluator.compiled(wait_s) if self._running else {}
        for policy, result in came.items():
            if policy in self._running:
                self._ready.append((self._running.pop(policy)[0], result))
        for policy in [one for one in self._running if one not in self.evaluator.compiling]:
            self.study.forget(self._running.pop(policy)[0])

    def _remaining_s(self, policy: Policy, slower: float = 1.0) -> float:
        return slower * self.seconds(policy) - (self.budget.spent_s - self._running[policy][1])

    def _longest_s(self, policy: Policy) -> float:
        """Returns the seconds that a graph may still take, on a slow host if it is not known how long they take."""
        return self._remaining_s(policy, 1.0 if self._has_compiled(policy) else SLOW_HOST)

    @property
    def _trials_left(self) -> float:
        return self.budget.trials_left(self.study.measured)

    @property
    def _places(self) -> int:
        """The number of graphs that the CPU cores and the device's memory are enough for."""
        first = self.study.trial_of(self.baseline)
        measured = first is not None and isinstance(first.outcome, Measurement)
        peak_mib = first.outcome.peak_reserved_mib if measured else 1.0  # type: ignore[union-attr]
        in_memory = self.memory_mib / (OVER_EAGER * max(1.0, peak_mib))
        return int(min(self.evaluator.graphs_at_once, max(1.0, in_memory - 1)))

    def _asked(self, best: Policy | None, free_s: float) -> Suggestion | None:
        """Returns the graph that was put first, else the best, else the sampler's; None if it would be late."""
        if best is not None and not self.study.has_wanted(BEHIND):
            return self.study.suggest(wanted=best, modes=BEHIND) if self._is_in_time(best, free_s) else None
        if self.study.has_wanted(IN_A_TRIAL):
            return None
        suggestion = self.study.suggest(modes=BEHIND)
        if suggestion is not None and not self._is_in_time(suggestion.policy, free_s):
            self.study.forget(suggestion)
            return None
        return suggestion

    def _is_in_time(self, policy: Policy, free_s: float) -> bool:
        return self.seconds(policy) < free_s

    def _open_likeliest(self) -> Iterator[Policy]:
        """Yields those of the likeliest that nobody has begun."""
        held = None if self.held is None else self.held.policy
        for policy in self._likeliest():
            if policy in self.study and (policy == held or self.study.is_free(policy)):
                yield policy

    def _likeliest(self) -> Iterator[Policy]:
        """Yields the best policy so far compiled in each mode, then the second precision's with CUDA graphs.

        Blocks come soonest, then these in FP8 if that may pay. CUDA graphs save kernel launches, whatever the kernels
        are; without them a graph may be faster all the same. They need more memory, so an objective of memory leaves
        the choice to the sampler.
        """
        if self.study.yardstick.objective.name == "memory":
            return
        best = list(self._plain())[:1] if self.study.has_wanted(IN_A_TRIAL) else best_of_precisions(self.study)
        compiled = [one for mode in BEHIND if best and (one := best[0].compiled(mode)) in self.study]
        yield from compiled[:1]
        if compiled and self.float8 and compiled[0].weights == "fp32":
            yield replace(compiled[0], autocast="bf16", float8_modules=self.float8)
        yield from compiled[1:]
        yield from (policy.compiled(mode) for policy in best[1:2] for mode in BEHIND if mode != "default")

    def _plain(self) -> Iterator[Policy]:
        """Yields the policies to compile before anything was measured, the likeliest first."""
        own = {"batch_size": self.baseline.batch_size, "accumulate": self.baseline.accumulate}
        for recipe, layout, fused, fp32_math in product(RECIPES, LAYOUTS, FUSED, MATHS):
            policy = replace(recipe, memory_format=layout, fused_optimizer=fused, **own)  # type: ignore[arg-type]
            policy = replace(policy, fp32_math=fp32_math) if recipe.precision == "off" else policy
            if any(policy.compiled(mode) in self.study for mode in BEHIND):
                yield policy


def typical_s(study: Study) -> float:
    """Returns the typical seconds of a trial with its graph compiled."""
    return median_low(trial.again_s for trial in study.trials) if study.trials else GUESSED_TRIAL_S


def best_of_precisions(study: Study) -> list[Policy]:
    """Returns the best eager policy so far of each precision, the best precision first."""
    scores = {trial.policy: study.yardstick.score(trial.outcome) or 0.0 for trial in study.trials}
    best: dict[str, Policy] = {}
    for policy in sorted(filter(scores.get, scores), key=scores.__getitem__, reverse=True):
        if policy.compile == "off":
            best.setdefault(policy.precision, policy)
    return list(best.values())


def instead_of(policy: Policy, failure: Failure, study: Study) -> list[Policy]:
    """Returns what to try if a compiled policy fails: a smaller batch (graphs need more memory) or a simpler way."""
    if failure.kind == "oom":
        smaller = study.next_smaller(policy)
        return [] if smaller is None else [smaller]
    other = replace(policy, cuda_graphs=False) if policy.cuda_graphs else policy.compiled(BEHIND[-1])
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
