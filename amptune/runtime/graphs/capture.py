"""A model's forward and backward pass, recorded once as CUDA graphs and replayed with the next batches.

Launching a recorded pass takes the host almost no time, whatever the number of its kernels, and the kernels are
PyTorch's own: nothing is compiled (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). A replay reads
and writes the same memory each time, so this module copies inputs into it and results out of it.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from amptune.runtime.graphs.host_effects import NotRecordableError
from amptune.runtime.graphs.proxy_weights import with_proxies
from amptune.runtime.graphs.tensor_use import TensorWatch, edges_for, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from amptune.runtime.graphs.recorder import Recorder

__all__ = ["CONSTANTS", "Recording", "is_kept"]

# Types that an output may hold besides tensors: every replay returns the recorded value.
CONSTANTS = (type(None), bool, int, float, str)
WITHOUT = "; leave cuda_graphs out of the policy for this loop"


class _Pass:
    """One replay of a forward pass; `over` is True once its backward pass was replayed too."""

    __slots__ = ("__weakref__", "over")

    def __init__(self) -> None:
        self.over = False


class Recording:
    """The recorded forward and backward pass of `call` for tensors like `inputs`, with the weights at their addresses.

    `used` are the outputs from which a backward pass starts, as indices into the outputs that have a gradient.
    Raises `NotRecordableError`, or any error of the call.
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
        with with_proxies(model) as by_own:
            weights = [by_own[own] for own in self._parameters]
            fixed, buffers = [*self._inputs, *model.parameters()], list(model.buffers())
            edges = partial(edges_for, weights=weights, others=[*fixed, *buffers])
            for before, watching in ((by.warming_up(), TensorWatch(fixed, buffers)), (by.rehearsing(), nullcontext())):
                with before, watching:
                    outputs = _tensors_of(forward())
                    self._gradients_of(outputs, [torch.zeros_like(one) for one in outputs], edges)
            outputs = []  # frees their memory for the recording
            returned, self._forward = by.record(forward)
            leaves, self._structure = tree_flatten(returned)
            outputs = _tensors_of(returned)
            _require_apart(outputs, [*fixed, *buffers])
            number = {id(output): place for place, output in enumerate(outputs)}
            self._returned = [(number.get(id(leaf)), None if id(leaf) in number else leaf) for leaf in leaves]
            self._has_gradient = [one.requires_grad for one in outputs]
            self._of_outputs = [torch.zeros_like(one) for one in outputs]
            found, self._backward = by.record(lambda: self._gradients_of(outputs, self._of_outputs, edges))
        self._outputs = [one.detach() for one in outputs]  # their autograd graph belongs to the recording's stream
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
        """Returns the gradients of the weights, some in half; None for weights that the used outputs do not need."""
        places = [place for place, one in enumerate(outputs) if one.requires_grad]
        used = [place for number, place in enumerate(places) if number in self._used]
        if not used:
            raise NotRecordableError("gives nothing that has a gradient")
        ends, gradients = [outputs[place] for place in used], [of_outputs[place] for place in used]
        return torch.autograd.grad(ends, edges(ends), gradients, allow_unused=True)

    @property
    def is_busy(self) -> bool:
        """True while a later backward pass may need the tensors that the last forward pass kept."""
        last = None if self._last is None else self._last()
        return last is not None and not last.over

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Returns the outputs for these inputs, in new memory and connected to autograd."""
        for own, given in zip(self._inputs, inputs, strict=True):
            _without_repeats(own).copy_(_without_repeats(given), non_blocking=True)
        outputs = _Replay.apply(self, *self._parameters)  # type: ignore[no-untyped-call]
        leaves = [constant if number is None else outputs[number] for number, constant in self._returned]
        return tree_unflatten(leaves, self._structure)

    def replay_forward(self) -> tuple[_Pass, list[torch.Tensor], list[torch.Tensor]]:
        """Returns (the pass, its outputs, the outputs that have no gradient)."""
        self._forward()
        begun = _Pass()
        self._last = weakref.ref(begun)
        outputs = [one.clone() for one in self._outputs]
        without = [given for given, has in zip(outputs, self._has_gradient, strict=True) if not has]
        return begun, outputs, without

    def replay_backward(self, begun: _Pass, of_outputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Returns copies of the parameters' gradients, since the next forward replay overwrites the recorded ones.

        Gradients that were taken in half are cast. Raises `RuntimeError` for a backward pass that was not recorded.
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
        if self._last is None or self._last() is not begun:  # rare: while a pass is not over, the model runs unrecorded
            raise RuntimeError(f"a later forward pass was replayed before this backward pass{WITHOUT}")
        given = [one is not None for one, has in zip(of_outputs, self._has_gradient, strict=True) if has]
        if given != [number in self._used for number in range(len(given))]:
            raise RuntimeError(f"other outputs of the model are used in this loss than when it was recorded{WITHOUT}")


class _Replay(torch.autograd.Function):
    """The recorded passes as an autograd function of the parameters."""

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
    """Calls with an empty autocast cache, as cached casts are not recorded; then empties it of the recorded casts."""
    torch.clear_autocast_cache()
    try:
        return call(inputs)
    finally:
        torch.clear_autocast_cache()


def _dtypes_of(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[str, str]:
    """Returns a sorting key: copies between the same two dtypes share a few kernels; mixed, each needs its own."""
    return str(pair[1].dtype), str(_widest_of(*pair))


def _widest_of(own: torch.Tensor, gradient: torch.Tensor) -> torch.dtype:
    """Returns the wider dtype: a half weight may have FP32 gradients, and others' gradients may be taken in half."""
    return torch.promote_types(own.dtype, gradient.dtype)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the same strides; an expanded tensor is expanded in the copy too."""
    plain = _without_repeats(tensor.detach())
    own = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=plain.device)
    return own.copy_(plain).expand(tensor.shape)


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _tensors_of(outputs: Any) -> list[torch.Tensor]:
    """Returns each tensor once. Raises `NotRecordableError` for an output of an unknown type."""
    leaves = tree_flatten(outputs)[0]
    strange = next((leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *CONSTANTS))), None)
    if strange is not None:
        name = type(strange).__name__
        hint = " (use_cache=False leaves it out)" if name.endswith("Cache") else ""  # in transformers
        raise NotRecordableError(f"returns a {name}, whose contents are not known{hint}")
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())


def _require_apart(outputs: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    """Raises `NotRecordableError` for shared memory: replays return copies, which a loop's writes would not reach."""
    taken = set(map(place_of, others))
    for place in map(place_of, outputs):
        if place in taken:
            raise NotRecordableError("returns what shares memory with another output, an input, a weight or a buffer")
        taken.add(place)


def is_kept() -> bool:
    """Returns True if the running backward pass was asked to keep its graph (retain_graph)."""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return False if asked is None else bool(asked())
