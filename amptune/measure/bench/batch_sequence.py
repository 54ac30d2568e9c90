"""The batches of a trial that lie on the device, in the order in which steps take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

__all__ = ["BatchSequence", "Batches"]

# The steps before a timed block see at least so many batches: a graph is compiled anew for the first other shape.
FEWEST_WARM = 2


class Batches(Protocol):
    """An endless iterator of batches on the device."""

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...

    def begin_block(self) -> None:
        """Is called before each block of steps that is timed."""
        ...


class BatchSequence:
    """An endless cycle of batches. Each block begins with the second half of them, after `begin`.

    The steps before the first block get the first half alone. What a policy pays for a batch that it has not seen, as
    graphs recorded for its shapes, is thus in its block, as training pays for it.
    """

    def __init__(self, batches: Sequence[Any], begin: Callable[[], None]) -> None:
        self._batches, self._begin = batches, begin
        self._at, self._count = 0, max(min(len(batches), FEWEST_WARM), len(batches) // 2)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._at += 1
        return self._batches[(self._at - 1) % self._count]

    def begin_block(self) -> None:
        self._at, self._count = len(self._batches) // 2, len(self._batches)
        self._begin()
