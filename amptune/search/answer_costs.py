"""The seconds that the answer of a run still needs: judging it, and comparing it in fresh processes. Pure."""

from __future__ import annotations

from statistics import median

from amptune.policy.settings import Policy
from amptune.search.plan.compile_costs import cold_s, compiled_s
from amptune.search.sampler.catalog import History
from amptune.search.table.next_rows import MOST_POLICIES, launch_s
from amptune.search.table.verdict import PROCESSES

__all__ = ["block_s", "compared_s", "judged_graph_s", "load_s", "ranked"]

# The gate compiles a graph anew for its batches, with dropout twice, in this many times the seconds of compiling for
# training (BERT-base on an H200: 31 s instead of 27).
GRAPH_TIMES = 1.3
# Loading a graph from the compiler's cache takes this share of compiling it: 2.5 of 25 to 40 s for ResNet-50
# (reports/h200/oracle).
CACHED_GRAPH = 0.1
# The rounds of the comparison get no more than this share of the time: with a quarter, simulated tunings of 120 s lost
# 7.6 % in place of 4.5 %.
COMPARISON_SHARE = 1 / 6


def block_s(history: History, policy: Policy) -> float:
    """Returns the seconds of one block, as far as the trials tell."""
    known = history.latest.get(policy)
    return median(trial.again_s for trial in history.trials) if known is None else known.again_s


def load_s(history: History, policy: Policy) -> float:
    """Returns the seconds until a fresh process has the policy's graph."""
    if policy not in history.latest:
        return cold_s(policy, history.outcomes)
    return CACHED_GRAPH * compiled_s(policy, history.outcomes)


def judged_graph_s(history: History, policy: Policy) -> float:
    """Returns the seconds to judge a policy together with its compiled graph."""
    return GRAPH_TIMES * compiled_s(policy, history.outcomes)


def ranked(history: History) -> list[Policy]:
    """Returns the policies of all trials by their scores, the best first."""
    score = history.yardstick.score
    return [trial.policy for trial in sorted(history.trials, key=lambda trial: -(score(trial.outcome) or 0.0))]


def compared_s(
    history: History, baseline: Policy, *, start_s: float, rounds: int, search_s: float, awaits_graph: bool
) -> float:
    """Returns the seconds to keep for the comparison, of the `search_s` after the workload was built.

    A process starts in `start_s`; so many `rounds` in fresh processes are done. A graph that comes is worth more.
    """
    policies = [baseline, *ranked(history)][:MOST_POLICIES]
    costs, loads = ([take_s(history, policy) for policy in policies] for take_s in (block_s, load_s))

    def round_s(count: int) -> float:
        return launch_s(start_s + max(loads[:count]), count) + sum(costs[:count])

    most, share_s = max(0, PROCESSES - rounds) * round_s(len(policies)), COMPARISON_SHARE * search_s
    has_time = not awaits_graph and share_s >= round_s(2)
    running_s = sum(costs[:2])  # a turn of the baseline and the best policy, in the processes that run
    return min(most, share_s) if has_time or rounds else min(running_s, share_s)
