"""A model's forward and backward pass, recorded once as CUDA graphs and replayed with the next batches.

Launching a recorded pass takes the host next to no time, whatever the number of its kernels, and the kernels are
PyTorch's own: nothing is compiled (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). What is recorded
reads and writes the same memory each time, which is what this module has to see to.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import nn

__all__ = ["CudaRecorder", "NotRecordableError", "Recorder", "Recording"]

T = TypeVar("T")

# What an output may hold besides tensors: the same value comes out of every replay.
CONSTANTS = (type(None), bool, int, float, str)


class NotRecordableError(Exception):
    """Why a forward pass cannot be recorded, in words that follow its model's name."""


class Recorder(Protocol):
    """Records the work that a function gives to a device, to be done again without the function."""

    def warming_up(self) -> AbstractContextManager[None]:
        """For a pass in which libraries load kernels and choose algorithms."""

    def rehearsing(self) -> AbstractContextManager[None]:
        """For a pass after that, which fails where it does what cannot be recorded."""

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """What the function returned, and how to do its work again: into the same tensors."""


class CudaRecorder:
    """Records what goes before one another into one pool of memory: a forward pass, then its backward pass."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _stream_of(device)

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """On the stream that is recorded, as autograd runs a backward pass on the stream of its forward pass."""
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                yield
            torch.cuda.current_stream().wait_stream(self._stream)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """The host must not wait for the device: a recording that fails by it is in the way of what comes after."""
        before = torch.cuda.get_sync_debug_mode()
        with self.warming_up():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # that it does not find every such operation
                    torch.cuda.set_sync_debug_mode("error")
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """What other threads do meanwhile is no part of it, such as pinning the memory of the next batch."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), _no_garbage_collected(), self._put_right():
            recording = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
            with recording:
                result = work()
        return result, graph.replay

    @contextmanager
    def _put_right(self) -> Iterator[None]:
        """Ends a recording that cannot be ended, for the random generator and for the allocator: PyTorch 2.11 does not.

        No random number could be drawn otherwise, and memory that another stream had used would never be free again.
        """
        device = torch.cuda.current_device()
        generator = torch.cuda.default_generators[device]
        before = generator.clone_state()
        try:
            yield
        except torch.AcceleratorError as error:  # where the work itself raised, that is the reason and says more
            generator.graphsafe_set_state(before)
            for end in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
                with suppress(AttributeError, RuntimeError):  # of another PyTorch
                    getattr(torch._C, end)(device, self._pool)
            if isinstance(error.__context__, Exception):
                raise error.__context__ from None
            raise


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: cuBLAS keeps a workspace for each, of 64 MiB on a Hopper."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has not typed it
    return _streams[device]


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Another recording that went with it would give its memory back, which ends this one."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Pass:
    """One replay of a forward pass; `over` when its backward pass was replayed too."""

    __slots__ = ("__weakref__", "over")

    def __init__(self) -> None:
        self.over = False


