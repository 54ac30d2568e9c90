"""Running statistics of BatchNorm, which an overflow makes non-finite although the loss scaler skips the step.

The forward has updated them by then (https://github.com/pytorch/pytorch/issues/88474), and a NaN stays in a running
average for good: training continues as before, but evaluation fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

__all__ = ["FiniteStatistics"]


class FiniteStatistics:
    """The last finite running statistics of a model, by which `restore` replaces each number that is not finite.

    `restore` takes a few kernels for all statistics together, and does not wait for the device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._last = torch.empty(0)
        self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        # `.data`, so that autograd does not see tensors saved for a backward as overwritten
        statistics = [tensor.data for _, tensors in _running(self._model) for tensor in tensors]
        if not statistics:
            return
        device = statistics[0].device
        now = torch.cat([tensor.flatten().to(device) for tensor in statistics])
        last = self._last.to(device) if self._last.numel() == now.numel() else now
        self._last = torch.where(now.isfinite(), now, last)
        parts = torch.split(self._last, [tensor.numel() for tensor in statistics])
        torch._foreach_copy_(statistics, [part.view_as(t) for part, t in zip(parts, statistics, strict=True)])


def _running(model: nn.Module) -> Iterator[tuple[str, list[torch.Tensor]]]:
    for path, module in model.named_modules():
        own = dict(module.named_buffers(recurse=False))
        tensors = [own[name] for name in ("running_mean", "running_var") if name in own]
        if tensors:
            yield path, tensors
