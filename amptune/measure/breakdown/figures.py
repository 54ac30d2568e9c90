"""Computation of figures per step from profiler traces; pure functions, tested with recordings of real steps."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from amptune.hardware.machine import MIB
from amptune.measure.breakdown.operation_kinds import (
    bytes_cast,
    channels_of,
    in_half,
    is_cast,
    is_convolution,
    is_matmul,
    is_product,
    kind_of_kernel,
    kind_of_operation,
    unaligned_dims,
)
from amptune.measure.breakdown.step_trace import Kernel, Nesting, Op, StepTrace
from amptune.measure.results.step_profile import (
    CastTime,
    LayoutTime,
    ModuleTime,
    OperationTime,
    ProductTime,
    StepProfile,
    UnalignedMatmul,
)

__all__ = ["distil"]

_OPTIMIZER = "Optimizer.step#"
_Kind = TypeVar("_Kind", ModuleTime, CastTime, LayoutTime, UnalignedMatmul, OperationTime)
_ProductKind = Literal["matmul", "convolution"]


class _Sums:
    """Sums of figures over all steps, for each kind of record and all that the record is about."""

    def __init__(self) -> None:
        self._sums: dict[tuple[type, tuple[tuple[str, Any], ...]], dict[str, float]] = {}

    def add(self, kind: type[_Kind], about: Mapping[str, Any], **figures: float) -> None:
        mine = self._sums.setdefault((kind, tuple(about.items())), {})
        for name, figure in figures.items():
            mine[name] = mine.get(name, 0.0) + figure

    def per_step(self, kind: type[_Kind], steps: int) -> tuple[_Kind, ...]:
        """Returns the records of one kind with means per step, the longest time first."""
        found = []
        for (own, about), sums in self._sums.items():
            if own is kind:
                fields: dict[str, Any] = {**dict(about), **{name: total / steps for name, total in sums.items()}}
                found.append(kind(**fields))
        return tuple(sorted(found, key=lambda record: -record.ms))


def distil(
    traces: Sequence[StepTrace],
    *,
    device: Literal["cuda", "cpu"],
    step_ms: float,
    host_ms: float | None = None,
    attributed: bool = True,
) -> StepProfile:
    """Returns the figures of the profiled steps, one trace each; `step_ms` and `host_ms` were timed unprofiled."""
    tally = _Tally(device)
    for trace in traces:
        tally.add(trace, step_ms)
    steps = len(traces)
    on_gpu = device == "cuda"
    return StepProfile(
        device=device,
        steps=steps,
        step_ms=step_ms,
        host_ms=host_ms if on_gpu else None,
        gpu_busy_ms=sum(_busy_us(trace.kernels) for trace in traces) / steps / 1000 if on_gpu else None,
        kernels=sum(kernel.compute for trace in traces for kernel in trace.kernels) / steps,
        synchronizations=sum(trace.synchronizations for trace in traces) / steps,
        attributed=attributed,
        **tally.figures(steps),
    )


class _Tally:
    """The sums over all steps. Figures that need GPU kernels stay empty on a CPU."""

    def __init__(self, device: Literal["cuda", "cpu"]) -> None:
        self._on_gpu = device == "cuda"
        self._sums = _Sums()
        self._plain_ms: dict[tuple[str | None, _ProductKind, bool | None], dict[str, float]] = defaultdict(dict)
        self._optimizer_ms = self._optimizer_kernels = 0.0

    def add(self, trace: StepTrace, step_ms: float) -> None:
        nesting = Nesting(trace.ops)
        self._count_ops(trace.ops, nesting)
        of_kernels = ((kernel, nesting.op(kernel.op)) for kernel in trace.kernels)
        for work, op in of_kernels if self._on_gpu else _on_host(trace, nesting, step_ms):
            self._add_work(work, op, nesting)

    def _count_ops(self, ops: Iterable[Op], nesting: Nesting) -> None:
        """Counts casts and unaligned products once per operation, whatever runs inside."""
        for op in ops:
            if is_cast(op):
                self._sums.add(CastTime, {"module": nesting.module_of(op)}, ms=0, count=1, mib=bytes_cast(op) / MIB)
            elif self._on_gpu and unaligned_dims(op):
                self._sums.add(UnalignedMatmul, _unaligned(op, nesting.module_of(op)), ms=0, count=1)

    def _add_work(self, work: Kernel, op: Op | None, nesting: Nesting) -> None:
        ms = work.us / 1000
        if nesting.nearest(op, lambda one: one.name.startswith(_OPTIMIZER)):
            self._optimizer_ms += ms
            self._optimizer_kernels += self._on_gpu and work.compute
            return
        about: dict[str, Any] = {"module": nesting.module_of(op)}
        self._sums.add(ModuleTime, about, ms=ms)
        copy = nesting.nearest(op, lambda one: one.name == "aten::copy_")
        convolution, product = nesting.nearest(op, is_convolution), nesting.nearest(op, is_product)
        kind = kind_of_kernel(work.name)
        if copy is not None and is_cast(copy):
            self._sums.add(CastTime, about, ms=ms, count=0, mib=0)
        elif (copy is not None and convolution is not None) or kind == "layout":
            channels = None if convolution is None else channels_of(convolution)
            about |= {"kernel": _short(work.name), "channels": channels}
            self._sums.add(LayoutTime, about, ms=ms, count=1)
        elif product is None and kind != "tensor-core":
            if op is not None and op.name.startswith("aten::"):
                about |= {"operation": kind_of_operation(op)}
                self._sums.add(OperationTime, about, ms=ms, count=1)
        elif self._on_gpu:
            self._add_product(work, about["module"], product, nesting)

    def _add_product(self, work: Kernel, module: str | None, product: Op | None, nesting: Nesting) -> None:
        kind, ms = kind_of_kernel(work.name), work.us / 1000
        convolution, matmul = nesting.nearest(product, is_convolution), nesting.nearest(product, is_matmul)
        plain_ms = ms if kind == "plain" else 0.0
        if kind in ("tensor-core", "plain"):
            of: _ProductKind = "matmul" if convolution is None else "convolution"
            mine = self._plain_ms[module, of, in_half(nesting.around(product))]
            name = _short(work.name)
            mine[name] = mine.get(name, 0.0) + plain_ms
        if convolution is None and matmul is not None and unaligned_dims(matmul):
            self._sums.add(UnalignedMatmul, _unaligned(matmul, module), ms=ms, count=0)

    def figures(self, steps: int) -> dict[str, Any]:
        return {
            "optimizer_ms": self._optimizer_ms / steps,
            "optimizer_kernels": self._optimizer_kernels / steps,
            "modules": self._sums.per_step(ModuleTime, steps),
            "casts": self._sums.per_step(CastTime, steps),
            "layouts": self._sums.per_step(LayoutTime, steps),
            "unaligned": self._sums.per_step(UnalignedMatmul, steps),
            "products": tuple(sorted(self._products(steps), key=lambda product: -product.plain_ms)),
            "operations": self._sums.per_step(OperationTime, steps),
        }

    def _products(self, steps: int) -> Iterator[ProductTime]:
        for (module, kind, is_half), plain_ms in self._plain_ms.items():
            slowest = max(plain_ms, key=plain_ms.__getitem__) if any(plain_ms.values()) else None
            ms = sum(plain_ms.values()) / steps
            yield ProductTime(module=module, kind=kind, plain_ms=ms, slowest_plain=slowest, in_half=is_half)


def _unaligned(op: Op, module: str | None) -> dict[str, Any]:
    """Returns what the record of an unaligned product is about."""
    return {
        "module": module,
        "op": op.name.removeprefix("aten::"),
        **dict(zip("mnk", unaligned_dims(op) or (), strict=True)),
    }


def _on_host(trace: StepTrace, nesting: Nesting, step_ms: float) -> Iterator[tuple[Kernel, Op]]:
    """Yields each operation as a kernel of its own time, scaled to the unprofiled step: the profiler slows them all."""
    start_us = min(op.start_us for op in trace.ops)
    end_us = max(op.start_us + op.us for op in trace.ops)
    scale = step_ms / (end_us - start_us)
    for op in trace.ops:
        yield Kernel(name=op.name, start_us=op.start_us, us=1000 * scale * nesting.own_us(op), op=op.id), op


def _busy_us(kernels: Iterable[Kernel]) -> float:
    """Returns the time in which at least one kernel runs, on any stream."""
    busy_us, until_us = 0.0, -math.inf
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_us):
        end_us = kernel.start_us + kernel.us
        busy_us += max(0.0, end_us - max(kernel.start_us, until_us))
        until_us = max(until_us, end_us)
    return busy_us


def _short(kernel: str) -> str:
    """Returns the name without return type, namespaces and template arguments."""
    bare = re.sub(r"[<(].*", "", kernel.removeprefix("void "))
    return bare.rsplit("::", 1)[-1]
