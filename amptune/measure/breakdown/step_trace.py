"""One step as recorded by PyTorch's profiler, in plain values, and how its operations nest.

It is read from the profiler's trace, or from a recording of one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["MODULE_RANGE", "STEP_RANGE", "Kernel", "Nesting", "Op", "StepTrace", "read_trace"]

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

    If it is a backward operation, `forward` is the id of its forward operation.
    """

    id: int
    name: str
    thread: int
    start_us: float
    us: float
    types: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
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
    known = [event for event in events if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})]
    ids = {_place(event): event["args"]["External id"] for event in known}
    links = [event for event in events if event.get("cat") == "fwdbwd"]
    sources = {link["id"]: ids.get(_place(link)) for link in links if link["ph"] == "s"}
    return {
        _place(link): source for link in links if link["ph"] == "f" and (source := sources.get(link["id"])) is not None
    }


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


# Times have a resolution of ns but are floats of µs since the machine started: the last digit is unreliable.
TICK_US = 0.002

_EVALUATION = "autograd::engine::evaluate_function"


class Nesting:
    """The operations of one step as trees, one or more per thread, by start and duration."""

    def __init__(self, ops: Iterable[Op]) -> None:
        self._ops = {op.id: op for op in ops}
        self._parent: dict[int, Op] = {}
        self._inner_us: dict[int, float] = defaultdict(float)
        self._nest()
        self._links = dict(self._backward_links())

    def _nest(self) -> None:
        open_ops: dict[int, list[Op]] = defaultdict(list)
        for op in sorted(self._ops.values(), key=lambda op: (op.start_us, -op.us, op.id)):
            around = open_ops[op.thread]
            while around and _end_us(around[-1]) + TICK_US < _end_us(op):
                around.pop()
            if around:
                self._parent[op.id] = around[-1]
                self._inner_us[around[-1].id] += op.us
            around.append(op)

    def _backward_links(self) -> Iterator[tuple[int, int]]:
        """Also links the engine's evaluation, which sums gradients: the profiler links only the backward function."""
        for op in self._ops.values():
            if op.forward is None:
                continue
            yield op.id, op.forward
            parent = self._parent.get(op.id)
            if parent is not None and parent.name.startswith(_EVALUATION):
                yield parent.id, op.forward

    def op(self, op_id: int | None) -> Op | None:
        return None if op_id is None else self._ops.get(op_id)

    def around(self, op: Op | None) -> Iterator[Op]:
        """Yields the operation, then the operations around it, from inside to outside."""
        while op is not None:
            yield op
            op = self._parent.get(op.id)

    def nearest(self, op: Op | None, wanted: Callable[[Op], bool]) -> Op | None:
        """Returns the first wanted operation: itself, or the innermost around it."""
        return next((one for one in self.around(op) if wanted(one)), None)

    def own_us(self, op: Op) -> float:
        """Returns the operation's time without that of the operations inside it."""
        return max(0.0, op.us - self._inner_us[op.id])

    def module_of(self, op: Op | None) -> str | None:
        """Returns the module whose forward runs the operation, or ran its forward operation; None without a module.

        The innermost module range or backward link counts. A forward that runs again inside the backward pass
        (activation checkpointing) has its own ranges.
        """
        for one in self.around(op):
            if one.name.startswith(MODULE_RANGE):
                return one.name.removeprefix(MODULE_RANGE)
            if one.id in self._links:
                return self._module_around(self.op(self._links[one.id]))
        return None

    def _module_around(self, op: Op | None) -> str | None:
        module = self.nearest(op, lambda one: one.name.startswith(MODULE_RANGE))
        return None if module is None else module.name.removeprefix(MODULE_RANGE)


def _end_us(op: Op) -> float:
    return op.start_us + op.us
