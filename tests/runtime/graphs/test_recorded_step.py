"""Whole training steps that are recorded, on a CPU, held against the same step without recording."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import recorded_training
import torch
from recorded_training import batch, built
from taped import TapeRecorder
from torch import nn

from amptune.measure.bench.step import Stepper
from amptune.policy.settings import LossScale, Policy
from amptune.runtime.apply_policy import PolicyDriftWarning, apply
from amptune.runtime.graphs.dispatch import MOST_WASTED
from amptune.runtime.training_step import RecipeStep
from amptune.runtime.tuned import Tuned
from amptune.workload.workload import Workload

Make = Callable[[Any], torch.optim.Optimizer]

ADAM: Make = partial(torch.optim.AdamW, lr=2.0**-5, fused=True)
SGD: Make = partial(torch.optim.SGD, lr=2.0**-5, momentum=0.5, fused=True)
WITHOUT_STATE: Make = partial(torch.optim.SGD, lr=2.0**-5, fused=True)
STEP = Policy(cuda_graphs="step")

pytestmark = pytest.mark.filterwarnings("ignore::amptune.PolicyDriftWarning")


@pytest.fixture(autouse=True)
def _forget() -> None:
    recorded_training.forget()


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).float().square().mean()
    return loss


def applied(policy: Policy, model: nn.Module, **how: Any) -> Tuned:
    """Whose recordings are tapes, if it records."""
    tuned = apply(policy, model, **{"guard": False, **how})
    if tuned.recordings is not None:
        tuned.recordings.recorder, tuned.recordings.device_type = TapeRecorder, "cpu"
    return tuned


def ignoring(do: Callable[[], object]) -> Callable[[int], object]:
    """What is done after each step, whatever its number."""
    return lambda _: do()


class Training:
    """A model in training under a policy."""

    def __init__(
        self,
        policy: Policy,
        make: Make = ADAM,
        clip: float | None = None,
        loss: Any = loss_of,
        model: Callable[[], nn.Module] = recorded_training.Net,
        **how: Any,
    ) -> None:
        self.model = built(model)
        self.tuned = applied(policy, self.model, **how)
        self.optimizer = self.tuned.optimizer(make(self.model.parameters()))
        self.train: Any = self.tuned.training_step(loss, self.optimizer, clip)
        self.losses: list[torch.Tensor] = []

    def go(self, sizes: list[int], after: Callable[[int], object] = lambda _: None) -> None:
        for size in sizes:
            self.losses.append(self.train(batch(len(self.losses), size)))
            after(len(self.losses))

    def require_same(self, other: Training) -> None:
        assert [float(loss) for loss in self.losses] == [float(loss) for loss in other.losses]
        for name, tensor in self.model.state_dict().items():
            assert torch.equal(tensor, other.model.state_dict()[name]), name
        states = [(one.optimizer.state_dict(), one.tuned.scaler.state_dict()) for one in (self, other)]
        torch.testing.assert_close(*states, rtol=0, atol=0)

    @property
    def updates(self) -> int:
        """How many were replayed."""
        return int(self.train.updates)


def both(policy: Policy, *given: Any, **more: Any) -> tuple[Training, Training]:
    plain = Policy(**{**dict(policy.departures()), "cuda_graphs": False})
    return Training(policy, *given, **more), Training(plain, *given, **more)


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("make", [ADAM, SGD, WITHOUT_STATE], ids=["adam", "momentum", "sgd"])
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
    recorded, plain = both(policy, make, clip)
    for training in (recorded, plain):
        training.go([4] * 14)
    recorded.require_same(plain)
    assert not recorded.tuned.findings[1:]  # besides that there is no GPU
    assert recorded.updates >= 14 // policy.accumulate - 5
    assert all(weight.grad is None for weight in recorded.model.parameters()) or policy.accumulate > 1


def test_each_shape_has_a_recording_and_an_update() -> None:
    recorded, plain = both(STEP)
    for training in (recorded, plain):
        training.go([4, 4, 4, 4, 2, 4, 2, 2, 4, 2, 2, 3, 4])
    recorded.require_same(plain)
    assert recorded.updates > 3


def test_a_learning_rate_schedule_goes_on_and_checkpoints_hold_numbers() -> None:
    recorded, plain = both(STEP, ADAM)
    for training in (recorded, plain):
        schedule = torch.optim.lr_scheduler.LambdaLR(training.optimizer, lambda step: 2.0 ** -(step // 3))
        training.go([4] * 16, ignoring(schedule.step))
    recorded.require_same(plain)
    assert recorded.updates == 11
    (group,) = recorded.optimizer.state_dict()["param_groups"]
    assert type(group["lr"]) is float
    assert not group["capturable"]


def test_a_schedule_of_betas_steps_by_itself_and_says_so() -> None:
    recorded, plain = both(STEP, ADAM)
    for training in (recorded, plain):
        schedule = torch.optim.lr_scheduler.OneCycleLR(training.optimizer, max_lr=0.125, total_steps=60)
        training.go([4] * 20, ignoring(schedule.step))
    for own, other in zip(recorded.losses, plain.losses, strict=True):
        assert float(own) == pytest.approx(float(other), rel=1e-3)  # rates of a replay are rounded to FP32
    assert recorded.updates == MOST_WASTED
    assert "AdamW has settings beside its learning rate that change again and again" in str(recorded.tuned.findings[-1])


def test_a_loaded_checkpoint_is_trained_on() -> None:
    recorded, plain = both(STEP, ADAM)
    for training in (recorded, plain):
        training.go([4] * 8)
        states = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
        training.go([4] * 4)
        training.model.load_state_dict(states[0])
        training.optimizer.load_state_dict(states[1])
        training.go([4] * 8)
    recorded.require_same(plain)
    assert recorded.updates > 8


def test_gradients_of_the_loops_own_are_added_and_hooks_on_weights_called() -> None:
    recorded, plain = both(STEP, SGD)

    def more(training: Training) -> None:
        (training.model.head.weight.square().sum() / 8).backward()

    def double(weight: Any) -> None:
        weight.grad.mul_(2.0)

    for training in (recorded, plain):
        training.go([4] * 8, ignoring(partial(more, training)))
    assert recorded.updates == 0
    for training in (recorded, plain):
        training.go([4] * 4)
        training.model.head.weight.register_post_accumulate_grad_hook(double)
        training.go([4] * 6)
    recorded.require_same(plain)


class Own(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "policy", "reason"),
    [
        (partial(torch.optim.AdamW, lr=0.125), STEP, "AdamW is neither fused"),
        (partial(Own, lr=0.125, fused=True), STEP, "Own is not PyTorch's own"),
        (
            partial(torch.optim.SGD, lr=0.125, momentum=0.5, dampening=0.5),  # whose first step must not be skipped
            Policy(cuda_graphs="step", autocast="fp16", fused_optimizer=True),
            "SGD does not take the loss scale, so that the scaler waits",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_recorded_steps_by_itself(make: Make, policy: Policy, reason: str) -> None:
    recorded, plain = both(policy, make)
    for training in (recorded, plain):
        training.go([4] * 8)
    recorded.require_same(plain)
    assert recorded.updates == 0
    (told,) = [finding for finding in recorded.tuned.findings if reason in finding.message]
    assert told.message.endswith("not recorded as a CUDA graph, while forward pass, loss and backward pass are")
    assert recorded.train.recordings.calls > 5


def test_an_optimizer_is_pytorchs_own_whichever_was_built_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch wraps the step of the class that is built first. AdamW then has that of Adam, and none of its own."""
    torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    if "step" in vars(torch.optim.AdamW):
        monkeypatch.delattr(torch.optim.AdamW, "step")
    training = Training(STEP, ADAM)
    training.go([4] * 8)
    assert training.updates > 0


