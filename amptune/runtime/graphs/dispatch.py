"""Decides, call by call, whether a recording is replayed, compared or made, or the model itself runs."""

from __future__ import annotations

import threading
import weakref
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amptune.changes.blocks import holds_compiled
from amptune.errors import PolicyApplyError, first_line
from amptune.policy.findings import Finding
from amptune.runtime.graphs.capture import Recording, UnusualError
from amptune.runtime.graphs.check import CHECK_EVERY, Check, is_due
from amptune.runtime.graphs.host_effects import NotRecordableError, obstacle_in
from amptune.runtime.graphs.model_state import ModelState, is_observed
from amptune.runtime.graphs.passes import NO_MEMORY, ReplayedPass, SeenPass
from amptune.runtime.graphs.recorder import Recorder, as_if_recording
from amptune.runtime.graphs.signature import PassKind, Signature, arguments_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amptune.runtime.graphs.differences import Difference

__all__ = ["DIFFER", "MOST_SEEN", "MOST_WASTED", "NOT_RECORDED", "WORTH_IT", "Recordings"]

NOT_RECORDED, DIFFER = "cuda-graphs-not-recorded", "cuda-graphs-differ"

# Each recording keeps the memory of its activations, so there are few: a batch, the last of an epoch, and some more.
MOST_RECORDINGS = 4
# The number of kinds of passes that are remembered after coming once.
MOST_SEEN = 8
# After a change of the model all is recorded again, which takes a second. Recording ends after MOST_WASTED changes in a
# row that came before WORTH_IT replays.
MOST_WASTED, WORTH_IT = 5, 20
_NOTHING = object()
_all: weakref.WeakSet[NamedRecordings] = weakref.WeakSet()


class NamedRecordings:
    """Recordings of what messages call `name`; it runs as `otherwise` says once they end, and `say` is told why."""

    never = "its training never calls the model with tensors on the GPU"

    def __init__(self, name: str, otherwise: str, say: Callable[[Finding], None]) -> None:
        self.name, self.otherwise, self.say = name, otherwise, say
        self.why_not: Finding | None = None
        self._out_of_memory: torch.OutOfMemoryError | None = None
        _all.add(self)

    def __len__(self) -> int:
        raise NotImplementedError

    def forget(self) -> None:
        raise NotImplementedError

    def give_up(self, error: Exception) -> None:
        """Records no more after an error that came while recording."""
        if isinstance(error, torch.OutOfMemoryError):
            self._out_of_memory = torch.OutOfMemoryError(str(error))  # without the traceback, which keeps memory alive
        if isinstance(error, torch.AcceleratorError):  # the graphs draw from a generator that was replaced after it
            for recordings in list(_all):
                recordings.forget()
        told = error.__cause__ or error
        words = first_line(told)
        self._refuse(words if isinstance(told, NotRecordableError) else f"raises {type(told).__name__} ({words})")

    def _stop(self, reason: str) -> None:
        """Ends recording while training is under way; nothing went wrong in it."""
        self.forget()
        self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        what, otherwise = ("such a batch", "without cuda_graphs") if len(self) else ("it", self.otherwise)
        words = f"{self.name} {reason}; {what} is not recorded as a CUDA graph, and runs as {otherwise}"
        self._say_why_not(NOT_RECORDED, words)

    def _say_why_not(self, code: str, message: str) -> None:
        self.why_not = Finding(code=code, message=message)
        self.say(self.why_not)

    def require_agreement(self) -> None:
        """Raises `PolicyApplyError` if a replay differed from the model, or if that is not settled."""
        self.require_some()

    def require_some(self) -> None:
        """Raises `PolicyApplyError` with the reason if nothing was recorded although training is under way."""
        if len(self):
            return
        never = f"{self.never}, and so nothing is recorded as a CUDA graph"
        raise PolicyApplyError(never if self.why_not is None else self.why_not.message) from self._out_of_memory


