"""Records the tensors of every module in one training step, in FP32 and under a policy."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from amptune.changes.tensor_tree import tensors_in
from amptune.measure.bench.bench import Bench
from amptune.measure.bench.failures import NonFiniteError
from amptune.measure.numerics.randomness import without_dropout
from amptune.measure.numerics.short_training import Training
from amptune.measure.results.half_effects import ModuleTrace, Reach
from amptune.policy.settings import Policy

__all__ = ["trace_step"]

# Number of elements kept of each tensor, evenly spaced: enough to measure the distance between two tensors.
KEPT = 2048


def trace_step(bench: Bench, policy: Policy, fp32: Policy) -> tuple[ModuleTrace, ...]:
    """Runs one step in FP32 and one under the policy, on the same batch from the same weights; returns the traces.

    The policy's loss scale has settled before its step. Modules are in the order in which their first forward calls
    ended: children before their parents. The trace of a module covers all its calls.
    """
    reference, _ = _looked_at(bench, fp32)
    seen, order = _looked_at(bench, policy)
    types = {path: type(module).__name__ for path, module in bench.model.named_modules()}
    return tuple(
        ModuleTrace(
            path=path,
            type=types[path],
            **{place: _reach(seen.get((path, place)), reference.get((path, place))) for place in _PLACES},
        )
        for path in order
    )


_PLACES = ("inputs", "outputs", "gradients_in", "gradients_out", "weights")


@dataclass
class _Glance:
    """A record of the tensors at one place: a sample and the largest magnitude of each (NaN counts as largest)."""

    samples: list[torch.Tensor] = field(default_factory=list)
    largest: list[torch.Tensor] = field(default_factory=list)

    @torch.no_grad()
    def add(self, tensor: torch.Tensor) -> None:
        if not tensor.numel() or not tensor.is_floating_point():
            return
        values = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        flat = values.reshape(-1)
        self.samples.append(flat[:: max(1, flat.numel() // KEPT)][:KEPT].float())
        self.largest.append(flat.float().abs().amax())


Glances = dict[tuple[str, str], _Glance]


def _looked_at(bench: Bench, policy: Policy) -> tuple[Glances, list[str]]:
    """Returns (tensors seen at each place of each module, module paths in the order their forward calls ended)."""
    with Training.on(bench, policy) as training, without_dropout(bench.model):
        with suppress(NonFiniteError):  # the trace is meant to show it
            training.gradients(1)  # the loss scale settles
        training.restart()
        scale = float(training.tuned.scaler.get_scale())
        with _watching(bench.model, scale) as (glances, order):
            training.step()
        return glances, list(order)


@contextmanager
def _watching(model: nn.Module, scale: float) -> Iterator[tuple[Glances, dict[str, None]]]:
    """Records the tensors of all modules; gradients are divided by `scale`."""
    glances: Glances = defaultdict(_Glance)
    order: dict[str, None] = {}

    def forward(path: str, _module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        order.setdefault(path)  # activation checkpointing calls again, in backward order
        for here, there, value in (("inputs", "gradients_out", (args, kwargs)), ("outputs", "gradients_in", output)):
            for tensor in tensors_in(value):
                glances[path, here].add(tensor)
                if tensor.requires_grad and tensor.is_floating_point():
                    _on_gradient(tensor, glances[path, there], scale)

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it takes no hooks
            hooks.enter_context(module.register_forward_hook(partial(forward, path), with_kwargs=True))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                glance = glances[name.rpartition(".")[0], "weights"]
                hooks.enter_context(_on_weight_gradient(parameter, glance, scale))
        yield glances, order


def _on_gradient(tensor: torch.Tensor, glance: _Glance, scale: float) -> None:
    tensor.register_hook(lambda gradient: glance.add(gradient / scale))  # type: ignore[no-untyped-call]


def _on_weight_gradient(parameter: nn.Parameter, glance: _Glance, scale: float) -> RemovableHandle:
    def look(weight: torch.Tensor) -> None:
        if weight.grad is not None:
            glance.add(weight.grad / scale)

    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]
    return handle


def _reach(seen: _Glance | None, reference: _Glance | None) -> Reach | None:
    if seen is None or not seen.largest:
        return None
    largest = _largest(seen)
    if reference is None or not reference.largest:
        return Reach(largest=largest, largest_fp32=0.0, error=0.0)
    return Reach(largest=largest, largest_fp32=_largest(reference), error=_error(seen, reference))


def _largest(glance: _Glance) -> float:
    return float(torch.stack(glance.largest).max())  # NaN if any is


def _error(seen: _Glance, reference: _Glance) -> float:
    """Returns the relative error over all tensors that occurred in both steps."""
    pairs = [(a, b) for a, b in zip(seen.samples, reference.samples, strict=False) if a.shape == b.shape]
    if not pairs:
        return 0.0
    apart, size = (torch.cat([part(a, b).flatten() for a, b in pairs]) for part in (torch.sub, lambda _, b: b))
    legitimate = torch.isfinite(size)  # a mask holds infinities in FP32 too
    apart, size = apart[legitimate], size[legitimate]
    if not torch.isfinite(apart).all():
        return math.inf
    total = float(size.double().square().sum())
    return math.sqrt(float(apart.double().square().sum()) / total) if total else 0.0
