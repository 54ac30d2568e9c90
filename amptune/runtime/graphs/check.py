"""Compares a replay with the model's own pass on the same batch, of which only the model's own trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amptune.runtime.graphs.differences import Difference, named_results, relative_differences
from amptune.runtime.graphs.host_effects import DeviceState, NotRecordableError
from amptune.runtime.graphs.passes import ReplayedPass
from amptune.runtime.graphs.signature import outputs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from amptune.runtime.graphs.capture import Recording

__all__ = ["CHECK_EVERY", "LAST_DOUBLED", "Check", "is_due"]

# A recording is compared with the model at its calls 1, 2, 4 ... to this one, and then each time so many have come.
LAST_DOUBLED, CHECK_EVERY = 256, 512

# Gradients are compared in groups of about so many numbers, which bounds the memory that a check needs.
_GROUP = 1 << 26
_ANOTHER = (float("inf"), 0.0)


def is_due(calls: int) -> bool:
    """Returns True if a recording is to be compared with the model at its call of this number."""
    return calls % CHECK_EVERY == 0 or (calls <= LAST_DOUBLED and calls & (calls - 1) == 0)


class Check:
    """One replay beside the model's own pass; the difference is complete once `is_read()`."""

    def __init__(self, recording: Recording, end: Callable[[str], None]) -> None:
        call = recording.calls
        self.difference = Difference(call, since=call // 2 if call <= LAST_DOUBLED else call - CHECK_EVERY)
        self.recording, self._end = recording, end
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
        buffers = {name: buffer.clone() for name, buffer in recording.model.named_buffers()}
        replayed = named_results(recording.outputs(), buffers)
        put_back()
        returned = own()
        try:
            signature, outputs = outputs_of(returned)
            is_alike = signature == recording.returns
        except NotRecordableError:
            is_alike, outputs = False, []
        found = named_results(outputs, dict(recording.model.named_buffers()))
        if not (is_alike and _are_alike(found, replayed)):
            self.difference.results["what it returns"] = _ANOTHER
            replay.over = True
            return returned
        self._note(found, replayed)
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
                self.difference.results[name] = _ANOTHER
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
        """Returns True once the difference is known, which is after the backward pass, or once none can come.

        Waits for the device only if told so.
        """
        if self.recording.is_busy:
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
                    self.difference.results[name] = (apart, limit)
        return True


def _are_alike(found: Mapping[str, torch.Tensor], replayed: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == replayed.keys() and all(
        all(getattr(one, each) == getattr(replayed[name], each) for each in ("shape", "dtype", "device", "layout"))
        for name, one in found.items()
    )
