"""What nothing else beats, and what an objective takes of it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from measurements import took

from amptune.measure.results.outcome import Failure, Measurement
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.decide.conclusion import Conclusion
from amptune.search.decide.pareto import costs_of, front_of
from amptune.search.gate.judgement import Judgement
from amptune.search.gate.judgements import Judgements
from amptune.search.table.contenders import Contender
from amptune.search.table.effects import GPU
from amptune.search.table.trial import Trial
from amptune.search.table.verdict import verdict_of

# Few different values, so that many are equal; none that differ by less than a figure shows.
figures = st.floats(min_value=1e-3, max_value=1e6).map(lambda x: float(f"{x:.3g}")) | st.sampled_from(
    [1.0, 2.0, 3.0, 4.0]
)
points = st.builds(
    Contender,
    policy=st.builds(Policy, batch_size=st.integers(1, 1000)),
    samples_per_s=figures,
    peak_memory_mib=figures,
    energy_j_per_sample=st.none() | figures,
)


def dominates(a: Contender, b: Contender) -> bool:
    mine, theirs = costs_of(a), costs_of(b)
    return mine != theirs and all(own <= its for own, its in zip(mine, theirs, strict=True))


@given(st.lists(points, max_size=30))
def test_no_point_of_the_set_beats_another_and_every_other_is_beaten_or_equal(some: list[Contender]) -> None:
    front = front_of(some)
    assert not any(dominates(a, b) for a in front for b in front)
    for other in some:
        assert other in front or any(dominates(one, other) or costs_of(one) == costs_of(other) for one in front)
    assert set(front) <= set(some)
    assert list(front) == sorted(front, key=lambda one: costs_of(one)[0])
    assert [*map(costs_of, front)] == [*map(costs_of, front_of(some[::-1]))]


def test_last_digits_that_differ_from_process_to_process_put_nothing_on_the_set() -> None:
    fast, slow = (Contender(policy=Policy(batch_size=int(speed)), samples_per_s=speed) for speed in (20.0, 10.0))
    fast, slow = replace(fast, peak_memory_mib=5815.806325), replace(slow, peak_memory_mib=5815.806321)
    assert front_of([slow, fast]) == (fast,)


def test_what_failed_or_was_rejected_is_no_point_and_of_two_trials_the_verdict_tells_the_figure() -> None:
    outcomes: list[tuple[Policy, Measurement | Failure]] = [
        (STOCK, took()),
        (amp_recipe("fp16"), took(1.0)),
        (amp_recipe("bf16"), Failure(kind="oom", message="")),
        (STOCK, took(16.0)),  # another worker's
    ]
    trials = [Trial(number=i, policy=policy, outcome=of, seconds=1.0) for i, (policy, of) in enumerate(outcomes)]
    verdict = verdict_of([trial.row for trial in trials], STOCK, GPU)
    assert verdict is not None
    rejects = Judgements(STOCK).also(Judgement(policy=amp_recipe("fp16"), passes=False, used=2.0, words=""))
    found = Conclusion(verdict=verdict, trials=tuple(trials), judgements=rejects, recipes=())
    (one,) = found.points
    assert one.policy == STOCK
    assert [(point["policy"]["autocast"], point["judged"]) for point in found.pareto] == [("off", True)]
    assert one.samples_per_s == verdict.baseline.samples_per_s
