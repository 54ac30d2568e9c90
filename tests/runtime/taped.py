"""A recorder for tests on a CPU: a tape of the operations beneath autograd, done again into the same memory.

As a CUDA graph, it knows nothing of Python: what a forward pass decides there is decided once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amptune.runtime.graphs.recorder import as_if_recording

T = TypeVar("T")


class TapeRecorder:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._results: list[Any] = []

    def warming_up(self) -> AbstractContextManager[None]:
        return as_if_recording()

    def rehearsing(self) -> AbstractContextManager[None]:
        return as_if_recording()

    def take_turn(self) -> None: ...

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        with _Tape() as tape, as_if_recording():
            result = work()
        place = len(self._results) + 1
        self._results.append(result)

        def replay() -> None:
            for later in self._results[
                place:
            ]:  # a pool of memory serves all: what comes later lies where now others do
                for tensor in tree_leaves(later):
                    if tensor is not None:
                        tensor.detach().fill_(torch.nan)
            tape.replay()

        return result, replay


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has not typed it
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._done.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self._done:
            anew = func(*args, **kwargs)
            for tensor, new in zip(tree_leaves(result), tree_leaves(anew), strict=True):
                if isinstance(tensor, torch.Tensor) and tensor.data_ptr() != new.data_ptr():
                    tensor.copy_(new)
