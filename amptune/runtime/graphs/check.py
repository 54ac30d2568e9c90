"""Compares a replay with the model's own pass on the same batch, of which only the model's own trains."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from amptune.runtime.graphs.differences import named_results, relative_differences
from amptune.runtime.graphs.host_effects import DeviceState, NotRecordableError, copies_of
from amptune.runtime.graphs.passes import ReplayedPass
from amptune.runtime.graphs.signature import outputs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from amptune.runtime.graphs.capture import Recording

__all__ = ["CHECK_EVERY", "LAST_DOUBLED", "Check", "Checks"]

# A recording is compared with the model at its calls 1, 2, 4 ... to this one, and then each time so many have come.
LAST_DOUBLED, CHECK_EVERY = 256, 512

# Gradients are compared in groups of about so many numbers, which bounds the memory that a check needs.
_GROUP = 1 << 26
# A difference of a gradient that the next check does not find counts above this: where rounding turns a single ReLU,
# which is in one pass of hundreds, outputs stay as they are, and gradients that nearly cancel differed by up to 0.04
# (a small network with noise as of sums in any order, 1200 passes).
ONCE = 0.1
_ANOTHER = (float("inf"), 0.0)


class Check:
    """One replay beside the model's own pass.

    `differing` has (difference, limit) of each result that differs by more than the recording's limits, once
    `is_read()`: nothing waits for the device before.
    """

    def __init__(self, recording: Recording, end: Callable[[str], None]) -> None:
        self.call = recording.calls
        self.differing: dict[str, tuple[float, float]] = {}
        self.recording, self._end = recording, end
        self._pass: weakref.ref[ReplayedPass] | None = None
        self._names: list[str] = []
        self._found: list[torch.Tensor] = []
        self._results: torch.Tensor | None = None
        self._event: torch.cuda.Event | None = None

    def run(self, tensors: Sequence[torch.Tensor], own: Callable[[], Any]) -> Any:
        """Returns what the model's own pass returns; its backward pass is compared when it comes.

        Replays the forward pass first, and then restores buffers and random generators. Raises `UnusualError` as a
        replay does, or `OutOfMemoryError`.
        """
        before = DeviceState(self.recording.model)
        try:
            return self._run(tensors, own, before.put_back)
        except torch.OutOfMemoryError:
            before.put_back()
            raise

    def _run(self, tensors: Sequence[torch.Tensor], own: Callable[[], Any], put_back: Callable[[], None]) -> Any:
        recording = self.recording
        replay = ReplayedPass(recording, tensors, self._end)
        buffers = dict(recording.model.named_buffers())
        after = dict(zip(buffers, copies_of([*buffers.values()]), strict=True))
        replayed = named_results(recording.outputs(), after)
        put_back()
        returned = own()
        try:
            signature, outputs = outputs_of(returned)
            is_alike = signature == recording.returns
        except NotRecordableError:
            is_alike, outputs = False, []
        found = named_results(outputs, dict(recording.model.named_buffers()))
        if not (is_alike and _are_alike(found, replayed)):
            self.differing["what it returns"] = _ANOTHER
            replay.over = True
            return returned
        self._note(found, replayed)
        self._pass = weakref.ref(replay)
        replay.own, replay.compare = outputs, self._compare
        return replay.outputs()

    @torch.no_grad()
    def _compare(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Compares the model's gradients for this batch with those of the replay."""
        replayed = self.recording.recorded_gradients()
        group: dict[str, torch.Tensor] = {}
        numbers = 0
        for name, own in zip(replayed, gradients, strict=True):
            if own is None or own.layout is not torch.strided:
                self.differing[name] = _ANOTHER
                continue
            group[name] = own
            numbers += own.numel()
            if numbers > _GROUP:
                self._note(group, replayed)
                group, numbers = {}, 0
        self._note(group, replayed)

    def _note(self, own: Mapping[str, torch.Tensor], replayed: Mapping[str, torch.Tensor]) -> None:
        if own:
            self._names += own
            others = {name: replayed[name].to(one.dtype) for name, one in own.items()}
            self._found.append(relative_differences(own, others))

    def is_read(self, *, wait: bool = False) -> bool:
        """Returns True once `differing` is known, which is after the backward pass, or once none can come.

        Waits for the device only if told so.
        """
        replay = None if self._pass is None else self._pass()
        if replay is not None and not replay.over:
            return False
        if self._found:
            found = torch.cat(self._found)
            self._found.clear()
            self._results = torch.empty(found.shape, pin_memory=found.is_cuda).copy_(found, non_blocking=True)
            if found.is_cuda:
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has not typed it
                self._event.record()
        if self._event is not None and wait:
            self._event.synchronize()
        if self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]
            return False
        if self._results is not None:
            for name, apart in zip(self._names, self._results.tolist(), strict=True):
                limit = self.recording.limits[name]
                if not apart <= limit:
                    self.differing[name] = (apart, limit)
            self._results = None
        return True

    def leaves_unexplained(self, former: Check) -> bool:
        """Returns True if a former check differed by more than the limits that were measured anew since."""
        limits, gradients = self.recording.limits, self.recording.recorded_gradients()
        return any(
            not apart <= max(limits[name], ONCE if name in gradients else 0.0)
            for name, (apart, _) in former.differing.items()
        )

    @property
    def since(self) -> int:
        """The call of the recording that was compared last before this one."""
        return self.call // 2 if self.call <= LAST_DOUBLED else self.call - CHECK_EVERY

    def told(self) -> str:
        """Returns the first difference in words: an output's, or else a buffer's, or else a gradient's."""
        name, (apart, limit) = next(iter(self.differing.items()))
        by = "" if limit == 0 else f" by {apart:.2g} of its size, where {limit:.2g} is allowed"
        return f"{name} is another{by}"


class Checks:
    """When a recording is compared, and what came of it: the last comparison, and those that are in doubt.

    `doubts` has the last comparison of each recording, if it found a difference that the next one is to settle.
    """

    def __init__(self) -> None:
        self.is_forced = False
        self.last: Check | None = None
        self.doubts: dict[Recording, Check] = {}

    def clear(self) -> None:
        self.last = None
        self.doubts.clear()

    def is_due(self, recording: Recording, *, by_count: bool) -> bool:
        """Returns True by the count of calls alone, if nothing is in doubt; answers a request for one once."""
        calls, is_forced, self.is_forced = recording.calls, self.is_forced, False
        doubled = calls <= LAST_DOUBLED and calls & (calls - 1) == 0
        return (by_count and (doubled or calls % CHECK_EVERY == 0)) or is_forced or recording in self.doubts

    def read(self, *, wait: bool) -> Check | None:
        """Reads the last comparison if the device has done it. Returns a difference that the next one has found too."""
        check = self.last
        if check is None or not check.is_read(wait=wait):
            return None
        self.last = None
        doubted = self.doubts.pop(check.recording, None)
        if doubted is not None:
            return doubted if check.differing or check.leaves_unexplained(doubted) else None
        if check.differing:
            self.doubts[check.recording] = check
        return None


def _are_alike(found: Mapping[str, torch.Tensor], replayed: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == replayed.keys() and all(
        all(getattr(one, each) == getattr(replayed[name], each) for each in ("shape", "dtype", "device", "layout"))
        for name, one in found.items()
    )
