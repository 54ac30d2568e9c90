"""Inspection of the model in one instrumented training step: leaf modules, their order and work; does it train?"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn

from amptune.changes.blocks import repeated_leaves, repeated_paths
from amptune.changes.tensor_tree import tensors_in
from amptune.errors import TargetError
from amptune.measure.bench.bench import Bench
from amptune.measure.bench.failures import failure_of
from amptune.measure.bench.step import Stepper, needs_closure
from amptune.measure.modules.replay import versions_of
from amptune.measure.results.subject import Leaf, Module, Subject
from amptune.policy.settings import STOCK
from amptune.runtime.class_swap import obstacle
from amptune.runtime.digest import model_digest
from amptune.runtime.float8 import no_float8_because
from amptune.runtime.module_precision import has_forward
from amptune.runtime.optimizer import is_fusable

__all__ = ["MOST_MICRO_BATCHES", "inspect_model"]

# FP8 gained 1.15 and 1.21 times on models of Linears this wide (reports/h200/float8). Below, and on batches of fewer
# rows than the smaller side, torchao's authors report none; that was not measured here.
LEAST_SIDE = 2048
LEAST_LONG_SIDE = 2 * LEAST_SIDE
# A step of the user's own may be one of so many micro-batches before the optimizer's step.
MOST_MICRO_BATCHES = 16


def inspect_model(bench: Bench, source_digest: str) -> Subject:
    """Runs one FP32 step with hooks on every leaf.

    If the step fails, the leaves' figures stay 0; the baseline's own trial reports the failure. Raises `TargetError` if
    the step does not train the model.
    """
    leaves = {path: module for path, module in bench.model.named_modules() if not any(module.children())}
    seen = {path: _unseen(path, module) for path, module in leaves.items()}
    fusable = False
    digest = model_digest(bench.model)  # before the step, as `apply` sees it: observers resize their buffers in it
    try:
        with bench.on_device(STOCK) as (_, stepper), _watching(leaves, seen), _closures_told(stepper):
            has_sparse = _require_training(stepper, bench.model, own_step=bench.workload.step is not None)
            fusable = any(map(is_fusable, stepper.optimizers)) and not has_sparse
    except TargetError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001  # reported by the baseline's trial, which repeats it
        print(f"the instrumented step failed: {failure_of(error)}", flush=True)  # noqa: T201  # into the worker's log
    finally:
        bench.release()
    repeated = {path: bench.model.get_submodule(path) for path in repeated_paths(bench.model)}
    return Subject(
        name=bench.workload.name or "workload",
        source_digest=source_digest,
        model_digest=digest,
        batch_size=bench.workload.batch_size,
        parameters=sum(p.numel() for p in bench.model.parameters()),
        leaves=tuple(seen.values()),
        convolution_dims=frozenset(
            len(m.kernel_size) for m in leaves.values() if isinstance(m, nn.modules.conv._ConvNd)
        ),
        modules=tuple(
            Module(
                path=path,
                types=_types_of(module),
                runs=has_forward(module),
                in_half=any(module.children()) or obstacle(module, "half") is None,
            )
            for path, module in bench.model.named_modules()
            if path
        ),
        root_types=_types_of(bench.model),
        tolerance=bench.workload.evaluate_tolerance,
        fusable=fusable,
        own_step=bench.workload.step is not None,
        own_loop=bench.workload.own_loop,
        as_is=bench.workload.as_is,
        summary=bench.workload.summary,
        accumulate=bench.workload.accumulate,
        repeated_leaves=repeated_leaves(bench.model),
        blocks=tuple(path for path, block in repeated.items() if obstacle(block, "recomputed") is None),
        wide_linears=_wide_linears(bench, seen),
        threads=torch.get_num_threads() if bench.device.type == "cpu" else 0,
        castable=any(_is_castable(parameter) for parameter in bench.model.parameters()),
    )


def _is_castable(parameter: nn.Parameter) -> bool:
    return parameter.dtype not in (torch.float64, torch.complex128)


def _wide_linears(bench: Bench, seen: Mapping[str, Leaf]) -> tuple[str, ...]:
    """Returns the Linears to try in FP8, in the model's order: the last one called, the head, needs its precision."""
    linears = {path: one for path, one in bench.model.named_modules() if isinstance(one, nn.Linear)}
    called = {path: at for path in linears if path in seen and (at := seen[path].called) is not None}
    head = max(called, key=called.__getitem__, default="")
    wide = tuple(path for path in called if path not in (head, "") and _is_wide(linears[path], seen[path].flops))
    able = not bench.workload.in_place and no_float8_because(bench.device) is None
    return wide if wide and able else ()


