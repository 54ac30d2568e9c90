"""A recorder for tests on a CPU: a tape of the operations beneath autograd, done again into the same memory.

As a CUDA graph, it knows nothing of Python: what a forward pass decides there is decided once. And what was there
before is as it was: capturing a graph computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amptune.runtime.graphs.recorder import as_if_recording
from amptune.runtime.graphs.tensor_use import place_of, written

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
        tape.put_back()
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
        self._made: dict[int, torch.Tensor] = {}
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in written(func, args, kwargs or {}):
            if place_of(tensor) not in self._made:
                self._before.setdefault(tensor.data_ptr(), (tensor.detach(), tensor.detach().clone()))
        known = {place_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and place_of(leaf) not in known:
                self._made[place_of(leaf)] = leaf
        self._done.append((func, args, kwargs or {}, result))
        return result

    @torch.no_grad()
    def put_back(self) -> None:
        """Restores what was written in place, but for what was made within."""
        for tensor, value in self._before.values():
            tensor.copy_(value)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, result in self._done:
            anew = func(*args, **kwargs)
            for tensor, new in zip(tree_leaves(result), tree_leaves(anew), strict=True):
                if isinstance(tensor, torch.Tensor) and tensor.data_ptr() != new.data_ptr():
                    tensor.copy_(new)
