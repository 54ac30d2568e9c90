"""Iterations of new batches from a script's own loaders, as the last comparison trains on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import DataLoader

from amptune.policy.settings import Loader
from amptune.runtime.script.hooks import LedIterator
from amptune.runtime.script.loaders import end_workers, like
from amptune.runtime.script.script_training import Iteration

__all__ = ["FreshIterations"]


class FreshIterations:
    """Iterations of new batches, without end: one batch after the other of the loaders whose numbers `pattern` has."""

    def __init__(
        self,
        pattern: Sequence[int],
        loaders: Sequence[Any],
        iterators: MutableSequence[Any],
        drawing: Callable[[], AbstractContextManager[None]],
        *,
        are_scripts: bool = True,
    ) -> None:
        self._are_scripts = are_scripts
        self._pattern, self._loaders, self._iterators, self._drawing = pattern, loaders, iterators, drawing
        self.data_loader: DataLoader[Any] = loaders[pattern[0]]

    def __iter__(self) -> Iterator[Iteration]:
        while True:
            yield Iteration(batches=[(loader, self._drawn(loader)) for loader in self._pattern])

    def _drawn(self, number: int) -> Any:
        with self._drawing():
            try:
                return _next_of(self._iterators[number])
            except StopIteration:
                self._iterators[number] = iter(self._loaders[number])
                return _next_of(self._iterators[number])

    def like(self, settings: Loader) -> FreshIterations:
        """Returns iterations of loaders with these settings, which the script does not see."""
        loaders = [like(one, settings) for one in self._loaders]
        return FreshIterations(self._pattern, loaders, [iter(()) for _ in loaders], self._drawing, are_scripts=False)

    def close(self) -> None:
        """Ends the worker processes, but for those that the script goes on with."""
        for loader, iterator in zip(self._loaders, self._iterators, strict=True):
            if not self._are_scripts:
                end_workers(loader, iterator)


def _next_of(iterator: Any) -> Any:
    return iterator.draw() if isinstance(iterator, LedIterator) else next(iterator)
