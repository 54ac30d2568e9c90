"""The rows to measure next: those that narrow the verdict most for their time. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

from amptune.policy.settings import Policy
from amptune.search.table.contenders import PROCESSES, Contender
from amptune.search.table.model import Estimates
from amptune.search.table.objective import KNOWN_TO, NEGLIGIBLE
from amptune.search.table.ratio import CONFIRMED, LIKELY
from amptune.search.table.verdict import Bar, Verdict, departure_count

__all__ = ["UNSEEN", "NextRound", "launch_s", "named_by", "next_round", "round_again"]

# At most this many policies are measured in turn: each takes a process, and the round a time in which things drift.
MOST_POLICIES = 8
# Each further process that starts beside one makes starting them take longer by this share of one's time: six took 12 s
# on the host of an H200, one 6 s.
BESIDE = 0.2
# A policy is worth a row if, known exactly, it could be expected to gain this share.
WORTH_A_ROW = 0.0005
# What an unmeasured policy one step from the leader promises, and FP32 for modules before they were timed: most are
# worse, a few gain some percent. Such policies are measured once no measured one promises more, and enough processes
# stand behind the answer.
UNSEEN = 0.01
MOST_UNSEEN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRound:
    """One round: each policy measured once, in a fresh process or in the one that runs. The baseline comes first.

    It is expected to take `seconds`, and to add `worth` to the logarithm of the winner's score.
    """

    policies: tuple[Policy, ...]
    fresh: bool
    seconds: float = field(default=0.0, compare=False)
    worth: float = field(default=0.0, compare=False)


def next_round(
    verdict: Verdict,
    bar: Bar,
    *,
    beside: Sequence[Policy] = (),
    unseen: Sequence[Policy] = (),
    running: Collection[Policy] = (),
    fresh_s: Callable[[Sequence[Policy]], float],
    cost_s: Callable[[Policy], float],
    judging_s: Callable[[Policy], float] = lambda _: 0.0,
    left_s: float,
) -> NextRound | None:
    """Returns the round that tells most in the time that is left; None if no round is worth it or fits.

    `running` policies have a process of their own, to start some takes `fresh_s`; `unseen` ones have no row yet and may
    be better. Those `beside` are in every round that has room for them, so that they can be shown beside the winner.
    If the round makes a policy the leader, judging it takes `judging_s`; that must fit too.
    """
    core = named_by(verdict)
    worth = _rivals(verdict, bar)
    new = [policy for policy in unseen if policy not in core][:MOST_UNSEEN]
    if max(worth.values(), default=0.0) >= UNSEEN or (len(core) > 1 and _are_few(verdict, core)):
        new = []
    if not new and (len(core) == 1 or (not worth and _is_settled(verdict))):
        return None
    shown = [policy for policy in beside if policy not in core]
    rest = [policy for policy in worth if policy not in shown]
    others = [*shown, *rest[: MOST_POLICIES - len(core) - len(shown) - len(new)], *new]
    fresh = _fresh_tells_more(verdict, core, running, fresh_s(core + others), sum(map(cost_s, core + others)))
    for count in range(len(others), -1, -1):
        policies = (*core, *others[:count])
        starts = fresh or not set(policies) <= set(running)
        seconds = sum(map(cost_s, policies)) + (fresh_s(policies) if starts else 0.0)
        if seconds + max(map(judging_s, policies)) <= left_s:
            gained = sum(worth.get(policy, 0.0) for policy in policies)
            return NextRound(policies=policies, fresh=starts, seconds=seconds, worth=gained)
    for policies in (tuple(core), *_unseen_in_loop(verdict, bar)):
        seconds = sum(map(cost_s, policies))
        if set(policies) <= set(running) and seconds + max(map(judging_s, policies)) <= left_s:
            return NextRound(policies=policies, fresh=False, seconds=seconds)
    return None


def _unseen_in_loop(verdict: Verdict, bar: Bar) -> Iterator[tuple[Policy]]:
    """Yields the leader alone if the user's loop has not seen it and can tell its speed.

    Where the loop contradicted a trial, it yields all that cannot win without a turn: the leader's may take too long.
    """
    leader = verdict.leader
    if leader is None or leader.in_loop or verdict.waits_for_data:
        return
    yield (leader.policy,)
    for one in verdict.contenders:
        if not one.believed and one.may_win and one.policy != leader.policy and bar(one.policy) is None:
            yield (one.policy,)


def round_again(
    verdict: Verdict,
    policies: Sequence[Policy],
    *,
    fresh: bool,
    running: Collection[Policy],
    fresh_s: Callable[[Sequence[Policy]], float],
    cost_s: Callable[[Policy], float],
    left_s: float,
) -> NextRound | None:
    """Returns another round of these policies, whatever it is worth; None if none fits.

    It is in fresh processes if that is wanted (`fresh`) or tells more, and fits; else in those that run.
    """
    together_s, round_s = fresh_s(policies), sum(map(cost_s, policies))
    fresh = fresh or _fresh_tells_more(verdict, policies, running, together_s, round_s)
    if fresh and together_s + round_s <= left_s:
        return NextRound(policies=tuple(policies), fresh=True, seconds=together_s + round_s)
    fits = set(policies) <= set(running) and round_s <= left_s
    return NextRound(policies=tuple(policies), fresh=False, seconds=round_s) if fits else None


def launch_s(start_s: float, count: int) -> float:
    """Returns the seconds to start this many processes beside one another, from those of one."""
    return start_s * (1 + BESIDE * (count - 1))


def named_by(verdict: Verdict) -> list[Policy]:
    """Returns the policies of every round: the baseline, the leader, and the winner if that is a simpler one."""
    named = (verdict.baseline, verdict.leader, verdict.winner)
    return list(dict.fromkeys(one.policy for one in named if one is not None))


def _rivals(verdict: Verdict, bar: Bar) -> dict[Policy, float]:
    """Returns what each policy that may still win is worth, the most first."""
    if verdict.leader is None:
        return {}
    named = named_by(verdict)
    able = [one for one in verdict.contenders if one.may_win and one.policy not in named and bar(one.policy) is None]
    worth = {one.policy: one.fast_enough * _worth(one, verdict) for one in able}
    ranked = sorted(worth, key=lambda policy: -worth[policy])
    return {policy: worth[policy] for policy in ranked if worth[policy] >= WORTH_A_ROW}


def _worth(one: Contender, verdict: Verdict) -> float:
    """Returns the gain that is expected if the policy's score were known: its expected improvement (Mockus 1978).

    The gain is that over the leader, or over the baseline if that is better. A negligible one counts only if the policy
    is simpler.
    """
    assert verdict.leader is not None  # noqa: S101  # the caller has looked
    fit = verdict.scores
    p, q = fit.policies.index(one.policy), fit.policies.index(verdict.leader.policy)
    simpler = departure_count(one.policy) < departure_count(verdict.leader.policy)
    q = q if fit.mean[q] >= fit.mean[fit.baseline] else fit.baseline
    ahead = float(fit.mean[p] - fit.mean[q]) - (0.0 if simpler else NEGLIGIBLE)
    deviation = math.sqrt(float(fit.own[p] + fit.own[q]))
    if deviation == 0.0:
        return max(0.0, ahead)
    normal = NormalDist()
    return ahead * normal.cdf(ahead / deviation) + deviation * normal.pdf(ahead / deviation)


def _is_settled(verdict: Verdict) -> bool:
    """Returns True if the leader is decided, and a later sitting adds more doubt than is left in this one.

    A simpler policy that wins in its place is to be confirmed as well.
    """
    leader = verdict.leader
    if leader is None or leader.gain is None:
        return True
    known = (verdict.scores, verdict.speeds) if verdict.objective.needs_speed else (verdict.scores,)
    in_few = leader.gain.launches < PROCESSES or _are_few(verdict, named_by(verdict)[1:])
    decided = leader.chance <= 1 - LIKELY or (leader.chance >= CONFIRMED and not in_few)
    return decided and all(_is_narrow(leader.policy, fit) for fit in known)


def _is_narrow(policy: Policy, fit: Estimates) -> bool:
    p, b, ratio = fit.policies.index(policy), fit.baseline, fit.to_baseline(policy)
    return float(fit.own[p] + fit.own[b]) <= fit.next_variance(p, b) or (
        ratio is not None and ratio.half_width < KNOWN_TO
    )


def _are_few(verdict: Verdict, policies: Sequence[Policy]) -> bool:
    """Returns True if one of these policies was not timed in as many processes as confirm an answer."""
    fit = verdict.scores
    return any(fit.launches[fit.policies.index(policy)] < PROCESSES for policy in policies)


def _fresh_tells_more(
    verdict: Verdict, core: Sequence[Policy], running: Collection[Policy], start_s: float, round_s: float
) -> bool:
    """Returns True if a second is better spent on fresh processes than on more blocks in those that run."""
    fit = verdict.scores
    if _are_few(verdict, core) or not set(core) <= set(running):
        return True
    fresh = again = 0.0
    for policy in core:
        p = fit.policies.index(policy)
        squared, launches, rows = float(fit.spread[p]) ** 2, max(1, fit.launches[p]), max(1, fit.rows[p])
        again += squared * fit.size["block"] / (rows * (rows + 1))
        fresh += squared * fit.size["process"] / (launches * (launches + 1))
    return fresh * round_s > again * start_s  # that is (fresh + again) / (start_s + round_s) > again / round_s
