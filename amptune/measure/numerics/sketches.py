"""Sketches of gradients.

A sketch holds, for each parameter's gradient, a fixed number of sums of its elements under random signs. It is linear:
the sketch of a difference is the difference of the sketches. It preserves inner products, and therefore lengths, up to
a relative error of sqrt(2 / columns) (Charikar, Chen, Farach-Colton 2002, "Finding frequent items in data streams"; the
AMS sketch of Alon, Matias, Szegedy 1996).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise

import torch
from torch import nn

__all__ = ["Sketcher"]

# Minimum and maximum number of sums for each parameter, and the approximate number for all parameters together.
LEAST_COLUMNS, MOST_COLUMNS, ALL_COLUMNS = 64, 8192, 2**20
_SEED = 0
# Gradients of one size are sketched together, up to so many elements.
MOST_TOGETHER = ALL_COLUMNS
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
        self._most = _prime_up_to(min(MOST_COLUMNS, max(LEAST_COLUMNS, ALL_COLUMNS // max(1, len(named)))))
        counts = [_numbers(parameter).numel() for parameter in self._parameters]
        ends = torch.tensor([0, *(min(count, self._most) for count in counts)]).cumsum(0).tolist()
        self.columns = tuple(slice(start, end) for start, end in pairwise(ends))
        self._alike = _of_one_size(counts, [parameter.device for parameter in self._parameters])
        self._signs = [self._signs_of(counts[group[0]], self._parameters[group[0]].device) for group in self._alike]

    @torch.no_grad()
    def __call__(
        self, scale: float | torch.Tensor = 1.0, held: Collection[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (sketch, number of noticeable elements of each parameter) of the gradients, divided by `scale`.

        Those of parameters whose id is not `held` count as 0; None: all are.
        """
        sketches: dict[int, torch.Tensor] = {}
        counts: dict[int, torch.Tensor] = {}
        for group, signs in zip(self._alike, self._signs, strict=True):
            rows = torch.stack([_flat_gradient(self._parameters[i], held) for i in group])
            sketches |= zip(group, _sums(rows, signs, self._most), strict=True)
            counts |= zip(group, _noticeable(rows), strict=True)
        places = range(len(self._parameters))
        sketch = torch.cat([sketches[i] for i in places]) / scale
        return sketch.cpu(), torch.stack([counts[i] for i in places]).cpu()

    def parameters_of(self, columns: Sequence[int]) -> list[int]:
        """Returns the indices of the parameters that these columns belong to."""
        return [i for i, own in enumerate(self.columns) if any(own.start <= c < own.stop for c in columns)]

    def _signs_of(self, count: int, device: torch.device) -> torch.Tensor | None:
        """Returns +1 or -1 for each of so many elements, int8; None if every element is kept."""
        if count <= self._most:
            return None
        generator = torch.Generator(device).manual_seed(_SEED)
        signs = torch.randint(0, 2, (count,), generator=generator, device=device, dtype=torch.int8)
        return signs.mul_(2).sub_(1)


def _of_one_size(counts: Sequence[int], devices: Sequence[torch.device]) -> list[list[int]]:
    """Returns groups of indices of equal count and device, which are sketched together: a step has hundreds.

    A group has at most `MOST_TOGETHER` elements, or one member, since the gradients are copied.
    """
    groups: dict[tuple[int, torch.device, int], list[int]] = {}
    seen: Counter[tuple[int, torch.device]] = Counter()
    for i, (count, device) in enumerate(zip(counts, devices, strict=True)):
        fit = max(1, MOST_TOGETHER // max(1, count))
        groups.setdefault((count, device, seen[count, device] // fit), []).append(i)
        seen[count, device] += 1
    return list(groups.values())


def _flat_gradient(parameter: nn.Parameter, held: Collection[int] | None) -> torch.Tensor:
    if parameter.grad is None or (held is not None and id(parameter) not in held):
        return torch.zeros(_numbers(parameter).numel(), device=parameter.device)
    return _numbers(_dense(parameter.grad)).reshape(-1).float()


def _sums(rows: torch.Tensor, signs: torch.Tensor | None, width: int) -> torch.Tensor:
    """Returns the sums of each row, which is one gradient; all of its elements without `signs`."""
    if signs is None:
        return rows
    padding = -rows.shape[1] % width
    return nn.functional.pad(rows * signs, (0, padding)).view(len(rows), -1, width).sum(1)


def _noticeable(rows: torch.Tensor) -> torch.Tensor:
    """Counts the elements of each row that are not tiny beside the nonzero ones' root mean square.

    Tiny ones are 0 but for FP32's rounding: those of queries and keys in a sequence of one token, for example.
    """
    sizes = rows.abs()
    largest = sizes.amax(1, keepdim=True) if sizes.numel() else sizes.sum(1, keepdim=True)
    relative = sizes / largest  # a square of what is in half may be 0
    mean_square = relative.square().sum(1, keepdim=True) / relative.count_nonzero(1)[:, None]
    return (relative > TINY * mean_square.sqrt()).sum(1)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor as real numbers: a complex number becomes two."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _prime_up_to(number: int) -> int:
    """Returns the largest prime up to `number`: elements a fixed distance apart then fall into different sums."""
    return next(n for n in range(number, 1, -1) if all(n % divisor for divisor in range(2, math.isqrt(n) + 1)))
