"""Computation of figures per step from profiler traces; pure functions, tested with recordings of real steps."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

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
_MIB = 2**20

_Key = TypeVar("_Key", bound=Hashable)
_Product = tuple[str | None, Literal["matmul", "convolution"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """A piece of the device's time: a kernel, or on a CPU an operation without its inner ones."""

    name: str
    op: Op | None
    module: str | None
    ms: float
    compute: bool = True


class _Sums(Generic[_Key]):
    """Sums of several figures for each key; the first figure is a time in ms."""

    def __init__(self) -> None:
        self._sums: dict[_Key, list[float]] = {}

    def add(self, key: _Key, *figures: float) -> None:
        mine = self._sums.setdefault(key, [0.0] * len(figures))
        for i, figure in enumerate(figures):
            mine[i] += figure

    def per_step(self, steps: int) -> list[tuple[_Key, list[float]]]:
        """Returns means per step, the longest time first."""
        longest_first = sorted(self._sums.items(), key=lambda item: -item[1][0])
        return [(key, [figure / steps for figure in figures]) for key, figures in longest_first]


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
        self._modules: _Sums[str | None] = _Sums()
        self._casts: _Sums[str | None] = _Sums()
        self._layouts: _Sums[tuple[str | None, str, int | None]] = _Sums()
        self._unaligned: _Sums[tuple[str | None, str, int, int, int]] = _Sums()
        self._grouped: _Sums[tuple[str | None, int, int]] = _Sums()
        self._products: _Sums[_Product] = _Sums()
        self._plain: dict[_Product, _Sums[str]] = defaultdict(_Sums)
        self._operations: _Sums[tuple[str | None, str]] = _Sums()
        self._optimizer: _Sums[None] = _Sums()

    def add(self, trace: StepTrace, step_ms: float) -> None:
        nesting = Nesting(trace.ops)
        self._count_ops(trace.ops, nesting)
        for work in _on_device(trace, nesting) if self._on_gpu else _on_host(trace, nesting, step_ms):
            self._add_work(work, nesting)

    def _count_ops(self, ops: Iterable[Op], nesting: Nesting) -> None:
        """Counts casts and unaligned products once per operation, whatever runs inside."""
        for op in ops:
            if is_cast(op):
                self._casts.add(nesting.module_of(op), 0.0, 1, bytes_cast(op) / _MIB)
            elif self._on_gpu and (dims := unaligned_dims(op)):
                self._unaligned.add((nesting.module_of(op), _plain_name(op), *dims), 0.0, 1)

    def _add_work(self, work: _Work, nesting: Nesting) -> None:
        if nesting.nearest(work.op, lambda op: op.name.startswith(_OPTIMIZER)):
            self._optimizer.add(None, work.ms, work.compute)
            return
        self._modules.add(work.module, work.ms)
        copy = nesting.nearest(work.op, lambda op: op.name == "aten::copy_")
        convolution = nesting.nearest(work.op, is_convolution)
        if copy is not None and is_cast(copy):
            self._casts.add(work.module, work.ms, 0, 0)
        elif (copy is not None and convolution is not None) or kind_of_kernel(work.name) == "layout":
            channels = None if convolution is None else groups_and_channels(convolution)[1]
            self._layouts.add((work.module, _short(work.name), channels), work.ms, 1)
        elif nesting.nearest(work.op, is_product) is None and kind_of_kernel(work.name) != "tensor-core":
            self._add_operation(work)
        elif self._on_gpu:
            self._add_product(work, nesting, convolution)

    def _add_operation(self, work: _Work) -> None:
        if work.op is not None and work.op.name.startswith("aten::"):
            self._operations.add((work.module, kind_of_operation(work.op)), work.ms, 1)

    def _add_product(self, work: _Work, nesting: Nesting, convolution: Op | None) -> None:
        kind = kind_of_kernel(work.name)
        plain_ms = work.ms if kind == "plain" else 0.0
        if kind in ("tensor-core", "plain"):
            key: _Product = (work.module, "matmul" if convolution is None else "convolution")
            self._products.add(key, plain_ms)
            self._plain[key].add(_short(work.name), plain_ms)
        if convolution is not None:
            groups, channels = groups_and_channels(convolution)
            if groups > 1:
                self._grouped.add((work.module, groups, channels), work.ms, plain_ms)
            return
        matmul = nesting.nearest(work.op, is_matmul)
        if matmul is not None and (dims := unaligned_dims(matmul)):
            self._unaligned.add((work.module, _plain_name(matmul), *dims), work.ms, 0)

    def figures(self, steps: int) -> dict[str, Any]:
        optimizer_ms, optimizer_kernels = next((f for _, f in self._optimizer.per_step(steps)), (0.0, 0.0))
        return {
            "optimizer_ms": optimizer_ms,
            "optimizer_kernels": optimizer_kernels if self._on_gpu else 0.0,
            "modules": tuple(ModuleTime(module=m, ms=ms) for m, (ms,) in self._modules.per_step(steps)),
            "casts": tuple(
                CastTime(module=m, count=count, ms=ms, mib=mib) for m, (ms, count, mib) in self._casts.per_step(steps)
            ),
            "layouts": tuple(
                LayoutTime(module=m, kernel=kernel, channels=channels, count=count, ms=ms)
                for (m, kernel, channels), (ms, count) in self._layouts.per_step(steps)
            ),
            "unaligned": tuple(
                UnalignedMatmul(module=path, op=op, m=m, n=n, k=k, count=count, ms=ms)
                for (path, op, m, n, k), (ms, count) in self._unaligned.per_step(steps)
            ),
            "grouped": tuple(
                GroupedConvolution(module=m, groups=groups, channels=channels, ms=ms, plain_ms=plain_ms)
                for (m, groups, channels), (ms, plain_ms) in self._grouped.per_step(steps)
            ),
            "products": tuple(
                ProductTime(module=m, kind=kind, plain_ms=plain_ms, slowest_plain=self._slowest(m, kind))
                for (m, kind), (plain_ms,) in self._products.per_step(steps)
            ),
            "operations": tuple(
                OperationTime(module=m, operation=operation, count=count, ms=ms)
                for (m, operation), (ms, count) in self._operations.per_step(steps)
            ),
        }

    def _slowest(self, module: str | None, kind: Literal["matmul", "convolution"]) -> str | None:
        name, (ms,) = self._plain[module, kind].per_step(1)[0]
        return name if ms > 0 else None


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


def _plain_name(op: Op) -> str:
    return op.name.removeprefix("aten::")


def _short(kernel: str) -> str:
    """Returns the name without return type, namespaces and template arguments."""
    bare = re.sub(r"[<(].*", "", kernel.removeprefix("void "))
    return bare.rsplit("::", 1)[-1]
