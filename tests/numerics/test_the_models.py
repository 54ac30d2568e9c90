"""The claims of the models, held by plain training loops: what breaks, in which dtype, and what cures it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean
from typing import Any

import pytest
import torch
from faults import FAULTS, Fault
from healthy import HEALTHY
from torch import Tensor, nn

from amptune.changes.tensor_tree import map_tensors
from amptune.policy.settings import STOCK, Autocast, Fp32Rule, Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.module_precision import has_forward
from amptune.runtime.tuned import Tuned
from amptune.workload.workload import Workload

# Claims about planted faults, held by some hundred trainings; the gate that they are given to is tested elsewhere.
pytestmark = pytest.mark.slow

STEPS = 40
FEW_STEPS = 12  # enough to see that something is still broken
COMPARED = 3  # batches whose gradients are compared
HALVES: tuple[Autocast, ...] = ("bf16", "fp16")
WORKLOADS = HEALTHY | {fault.name: fault.workload for fault in FAULTS}

on_each_device = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
each_fault = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
each_break = pytest.mark.parametrize(
    ("fault", "half"), [pytest.param(f, half, id=f"{f.name}-{half}") for f in FAULTS for half in f.breaks]
)
each_healthy_half = pytest.mark.parametrize(
    ("name", "half"),
    [(f.name, half) for f in FAULTS for half in HALVES if half not in f.breaks]
    + [(name, half) for name in HEALTHY for half in HALVES],
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What became of the steps. `gradients` are the untrained model's, one vector a module; None: not finite."""

    losses: tuple[float, ...]
    skipped: int
    finite: bool
    gradients: dict[str, Tensor] | None

    @property
    def start(self) -> float:
        return mean(self.losses[:5])

    @property
    def end(self) -> float:
        return mean(self.losses[-10:])


def run(workload: Workload, device: str, policy: Policy, steps: int = STEPS) -> Run:
    """From the same weights and over the same batches at each call."""
    torch.manual_seed(0)
    model = workload.model()
    with apply(policy, model, guard=False) as tuned:  # which would warn of the faults
        model.to(device)
        optimizer = workload.optimizer(model)
        batches = [_on(device, workload.batch(workload.batch_size)) for _ in range(steps)]
        losses = tuple(_step(workload, tuned, optimizer, batch) for batch in batches)
        skipped = round(math.log2(65536 / tuned.scaler.get_scale())) if tuned.scaler.is_enabled() else 0
    state = [t for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]
    finite = all(bool(t.isfinite().all()) for t in state)
    return Run(losses=losses, skipped=skipped, finite=finite, gradients=_gradients(workload, device, policy))


def _on(device: str, batch: Any) -> Any:
    return map_tensors(lambda tensor: tensor.to(device), batch)


def _loss(workload: Workload, tuned: Tuned, batch: Any) -> Tensor:
    assert workload.loss is not None
    with tuned.autocast():
        return workload.loss(tuned.model, batch)


def _step(workload: Workload, tuned: Tuned, optimizer: torch.optim.Optimizer, batch: Any) -> float:
    loss = _loss(workload, tuned, batch)
    torch.autograd.backward(tuned.scaler.scale(loss))
    tuned.scaler.step(optimizer)
    tuned.scaler.update()
    optimizer.zero_grad()
    return float(loss.detach())


def _gradients(workload: Workload, device: str, policy: Policy) -> dict[str, Tensor] | None:
    """Summed over a few batches, at the largest loss scale up to the scaler's first that overflows nowhere."""
    torch.manual_seed(0)
    model = workload.model()
    _leave_out_dropout(model)
    with apply(policy, model) as tuned:
        model.to(device)
        batches = [_on(device, workload.batch(workload.batch_size)) for _ in range(COMPARED)]
        for power in (16, 12, 8, 4, 0) if tuned.scaler.is_enabled() else (0,):
            for batch in batches:
                torch.autograd.backward(_loss(workload, tuned, batch).float() * 2.0**power)
            found = _by_module(model)
            if found is not None:
                return found
            model.zero_grad()
    return None


