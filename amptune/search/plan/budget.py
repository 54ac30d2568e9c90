"""The budget: wall-clock time of the whole command, optionally a number of trials; and each stage's share of it.

The shares stand in the order in which the stages run. A stage that needs less leaves the rest to those after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

__all__ = [
    "BATCH_SIZES_SHARE",
    "COLD_SHARE",
    "CURES_SHARE",
    "MODULE_TIMES_SHARE",
    "REFERENCE_SHARE",
    "SHORTEST_LOOP_S",
    "Budget",
    "Clock",
    "comparisons_s",
    "graph_judgement_s",
    "larger_batch_s",
    "loop_s",
]

# Returns seconds since an arbitrary start; they never go backwards.
Clock = Callable[[], float]

# Importing torch and building a small model must be possible under the shortest budget.
SHORTEST_PREPARE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A limit of `seconds` after `started`, both by `clock`, and of `trials` new measurements besides comparisons."""

    seconds: float
    trials: int | None = None
    started: float = field(default_factory=time.monotonic)
    clock: Clock = time.monotonic

    @property
    def spent_s(self) -> float:
        return self.clock() - self.started

    @property
    def left_s(self) -> float:
        return self.seconds - self.spent_s

    def less(self, seconds: float) -> Budget:
        """Returns this budget with `seconds` of it kept back for something else."""
        return replace(self, seconds=self.seconds - seconds)

    @property
    def left_to_prepare_s(self) -> float:
        """The time limit for building the workload."""
        return max(SHORTEST_PREPARE_S, self.left_s)


# Before the search.
# Timing every module once; it took 3.6 s for 1,000 modules on an H200 (reports/numerics/h200/sensing.txt).
MODULE_TIMES_SHARE = 0.1
# The FP32 reference of the numerics gate, made once; and the reference together with all judgements until each
# precision that fails is cured.
REFERENCE_SHARE, CURES_SHARE = 0.08, 0.25
# Finding the largest batch that fits.
BATCH_SIZES_SHARE = 0.15

# The comparisons after the search get at most this share of the time that is left once the workload is built, and at
# most the time of this many launches of their contenders.
COMPARISONS_SHARE, COMPARISON_LAUNCHES = 0.5, 20
# Before the comparison, a compiled policy is judged with its graph if that takes at most this share of the time left.
GRAPH_SHARE = 0.2
# A compiled policy is measured beside another one only if compiling it takes at most this share of the time left.
COLD_SHARE = 0.2

# After the decision. The training loop: half for its timed seconds, half for the step alone, warm-up and loader start.
# A loop shorter than SHORTEST_LOOP_S says nothing.
LOOP_SHARE, LONGEST_LOOP_S, SHORTEST_LOOP_S = 0.06, 5.0, 1.0
# Measuring larger batches, where the batch size is the user's own.
LARGER_BATCH_SHARE, LONGEST_LARGER_BATCH_S = 0.04, 20.0


def comparisons_s(budget: Budget, *, prepare_s: float, launch_s: float) -> float:
    """Returns the seconds that the search leaves to the comparisons; a launch of all contenders takes `launch_s`."""
    return min(COMPARISONS_SHARE * (budget.seconds - prepare_s), COMPARISON_LAUNCHES * launch_s)


def graph_judgement_s(budget: Budget) -> float:
    """Returns the most seconds for judging a policy together with its compiled graph before the comparison."""
    return GRAPH_SHARE * budget.left_s


def loop_s(budget: Budget) -> float:
    """Returns the seconds to reserve for the loop with its warm-up; 0 if the budget is too small for a loop."""
    seconds = min(LONGEST_LOOP_S, LOOP_SHARE * budget.seconds / 2)
    return 2 * seconds if seconds >= SHORTEST_LOOP_S else 0.0


def larger_batch_s(budget: Budget) -> float:
    """Returns the seconds to reserve for measuring larger batches."""
    return min(LONGEST_LARGER_BATCH_S, LARGER_BATCH_SHARE * budget.seconds)
