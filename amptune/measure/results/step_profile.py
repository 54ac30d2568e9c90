"""Profile of the time of one training step, as a value; findings about speed are made from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "ALIGNED",
    "CastTime",
    "LayoutTime",
    "ModuleTime",
    "OperationTime",
    "ProductTime",
    "StepProfile",
    "UnalignedMatmul",
]

# Tensor cores want the sizes of half-precision products in multiples of this.
ALIGNED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTime:
    """The time of a module's own operations, forward and backward, without those of its children.

    Here and below, `module` is the path of the innermost module whose forward issued the work: `""` for the model's own
    forward, None for work outside all modules (the loss, gradient accumulation).
    """

    module: str | None
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CastTime:
    """Copies from one floating-point type to another; `mib` counts the data that they read and write."""

    module: str | None
    count: float
    ms: float
    mib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTime:
    """Copies that only change a tensor's memory layout, or pad its channels, around one module's convolutions.

    `channels` are the convolution's input channels, None if the copy was not for a convolution.
    """

    module: str | None
    kernel: str
    channels: int | None
    count: float
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnalignedMatmul:
    """A half-precision product (m, k) × (k, n) with a dimension that is not a multiple of `ALIGNED`."""

    module: str | None
    op: str
    m: int
    n: int
    k: int
    count: float
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTime:
    """Matrix products or convolutions of one module, with their time without tensor cores.

    Kernels with unknown names are not in it. `slowest_plain` is the slowest kernel without tensor cores. `in_half` is
    None if the types of their inputs are unknown.
    """

    module: str | None
    kind: Literal["matmul", "convolution"]
    plain_ms: float
    slowest_plain: str | None = None
    in_half: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationTime:
    """One kind of operation in one module, forward and backward, except products, casts and optimizer steps.

    `operation` is PyTorch's name without its variant: `batch_norm` for `aten::native_batch_norm_backward`.
    """

    module: str | None
    operation: str
    count: float
    ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """Means per training step, over `steps` profiled steps. Lists are sorted by time, the longest first.

    `step_ms` (the time of a step in a row of steps) and `host_ms` (the time the host needs to issue a step to an idle
    device) are timed without the profiler, which slows the host. `gpu_busy_ms` is the time in which any kernel or copy
    runs; the profiler does not change it. On a CPU the figures of a GPU are None or empty, and times of operations are
    scaled to `step_ms`. `attributed` is False if modules could not be watched (compiled models); every `module` is then
    None.
    """

    device: Literal["cuda", "cpu"]
    steps: int
    step_ms: float
    host_ms: float | None = None
    gpu_busy_ms: float | None = None
    kernels: float = 0.0
    synchronizations: float = 0.0
    optimizer_ms: float = 0.0
    optimizer_kernels: float = 0.0
    modules: tuple[ModuleTime, ...] = ()
    casts: tuple[CastTime, ...] = ()
    layouts: tuple[LayoutTime, ...] = ()
    unaligned: tuple[UnalignedMatmul, ...] = ()
    products: tuple[ProductTime, ...] = ()
    operations: tuple[OperationTime, ...] = ()
    attributed: bool = True

    @property
    def gpu_idle_ms(self) -> float | None:
        """Time of a step in which the GPU is idle."""
        return None if self.gpu_busy_ms is None else max(0.0, self.step_ms - self.gpu_busy_ms)

    @property
    def cast_ms(self) -> float:
        return sum(cast.ms for cast in self.casts)

    @property
    def cast_count(self) -> float:
        return sum(cast.count for cast in self.casts)

    @property
    def layout_ms(self) -> float:
        return sum(layout.ms for layout in self.layouts)
