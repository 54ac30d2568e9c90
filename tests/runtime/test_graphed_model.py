from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from taped import TapeRecorder
from torch import nn

from amptune.errors import PolicyApplyError
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.runtime.applying import PolicyDriftWarning, apply
from amptune.runtime.graphed_model import MOST_RECORDINGS, MOST_WASTED, NOT_RECORDED, WORTH_IT, GraphedModel

Step = Callable[[nn.Module, torch.optim.Optimizer, torch.Tensor], Any]


class Net(nn.Module):
    """Counts how often its own forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(8, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        forwards.append(tuple(x.shape))
        return self.head(self.body(x).flatten(1))


forwards: list[tuple[int, ...]] = []
said: list[Finding] = []


@pytest.fixture(autouse=True)
def _afresh() -> None:
    forwards.clear()
    said.clear()


def built(make: Callable[[], nn.Module] = Net) -> Any:
    torch.manual_seed(0)
    return make()


def graphed(model: nn.Module) -> GraphedModel:
    return GraphedModel(model, said.append, recorder=TapeRecorder, device_type="cpu")


def batch(seed: int, size: int = 4) -> torch.Tensor:
    return torch.randn(size, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def in_bf16(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    optimizer.zero_grad()
    for part in (x, x.flip(0) + 1):
        loss = model(part).square().mean()
        loss.backward()
    optimizer.step()
    return loss.detach()


def zeroed_in_place(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    optimizer.zero_grad(set_to_none=False)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def two_views(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    """The second forward pass comes before the backward pass of the first."""
    optimizer.zero_grad()
    loss = (model(x) - model(x.flip(3) * 2)).square().mean() + model(x).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def forward_in_vain(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    model(x)
    return plain_step(model, optimizer, x)


def trained(model: nn.Module, called: nn.Module, step: Step, sizes: list[int]) -> tuple[list[float], dict[str, Any]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = [float(step(called, optimizer, batch(seed, size))) for seed, size in enumerate(sizes)]
    return losses, {name: tensor.clone() for name, tensor in model.state_dict().items()}


STEPS: list[Step] = [plain_step, in_bf16, accumulated, zeroed_in_place, two_views, forward_in_vain]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("sizes", [[4] * 5, [4, 4, 3, 4, 4, 3, 4, 3]], ids=["one-size", "last-batches"])
def test_training_is_bit_for_bit_that_of_the_plain_model(step: Step, sizes: list[int]) -> None:
    model, plain = built(), built()
    losses, state = trained(model, graphed(model), step, sizes)
    expected, weights = trained(plain, plain, step, sizes)
    assert losses == expected
    for name, tensor in weights.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=0, msg=name)
    assert not said
    assert model.unused.weight.grad is None  # it has no part in the loss


def test_the_forward_is_run_to_record_it_and_never_again() -> None:
    model = built()
    called = graphed(model)
    trained(model, called, plain_step, [4])
    once = len(forwards)
    trained(model, called, plain_step, [4] * 10)
    assert len(forwards) == once
    called.require_recorded()


def test_another_shape_is_recorded_when_it_comes_again_and_only_so_many_are() -> None:
    model = built()
    called = graphed(model)
    trained(model, called, plain_step, [8, 1, 8])
    assert forwards.count((1, 3, 8, 8)) == 1
    trained(model, called, plain_step, [1])
    many = forwards.count((1, 3, 8, 8))
    trained(model, called, plain_step, [1, 1, 1])
    assert forwards.count((1, 3, 8, 8)) == many > 2
    trained(model, called, plain_step, [2, 2, 3, 3, 5, 5, 6, 6, 7, 7])
    assert len(called._recorded) == MOST_RECORDINGS
    forwards.clear()
    trained(model, called, plain_step, [7, 8])
    assert forwards == [(7, 3, 8, 8)]


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
    assert len(forwards) == 3


def test_what_was_given_out_stays_as_it_was() -> None:
    model = built()
    called = graphed(model)
    first = called(batch(0))
    kept = first.detach().clone()
    first.sum().backward()
    called(batch(1)).sum().backward()
    assert torch.equal(first.detach(), kept)


def test_a_second_backward_pass_is_refused_where_another_forward_took_its_memory() -> None:
    model = built()
    called = graphed(model)
    first = called(batch(0)).sum()
    first.backward(retain_graph=True)
    first.backward(retain_graph=True)
    doubled = model.head.bias.grad.clone()
    assert torch.equal(doubled, torch.full((4,), 8.0))
    called(batch(1)).sum().backward()
    with pytest.raises(RuntimeError, match="leave cuda_graphs out"):
        first.backward()


def _replaced_head(model: Any) -> None:
    model.head = nn.Linear(8, 4)


def _moved_weight(model: Any) -> None:
    model.head.weight.data = torch.full((4, 8), 0.5)


def _moved_buffer(model: Any) -> None:
    model.body[1].running_mean = torch.ones(8)


def _frozen_statistics(model: Any) -> None:
    model.body[1].eval()


def _frozen_weights(model: Any) -> None:
    model.body.requires_grad_(False)


def _more_modules(model: Any) -> None:
    model.body.append(nn.Tanh())


def _another_momentum(model: Any) -> None:
    model.body[1].momentum = 0.5


def _hooked_head(model: Any) -> None:
    model.head.register_forward_hook(lambda _module, _args, out: out * 2)


CHANGES = [
    _replaced_head,
    _moved_weight,
    _moved_buffer,
    _frozen_statistics,
    _frozen_weights,
    _more_modules,
    _another_momentum,
    _hooked_head,
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_trains_as_it_is_now(change: Callable[[Any], None]) -> None:
    results = []
    for wrap in (graphed, lambda model: model):
        model = built()
        called = wrap(model)
        trained(model, called, plain_step, [4, 4])
        torch.manual_seed(1)
        change(model)
        results.append(trained(model, called, plain_step, [4, 4, 4]))
    (losses, state), (expected, weights) = results
    assert losses == expected
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())


def test_a_model_that_goes_on_changing_is_not_recorded_for_ever() -> None:
    model = built()
    called = graphed(model)
    for _ in range(MOST_WASTED + 2):
        _moved_weight(model)
        trained(model, called, plain_step, [4] * WORTH_IT)
    assert not said
    for _ in range(MOST_WASTED + 2):
        _moved_weight(model)
        trained(model, called, plain_step, [4])
    assert [finding.code for finding in said] == [NOT_RECORDED]
    assert "goes on changing" in said[0].message


class Randomly(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * (2 if random.random() < 0.5 else 1)


class Counting(Net):
    seen = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.seen += 1
        return super().forward(x)


class Logging(Net):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> Any:
        self.log.append(x)
        return super().forward(x)


class Rebinding(Net):
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        self.mean = self.mean + out.detach().mean(0)
        return out


class Strange:
    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


class Wrapping(Net):
    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        return out, Strange(out)


class Hooked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.register_forward_hook(lambda *_: None)


class OnGradients(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient / 2)  # type: ignore[no-untyped-call]


def dropping() -> nn.Module:
    """Its numbers are drawn on the device, which is the host here."""
    return nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(192, 4))


def first_of(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    loss = model(x)[0].square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Randomly, "draws random numbers on the host (random)"),
        (Counting, "sets seen in each forward pass"),
        (Logging, "sets log in each forward pass"),
        (Rebinding, "sets mean in each forward pass"),
        (Wrapping, "returns a Strange, whose contents are not known"),
        (Hooked, "has a hook on head"),
        (OnGradients, "has a hook on the gradient of head.weight"),
        (dropping, "draws random numbers on the host (torch)"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_python_does_in_a_forward_pass_is_not_lost(make: Callable[[], nn.Module], reason: str) -> None:
    step = first_of if make is Wrapping else plain_step
    results = []
    for wrap in (graphed, lambda model: model):
        random.seed(0)
        model = built(make)
        called = wrap(model)
        results.append(trained(model, called, step, [4, 4, 4]))
        if wrap is graphed:
            with pytest.raises(PolicyApplyError) as error:
                called.require_recorded()
            assert reason in str(error.value)
    assert results[0][0] == results[1][0]
    assert [finding.code for finding in said] == [NOT_RECORDED]
    assert reason in said[0].message
    assert "runs as without cuda_graphs" in said[0].message


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.mean().item() > 0:  # works on a CPU; on a GPU the host must not wait while a graph is recorded
            raise ValueError("not this batch")
        return x * self.weight


def test_an_error_of_the_model_is_raised_by_the_model() -> None:
    called = graphed(Broken())
    with pytest.raises(ValueError, match="not this batch"):
        called(torch.ones(2, 3))
    assert "raises ValueError (not this batch)" in said[0].message


class Keyed(nn.Module):
    """Keywords, plain values and nested structures, going in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, *, batch: dict[str, Any], scale: float = 1.0, note: str = "") -> dict[str, Any]:
        out = self.linear(batch["x"]) * scale
        return {
            "out": (out, out.argmax(1)),
            "loss": out.mean(),
            "note": note,
            "mask": batch.get("mask"),
            "none": None,
        }


