"""What the guard puts on a model, optimizers and PyTorch: it goes, it harms nothing, and it costs nothing."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import recorded_training
import torch
import torch._dynamo
from counting import calls_in
from loops import FP16, Net, codes, images, loss_of, run, sgd, train
from taped import TapeRecorder
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import amptune
from amptune.policy.settings import Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.guard import gradient_marks
from amptune.runtime.guard.guard import WATCHED_STEPS
from amptune.runtime.guard.misuse import Misuse, Place, PolicyMisuseWarning
from amptune.runtime.scaler import PolicyScaler
from amptune.runtime.tuned import Tuned

# Importing Inductor uses what torch itself deprecates (2.11 to 2.13: torch.jit.script_method).
torch_s_own_deprecations = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def hooks_on(model: nn.Module) -> dict[str, Any]:
    """Everything the guard could have left behind, save what only checkpoints run."""
    return {
        "forward": [len(module._forward_pre_hooks) for module in model.modules()],
        "with_kwargs": [len(module._forward_pre_hooks_with_kwargs) for module in model.modules()],
        "gradient": [len(gradient_hooks(parameter)) for parameter in model.parameters()],
        "step": len(_global_optimizer_pre_hooks) + len(_global_optimizer_post_hooks),
        "clipping": vars(clip_grad)["_group_tensors_by_device_and_dtype"],
    }


def gradient_hooks(parameter: Any) -> Any:
    return parameter._post_accumulate_grad_hooks or {}


@pytest.fixture
def model() -> Net:
    model = Net()
    assert hooks_on(model)["step"] == 0
    return model


@pytest.mark.parametrize("guard", [None, True])
def test_everything_goes_after_the_first_steps(model: Net, guard: bool | None) -> None:
    before = hooks_on(model)
    tuned = apply(replace(FP16, memory_format="channels_last"), model, guard=guard)
    assert hooks_on(model) != before
    optimizer = sgd(model)
    train(tuned, optimizer, WATCHED_STEPS - 1)
    during = hooks_on(model)
    assert sum(during["gradient"]) == len(during["gradient"])
    assert (sum(during["forward"]), during["step"]) == (1 if guard else 0, 1)  # some of PyTorch's tools refuse hooks
    train(tuned, optimizer, 1)
    assert hooks_on(model) == before
    tuned.undo()


def test_a_guard_that_nobody_asked_for_is_forgotten_when_its_watch_is_over(model: Net) -> None:
    tuned = apply(FP16, model)
    optimizer, guard = tuned.optimizer(sgd(model)), weakref.ref(tuned.guard)
    with tuned.autocast(), pytest.warns(PolicyMisuseWarning, match="inside autocast"):
        tuned.scaler.scale(tuned.model(images()).sum()).backward()
    train(tuned, optimizer, WATCHED_STEPS)
    gc.collect()
    assert (tuned.guard, guard(), type(tuned.scaler)) == (None, None, PolicyScaler)
    assert not optimizer._optimizer_state_dict_pre_hooks
    with tuned.autocast():
        loss = tuned.model(images()).sum()
        loss.backward()  # nobody watches any more
    tuned.undo()
    assert codes(tuned) == ["backward-inside-autocast"]


@pytest.mark.parametrize("guard", [None, True])
def test_everything_goes_where_no_gradient_is_seen(model: Net, guard: bool | None) -> None:
    """As where FSDP2 has replaced the parameters: the next pass finds out."""
    before = hooks_on(model)
    tuned = apply(Policy(), model, guard=guard)
    optimizer = sgd(model)
    for _ in range(WATCHED_STEPS):
        optimizer.step()
    assert hooks_on(model) != before
    with tuned.autocast():
        assert hooks_on(model) == before
    tuned.undo()


@pytest.mark.parametrize("guard", [None, True])
def test_the_watch_of_a_model_that_does_not_train_lets_others_step_alone(model: Net, guard: bool | None) -> None:
    """As a teacher, which is evaluated under a policy of its own."""
    tuned, other = apply(Policy(autocast="bf16"), model, guard=guard), nn.Linear(2, 2)
    optimizer = sgd(other)
    for _ in range(10 * WATCHED_STEPS):
        optimizer.step()
    assert not gradient_marks._watchers
    with tuned.autocast():
        assert not any(hooks_on(model)["gradient"])
    tuned.undo()


@pytest.mark.parametrize("guard", [None, True])
@pytest.mark.parametrize("autocast", ["off", "bf16"])
def test_everything_goes_without_a_scaler_too(model: Net, autocast: Any, guard: bool | None) -> None:
    before = hooks_on(model)
    tuned = apply(Policy(autocast=autocast), model, guard=guard)
    optimizer = sgd(model)
    for _ in range(WATCHED_STEPS + 1):  # the last one finds out
        loss_of(tuned).backward()
        optimizer.step()
    assert hooks_on(model) == before
    tuned.undo()


@pytest.mark.filterwarnings("ignore:the loss scale has fallen")
def test_steps_that_the_scaler_skips_count(model: Net) -> None:
    before = hooks_on(model)
    tuned = apply(FP16, model, guard=True)
    optimizer = sgd(model)
    for _ in range(WATCHED_STEPS):
        tuned.scaler.scale(loss_of(tuned) * float("inf")).backward()
        tuned.scaler.step(optimizer)
        tuned.scaler.update()
        optimizer.zero_grad()
    assert hooks_on(model) == before
    tuned.undo()


def test_undo_takes_everything_away_at_once(model: Net) -> None:
    before = hooks_on(model)
    optimizer = sgd(model)
    with apply(FP16, model, guard=True) as tuned:
        train(tuned, tuned.optimizer(optimizer))
        assert len(optimizer._optimizer_state_dict_pre_hooks) == 1
    assert hooks_on(model) == before
    assert len(optimizer._optimizer_state_dict_pre_hooks) == 0
    assert not vars(optimizer)["_optimizer_load_state_dict_post_hooks"]


def test_the_guards_of_several_models_come_and_go_alone(model: Net) -> None:
    before, other = hooks_on(model), Net()
    one, two = apply(FP16, model, guard=True), apply(FP16, other, guard=True)
    assert hooks_on(model)["step"] == 1
    one.undo()
    assert hooks_on(model)["step"] == 1
    two.scaler.scale(loss_of(two)).backward()
    with pytest.warns(PolicyMisuseWarning, match="clipped"):
        nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    two.undo()
    assert hooks_on(model) == before


def test_a_model_that_is_dropped_is_freed_and_the_next_guard_clears_up(model: Net) -> None:
    before, dropped = hooks_on(model), Net()
    tuned = apply(FP16, dropped, guard=True)
    train(tuned, sgd(dropped))
    gone = weakref.ref(dropped)
    del dropped, tuned
    for _ in range(2):  # the first one frees the tensors that hold the hooks
        gc.collect()
    assert gone() is None
    apply(FP16, model, guard=True).undo()
    assert hooks_on(model) == before


def test_off_it_is_not_there(model: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    before = hooks_on(model)
    monkeypatch.setenv("AMPTUNE_GUARD", "0")
    with apply(FP16, model) as tuned:
        assert hooks_on(model) == before
        assert type(tuned.scaler) is PolicyScaler
    monkeypatch.setenv("AMPTUNE_GUARD", "1")
    with apply(FP16, model, guard=False):
        assert hooks_on(model) == before


def test_the_environment_switches_it_on(model: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPTUNE_GUARD", "1")
    with apply(FP16, model) as tuned:
        loss = loss_of(tuned)
        with tuned.autocast(), pytest.warns(amptune.PolicyMisuseWarning, match="inside autocast"):
            loss.backward()
    assert codes(tuned) == ["backward-inside-autocast"]


@pytest.mark.parametrize("guard", [None, True])
def test_copies_pickles_and_weights_are_as_without_it(model: Net, guard: bool | None) -> None:
    names = list(model.state_dict())
    attributes = [sorted(vars(module)) for module in model.modules()]
    with apply(replace(FP16, memory_format="channels_last"), model, guard=guard) as tuned:
        train(tuned, sgd(model))
        assert list(model.state_dict()) == names
        assert [sorted(vars(module)) for module in model.modules()] == attributes
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not any(gradient_hooks(parameter) for parameter in other.parameters())
            for size in range(6, 20):
                other(images(1, size)).sum().backward()
            torch.testing.assert_close(other.state_dict()["head.weight"], model.state_dict()["head.weight"])
        scaler = pickle.loads(pickle.dumps(tuned.scaler))
        assert (scaler.guard, scaler.get_scale()) == (None, tuned.scaler.get_scale())
    assert codes(tuned) == []


@pytest.mark.parametrize("more", [{}, {"protect_batch_norm": True}], ids=str)
def test_training_is_the_same_with_it(more: dict[str, Any]) -> None:
    ends = []
    for guard in (False, None, True):
        torch.manual_seed(0)
        model = Net()
        with apply(FP16, model, guard=guard, **(more if guard else {})) as tuned:
            train(tuned, sgd(model), steps=WATCHED_STEPS + 2)
        ends.append(model.state_dict())
    assert all(
        torch.equal(off, brief) and torch.equal(off, on) for off, brief, on in zip(*map(dict.values, ends), strict=True)
    )


def test_a_pytorch_that_clips_otherwise_can_be_guarded(model: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_marks, "_LOOKED_UP", "gone")
    with apply(FP16, model, guard=True) as tuned:
        train(tuned, sgd(model))
    assert hooks_on(model)["step"] == 0


@torch_s_own_deprecations
@pytest.mark.parametrize("guard", [None, True])
@pytest.mark.parametrize("by_hand", [True, False])
def test_a_compiled_model_has_no_more_graphs_and_no_breaks(
    by_hand: bool, guard: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while it watches nor when it ends, which would compile everything anew."""
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **_: original(model, backend=backend, fullgraph=True))
    torch._dynamo.reset()

    def loop(tuned: Tuned, model: nn.Module) -> None:
        if by_hand:
            tuned.model = original(model, backend=backend, fullgraph=True)  # type: ignore[assignment]
        for _ in range(WATCHED_STEPS + 5):
            train(tuned, sgd(model))
            with torch.no_grad():
                model(images())  # an evaluation without the compiled form
        train(tuned, sgd(model), steps=WATCHED_STEPS + 5)

    policy = Policy(autocast="bf16", memory_format="channels_last", compile="off" if by_hand else "default")
    tuned, said = run(loop, policy, guard=guard)
    assert (len(graphs), codes(tuned), said) == (1, [], [])