def test_a_hook_on_the_optimizers_step_is_called_each_time() -> None:
    training = Training(STEP, SGD)
    steps: list[int] = []
    training.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    training.go([4] * 8)
    assert len(steps) == 8
    assert any("SGD has a hook on its step" in finding.message for finding in training.tuned.findings)


def test_a_hook_or_step_that_comes_after_the_recording_is_called_too() -> None:
    hooked, counted = Training(STEP), Training(STEP)
    called: list[int] = []

    def step() -> None:
        called.append(len(counted.losses))
        type(counted.optimizer).step(counted.optimizer)

    def add(number: int) -> None:
        if number == 5:
            hooked.optimizer.register_step_pre_hook(lambda *_: called.append(len(hooked.losses)))

    def replace_step(number: int) -> None:
        if number == 5:
            counted.optimizer.step = step  # type: ignore[method-assign, assignment]

    for training, change, reason in (
        (hooked, add, "a hook on its step"),
        (counted, replace_step, "a step that is not its class's"),
    ):
        called.clear()
        training.go([6] * 5)
        assert training.updates > 0
        training.losses, replayed = [], training.updates
        training.go([6] * 5, change)
        training.go([6] * 5)
        assert called == [5, 6, 7, 8, 9]
        assert training.updates - replayed <= 5
        assert any(reason in str(finding) for finding in training.tuned.findings)


def test_a_forward_hook_on_what_the_loop_calls_is_called_and_ends_the_recording() -> None:
    training, plain = both(STEP)
    called: list[int] = []
    training.go([6] * 6)
    plain.go([6] * 12)
    training.tuned.model.register_forward_hook(lambda *_: called.append(1))
    training.go([6] * 6)
    assert len(called) == 6
    training.require_same(plain)
    assert any("hooks on tuned.model" in str(finding) for finding in training.tuned.findings)


