"""Follows one training step by shapes alone: on fake tensors, which have no data and take no time or memory."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amptune.changes.tensor_tree import map_tensors
from amptune.errors import TargetError
from amptune.predict.cuda_autocast import CudaAutocast
from amptune.predict.operation import Operation, StepFigures, Work
from amptune.predict.operation_figures import figures_of
from amptune.workload.copied_model import CopiedModel
from amptune.workload.user_errors import user_code
from amptune.workload.workload import Workload

__all__ = ["follow_step"]


class _ValuesNeededError(Exception):
    """The user's code asks for values, and says so in an error of its own."""


_VALUE_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, _ValuesNeededError)


def follow_step(workload: Workload, batch_size: int | None = None) -> StepFigures:
    """Returns what a step does, from one pass in each precision.

    A model whose shapes depend on values is run on real tensors of the CPU. Raises `TargetError` for a workload with a
    step of its own, `UserCodeError` if its code raises.
    """
    if workload.loss is None:
        raise TargetError("amptune predict needs a workload with a loss: a step of its own is not followed by shapes")
    size = batch_size or workload.batch_size
    try:
        with warnings.catch_warnings():  # PyTorch's own modules ask fake tensors for their address when they are copied
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor", UserWarning)
            fp32, half = (_followed(workload, size, half=half, fake=True) for half in (False, True))
    except _VALUE_DEPENDENT:
        fp32, half = (_followed(workload, size, half=half, fake=False) for half in (False, True))
    return StepFigures(
        name=workload.name or "workload",
        batch_size=size,
        fp32=Work(operations=tuple(fp32.operations)),
        half=Work(operations=tuple(half.operations)),
        fixed_bytes=(fp32.fixed_bytes, half.fixed_bytes),
        sample_bytes=((fp32.peak - fp32.fixed_bytes) / size, (half.peak - half.fixed_bytes) / size),
        convolution_dims=fp32.convolution_dims,
        waits=fp32.waits,
        raises=half.autocast.refuses,
    )


def _followed(workload: Workload, batch_size: int, *, half: bool, fake: bool) -> _Recorder:
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
    recorder = _Recorder(half=half)
    model = _built(workload, mode)
    batch = _drawn(workload, batch_size, mode)
    with mode:
        if fake:
            _make_fake(model, mode)
            batch = map_tensors(mode.from_tensor, batch)
        optimizers = [one for one in tree_leaves(workload.optimizer(model)) if isinstance(one, torch.optim.Optimizer)]
        parameters = [one for one in model.parameters() if one.requires_grad]
        for optimizer in optimizers:
            _settle(optimizer, parameters)
        recorder.begin(model, parameters, _state_of(optimizers))
        recorder.know(one for one in tree_leaves(batch) if isinstance(one, torch.Tensor))
        with _modules_named(model, recorder), recorder.autocast, recorder:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = _loss_of(workload, model, batch)
            with user_code("the backward pass"):
                loss.backward()  # type: ignore[no-untyped-call]
    recorder.operations.append(_update_of(parameters, optimizers, half=half))
    return recorder


def _built(workload: Workload, mode: Any) -> nn.Module:
    """Returns the model, of real tensors if it is a copy or its code asks for values, as that of timm's ViTs does."""
    try:
        with nullcontext() if isinstance(workload.model, CopiedModel) else mode:
            return workload.model()
    except Exception:  # noqa: BLE001  # what is wrong with it shows in the second attempt
        with user_code("building the model"):
            return workload.model()


def _drawn(workload: Workload, batch_size: int, mode: Any) -> Any:
    """Returns a batch, of real tensors if its code asks for values, as a loader that shuffles does."""
    try:
        with mode:
            return workload.batch(batch_size)
    except Exception:  # noqa: BLE001  # what is wrong with it shows in the second attempt
        with user_code("drawing a batch"):
            return workload.batch(batch_size)


def _loss_of(workload: Workload, model: nn.Module, batch: Any) -> torch.Tensor:
    assert workload.loss is not None  # noqa: S101  # follow_step asked
    try:
        return workload.loss(model, batch)
    except _VALUE_DEPENDENT:
        raise
    except Exception as error:
        if any(isinstance(cause, _VALUE_DEPENDENT) for cause in (error.__cause__, error.__context__)):
            raise _ValuesNeededError from error
        with user_code("a step, followed by shapes"):
            raise


