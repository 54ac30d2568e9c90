"""Steps of one's own that are recorded whole, on a CPU, held against the same step without recording.

Each case trains as the plain loop does, bit for bit, whether it is recorded or says why not. `own_steps` has them.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
from own_steps import CASES, NEVER, Case, Net, batch
from taped import TapeRecorder

from amptune.errors import PolicyApplyError
from amptune.policy.settings import LossScale, Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.graphs import step_recording
from amptune.runtime.graphs.step_recordings import FIRST_COMPARED, GAP, StepRecordings
from amptune.runtime.tuned import Tuned

STEPS = 40

pytestmark = pytest.mark.filterwarnings("ignore::amptune.PolicyDriftWarning")


class Run:
    """A case's training, recorded on a tape or plain."""

    def __init__(self, case: Case, *, recorded: bool, policy: Policy | None = None, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.device = torch.device(device)
        self.model = Net().to(self.device)
        settings = dict((policy or Policy()).departures()) | {"cuda_graphs": "step" if recorded else False}
        self.tuned: Tuned = apply(Policy(**settings), self.model, guard=False)
        recordings = self.tuned.recordings
        if recordings is not None and device == "cpu":
            recordings.recorder, recordings.device_type = TapeRecorder, "cpu"
        self.optimizers = tuple(self.tuned.optimizer(one) for one in case.optimizers(self.model))
        self.recorder: Any = TapeRecorder
        self.given: Any = lambda number: batch(number, self.device)
        step, self.between = case.make(self)
        self.train = self.tuned.training_step(step=step, optimizer=self.optimizers)
        self.returned: list[Any] = []

    def go(self, steps: int = STEPS) -> Run:
        for number in range(len(self.returned), len(self.returned) + steps):
            found = self.train(self.given(number))
            self.returned.append({name: value.clone() for name, value in found.items()})
            self.between(number)
        return self

    @property
    def recordings(self) -> StepRecordings:
        found = self.tuned.recordings
        assert isinstance(found, StepRecordings)
        return found

    @property
    def told(self) -> str:
        return " ".join(one.message for one in self.tuned.findings if one.code != "cuda-graphs-without-effect")

    def require_same(self, other: Run) -> None:
        torch.testing.assert_close(self.returned, other.returned, rtol=0, atol=0)
        torch.testing.assert_close(self.model.state_dict(), other.model.state_dict(), rtol=0, atol=0)
        states = ([one.state_dict() for one in run.optimizers] for run in (self, other))
        torch.testing.assert_close(*states, rtol=0, atol=0)
        torch.testing.assert_close(self.tuned.scaler.state_dict(), other.tuned.scaler.state_dict())


ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("name", CASES)
def test_a_step_of_ones_own_trains_as_it_does_unrecorded(name: str, device: str) -> None:
    case = CASES[name]
    plain, recorded = (Run(case, recorded=is_recorded, device=device).go() for is_recorded in (False, True))
    recorded.require_same(plain)
    recordings: Any = recorded.train.recordings
    assert (recordings.calls > STEPS // 3) == (not case.told), recorded.told
    if case.told == NEVER:
        assert not recorded.told
        assert not recordings.calls
    else:
        assert case.told in recorded.told
        assert bool(recorded.told) == bool(case.told)


@pytest.mark.parametrize(
    "policy",
    [
        Policy(autocast="bf16"),
        Policy(autocast="fp16", loss_scale=LossScale(growth_interval=3)),
        Policy(autocast="fp16", loss_scale=LossScale(init=2.0**24)),  # whose first steps are skipped
    ],
    ids=str,
)
def test_it_does_so_in_half(policy: Policy) -> None:
    case = CASES["two_optimizers"]
    plain, recorded = (Run(case, recorded=is_recorded, policy=policy).go() for is_recorded in (False, True))
    recorded.require_same(plain)
    assert recorded.recordings.calls > STEPS // 2
    assert not recorded.told


def test_a_difference_ends_the_recording_and_names_what_differs() -> None:
    """Its own step trains whenever both run, and each step after the difference was seen."""
    run, plain = (Run(CASES["plain"], recorded=is_recorded) for is_recorded in (True, False))
    run.go(10)
    (recording,) = run.recordings._recorded
    replay = recording._replay

    def wrong() -> None:
        replay()
        with torch.no_grad():
            next(run.model.body.parameters())[0, 0] += 0.5

    recording._replay = wrong
    run.go(10)
    plain.go(20)
    run.require_same(plain)
    assert "differ from it: the weight body.0.weight is another by" in run.told
    assert "(call 8 of the recording; steps after its call 7 may have trained wrongly)" in run.told


def test_the_first_replays_are_compared_and_then_some_at_gaps_that_no_period_fits() -> None:
    run = Run(CASES["plain"], recorded=True)
    run.go(3 + FIRST_COMPARED)
    (recording,) = run.recordings._recorded
    assert recording.compared_at == FIRST_COMPARED
    dues = []
    for _ in range(20):
        recording.calls = recording.due
        run.recordings._plan_next(recording, time.perf_counter())
        dues.append(recording.due - recording.calls)
    assert min(dues) >= GAP / 2
    assert all(any(due % period for due in dues) for period in (2, 3, 5, 100))


def test_a_comparison_without_memory_ends_the_recording_with_nothing_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    run, plain = (Run(CASES["two_optimizers"], recorded=is_recorded) for is_recorded in (True, False))
    run.go(8)

    def none(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(step_recording, "differences", none)
    run.go(8)
    plain.go(16)
    run.require_same(plain)
    assert "leaves no memory to compare it in" in run.told


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"step": lambda *_: None, "optimizer": ()}, "takes one built"),
        ({"step": lambda *_: None, "optimizer": "adam"}, "not str"),
        ({"loss": lambda *_: None, "optimizer": [torch.optim.SGD([torch.zeros(1)], 0.1)]}, "not list"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], 0.1)}, "either a loss"),
        (
            {"step": lambda *_: None, "optimizer": torch.optim.SGD([torch.zeros(1)], 0.1), "clip": 1.0},
            "clips by itself",
        ),
    ],
)
def test_a_wrong_call_says_what_it_takes(given: dict[str, Any], words: str) -> None:
    tuned = apply(Policy(), Net())
    with pytest.raises(PolicyApplyError, match=words):
        tuned.training_step(**given)


def test_without_such_a_policy_the_step_runs_as_it_is_written() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = Run(CASES["two_optimizers"], recorded=False).go(3)
    assert run.train.recordings is None