def test_a_loss_that_waits_for_the_device_is_not_recorded_but_passes_are() -> None:
    seen: list[int] = []

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        return loss_of(model, x)

    recorded, plain = both(STEP, SGD, loss=loss)
    for training in (recorded, plain):
        training.go([4] * 8)
    recorded.require_same(plain)
    assert len(seen) >= 16
    assert recorded.train.recordings.is_over
    assert any(
        "the training step of Net changes" in finding.message and "runs as with cuda_graphs: true" in finding.message
        for finding in recorded.tuned.findings
    )
    called: Any = recorded.tuned.model
    assert called.recordings.calls > 0


class Trainer:
    """Whose loss is a method, beside what a trainer holds."""

    def __init__(self, **held: Any) -> None:
        self.loss_fn, self.held = nn.MSELoss(), held
        self.training = Training(STEP, SGD, loss=self.compute_loss)
        self.plain = Training(Policy(), SGD, loss=self.compute_loss)

    def compute_loss(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x).float()
        loss: torch.Tensor = self.loss_fn(out, torch.zeros_like(out))
        return loss

    def fit(self) -> None:
        for training in (self.training, self.plain):
            training.go([4] * 8)
        self.training.require_same(self.plain)


def test_a_loss_that_is_a_method_of_a_trainer_is_recorded() -> None:
    trainer = Trainer(loader=[batch(0)], losses=[])
    trainer.fit()
    assert trainer.training.updates > 0


def test_a_loss_whose_trainer_holds_an_iterator_is_not_recorded_but_passes_are() -> None:
    trainer = Trainer(batches=iter([batch(0)]))
    trainer.fit()
    assert trainer.training.updates == 0
    assert "the training step of Net holds loss.self.held.batches, an iterator" in str(
        trainer.training.tuned.findings[-1]
    )
    called: Any = trainer.training.tuned.model
    assert called.recordings.calls > 0


def test_steps_of_a_workload_are_recorded() -> None:
    model = built()
    workload = Workload(
        model=lambda: model,
        batch=lambda n: batch(0, n),
        loss=loss_of,
        optimizer=lambda given: SGD(given.parameters()),
        batch_size=4,
        clip=1.0,
    )
    tuned = applied(STEP, model)
    step: Any = Stepper(workload, tuned, (batch(seed) for seed in range(10)))
    for _ in range(10):
        step()
    assert not tuned.findings[1:]
    assert step._train.updates > 0


def test_a_batch_that_is_never_recorded_is_told_of_and_passes_are_recorded() -> None:
    def loss(model: nn.Module, given: set[torch.Tensor]) -> torch.Tensor:
        (x,) = given
        return loss_of(model, x)

    model = built()
    tuned = applied(STEP, model)
    train: Any = tuned.training_step(loss, SGD(model.parameters()))
    for seed in range(6):
        train({batch(seed)})
    assert "the training step of Net gets more in its batch than tensors on the GPU" in str(tuned.findings[-1])
    called: Any = tuned.model
    assert called.recordings.calls == 5


def test_a_loop_without_a_training_step_is_told_once_what_it_misses() -> None:
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
    assert warned.category is PolicyDriftWarning
    assert "it does not train by tuned.training_step" in str(warned.message)
    told = [finding for finding in tuned.findings if finding.code == "cuda-graphs-of-passes-only"]
    assert len(told) == 1
    called: Any = tuned.model
    assert called.recordings.calls == 4


def test_another_model_in_the_step_is_told_of() -> None:
    model = built()
    tuned = applied(STEP, model)
    train = tuned.training_step(loss_of, SGD(model.parameters()), model=nn.Sequential(tuned.model))
    assert type(train) is RecipeStep
    assert "its training_step has Sequential in place of tuned.model" in str(tuned.findings[-1])


def test_under_the_guard_updates_are_recorded_once_its_watch_is_over() -> None:
    recorded, plain = both(STEP, SGD, guard=None)
    for training in (recorded, plain):
        training.go([4] * 30)
    recorded.require_same(plain)
    assert 0 < recorded.updates < 12


def test_undo_ends_all_steps_that_were_made() -> None:
    training = Training(STEP)
    training.go([6] * 6)
    training.tuned.training_step(loss_of, training.optimizer)
    updates = training.updates
    assert updates > 0
    training.tuned.undo()
    recorded_training.forwards.clear()
    training.go([6] * 3)
    assert len(recorded_training.forwards.shapes()) == 3
    assert (training.updates, training.train.recordings.calls, len(training.train.recordings)) == (updates, 0, 0)