def test_methods_of_the_scaler_that_a_loop_holds_work_on(model: Net) -> None:
    with apply(FP16, model) as tuned:
        optimizer, scaler = sgd(model), tuned.scaler
        scale, unscale, step, update = scaler.scale, scaler.unscale_, scaler.step, scaler.update
        for _ in range(WATCHED_STEPS + 2):
            scale(loss_of(tuned)).backward()
            unscale(optimizer)
            step(optimizer)
            update()
            optimizer.zero_grad()
        assert type(scaler) is PolicyScaler
        assert pickle.loads(pickle.dumps(scaler)).state_dict() == scaler.state_dict()


def test_what_a_step_held_is_freed_with_it(model: Net) -> None:
    with apply(FP16, model) as tuned:
        gc.disable()
        try:
            for _ in range(3):
                optimizer = sgd(model)
                train(tuned, optimizer)
                gone = weakref.ref(optimizer)
                del optimizer
                assert gone() is None
        finally:
            gc.enable()


def a_step(tuned: Tuned, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    with tuned.autocast():
        loss = tuned.model(x).float().square().mean()
    tuned.scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(tuned.model.parameters(), float("inf"))
    tuned.scaler.step(optimizer)
    tuned.scaler.update()
    optimizer.zero_grad()


def a_loss(tuned: Tuned, _: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    with tuned.autocast():
        return tuned.model(x).float().square().mean()


@pytest.mark.slow
@torch_s_own_deprecations
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("guard", [None, True])
@pytest.mark.parametrize("autocast", ["fp16", "off"])
@pytest.mark.parametrize("compiled", ["step", "loss", "optimizer", "backward"])
def test_nothing_is_compiled_anew_when_the_watch_ends(compiled: str, autocast: Any, guard: bool | None) -> None:
    """Whatever of the step is compiled by hand, as without a watch."""
    assert compilations(compiled, autocast, guard) == compilations(compiled, autocast, False)


def compilations(compiled: str, autocast: Any, guard: bool | None) -> int:
    """Compilations of frames in a training of more steps than are watched."""
    graphs, x = [], images()

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 4), nn.ReLU(), nn.Linear(4, 2))
    with apply(Policy(autocast=autocast), model, guard=guard) as tuned:
        optimizer = tuned.optimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
        step, loss_of_ = a_step, a_loss
        if compiled in ("step", "backward"):
            step = torch.compile(a_step, backend=backend)
        elif compiled == "optimizer":
            optimizer.step = torch.compile(optimizer.step, backend=backend)  # type: ignore[assignment]
        else:
            loss_of_ = torch.compile(a_loss, backend=backend)
        torch._dynamo.config.compiled_autograd = compiled == "backward"
        try:
            for _ in range(WATCHED_STEPS + 10):
                if compiled != "loss":
                    step(tuned, optimizer, x)
                else:
                    tuned.scaler.scale(loss_of_(tuned, optimizer, x)).backward()
                    tuned.scaler.step(optimizer)
                    tuned.scaler.update()
                    optimizer.zero_grad()
        finally:
            torch._dynamo.config.compiled_autograd = False
        assert codes(tuned) == []
    assert graphs
    return len(graphs)


