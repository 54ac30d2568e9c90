"""Models that do more with their weights than to hold them: recorded, and trained as they are; or not recorded."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from recorded_training import (
    Net,
    Passing,
    backward_of_squares,
    batch,
    built,
    forget,
    graphed,
    plain_step,
    require_same_gradients,
    said,
    trained,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from amptune.runtime.graphs.dispatch import NOT_RECORDED


@pytest.fixture(autouse=True)
def _afresh() -> None:
    forget()


class Pair(NamedTuple):
    one: nn.Parameter
    other: nn.Parameter


@dataclass
class Holder:
    weight: nn.Parameter
    factor: float = 2.0


class Keeping(Net):
    """Has two weights more, in whatever `kept` makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.full((4,), 0.5)), nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> Any:
        one, other = self.weights()
        assert one is self.a
        assert other is self.b
        return super().forward(x) * one + other

    def weights(self) -> tuple[nn.Parameter, nn.Parameter]:
        return self.a, self.b


class InNamedTuple(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Pair(self.a, self.b)

    def weights(self) -> tuple[nn.Parameter, nn.Parameter]:
        return self.kept.one, self.kept.other


class InDataclasses(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"layers": [Holder(self.a), Holder(self.b)]}

    def weights(self) -> tuple[nn.Parameter, nn.Parameter]:
        one, other = (holder.weight for holder in self.kept["layers"])
        return one, other


class AsKeys(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.kept = OrderedDict([(self.a, "one"), (self.b, "other")])
        self.trained, self.recent = {self.a}, deque([self.b])

    def weights(self) -> tuple[nn.Parameter, nn.Parameter]:
        assert self.a in self.trained
        assert self.kept[self.b] == "other"
        one, _ = self.kept
        return one, self.recent[0]


class InCycle(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {"a": [self.a], "b": (self.b, 1)}
        self.kept["self"] = self.kept
        self.same = self.kept

    def weights(self) -> tuple[nn.Parameter, nn.Parameter]:
        assert self.kept["self"] is self.kept is self.same
        return self.kept["a"][0], self.kept["b"][0]


class Marked(Keeping):
    def __init__(self) -> None:
        super().__init__()
        vars(self.a)["gain"] = 3.0

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * vars(self.a)["gain"]


class Scripted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.add_module("head", torch.jit.script(nn.Linear(8, 4)))


class Forces(nn.Module):
    """The gradient of its energy for its input is a part of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> Any:
        place = x.clone().requires_grad_()
        energy = self.energy(place)
        (force,) = torch.autograd.grad(energy.sum(), place, create_graph=True)
        return energy + force.flatten(1).square().sum(1, keepdim=True)


RECORDED = [InNamedTuple, Marked, Forces]
HIDDEN = [InDataclasses, AsKeys, InCycle]


def holdings(model: nn.Module) -> list[Any]:
    """What modules and their attributes hold, by identity; tuples by what is in them."""
    values = [value for module in model.modules() for value in (*module._parameters.values(), *vars(module).values())]
    inner = [item for value in values if isinstance(value, (list, dict, set, deque, tuple)) for item in value]
    return [id(value) for value in (*values, *inner) if not isinstance(value, (tuple, bool))]


@pytest.mark.parametrize("make", RECORDED)
def test_weights_are_trained_wherever_they_are_kept(make: Callable[[], nn.Module]) -> None:
    model, plain = built(make), built(make)
    called, before = graphed(model), holdings(model)
    assert trained(model, called, plain_step, [4] * 6)[0] == trained(plain, plain, plain_step, [4] * 6)[0]
    assert not said
    assert len(called.recordings) == 1
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))
    assert holdings(model) == before


@pytest.mark.parametrize("make", HIDDEN)
def test_weights_that_lie_deeper_are_trained_by_the_model_itself(make: Callable[[], nn.Module]) -> None:
    model, plain = built(make), built(make)
    called, before = graphed(model), holdings(model)
    assert trained(model, called, plain_step, [4] * 6)[0] == trained(plain, plain, plain_step, [4] * 6)[0]
    assert [finding.code for finding in said] == [NOT_RECORDED]
    assert holdings(model) == before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_run_by_themselves() -> None:
    model, plain = built(Scripted), built(Scripted)
    losses = trained(model, graphed(model), plain_step, [4] * 5)[0]
    assert losses == pytest.approx(trained(plain, plain, plain_step, [4] * 5)[0], rel=1e-6)
    assert "holds head, a TorchScript module" in said[0].message


class Rotating(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.queue = [self.a, self.b]

    def forward(self, x: torch.Tensor) -> Any:
        self.queue.append(self.queue.pop(0))
        return Net.forward(self, x) * self.queue[0]


class CountingBeside(Keeping):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"a": {"weight": self.a, "n": 0}}

    def forward(self, x: torch.Tensor) -> Any:
        entry: dict[str, Any] = self.state["a"]
        entry["n"] += 1
        return Net.forward(self, x) * entry["weight"] * entry["n"]


class CountingOnWeight(Marked):
    def forward(self, x: torch.Tensor) -> Any:
        vars(self.a)["gain"] /= 2
        return super().forward(x)


class Scale:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x / self.calls


class Calling(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def forward(self, x: torch.Tensor) -> Any:
        return self.scale(super().forward(x))


class _Reversible(torch.autograd.Function):
    """Computes anew in the backward pass, as reversible networks do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: nn.Module) -> torch.Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        with torch.no_grad():
            out: torch.Tensor = block(x)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.block(x), gradient)
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Linear(192, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return _Reversible.apply(self.stem(x.flatten(1)), self.block)  # type: ignore[no-untyped-call]


PENALTY = torch.full((4,), 0.01)


class _Penalized(Passing):
    """Adds to the gradient what lies elsewhere, and may be another tensor in the next step."""

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + PENALTY


class Penalized(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return _Penalized.apply(super().forward(x))  # type: ignore[no-untyped-call]


class LeafOut(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).mean() + nn.Parameter(x.mean().detach())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Rotating, "meets a changed model again and again (queue"),
        (CountingBeside, "has gradients for what is none of the weights that its modules have"),
        (CountingOnWeight, "meets a changed model again and again (gain"),
        (Calling, "meets a changed model again and again (scale"),
        (Reversible, "uses a tensor that is none of its inputs, weights and buffers"),
        (Penalized, "uses a tensor that is none of its inputs, weights and buffers"),
    ],
)
def test_what_would_be_lost_is_refused(make: Callable[[], nn.Module], reason: str) -> None:
    model, plain = built(make), built(make)
    assert trained(model, graphed(model), plain_step, [4] * 6)[0] == trained(plain, plain, plain_step, [4] * 6)[0]
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))
    (finding,) = said
    assert reason in finding.message


