"""Training with weights in half: the weights, their optimizers, and the loss scaler's access to both."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from amptune.errors import PolicyApplyError
from amptune.runtime.half_checkpoints import checkpoint_in_fp32
from amptune.runtime.half_weights import HALF
from amptune.runtime.master_weights import MasterWeights, parameters_of, require_unrounded_state, state_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amptune.runtime.half_weights import HalfWeights

__all__ = ["NOT_FOR_FSDP2", "HalfTraining"]

NOT_FOR_FSDP2 = (
    "weights: half holds whole weights in half, and FSDP2 shards FP32 weights and gathers them in half by itself, "
    "which is the same: use fully_shard(…, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16)) and a policy "
    "whose weights are fp32"
)


class HalfTraining:
    """The half weights of one model, with what its optimizers need to train them, until `undo`."""

    def __init__(self, held: HalfWeights) -> None:
        self.held = held
        self._checkpoints = checkpoint_in_fp32(held)
        self._masters: weakref.WeakKeyDictionary[torch.optim.Optimizer, MasterWeights] = weakref.WeakKeyDictionary()
        self._plain: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def serve(self, optimizer: torch.optim.Optimizer) -> None:
        """Gives the optimizer master weights if the policy has them, and converts its state to their dtype or to half.

        Raises `PolicyApplyError` for sharded weights, and for an optimizer that cannot have master weights.
        """
        _require_unsharded(optimizer)
        if not self.held.has_masters:
            state_in(HALF, optimizer, self.held)  # it may have trained the model in FP32 until now
            self._plain.add(optimizer)
        elif optimizer not in self._masters:
            require_unrounded_state(optimizer, self.held)
            self._masters[optimizer] = MasterWeights(self.held, optimizer)

    def lent_to(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Returns a context in which the optimizer holds the parameters that its steps update."""
        masters = self._masters.get(optimizer)
        return nullcontext() if masters is None else masters.lent(optimizer)

    @contextmanager
    def stepping(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Wraps a step: the optimizer holds the model's own parameters afterwards, even if the step was interrupted.

        Raises `PolicyApplyError` for an optimizer that would update half weights in place of their masters.
        """
        masters = self._masters.get(optimizer)
        if masters is None:
            self._require_no_masters(optimizer)
        try:
            yield
        finally:
            if masters is not None:
                masters.take_back(optimizer)

    def _require_no_masters(self, optimizer: torch.optim.Optimizer) -> None:
        if self.held.has_masters and any(parameter in self.held for parameter in parameters_of(optimizer)):
            raise PolicyApplyError(
                "the policy trains FP32 master weights, which this optimizer does not have: "
                "optimizer = tuned.optimizer(optimizer) gives it them"
            )

    def widen_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        self.held.widen_gradients(parameters_of(optimizer))

    def undo(self) -> None:
        """Converts the weights back to FP32; their optimizers continue with them."""
        for optimizer, masters in self._masters.items():
            masters.remove(optimizer)
        for optimizer in self._plain:
            state_in(torch.float32, optimizer, self.held)
        self._masters.clear()
        for handle in self._checkpoints:
            handle.remove()
        self.held.undo()


def _require_unsharded(optimizer: torch.optim.Optimizer) -> None:
    """Raises `PolicyApplyError` if PyTorch's fully_shard has sharded the optimizer's weights."""
    if any(type(parameter.data).__name__ == "DTensor" for parameter in parameters_of(optimizer)):
        raise PolicyApplyError(NOT_FOR_FSDP2)
