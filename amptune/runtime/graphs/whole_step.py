"""The training steps of a policy that records them whole, and the findings on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from amptune.policy.findings import Finding
from amptune.runtime.graphs.step_parts import StepParts
from amptune.runtime.graphs.step_recordings import StepRecordings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

    from amptune.runtime.graphs.dispatch import Recordings
    from amptune.runtime.training_step import Recipe

__all__ = ["WholeStep"]


class WholeStep:
    """The training steps of a policy that records them whole, beside the recorded `passes` of the model alone.

    `recordings` are those of the newest step, else the passes. `findings` say why a step is not recorded; each is told
    as a finding of the passes is.
    """

    def __init__(self, passes: Recordings) -> None:
        self.recordings: Recordings | StepRecordings = passes
        self.findings: list[Finding] = []
        self._passes = passes
        self._is_known = False
        self._all: list[StepRecordings] = []

    def of(
        self,
        recipe: Recipe,
        code: Mapping[str, Any],
        optimizers: Sequence[torch.optim.Optimizer],
        model: nn.Module | None,
    ) -> StepRecordings | None:
        """Returns recordings for a step of this code; None, which it tells, for a model that exchanges gradients."""
        self._is_known = True
        if model is not None and any(isinstance(one, DistributedDataParallel) for one in model.modules()):
            self._tell_missed(
                "DistributedDataParallel exchanges gradients in it, and ranks do not agree yet on what they record"
            )
            return None
        passes = self._passes
        models = [passes.model] if model in (None, recipe.model) else [passes.model, model]
        subject = StepParts(code=code, models=models, optimizers=optimizers, recipe=recipe)
        self.recordings = recordings = StepRecordings(subject, self._say, passes.recorder, passes.device_type)
        self._all.append(recordings)
        passes.is_held = lambda: not recordings.is_over
        return recordings

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
