from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from amptune.policy.settings import Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.optimizer import fuse

Build = Callable[[Any], torch.optim.Optimizer]


class Mine(torch.optim.AdamW):
    """A subclass whose `__init__` takes other arguments."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)


FUSIBLE: list[Build] = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    lambda p: torch.optim.Adam(p, lr=0.1),
    lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
    Mine,
]
OTHERS: list[tuple[Build, str]] = [
    *[(of, "has no fused kernel in PyTorch; it runs as it is") for of in (torch.optim.NAdam, torch.optim.LBFGS)],
    (lambda _: torch.optim.SGD([torch.ones(2, dtype=torch.complex64)]), "SGD cannot be fused here (`fused=True`"),
    (lambda p: torch.optim.Adam(p, differentiable=True), "Adam is differentiable, which"),
]


def train(model: nn.Linear, optimizer: torch.optim.Optimizer, steps: int = 3) -> torch.Tensor:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + step)).square().sum().backward()
        optimizer.step()
    return model.weight.detach().clone()


@pytest.mark.parametrize("before", ["nothing", "steps", "a loaded state"])
@pytest.mark.parametrize("build", FUSIBLE)
def test_a_fused_optimizer_takes_the_steps_of_the_plain_one(build: Build, before: str) -> None:
    plain, model = nn.Linear(4, 4), nn.Linear(4, 4)
    model.load_state_dict(plain.state_dict())
    other, optimizer = build(plain.parameters()), build(model.parameters())
    if before != "nothing":
        train(plain, other)
    if before == "steps":
        train(model, optimizer)
    assert fuse(optimizer) is None
    if before == "a loaded state":
        model.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    assert all(group["fused"] and not group["foreach"] for group in optimizer.param_groups)
    assert optimizer.defaults["fused"] is True
    assert vars(optimizer)["_step_supports_amp_scaling"] is True
    torch.testing.assert_close(train(model, optimizer), train(plain, other))


@pytest.mark.parametrize(("build", "why"), OTHERS)
def test_an_optimizer_that_cannot_be_fused_is_a_finding_and_stays_as_it_is(build: Build, why: str) -> None:
    model = nn.Linear(4, 4)
    with apply(Policy(fused_optimizer=True), model) as tuned:
        optimizer = build(model.parameters())
        before = copy.deepcopy(optimizer.state_dict())
        assert tuned.optimizer(optimizer) is optimizer
        (finding,) = tuned.findings
    assert finding.code == "optimizer-not-fused"
    assert why in str(finding)
    assert optimizer.state_dict() == before


def scaled_steps(model: nn.Linear, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Three steps under a loss scaler, the gradients of the first having overflowed."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.full((2, 4), 1.0 + step)).square().sum()
        scaler.scale(loss * (float("inf") if step == 0 else 0.01)).backward()
        scaler.step(optimizer)
        scaler.update()
    return model.weight.detach().clone()


@pytest.mark.parametrize("more", [{}, {"nesterov": True}, {"dampening": 0.5}, {"momentum": 0.0}], ids=str)
@pytest.mark.parametrize("loads", [False, True])
def test_a_first_step_that_overflows_is_skipped_by_fused_sgd_too(
    more: dict[str, Any], loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own leaves its momentum as the memory happens to be, which is here no number."""
    monkeypatch.setattr(torch, "empty_like", lambda tensor, **_: torch.full_like(tensor, float("nan")))
    plain, model, seen = nn.Linear(4, 4), nn.Linear(4, 4), list[int]()
    model.load_state_dict(plain.state_dict())
    other, optimizer = (
        torch.optim.SGD(of.parameters(), **{"lr": 0.1, "momentum": 0.9, **more}) for of in (plain, model)
    )
    assert fuse(optimizer) is None
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    if loads:  # an empty state, after a step
        train(model, optimizer, steps=1)
        model.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(other.state_dict())
    torch.testing.assert_close(scaled_steps(model, optimizer), scaled_steps(plain, other))
    assert len(seen) >= 2 + loads
