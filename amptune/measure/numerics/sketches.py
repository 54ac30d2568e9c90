"""Sketches of gradients.

A sketch holds, for each parameter's gradient, a fixed number of sums of its elements under random signs. It is linear:
the sketch of a difference is the difference of the sketches. It preserves inner products, and therefore lengths, up to
a relative error of sqrt(2 / columns) (Charikar, Chen, Farach-Colton 2002, "Finding frequent items in data streams"; the
AMS sketch of Alon, Matias, Szegedy 1996).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

__all__ = ["Sketcher"]

# Minimum and maximum number of sums for each parameter, and the approximate number for all parameters together.
LEAST_COLUMNS, MOST_COLUMNS, ALL_COLUMNS = 64, 8192, 2**20
_SEED = 0
# An element of a gradient smaller than this part of the nonzero ones' root mean square is a rounding error.
TINY = 2.0**-12


class Sketcher:
    """A sketcher of a model's gradients. Its signs are the same in every process with the same device.

    `names` are those of the parameters, `columns` holds each one's slice of a sketch.
    """

    def __init__(self, model: nn.Module) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        self.names = tuple(name for name, _ in named)
        most = _prime_up_to(min(MOST_COLUMNS, max(LEAST_COLUMNS, ALL_COLUMNS // max(1, len(named)))))
        widths = [min(_numbers(parameter).numel(), most) for parameter in self._parameters]
        ends = torch.tensor([0, *widths]).cumsum(0).tolist()
        self.columns = tuple(slice(start, end) for start, end in pairwise(ends))
        self._signs = [
            self._signs_of(parameter, width) for parameter, width in zip(self._parameters, widths, strict=True)
        ]

    @torch.no_grad()
    def __call__(self, scale: float | torch.Tensor = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (sketch, number of noticeable elements of each parameter) of the gradients, divided by `scale`."""
        sketches, counts = [], []
        for parameter, columns, signs in zip(self._parameters, self.columns, self._signs, strict=True):
            gradient = parameter.grad
            if gradient is None:
                sketches.append(torch.zeros(columns.stop - columns.start, device=parameter.device))
                counts.append(torch.zeros((), dtype=torch.int64, device=parameter.device))
                continue
            sketches.append(_sums(_numbers(_dense(gradient)) / scale, signs, columns.stop - columns.start))
            counts.append(_noticeable(_numbers(_dense(gradient))))
        return torch.cat(sketches).cpu(), torch.stack(counts).cpu()

    def parameters_of(self, columns: Sequence[int]) -> list[int]:
        """Returns the indices of the parameters that these columns belong to."""
        return [i for i, own in enumerate(self.columns) if any(own.start <= c < own.stop for c in columns)]

    def _signs_of(self, parameter: nn.Parameter, width: int) -> torch.Tensor | None:
        """Returns +1 or -1 for each element, int8; None if every element is kept."""
        count = _numbers(parameter).numel()
        if count == width:
            return None
        generator = torch.Generator(parameter.device).manual_seed(_SEED)
        signs = torch.randint(0, 2, (count,), generator=generator, device=parameter.device, dtype=torch.int8)
        return signs.mul_(2).sub_(1)


def _sums(gradient: torch.Tensor, signs: torch.Tensor | None, width: int) -> torch.Tensor:
    flat = gradient.reshape(-1).float()
    if signs is None:
        return flat
    padding = -flat.numel() % width
    return nn.functional.pad(flat * signs, (0, padding)).view(-1, width).sum(0)


def _noticeable(gradient: torch.Tensor) -> torch.Tensor:
    """Counts the elements that are not tiny beside the nonzero ones' root mean square.

    Tiny ones are 0 but for FP32's rounding: those of queries and keys in a sequence of one token, for example.
    """
    sizes = gradient.abs().float()
    largest = sizes.amax() if sizes.numel() else sizes.sum()
    relative = sizes / largest  # a square of what is in half may be 0
    mean_square = relative.square().sum() / relative.count_nonzero()
    return (relative > TINY * mean_square.sqrt()).sum()


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor as real numbers: a complex number becomes two."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _prime_up_to(number: int) -> int:
    """Returns the largest prime up to `number`: elements a fixed distance apart then fall into different sums."""
    return next(n for n in range(number, 1, -1) if all(n % divisor for divisor in range(2, math.isqrt(n) + 1)))
