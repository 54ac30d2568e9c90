"""A training step that is recorded whole, whatever it is made of, and replayed as one CUDA graph.

A step is any function of a batch: passes of several models, their optimizers, clipping, the loss scaler, an average of
weights. A replay runs no Python and reads and writes the same memory each time. So a step is recorded after two of its
own wrote to the same memory and changed nothing on the host, and replays are compared with the step itself.
"""

from __future__ import annotations

import random
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from amptune.changes.blocks import holds_compiled
from amptune.policy.findings import Finding
from amptune.runtime.graphs.differences import unit_of
from amptune.runtime.graphs.dispatch import DIFFER, MOST_WASTED, WORTH_IT, Told
from amptune.runtime.graphs.host_effects import HostSnapshot, NotRecordableError, RandomState, without_repeats
from amptune.runtime.graphs.model_state import ModelState, is_observed
from amptune.runtime.graphs.optimizer_inputs import OptimizerInputs
from amptune.runtime.graphs.passes import NO_MEMORY
from amptune.runtime.graphs.signature import Signature, arguments_of, outputs_of
from amptune.runtime.graphs.step_memory import StepWatch, Values, differences, whole
from amptune.runtime.graphs.tensor_use import place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from amptune.runtime.graphs.dispatch import Recordings
    from amptune.runtime.graphs.recorder import Recorder
    from amptune.runtime.training_step import Recipe

__all__ = ["StepRecordings", "WholeStep"]

# So many replays of a recording are compared, and then one after a random gap of about so many.
FIRST_COMPARED, GAP = 16, 512
# Comparing takes at most this share of training: the gaps grow until it does.
MOST_COMPARING = 0.01
# Recordings share the memory of what they compute; micro-batches have one each, and so have shapes.
MOST_RECORDINGS = 8
# A step is watched so often until two watches saw the same memory.
MOST_WATCHES = 6
# A difference counts above so many times what the step's own results differ by.
SLACK, LEAST = 4.0, 1e-5
_NOTHING = object()


class Kind(NamedTuple):
    """The conditions that must be the same for a recording to do what the step would.

    `gradients` tells which weights have one before the step.
    """

    batch: Signature
    part: object
    autocast: tuple[bool, torch.dtype]
    gradients: tuple[bool, ...]

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Returns the batch with these tensors in it."""
        (batch,), _ = self.batch.filled(tensors)
        return batch


@dataclass(eq=False)
class Subject:
    """What is trained: the step, the function in it that is the user's, its models and optimizers."""

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

    @cached_property
    def compiles(self) -> bool:
        return any(map(holds_compiled, self.models))

    def as_written(self) -> AbstractContextManager[Any]:
        """Runs what is compiled as it was written, operation by operation, for a watch to see."""
        return torch.compiler.set_stance("force_eager") if self.compiles else nullcontext()

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


