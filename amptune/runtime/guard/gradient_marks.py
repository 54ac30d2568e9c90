"""Marks on the gradients of a model's parameters: how new each is, if it is scaled, and if it was written to since."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn

from amptune.runtime.scaler import has_scaler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from amptune.policy.settings import Policy

__all__ = ["GradientBefore", "GradientMarks", "Mark"]

# Less than this share is left of scaled gradients that were clipped as if they were not: a limit is near the norm of
# unscaled ones, and the scale begins at 65,536. An average over micro-batches or ranks by hand leaves more.
_CUT = 0.01


class GradientBefore:
    """A gradient as it was, to tell later if it was replaced or written to."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self._gradient, self._version = weakref.ref(gradient), gradient._version

    def is_as(self, gradient: torch.Tensor) -> bool:
        return self._gradient() is gradient and gradient._version == self._version


@dataclass(slots=True)
class Mark:
    """The mark of a gradient: when a backward last added to it, from which loss, and its largest magnitude then."""

    when: int = 0
    origin: Literal["none", "plain loss", "scaled loss", "unscaled"] = "none"
    then: GradientBefore | None = None
    largest: torch.Tensor | None = None


class GradientMarks:
    """The marks of a model's gradients, kept up to date by a hook on each parameter, until `remove`.

    Time is counted in gradients: `now` grows by one with each gradient added to a parameter; so does `passes`, about,
    with each backward. Parameters are looked up by identity, as tensors cannot be compared; the caller keeps the model.
    While there is an `autocast` it is noted if the first gradient of each matrix has that precision.
    """

    def __init__(self, model: nn.Module, policy: Policy, after_each: Callable[[torch.Tensor], None]) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad and p.is_leaf and not nn.parameter.is_lazy(p)]
        self.now = self.passes = 0
        self._after_each, self._keeps_sizes = after_each, has_scaler(policy)
        self._in_scaled_backward = False
        self.autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(policy.autocast)
        self._are_cast: list[torch.Tensor] = []
        self._marks = {id(parameter): Mark() for parameter in parameters}
        self._handles = [p.register_post_accumulate_grad_hook(self._added) for p in parameters]  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        while self._handles:
            self._handles[-1].remove()
            self._handles.pop()

    def follow_scaled(self, loss: torch.Tensor) -> None:
        """Marks the gradients that a backward from this loss adds as scaled."""
        self._in_scaled_backward = False  # a backward that raised did not reset it
        if loss.requires_grad:
            loss.register_hook(self._scaled_backward_begins)  # type: ignore[no-untyped-call]

    def unscaled(self, parameters: Iterable[torch.Tensor]) -> None:
        for mark, _ in self._held(parameters):
            if mark.origin == "scaled loss":
                mark.origin = "unscaled"

    def newest(self, parameters: Iterable[torch.Tensor]) -> Mark | None:
        """Returns the mark of the gradient of these parameters that a backward added to last, or None."""
        return max((mark for mark, _ in self._held(parameters) if mark.when), key=lambda one: one.when, default=None)

    def are_cut(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Returns True if little is left of scaled gradients. Waits for the device if they were written to at all."""
        scaled = [(mark, now) for mark, now in self._held(parameters) if mark.origin == "scaled loss"]
        sizes = _sizes([(mark, now) for mark, now in scaled if mark.then and not mark.then.is_as(now)])
        before, left = (max(one, default=0.0) for one in (sizes[::2], sizes[1::2]))
        return before < float("inf") and 0 < left < _CUT * before

    def are_as_added(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Returns True unless somebody changed the gradients, as a scaler does: no version tells of that."""
        sizes = _sizes(self._held(parameters))
        return bool(sizes) and sizes[::2] == sizes[1::2]

    def are_uncast(self) -> bool:
        """Returns True if no autocast was on: what passes through it has no more digits than its dtype."""
        return bool(self._are_cast) and not any(map(bool, self._are_cast))

    def _held(self, parameters: Iterable[torch.Tensor]) -> Sequence[tuple[Mark, torch.Tensor]]:
        marks = ((self._marks.get(id(one)), one.grad) for one in parameters)
        return [(mark, gradient) for mark, gradient in marks if mark is not None and gradient is not None]

    def _added(self, parameter: torch.Tensor) -> None:
        mark, gradient = self._marks.get(id(parameter)), parameter.grad
        # None for what another hook returned, which autograd passes on before it raises its error
        if torch.compiler.is_compiling() or mark is None or gradient is None:
            return
        is_first = mark.when == 0
        mark.when = self.now = self.now + 1
        self.passes = self.now // len(self._marks)
        mark.origin = "scaled loss" if self._in_scaled_backward else "plain loss"
        mark.then = GradientBefore(gradient)
        is_plain = type(gradient) is torch.Tensor and gradient.layout is torch.strided and gradient.numel() > 0
        mark.largest = gradient.detach().abs().amax() if is_plain and self._keeps_sizes else None
        if is_first and is_plain and self.autocast is not None and gradient.is_floating_point() and gradient.dim() > 1:
            cast = gradient.to(self.autocast).eq(gradient) | gradient.isnan()
            self._are_cast.append(cast.all() & gradient.any())
        self._after_each(parameter)

    def _scaled_backward_begins(self, _: torch.Tensor) -> None:
        """Notes that a scaled backward runs; the autograd engine calls back at the end of this backward.

        A nested backward, as in reentrant checkpointing, counts as scaled too.
        """
        if self._handles and not torch.compiler.is_compiling():
            self._in_scaled_backward = True
            ends = partial(setattr, self, "_in_scaled_backward", False)
            torch.autograd.Variable._execution_engine.queue_callback(ends)


def _sizes(pairs: Iterable[tuple[Mark, torch.Tensor]]) -> list[float]:
    """Returns the largest value of each gradient then, and now; nothing in a capture, which must not wait."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return []
    known = [(mark.largest, now.detach().abs().amax()) for mark, now in pairs if mark.largest is not None]
    return [float(size) for pair in known for size in pair]
