"""The parts of a training step, its code, models and optimizers, and the conditions that a recording holds for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from amptune.changes.blocks import holds_compiled
from amptune.runtime.graphs.tensor_use import place_of

if TYPE_CHECKING:
    from amptune.runtime.graphs.signature import Signature
    from amptune.runtime.training_step import Recipe

__all__ = ["StepKind", "StepParts"]


class StepKind(NamedTuple):
    """The conditions that must be the same for a recording to do what the step would.

    `weights` tells which ones are trained, and which have a gradient before the step.
    """

    batch: Signature
    part: object
    autocast: tuple[bool, torch.dtype]
    weights: tuple[tuple[bool, bool], ...]

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Returns the batch with these tensors in it."""
        (batch,), _ = self.batch.filled(tensors)
        return batch


@dataclass(eq=False)
class StepParts:
    """A training: the user's functions in its step by name, its models and optimizers, and the policy's recipe."""

    code: Mapping[str, Any]
    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    recipe: Recipe

    @property
    def weights(self) -> list[torch.Tensor]:
        """All parameters of the models and the optimizers, once each."""
        of_models = (one for model in self.models for one in model.parameters())
        of_optimizers = (
            one for optimizer in self.optimizers for group in optimizer.param_groups for one in group["params"]
        )
        return [*dict.fromkeys((*of_models, *of_optimizers))]

    @property
    def device(self) -> torch.device:
        """The device of the weights, which the models may have moved to since."""
        return self.weights[0].device

    @cached_property
    def compiles(self) -> bool:
        return any(map(holds_compiled, self.models))

    @property
    def parts(self) -> list[Any]:
        """All modules, weights and optimizers, which have snapshots of their own."""
        return [*(part for model in self.models for part in model.modules()), *self.weights, *self.optimizers]

    def named(self, tensors: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns tensors, which are given by their place in memory, by a name for messages."""
        names: dict[int, str] = {}
        for model in self.models:
            names |= {place_of(one): f"the weight {name}" for name, one in model.named_parameters()}
            names |= {place_of(one): f"the buffer {name}" for name, one in model.named_buffers()}
        for weight, state in ((one, state) for each in self.optimizers for one, state in each.state.items()):
            of = names.get(place_of(weight), "a weight")
            names |= {place_of(one): f"{name} of {of}" for name, one in state.items() if isinstance(one, torch.Tensor)}
        shapes = {
            place: f"tensor {number}, of shape {tuple(one.shape)},"
            for number, (place, one) in enumerate(tensors.items(), 1)
        }
        return {names.get(place, shapes[place]): one for place, one in tensors.items()}
