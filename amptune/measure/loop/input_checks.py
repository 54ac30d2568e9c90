"""Checks of a workload's batches before time is spent on measuring: their size and shapes, and what a loader has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import torch

from amptune.changes.tensor_tree import tensors_in
from amptune.errors import AmptuneError, TargetError
from amptune.measure.bench.bench import Bench
from amptune.measure.loop.feed import Epochs, require_size
from amptune.policy.findings import Finding
from amptune.workload.user_errors import user_code
from amptune.workload.workload import Workload

__all__ = ["NO_LOADER", "LoaderFacts", "changing_shapes", "require_sound_input"]

# So many shapes are usual: that of every batch, and that of the last.
USUAL_SHAPES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """Facts about a loader: the samples of its data set, if they are known, and whether it is a DataLoader."""

    samples: int | None = None
    is_data_loader: bool = False


NO_LOADER = LoaderFacts()


def require_sound_input(bench: Bench) -> LoaderFacts:
    """Returns what is known of the loader: no batch can be larger than its data set.

    Raises `TargetError` for batches of another size, and for an empty loader; `UserCodeError` if a loader raises.
    """
    workload = bench.workload
    drawn = bench.drawn.sequence(workload.batch_size)[0]
    _require_samples(workload, drawn)
    if workload.loader is None:
        return NO_LOADER
    with closing(Epochs(workload, workload.batch_size, torch.device("cpu"))) as epochs:
        require_size(workload.batch_size, next(epochs), drawn)
        return LoaderFacts(samples=epochs.samples, is_data_loader=epochs.data_loader is not None)


def changing_shapes(bench: Bench) -> Iterator[Finding]:
    """Yields a finding if batches have many shapes, as texts have that are padded one batch at a time."""
    batches = bench.drawn.sequence(bench.workload.batch_size)
    count = len({tuple(tuple(tensor.shape) for tensor in tensors_in(batch)) for batch in batches})
    if count > USUAL_SHAPES:
        message = (
            f"{len(batches)} batches have {count} different shapes: a CUDA graph is recorded for each shape, and "
            "torch.compile compiles again when shapes begin to change; all policies were timed on batches like these. "
            "Fewer lengths (padding to a multiple of 64, batches of similar lengths) may let both pay"
        )
        yield Finding(code="changing-shapes", message=message, figures={"shapes": count, "batches": len(batches)})


def _require_samples(workload: Workload, batch: object) -> None:
    """Raises `TargetError` if all tensors have one length along the samples that is not n, and does not grow with n.

    A length that grows is that of packed samples, such as the tokens of n texts.
    """
    n = workload.batch_size
    axis = workload.batch_dim
    length = _length_of(batch, axis)
    if length is None or any(n in tensor.shape for tensor in tensors_in(batch)):
        return
    try:
        with user_code(f"batch({2 * n})"):
            more = _length_of(workload.batch(2 * n), axis)
    except AmptuneError:
        more = None
    if more != 2 * length:
        raise TargetError(
            f"batch({n}) returns {length} samples, by axis {axis} of all its tensors: throughput would count {n}; "
            f"return n samples, or say batch_size={length}, or batch_dim=… if samples lie along another axis"
        )


def _length_of(batch: object, axis: int) -> int | None:
    """Returns the length of this axis, or the last one, of all tensors; None if they differ in it."""
    lengths = {tensor.size(min(axis, tensor.ndim - 1)) for tensor in tensors_in(batch) if tensor.ndim}
    return lengths.pop() if len(lengths) == 1 else None