def _make_fake(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replaces real parameters and buffers, such as copied ones; a tied one is replaced by one tensor everywhere."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = mode.from_tensor(parameter)  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = mode.from_tensor(buffer)


def _settle(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """Makes the optimizer's state, which its first step does, and takes the gradients away again."""
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _state_of(optimizers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    leaves = [leaf for one in optimizers for state in one.state.values() for leaf in state.values()]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.numel() > 1]


def _update_of(parameters: list[nn.Parameter], optimizers: list[torch.optim.Optimizer], *, half: bool) -> Operation:
    """Returns the optimizer's step as PyTorch does it on a GPU: for many tensors a kernel.

    Weights, gradients and state are read and weights and state are written, in about as many kernels as there are
    kinds of tensors; a gradient scaler reads and writes the gradients before.
    """
    weights = sum(one.numel() * one.element_size() for one in parameters)
    state = sum(one.numel() * one.element_size() for one in _state_of(optimizers))
    passes = 3 * weights + 2 * state + (2 * weights if half else 0)
    kernels = (2 + 3 * round(state / weights) if weights else 0) * (1 + len(parameters) // 100)
    return Operation(
        kind="optimizer",
        module="",
        flops=0.0,
        bytes=passes,
        in_half=False,
        fixed=True,
        launches=kernels + (2 if half else 0),
    )


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each operation, and the bytes of the tensors that are alive."""

    def __init__(self, *, half: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.autocast = CudaAutocast(half=half)
        self.convolution_dims: frozenset[int] = frozenset()
        self.fixed_bytes = 0.0
        self.module = ""
        self.peak = 0.0
        self.waits = 0
        self._half = half
        self._after_softmax = False  # CUDA's kernel gives the gradient in its input's dtype
        self._shapes: set[torch.Size] = set()
        self._alive = 0.0
        self._known: dict[int, float] = {}

    def begin(self, model: nn.Module, parameters: list[nn.Parameter], state: list[torch.Tensor]) -> None:
        """Notes what is there before the step: weights, buffers and the optimizer's state."""
        convolutions = (one for one in model.modules() if isinstance(one, nn.modules.conv._ConvNd))
        self.convolution_dims = frozenset(len(one.kernel_size) for one in convolutions)
        self._shapes = {one.shape for one in parameters} | {one.t().shape for one in parameters if one.dim() == 2}
        self.know([*model.parameters(), *model.buffers(), *state])
        halves = sum(one.numel() * 2 for one in parameters) if self._half else 0
        self.fixed_bytes = self._alive + halves

    def know(self, tensors: Any) -> None:
        """Counts the tensors' memory, each storage once, until it is freed."""
        for tensor in tensors:
            if tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._known:
                self._known[key] = float(storage.nbytes())
                self._alive += self._known[key]
                weakref.finalize(storage, self._forget, key)
        self.peak = max(self.peak, self._alive)

    def _forget(self, key: int) -> None:
        self._alive -= self._known.pop(key, 0.0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            self.waits += 1
        inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        outputs = [one for one in tree_leaves(found) if isinstance(one, torch.Tensor)]
        self.know(outputs)
        operation = figures_of(func, args, found, inputs, outputs)
        if operation is not None and not (operation.kind == "cast" and (self.autocast.casting or self._after_softmax)):
            self.operations.append(self._placed(operation, outputs[0]))
        if operation is not None:
            self._after_softmax = "softmax_backward" in func.overloadpacket.__name__
        return found

    def _placed(self, operation: Operation, output: torch.Tensor) -> Operation:
        if operation.kind == "recurrent" and self._half:
            operation = replace(operation, in_half=True, bytes=operation.bytes / 2)
        return replace(operation, module=self.module, fixed=operation.kind == "cast" and output.shape in self._shapes)


@contextmanager
def _modules_named(model: nn.Module, recorder: _Recorder) -> Iterator[None]:
    """Tells the recorder which leaf runs; a backward pass belongs to no module."""

    def enter(path: str) -> Any:
        return lambda *_: setattr(recorder, "module", path)

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if not any(module.children()) and not isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
                hooks.enter_context(module.register_forward_pre_hook(enter(path)))
                hooks.enter_context(module.register_forward_hook(enter("")))
        yield
