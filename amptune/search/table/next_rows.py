"""The rows to measure next: those that narrow the verdict most for their time. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from amptune.policy.settings import Policy
from amptune.search.table.contenders import PROCESSES, Contender
from amptune.search.table.improvement import expected_improvement
from amptune.search.table.model import Estimates
from amptune.search.table.objective import KNOWN_TO, NEGLIGIBLE
from amptune.search.table.ratio import CONFIRMED, LIKELY
from amptune.search.table.verdict import Bar, Verdict, departure_count

__all__ = ["NextRound", "next_round"]

# At most this many policies are measured in turn: each takes a process, and the round a time in which things drift.
MOST_POLICIES = 8
# A policy is worth a row if, known exactly, it could be expected to gain this share.
WORTH_A_ROW = 0.0005

# Returns the seconds of a round of these policies, in fresh processes or where they run.
Seconds = Callable[[Sequence[Policy], bool], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRound:
    """One round: each policy measured once, in a `fresh` process or in the one that runs. The baseline comes first."""

    policies: tuple[Policy, ...]
    fresh: bool


def next_round(
    verdict: Verdict,
    bar: Bar,
    *,
    beside: Sequence[Policy] = (),
    running: Collection[Policy] = (),
    seconds: Seconds,
    left_s: float,
) -> NextRound | None:
    """Returns the round that tells most in the time that is left; None if no round is worth it or fits.

    The baseline, the leader and a winner that is simpler are in every round; then come those `beside`, and the rivals
    that may still win. `running` policies have a process of their own. If the baseline and the leader do not fit in
    fresh processes, they take turns where they run, or at last the leader alone does, if the loop never timed it.
    """
    core, rivals = _core(verdict), _rivals(verdict, bar)
    if len(core) == 1 or (not rivals and _is_settled(verdict, core)):
        return None
    fresh = _fresh_tells_more(verdict, core, running, seconds, left_s)
    able = (policy for policy in (*beside, *rivals) if policy not in core and (fresh or policy in running))
    others = list(dict.fromkeys(able))
    for count in range(min(len(others), MOST_POLICIES - len(core)), -1, -1):
        policies = (*core, *others[:count])
        if seconds(policies, fresh) <= left_s:
            return NextRound(policies=policies, fresh=fresh)
    unseen = verdict.leader is not None and not verdict.leader.in_loop and not verdict.waits_for_data
    for policies in (tuple(core), *([(core[1],)] if unseen else [])):
        if set(policies) <= set(running) and seconds(policies, False) <= left_s:
            return NextRound(policies=policies, fresh=False)
    return None


def _core(verdict: Verdict) -> list[Policy]:
    """Returns the policies of every round: the baseline, the leader, and the winner if that is a simpler one."""
    named = (verdict.baseline, verdict.leader, verdict.winner)
    return list(dict.fromkeys(one.policy for one in named if one is not None))


def _rivals(verdict: Verdict, bar: Bar) -> list[Policy]:
    """Returns the policies that may still win and are worth a row, by what each is expected to gain, the most first.

    A policy that is likely worse than the baseline is none.
    """
    if verdict.leader is None:
        return []
    core = _core(verdict)
    open_ones = (one for one in verdict.contenders if one.may_win and one.chance > 1 - LIKELY)
    able = [one for one in open_ones if one.policy not in core and bar(one.policy) is None]
    worth = {one.policy: one.fast_enough * _worth(one, verdict, verdict.leader) for one in able}
    return sorted((policy for policy in worth if worth[policy] >= WORTH_A_ROW), key=lambda policy: -worth[policy])


def _worth(one: Contender, verdict: Verdict, leader: Contender) -> float:
    """Returns the expected improvement on the leader, or on the baseline if that is better, were the score known.

    A negligible improvement counts only if the policy is simpler.
    """
    fit = verdict.scores
    p, q = fit.place[one.policy], fit.place[leader.policy]
    q = q if fit.mean[q] >= fit.mean[fit.baseline] else fit.baseline
    simpler = departure_count(one.policy) < departure_count(leader.policy)
    ahead = float(fit.mean[p] - fit.mean[q]) - (0.0 if simpler else NEGLIGIBLE)
    return float(expected_improvement(ahead, math.sqrt(float(fit.own[p] + fit.own[q]))))


def _is_settled(verdict: Verdict, core: Sequence[Policy]) -> bool:
    """Returns True if the leader is decided, and a later sitting adds more doubt than is left in this one.

    A simpler policy that wins in its place is to be confirmed as well.
    """
    leader = verdict.leader
    if leader is None or leader.gain is None:
        return True
    known = (verdict.scores, verdict.speeds) if verdict.objective.needs_speed else (verdict.scores,)
    confirmed = leader.chance >= CONFIRMED and not _are_few(verdict.scores, core)
    narrow = all(_is_narrow(leader.policy, fit) for fit in known)
    return leader.chance <= 1 - CONFIRMED or (narrow and (confirmed or leader.chance <= 1 - LIKELY))


def _is_narrow(policy: Policy, fit: Estimates) -> bool:
    p, b, ratio = fit.place[policy], fit.baseline, fit.to_baseline(policy)
    narrow = ratio is not None and ratio.half_width < KNOWN_TO
    return narrow or float(fit.own[p] + fit.own[b]) <= fit.later_variance(p, b)


def _are_few(fit: Estimates, policies: Sequence[Policy]) -> bool:
    """Returns True if one of these policies was not timed in as many processes as confirm an answer."""
    return any(fit.launches[fit.place[policy]] < PROCESSES for policy in policies)


def _fresh_tells_more(
    verdict: Verdict, core: Sequence[Policy], running: Collection[Policy], seconds: Seconds, left_s: float
) -> bool:
    """Returns True if a second is better spent on fresh processes than on more blocks in those that run.

    One more of n launches or blocks takes v / (n (n + 1)) from a variance v / n. What was timed once takes a turn where
    it runs, if two rounds in fresh processes do not fit: on a slow host a start may take twice the expected time.
    """
    fit = verdict.scores
    if not set(core) <= set(running):
        return True
    if 2 * seconds(core, True) > left_s and any(fit.rows[fit.place[policy]] < 2 for policy in core):
        return False
    if _are_few(fit, core):
        return True
    by_launch = by_block = 0.0
    for p in (fit.place[policy] for policy in core):
        launches, rows, squared = max(1, fit.launches[p]), max(1, fit.rows[p]), float(fit.spread[p]) ** 2
        by_launch += squared * fit.launch / (launches * (launches + 1))
        by_block += squared * fit.block / (rows * (rows + 1))
    return (by_launch + by_block) * seconds(core, False) > by_block * seconds(core, True)
