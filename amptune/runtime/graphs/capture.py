"""A model's forward and backward pass, recorded once as CUDA graphs and replayed with the next batches.

Launching a recorded pass takes the host almost no time, whatever the number of its kernels, and the kernels are
PyTorch's own: nothing is compiled (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). A replay reads
and writes the same memory each time, so this module copies inputs into it and results out of it.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from amptune.runtime.graphs.differences import Limits
from amptune.runtime.graphs.host_effects import DeviceState, NotRecordableError, without_effects, without_repeats
from amptune.runtime.graphs.model_state import are_same
from amptune.runtime.graphs.outputs import CONSTANTS, is_kept, named_buffers, named_outputs, require_apart, tensors_of
from amptune.runtime.graphs.proxy_weights import with_proxies
from amptune.runtime.graphs.tensor_use import (
    WAITS,
    TensorWatch,
    WaitMode,
    edges_for,
    sources_among,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from amptune.runtime.graphs.recorder import Recorder

__all__ = ["NO_MEMORY", "OwnPass", "Recording", "UnusualError", "Usage"]

NO_MEMORY = "leaves no memory to compare it in"


class OwnPass(Protocol):
    """A call of the model itself for tensors like those it was given, as the loop would make it."""

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Returns what the model returns."""


class UnusualError(Exception):
    """A backward pass that is not the recorded one; its message says why."""


class Replayed:
    """One replay of a forward pass, until its backward pass is over.

    `sources` are those outputs that the loop was given from which others are made, with the hooks on them. `own` are
    the model's own outputs, where it ran too: then `compare` is called with its gradients once a replay has computed
    others. `random` is the state of the random generator before.
    """

    def __init__(self) -> None:
        self.over = self.may_come_again = False
        self.sources: dict[int, tuple[weakref.ref[torch.Tensor], dict[int, Any]]] = {}
        self.own: list[torch.Tensor] | None = None
        self.compare: Callable[[Sequence[torch.Tensor | None]], None] | None = None
        self.random: torch.Tensor | None = None


@dataclass(frozen=True)
class Usage:
    """The outputs from which a loss is made, by place among those that have a gradient, with gradients they had."""

    gradients: Mapping[int, torch.Tensor]

    def gradient_for(self, place: int, output: torch.Tensor) -> torch.Tensor:
        known = self.gradients.get(place)
        fits = known is not None and (known.shape, known.dtype) == (output.shape, output.dtype)
        return known if known is not None and fits else torch.ones_like(output)


