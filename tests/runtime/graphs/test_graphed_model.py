from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from recorded_training import (
    Forwards,
    Net,
    Step,
    accumulated,
    backward_of_squares,
    batch,
    built,
    forget,
    forward_in_vain,
    forwards,
    graphed,
    in_bf16,
    plain_step,
    require_same_gradients,
    require_same_training,
    said,
    trained,
    two_views,
    zeroed_in_place,
)
from taped import TapeRecorder
from torch import nn

from amptune.errors import PolicyApplyError
from amptune.policy.settings import Policy
from amptune.runtime.apply_policy import PolicyDriftWarning, apply
from amptune.runtime.gradient_dtype import CAN_DIFFER, take_gradients_in
from amptune.runtime.graphs.dispatch import MOST_RECORDINGS, MOST_WASTED, NOT_RECORDED, WORTH_IT
from amptune.runtime.graphs.graphed_model import GraphedModel
from amptune.runtime.graphs.host_effects import NotRecordableError, obstacle_in
from amptune.runtime.graphs.tensor_use import TensorWatch


@pytest.fixture(autouse=True)
def _afresh() -> None:
    forget()


STEPS: list[Step] = [plain_step, in_bf16, accumulated, zeroed_in_place, two_views, forward_in_vain]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("sizes", [[4] * 5, [4, 4, 3, 4, 4, 3, 4, 3]], ids=["one-size", "last-batches"])
def test_training_is_bit_for_bit_that_of_the_plain_model(step: Step, sizes: list[int]) -> None:
    called = require_same_training(Net, step, sizes)
    assert not said
    assert called.unused.weight.grad is None  # it has no part in the loss


def test_another_shape_is_recorded_when_it_comes_again_and_only_so_many_are() -> None:
    model = built()
    called = graphed(model)
    called.recordings.checks = False
    trained(model, called, plain_step, [8, 1, 8])
    assert forwards.shapes().count("(1, 3, 8, 8)") == 1
    trained(model, called, plain_step, [1])
    many = forwards.shapes().count("(1, 3, 8, 8)")
    trained(model, called, plain_step, [1, 1, 1])
    assert forwards.shapes().count("(1, 3, 8, 8)") == many > 2
    trained(model, called, plain_step, [2, 2, 3, 3, 5, 5, 6, 6, 7, 7])
    assert len(called.recordings) == MOST_RECORDINGS
    forwards.clear()
    trained(model, called, plain_step, [7, 8])
    assert forwards.shapes() == ["(7, 3, 8, 8)"]


def test_evaluation_and_passes_without_gradients_run_by_themselves() -> None:
    model = built()
    called = graphed(model)
    trained(model, called, plain_step, [4, 4])
    forwards.clear()
    called.eval()
    assert not model.training
    assert called(batch(0)).requires_grad
    called.train()
    with torch.no_grad():
        called(batch(0))
    x = batch(0).requires_grad_()
    called(x).sum().backward()
    assert x.grad is not None
    assert len(forwards.shapes()) == 3


