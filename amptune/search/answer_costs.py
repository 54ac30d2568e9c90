"""The seconds that the answer of a run still needs: judging it, and comparing it in fresh processes. Pure."""

from __future__ import annotations

from statistics import median

from amptune.measure.results.outcome import Measurement
from amptune.policy.settings import Policy
from amptune.search.narrowing import turn_of
from amptune.search.plan.compile_costs import cold_s, compiled_s
from amptune.search.sampler.catalog import History
from amptune.search.table.contenders import PROCESSES
from amptune.search.table.next_rows import MOST_POLICIES, launch_s

__all__ = ["compared_s", "load_s", "ranked", "turn_s"]

# Loading a graph from the compiler's cache takes this share of compiling it: 2.5 of 25 to 40 s for ResNet-50
# (reports/h200/oracle).
CACHED_GRAPH = 0.1
# The rounds of the comparison get no more than this share of the time: with a quarter, simulated tunings of 120 s lost
# 7.6 % in place of 4.5 %.
COMPARISON_SHARE = 1 / 6


def turn_s(history: History, policy: Policy, draw_s: float) -> float:
    """Returns the seconds of a turn of the user's loop, as far as the trials tell; drawing its batches takes `draw_s`.

    It has more steps than a trial.
    """
    known = history.latest.get(policy)
    if known is None:
        return draw_s + median(trial.again_s for trial in history.trials)
    more_s = 0.0
    if isinstance(known.outcome, Measurement):
        more = turn_of(known.outcome.mean_ms).min_steps - len(known.outcome.step_ms)
        more_s = max(0, more) * known.outcome.mean_ms / 1000
    return draw_s + known.again_s + more_s


def load_s(history: History, policy: Policy) -> float:
    """Returns the seconds until a fresh process has the policy's graph."""
    if policy not in history.latest:
        return cold_s(policy, history.outcomes)
    return CACHED_GRAPH * compiled_s(policy, history.outcomes)


def ranked(history: History) -> list[Policy]:
    """Returns the policies of all trials by their scores, the best first."""
    score = history.yardstick.score
    return [trial.policy for trial in sorted(history.trials, key=lambda trial: -(score(trial.outcome) or 0.0))]


def compared_s(
    history: History,
    baseline: Policy,
    *,
    start_s: float,
    draw_s: float,
    rounds: int,
    search_s: float,
    awaits_graph: bool,
) -> float:
    """Returns the seconds to keep for the comparison, of the `search_s` after the workload was built.

    A process starts in `start_s`, batches are drawn in `draw_s`; so many `rounds` in fresh processes are done. A graph
    that comes is worth more.
    """
    policies = [baseline, *ranked(history)][:MOST_POLICIES]
    costs = [turn_s(history, policy, draw_s) for policy in policies]
    loads = [load_s(history, policy) for policy in policies]

    def round_s(count: int) -> float:
        return launch_s(start_s + max(loads[:count]), count) + sum(costs[:count])

    most, share_s = max(0, PROCESSES - rounds) * round_s(len(policies)), COMPARISON_SHARE * search_s
    has_time = not awaits_graph and share_s >= round_s(2)
    if has_time or rounds:
        return min(most, share_s)
    running_s = sum(costs[:2])  # a turn of the baseline and the best policy, in the processes that run
    # Without time for both, one of the best alone is all that is done.
    return running_s if running_s <= share_s else min(costs[1], share_s)
