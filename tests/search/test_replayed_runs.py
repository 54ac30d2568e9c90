"""Whole runs on simulated machines, job by job: a timeline is enough to make each choice again, and has each second."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
from frozen.decisions import CASES, decided
from simulated.slow_cpu import tuned

from amptune.policy.serialization import policy_from_dict
from amptune.policy.settings import Policy
from amptune.search import run
from amptune.search.job import Answer
from amptune.search.next_job import next_job
from amptune.search.sampler.proposals import OPTIMISTIC
from amptune.search.state import State
from amptune.search.timeline import state_at

# Recorded machines, budgets from 40 s to 600 s, three objectives; and a CPU that other programs keep busy.
RUNS: dict[str, Callable[[], Any]] = {
    **{CASES[seed].title: partial(decided, CASES[seed]) for seed in (0, 2, 178, 136, 181)},
    "a busy CPU, 60 s": partial(tuned, "small", 0, 60.0),
    "a busy CPU, 300 s": partial(tuned, "convolutional", 1, 300.0),
}
SLOW = [CASES[seed].title for seed in (136, 181)]


class Kept(run.TuningRun):
    """A run that can be looked at when it has ended."""

    ended: ClassVar[list[Kept]] = []

    def find_answer(self) -> None:
        self.ended.append(self)
        super().find_answer()


@dataclass(frozen=True)
class Ended:
    """A run that ended: its last state, its timeline read back from JSON, and the moment at which it had its answer."""

    last: State
    timeline: list[dict[str, Any]]
    ended_s: float

    @property
    def chosen(self) -> Iterator[tuple[dict[str, Any], State]]:
        """The entries of the jobs that the loop chose, each with the state that it was chosen from."""
        return ((entry, state_at(self.last, entry)) for entry in self.timeline if "known" in entry)


@pytest.fixture(
    scope="module", params=[pytest.param(one, marks=[pytest.mark.slow] if one in SLOW else []) for one in RUNS]
)
def ended(request: pytest.FixtureRequest) -> Ended:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run, "TuningRun", Kept)
        RUNS[request.param]()
    last = Kept.ended.pop()
    timeline = json.loads(json.dumps(last.timeline.entries))
    return Ended(last.state, timeline, last.state.spent_s)


def test_each_job_of_a_run_is_chosen_again_from_its_timeline(ended: Ended) -> None:
    for entry, state in ended.chosen:
        job = next_job(state)
        assert not isinstance(job, Answer), (entry["what"], job.because)
        noted = job.as_dict()
        assert {name: entry[name] for name in noted} == noted


def test_a_timeline_has_each_second_of_its_run(ended: Ended) -> None:
    """But for moments, in which studies are written and the next job is looked for."""
    ends = [0.0, *(entry["at_s"] + entry["seconds"] for entry in ended.timeline)]
    begins = [*(entry["at_s"] for entry in ended.timeline), ended.ended_s]
    assert all(abs(begin - end) < 1 for begin, end in zip(begins, ends, strict=True)), list(
        zip(ends, begins, strict=True)
    )
    assert sum(entry["seconds"] for entry in ended.timeline) == pytest.approx(ended.ended_s, abs=1)


def test_nothing_is_tried_that_is_known_to_be_behind_the_leader(ended: Ended) -> None:
    """But for the baseline, what anybody would compare with, and graphs that were begun before it was known."""
    assert [*map(str, lost_trials(ended))] == []


def lost_trials(ended: Ended) -> Iterator[Policy]:
    """Yields what was tried though no optimistic estimate of it, from the rows of then, reached the leader.

    An estimate may also believe that what compiles turns out as expected.
    """
    for entry, state in ended.chosen:
        policies = [policy_from_dict(one) for one in entry["policies"]] if entry["stage"] == "trial" else []
        best = state.scores.get(state.leader)
        for policy in {*policies} - {state.baseline, *state.candidates.amp_recipes} - state.graphs.known:
            if best is not None and max(estimates_of(policy, state)) < math.log(best):
                yield policy


def estimates_of(policy: Policy, state: State) -> Iterator[float]:
    """Yields optimistic estimates of a policy's score, as logarithms; of one outside the catalog there is none."""
    index = state.history.catalog.index
    begun = sorted(index[one] for one in state.graphs.known if one in index)
    beliefs = (state.history.belief, state.history.belief_with(begun) if begun else None)
    known = [one for one in beliefs if one is not None and policy in index]
    yield from (float(one.mean[index[policy]] + OPTIMISTIC * one.deviation[index[policy]]) for one in known)
    yield from () if known else (math.inf,)