@torch_s_own_deprecations
def test_hooks_that_a_compiled_step_keeps_do_nothing_and_go_with_the_policy(model: Net) -> None:
    before = hooks_on(model)
    torch._dynamo.reset()
    with apply(Policy(), model) as tuned:
        optimizer = sgd(model)
        optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
        for _ in range(10 * WATCHED_STEPS):  # no step is seen: they are compiled
            loss_of(tuned).backward()
            optimizer.step()
        assert not any(hooks_on(model)["gradient"])
        assert hooks_on(model)["step"] == 1
        assert not gradient_marks._watchers
    assert hooks_on(model) == before


@torch_s_own_deprecations
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_a_loop_that_is_compiled_as_a_whole_keeps_no_hooks_on_gradients(model: Net) -> None:
    torch._dynamo.reset()
    with apply(Policy(), model) as tuned:
        step, optimizer, x = torch.compile(a_step, backend="eager"), sgd(model), images()
        for _ in range(3):
            step(tuned, optimizer, x)
        assert not any(hooks_on(model)["gradient"])


def test_passes_are_recorded_while_it_watches_and_replayed_when_it_is_gone() -> None:
    recorded_training.forget()
    model = recorded_training.built()
    with apply(Policy(autocast="bf16", memory_format="channels_last", cuda_graphs=True), model) as tuned:
        called: Any = tuned.model
        called.recordings.recorder, called.recordings.device_type = TapeRecorder, "cpu"
        optimizer = sgd(model)
        for seed in range(WATCHED_STEPS + 5):
            with tuned.autocast():
                loss = tuned.model(tuned.batch(recorded_training.batch(seed))).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert tuned.guard is None
        assert [code for code in codes(tuned) if "recorded" in code] == []
    assert len(recorded_training.forwards.shapes()) < WATCHED_STEPS  # the model's own forward