class Looking(Net):
    """Does otherwise once its head has a gradient."""

    def forward(self, x: torch.Tensor) -> Any:
        gradient = self.head.weight.grad
        return super().forward(x) * (1.0 if gradient is None else gradient.abs().sum())


def test_a_gradient_that_is_there_is_no_constant() -> None:
    require_same_gradients(Looking, backward_of_squares)
    assert "uses a tensor that is none of its inputs, weights and buffers" in said[0].message


class Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(192, 1), nn.Linear(192, 1)

    def forward(self, x: torch.Tensor) -> Any:
        x = x.flatten(1)
        return self.one(x), self.other(x)


def test_a_loss_for_each_output_may_go_backward_by_itself() -> None:
    def backward(called: Any, seed: int) -> None:
        for out in called(batch(seed)):
            out.square().mean().backward()

    require_same_gradients(Twins, backward)
    assert "has several backward passes" in said[0].message


class _Given(torch.autograd.Function):
    """Gives zeros for the gradient of what has none."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class WithUnused(Twins):
    def forward(self, x: torch.Tensor) -> Any:
        one, other = super().forward(x)
        return one, _Given.apply(other)  # type: ignore[no-untyped-call]


def test_what_the_loss_does_not_use_is_not_trained() -> None:
    model = built(WithUnused)
    called = graphed(model)
    for seed in range(4):
        called(batch(seed))[0].square().mean().backward()
        assert model.other.weight.grad is None
    assert not said


class Twice(Net):
    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        return {"logits": out, "kept": [out]}


def test_an_output_that_is_given_twice_stays_one() -> None:
    def backward(called: Any, seed: int) -> None:
        outputs = called(batch(seed))
        assert outputs["logits"] is outputs["kept"][0]
        (outputs["logits"] * outputs["kept"][0]).mean().backward()

    require_same_gradients(Twice, backward)
    assert not said


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> Any:
        out = self.linear(x) if x is y else self.linear(x) * y
        return out if x.is_contiguous() else out * 2 / (1 if str(scale) == "0.0" else 2)


def test_inputs_come_in_as_they_are_given() -> None:
    """One twice, a transposed one, an expanded one; negative zero."""
    model, plain = built(TwoInputs), built(TwoInputs)
    called = graphed(model)
    for seed in range(8):
        x, y = (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed + n)) for n in (0, 100))
        for args in ((x, x), (x, y), (x.t(), y), (x[:1].expand(8, 8), y)):
            for one in (called, plain):
                one(*args).square().mean().backward()
            assert torch.equal(model.linear.weight.grad, plain.linear.weight.grad)
    assert not said
    for _ in range(2):
        called(x.t(), y, scale=0.0)
    assert torch.equal(called(x.t(), y, scale=-0.0), plain(x.t(), y, scale=-0.0))


def test_a_lazy_model_is_recorded_once_it_is_built() -> None:
    called = require_same_gradients(lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(4)), backward_of_squares)
    called.recordings.require_some()


@dataclass(frozen=True)
class Answer:
    logits: torch.Tensor
    others: list[torch.Tensor]
    scale: float = 0.5


def test_outputs_in_a_dataclass_come_back_in_one() -> None:
    class Answering(Net):
        def forward(self, x: torch.Tensor) -> Any:
            logits = super().forward(x)
            return Answer(logits, [logits.detach().mean()])

    def backward(called: Any, seed: int) -> None:
        answer = called(batch(seed))
        assert (type(answer), answer.scale) == (Answer, 0.5)
        (answer.logits - answer.others[0]).square().mean().backward()

    called = require_same_gradients(Answering, backward)
    assert len(called.recordings) == 1


def test_a_dataclass_with_more_than_its_fields_is_not_recorded() -> None:
    class Answering(Net):
        def forward(self, x: torch.Tensor) -> Any:
            answer = Answer(super().forward(x), [])
            vars(answer)["kept"] = "more"
            return answer

    require_same_gradients(Answering, lambda called, seed: called(batch(seed)).logits.square().mean().backward())
    assert "returns a Answer, whose contents are not known" in said[0].message


def test_an_output_tells_the_name_of_the_operation_that_the_model_made_it_by() -> None:
    called: Any = graphed(built())
    for seed in range(4):
        output = called(batch(seed))
        assert output.grad_fn.name() == "AddmmBackward0"
        output.square().mean().backward()
    assert len(called.recordings) == 1


class DynamicCache:
    """As transformers has one."""


class Caching(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), DynamicCache()


def test_a_cache_that_is_returned_can_be_left_out() -> None:
    called = graphed(built(Caching))
    for seed in range(2):
        called(batch(seed))[0].sum().backward()
    assert "returns a DynamicCache, whose contents are not known (use_cache=False leaves it out)" in said[0].message


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_pass_that_is_computed_anew_for_its_backward_pass_runs_by_itself(*, use_reentrant: bool) -> None:
    def backward(called: Any, seed: int) -> None:
        x = batch(seed).requires_grad_()
        out = checkpoint(lambda y: called(y.detach()), x, use_reentrant=use_reentrant)
        out.square().mean().backward()

    assert len(require_same_gradients(Net, backward).recordings) == 0
    assert not said


class Nested(Net):
    def __init__(self) -> None:
        super().__init__()
        self.active, self.config, self.scale = [1], {"head": {"factor": 2.0}}, Scale()

    def forward(self, x: torch.Tensor) -> Any:
        factor = self.config["head"]["factor"] * len(self.active) * (1 + self.scale.calls)
        return super().forward(x) * factor


def _appended(model: Any) -> None:
    model.active.append(2)


def _set_deep(model: Any) -> None:
    model.config["head"]["factor"] = 5.0


def _set_on_callable(model: Any) -> None:
    model.scale.calls = 3


def _set_on_weight(model: Any) -> None:
    vars(model.a)["gain"] = 5.0


@pytest.mark.parametrize(
    ("make", "change"),
    [(Nested, _appended), (Nested, _set_on_callable), (Marked, _set_on_weight)],
)
def test_a_change_in_an_attribute_is_seen(make: Callable[[], nn.Module], change: Callable[[Any], None]) -> None:
    results = []
    for wrap in (graphed, lambda model: model):
        model = built(make)
        called = wrap(model)
        trained(model, called, plain_step, [4, 4, 4])
        change(model)
        results.append(trained(model, called, plain_step, [4, 4, 4])[0])
    assert results[0] == results[1]
    assert not said