def _leave_out_dropout(model: nn.Module) -> None:
    """Its masks may differ between dtypes."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0


def _by_module(model: nn.Module) -> dict[str, Tensor] | None:
    gradients = {}
    for path, module in model.named_modules():
        own = [p.grad.flatten() for p in module.parameters(recurse=False) if p.grad is not None]
        if own:
            gradients[path] = torch.cat(own).double()
    return gradients if all(bool(g.isfinite().all()) for g in gradients.values()) else None


@cache
def in_fp32(name: str, device: str) -> Run:
    return run(WORKLOADS[name], device, STOCK)


def likeness(half: Run, fp32: Run) -> dict[str, float]:
    """The cosine of each module's gradient with that of FP32; 0 where one of the two vanishes."""
    assert fp32.gradients is not None
    if half.gradients is None:
        return dict.fromkeys(fp32.gradients, 0.0)
    of_half = half.gradients
    return {p: float(torch.cosine_similarity(g, of_half[p], dim=0)) for p, g in fp32.gradients.items()}


def symptoms(half: Run, fp32: Run) -> list[str]:
    """Everything that is clearly broken."""
    found = [f"the gradient of {path} is off: {c:.2f}" for path, c in likeness(half, fp32).items() if c < 0.9]
    if not math.isfinite(half.losses[-1]):
        found.append("the loss is not finite")
    if not half.finite:
        found.append("weights or statistics are not finite")
    steps = len(half.losses)
    if mean(half.losses[-10:]) > 1.5 * mean(fp32.losses[:steps][-10:]):
        found.append(f"the loss after {steps} steps is above that of FP32")
    if half.skipped > steps / 2:
        found.append(f"{half.skipped} steps were skipped")
    return found


def assert_as_good_as(half: Run, fp32: Run) -> None:
    assert half.finite
    assert all(map(math.isfinite, half.losses))
    assert half.skipped <= 4  # until the scale has settled
    assert half.end == pytest.approx(fp32.end, rel=0.1)
    assert {path: c for path, c in likeness(half, fp32).items() if c <= 0.97} == {}


def rules(paths: Sequence[str]) -> tuple[Fp32Rule, ...]:
    return tuple(Fp32Rule(path=path) for path in paths)


def all_but(culprit: str, workload: Workload) -> list[str]:
    """Every module but this one and those that contain it, which would keep it in FP32 too."""
    names = culprit.split(".")
    spared = {".".join(names[:depth]) for depth in range(len(names) + 1)}
    return [path for path, module in workload.model().named_modules() if path not in spared and has_forward(module)]


@each_fault
def test_a_culprit_is_a_module_that_runs_among_many(fault: Fault) -> None:
    modules = dict(fault.workload.model().named_modules())
    assert all(has_forward(modules[path]) for path in fault.culprits)
    assert 10 <= sum(1 for module in modules.values() if not list(module.children())) <= 40


@on_each_device
@pytest.mark.parametrize("name", WORKLOADS)
def test_in_fp32_every_model_learns(name: str, device: str) -> None:
    fp32 = in_fp32(name, device)
    assert fp32.finite
    assert fp32.end < 0.85 * fp32.start
    assert fp32.gradients is not None
    assert all(gradient.any() for gradient in fp32.gradients.values())


@on_each_device
@each_break
def test_plain_autocast_breaks_a_faulty_model(fault: Fault, half: Autocast, device: str) -> None:
    broken = run(fault.workload, device, Policy(autocast=half))
    assert symptoms(broken, in_fp32(fault.name, device)) != []
    if fault.quiet:
        assert broken.finite
        assert broken.gradients is not None
        assert all(map(math.isfinite, broken.losses))


@on_each_device
@each_healthy_half
def test_plain_autocast_trains_a_sound_model_as_well_as_fp32(name: str, half: Autocast, device: str) -> None:
    assert_as_good_as(run(WORKLOADS[name], device, Policy(autocast=half)), in_fp32(name, device))


@on_each_device
@each_break
def test_the_culprits_in_fp32_cure_a_faulty_model(fault: Fault, half: Autocast, device: str) -> None:
    policy = Policy(autocast=half, fp32_modules=rules(fault.culprits))
    assert_as_good_as(run(fault.workload, device, policy), in_fp32(fault.name, device))


@on_each_device
@each_break
def test_while_one_culprit_is_in_half_nothing_else_cures_a_faulty_model(
    fault: Fault, half: Autocast, device: str
) -> None:
    for culprit in fault.culprits:
        policy = Policy(autocast=half, fp32_modules=rules(all_but(culprit, fault.workload)))
        broken = run(fault.workload, device, policy, FEW_STEPS)
        assert symptoms(broken, in_fp32(fault.name, device)) != [], culprit
