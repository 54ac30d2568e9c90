"""The guard's messages: each is a warning at the line of the user's own code, and a finding."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from amptune.policy.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["Misuse", "Place", "PolicyMisuseWarning", "frames_above"]

# Code that runs between the user's call and a hook. Decorators like `torch.no_grad` come from contextlib.
_INNER = (
    os.path.join(os.path.dirname(torch.__file__), ""),
    os.path.join(Path(__file__).resolve().parents[2], ""),
    contextlib.__file__,
)


class PolicyMisuseWarning(UserWarning):
    """A warning that the training loop does something that harms training and that PyTorch accepts silently."""


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a program."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Misuse:
    """A reporter of mistakes in the loop: warns once per kind and place, and keeps each as a finding."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self._said: set[tuple[str, Place]] = set()
        self._loop_thread = threading.get_ident()

    def here(self) -> Place:
        """Returns the line of the user's code that is running.

        Backward hooks of GPU tensors run in a thread of autograd, while the loop's own thread waits in `backward`.
        """
        frames = sys._current_frames()
        try:
            for thread in (threading.get_ident(), self._loop_thread):
                for frame in frames_above(frames.get(thread)):
                    if not frame.f_code.co_filename.startswith(_INNER):
                        return Place(frame.f_code.co_filename, frame.f_lineno)
            return Place("<unknown>", 0)
        finally:
            frames.clear()  # this frame is in it, and a cycle would keep the tensors of all callers until it is found

    def say(self, code: str, message: str, place: Place | None = None, **figures: Any) -> None:
        """Replaces `{here}` in `message` by the place; without a place, by the line that is running."""
        place = place or self.here()
        if (code, place) in self._said:
            return
        self._said.add((code, place))
        text = message.replace("{here}", str(place))
        self.findings.append(Finding(code=code, message=text, figures={"where": str(place), **figures}))
        warnings.warn_explicit(text, PolicyMisuseWarning, place.file, place.line)


def frames_above(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields the frame and its callers, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back
