"""Records the GPU work of a function as a CUDA graph, after a rehearsal."""

from __future__ import annotations

import gc
import threading
import warnings
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from amptune.runtime.graphs.host_effects import NotRecordableError
from amptune.runtime.graphs.tensor_use import WAITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

__all__ = ["CudaRecorder", "Recorder", "as_if_recording", "as_written"]

T = TypeVar("T")


class Recorder(Protocol):
    """A recorder of the work that a function gives to a device, which can repeat the work without the function."""

    def warming_up(self) -> AbstractContextManager[None]:
        """Returns a context for passes in which libraries load kernels and choose algorithms."""

    def rehearsing(self) -> AbstractContextManager[None]:
        """Returns a context for later passes; raises `NotRecordableError` if they cannot be recorded."""

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Returns the function's result, and a function that repeats its work into the same tensors."""

    def take_turn(self) -> None:
        """Makes what comes now wait for the last replay, if the loop has gone on to another stream since."""


class CudaRecorder:
    """A recorder with one memory pool for works that run one after the other: a forward pass, then its backward."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _stream_of(device)
        self._turn = torch.cuda.current_stream(device)

    def take_turn(self) -> None:
        """Each replay uses the same memory, so that no two may run at once."""
        now = torch.cuda.current_stream(self._device)
        if now != self._turn:
            now.wait_stream(self._turn)
            self._turn = now

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Uses the stream of the recording, as autograd runs a backward pass on the stream of its forward pass."""
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream), as_if_recording():
                yield
            torch.cuda.current_stream().wait_stream(self._stream)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Raises `NotRecordableError` if the host waits for the device, as a failed recording disturbs later work."""
        before = torch.cuda.get_sync_debug_mode()
        with self.warming_up(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                torch.cuda.set_sync_debug_mode("warn")  # other threads may wait, and an error would be theirs too
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)
        if any("called a synchronizing CUDA operation" in str(one.message) for one in caught):
            raise NotRecordableError(WAITS)

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Leaves out the work of other threads, such as pinning the memory of the next batch."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), _no_garbage_collected(), self._put_right():
            recording = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
            with recording:
                result = work()
        return result, graph.replay

    @contextmanager
    def _put_right(self) -> Iterator[None]:
        """Cleans up after a recording that failed, since PyTorch (2.11 to 2.13) leaves its stream current.

        Else no random number could be drawn either, and memory that another stream had used would never be freed.
        """
        stream = torch.cuda.current_stream()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        before = generator.clone_state()
        try:
            yield
        except torch.AcceleratorError as error:
            generator.graphsafe_set_state(before)
            for end in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
                with suppress(AttributeError, RuntimeError):  # other PyTorch versions may lack these
                    getattr(torch._C, end)(torch.cuda.current_device(), self._pool)
            if isinstance(error.__context__, Exception):  # the work itself raised, which says more
                raise error from error.__context__
            raise
        finally:
            torch.cuda.set_stream(stream)


def as_written(is_compiled: bool) -> AbstractContextManager[Any]:
    """Runs what is compiled as it was written, operation by operation, for a watch to see."""
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()


@contextmanager
def as_if_recording() -> Iterator[None]:
    """Has a model that asks whether it is recorded, as libraries do before they wait for the device, do as it will."""
    with _lock:
        _replaced.append(torch.cuda.is_current_stream_capturing)
        torch.cuda.is_current_stream_capturing = _yes
    try:
        yield
    finally:
        with _lock:  # the last to end, in whatever thread, puts PyTorch's own back
            last = _replaced.pop()
            if not _replaced:
                torch.cuda.is_current_stream_capturing = last


_replaced: list[Callable[[], bool]] = []
_lock = threading.Lock()


def _yes() -> bool:
    return True


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Returns one stream for all recordings: cuBLAS keeps a workspace for each stream, of 64 MiB on a Hopper."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has not typed it
    return _streams[device]


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Turns garbage collection off: it may free another recording's memory, which is forbidden during a recording."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