@pytest.mark.parametrize("passes", [3, 4], ids=["compared", "replayed"])
def test_a_second_backward_pass_is_an_error_as_without(passes: int) -> None:
    model = built()
    called = graphed(model)
    trained(model, called, plain_step, [4] * passes)
    loss = called(batch(0)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through"):
        loss.backward()


def test_a_model_that_goes_on_changing_is_not_recorded_for_ever() -> None:
    model = built()
    called = graphed(model)
    for _ in range(MOST_WASTED + 2):
        model.head.weight.data = torch.full((4, 8), 0.5)
        trained(model, called, plain_step, [4] * (WORTH_IT + 2))
    assert not said
    for _ in range(MOST_WASTED + 2):
        model.head.weight.data = torch.full((4, 8), 0.5)
        trained(model, called, plain_step, [4, 4])
    assert [finding.code for finding in said] == [NOT_RECORDED]
    assert "meets a changed model again and again (head.weight" in said[0].message


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.register_forward_hook(partial(print, end="", file=io.StringIO()))


class Keyed(nn.Module):
    """Keywords, plain values and nested structures, going in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(192, 2)

    def forward(self, *, batch: dict[str, Any], scale: float = 1.0, note: Any = "") -> dict[str, Any]:
        out = self.linear(batch["x"].flatten(1)) * scale
        return {"out": (out, out.argmax(1)), "loss": out.mean(), "note": note, "mask": ~batch["mask"], "none": None}


def test_structures_go_in_and_come_out() -> None:
    def backward(called: Any, seed: int) -> None:
        x = batch(seed)
        found = called(batch={"x": x, "mask": x > 0}, scale=float(1 + seed % 2), note="kept")
        assert (found.keys(), found["note"], found["none"]) == ({"out", "loss", "note", "mask", "none"}, "kept", None)
        assert torch.equal(found["mask"], x <= 0)
        assert torch.equal(found["out"][1], found["out"][0].argmax(1))
        assert not found["out"][1].requires_grad
        found["loss"].backward()

    require_same_gradients(Keyed, backward)
    assert not said


def test_arguments_that_are_not_known_run_by_themselves() -> None:
    called = graphed(built(Keyed))
    for seed in range(3):
        called(batch={"x": batch(seed), "mask": batch(seed) > 0}, note=object())["loss"].backward()
    with pytest.raises(PolicyApplyError, match="never calls the model with tensors on the GPU"):
        called.recordings.require_some()


def test_it_stands_for_the_model() -> None:
    model = built()
    called = graphed(model)
    assert called.head is model.head
    assert list(called.parameters()) == list(model.parameters())
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = called.nothing_of_that_name
    trained(model, called, plain_step, [4, 4])
    copied = copy.deepcopy(called)
    assert copied.state_dict().keys() == called.state_dict().keys()
    assert copied.head is not model.head
    before = model.head.weight.clone()
    trained(copied._orig_mod, copied, plain_step, [4, 4])
    assert torch.equal(model.head.weight, before)
    loaded = pickle.loads(pickle.dumps(called))
    assert type(loaded) is Net


def test_recording_changes_no_buffer_and_draws_no_random_number() -> None:
    model = built()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    called = graphed(model)
    called(batch(0)).sum().backward()
    called(batch(0))
    assert len(called.recordings) == 1
    assert torch.equal(torch.rand(3), expected)
    assert int(model.body[1].num_batches_tracked) == 2


def test_a_policy_wraps_the_model_until_it_is_undone() -> None:
    model = built()
    tuned = apply(Policy(cuda_graphs=True), model)
    called: Any = tuned.model
    assert isinstance(called, GraphedModel)
    if not torch.cuda.is_available():
        assert [finding.code for finding in tuned.findings] == ["cuda-graphs-without-effect"]
    called.recordings.recorder, called.recordings.device_type = TapeRecorder, "cpu"
    trained(model, called, plain_step, [4, 4, 4])
    assert len(called.recordings) == 1
    tuned.undo()
    assert tuned.model is model
    forwards.clear()
    trained(model, called, plain_step, [4, 4, 4])
    assert len(forwards.shapes()) == 3


def test_what_is_not_recorded_is_a_warning_and_a_finding() -> None:
    tuned = apply(Policy(cuda_graphs=True), built(Hooked))
    called: Any = tuned.model
    called.recordings.recorder, called.recordings.device_type = TapeRecorder, "cpu"
    with pytest.warns(PolicyDriftWarning, match="has a hook on head"):
        tuned.model(batch(0))
    assert tuned.findings[-1].code == NOT_RECORDED


def test_what_is_compiled_has_cuda_graphs_by_its_mode() -> None:
    with pytest.raises(ValueError, match=r"cuda_graphs: .*reduce-overhead.*compile is default"):
        Policy(cuda_graphs=True, compile="default")


def test_out_of_memory_is_told_apart() -> None:
    class Full(TapeRecorder):
        def record(self, _: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    called = GraphedModel(built(), said.append, recorder=Full, device_type="cpu")
    called(batch(0)).sum().backward()
    assert called(batch(0)).shape == (4, 4)
    with pytest.raises(PolicyApplyError) as error:
        called.recordings.require_some()
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)


class Shared(nn.Module):
    """Both weights have one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 192))
        self.delta = nn.Parameter(torch.zeros(4, 192))

    def forward(self, x: torch.Tensor) -> Any:
        return nn.functional.linear(x.flatten(1), self.weight + self.delta)


def test_each_weight_has_a_gradient_of_its_own() -> None:
    called = require_same_gradients(Shared, backward_of_squares)
    called.weight.grad.zero_()
    assert called.delta.grad.any()


