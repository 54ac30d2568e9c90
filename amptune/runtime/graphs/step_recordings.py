"""Decides, call by call, whether a training step is watched, recorded as a whole, replayed or compared, or runs itself.

A step is any function of a batch: passes of several models, their optimizers, clipping, the loss scaler, an average of
weights. A replay runs no Python and reads and writes the same memory each time. So a step is recorded after two of its
own wrote to the same memory and changed nothing on the host, and replays are compared with the step itself.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from amptune.runtime.graphs.dispatch import DIFFER, MOST_SEEN, MOST_WASTED, WORTH_IT, NamedRecordings
from amptune.runtime.graphs.host_effects import HostSnapshot, NotRecordableError
from amptune.runtime.graphs.model_state import ModelState, is_observed
from amptune.runtime.graphs.optimizer_inputs import OptimizerInputs
from amptune.runtime.graphs.passes import NO_MEMORY
from amptune.runtime.graphs.recorder import as_written
from amptune.runtime.graphs.signature import Signature, arguments_of, outputs_of
from amptune.runtime.graphs.step_memory import MemoryWatch
from amptune.runtime.graphs.step_parts import StepKind, StepParts
from amptune.runtime.graphs.step_recording import StepRecording

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amptune.policy.findings import Finding
    from amptune.runtime.graphs.recorder import Recorder

__all__ = ["FIRST_COMPARED", "GAP", "StepRecordings"]

# So many replays of a recording are compared, and then one after a random gap of about so many.
FIRST_COMPARED, GAP = 16, 512
# Comparing takes at most this share of training: the gaps grow until it does.
MOST_COMPARING = 0.01
# Recordings share the memory of what they compute; micro-batches have one each, and so have shapes.
MOST_RECORDINGS = 8
# A step is watched so often until two watches saw the same memory.
MOST_WATCHES = 6
_NOTHING = object()


@dataclass
class SeenStep:
    """A kind of step that came, and the last watch on it."""

    kind: StepKind
    calls: int = 0
    watch: MemoryWatch | None = None
    is_ready: bool = False

    def note(self, watch: MemoryWatch) -> None:
        """Notes one more watch; two that agree are enough."""
        before, self.watch = self.watch, watch
        self.is_ready = before is not None and (before.written.keys(), before.added) == (
            watch.written.keys(),
            watch.added,
        )


class StepRecordings(NamedRecordings):
    """The recordings of one step, one for each kind of batch.

    A kind runs by itself at first, which sets up lasting state. Then it is watched until two steps wrote to the same
    memory; if they changed nothing on the host, the next one is recorded. `say` gets a finding when recording ends, or
    cannot begin. `made` counts recordings, `calls` replays.
    """

    never = "no step of its training came often enough under the same conditions"

    def __init__(
        self,
        subject: StepParts,
        say: Callable[[Finding], None],
        recorder: Callable[[torch.device], Recorder],
        device_type: str,
    ) -> None:
        super().__init__(f"the training step of {type(subject.models[0]).__name__}", "with cuda_graphs: true", say)
        self.recorder, self.device_type = recorder, device_type
        self.checks = True  # but while a trial times steps
        self.made = self.calls = 0
        self._subject = subject
        self._recorded: list[StepRecording] = []
        self._seen: list[SeenStep] = []
        self._by: Recorder | None = None
        self._models: list[ModelState] = []
        self._code: HostSnapshot | None = None
        self._weights: list[torch.Tensor] = []  # those of the snapshots
        self._is_asked_for_check = False
        self._replays = self._wasted = 0
        self._has_ended = False
        self._random = random.Random(0)  # noqa: S311  # the same gaps on all ranks
        self._since_s = time.perf_counter()
        self._thread = threading.get_ident()

    def __len__(self) -> int:
        return len(self._recorded)

    @property
    def is_over(self) -> bool:
        """True once the step runs by itself, whatever it is given."""
        return self._has_ended or (self.why_not is not None and not self._recorded)

    def forget(self) -> None:
        """Drops all recordings, and their memory."""
        self._recorded.clear()
        self._seen.clear()
        self._models.clear()
        self._code, self._weights = None, []

    def end(self) -> None:
        """Drops all recordings for good."""
        self.forget()
        self._has_ended = True

    def run(self, step: Callable[[Any], Any], batch: Any, part: object = None) -> Any:
        """Returns what the step does for the batch, by a replay if one does the same.

        `part` tells steps apart that do different things, such as the last micro-batch and the others.
        """
        given = self._arguments(batch) if self._may_replay() else None
        if given is None:
            return step(batch)
        step = partial(_without_graph, step)  # as of replays; and what holds it binds gradients to the stream of then
        try:
            found = self._found_for(given, part, step)
        except Exception as error:  # noqa: BLE001  # the user's code may raise anything: it will in the step itself too
            self.give_up(error)
            return step(batch)
        if isinstance(found, StepRecording):
            return self._replayed(found, given[1], lambda: step(batch))
        return step(batch) if found is None else self._watched(found, given[1], lambda: step(batch))

    def _may_replay(self) -> bool:
        is_there = self.device_type != "cuda" or torch.cuda.is_available()  # else the policy's own finding says so
        if self.is_over or not is_there or self._subject.recipe.guard is not None:
            return False
        return torch.is_grad_enabled() and threading.get_ident() == self._thread and not is_observed()

    def _arguments(self, batch: Any) -> tuple[Signature, list[torch.Tensor]] | None:
        found = arguments_of((batch,), {}, self.device_type, least=0)
        if found is None:
            self.give_up(NotRecordableError("gets more in its batch than tensors on the GPU, numbers and strings"))
        return found

    def _found_for(
        self, given: tuple[Signature, list[torch.Tensor]], part: object, step: Callable[[Any], Any]
    ) -> StepRecording | SeenStep | None:
        """Returns a recording, known or made now, notes on a kind that is not recorded yet, or None."""
        weights, called = self._weights or self._subject.weights, self._subject.recipe.model
        device = weights[0].device
        if device.type != self.device_type:
            return None
        changed = next((one for state in self._models if (one := state.changed()) is not None), None)
        changed = changed or (None if self._code is None else self._code.changed())
        if called._forward_hooks or called._forward_pre_hooks:
            raise NotRecordableError("has forward hooks on tuned.model, which replays would not call")
        if any(one._backward_hooks or one._post_accumulate_grad_hooks for one in weights):
            raise NotRecordableError("has a hook on the gradient of a weight")
        autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        kind = StepKind(given[0], part, autocast, tuple([(one.requires_grad, one.grad is not None) for one in weights]))
        known = next((one for one in self._recorded if one.kind == kind), None)
        if changed is None and known is not None and not known.optimizers.is_valid:
            changed = "a setting of its optimizer beside the learning rate"
        if changed is not None:
            self._begin_anew(changed)
            known = None
        if known is not None:
            return known
        if self.why_not is not None or len(self._recorded) >= MOST_RECORDINGS:
            return None
        seen = next((one for one in self._seen if one.kind == kind), None)
        if seen is None:  # this time it may set up what lasts
            self._seen = [*self._seen, SeenStep(kind)][-MOST_SEEN:]
            return None
        return self._recorded_now(seen, given[1], step) if seen.is_ready else seen

    def _recorded_now(
        self, seen: SeenStep, tensors: Sequence[torch.Tensor], step: Callable[[Any], Any]
    ) -> StepRecording:
        assert seen.watch is not None and self._by is not None  # noqa: PT018, S101  # `SeenStep.is_ready`
        if not self._models:
            self._models = [*map(ModelState, self._subject.models)]
            self._code = HostSnapshot([], self._subject.code, self._subject.parts)
            self._weights = self._subject.weights
        recording = StepRecording(seen.kind, step, self._subject, tensors, seen.watch, self._by)
        self._seen.remove(seen)
        self._recorded.append(recording)
        self.made += 1
        return recording

    def _watched(self, seen: SeenStep, tensors: Sequence[torch.Tensor], step: Callable[[], Any]) -> Any:
        """Returns what the step does, and notes the memory that it uses; gives up if a replay would not do the same."""
        subject, returned = self._subject, _NOTHING
        watch = MemoryWatch(tensors, [one.grad for one in subject.weights], subject.device)
        try:
            self._by = self._by or self.recorder(subject.device)
            optimizers = OptimizerInputs(subject.optimizers, subject.recipe.scaler, subject.device)
            host = HostSnapshot(subject.models, subject.code)
        except Exception as error:  # noqa: BLE001  # objects of the user's may raise anything
            self.give_up(error)
            return step()
        try:
            with as_written(subject.compiles), optimizers.may_be_captured(), self._by.rehearsing(), watch:
                returned = step()
            host.require_unchanged("step")
            outputs_of(returned)
            if watch.obstacle is not None:
                raise NotRecordableError(watch.obstacle)
            if seen.calls > MOST_WATCHES:
                raise NotRecordableError("writes to other tensors from step to step")
        except Exception as error:
            if returned is _NOTHING:
                raise
            self.give_up(error if watch.obstacle is None else NotRecordableError(watch.obstacle))
        seen.calls += 1
        seen.note(watch)
        return returned

    def _replayed(self, recording: StepRecording, tensors: Sequence[torch.Tensor], step: Callable[[], Any]) -> Any:
        self.calls += 1
        self._replays += 1
        recording.calls += 1
        is_asked, self._is_asked_for_check = self._is_asked_for_check, False
        if not is_asked and not (self.checks and recording.calls >= recording.due):
            self._subject.recipe.autocast()  # by which watches know of passes
            with recording.optimizers.told():
                return recording.replay(tensors)
        began_s = time.perf_counter()
        try:
            returned, told = recording.compared(tensors)
        except torch.OutOfMemoryError:
            self._stop(NO_MEMORY)
            return step()
        self._plan_next(recording, began_s)
        if told is not None:
            self._differ(recording, told)
        recording.compared_at = recording.calls
        return returned

    def _plan_next(self, recording: StepRecording, began_s: float) -> None:
        """Sets the call at which the recording is compared next."""
        now_s, calls = time.perf_counter(), recording.calls
        replay_s = (began_s - self._since_s) / max(1, calls - recording.compared_at)
        self._since_s = now_s
        gap = self.gap(now_s - began_s, replay_s)
        recording.due = calls + (1 if calls < FIRST_COMPARED else round(gap * self._random.uniform(0.5, 1.5)))

    def _differ(self, recording: StepRecording, told: str) -> None:
        self.forget()
        self._say_why_not(
            DIFFER,
            f"replays of {self.name} differ from it: {told} (call {recording.calls} of the recording; steps after its "
            f"call {recording.compared_at} may have trained wrongly); nothing is recorded any more, and it runs as "
            f"{self.otherwise}",
        )

    def _begin_anew(self, changed: str) -> None:
        """Drops all recordings. Raises `NotRecordableError` after too many changes before or soon after recording."""
        self._wasted = self._wasted + 1 if self._replays < WORTH_IT else 0
        self._replays = 0
        self.forget()
        if self._wasted >= MOST_WASTED:
            raise NotRecordableError(f"reads what changes again and again ({changed})")

    def check_next(self) -> None:
        """Has the next replay compared, whatever the count of calls."""
        self._is_asked_for_check = True

    def gap(self, compared: float, replayed: float) -> float:
        """Returns the mean number of replays for one that is compared, from the time that one of each takes."""
        return max(GAP, compared / (MOST_COMPARING * max(replayed, 1e-9)))

    def doubt(self) -> None:
        """Returns None: a difference is settled at once."""


def _without_graph(step: Callable[[Any], Any], batch: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.Tensor.detach, step(batch))
