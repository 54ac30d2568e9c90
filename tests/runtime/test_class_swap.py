from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from amptune.errors import PolicyApplyError
from amptune.runtime.class_swap import Precision, swap, unswap

bf16 = torch.bfloat16
Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Inputs:
    x: torch.Tensor


class Picky(nn.Module):
    """Records what it was given, and gives the same back."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = (args, kwargs)
        return args[0] if args else kwargs


def autocast(dtype: torch.dtype = bf16) -> torch.amp.autocast:
    return torch.amp.autocast("cpu", dtype=dtype)


KINDS: list[tuple[Any, tuple[int, ...]]] = [
    (lambda: nn.Linear(8, 8), (4, 8)),
    (lambda: nn.LayerNorm(8), (4, 8)),
    (lambda: nn.BatchNorm2d(8, track_running_stats=False), (4, 8, 3, 3)),
    (lambda: nn.LSTM(8, 8), (4, 3, 8)),
]


def first(out: Any) -> torch.Tensor:
    found: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return found


@pytest.mark.parametrize("in_half", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", ["fp32", "fp32-cast", "half"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind[0]()).__name__)
def test_a_module_computes_what_one_in_its_precision_does(
    kind: Any, precision: Precision, dtype: torch.dtype, in_half: bool
) -> None:
    """To the bit, with the gradients of that; under autocast alone. Its weights stay as they are."""
    module = kind[0]()
    twin, plain = copy.deepcopy(module), copy.deepcopy(module)
    weights, x = list(module.parameters()), torch.randn(*kind[1]).to(dtype if in_half else torch.float32)
    inner = dtype if precision == "half" else torch.float32
    expected = first(twin.to(inner)(x.to(inner)))
    swap(module, precision)
    with autocast(dtype):
        out = first(module(x))
        assert torch.is_autocast_enabled("cpu")
    assert out.dtype is (torch.float32 if precision == "fp32" else dtype)
    assert torch.equal(out, expected.to(out.dtype))
    losses: list[Any] = [one.float().square().sum() for one in (out, expected.to(out.dtype))]
    for loss in losses:
        loss.backward()
    assert all(one is own for one, own in zip(module.parameters(), weights, strict=True))
    for one, other in zip(weights, twin.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.dtype is torch.float32
        assert torch.equal(one.grad, other.grad.float())
    with autocast(dtype):
        with pytest.raises((RuntimeError, ValueError)):
            module(torch.ones(1, 1, 5))
        assert torch.is_autocast_enabled("cpu")
    assert list(module.state_dict()) == list(plain.state_dict())
    assert isinstance(module, type(plain))
    assert (repr(module), type(module).__name__) == (repr(plain), type(plain).__name__)
    unswap(module)
    assert type(module) is type(plain)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(first(module.eval()(x.float())), first(plain.eval()(x.float())))


def test_only_a_module_without_children_can_be_in_half_and_one_with_them_runs_in_fp32_without_casts_between() -> None:
    picky = Picky()
    model = nn.Sequential(nn.Linear(4, 4), picky)
    with pytest.raises(PolicyApplyError, match="holds other modules"):
        swap(model, "half")
    swap(model)
    with autocast():
        assert model(torch.randn(2, 4)).dtype is torch.float32
    assert picky.seen[0][0].dtype is torch.float32


def test_inputs_and_outputs_are_cast_at_any_depth_inside_autocast_and_nothing_else_is() -> None:
    picky = Picky()
    half, whole, double = torch.ones(1, dtype=bf16), torch.ones(1, dtype=torch.long), torch.ones(1).double()
    given: dict[str, Any] = {"mask": {"m": half}, "inputs": Inputs(half), "scale": double, "name": "n"}
    swap(picky, "fp32-cast")
    with autocast():
        picky(half, (half, [whole]), Pair(half, None), **given)
        args, kwargs = picky.seen
        out = picky(a=torch.ones(1), b=(whole, double))
    assert args[0].dtype is args[1][0].dtype is args[2].left.dtype is torch.float32
    assert kwargs["mask"]["m"].dtype is kwargs["inputs"].x.dtype is torch.float32
    assert (args[1][1][0], kwargs["scale"], args[2].right, kwargs["name"]) == (whole, double, None, "n")
    assert (out["a"].dtype, out["b"]) == (bf16, (whole, double))
    single = torch.ones(2)
    assert (picky(half), picky(single)) == (half, single)
    assert picky(half) is half


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_stays_excluded_and_runs_its_own_weights(copied: Any) -> None:
    linear = nn.Linear(4, 4)
    swap(linear)
    other = copied(linear)
    other.weight = nn.Parameter(torch.zeros(4, 4))
    with autocast():
        out = other(torch.ones(1, 4))
    assert type(other) is type(linear)
    assert torch.equal(out, linear.bias.unsqueeze(0))


def test_a_lazy_module_stays_excluded_when_it_is_built() -> None:
    module: Any = nn.LazyLinear(4)
    swap(module)
    x = torch.ones(2, 3, 3)
    for _ in range(2):  # the first call builds it, and changes its class
        with autocast():
            assert module(x.bfloat16()).dtype is torch.float32
    assert copy.deepcopy(module)(x).dtype is torch.float32
    unswap(module)
    assert type(module) is nn.Linear


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("precision", ["fp32", "fp32-cast", "half"])
def test_compiled_it_gives_the_same_numbers_without_a_graph_break(backend: str, precision: Precision) -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    swap(model[1], precision)
    x = torch.randn(4, 8)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with autocast():
        assert torch.equal(compiled(x), model(x))
    assert torch.equal(compiled(x), model(x))
