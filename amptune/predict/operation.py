"""Operations of one training step, with their work and the bytes they move, whatever GPU runs them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

__all__ = ["KINDS", "Operation", "StepFigures", "Work"]

# matmul: matrix products, attention's too; convolution, grouped (several channels a group) and depthwise;
# recurrent: an LSTM's whole sequence; memory: all that only moves data; cast: between dtypes;
# optimizer: the update, moving weights, gradients and state.
KINDS = ("matmul", "convolution", "grouped", "depthwise", "recurrent", "memory", "cast", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of a step: its multiplications and additions, the bytes it reads and writes, its kernels.

    `layout_bytes` are those of a convolution's images, which tensor cores want channels_last. `fill` is the share of
    a tensor core's tile (64 by 64) that its shape fills. `in_half` tells its dtype. `steps` counts what must run one
    after another within it (the time steps of a recurrent layer). `odd` is a product's largest dimension that is no
    multiple of 8, and 0 without one. `fixed` is True if its size does not grow with the batch, as that of a weight's
    cast.
    """

    kind: str
    module: str
    flops: float
    bytes: float
    in_half: bool
    layout_bytes: float = 0.0
    fill: float = 1.0
    launches: float = 1.0
    steps: int = 1
    odd: int = 0
    fixed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """The operations of a step in one precision. It equals itself alone."""

    operations: tuple[Operation, ...]

    def scaled(self, factor: float) -> Work:
        """Returns the work at `factor` times the batch size."""
        return self if factor == 1 else _scaled(self, factor)


@lru_cache(maxsize=1024)
def _scaled(work: Work, factor: float) -> Work:
    return Work(operations=tuple(one if one.fixed else _grown(one, factor) for one in work.operations))


def _grown(one: Operation, factor: float) -> Operation:
    figures = {name: factor * getattr(one, name) for name in ("flops", "bytes", "layout_bytes")}
    return replace(one, **figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """A workload's step at a batch size, in FP32 and under autocast.

    `fixed_bytes` and `sample_bytes` give the peak of its tensors in FP32 and in half: fixed + batch × sample.
    `convolution_dims` are the numbers of spatial dimensions of its convolutions. `waits` counts the places where the
    model asks the device for a value. `raises` is True if autocast on CUDA refuses one of its operations.
    """

    name: str
    batch_size: int
    fp32: Work
    half: Work
    fixed_bytes: tuple[float, float]
    sample_bytes: tuple[float, float]
    convolution_dims: frozenset[int] = frozenset()
    waits: int = 0
    raises: bool = False

    def at(self, batch_size: int) -> StepFigures:
        """Returns the step at another batch size."""
        factor = batch_size / self.batch_size
        return replace(self, batch_size=batch_size, fp32=self.fp32.scaled(factor), half=self.half.scaled(factor))