class Tied(nn.Module):
    """Autocast casts its weight once for three uses, and so sums up its gradient in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(192, 192)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(self.linear(self.linear(x.flatten(1))))


class TwoUses(nn.Module):
    """Autocast casts its weight for one use, and not for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(192, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x.flatten(1)) + self.linear.weight.square().mean()


def without_cache(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    """Autocast casts a weight anew for each use."""
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize(
    ("make", "step"), [(Tied, in_bf16), (TwoUses, in_bf16), (Tied, without_cache), (Net, without_cache)]
)
def test_gradients_are_summed_in_the_precision_of_the_plain_model(make: Callable[[], nn.Module], step: Step) -> None:
    require_same_training(make, step)
    assert not said


@pytest.mark.skipif(not CAN_DIFFER, reason="needs gradients of another dtype than their weight, which torch 2.10 has")
def test_half_weights_with_gradients_in_fp32_sum_them_in_fp32() -> None:
    def make() -> nn.Module:
        model = Tied().half()
        for parameter in model.parameters():
            take_gradients_in(torch.float32, parameter)
        return model

    def backward(called: Any, seed: int) -> None:
        called(batch(seed).half()).float().square().mean().backward()

    called = require_same_gradients(make, backward)
    assert called.linear.weight.grad.dtype is torch.float32
    assert not said


def test_a_loss_that_is_still_held_is_not_in_the_way() -> None:
    """Its graph holds nodes of autograd that belong to the stream of its pass."""
    beside: Any = Forwards()  # where it is no effect of the pass
    nodes: list[Any] = []
    beside.nodes = nodes

    class Telling(Net):
        def forward(self, x: torch.Tensor) -> Any:
            beside.nodes.append(torch.autograd.graph.get_gradient_edge(self.head.weight).node)
            return super().forward(x)

    model = built(Telling)
    called = graphed(model)
    for seed in range(2):
        loss = called(batch(seed)).square().mean()
        loss.backward()
    first, *recorded, compared = nodes
    assert len(recorded) == 5
    assert all(node is not first for node in recorded)
    assert compared is first
    assert torch.autograd.graph.get_gradient_edge(model.head.weight).node is first


class Recurrent(nn.Module):
    """Its LSTM has lists of its weights, and of weak references to them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(16, 4)
        self.scales = {"head": nn.Parameter(torch.ones(4))}
        self.scale = self.scales["head"]
        vars(self.scale)["kind"] = "scale"

    def forward(self, x: torch.Tensor) -> Any:
        scale = self.scales["head"]
        assert vars(scale)["kind"] == "scale"
        return self.head(self.lstm(x.flatten(2))[0][:, -1]) * scale


def test_weights_that_modules_list_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # a tape cannot do its LSTM again
    called = require_same_training(Recurrent)
    assert not said
    assert all(one is other for one, other in zip(called.lstm._flat_weights, called.lstm.parameters(), strict=True))


def test_what_is_set_on_it_is_set_on_the_model() -> None:
    model = built()
    called = graphed(model)
    called.scale = 3.0
    called.head = nn.Linear(8, 2)
    called.register_buffer("extra", torch.ones(2))
    assert (model.scale, model.head.out_features, model.extra.tolist()) == (3.0, 2, [1.0, 1.0])
    del called.scale
    assert not hasattr(model, "scale")
    model.eval()
    assert not called.training
    called.train(called.training)
    assert not model.training


def test_it_runs_by_itself_where_something_looks_on() -> None:
    model = built()
    called = graphed(model)
    trained(model, called, plain_step, [4, 4, 4])
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        called(batch(0)).sum().backward()
    assert packed
    assert torch.vmap(called.head)(torch.ones(2, 3, 8)).shape == (2, 3, 4)
    assert not said


def test_an_exchange_with_other_processes_is_refused_before_it_begins() -> None:
    x = torch.ones(3)
    with TensorWatch([x], []), pytest.raises(NotRecordableError, match="exchanges tensors with other processes"):
        torch.ops._c10d_functional.all_reduce(x, "sum", "0")


def test_parallel_training_is_put_around_it() -> None:
    reason = obstacle_in(nn.Sequential(DistributedDataParallelOf.__new__(DistributedDataParallelOf)))
    assert reason is not None
    assert "DistributedDataParallel, which is to be put around" in reason


class DistributedDataParallelOf(nn.parallel.DistributedDataParallel):
    """Without a process group."""

    def __new__(cls) -> Any:
        made = object.__new__(cls)
        nn.Module.__init__(made)
        return made