class StepRecording:
    """One recorded step for batches like `tensors`; `watch` saw the memory that it uses.

    Raises `NotRecordableError`, or any error of the step.
    """

    def __init__(
        self,
        kind: Kind,
        step: Callable[[Any], Any],
        subject: Subject,
        tensors: Sequence[torch.Tensor],
        watch: StepWatch,
        by: Recorder,
    ) -> None:
        self.kind = kind
        self.calls, self.compared_at, self.due = 0, 0, 1
        self.inputs = [_like(one) for one in tensors]
        self._step, self._by, self._subject = step, by, subject
        self._kept = watch  # and what it read, which replays read too
        self._device = tensors[0].device
        weights = subject.weights
        gradients = [one.grad for one in weights]
        # gradients that the step adds to, where replays read them
        self._before = [(weights[number], one) for number in watch.added if (one := gradients[number]) is not None]
        self.optimizers = OptimizerInputs(subject.optimizers, subject.recipe.scaler, self._device)
        random_state, host = RandomState(self._device), HostSnapshot(subject.models, subject.code)
        torch.clear_autocast_cache()
        try:
            with self.optimizers.as_recorded():
                returned, self._replay = by.record(lambda: step(kind.filled(self.inputs)))
            self.returns, outputs = outputs_of(returned)
        finally:
            torch.clear_autocast_cache()
            random_state.put_back()
            host.put_back()
        self._outputs = {f"output {number}": one.detach() for number, one in enumerate(outputs, 1)}
        # and those that it leaves, where replays write them
        self._left = [(one, one.grad) for one in weights if one.grad is not None]
        self._empty = [one for one in weights if one.grad is None]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        of_weights = {place_of(one): one for _, one in (*self._before, *self._left)}
        left = {f"gradient {number}": whole(one) for number, one in enumerate(of_weights.values(), 1)}
        self._state = {**subject.named({place: whole(one) for place, one in watch.written.items()}), **left}

    def _bring(self) -> None:
        """Lays the gradients that the step adds to where replays read them."""
        for weight, gradient in self._before:
            if weight.grad is not None and weight.grad is not gradient:
                weight.grad = gradient.copy_(weight.grad)

    def replay(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Trains, and returns copies of what the step returned."""
        self._by.take_turn()
        self._bring()
        for own, given in zip(self.inputs, tensors, strict=True):
            without_repeats(own).copy_(without_repeats(given), non_blocking=True)
        with self.optimizers.replayed():
            self._replay()
        for weight, gradient in self._left:
            weight.grad = gradient
        for weight in self._empty:
            weight.grad = None
        return self.returns.filled([one.clone() for one in self._outputs.values()])

    def compared(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, str | None]:
        """Returns what the step itself returns, which trains on, and how a replay differs from it, or None.

        Raises `OutOfMemoryError` with everything as before.
        """
        self._bring()
        before = Values([*self._state.values()], self._device)
        weights = self._subject.weights
        gradients = [one.grad for one in weights]

        def go_back() -> None:
            before.put_back()
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient

        try:
            self.replay(tensors)
            replayed = self._results(Values([*self._state.values()], self._device).copies)
            go_back()
            returned, told = self._trained(tensors)
            starts = dict(zip(self._state, before.copies, strict=True))
            found = {} if told else differences(self._results(), replayed, starts)
            if found:
                allowed = self._allowed(tensors, starts, go_back)
                found = {name: apart for name, apart in found.items() if apart > allowed.get(name, 0.0) + LEAST}
        except torch.OutOfMemoryError:
            go_back()
            raise
        name, apart = next(iter(found.items()), ("", 0.0))
        return returned, told or (f"{name} is another by {apart:.2g} of its change" if found else None)

    def _trained(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, str | None]:
        """Runs the step itself; leaves its gradients where replays do, and tells what else it did than a replay."""
        gradients = [one.grad for one in self._subject.weights]
        watch = None if self._subject.compiles else StepWatch(tensors, gradients)
        with watch or nullcontext():
            returned = self._step(self.kind.filled(tensors))
        try:
            signature, outputs = outputs_of(returned)
        except NotRecordableError:
            return returned, "what it returns is another"
        if signature != self.returns:
            return returned, "what it returns is another"
        self._own = [one.detach() for one in outputs]
        for weight, gradient in self._left:
            if weight.grad is None or weight.grad.shape != gradient.shape:
                return returned, "a gradient is another"
            if weight.grad is not gradient:
                gradient.copy_(weight.grad)
                weight.grad = gradient
        others = [] if watch is None else [*watch.written.keys() ^ self._kept.written.keys()]
        if watch is not None and others:
            tensor = (watch.written | self._kept.written)[others[0]]
            return returned, f"{next(iter(self._subject.named({others[0]: tensor})))} is not always written"
        return returned, None

    def _results(self, state: Sequence[torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Returns what the step itself left and returned, or what a replay did with its `state`, by name."""
        outputs = self._own if state is None else self._outputs.values()
        kept = self._state.values() if state is None else state
        return dict(zip((*self._state, *self._outputs), (*kept, *outputs), strict=True))

    def _allowed(
        self, tensors: Sequence[torch.Tensor], starts: Mapping[str, torch.Tensor], go_back: Callable[[], None]
    ) -> dict[str, float]:
        """Returns by how much results of the step itself differ, alone and after a rounding error in its batch."""
        own, results = Values([*self._state.values()], self._device), [*self._own]
        first = dict(zip((*self._state, *self._outputs), (*own.copies, *results), strict=True))
        found: dict[str, float] = {}
        for given in (tensors, self._rounded(tensors)):
            go_back()
            self._trained(given)
            for name, apart in differences(first, self._results(), starts).items():
                found[name] = max(found.get(name, 0.0), SLACK * apart)
        own.put_back()
        return found

    def _rounded(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the batch with floating values changed by a unit in the last place of the dtype that computes."""
        with self._subject.recipe.autocast():
            unit = unit_of(self._device.type, self._subject.models[0])
        signs = torch.Generator(self._device).manual_seed(0)
        return [
            one
            * (1 + unit * (torch.randint(0, 2, one.shape, generator=signs, device=one.device) * 2 - 1)).to(one.dtype)
            if one.is_floating_point()
            else one
            for one in tensors
        ]


@dataclass
class Seen:
    """A kind of step that came, and the last watch on it."""

    kind: Kind
    calls: int = 0
    watch: StepWatch | None = None
    is_ready: bool = False

    def note(self, watch: StepWatch) -> None:
        """Notes one more watch; two that agree are enough."""
        before, self.watch = self.watch, watch
        self.is_ready = before is not None and (before.written.keys(), before.added) == (
            watch.written.keys(),
            watch.added,
        )


class StepRecordings(Told):
    """The recordings of one step, one for each kind of batch.

    A kind runs by itself at first, which sets up lasting state. Then it is watched until two steps wrote to the same
    memory; if they changed nothing on the host, the next one is recorded. `say` gets a finding when recording ends, or
    cannot begin. `made` counts recordings, `calls` replays.
    """

    never = "no step of its training came often enough under the same conditions"

    def __init__(
        self,
        subject: Subject,
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
        self._seen: list[Seen] = []
        self._by: Recorder | None = None
        self._models: list[ModelState] = []
        self._code: HostSnapshot | None = None
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
        self._code = None

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
        found = arguments_of((batch,), {}, self.device_type)
        if found is None:
            self.give_up(NotRecordableError("gets more in its batch than tensors on the GPU, numbers and strings"))
        return found

    def _found_for(
        self, given: tuple[Signature, list[torch.Tensor]], part: object, step: Callable[[Any], Any]
    ) -> StepRecording | Seen | None:
        """Returns a recording, known or made now, notes on a kind that is not recorded yet, or None."""
        subject, device = self._subject, given[1][0].device
        changed = next((one for state in self._models if (one := state.changed()) is not None), None)
        changed = changed or (None if self._code is None else self._code.changed())
        weights, called = subject.weights, subject.recipe.model
        if called._forward_hooks or called._forward_pre_hooks:
            raise NotRecordableError("has forward hooks on tuned.model, which replays would not call")
        if any(one._backward_hooks or one._post_accumulate_grad_hooks for one in weights):
            raise NotRecordableError("has a hook on the gradient of a weight")
        autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
        kind = Kind(given[0], part, autocast, tuple([one.grad is not None for one in weights]))
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
            self._seen.append(Seen(kind))
            return None
        return self._recorded_now(seen, given[1], step) if seen.is_ready else seen

    def _recorded_now(self, seen: Seen, tensors: Sequence[torch.Tensor], step: Callable[[Any], Any]) -> StepRecording:
        assert seen.watch is not None and self._by is not None  # noqa: PT018, S101  # `Seen.is_ready`
        if not self._models:
            self._models = [*map(ModelState, self._subject.models)]
            self._code = HostSnapshot([], self._subject.code, self._subject.parts)
        recording = StepRecording(seen.kind, step, self._subject, tensors, seen.watch, self._by)
        self._seen.remove(seen)
        self._recorded.append(recording)
        self.made += 1
        return recording

    def _watched(self, seen: Seen, tensors: Sequence[torch.Tensor], step: Callable[[], Any]) -> Any:
        """Returns what the step does, and notes the memory that it uses; gives up if a replay would not do the same."""
        subject, returned = self._subject, _NOTHING
        watch = StepWatch(tensors, [one.grad for one in subject.weights])
        try:
            self._by = self._by or self.recorder(tensors[0].device)
            optimizers = OptimizerInputs(subject.optimizers, subject.recipe.scaler, tensors[0].device)
            host = HostSnapshot(subject.models, subject.code)
        except Exception as error:  # noqa: BLE001  # objects of the user's may raise anything
            self.give_up(error)
            return step()
        try:
            with subject.as_written(), optimizers.may_be_captured(), self._by.rehearsing(), watch:
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
            self._tell_missed("DistributedDataParallel exchanges gradients in its backward pass")
            return None
        passes = self._passes
        models = [passes.model] if model in (None, recipe.model) else [passes.model, model]
        subject = Subject(code=code, models=models, optimizers=optimizers, recipe=recipe)
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


def _without_graph(step: Callable[[Any], Any], batch: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.Tensor.detach, step(batch))


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the same strides; an expanded tensor is expanded in the copy too."""
    plain = without_repeats(tensor.detach())
    own = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=plain.device)
    return own.copy_(plain).expand(tensor.shape)
