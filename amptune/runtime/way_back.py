"""The steps that take an applied policy back."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WayBack"]


class WayBack:
    """Steps that undo what was changed, the last first. As a context manager it goes them if an exception comes.

    A step is forgotten once it has ended: after an interruption `go` goes on with the step that was interrupted. So
    each step may run twice.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def add(self, do: Callable[..., object], *args: Any) -> None:
        self._steps.append(partial(do, *args))

    def go(self) -> None:
        while self._steps:
            self._steps[-1]()
            del self._steps[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.go()
