"""Batches whose loss is not finite, and what they share: a batch without labels has a mean over nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from amptune.changes.tensor_tree import stored_in, tensors_in

__all__ = ["broken_in_words"]


def broken_in_words(batches: Sequence[Any], loss_of: Callable[[Any], float]) -> str:
    """Returns which batches have a loss that is not finite, and what these alone share; "" if all or none have."""
    broken = [i for i, batch in enumerate(batches) if not math.isfinite(loss_of(batch))]
    if not broken or len(broken) == len(batches):
        return ""
    sound = [batch for i, batch in enumerate(batches) if i not in broken]
    shared = next(_shared([batches[i] for i in broken], sound), "")
    named = f"{len(broken)} of {len(batches)} batches, the first of them number {broken[0] + 1}"
    return f"{named}, have a loss that is not finite before anything was trained{shared and f': {shared}'}"


def _shared(broken: Sequence[Any], sound: Sequence[Any]) -> Iterator[str]:
    """Yields in words what holds for a tensor of every broken batch and of no sound one."""
    for at, column in enumerate(zip(*map(_tensors, broken), strict=False), 1):
        others = [tensors[at - 1] for tensors in map(_tensors, sound) if len(tensors) >= at]
        for holds, words in ((_is_empty, "is empty"), (_is_broken, "holds a value that is not finite")):
            if all(map(holds, column)) and not any(map(holds, others)):
                yield f"in these alone tensor {at} of the batch {words}"
        if all(map(_is_constant, column)) and not any(map(_is_constant, others)):
            values = {one.flatten()[0].item() for one in column}
            what = f"are {values.pop()}" if len(values) == 1 else "are one and the same"
            yield f"in these alone all values of tensor {at} of the batch {what}"


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [stored_in(tensor)[-1] for tensor in tensors_in(batch)]


def _is_empty(tensor: torch.Tensor) -> bool:
    return not tensor.numel()


def _is_broken(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())


def _is_constant(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all())