class Recordings(NamedRecordings):
    """The recorded passes of one model.

    A kind of pass is recorded when it comes for the second time. The first time the model runs itself: this may set up
    lasting state, and shows which outputs the loss uses. Each recording is compared with the model now and then, by the
    count of its calls alone, so that the ranks of a distributed training compare together; a difference ends all
    recording. `say` gets a finding when recording ends, or cannot begin. `made` counts all recordings ever made.
    """

    def __init__(
        self,
        model: nn.Module,
        say: Callable[[Finding], None],
        recorder: Callable[[torch.device], Recorder],
        device_type: str,
    ) -> None:
        super().__init__(f"the forward pass of {type(model).__name__}", "without cuda_graphs", say)
        self.model = model
        self.is_held: Callable[[], bool] = lambda: False  # while whole steps are recorded
        self.recorder = recorder
        self.device_type = device_type
        self.made = 0
        self._recorded: list[Recording] = []
        self._seen: list[SeenPass] = []
        self._state: ModelState | None = None
        self.checks = True  # but while a trial times steps
        self._last: Check | None = None  # until it is read
        self._is_asked_for_check = False
        self._replays = self._wasted = 0
        self._has_ended = False
        self._compiles = holds_compiled(model)
        self._thread: int | None = None
        self._lock = threading.RLock()  # another thread must not meet a model whose weights are exchanged
        me: Any = weakref.ref(self)  # for replays, which the loop may hold longer
        self._end = lambda reason: None if (found := me()) is None else found._stop(reason)

    def forget(self) -> None:
        """Drops all recordings, and their memory."""
        self._last = None
        self._recorded.clear()
        self._seen.clear()
        self._state = None

    def end(self) -> None:
        """Drops all recordings for good: from now on the model runs itself."""
        self.forget()
        self._has_ended = True

    def __len__(self) -> int:
        return len(self._recorded)

    @property
    def is_over(self) -> bool:
        """True once the model runs itself, whatever it is given."""
        return self._has_ended or (self.why_not is not None and not self._recorded)

    @property
    def calls(self) -> int:
        """The number of calls for which a recording was replayed."""
        return sum(recording.calls for recording in self._recorded)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what the model returns: from a recording if one computes the same, else from the model."""
        own = partial(self._own, *args, **kwargs)
        given = arguments_of(args, kwargs, self.device_type) if self._may_replay() else None
        found = None if given is None else self._found_for(*given)
        if isinstance(found, SeenPass):
            return self._noted(found, own())
        if given is not None and found is not None and not found.is_busy:
            returned = self._replayed(found, given[1], own)
            if returned is not _NOTHING:
                return returned
        del found  # and its memory
        return own()

    def _own(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model; what is compiled meets what it does while recorded, or would be compiled for both."""
        is_training = self.model.training and torch.is_grad_enabled()
        is_another = self._thread not in (None, threading.get_ident())
        around = as_if_recording() if self._compiles and is_training else nullcontext()
        with self._lock if is_another else nullcontext(), around:
            return self.model(*args, **kwargs)

    def _may_replay(self) -> bool:
        if self.is_over or self.is_held() or not (self.model.training and torch.is_grad_enabled()):
            return False
        self._thread = self._thread or threading.get_ident()
        return threading.get_ident() == self._thread and not is_observed()

    def _replayed(self, recording: Recording, tensors: Sequence[torch.Tensor], own: Callable[[], Any]) -> Any:
        """Returns what a replay or, if it is to be compared with that, the model returns; else `_NOTHING`."""
        self._read()
        if not self._recorded:
            return _NOTHING
        self._replays += 1
        recording.calls += 1
        is_asked, self._is_asked_for_check = self._is_asked_for_check, False
        is_compared = (self.checks and is_due(recording.calls)) or is_asked or recording.doubt is not None
        try:
            if not is_compared:
                return self.replay(recording, tensors)
            return self._compared(recording, tensors, own)
        except UnusualError as surprise:
            if recording.surprises_often():
                self._stop(str(surprise))
        except torch.OutOfMemoryError:
            if not (is_compared and self._recorded):
                raise
            self._stop(NO_MEMORY)
        return _NOTHING

    def replay(self, recording: Recording, tensors: Sequence[torch.Tensor]) -> Any:
        """Returns what the model would return. Raises `UnusualError`."""
        return ReplayedPass(recording, tensors, self._end).outputs()

    def _found_for(self, arguments: Signature, tensors: Sequence[torch.Tensor]) -> Recording | SeenPass | None:
        """Returns a recording, known or made now, or notes on a pass that may come again, or None."""
        if self._state is None and any(map(nn.parameter.is_lazy, self.model.parameters())):
            return None
        try:
            kind = self._kind_of(arguments)
            if self._state is not None and self._state.holds_memory_of(tensors):
                return None
            known = next((one for one in self._recorded if one.kind == kind), None)
            if known is not None or self.why_not is not None or len(self._recorded) >= MOST_RECORDINGS:
                return known
            seen = next((one for one in self._seen if one.kind == kind), None)
            if seen is None or not seen.is_used():
                seen = SeenPass(kind)
                self._seen = [seen, *(one for one in self._seen if one.kind != kind)][:MOST_SEEN]
                return seen
            seen.require_one_pass()
            with self._lock:
                recording = Recording(kind, self.model, tensors, seen.gradients, self.recorder(tensors[0].device))
        except Exception as error:  # noqa: BLE001  # the user's code may raise anything: it will in its own forward too
            self.give_up(error)
            return None
        self._seen.remove(seen)
        self._recorded.append(recording)
        self.made += 1
        return recording

    def _noted(self, seen: SeenPass, outputs: Any) -> Any:
        """Returns the outputs, with notes made on what the loss does with them."""
        try:
            return seen.watched(outputs)
        except NotRecordableError as error:
            self.give_up(error)
            return outputs

    def _kind_of(self, arguments: Signature) -> PassKind:
        changed = None if self._state is None else self._state.changed()
        if changed is not None:
            self._begin_anew(changed)
        if self._state is None:
            if (reason := obstacle_in(self.model)) is not None:
                raise NotRecordableError(reason)
            self._state = ModelState(self.model)
        autocast = (torch.is_autocast_enabled(self.device_type), torch.get_autocast_dtype(self.device_type))
        return PassKind(arguments=arguments, autocast=autocast, trained=self._state.trained())

    def _begin_anew(self, changed: str) -> None:
        """Drops all recordings. Raises `NotRecordableError` after too many changes before or soon after recording."""
        self._wasted = self._wasted + 1 if self._replays < WORTH_IT else 0
        self._replays = 0
        self.forget()
        if self._wasted >= MOST_WASTED:
            raise NotRecordableError(f"meets a changed model again and again ({changed})")

    def _compared(self, recording: Recording, tensors: Sequence[torch.Tensor], own: Callable[[], Any]) -> Any:
        """Returns what the model's own pass returns, which a replay is compared with. May raise `OutOfMemoryError`."""
        self._read(wait=True)
        if recording.doubt is not None:
            try:
                recording.measure_limits(tensors)
            except Exception:  # noqa: BLE001  # the user's code may raise anything: it will in its own forward too
                self._differ(recording.doubt)
        if not self._recorded:
            return _NOTHING
        check = Check(recording, self._end)
        returned = check.run(tensors, own)
        self._last = check
        return returned

    def _read(self, *, wait: bool = False) -> None:
        """Reads the last comparison, if the device has done it. Ends all recording if it confirms a difference."""
        check = self._last
        if check is None or not check.is_read(wait=wait):
            return
        self._last = None
        recording, found = check.recording, check.difference
        doubt, recording.doubt = recording.doubt, None
        if doubt is None:
            recording.doubt = found if found.results else None
        elif found.results or doubt.exceeds(recording.limits, recording.recorded_gradients()):
            self._differ(doubt)

    def _differ(self, found: Difference) -> None:
        """Ends all recording, as replays computed otherwise than the model does now."""
        self.forget()
        self._say_why_not(
            DIFFER,
            f"replays of {self.name} differ from the model: {found.told()} "
            f"(call {found.call} of the recording; steps after its call {found.since} may have trained wrongly); "
            f"nothing is recorded any more, and the model runs as {self.otherwise}",
        )

    def check_next(self) -> None:
        """Has the next replay compared, whatever the count of calls."""
        self._is_asked_for_check = True

    def gap(self, _compared: float, _replayed: float) -> float:
        """Returns the number of replays for one that is compared, in a long training."""
        return CHECK_EVERY

    def doubt(self) -> Difference | None:
        """Returns a difference that the next call settles; waits for the last comparison."""
        self._read(wait=True)
        return next((recording.doubt for recording in self._recorded if recording.doubt is not None), None)

    def require_agreement(self) -> None:
        """Raises `PolicyApplyError` if a replay differed from the model, or if that is not settled."""
        if (doubt := self.doubt()) is not None:
            self._differ(doubt)
        super().require_agreement()
