"""Checks that a training loop's batches are like those of the tuning: memory format, batch size, shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amptune.changes.layout import convertible, is_in_another_format
from amptune.changes.tensor_tree import tensors_in
from amptune.policy.settings import CUDA_GRAPH_MODES
from amptune.runtime.guard.gradient_marks import forget_traced, is_traced, note_traced

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amptune.policy.settings import Policy
    from amptune.runtime.guard.misuse import Misuse

__all__ = ["BatchWatch"]

# The forwards seen before a warning: an epoch's last batch may be small, and a loop may have a few shapes.
_BATCHES_FOR_SIZE = 3
_BATCHES_FOR_SHAPES = 8


class BatchWatch:
    """A watch on the inputs that the model gets in training, until `remove`.

    It sees nothing of a model that was compiled by hand, and not by the policy: torch.compile traces hooks, and this
    one traces to nothing. The hook then stays, since removing it would cause a recompilation.
    """

    def __init__(self, policy: Policy, model: nn.Module, misuse: Misuse, after_each: Callable[[], None]) -> None:
        self.batch_size = policy.batch_size  # None once it needs no more checks
        self._policy = policy
        self._misuse = misuse
        self._channels = {m.in_channels for m in model.modules() if isinstance(m, nn.modules.conv._ConvNd)}
        self._forwards = 0
        self._rows: list[int] = []
        self._shapes: set[tuple[torch.Size, ...]] = set()
        self._hook = _ForwardHook(model, self._look, after_each)
        self._handle = model.register_forward_pre_hook(self._hook, with_kwargs=True)

    def remove(self, *, for_good: bool) -> bool:
        """Removes the hook; returns False if it stays. One that was traced goes with the policy (`for_good`)."""
        gone = for_good or not is_traced(self._hook.name)
        if gone:
            self._handle.remove()
        return gone

    def _look(self, tensors: Sequence[torch.Tensor]) -> None:
        if tensors:
            self._forwards += 1
            self._look_at_format(tensors)
            self._look_at_size(tensors)
            self._look_at_shapes(tensors)

    def _look_at_format(self, tensors: Sequence[torch.Tensor]) -> None:
        wanted = self._policy.memory_format
        images = [
            t for t in tensors if convertible(t, wanted) and t.is_floating_point() and t.shape[1] in self._channels
        ]
        if images and all(is_in_another_format(image, wanted) for image in images):
            self._misuse.say(
                "batch-not-in-memory-format",
                f"the batch that the model is given at {{here}} is not in the policy's memory format, {wanted}, so "
                "convolutions convert it or run in another: write tuned.model(tuned.batch(x))",
            )

    def _look_at_size(self, tensors: Sequence[torch.Tensor]) -> None:
        """Warns if the first batches have one number of rows that is no multiple of the policy's batch size.

        A multiple may be two views of each sample, or a sequence folded into the batch; with the sequence first, the
        batch is the second dimension. A loop that asks for `tuned.batch_size` is taken to use it.
        """
        if self.batch_size is None:
            return
        for tensor in tensors:
            if tensor.shape[:1].numel() % self.batch_size == 0 or self.batch_size in tensor.shape[1:2]:
                self.batch_size = None
                return
        self._rows += [tensor.shape[0] for tensor in tensors[:1] if tensor.dim()]
        if len(self._rows) == _BATCHES_FOR_SIZE and len(set(self._rows)) == 1:
            self._misuse.say(
                "batch-size-differs",
                f"the batches that the model is given at {{here}} have {self._rows[0]} rows, and the policy was "
                f"measured with a batch size of {self.batch_size}: write DataLoader(..., batch_size=tuned.batch_size)",
                batch_size=self._rows[0],
            )

    def _look_at_shapes(self, tensors: Sequence[torch.Tensor]) -> None:
        graphs = self._policy.cuda_graphs or self._policy.compile in CUDA_GRAPH_MODES
        if not (graphs or self._policy.cudnn_benchmark):
            return
        self._shapes.add(tuple(tensor.shape for tensor in tensors))
        if self._forwards >= _BATCHES_FOR_SHAPES and len(self._shapes) > self._forwards / 2:
            compiled = self._policy.compile != "off"
            setting = f"compile: {self._policy.compile}" if compiled else "cuda_graphs" if graphs else "cudnn_benchmark"
            work = "a CUDA graph is recorded" if graphs else "cuDNN times its algorithms"
            self._misuse.say(
                "shapes-keep-changing",
                f"the {self._forwards} batches that the model was given at {{here}} had {len(self._shapes)} different "
                f"shapes, and under {setting} {work} anew for each: pad them to a few sizes, or tune with such batches",
                shapes=len(self._shapes),
            )


class _ForwardHook:
    """A hook that is not copied or pickled with the model: copies get a hook that does nothing."""

    def __init__(
        self, model: nn.Module, look: Callable[[Sequence[torch.Tensor]], None], after_each: Callable[[], None]
    ) -> None:
        self.name = f"forward of {id(model)}"
        forget_traced(self.name)
        self._module_id = id(model)
        self._look = look
        self._after_each = after_each

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            note_traced(self.name)
            return
        if id(module) != self._module_id:  # a replica of DataParallel, for one
            return
        if module.training and torch.is_grad_enabled():
            self._look(tensors_in((args, kwargs)))
        self._after_each()

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _inert, ()


def _inert() -> Callable[..., None]:
    return _ignore


def _ignore(*_: Any) -> None:
    pass
