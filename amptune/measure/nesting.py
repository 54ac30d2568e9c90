"""Nesting of profiled operations, and the module that each one runs for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from amptune.measure.step_trace import MODULE_RANGE, Op

__all__ = ["Nesting"]

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
