"""One step as recorded by PyTorch's profiler, in plain values; read from its trace, or from a recording of one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["MODULE_RANGE", "STEP_RANGE", "Kernel", "Op", "StepTrace", "read_trace"]

# Prefix of the ranges that mark a call of a module's forward; the module's path follows.
MODULE_RANGE = "amptune.module:"
# Range of the step itself: before and after it, the profiler waits for the device too.
STEP_RANGE = "amptune.step"

_HOST = {"cpu_op", "user_annotation"}
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_WAITS = {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "hipStreamSynchronize"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation or range on the host. `types` and `shapes` describe its inputs, one entry per argument.

    `values` are its arguments that are not tensors, as text. If it is a backward operation, `forward` is the id of its
    forward operation.
    """

    id: int
    name: str
    thread: int
    start_us: float
    us: float
    types: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    values: tuple[str, ...] = ()
    forward: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """Work on the device: a kernel, or a memory copy or fill. `op` is the id of the operation that launched it."""

    name: str
    start_us: float
    us: float
    op: int | None
    compute: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One step. `synchronizations` counts the calls in which the host waited for the device."""

    ops: tuple[Op, ...]
    kernels: tuple[Kernel, ...] = ()
    synchronizations: int = 0


def read_trace(events: Sequence[Mapping[str, Any]]) -> StepTrace:
    """Reads the step from `traceEvents` of a Chrome trace by `torch.profiler.profile.export_chrome_trace`."""
    forward = _forward_ids(events)
    steps = [event for event in events if event.get("name") == STEP_RANGE and event.get("cat") == "user_annotation"]
    return StepTrace(
        ops=tuple(_op(event, forward) for event in events if event.get("cat") in _HOST and "dur" in event),
        kernels=tuple(_kernel(event) for event in events if event.get("cat") in _DEVICE),
        synchronizations=sum(event.get("name") in _WAITS and _within(event, steps) for event in events),
    )


def _within(event: Mapping[str, Any], ranges: Sequence[Mapping[str, Any]]) -> bool:
    return any(one["ts"] <= event["ts"] < one["ts"] + one["dur"] for one in ranges)


def _forward_ids(events: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, Any], int]:
    """Maps (thread, start) of a backward operation to the id of its forward one, by the profiler's links."""
    ids = {_place(event): event["args"]["External id"] for event in _host_ops(events)}
    links = [event for event in events if event.get("cat") == "fwdbwd"]
    sources = {link["id"]: ids.get(_place(link)) for link in links if link["ph"] == "s"}
    return {
        _place(link): source for link in links if link["ph"] == "f" and (source := sources.get(link["id"])) is not None
    }


def _host_ops(events: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    return (event for event in events if event.get("cat") == "cpu_op" and "External id" in event.get("args", {}))


def _place(event: Mapping[str, Any]) -> tuple[Any, Any]:
    return event["tid"], event["ts"]


def _op(event: Mapping[str, Any], forward: Mapping[tuple[Any, Any], int]) -> Op:
    args = event.get("args", {})
    return Op(
        id=args.get("External id", -1),
        name=event["name"],
        thread=event["tid"],
        start_us=float(event["ts"]),
        us=float(event["dur"]),
        types=tuple(args.get("Input type", ())),
        shapes=tuple(map(_shape, args.get("Input Dims", ()))),
        values=tuple(args.get("Concrete Inputs", ())),
        forward=forward.get(_place(event)),
    )


def _shape(dims: Sequence[Any]) -> tuple[int, ...]:
    """Returns the shape; empty for a list of tensors, whose list of shapes is not used."""
    return tuple(dims) if all(isinstance(dim, int) for dim in dims) else ()


def _kernel(event: Mapping[str, Any]) -> Kernel:
    return Kernel(
        name=event["name"],
        start_us=float(event["ts"]),
        us=float(event["dur"]),
        op=event.get("args", {}).get("External id"),
        compute=event["cat"] == "kernel",
    )
