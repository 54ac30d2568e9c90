"""A model's forward and backward pass, recorded once as CUDA graphs and replayed with the next batches.

Launching a recorded pass takes the host next to no time, whatever the number of its kernels, and the kernels are
PyTorch's own: nothing is compiled (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). What is recorded
reads and writes the same memory each time, which is what this module has to see to.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from amptune.runtime.gradient_edges import edges_for
from amptune.runtime.host_effects import NotRecordableError
from amptune.runtime.stand_ins import standing_in
from amptune.runtime.tensor_watch import TensorWatch, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from amptune.runtime.cuda_recorder import Recorder

__all__ = ["CONSTANTS", "Recording", "is_kept"]

# What an output may hold besides tensors: the same value comes out of every replay.
CONSTANTS = (type(None), bool, int, float, str)
WITHOUT = "; leave cuda_graphs out of the policy for this loop"


class _Pass:
    """One replay of a forward pass; `over` when its backward pass was replayed too."""

    __slots__ = ("__weakref__", "over")

    def __init__(self) -> None:
        self.over = False


class Recording:
    """The two passes of `call` over tensors like these, with the model's weights as they lie in memory.

    `used` are the outputs, by their place among those that have a gradient, that a backward pass starts from.
    Raises `NotRecordableError`, or what the call raises.
    """

    def __init__(
        self,
        call: Callable[[Sequence[torch.Tensor]], Any],
        model: nn.Module,
        inputs: Sequence[torch.Tensor],
        used: frozenset[int],
        by: Recorder,
    ) -> None:
        own = {id(tensor): _like(tensor) for tensor in inputs}
        self._inputs = [own[id(tensor)] for tensor in inputs]
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._used = used
        self._last: weakref.ref[_Pass] | None = None
        self._record(lambda: _with_casts_of_its_own(call, self._inputs), model, by)

    def _record(self, forward: Callable[[], Any], model: nn.Module, by: Recorder) -> None:
        with standing_in(model) as by_own:
            weights = [by_own[own] for own in self._parameters]
            fixed, buffers = [*self._inputs, *model.parameters()], list(model.buffers())
            edges = partial(edges_for, weights=weights, others=[*fixed, *buffers])
            for before, watching in ((by.warming_up(), TensorWatch(fixed, buffers)), (by.rehearsing(), nullcontext())):
                with before, watching:
                    outputs = _tensors_of(forward())
                    self._gradients_of(outputs, [torch.zeros_like(one) for one in outputs], edges)
            outputs = []  # their memory is free for what is recorded
            returned, self._forward = by.record(forward)
            leaves, self._structure = tree_flatten(returned)
            outputs = _tensors_of(returned)
            _require_apart(outputs, [*fixed, *buffers])
            number = {id(output): place for place, output in enumerate(outputs)}
            self._returned = [(number.get(id(leaf)), None if id(leaf) in number else leaf) for leaf in leaves]
            self._has_gradient = [one.requires_grad for one in outputs]
            self._of_outputs = [torch.zeros_like(one) for one in outputs]
            found, self._backward = by.record(lambda: self._gradients_of(outputs, self._of_outputs, edges))
        self._outputs = [one.detach() for one in outputs]  # autograd's graph of them belongs to the recording's stream
        pairs = [(own, gradient) for own, gradient in zip(self._parameters, found, strict=True) if gradient is not None]
        if any(gradient.layout is not torch.strided for _, gradient in pairs):
            raise NotRecordableError("has gradients that are sparse")
        pairs.sort(key=_dtypes_of)
        self._parameters = [own for own, _ in pairs]
        self._gradients = [gradient for _, gradient in pairs]
        self._dtypes = [_widest_of(*pair) for pair in pairs]
        ends = [*accumulate(len(list(alike)) for _, alike in groupby(pairs, _dtypes_of))]
        self._alike = [slice(start, end) for start, end in pairwise([0, *ends])]

    def _gradients_of(
        self, outputs: Sequence[torch.Tensor], of_outputs: Sequence[torch.Tensor], edges: Callable[..., Sequence[Any]]
    ) -> Sequence[torch.Tensor | None]:
        """Of the weights, of some in half; None for those that have no part in the outputs that are used."""
        places = [place for place, one in enumerate(outputs) if one.requires_grad]
        used = [place for number, place in enumerate(places) if number in self._used]
        if not used:
            raise NotRecordableError("gives nothing that has a gradient")
        ends, gradients = [outputs[place] for place in used], [of_outputs[place] for place in used]
        return torch.autograd.grad(ends, edges(ends), gradients, allow_unused=True)

    @property
    def is_busy(self) -> bool:
        """Whether what the last forward pass kept is still needed by a backward pass that may come."""
        last = None if self._last is None else self._last()
        return last is not None and not last.over

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Any:
        """What the call returns for these inputs, in memory of its own; autograd takes it from there."""
        for own, given in zip(self._inputs, inputs, strict=True):
            _without_repeats(own).copy_(_without_repeats(given), non_blocking=True)
        outputs = _Replay.apply(self, *self._parameters)  # type: ignore[no-untyped-call]
        leaves = [constant if number is None else outputs[number] for number, constant in self._returned]
        return tree_unflatten(leaves, self._structure)

    def replay_forward(self) -> tuple[_Pass, list[torch.Tensor], list[torch.Tensor]]:
        """(the pass, what it gave, what of that has no gradient)."""
        self._forward()
        begun = _Pass()
        self._last = weakref.ref(begun)
        outputs = [one.clone() for one in self._outputs]
        without = [given for given, has in zip(outputs, self._has_gradient, strict=True) if not has]
        return begun, outputs, without

    def replay_backward(self, begun: _Pass, of_outputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """The parameters' gradients, in memory of their own, as a forward pass is replayed into where they lay.

        Those that were taken in half are cast.

        Raises `RuntimeError` for what was not recorded.
        """
        self._require_recorded(begun, of_outputs)
        for own, given in zip(self._of_outputs, of_outputs, strict=True):
            if given is not None:
                own.copy_(given, non_blocking=True)
        self._backward()
        begun.over = True
        copies = [torch.empty_like(one, dtype=dtype) for one, dtype in zip(self._gradients, self._dtypes, strict=True)]
        for alike in self._alike:
            torch._foreach_copy_(copies[alike], self._gradients[alike])
        return copies

    def _require_recorded(self, begun: _Pass, of_outputs: Sequence[torch.Tensor | None]) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError(f"create_graph=True needs a backward pass that was not recorded{WITHOUT}")
        if begun.over or is_kept():
            raise RuntimeError(
                f"what was recorded goes through a backward pass once, and not with retain_graph{WITHOUT}"
            )
        if self._last is None or self._last() is not begun:  # it runs by itself while a pass is not over
            raise RuntimeError(f"a later forward pass was replayed before this backward pass{WITHOUT}")
        given = [one is not None for one, has in zip(of_outputs, self._has_gradient, strict=True) if has]
        if given != [number in self._used for number in range(len(given))]:
            raise RuntimeError(f"other outputs of the model are used in this loss than when it was recorded{WITHOUT}")


class _Replay(torch.autograd.Function):
    """The recorded passes, as autograd sees them: a function of the parameters."""

    @staticmethod
    def forward(ctx: Any, recording: Recording, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.recording = recording
        ctx.begun, outputs, without = recording.replay_forward()
        ctx.mark_non_differentiable(*without)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *ctx.recording.replay_backward(ctx.begun, gradients)


def _with_casts_of_its_own(call: Callable[[Sequence[torch.Tensor]], Any], inputs: Sequence[torch.Tensor]) -> Any:
    """A cast that autocast had cached before would never be made again, and one that is recorded is not for others."""
    torch.clear_autocast_cache()
    try:
        return call(inputs)
    finally:
        torch.clear_autocast_cache()


def _dtypes_of(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[str, str]:
    """Tensors of one dtype are copied to others of one dtype in a few kernels, else each in one of its own."""
    return str(pair[1].dtype), str(_widest_of(*pair))


def _widest_of(own: torch.Tensor, gradient: torch.Tensor) -> torch.dtype:
    """A half weight may have gradients in FP32, and the gradients of others may have been taken in half."""
    return torch.promote_types(own.dtype, gradient.dtype)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, where an expanded tensor repeats itself too."""
    plain = _without_repeats(tensor.detach())
    own = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=plain.device)
    return own.copy_(plain).expand(tensor.shape)


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _tensors_of(outputs: Any) -> list[torch.Tensor]:
    """Each once."""
    leaves = tree_flatten(outputs)[0]
    strange = next((leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *CONSTANTS))), None)
    if strange is not None:
        name = type(strange).__name__
        hint = " (use_cache=False leaves it out)" if name.endswith("Cache") else ""  # in transformers
        raise NotRecordableError(f"returns a {name}, whose contents are not known{hint}")
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())


def _require_apart(outputs: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    """What comes out of a replay is a copy: it must be no part of something else, to which a loop may write."""
    taken = set(map(place_of, others))
    for place in map(place_of, outputs):
        if place in taken:
            raise NotRecordableError("returns what shares memory with another output, an input, a weight or a buffer")
        taken.add(place)


def is_kept() -> bool:
    """Whether the backward pass that runs was asked to keep its graph (retain_graph)."""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return False if asked is None else bool(asked())
