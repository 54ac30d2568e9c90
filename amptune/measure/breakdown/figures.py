"""Computation of figures per step from profiler traces; pure functions, tested with recordings of real steps."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from amptune.hardware.machine import MIB
from amptune.measure.breakdown.operation_kinds import (
    bytes_cast,
    groups_and_channels,
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
    GroupedConvolution,
    LayoutTime,
    ModuleTime,
    OperationTime,
    ProductTime,
    StepProfile,
    UnalignedMatmul,
)

__all__ = ["distil"]

_OPTIMIZER = "Optimizer.step#"
_Kind = TypeVar("_Kind", ModuleTime, CastTime, LayoutTime, UnalignedMatmul, GroupedConvolution, OperationTime)
_ProductKind = Literal["matmul", "convolution"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """A piece of the device's time: a kernel, or on a CPU an operation without its inner ones."""

    name: str
    op: Op | None
    module: str | None
    ms: float
    compute: bool = True


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
    cut_short: bool = False,
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
        cut_short=cut_short,
        **tally.figures(steps),
    )


class _Tally:
    """The sums over all steps. Figures that need GPU kernels stay empty on a CPU."""

    def __init__(self, device: Literal["cuda", "cpu"]) -> None:
        self._on_gpu = device == "cuda"
        self._sums = _Sums()
        self._plain_ms: dict[tuple[str | None, _ProductKind], dict[str, float]] = defaultdict(dict)
        self._optimizer_ms = self._optimizer_kernels = 0.0

    def add(self, trace: StepTrace, step_ms: float) -> None:
        nesting = Nesting(trace.ops)
        self._count_ops(trace.ops, nesting)
        for work in _on_device(trace, nesting) if self._on_gpu else _on_host(trace, nesting, step_ms):
            self._add_work(work, nesting)

    def _count_ops(self, ops: Iterable[Op], nesting: Nesting) -> None:
        """Counts casts and unaligned products once per operation, whatever runs inside."""
        for op in ops:
            if is_cast(op):
                self._sums.add(CastTime, {"module": nesting.module_of(op)}, ms=0, count=1, mib=bytes_cast(op) / MIB)
            elif self._on_gpu and unaligned_dims(op):
                self._sums.add(UnalignedMatmul, _unaligned(op, nesting.module_of(op)), ms=0, count=1)

    def _add_work(self, work: _Work, nesting: Nesting) -> None:
        if nesting.nearest(work.op, lambda op: op.name.startswith(_OPTIMIZER)):
            self._optimizer_ms += work.ms
            self._optimizer_kernels += self._on_gpu and work.compute
            return
        about: dict[str, Any] = {"module": work.module}
        self._sums.add(ModuleTime, about, ms=work.ms)
        copy = nesting.nearest(work.op, lambda op: op.name == "aten::copy_")
        convolution = nesting.nearest(work.op, is_convolution)
        if copy is not None and is_cast(copy):
            self._sums.add(CastTime, about, ms=work.ms, count=0, mib=0)
        elif (copy is not None and convolution is not None) or kind_of_kernel(work.name) == "layout":
            channels = None if convolution is None else groups_and_channels(convolution)[1]
            about |= {"kernel": _short(work.name), "channels": channels}
            self._sums.add(LayoutTime, about, ms=work.ms, count=1)
        elif nesting.nearest(work.op, is_product) is None and kind_of_kernel(work.name) != "tensor-core":
            if work.op is not None and work.op.name.startswith("aten::"):
                about |= {"operation": kind_of_operation(work.op)}
                self._sums.add(OperationTime, about, ms=work.ms, count=1)
        elif self._on_gpu:
            self._add_product(work, nesting, convolution)

    def _add_product(self, work: _Work, nesting: Nesting, convolution: Op | None) -> None:
        kind = kind_of_kernel(work.name)
        plain_ms = work.ms if kind == "plain" else 0.0
        if kind in ("tensor-core", "plain"):
            of: _ProductKind = "matmul" if convolution is None else "convolution"
            mine, name = self._plain_ms[work.module, of], _short(work.name)
            mine[name] = mine.get(name, 0.0) + plain_ms
        matmul = nesting.nearest(work.op, is_matmul)
        if convolution is not None:
            groups, channels = groups_and_channels(convolution)
            if groups > 1:
                about = {"module": work.module, "groups": groups, "channels": channels}
                self._sums.add(GroupedConvolution, about, ms=work.ms, plain_ms=plain_ms)
        elif matmul is not None and unaligned_dims(matmul):
            self._sums.add(UnalignedMatmul, _unaligned(matmul, work.module), ms=work.ms, count=0)

    def figures(self, steps: int) -> dict[str, Any]:
        return {
            "optimizer_ms": self._optimizer_ms / steps,
            "optimizer_kernels": self._optimizer_kernels / steps,
            "modules": self._sums.per_step(ModuleTime, steps),
            "casts": self._sums.per_step(CastTime, steps),
            "layouts": self._sums.per_step(LayoutTime, steps),
            "unaligned": self._sums.per_step(UnalignedMatmul, steps),
            "grouped": self._sums.per_step(GroupedConvolution, steps),
            "products": tuple(sorted(self._products(steps), key=lambda product: -product.plain_ms)),
            "operations": self._sums.per_step(OperationTime, steps),
        }

    def _products(self, steps: int) -> Iterator[ProductTime]:
        for (module, kind), plain_ms in self._plain_ms.items():
            slowest = max(plain_ms, key=plain_ms.__getitem__) if any(plain_ms.values()) else None
            yield ProductTime(module=module, kind=kind, plain_ms=sum(plain_ms.values()) / steps, slowest_plain=slowest)


def _unaligned(op: Op, module: str | None) -> dict[str, Any]:
    """Returns what the record of an unaligned product is about."""
    return {
        "module": module,
        "op": op.name.removeprefix("aten::"),
        **dict(zip("mnk", unaligned_dims(op) or (), strict=True)),
    }


def _on_device(trace: StepTrace, nesting: Nesting) -> Iterator[_Work]:
    for kernel in trace.kernels:
        op = nesting.op(kernel.op)
        yield _Work(name=kernel.name, op=op, module=nesting.module_of(op), ms=kernel.us / 1000, compute=kernel.compute)


def _on_host(trace: StepTrace, nesting: Nesting, step_ms: float) -> Iterator[_Work]:
    """Yields each operation's own time, scaled to the unprofiled step: the profiler slows all operations."""
    start_us = min(op.start_us for op in trace.ops)
    end_us = max(op.start_us + op.us for op in trace.ops)
    scale = step_ms / (end_us - start_us)
    for op in trace.ops:
        yield _Work(name=op.name, op=op, module=nesting.module_of(op), ms=nesting.own_us(op) * scale)


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