@torch_s_own_deprecations
def test_autocast_inside_a_compiled_function_is_traced() -> None:
    torch._dynamo.reset()
    with apply(FP16, Net(), guard=True) as tuned:

        @torch.compile(backend="eager", fullgraph=True)
        def loss(x: torch.Tensor) -> Any:
            with tuned.autocast():
                return tuned.model(x).float().square().mean()

        loss(images()).backward()
        assert codes(tuned) == []


@torch_s_own_deprecations
def test_the_batches_of_a_model_that_the_policy_compiles_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **_: original(model, backend="eager"))

    def loop(tuned: Tuned, _: nn.Module) -> None:
        for i in range(10):
            tuned.model(images(size=6 + i)).sum().backward()

    tuned, _ = run(loop, Policy(compile="reduce-overhead"), guard=True)
    assert codes(tuned) == ["shapes-keep-changing"]
    assert "under compile: reduce-overhead a CUDA graph is recorded anew" in str(tuned.findings[0])


def test_the_place_is_found_from_a_thread_of_autograds(monkeypatch: pytest.MonkeyPatch) -> None:
    """As hooks of a GPU's tensors run: no Python called them, and the loop's thread waits in backward meanwhile."""
    misuse = Misuse()
    monkeypatch.setattr(threading, "get_ident", lambda: -1)
    place, line = misuse.here(), sys._getframe().f_lineno
    assert place == Place(__file__, line)


def test_the_place_is_the_users_line_when_amptune_calls_in_between() -> None:
    """As a bundled workload's loss does, in whatever room of the package it stands."""
    package = Path(amptune.__file__).parent
    for file in ("workload/zoo/recipes.py", "runtime/guard/misuse.py", "anywhere.py"):
        names: dict[str, Any] = {}
        exec(compile("def call(ask):\n    return ask()", str(package / file), "exec"), names)  # noqa: S102
        place, line = names["call"](Misuse().here), sys._getframe().f_lineno
        assert place == Place(__file__, line)


def test_a_guard_that_has_watched_adds_a_few_calls_to_a_step(model: Net) -> None:
    with apply(FP16, model, guard=True) as tuned:
        train(tuned, sgd(model), WATCHED_STEPS)
        guard: Any = tuned.guard
        loss, optimizer = torch.ones(1), sgd(model)

        def step() -> None:
            guard.autocast_used()
            guard.after_scale(loss)
            guard.after_unscale(optimizer)
            guard.before_scaler_step(optimizer, has_closure=False)
            guard.checkpoints.look(training_began=True)

        step()
        assert calls_in(step) <= 15  # 10 of 2026-11; 173 while the guard watches


def test_torchs_error_for_a_hook_that_returns_something_is_the_one_that_is_raised() -> None:
    model = Net()
    weight: Any = model.head.weight
    weight.register_post_accumulate_grad_hook(lambda _: weight.grad.mul_(0.5))
    with apply(Policy(), model) as tuned:
        loss = loss_of(tuned)
        with pytest.raises(RuntimeError, match="hooks should return None"):
            loss.backward()
