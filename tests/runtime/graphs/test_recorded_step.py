"""Whole training steps that are recorded, on a CPU, held against the same step without recording."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import recorded_training
import torch
from recorded_training import batch, built
from taped import TapeRecorder
from torch import nn

import amptune
from amptune.hardware.detect import probe
from amptune.policy.policy_file import PolicyFile
from amptune.policy.settings import LossScale, Policy
from amptune.runtime.apply_policy import PolicyDriftWarning, apply
from amptune.runtime.claim_watch import STEPS
from amptune.runtime.graphs.dispatch import MOST_WASTED
from amptune.runtime.tuned import Tuned

Make = Callable[[Any], torch.optim.Optimizer]

ADAM: Make = partial(torch.optim.AdamW, lr=2.0**-5, fused=True)
SGD: Make = partial(torch.optim.SGD, lr=2.0**-5, momentum=0.5, fused=True)
WITHOUT_STATE: Make = partial(torch.optim.SGD, lr=2.0**-5, fused=True)
STEP = Policy(cuda_graphs="step")

pytestmark = pytest.mark.filterwarnings("ignore::amptune.PolicyDriftWarning")


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).float().square().mean()
    return loss


def applied(policy: Policy, model: nn.Module, guard: bool | None = False) -> Tuned:
    """Whose recordings are tapes, if it records."""
    tuned = apply(policy, model, guard=guard)
    if tuned.recordings is not None:
        tuned.recordings.recorder, tuned.recordings.device_type = TapeRecorder, "cpu"
    return tuned


class Training:
    """A model in training under a policy."""

    def __init__(
        self,
        policy: Policy,
        make: Make = ADAM,
        clip: float | None = None,
        loss: Any = loss_of,
        guard: bool | None = False,
    ) -> None:
        self.model = built()
        self.tuned = applied(policy, self.model, guard)
        self.optimizer = self.tuned.optimizer(make(self.model.parameters()))
        self.train: Any = self.tuned.training_step(loss, self.optimizer, clip)
        self.losses: list[torch.Tensor] = []

    def go(self, sizes: list[int], after: Callable[[], object] = lambda: None) -> None:
        for size in sizes:
            self.losses.append(self.train(batch(len(self.losses), size)))
            after()

    def require_same(self, other: Training) -> None:
        assert [float(loss) for loss in self.losses] == [float(loss) for loss in other.losses]
        for name, tensor in self.model.state_dict().items():
            assert torch.equal(tensor, other.model.state_dict()[name]), name
        states = [(one.optimizer.state_dict(), one.tuned.scaler.state_dict()) for one in (self, other)]
        torch.testing.assert_close(*states, rtol=0, atol=0)

    @property
    def replays(self) -> int:
        return int(self.train.recordings.calls)

    def is_told(self, words: str) -> bool:
        return any(words in finding.message for finding in self.tuned.findings)


def both(policy: Policy, *given: Any, **more: Any) -> tuple[Training, Training]:
    plain = Policy(**{**dict(policy.departures()), "cuda_graphs": False})
    return Training(policy, *given, **more), Training(plain, *given, **more)


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("make", [ADAM, SGD, WITHOUT_STATE])
@pytest.mark.parametrize(
    "policy",
    [
        STEP,
        Policy(cuda_graphs="step", autocast="bf16", accumulate=3),
        Policy(cuda_graphs="step", autocast="fp16", loss_scale=LossScale(growth_interval=3)),
        Policy(cuda_graphs="step", autocast="fp16", accumulate=2, loss_scale=LossScale(init=2.0**18)),
    ],
    ids=str,
)
def test_a_recorded_step_trains_as_the_recipe_does(policy: Policy, make: Make, clip: float | None) -> None:
    """Each shape has a recording and an update of its own."""
    recorded, plain = both(policy, make, clip)
    for training in (recorded, plain):
        training.go([4] * 18)
        assert training is plain or recorded.replays >= 18 - 6 * policy.accumulate
        training.go([2, 4, 2, 2, 2, 2, 3])
    recorded.require_same(plain)
    assert not recorded.tuned.findings[1:]  # besides that there is no GPU
    assert all(weight.grad is None for weight in recorded.model.parameters()) or policy.accumulate > 1


def test_a_learning_rate_schedule_goes_on_and_a_loaded_checkpoint_which_holds_numbers_is_trained_on() -> None:
    recorded, plain = both(STEP, ADAM)
    for training in (recorded, plain):
        schedule = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: 2.0 ** -(step // 3))
        training.go([4] * 16, schedule.step)
        assert training is plain or recorded.replays == 13
        states = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
        training.go([4] * 4)
        training.model.load_state_dict(states[0])
        training.optimizer.load_state_dict(states[1])
        training.go([4] * 8)
    recorded.require_same(plain)
    assert recorded.replays > 19
    (group,) = recorded.optimizer.state_dict()["param_groups"]
    assert type(group["lr"]) is float
    assert not group["capturable"]


def test_a_schedule_of_betas_ends_the_recording_which_is_told() -> None:
    recorded, plain = both(STEP, ADAM)
    for training in (recorded, plain):
        schedule = torch.optim.lr_scheduler.OneCycleLR(training.optimizer, max_lr=0.125, total_steps=60)
        training.go([4] * 40, schedule.step)
    assert recorded.replays == MOST_WASTED
    assert recorded.is_told("reads what changes again and again (a setting of its optimizer beside the learning rate)")
    recorded.require_same(plain)


def test_gradients_of_the_loops_own_are_added_and_hooks_on_weights_called() -> None:
    recorded, plain = both(STEP, SGD)

    def more(weight: Any) -> None:
        (weight.square().sum() / 8).backward()

    def double(weight: Any) -> None:
        weight.grad.mul_(2.0)

    for training in (recorded, plain):
        head = training.model.head.weight
        training.go([4] * 8, partial(more, head))
        training.go([4] * 8)
        head.register_post_accumulate_grad_hook(double)
        training.go([4] * 6)
    recorded.require_same(plain)
    assert recorded.replays > 3
    assert recorded.is_told("has a hook on the gradient of a weight")


class Own(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "policy", "reason"),
    [
        (partial(torch.optim.AdamW, lr=0.125), STEP, "has an optimizer that is neither fused"),
        (partial(Own, lr=0.125, fused=True), STEP, ""),
        (
            partial(torch.optim.SGD, lr=0.125, momentum=0.5, dampening=0.5),  # whose first step must not be skipped
            Policy(cuda_graphs="step", autocast="fp16", fused_optimizer=True),
            "",  # a GPU's scaler would wait
        ),
    ],
)
def test_an_optimizer_is_recorded_unless_it_steps_on_the_host(make: Make, policy: Policy, reason: str) -> None:
    recorded, plain = both(policy, make)
    for training in (recorded, plain):
        training.go([4] * 8)
    recorded.require_same(plain)
    assert (recorded.replays > 0) == (not reason)
    assert recorded.is_told(reason)


@pytest.mark.parametrize("before", [0, 5])
@pytest.mark.parametrize("change", ["hook", "step"])
def test_a_hook_on_the_step_or_another_step_is_called_each_time_though_it_comes_late(change: str, before: int) -> None:
    training, called = Training(STEP), list[int]()
    optimizer = training.optimizer
    training.go([6] * before)
    replayed = training.replays
    assert (replayed > 0) == (before > 0)

    def step() -> None:
        called.append(1)
        type(optimizer).step(optimizer)

    if change == "hook":
        optimizer.register_step_pre_hook(lambda *_: called.append(1))
    else:
        optimizer.step = step  # type: ignore[method-assign, assignment]
    training.go([6] * 8)
    assert (len(called), training.replays) == (8, replayed)
    assert training.is_told("changes optimizer.0")


def test_a_forward_hook_on_what_the_loop_calls_is_called_and_ends_the_recording() -> None:
    training, plain = both(STEP)
    called: list[int] = []
    training.go([6] * 6)
    plain.go([6] * 12)
    training.tuned.model.register_forward_hook(lambda *_: called.append(1))
    training.go([6] * 6)
    assert len(called) == 6
    training.require_same(plain)
    assert training.is_told("hooks on tuned.model")


@dataclass
class Trainer:
    """Whose loss is a method, beside what a trainer holds."""

    held: Any

    def compute_loss(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x)


SEEN: list[int] = []


def counting_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    SEEN.append(1)
    return loss_of(model, x)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (Trainer([batch(0)]).compute_loss, ""),
        (Trainer(iter([batch(0)])).compute_loss, "holds loss.self.held, an iterator"),
        (counting_loss, "runs as with cuda_graphs: true"),
    ],
)
def test_of_a_loss_that_cannot_be_recorded_the_models_passes_are(loss: Any, reason: str) -> None:
    SEEN.clear()
    recorded, plain = both(STEP, SGD, loss=loss)
    called: Any = recorded.tuned.model
    for training in (recorded, plain):
        training.go([4] * 8)
    recorded.require_same(plain)
    assert (recorded.replays > 0, called.recordings.calls > 0) == (not reason, bool(reason))
    assert recorded.is_told(reason)
    assert loss is not counting_loss or len(SEEN) >= 16


def test_a_batch_that_is_never_recorded_is_told_of_and_passes_are_recorded() -> None:
    training = Training(STEP, SGD, loss=lambda model, given: loss_of(model, *given))
    for seed in range(6):
        training.train({batch(seed)})
    assert training.is_told("the training step of Net gets more in its batch than tensors on the GPU")
    called: Any = training.tuned.model
    assert called.recordings.calls == 5


def test_a_loop_that_misses_the_training_step_or_has_another_model_in_it_is_told_once() -> None:
    model = built()
    tuned = applied(STEP, model)
    optimizer = SGD(model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(5):
            with tuned.autocast():
                loss = loss_of(tuned.model, batch(seed))
            loss.backward()  # type: ignore[no-untyped-call]
            tuned.step(optimizer)
            optimizer.zero_grad()
    (warned,) = caught
    assert (warned.category, tuned.findings[-1].code) == (PolicyDriftWarning, "cuda-graphs-of-passes-only")
    assert "it does not train by tuned.training_step" in str(warned.message)
    called: Any = tuned.model
    assert called.recordings.calls == 4
    tuned.training_step(loss_of, optimizer, model=nn.Sequential(tuned.model))
    assert len(caught) == 1


def test_under_the_guard_updates_are_recorded_once_its_watch_is_over() -> None:
    recorded, plain = both(STEP, SGD, guard=None)
    for training in (recorded, plain):
        training.go([4] * 30)
    recorded.require_same(plain)
    assert 0 < recorded.replays < 10


def test_a_claim_is_held_against_replays_too(tmp_path: Path) -> None:
    promised = PolicyFile(
        policy=Policy(batch_size=4, cuda_graphs="step"),
        valid_for=dict(probe("cpu").labels),
        evidence={"step_ms": 1e-6},
    )
    amptune.save(promised, tmp_path / "policy.yaml")
    file: Any = tmp_path / "policy.yaml"
    tuned = applied(file, model := built(), guard=None)
    train = tuned.training_step(loss_of, tuned.optimizer(SGD(model.parameters())))
    for seed in range(STEPS + 10):
        train(batch(seed))
    assert tuned.recordings is not None
    assert tuned.recordings.calls > STEPS - 40
    assert "slower-than-promised" in [finding.code for finding in tuned.findings]


def test_undo_ends_all_steps_that_were_made() -> None:
    training = Training(STEP)
    training.go([6] * 6)
    training.tuned.training_step(loss_of, training.optimizer)
    replays = training.replays
    assert replays > 0
    training.tuned.undo()
    recorded_training.forwards.clear()
    training.go([6] * 3)
    assert len(recorded_training.forwards.shapes()) == 3
    assert (training.replays, len(training.train.recordings)) == (replays, 0)
