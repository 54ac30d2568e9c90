"""What the guard puts on a model, optimizers and PyTorch: it goes, it harms nothing, and it costs nothing."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._dynamo
from loops import FP16, Loop, Net, codes, loss_of, run, sgd, train
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from amptune.policy.settings import Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.guard import step_watch
from amptune.runtime.guard.step_watch import WATCHED_STEPS, StepWatch
from amptune.runtime.tuned import Tuned

BF16 = Policy(autocast="bf16")

torch_s_own_deprecations = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:torch")


@pytest.fixture(autouse=True)
def _no_other_watch() -> Iterator[None]:
    """Ends those of models that other tests dropped without undoing their policies, and hides hooks of others."""
    for watch in [*step_watch._watches, StepWatch(Policy(), (one := nn.Linear(1, 1)), one, lambda: None)]:
        watch.remove()
    with patch.dict(_global_optimizer_pre_hooks, clear=True):
        yield


def hooks_for(model: nn.Module) -> tuple[int, int]:
    """The hooks on its gradients, and on the steps of all optimizers; on its forward there is none."""
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    gradients: list[Any] = list(model.parameters())
    return sum(len(one._post_accumulate_grad_hooks or ()) for one in gradients), len(_global_optimizer_pre_hooks)


def plainly(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(WATCHED_STEPS + 1):  # the last one finds out
        loss_of(tuned).backward()
        optimizer.step()


def beside_another(tuned: Tuned, _: nn.Module) -> None:
    optimizer = sgd(nn.Linear(2, 2))
    for _step in range(10 * WATCHED_STEPS):
        optimizer.step()
    tuned.autocast()


def as_in_the_readme(tuned: Tuned, model: nn.Module) -> None:
    train(tuned, sgd(model), WATCHED_STEPS)


@pytest.mark.parametrize(
    ("loop", "policy"),
    [
        *[(as_in_the_readme, policy) for policy in (FP16, BF16, Policy())],
        *[(loop, policy) for loop in (plainly, beside_another) for policy in (BF16, Policy())],
    ],
)
def test_all_hooks_go_after_the_first_steps(loop: Loop, policy: Policy) -> None:
    model = Net()
    with apply(policy, model) as tuned:
        assert hooks_for(model) == (len(list(model.parameters())), 1)
        if loop is as_in_the_readme:
            train(tuned, sgd(model), WATCHED_STEPS - 1)
            assert hooks_for(model)[1] == 1
        guard = weakref.ref(tuned.guard)
        loop(tuned, model)
        gc.collect()
        assert (hooks_for(model), tuned.guard, guard()) == ((0, 0), None, None)


def test_a_model_that_is_dropped_is_freed_and_the_next_guard_clears_up() -> None:
    dropped = Net()
    tuned = apply(FP16, dropped)
    train(tuned, sgd(dropped))
    gone = weakref.ref(dropped)
    del dropped, tuned
    for _ in range(2):  # the first one frees the tensors that hold the hooks
        gc.collect()
    assert gone() is None
    one, two = apply(FP16, Net()), apply(FP16, Net())
    one.undo()
    assert hooks_for(one.model) == (0, 1)
    two.undo()
    assert hooks_for(two.model) == (0, 0)


def test_it_is_switched_off_by_argument_or_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, guard, expected in (("", None, 1), ("1", None, 1), ("0", None, 0), ("0", True, 1), ("1", False, 0)):
        monkeypatch.setenv("AMPTUNE_GUARD", value)
        with apply(FP16, Net(), guard=guard) as tuned:
            assert hooks_for(tuned.model)[1] == expected
            assert (tuned.scaler.guard is None) is (expected == 0)


def test_training_is_the_same_with_it_and_with_methods_of_the_scaler_that_the_loop_holds() -> None:
    ends = []
    for guard in (False, None):
        torch.manual_seed(0)
        model = Net()
        with apply(FP16, model, guard=guard) as tuned:
            optimizer, scaler = sgd(model), tuned.scaler
            scale, unscale, step, update = scaler.scale, scaler.unscale_, scaler.step, scaler.update
            for _ in range(WATCHED_STEPS + 2):
                scale(loss_of(tuned)).backward()
                unscale(optimizer)
                step(optimizer)
                update()
                optimizer.zero_grad()
            copied = pickle.loads(pickle.dumps(scaler))
            assert (copied.state_dict(), getattr(copied, "guard", None)) == (scaler.state_dict(), None)
        ends.append(model.state_dict())
    assert all(torch.equal(off, on) for off, on in zip(*map(dict.values, ends), strict=True))


@torch_s_own_deprecations
@pytest.mark.parametrize("compiled", ["model", "step", "optimizer"])
def test_a_compiled_loop_raises_no_alarm(compiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original, is_model = torch.compile, compiled == "model"
    how: Any = {"backend": "eager", "fullgraph": is_model}
    monkeypatch.setattr(torch, "compile", lambda what, **_: original(what, **how))
    torch._dynamo.reset()

    def loop(tuned: Tuned, model: nn.Module) -> None:
        optimizer, step = sgd(model), torch.compile(train) if compiled == "step" else train
        if compiled == "optimizer":
            optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
        for _ in range(WATCHED_STEPS + 5):
            step(tuned, optimizer)

    assert codes(run(loop, Policy(autocast="bf16", compile="default" if is_model else "off"))[0]) == []
