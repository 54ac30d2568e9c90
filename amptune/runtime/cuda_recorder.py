"""Records what a function gives a GPU to do, as a CUDA graph, and rehearses it before."""

from __future__ import annotations

import gc
import warnings
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from amptune.runtime.host_effects import NotRecordableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

__all__ = ["CudaRecorder", "Recorder"]

T = TypeVar("T")


class Recorder(Protocol):
    """Records the work that a function gives to a device, to be done again without the function."""

    def warming_up(self) -> AbstractContextManager[None]:
        """For passes in which libraries load kernels and choose algorithms."""

    def rehearsing(self) -> AbstractContextManager[None]:
        """For passes after those; raises `NotRecordableError` where they do what cannot be recorded."""

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
        with self.warming_up(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                torch.cuda.set_sync_debug_mode("warn")  # other threads may wait, and an error would be theirs too
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)
        if any("called a synchronizing CUDA operation" in str(one.message) for one in caught):
            raise NotRecordableError("waits for the device (.item(), .cpu(), or a tensor in an `if`)")

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
        """Ends a recording that cannot be ended, after which PyTorch (2.11 to 2.13) leaves its stream current.

        No random number could be drawn either, and memory that another stream had used would never be free again.
        """
        stream = torch.cuda.current_stream()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        before = generator.clone_state()
        try:
            yield
        except torch.AcceleratorError as error:
            generator.graphsafe_set_state(before)
            for end in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
                with suppress(AttributeError, RuntimeError):  # of another PyTorch
                    getattr(torch._C, end)(torch.cuda.current_device(), self._pool)
            if isinstance(error.__context__, Exception):  # where the work itself raised, that says more
                raise error from error.__context__
            raise
        finally:
            torch.cuda.set_stream(stream)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: cuBLAS keeps a workspace for each, of 64 MiB on a Hopper."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has not typed it
    return _streams[device]


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Another recording may go with it, and give its memory back, which is not allowed while one is made."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
