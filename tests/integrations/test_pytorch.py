"""What PyTorch itself does with a model, before, after or while it has a policy."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import nn
from training import POLICY, Batch, Net, batches, net, same_weights

from amptune.policy.settings import Fp32Rule, LossScale, Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.tuned import Tuned

FP16 = replace(POLICY, autocast="fp16", loss_scale=LossScale(init=256))
FUSED = replace(POLICY, fused_optimizer=True)
O2 = Policy(weights="half", master_weights=True, fp32_modules=POLICY.fp32_modules, loss_scale=LossScale(init=256))
O3 = Policy(weights="half")

(X, Y), *_ = batches(1)


class Quiet(Net):
    """Notes nothing: what a forward changes has the model compiled anew."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def gradients(tuned: Tuned, forward: Any) -> dict[str, torch.Tensor]:
    tuned.model.zero_grad()
    with tuned.autocast():
        loss = nn.functional.cross_entropy(forward(X), Y)
    loss.backward()  # type: ignore[no-untyped-call]
    return {
        name: parameter.grad.clone() for name, parameter in tuned.model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize("ran_before", [False, True])
def test_a_model_compiled_before_its_policy_trains_as_the_eager_one(ran_before: bool) -> None:
    torch.compiler.reset()
    model = net()
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    plain = torch.amp.autocast("cpu", dtype=torch.bfloat16)
    if ran_before:
        with plain:
            assert compiled(X).dtype is torch.bfloat16
    tuned = apply(POLICY, model)
    eager, traced = gradients(tuned, model), gradients(tuned, compiled)
    assert all(torch.equal(eager[name], traced[name]) for name in eager)
    with tuned.autocast():
        assert compiled(X).dtype is torch.float32
    tuned.undo()
    with plain:
        assert compiled(X).dtype is torch.bfloat16


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("policy", [O2, O3], ids=["O2", "O3"])
def test_half_weights_compile_in_one_graph_before_and_after_they_are_made(policy: Policy, when: str) -> None:
    torch.compiler.reset()
    model = Quiet()
    if when == "before":
        compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(X)
    with apply(policy, model) as tuned:
        if when == "after":
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        traced, eager = gradients(tuned, compiled), gradients(tuned, model)
        assert all(torch.equal(eager[name], traced[name]) for name in eager)
        assert compiled(X).dtype is torch.float32
    model.zero_grad()
    assert torch.equal(compiled(X), model(X))


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_computes_what_the_model_does(strict: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    policy = Policy(autocast="bf16", fp32_modules=(Fp32Rule(path="1"),))
    with apply(policy, model) as tuned, tuned.autocast():
        expected = model(X)
        exported: Any = torch.export.export(model, (X,), strict=strict).module()
        assert torch.equal(exported(X), expected)
    assert expected.dtype is torch.float32


def test_a_gradient_penalty_is_in_fp32_where_the_modules_are() -> None:
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(8, 16), nn.Softplus(), nn.Linear(16, 1))

    def penalty(tuned: Tuned) -> torch.Tensor:
        x = X.clone().requires_grad_()
        with tuned.autocast():
            score = critic(x).float().sum()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        (gradient,) = torch.autograd.grad((slope.norm(dim=1) - 1).square().mean(), critic.get_parameter("0.weight"))
        return gradient

    rules = (Fp32Rule(path="*"),)
    found = []
    for policy in (Policy(), Policy(autocast="bf16", fp32_modules=rules), Policy(autocast="bf16")):
        with apply(policy, critic) as tuned:
            found.append(penalty(tuned))
    in_fp32, excluded, in_half = found
    assert torch.equal(excluded, in_fp32)
    assert not torch.equal(in_half, in_fp32)


def test_tied_weights_stay_tied_across_precisions() -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    weight = model[1].weight = model[0].weight
    with apply(Policy(autocast="bf16", fp32_modules=(Fp32Rule(path="1"),)), model) as tuned:
        with tuned.autocast():
            out = model(X)
        out.sum().backward()
    assert model[0].weight is model[1].weight is weight
    assert torch.equal(out, (X.bfloat16() @ weight.bfloat16().T).float() @ weight.T)
    assert weight.grad is not None


def resumed(policy: Policy, state: dict[str, Any] | None, data: list[Batch]) -> tuple[Net, dict[str, Any]]:
    """A run of the README's loop from a checkpoint, and the checkpoint at its end."""
    model = net()
    with apply(policy, model) as tuned:
        optimizer = tuned.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4))
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            tuned.scaler.load_state_dict(state["scaler"])
        for x, y in data:
            with tuned.autocast():
                loss = nn.functional.cross_entropy(tuned.model(x), y)
            tuned.scaler.scale(loss).backward()
            tuned.scaler.step(optimizer)
            tuned.scaler.update()
            optimizer.zero_grad()
        assert optimizer.param_groups[0]["fused"] or not policy.fused_optimizer
        file = io.BytesIO()
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scaler": tuned.scaler}
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
    file.seek(0)
    return model, torch.load(file)


@pytest.mark.parametrize("policy", [POLICY, FP16, FUSED, O2, replace(O2, fused_optimizer=True), Policy()], ids=str)
def test_a_run_resumed_from_a_checkpoint_ends_bit_for_bit_where_an_uninterrupted_one_does(policy: Policy) -> None:
    data = batches(6)
    uninterrupted, end = resumed(policy, None, data)
    _, state = resumed(policy, None, data[:3])
    model, other_end = resumed(policy, state, data[3:])
    assert same_weights(model, uninterrupted)
    assert other_end["scaler"] == end["scaler"]


@pytest.mark.parametrize("there", [POLICY, FP16, FUSED, O2, Policy()], ids=str)
@pytest.mark.parametrize("here", [POLICY, FP16, FUSED, O2, O3, Policy()], ids=str)
def test_a_checkpoint_moves_between_nodes_whose_policies_differ(there: Policy, here: Policy) -> None:
    model, state = resumed(there, None, batches(2))
    plain = net()
    plain.load_state_dict(state["model"])
    assert same_weights(plain, model)
    _, state = resumed(here, state, batches(2))
    assert state["scaler"].get("scale") == (256 if here in (FP16, O2) else None)