def _is_wide(linear: nn.Linear, flops: int) -> bool:
    sides = linear.in_features, linear.out_features
    if min(sides) < LEAST_SIDE or max(sides) < LEAST_LONG_SIDE:
        return False
    rows = flops // (2 * math.prod(sides))  # of few, casting the weight is most of the work
    return rows >= LEAST_SIDE and obstacle(linear, "float8") is None


def _require_training(stepper: Stepper, model: nn.Module, *, own_step: bool) -> bool:
    """Runs a step, or several of the user's own until one trains; returns True if a gradient is sparse.

    Raises `TargetError` if the model is not trained.
    """
    held = [parameter for optimizer in stepper.optimizers for parameter in _require_own(optimizer, model)]
    reached: list[bool] = []
    sparse: list[bool] = []

    def note(*_: Any) -> None:
        gradients = [parameter.grad for parameter in held if parameter.grad is not None]
        reached.append(bool(gradients))
        sparse.append(any(gradient.is_sparse for gradient in gradients))

    versions = versions_of(list(model.parameters()))
    with ExitStack() as hooks:
        for optimizer in stepper.optimizers:
            hooks.enter_context(optimizer.register_step_pre_hook(note))
        for _ in range(MOST_MICRO_BATCHES if own_step else 1):
            stepper()
            if reached or versions_of(list(model.parameters())) != versions:
                break
        else:
            raise TargetError(
                f"step(…) ran {MOST_MICRO_BATCHES} times, and neither did the optimizer step nor a weight change: call "
                "tuned.scaler.step(optimizer) and tuned.scaler.update()"
            )
    if not own_step and not any(reached):
        if not any(parameter.requires_grad for parameter in held):
            raise TargetError("the optimizer's parameters are all frozen: they have requires_grad=False")
        raise TargetError("no gradient reaches the optimizer's parameters: loss(model, batch) is to use its model")
    return any(sparse)


def _require_own(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[nn.Parameter]:
    """Returns the optimizer's parameters. Raises `TargetError` if none is the model's."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not {id(parameter) for parameter in held} & {id(parameter) for parameter in model.parameters()}:
        raise TargetError(
            f"optimizer(model) holds {len(held)} parameters, and none is the model's: build it over the parameters of "
            "the model that it is given, as in lambda model: SGD(model.parameters(), lr=0.1)"
        )
    return held


@contextmanager
def _closures_told(stepper: Stepper) -> Iterator[None]:
    """Turns the error of an optimizer that turns out to need a closure into one that says what to write."""
    try:
        yield
    except Exception as error:
        if stepper.is_recipe and failure_of(error).in_update and "closure" in str(error):
            raise needs_closure(stepper.optimizers[0]) from error
        raise


@contextmanager
def _watching(leaves: dict[str, nn.Module], seen: dict[str, Leaf]) -> Iterator[None]:
    """Adds every call of the leaves to what was seen of them."""
    order = count()

    def note(path: str, module: nn.Module, inputs: Any, output: Any) -> None:
        mine = seen[path]
        seen[path] = replace(
            mine,
            called=next(order) if mine.called is None else mine.called,
            flops=mine.flops + _flops(module, inputs, output),
            cast_numel=mine.cast_numel + _numel(inputs) + mine.parameters,
        )

    with ExitStack() as hooks:
        for path, module in leaves.items():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # it takes no hooks
            hooks.enter_context(module.register_forward_hook(partial(note, path)))
        yield


def _types_of(module: nn.Module) -> tuple[str, ...]:
    return tuple(kind.__name__ for kind in type(module).__mro__ if kind is not object)


def _unseen(path: str, module: nn.Module) -> Leaf:
    """Returns a leaf that no step has reached yet."""
    parameters = sum(p.numel() for p in module.parameters(recurse=False))
    return Leaf(path=path, type=type(module).__name__, parameters=parameters, flops=0, cast_numel=0, called=None)


def _flops(module: nn.Module, inputs: Any, output: Any) -> int:
    """Returns the multiplications and additions of one forward call; 0 for modules that are no matrix product."""
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return 2 * _numel(inputs) * (module.out_channels // module.groups) * math.prod(module.kernel_size)
    if isinstance(module, nn.modules.conv._ConvNd):
        return 2 * _numel(output) * (module.in_channels // module.groups) * math.prod(module.kernel_size)
    if isinstance(module, nn.Linear):
        return 2 * _numel(output) * module.in_features
    return 0


def _numel(value: Any) -> int:
    return sum(tensor.numel() for tensor in tensors_in(value))
