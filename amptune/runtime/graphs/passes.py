"""Passes as a part of the loop's own autograd graph: one that the model ran and that is watched, and a replayed one."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from amptune.runtime.graphs.host_effects import DeviceState, NotRecordableError, RandomState
from amptune.runtime.graphs.proxy_weights import without_hooks
from amptune.runtime.graphs.signature import PassKind, outputs_of
from amptune.runtime.graphs.tensor_use import name_of_node, sources_among

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from amptune.runtime.graphs.capture import Recording

__all__ = ["NO_MEMORY", "ReplayedPass", "SeenPass"]

NO_MEMORY = "leaves no memory to compare it in"


@dataclass(eq=False)
class SeenPass:
    """A kind of pass that came once, and the gradients of those outputs, by place, from which backward passes began."""

    kind: PassKind
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    _of_sources: dict[int, torch.Tensor] = field(default_factory=dict)
    _passes: set[int] = field(default_factory=set)
    _has_more: bool = False
    _asks_for_source: bool = False

    def watched(self, returned: Any) -> Any:
        """Returns copies that note which outputs a backward pass starts from, but those that others are made from."""
        signature, tensors = outputs_of(returned)
        sources = sources_among(tensors)
        for place, one in enumerate(tensors):
            if one.requires_grad and place in sources:
                hooks: list[Any] = []  # which outlive the tensor
                one.register_hook(partial(self._note_source, place, weakref.ref(one), hooks))  # type: ignore[no-untyped-call]
                hooks.append(weakref.ref(one._backward_hooks))
            elif one.requires_grad:
                tensors[place] = _under_name(name_of_node(one), _Mark).apply(self, place, one)
        return signature.filled(tensors)

    def note(self, place: int, gradient: torch.Tensor) -> None:
        """Notes that the running backward pass starts from this output."""
        self.gradients[place] = gradient.detach().clone()
        self._passes.add(torch._C._current_graph_task_id())
        self._has_more |= _is_kept() or torch.is_grad_enabled()

    def _note_source(
        self, place: int, source: weakref.ref[torch.Tensor], hooks: Sequence[Any], gradient: torch.Tensor
    ) -> None:
        """Notes the gradient of an output that others are made from, and whether the loop wants it: replays lack it."""
        self._of_sources[place] = gradient
        self._passes.add(torch._C._current_graph_task_id())
        own = source()
        is_asked = own is not None and (own.retains_grad or not _reaches_leaves(own.grad_fn))
        self._asks_for_source |= is_asked or len(hooks[0]()) > 1

    def is_used(self) -> bool:
        """Returns True once a backward pass has come. It started from a source if it did from no other output."""
        self.gradients = self.gradients or dict(self._of_sources)
        self._of_sources.clear()
        return bool(self.gradients)

    def require_one_pass(self) -> None:
        """Raises `NotRecordableError` for more than one backward pass, or one that asks for what replays lack."""
        if self._has_more or len(self._passes) > 1:
            raise NotRecordableError("has several backward passes (one for each loss, retain_graph or create_graph)")
        if self._asks_for_source:
            raise NotRecordableError(
                "returns what another output is made from, with a hook on it or its gradient asked for"
            )


class _Mark(torch.autograd.Function):
    """An autograd function that copies a tensor, and notes when a backward pass reaches it."""

    @staticmethod
    def forward(ctx: Any, seen: SeenPass, place: int, output: torch.Tensor) -> torch.Tensor:
        ctx.seen, ctx.place = seen, place
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        ctx.seen.note(ctx.place, gradient)
        return None, None, gradient


class ReplayedPass:
    """One replay of a recording's forward pass for these inputs, until its backward pass is over.

    `own` are the model's own outputs, where it ran too: then `compare` is called with its gradients once a replay has
    computed others. `end` is called with a reason if a backward pass comes that was not recorded: it is the model's
    own, computed anew, and this is to be the last replay. Raises `UnusualError`.
    """

    def __init__(self, recording: Recording, inputs: Sequence[torch.Tensor], end: Callable[[str], None]) -> None:
        self.recording, self._end = recording, end
        self.own: list[torch.Tensor] | None = None
        self.compare: Callable[[Sequence[torch.Tensor | None]], None] | None = None
        self.over = self._may_come_again = False
        # Those outputs that the loop was given from which others are made, with the hooks on them.
        self._sources: dict[int, tuple[weakref.ref[torch.Tensor], dict[int, Any]]] = {}
        self._random = RandomState(recording.inputs[0].device)  # before the pass
        recording.begin(inputs)
        recording.last = weakref.ref(self)

    def outputs(self) -> Any:
        """Returns what the model returns, in new memory and connected to autograd."""
        recording = self.recording
        outputs = list(_under_name(recording.node_name, _Replay).apply(self, *recording.weights))
        for place in recording.sources:
            source = outputs[place] = outputs[place].view_as(outputs[place])  # hooks are to have its gradient alone
            hooks: dict[int, Any] = OrderedDict()
            source._backward_hooks = hooks
            source.grad_fn._register_hook_dict(source)  # as its first hook does
            self._sources[place] = weakref.ref(source), hooks
        return recording.returns.filled(outputs)

    def backward(self, of_outputs: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Returns the gradients of the weights, by a replay, or by the model itself where it ran or has to."""
        if self.over and not self._may_come_again:
            raise RuntimeError("Trying to backward through a recorded pass a second time: say retain_graph=True")
        reason = self._why_unusual(of_outputs)
        if reason is not None:
            if not self.over:
                self._end(reason)
            self.over, self._may_come_again = True, torch.is_grad_enabled() or _is_kept()
            return self._own_backward(of_outputs, again=True)
        if self.compare is None:
            self.recording.go_back(of_outputs)
            self.over = True
            return self.recording.gradients()
        before = DeviceState(self.recording.model)
        self.recording.go_back(of_outputs)
        before.put_back()  # what checkpointing computes again counts in buffers, and draws
        self.over = True
        with suppress(torch.OutOfMemoryError):
            gradients = self._own_backward(of_outputs, again=False)
            self.compare(gradients)
            return gradients
        self._end(NO_MEMORY)
        return self.recording.gradients()

    def _why_unusual(self, of_outputs: Sequence[torch.Tensor | None]) -> str | None:
        """Returns why a backward pass is not the recorded one, or None if it is."""
        if torch.is_grad_enabled() or self.over or _is_kept():
            return "goes through a backward pass again (retain_graph or create_graph)"
        if [place for place, one in enumerate(of_outputs) if one is not None] != [*self.recording.of_outputs]:
            return "gives outputs that the loss does not always use"
        if any(hooks or ((one := given()) is not None and one.retains_grad) for given, hooks in self._sources.values()):
            return "returns what another output is made from, with a hook on it"
        return None

    def _own_backward(self, of_outputs: Sequence[torch.Tensor | None], *, again: bool) -> list[torch.Tensor | None]:
        """Returns the gradients by the model itself, which computes its pass anew for it if it has not run."""
        outputs, self.own = self.own, None  # what is computed of its graph later must not meet it here
        if outputs is None:
            if self.recording.last() is not self:
                raise RuntimeError("the pass was not recorded so, and another one came between; leave cuda_graphs out")
            outputs = self._computed_anew()
        for place, (given, hooks) in self._sources.items():
            _move_hooks(given(), hooks, outputs[place])
        ends = [(own, one) for own, one in zip(outputs, of_outputs, strict=True) if one is not None]
        weights = self.recording.weights
        known = set(weights)
        others = [one for one in self.recording.model.parameters() if one.requires_grad and one not in known]
        with without_hooks([*weights, *others]):
            found = torch.autograd.grad(
                [own for own, _ in ends],
                [*weights, *others],
                [one for _, one in ends],
                retain_graph=again,
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
        for other, gradient in zip(others, found[len(weights) :], strict=True):
            if gradient is not None:
                torch.autograd.backward(other, gradient)
        return list(found[: len(weights)])

    def _computed_anew(self) -> list[torch.Tensor]:
        recording = self.recording
        now = DeviceState(recording.model)
        try:
            self._random.put_back()
            with torch.enable_grad():
                return outputs_of(recording.own([one.clone() for one in recording.inputs]))[1]
        finally:
            now.put_back()


class _Replay(torch.autograd.Function):
    """The autograd function of a recorded pass; the weights are inputs, so that their gradients find their way."""

    @staticmethod
    def forward(ctx: Any, replay: ReplayedPass, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.replay = replay
        outputs = replay.recording.outputs() if replay.own is None else [own.detach() for own in replay.own]
        has_gradient = replay.recording.has_gradient
        ctx.mark_non_differentiable(*(one for one, has in zip(outputs, has_gradient, strict=True) if not has))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.replay.backward(gradients)


def _move_hooks(given: torch.Tensor | None, hooks: Mapping[int, Any], own: torch.Tensor) -> None:
    """Calls the hooks on an output that the loop was given when the model's own has its gradient."""
    for hook in hooks.values():
        own.register_hook(hook)  # type: ignore[no-untyped-call]
    if given is not None and given.retains_grad:
        own.register_hook(lambda gradient: _add_to(given, gradient))  # type: ignore[no-untyped-call]


def _add_to(tensor: torch.Tensor, gradient: torch.Tensor) -> None:
    tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient


def _is_kept() -> bool:
    """Returns True if the running backward pass was asked to keep its graph (retain_graph)."""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if asked is None else bool(asked())  # what cannot be asked counts as unsafe


def _reaches_leaves(node: Any) -> bool:
    """Returns True if the running backward pass adds to what lies behind a node, and is no `autograd.grad`."""
    while node.next_functions and not hasattr(node, "variable"):
        node = next(inner for inner, _ in node.next_functions if inner is not None)
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a leaf whose gradient is returned
        return False


@cache
def _under_name(name: str, function: Any) -> Any:
    """Returns the autograd function with another name for its nodes: a loop may ask an output for its `grad_fn`."""
    if not name:
        return function
    own = type(function)(function.__name__, (function,), {})
    own._backward_cls.__name__ = own._backward_cls.__qualname__ = name
    return own