def test_structures_go_in_and_come_out() -> None:
    model, plain = built(Keyed), built(Keyed)
    called = graphed(model)
    for seed, scale in enumerate([1.0, 2.0, 2.0, 1.0, 2.0]):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))
        one, other = (m(batch={"x": x, "mask": x > 0}, scale=scale, note="kept") for m in (called, plain))
        assert one.keys() == other.keys()
        assert one["note"] == "kept"
        assert one["none"] is None
        assert torch.equal(one["mask"], x > 0)
        assert torch.equal(one["out"][1], other["out"][1])
        assert not one["out"][1].requires_grad
        one["loss"].backward()
        other["loss"].backward()
        assert torch.equal(model.linear.weight.grad, plain.linear.weight.grad)
    assert not said


def test_arguments_that_are_not_known_run_by_themselves() -> None:
    model = built(Keyed)
    called = graphed(model)
    called(batch={"x": torch.ones(1, 3), "other": object()})
    with pytest.raises(PolicyApplyError, match="never calls the model with tensors on the GPU"):
        called.require_recorded()


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
    called(batch(0))
    assert torch.equal(torch.rand(3), expected)
    assert int(model.body[1].num_batches_tracked) == 1


def test_a_policy_wraps_the_model_until_it_is_undone() -> None:
    model = built()
    tuned = apply(Policy(cuda_graphs=True), model)
    called: nn.Module = tuned.model
    assert isinstance(called, GraphedModel)
    if not torch.cuda.is_available():
        assert [finding.code for finding in tuned.findings] == ["cuda-graphs-without-effect"]
    losses, _ = trained(model, tuned.model, plain_step, [4, 4])
    tuned.undo()
    assert tuned.model is model
    plain = built()
    assert losses == trained(plain, plain, plain_step, [4, 4])[0]


def test_what_is_not_recorded_is_a_warning_and_a_finding() -> None:
    tuned = apply(Policy(cuda_graphs=True), built(Hooked))
    called: Any = tuned.model
    called._recorder, called._device_type = TapeRecorder, "cpu"
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
    assert called(batch(0)).shape == (4, 4)
    with pytest.raises(PolicyApplyError) as error:
        called.require_recorded()
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)
