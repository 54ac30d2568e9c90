"""A training step of which everything is replayed from CUDA graphs: forward, loss, backward and update.

Three graphs follow each other: forward and loss, backward, update. They are apart so that a replay can be compared with
the model's own step before anything is written to the weights, and so that micro-batches can be accumulated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from amptune.policy.findings import Finding
from amptune.runtime.graphs.capture import Recording
from amptune.runtime.graphs.dispatch import MOST_WASTED, NOT_RECORDED, WORTH_IT, Recordings
from amptune.runtime.graphs.host_effects import NotRecordableError
from amptune.runtime.graphs.recorded_update import RecordedUpdate, are_own, has_state, obstacle_to_update
from amptune.runtime.graphs.signature import arguments_of
from amptune.runtime.training_step import RecipeStep

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amptune.runtime.graphs.recorder import Recorder
    from amptune.runtime.training_step import Recipe

__all__ = ["RecordedStep", "StepRecordings", "WholeStep"]


class ModelWithLoss(nn.Module):
    """A model and its loss as one module, whose passes are recorded together."""

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    @property
    def training(self) -> bool:
        """The mode of the model."""
        return self.model.training

    @training.setter
    def training(self, _: bool) -> None:
        """Ignores the value that PyTorch sets when it makes a module."""

    def forward(self, batch: Any) -> torch.Tensor:
        return self.loss(self.model, batch)


class StepRecordings(Recordings):
    """The recordings of a model with its loss. A replay returns its `Recording`, whose backward pass is then due."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], torch.Tensor],
        say: Callable[[Finding], None],
        recorder: Callable[[torch.device], Recorder],
        device_type: str,
    ) -> None:
        super().__init__(ModelWithLoss(model, loss), say, recorder, device_type)
        self.name, self.otherwise = f"the training step of {type(model).__name__}", "with cuda_graphs: true"

    def require_tensors(self, batch: Any) -> None:
        """Gives up if such a batch is never recorded. Where there is no GPU, the policy's own finding says so."""
        is_there = self.device_type != "cuda" or torch.cuda.is_available()
        if is_there and arguments_of((batch,), {}, self.device_type) is None:
            self.give_up(NotRecordableError("gets more in its batch than tensors on the GPU, numbers and strings"))

    def require_no_hooks_on(self, called: nn.Module) -> None:
        """Ends recording if the module that the loop calls has hooks of the user's: the model below it is recorded."""
        hooks = [*called._forward_hooks.values(), *called._forward_pre_hooks.values()]
        if hooks and not self.is_over and not are_own(hooks):
            self._stop("has forward hooks on tuned.model, which replays would not call")

    def replay(self, recording: Recording, tensors: Sequence[torch.Tensor]) -> Any:
        if any(one._backward_hooks or one._post_accumulate_grad_hooks for one in recording.weights):
            return super().replay(recording, tensors)  # through autograd, which calls them
        recording.begin(tensors)
        return recording