class Recording:
    """The two passes of `call` over tensors like these, with the model's weights as they lie in memory.

    Raises `NotRecordableError`, or what the call raises.
    """

    def __init__(
        self,
        call: Callable[[Sequence[torch.Tensor]], Any],
        model: nn.Module,
        inputs: Sequence[torch.Tensor],
        by: Recorder,
    ) -> None:
        self._inputs = [tensor.detach().clone() for tensor in inputs]
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._last: weakref.ref[_Pass] | None = None
        self._record(lambda: call(self._inputs), by)

    def _record(self, forward: Callable[[], Any], by: Recorder) -> None:
        for before in (by.warming_up, by.rehearsing):
            with before():
                outputs = _tensors_of(forward())
                self._gradients_of(outputs, [torch.zeros_like(one) for one in outputs])
        outputs = []  # their memory is free for what is recorded
        returned, self._forward = by.record(forward)
        leaves, self._structure = tree_flatten(returned)
        outputs = _tensors_of(returned)
        self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        self._constants = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        self._has_gradient = [one.requires_grad for one in outputs]
        self._of_outputs = [torch.zeros_like(one) for one in outputs]
        found, self._backward = by.record(lambda: self._gradients_of(outputs, self._of_outputs))
        self._outputs = [one.detach() for one in outputs]  # autograd's graph of them belongs to the recording's stream
        used = [(own, gradient) for own, gradient in zip(self._parameters, found, strict=True) if gradient is not None]
        self._parameters = [parameter for parameter, _ in used]
        self._gradients = [gradient for _, gradient in used]

    def _gradients_of(
        self, outputs: Sequence[torch.Tensor], of_outputs: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        """Of the parameters; None for those that have no part in what came out."""
        pairs = [(one, gradient) for one, gradient in zip(outputs, of_outputs, strict=True) if one.requires_grad]
        if not pairs:
            raise NotRecordableError("gives nothing that has a gradient")
        ends, gradients = zip(*pairs, strict=True)
        return torch.autograd.grad(ends, self._parameters, gradients, allow_unused=True)

    @property
    def is_busy(self) -> bool:
        """Whether what the last forward pass kept is still needed by a backward pass that may come."""
        last = None if self._last is None else self._last()
        return last is not None and not last.over

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Any:
        """What the call returns for these inputs, in memory of its own; autograd takes it from there.

        Gradients lie in the recording's memory: `.grad` is kept from being overwritten, what `torch.autograd.grad`
        returns is valid until the next pass.
        """
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given, non_blocking=True)
        tensors = iter(_Replay.apply(self, *self._parameters))  # type: ignore[no-untyped-call]
        constants = iter(self._constants)
        leaves = [next(tensors if is_tensor else constants) for is_tensor in self._is_tensor]
        return tree_unflatten(leaves, self._structure)

    def replay_forward(self) -> tuple[_Pass, list[torch.Tensor], list[torch.Tensor]]:
        """(the pass, what it gave, what of that has no gradient)."""
        self._keep_gradients()
        self._forward()
        begun = _Pass()
        self._last = weakref.ref(begun)
        outputs = [one.clone() for one in self._outputs]
        without = [given for given, has in zip(outputs, self._has_gradient, strict=True) if not has]
        return begun, outputs, without

    def replay_backward(self, begun: _Pass, of_outputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The parameters' gradients. Raises `RuntimeError` where a later forward pass took what this one had kept."""
        if self._last is None or self._last() is not begun:
            raise RuntimeError(
                "a later forward pass was replayed before this second backward pass: under cuda_graphs both share "
                "their memory; leave cuda_graphs out of the policy for this loop"
            )
        for own, given in zip(self._of_outputs, of_outputs, strict=True):
            own.zero_() if given is None else own.copy_(given, non_blocking=True)
        self._keep_gradients()
        self._backward()
        begun.over = True
        return [gradient.detach() for gradient in self._gradients]

    def _keep_gradients(self) -> None:
        """Autograd takes a first gradient as it is, and it lies where a forward pass puts other things for a while.

        So one that is to be added to is moved, before either pass.
        """
        for parameter, own in zip(self._parameters, self._gradients, strict=True):
            gradient = parameter.grad
            if gradient is not None and gradient.data_ptr() == own.data_ptr():
                parameter.grad = gradient.clone()


class _Replay(torch.autograd.Function):
    """The recorded passes, as autograd sees them: a function of the parameters."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.recording = recording
        ctx.begun, outputs, without = recording.replay_forward()
        ctx.mark_non_differentiable(*without)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.recording.replay_backward(ctx.begun, gradients)


def _tensors_of(outputs: Any) -> list[torch.Tensor]:
    leaves = tree_flatten(outputs)[0]
    strange = next((leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *CONSTANTS))), None)
    if strange is not None:
        raise NotRecordableError(f"returns a {type(strange).__name__}, whose contents are not known")
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
