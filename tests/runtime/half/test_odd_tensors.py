"""Half weights of models with sparse and other unusual tensors, and of models that are parametrized later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_half_weights import O2, O3
from torch import nn
from torch.nn.utils import parametrizations, prune

from amptune.errors import PolicyApplyError
from amptune.policy.settings import Fp32Rule, Policy
from amptune.runtime.apply_policy import apply

SQUARE = torch.rand(4, 4)
PARTS = [torch.rand(2), torch.rand(3)]
REFUSED: dict[str, Callable[[], Any]] = {
    "coo": SQUARE.to_sparse,
    "csr": SQUARE.to_sparse_csr,
    "bsc": lambda: SQUARE.to_sparse_bsc((2, 2)),
    "nested": lambda: torch.nested.nested_tensor(PARTS, layout=torch.strided),
    "jagged": lambda: torch.nested.nested_tensor(PARTS, layout=torch.jagged),
    "mkldnn": SQUARE.to_mkldnn,
}


class Graph(nn.Module):
    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.graph = nn.Identity()
        self.graph.register_buffer("edges", buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(x)
        return out


@pytest.mark.parametrize("policy", [O2, O3], ids=["O2", "O3"])
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.filterwarnings("ignore:.*(beta|prototype|deprecat)")
def test_a_tensor_that_has_no_half_is_refused_or_stays_in_fp32(policy: Policy, kind: str) -> None:
    model = Graph(odd := REFUSED[kind]())
    with pytest.raises(PolicyApplyError, match=r"graph\.edges is sparse, nested or"):
        apply(policy, model)
    assert model.head.weight.dtype is torch.float32
    wide = Policy(weights="half", master_weights=policy.master_weights, fp32_modules=(Fp32Rule(path="graph"),))
    with apply(wide, model) as tuned:
        assert tuned.model(torch.rand(2, 4)).dtype is torch.float32
        assert model.state_dict()["graph.edges"].dtype is torch.float32
    assert model.graph.edges is odd


@pytest.mark.parametrize("policy", [O2, O3], ids=["O2", "O3"])
def test_buffers_that_share_memory_share_it_again(policy: Policy) -> None:
    base = torch.rand(4)
    model = Graph(base)
    model.head.register_buffer("part", base[:2])
    model.register_buffer("wide", torch.ones(1).expand(5))
    apply(policy, model).undo()
    base += 1
    assert torch.equal(model.get_buffer("head.part"), base[:2])
    assert model.get_buffer("wide").stride() == (0,)


def removed(module: nn.Module) -> None:
    parametrizations.weight_norm(module)
    nn.utils.parametrize.remove_parametrizations(module, "weight")


PUT_ON: list[Callable[[nn.Module], object]] = [
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    nn.utils.spectral_norm,
    lambda module: prune.l1_unstructured(module, "weight", 0.5),  # type: ignore[no-untyped-call]
    removed,
]


@pytest.mark.parametrize("policy", [O2, O3], ids=["O2", "O3"])
@pytest.mark.parametrize("put_on", PUT_ON)
@pytest.mark.parametrize("is_early", [True, False])
def test_what_is_made_of_half_weights_later_is_undone(
    put_on: Callable[[nn.Module], object], policy: Policy, is_early: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    tuned = apply(policy, model)
    if is_early:  # before the optimizer is built, which is the usual order
        put_on(model[0])
    optimizer = tuned.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    if not is_early:
        put_on(model[0])
    for _ in range(2):
        tuned.scaler.scale(tuned.model(torch.rand(3, 4)).square().mean()).backward()
        tuned.step(optimizer)
    if is_early:
        assert {one.dtype for one in model.state_dict().values()} == {torch.float32}
    expected = [one.detach().float() for one in model.parameters()]
    tuned.undo()
    for one, value in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(one, value, atol=1e-3)
        assert one.grad is None or one.grad.dtype is torch.float32
    assert {one.dtype for one in (*model.parameters(), *model.buffers())} == {torch.float32}
    model(torch.rand(3, 4)).sum().backward()
    optimizer.step()