class RecordedStep(RecipeStep):
    """A training step that replays what can be recorded of it.

    An update is recorded anew when a setting of the optimizer changes, and no more once that was not worth it so often
    as passes are.
    At calls that are compared the recipe itself trains. An optimizer that cannot be recorded steps by itself; if the
    loss cannot, the recipe runs with the model's own passes recorded, as under `cuda_graphs: true`. Of both the
    recordings' `say` gets a finding. `updates` counts those that were replayed.
    """

    def __init__(
        self,
        recipe: Recipe,
        loss: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        clip: float | None,
        recordings: StepRecordings,
    ) -> None:
        super().__init__(recipe, loss, optimizer, clip, None)
        self.recordings = recordings
        self._replayed: Recording | None = None  # whose gradients wait for the update
        self._updates: WeakKeyDictionary[Recording, RecordedUpdate] = WeakKeyDictionary()
        self._updates_alone = False
        self.updates = self._at_change = self._wasted = 0

    def _pass(self, batch: Any, *, is_last: bool) -> torch.Tensor:
        self._replayed = None
        if self._passes == 0:
            self.recordings.require_tensors(batch)
        self.recordings.require_no_hooks_on(self._recipe.model)
        if self.recordings.is_over:
            return super()._pass(batch, is_last=is_last)
        with self._recipe.autocast():
            found = self.recordings.run((self._recipe.batch(batch),), {})
        if not isinstance(found, Recording):
            self._backward(found)
            loss: torch.Tensor = found
            return loss
        one = torch.ones((), device=found.inputs[0].device)
        found.go_back([self._recipe.scaler.scale(one) / self._recipe.accumulate])
        if is_last:
            self._replayed = found
        else:
            _add_gradients(found)
        return found.outputs()[0]

    def _update(self) -> None:
        recording, self._replayed = self._replayed, None
        if recording is not None and not self._is_updated_by_replay(recording):
            _add_gradients(recording)
            recording = None
        if recording is None:
            super()._update()

    def _is_updated_by_replay(self, recording: Recording) -> bool:
        """Replays the update, and returns True, unless the recipe has to update the weights."""
        if self._updates_alone or self.before_update is not None or self._recipe.guard is not None:
            return False
        if not has_state(self._optimizer, recording.weights):
            return False
        weights = {*recording.weights}
        given = [one for group in self._optimizer.param_groups for one in group["params"] if one.grad is not None]
        if not weights.issuperset(given) or len(given) != (len(weights) if self._recipe.accumulate > 1 else 0):
            return False
        update = self._update_of(recording)
        if update is None:
            return False
        earlier = [one.grad for one in recording.weights if one.grad is not None]
        update.replay(earlier)
        for weight in recording.weights if earlier else ():
            weight.grad = None
        self.updates += 1
        return True

    def _update_of(self, recording: Recording) -> RecordedUpdate | None:
        """Returns the recorded update, known or made now, or None after an obstacle, which it tells."""
        known = self._updates.pop(recording, None)
        if known is not None and known.is_valid:
            return self._updates.setdefault(recording, known)
        optimizer, scaler = self._optimizer, self._recipe.scaler
        try:
            if (reason := obstacle_to_update(optimizer, scaler)) is not None:
                raise NotRecordableError(reason)
            if known is not None:
                self._wasted = self._wasted + 1 if self.updates - self._at_change < WORTH_IT else 0
                self._at_change = self.updates
            if self._wasted >= MOST_WASTED:
                raise NotRecordableError("has settings beside its learning rate that change again and again")
            update = RecordedUpdate(
                recording,
                optimizer,
                scaler,
                lambda: self._recipe.step(optimizer, clip=self._clip),
                adds=self._recipe.accumulate > 1,
            )
            self.recordings.made += 1
            return self._updates.setdefault(recording, update)
        except Exception as error:  # noqa: BLE001  # a step that raises does so in the recipe too
            self._updates_alone = True
            self._tell(error)
        return None

    def _tell(self, error: Exception) -> None:
        """Tells why updates are not recorded. After a failed capture nothing else is either."""
        if isinstance(error, torch.AcceleratorError):
            self.recordings.give_up(error)
            return
        words = str(error) if isinstance(error, NotRecordableError) else f"raises {type(error).__name__} ({error})"
        self.recordings.say(
            Finding(
                code=NOT_RECORDED,
                message=f"{type(self._optimizer).__name__} {words}; its steps are not recorded as a CUDA graph, "
                "while forward pass, loss and backward pass are",
            )
        )


def _add_gradients(recording: Recording) -> None:
    """Adds the gradients of the last replay to those of the weights."""
    for weight, gradient in zip(recording.weights, recording.gradients(), strict=True):
        weight.grad = gradient if weight.grad is None else weight.grad + gradient


class WholeStep:
    """The training step of a policy that records all of it, beside the recorded `passes` of the model alone.

    `recordings` are those of the newest step, else the passes. `findings` say why a step, or a part of it, is
    not recorded; each is told as a finding of the passes is.
    """

    def __init__(self, passes: Recordings) -> None:
        self.recordings = passes
        self.findings: list[Finding] = []
        self._passes = passes
        self._is_known = False
        self._all: list[StepRecordings] = []

    def of(
        self,
        recipe: Recipe,
        loss: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        clip: float | None,
        model: nn.Module | None,
    ) -> RecipeStep:
        """Returns the recipe's step with this loss and optimizer. A model other than the policy's is not recorded."""
        self._is_known = True
        if model not in (None, recipe.model):
            self._tell_missed(f"its training_step has {type(model).__name__} in place of tuned.model")
            return RecipeStep(recipe, loss, optimizer, clip, model)
        passes = self._passes
        recordings = StepRecordings(passes.model, loss, self._say, passes.recorder, passes.device_type)
        self.recordings = recordings
        self._all.append(recordings)
        return RecordedStep(recipe, loss, optimizer, clip, recordings)

    def look(self) -> None:
        """Tells once if the loop trains by the model's passes, and has no step from `training_step`."""
        if not self._is_known and self._passes.made:
            self._is_known = True
            self._tell_missed("it does not train by tuned.training_step(loss, optimizer)")

    def end(self) -> None:
        """Drops the recordings of all steps for good."""
        for recordings in self._all:
            recordings.end()

    def _tell_missed(self, why: str) -> None:
        message = (
            f"the policy records whole training steps (cuda_graphs: step), and this loop misses it since {why}: passes "
            "of the model are recorded, as with cuda_graphs: true, and loss, optimizer and loss scaler are not"
        )
        self._say(Finding(code="cuda-graphs-of-passes-only", message=message))

    def _say(self, finding: Finding) -> None:
        self.findings.append(finding)
        self._passes.say(finding)
