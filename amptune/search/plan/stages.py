"""The stages of a tuning, in the order in which they run, and the share of the budget that each may take.

Each stage asks here for its seconds. A stage that needs less leaves the rest to those after it.
"""

from __future__ import annotations

from amptune.search.plan.budget import Budget

__all__ = [
    "ABLATION_SHARE",
    "BATCH_SIZES_SHARE",
    "COLD_SHARE",
    "CURES_SHARE",
    "FINALS_SHARE",
    "MODULE_TIMES_SHARE",
    "REFERENCE_SHARE",
    "comparisons_s",
    "graph_judgement_s",
    "larger_batch_s",
    "loop_s",
]

# Before the search. The FP32 reference of the numerics gate, made once; and the reference together with all judgements
# until each precision that fails is cured.
REFERENCE_SHARE, CURES_SHARE = 0.08, 0.25
# Timing every module once; it took 3.6 s for 1,000 modules on an H200 (reports/numerics/h200/sensing.txt).
MODULE_TIMES_SHARE = 0.1
# Finding the largest batch that fits.
BATCH_SIZES_SHARE = 0.15

# The comparisons after the search get at most this share of the time that is left once the workload is built, and at
# most the time of this many launches of their contenders.
COMPARISONS_SHARE, COMPARISON_LAUNCHES = 0.5, 20
# Shares of the time after the search: for the finals, and at least for the ablation.
FINALS_SHARE, ABLATION_SHARE = 0.4, 0.3
# A compiled policy is measured beside another one only if compiling it takes at most this share of the time left; and
# judged together with its graph, before the comparison, if that takes at most as much.
COLD_SHARE = GRAPH_SHARE = 0.2

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