class Recording:
    """The recorded forward and backward pass of `own` for tensors like `inputs`, with the weights at their addresses.

    `end` is called with a reason if a backward pass comes that was not recorded: it is the model's own, computed anew,
    and this is to be the last replay. Raises `NotRecordableError`, or any error of the model.
    """

    def __init__(
        self,
        own: OwnPass,
        model: nn.Module,
        inputs: Sequence[torch.Tensor],
        usage: Usage,
        by: Recorder,
        end: Callable[[str], None],
    ) -> None:
        self.model = model
        self.usage = usage
        self.calls = 0
        self.surprises = 0
        self._own, self._by, self._end = own, by, end
        kept = {id(tensor): _like(tensor) for tensor in inputs}
        self.inputs = [kept[id(tensor)] for tensor in inputs]
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._last: weakref.ref[Replayed] | None = None
        with without_effects(model) as put_back, with_proxies(model) as by_own:
            self._record(by_own, put_back)

    def _record(self, by_own: Mapping[nn.Parameter, nn.Parameter], put_back: Callable[[], None]) -> None:
        weights = [by_own[parameter] for parameter in self._parameters]
        fixed, buffers = [*self.inputs, *self.model.parameters()], list(self.model.buffers())
        known = [*fixed, *self.usage.gradients.values()]
        edges = partial(edges_for, weights=weights, others=[*fixed, *buffers])
        numbers: list[Any] = []
        before = _random_state(self.inputs)
        for around in (self._by.warming_up(), self._by.rehearsing()):
            put_back()
            with around, TensorWatch(known, buffers) as watch:
                rehearsed = self._pass(edges)
            numbers, former = watch.seen, numbers
        if repr(numbers) != repr(former):
            raise NotRecordableError(WAITS)
        after = _random_state(self.inputs)
        self._draws = before is not None and after is not None and not torch.equal(before, after)

        def another() -> dict[str, torch.Tensor]:
            put_back()
            with self._by.warming_up(), WaitMode(numbers):
                return self._pass(edges)

        self.limits = Limits.of(rehearsed, another, self.inputs, [*self.usage.gradients.values()], self.model)
        del rehearsed
        put_back()
        waiting = WaitMode(numbers) if numbers else None

        def forward() -> Any:
            if waiting is None:
                return _with_casts_of_its_own(self._own, self.inputs)
            with waiting:
                returned = _with_casts_of_its_own(self._own, self.inputs)
            # a library may leave the question out while a graph is captured, and compute what is right for any answer
            return returned, torch.stack(waiting.same).all() if waiting.same else None

        returned, self._forward = self._by.record(forward)
        self._same: torch.Tensor | None = None
        if waiting is not None:
            returned, self._same = returned
        if any(map(vars, self.inputs)):
            raise NotRecordableError("sets attributes of its inputs")
        outputs = tensors_of(returned)
        require_apart(outputs, [*fixed, *buffers])
        leaves, self._structure = tree_flatten(returned)
        number = {id(output): place for place, output in enumerate(outputs)}
        self._returned = [(number.get(id(leaf)), None if id(leaf) in number else leaf) for leaf in leaves]
        self.sources = sources_among(outputs)
        self._has_gradient = [one.requires_grad for one in outputs]
        with_gradient = [place for place, has in enumerate(self._has_gradient) if has]
        self.used = [place for number, place in enumerate(with_gradient) if number in self.usage.gradients]
        self._of_outputs = {place: torch.zeros_like(outputs[place]) for place in self.used}
        ends, starts = [outputs[place] for place in self.used], list(self._of_outputs.values())
        points: Any = edges(ends)
        found, self._backward = self._by.record(lambda: torch.autograd.grad(ends, points, starts, allow_unused=True))
        known_gradients = enumerate(with_gradient)
        self.usage = Usage({n: self._of_outputs[place] for n, place in known_gradients if place in self._of_outputs})
        self._outputs = [one.detach() for one in outputs]  # their autograd graph belongs to the recording's stream
        self._keep(found)

    def _keep(self, found: Sequence[torch.Tensor | None]) -> None:
        pairs = [(own, gradient) for own, gradient in zip(self._parameters, found, strict=True) if gradient is not None]
        if any(gradient.layout is not torch.strided for _, gradient in pairs):
            raise NotRecordableError("has gradients that are sparse")
        pairs.sort(key=_dtypes_of)
        self._parameters = [own for own, _ in pairs]
        self._trained = set(self._parameters)
        self._gradients = [gradient for _, gradient in pairs]
        self._dtypes = [_widest_of(*pair) for pair in pairs]
        ends = [*accumulate(len(list(alike)) for _, alike in groupby(pairs, _dtypes_of))]
        self._alike = [slice(start, end) for start, end in pairwise([0, *ends])]

    def _pass(self, edges: Callable[..., Any]) -> dict[str, torch.Tensor]:
        """Returns the outputs, buffers and gradients of one pass of the model, by name."""
        outputs = tensors_of(_with_casts_of_its_own(self._own, self.inputs))
        with_gradient = [one for one in outputs if one.requires_grad]
        used = [place for place in range(len(with_gradient)) if place in self.usage.gradients]
        if not used:
            raise NotRecordableError("gives nothing that has a gradient")
        ends = [with_gradient[place] for place in used]
        starts = [self.usage.gradient_for(place, end) for place, end in zip(used, ends, strict=True)]
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        weights = [parameter for parameter in names if parameter.requires_grad]
        found = torch.autograd.grad(ends, edges(ends), starts, allow_unused=True)
        gradients = {
            f"the gradient of {names[weight]}": gradient
            for weight, gradient in zip(weights, found, strict=True)
            if gradient is not None
        }
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        return {**named_outputs(outputs), **named_buffers(buffers), **gradients}

    def measure_limits(self, inputs: Sequence[torch.Tensor]) -> None:
        """Widens the limits by what passes for these inputs differ by; nothing trains."""
        self._copy_in(inputs)
        weights = [one for one in self.model.parameters() if one.requires_grad]

        def another() -> dict[str, torch.Tensor]:
            put_back()
            return self._pass(lambda _: weights)

        with without_effects(self.model) as put_back, _without_hooks(weights):
            gradients = [*self.usage.gradients.values()]
            self.limits = self.limits.widened(Limits.of(another(), another, self.inputs, gradients, self.model))

    @property
    def is_busy(self) -> bool:
        """True while a later backward pass may need the tensors that the last forward pass kept."""
        last = None if self._last is None else self._last()
        return last is not None and not last.over

    def is_of_its_kind(self, returned: Any, outputs: Sequence[torch.Tensor]) -> bool:
        """Returns True if a pass returned the recorded structure, constants, and which `outputs` have a gradient."""
        leaves, structure = tree_flatten(returned)
        constants = [leaf for leaf in leaves if isinstance(leaf, CONSTANTS)]
        recorded = [constant for number, constant in self._returned if number is None]
        has_gradient = [one.requires_grad for one in outputs]
        return structure == self._structure and are_same(constants, recorded) and has_gradient == self._has_gradient

    def recorded_gradients(self) -> dict[str, torch.Tensor]:
        """Returns the gradients of the last replay by a name for messages; the next one overwrites them."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {
            f"the gradient of {names[own]}": one for own, one in zip(self._parameters, self._gradients, strict=True)
        }

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Returns the outputs for these inputs, in new memory and connected to autograd.

        Raises `UnusualError` if the forward pass waits for numbers that are others than when it was recorded.
        """
        return self.given(self.begin(inputs))

    def given(self, begun: Replayed) -> Any:
        """Returns the outputs of a pass for the loop."""
        outputs = list(_Replay.apply(self, begun, *self._parameters))  # type: ignore[no-untyped-call]
        for place in self.sources:
            source = outputs[place] = outputs[place].view_as(outputs[place])  # hooks are to have its gradient alone
            hooks: dict[int, Any] = OrderedDict()
            source._backward_hooks = hooks
            source.grad_fn._register_hook_dict(source)  # as its first hook does
            begun.sources[place] = weakref.ref(source), hooks
        leaves = [constant if number is None else outputs[number] for number, constant in self._returned]
        return tree_unflatten(leaves, self._structure)

    def begin(self, inputs: Sequence[torch.Tensor]) -> Replayed:
        """Replays the forward pass for these inputs. Raises `UnusualError` as a call does."""
        self._copy_in(inputs)
        begun = Replayed()
        begun.random = _random_state(self.inputs) if self._draws else None
        before = None if self._same is None else DeviceState(self.model)
        self._forward()
        self._last = weakref.ref(begun)
        if self._same is not None and before is not None and not self._same.item():
            begun.over = True
            before.put_back()
            raise UnusualError(WAITS + ", and the result is not always the same")
        return begun

    def _copy_in(self, inputs: Sequence[torch.Tensor]) -> None:
        self._by.take_turn()
        for own, given in zip(self.inputs, inputs, strict=True):
            without_repeats(own).copy_(without_repeats(given), non_blocking=True)

    def outputs(self) -> list[torch.Tensor]:
        """Returns copies of the outputs of the last replay."""
        return [one.clone() for one in self._outputs]

    def without_gradient(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [one for one, has in zip(outputs, self._has_gradient, strict=True) if not has]

    def _copied_gradients(self) -> list[torch.Tensor]:
        """Returns copies, since the next replay overwrites the recorded ones. Those taken in half are cast."""
        copies = [torch.empty_like(one, dtype=dtype) for one, dtype in zip(self._gradients, self._dtypes, strict=True)]
        for alike in self._alike:
            torch._foreach_copy_(copies[alike], self._gradients[alike])
        return copies

    def backward(self, begun: Replayed, of_outputs: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Returns the gradients of the weights, by a replay, or by the model itself where it ran or has to."""
        if begun.over and not begun.may_come_again:
            raise RuntimeError("Trying to backward through a recorded pass a second time: say retain_graph=True")
        reason = self._why_unusual(begun, of_outputs)
        if reason is not None:
            if not begun.over:
                self._end(reason)
            begun.may_come_again = torch.is_grad_enabled() or is_kept()
        else:
            for place, given in enumerate(of_outputs):
                if given is not None:
                    self._of_outputs[place].copy_(given, non_blocking=True)
            self._backward()
        begun.over = True
        if reason is None and begun.compare is None:
            return self._copied_gradients()
        try:
            gradients = self._own_backward(begun, of_outputs, again=reason is not None)
            if reason is None and begun.compare is not None:
                begun.compare(gradients)
            return gradients
        except torch.OutOfMemoryError:
            if reason is not None:
                raise
        self._end(NO_MEMORY)
        return self._copied_gradients()

    def _why_unusual(self, begun: Replayed, of_outputs: Sequence[torch.Tensor | None]) -> str | None:
        """Returns why a backward pass is not the recorded one, or None if it is."""
        if torch.is_grad_enabled() or begun.over or is_kept():
            return "goes through a backward pass again (retain_graph or create_graph)"
        if [place for place, one in enumerate(of_outputs) if one is not None] != self.used:
            return "gives outputs that the loss does not always use"
        if any(hooks or ((one := given()) is not None and one.retains_grad) for given, hooks in begun.sources.values()):
            return "returns what another output is made from, with a hook on it"
        return None

    def _own_backward(
        self, begun: Replayed, of_outputs: Sequence[torch.Tensor | None], *, again: bool
    ) -> list[torch.Tensor | None]:
        """Returns the gradients by the model itself, which computes its pass anew for it if it has not run."""
        outputs, begun.own = begun.own, None  # what is computed of its graph later must not meet it here
        if outputs is None:
            if self._last is None or self._last() is not begun:
                raise RuntimeError("the pass was not recorded so, and another one came between; leave cuda_graphs out")
            outputs = self._computed_anew(begun)
        for place, (given, hooks) in begun.sources.items():
            _move_hooks(given(), hooks, outputs[place])
        ends = [(own, one) for own, one in zip(outputs, of_outputs, strict=True) if one is not None]
        others = [one for one in self.model.parameters() if one.requires_grad and one not in self._trained]
        with _without_hooks([*self._parameters, *others]):
            found = torch.autograd.grad(
                [own for own, _ in ends],
                [*self._parameters, *others],
                [one for _, one in ends],
                retain_graph=again,
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
        for other, gradient in zip(others, found[len(self._parameters) :], strict=True):
            if gradient is not None:
                torch.autograd.backward(other, gradient)
        return list(found[: len(self._parameters)])

    def _computed_anew(self, begun: Replayed) -> list[torch.Tensor]:
        now = DeviceState(self.model)
        try:
            if begun.random is not None:
                torch.cuda.set_rng_state(begun.random, self.inputs[0].device)
            with torch.enable_grad():
                return tensors_of(self._own([one.clone() for one in self.inputs]))
        finally:
            now.put_back()


class _Replay(torch.autograd.Function):
    """The recorded passes as an autograd function of the parameters."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, begun: Replayed, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.recording, ctx.begun = recording, begun
        outputs = recording.outputs() if begun.own is None else [own.detach() for own in begun.own]
        ctx.mark_non_differentiable(*recording.without_gradient(outputs))
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.recording.backward(ctx.begun, gradients)


@contextmanager
def _without_hooks(weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Calls no hooks on the weights' gradients within the context: they are called as those of `_Replay` arrive."""
    hooks = [(weight._backward_hooks, dict(weight._backward_hooks)) for weight in weights if weight._backward_hooks]
    try:
        for table, _ in hooks:
            table.clear()
        yield
    finally:
        for table, before in hooks:
            table.update(before)


def _move_hooks(given: torch.Tensor | None, hooks: Mapping[int, Any], own: torch.Tensor) -> None:
    """Calls the hooks on an output that the loop was given when the model's own has its gradient."""
    for hook in hooks.values():
        own.register_hook(hook)  # type: ignore[no-untyped-call]
    if given is not None and given.retains_grad:
        own.register_hook(lambda gradient: _add_to(given, gradient))  # type: ignore[no-untyped-call]


def _add_to(tensor: torch.Tensor, gradient: torch.Tensor) -> None:
    tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient


def _with_casts_of_its_own(call: OwnPass, inputs: Sequence[torch.Tensor]) -> Any:
    """Calls with an empty autocast cache, as cached casts are not recorded; then empties it of the recorded casts."""
    torch.clear_autocast_cache()
    try:
        return call(inputs)
    finally:
        torch.clear_autocast_cache()


def _random_state(inputs: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Returns the state of the GPU's random generator; None on a CPU."""
    return torch.cuda.get_rng_state(inputs[0].device) if inputs[0].is_cuda else None


def _dtypes_of(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[str, str]:
    """Returns a sorting key: copies between the same two dtypes share a few kernels; mixed, each needs its own."""
    return str(pair[1].dtype), str(_widest_of(*pair))


def _widest_of(own: torch.Tensor, gradient: torch.Tensor) -> torch.dtype:
    """Returns the wider dtype: a half weight may have FP32 gradients, and others' gradients may be taken in half."""
    return torch.promote_types(own.dtype, gradient.dtype)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the same strides; an expanded tensor is expanded in the copy too."""
    plain = without_repeats(tensor.detach())
    own = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=plain.device)
    return own.copy_(plain).expand(tensor.shape)
