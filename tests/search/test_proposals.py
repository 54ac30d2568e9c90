"""amptune's own proposals, which follow from the history alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import hypothesis.strategies as st
from hypothesis import given, settings
from simulated.recorded import RecordedEvaluator
from studies import OOM
from test_study import candidates

from amptune.measure.results.outcome import Effort, Failure, Outcome
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.sampler.catalog import Catalog, History
from amptune.search.sampler.proposals import optimistic, proposals
from amptune.search.space.knobs import with_choices
from amptune.search.table.objective import THROUGHPUT
from amptune.search.table.trial import Trial

BEST = amp_recipe("fp16", memory_format="channels_last")


@cache
def catalog() -> Catalog:
    known = candidates()
    return Catalog(known.space, known.policy_of)


def measured(policy: Policy) -> Outcome:
    return RecordedEvaluator("resnet50").measure(policy, Effort())


def history(policies: Sequence[Policy], outcome: Callable[[Policy], Outcome] = measured) -> History:
    """The history in which these policies were measured in turn."""
    trials = [
        Trial(number=number, policy=policy, outcome=outcome(policy), seconds=1.0)
        for number, policy in enumerate(policies)
    ]
    return History(catalog(), trials, THROUGHPUT, STOCK)


def searched(count: int, seed: int = 0) -> list[Policy]:
    """The policies of a search by proposals alone."""
    found = [STOCK]
    for _ in range(count):
        proposal = proposals(history(found), (), seed)
        assert proposal is not None
        found.append(proposal.policy)
    return found


SOME = st.sets(st.integers(0, len(catalog().policies) - 1), max_size=8).map(
    lambda indices: [catalog().policies[index] for index in sorted(indices)]
)


@settings(max_examples=20, deadline=None)
@given(tried=SOME, besides=SOME, running=SOME, failing=st.sampled_from([0, 1, 3]), seed=st.integers(0, 9))
def test_a_proposal_is_a_free_policy_that_the_history_alone_decides(
    tried: list[Policy], besides: list[Policy], running: list[Policy], failing: int, seed: int
) -> None:
    failed = set(tried[:failing])
    outcomes = {one: Failure(kind="error", message="no") if one in failed else measured(one) for one in tried}
    proposal = proposals(history(tried, outcomes.__getitem__), besides, seed, running=running)
    assert proposal is not None
    assert proposal.policy in catalog().points
    assert proposal.policy not in {*tried, *besides, *running}
    assert proposal.gain >= 0
    if not running and len(tried) > failing + 1:
        assert proposal.optimistic == optimistic(history(tried, outcomes.__getitem__), proposal.policy)
    fresh = replace(history(tried, outcomes.__getitem__), catalog=Catalog(catalog().space, candidates().policy_of))
    assert proposals(fresh, besides, seed, running=running) == proposal


def test_twenty_proposals_find_what_is_as_good_as_the_best() -> None:
    best = max(measured(policy).samples_per_s for policy in catalog().policies)  # type: ignore[union-attr]
    for seed in range(3):
        found = max(measured(policy).samples_per_s for policy in searched(20, seed))  # type: ignore[union-attr]
        assert found > 0.97 * best


def test_none_is_proposed_when_none_is_left() -> None:
    assert proposals(history([STOCK]), catalog().policies, 0) is None


def test_the_gain_is_weighed_against_the_seconds_of_the_trial() -> None:
    known = history(searched(6))
    dear = proposals(known, (), 0)
    assert dear is not None
    cheap = proposals(known, (), 0, seconds=lambda policy: 1000.0 if policy == dear.policy else 1.0)
    assert cheap is not None
    assert cheap.policy != dear.policy


def test_what_cannot_win_is_not_optimistic_and_what_was_the_best_is() -> None:
    known = history(searched(20))
    best = max(map(known.yardstick.score, known.outcomes.values()), key=lambda score: score or 0.0)
    assert best is not None
    reach = {policy: optimistic(known, policy) for policy in catalog().policies}
    hopeless = [policy for policy, one in reach.items() if one is not None and one < math.log(best)]
    assert len(hopeless) > len(reach) / 4
    assert all(measured(policy).samples_per_s < best for policy in hopeless)  # type: ignore[union-attr]
    assert BEST not in hopeless


def test_nothing_is_optimistic_before_two_scores_are_known_or_outside_the_space() -> None:
    assert optimistic(history([STOCK]), BEST) is None
    assert optimistic(history([STOCK, BEST]), Policy(threads=3)) is None
    first = proposals(history([STOCK]), (), 0)
    assert first is not None
    assert first.gain == first.optimistic == math.inf


def test_batches_no_smaller_than_one_that_ran_out_of_memory_are_not_proposed() -> None:
    known = candidates(compile="off", cudnn_benchmark="false", fused_optimizer="false", fp32_exclusions="0")
    sized = Catalog(with_choices(known.space, "batch_size", (32, 64, 128), 32), known.policy_of)
    larger = replace(STOCK, batch_size=64)
    trial = Trial(number=0, policy=larger, outcome=OOM, seconds=1.0)
    tried = History(sized, (trial,), THROUGHPUT, STOCK)
    too_large = {sized.policies[index] for index in tried.too_large}
    assert {larger, replace(STOCK, batch_size=128)} <= too_large
    assert replace(STOCK, batch_size=32) not in too_large
    assert tried.scores == {}, "its other settings are not to blame"


def test_workers_at_once_are_proposed_different_policies() -> None:
    known = history(searched(6))
    first = proposals(known, (), 0)
    assert first is not None
    second = proposals(known, (), 0, running=[first.policy])
    assert second is not None
    assert second.policy != first.policy
