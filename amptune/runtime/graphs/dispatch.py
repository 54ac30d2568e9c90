"""Decides, call by call, whether a recording is replayed, a pass is recorded, or the model itself runs."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_unflatten

from amptune.errors import PolicyApplyError
from amptune.policy.findings import Finding
from amptune.runtime.graphs.capture import CONSTANTS, Recording, is_kept
from amptune.runtime.graphs.host_effects import NotRecordableError, obstacle_in, without_effects
from amptune.runtime.graphs.model_state import ModelState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.utils._pytree import TreeSpec

    from amptune.runtime.graphs.recorder import Recorder

__all__ = ["NOT_RECORDED", "Recordings"]

NOT_RECORDED = "cuda-graphs-not-recorded"

# Each recording keeps the memory of its activations, so there are few: a batch, the last of an epoch, and some more.
MOST_RECORDINGS = 4
# The number of kinds of passes that are remembered after coming once.
MOST_SEEN = 8
# After a change of the model all is recorded again, which takes a second. Recording ends after MOST_WASTED changes in a
# row that came before WORTH_IT replays.
MOST_WASTED, WORTH_IT = 8, 20
# Recording also ends after this many changes before anything was recorded.
MOST_UNSETTLED = 3

_all: weakref.WeakSet[Recordings] = weakref.WeakSet()


class Recordings:
    """The recorded passes of one model.

    A kind of pass is recorded when it comes for the second time. The first time the model runs itself: this may set up
    lasting state, and shows which outputs the loss uses. `say` gets one finding if a pass cannot be recorded. `made`
    counts recordings, dropped ones included.
    """

    def __init__(
        self,
        model: nn.Module,
        say: Callable[[Finding], None],
        recorder: Callable[[torch.device], Recorder],
        device_type: str,
    ) -> None:
        self.model = model
        self.say = say
        self.recorder = recorder
        self.device_type = device_type
        self.why_not: Finding | None = None
        self.made = 0
        self._recorded: list[tuple[_Kind, Recording]] = []
        self._seen: list[_Seen] = []
        self._state: ModelState | None = None
        self._replays = self._wasted = self._unsettled = 0
        self._out_of_memory: torch.OutOfMemoryError | None = None
        self._has_ended = False
        _all.add(self)

    def forget(self) -> None:
        """Drops all recordings, and their memory."""
        self._recorded.clear()
        self._seen.clear()
        self._state = None

    def end(self) -> None:
        """Drops all recordings for good: from now on the model runs itself."""
        self.forget()
        self._has_ended = True

    def __len__(self) -> int:
        return len(self._recorded)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what the model returns: from a recording if one computes the same, else from the model."""
        given_up = self._has_ended or (self.why_not is not None and not self._recorded)
        if given_up or not (self.model.training and torch.is_grad_enabled()) or _is_observed():
            return self.model(*args, **kwargs)
        call = _Call.of(args, kwargs, self.device_type)
        recording, seen = (None, None) if call is None else self._recording_for(call)
        if recording is not None and call is not None and not recording.is_busy:
            self._replays += 1
            return recording(call.tensors)
        outputs = self.model(*args, **kwargs)
        return outputs if seen is None else seen.watched(outputs)

    def _recording_for(self, call: _Call) -> tuple[Recording | None, _Seen | None]:
        """Returns (a recording, known or made now, or None; notes on a pass that may come again, or None)."""
        if self._state is None and any(map(nn.parameter.is_lazy, self.model.parameters())):
            return None, None
        try:
            kind = self._kind_of(call)
            known = next((recording for one, recording in self._recorded if one == kind), None)
            if known is not None or self.why_not is not None or len(self._recorded) >= MOST_RECORDINGS:
                return known, None
            seen = next((one for one in self._seen if one.kind == kind), None)
            if seen is None or not seen.used:
                seen = _Seen(kind.without_tensors())
                self._seen = [seen, *(one for one in self._seen if one.kind != kind)][:MOST_SEEN]
                return None, seen
            seen.require_one_pass()
            recording = self._record(call, frozenset(seen.used))
        except Exception as error:  # noqa: BLE001  # the user's code may raise anything: it will in its own forward too
            self._give_up(error)
            return None, None
        self._unsettled = 0
        self._recorded.append((seen.kind, recording))
        self.made += 1
        return recording, None

    def _kind_of(self, call: _Call) -> _Kind:
        if self._state is not None and not self._state.holds():
            self._begin_anew(self._state.changed())
        if self._state is None:
            reason = obstacle_in(self.model)
            if reason is not None:
                raise NotRecordableError(reason)
            self._state = ModelState(self.model)
        autocast = (
            torch.is_autocast_enabled(self.device_type),
            torch.get_autocast_dtype(self.device_type),
            torch.is_autocast_cache_enabled(),
        )
        return _Kind(call=call, autocast=autocast, trained=self._state.trained())

    def _begin_anew(self, changed: str) -> None:
        """Drops all recordings. Raises `NotRecordableError` after too many changes before or soon after recording."""
        if self._recorded:
            self._wasted = self._wasted + 1 if self._replays < WORTH_IT else 0
            self._replays = 0
        else:
            self._unsettled += 1
        self.forget()
        if self._wasted >= MOST_WASTED or self._unsettled >= MOST_UNSETTLED:
            raise NotRecordableError(f"meets a changed model again and again ({changed})")

    def _record(self, call: _Call, used: frozenset[int]) -> Recording:
        device = call.tensors[0].device
        with without_effects(self.model):
            return Recording(partial(call.on, self.model), self.model, call.tensors, used, self.recorder(device))

    def _give_up(self, error: Exception) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            self._out_of_memory = torch.OutOfMemoryError(str(error))  # without the traceback, which keeps memory alive
        if isinstance(error, torch.AcceleratorError):  # the graphs draw from a generator that was replaced after it
            for recordings in list(_all):
                recordings.forget()
        told = error.__cause__ or error
        first = str(told).strip().partition("\n")[0]
        reason = first if isinstance(told, NotRecordableError) else f"raises {type(told).__name__} ({first})"
        whose = f"the forward pass of {type(self.model).__name__}"
        what = "with batches like these it" if self._recorded else "it"
        self.why_not = Finding(
            code=NOT_RECORDED,
            message=f"{whose} {reason}; {what} is not recorded as a CUDA graph, and runs as without cuda_graphs",
        )
        self.say(self.why_not)

    def require_some(self) -> None:
        """Raises `PolicyApplyError` with the reason if nothing was recorded although training is under way."""
        if self._recorded:
            return
        never = "its training never calls the model with tensors on the GPU, and so nothing is recorded as a CUDA graph"
        raise PolicyApplyError(never if self.why_not is None else self.why_not.message) from self._out_of_memory


def _is_observed() -> bool:
    """Returns True if something observes the pass that a replay would leave out or disturb."""
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._current_graph_task_id() != -1  # in a backward pass, where checkpointing computes again
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        or parametrize._cache_enabled > 0
        or (hooks is not None and hooks(False) is not None)
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]
    )


@dataclass(frozen=True, slots=True)
class _Meta:
    """The properties of a tensor that matter to a recording; `first` is the first position of the same tensor."""

    first: int
    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: torch.device


@dataclass(frozen=True, eq=False)
class _Call:
    """The arguments of a call: their structure, tensors and plain values. Equal calls can use the same recording."""

    structure: TreeSpec
    leaves: tuple[Any, ...]
    tensors: Sequence[torch.Tensor]

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> _Call | None:
        """Returns the call, or None for arguments that no recording can serve."""
        found, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
        plain = all(type(leaf) in (torch.Tensor, nn.Parameter, *CONSTANTS) for leaf in found)
        fitting = plain and all(
            one.device.type == device_type and not one.requires_grad and one.layout is torch.strided for one in tensors
        )
        if not (tensors and fitting):
            return None
        first = {id(tensor): place for place, tensor in reversed([*enumerate(tensors)])}
        leaves = tuple(
            _meta(leaf, first[id(leaf)]) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf, str(leaf))
            for leaf in found
        )
        return _Call(structure, leaves, tensors)

    def on(self, model: nn.Module, tensors: Sequence[torch.Tensor]) -> Any:
        """Calls the model with `tensors` in place of the call's own."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, _Meta) else leaf[1] for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.structure)
        outputs = model(*args, **kwargs)
        after, structure = tree_flatten((args, kwargs))
        if structure != self.structure or any(one is not other for one, other in zip(leaves, after, strict=True)):
            raise NotRecordableError("changes the lists or dictionaries that it is given")
        return outputs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and (self.leaves, self.structure) == (other.leaves, other.structure)


def _meta(tensor: torch.Tensor, first: int) -> _Meta:
    return _Meta(first, tensor.shape, tensor.dtype, tensor.stride(), tensor.device)


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """The conditions that must be the same for a recording to compute what the model would."""

    call: _Call
    autocast: tuple[bool, torch.dtype, bool]
    trained: tuple[bool, ...]

    def without_tensors(self) -> _Kind:
        return replace(self, call=replace(self.call, tensors=()))


@dataclass
class _Seen:
    """A kind of pass that came once, and the outputs from which a backward pass has started since."""

    kind: _Kind
    used: set[int] = field(default_factory=set)
    _passes: set[int] = field(default_factory=set)
    _has_more: bool = False

    def watched(self, outputs: Any) -> Any:
        """Returns copies that note which outputs a backward pass starts from, as one may be computed from another."""
        leaves, structure = tree_flatten(outputs)
        own = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
        marked = {
            name: _Mark.apply(self, number, leaf)  # type: ignore[no-untyped-call]
            for number, (name, leaf) in enumerate(own.items())
        }
        return tree_unflatten([marked.get(id(leaf), leaf) for leaf in leaves], structure)

    def note(self, number: int) -> None:
        """Notes that the running backward pass starts from this output."""
        self.used.add(number)
        self._passes.add(torch._C._current_graph_task_id())
        self._has_more |= is_kept() or torch.is_grad_enabled()

    def require_one_pass(self) -> None:
        """Raises `NotRecordableError` if there was more than one backward pass, or if another may follow."""
        if self._has_more or len(self._passes) > 1:
            raise NotRecordableError("has several backward passes (one for each loss, retain_graph or create_graph)")


class _Mark(torch.autograd.Function):
    """An autograd function that copies a tensor, and notes when a backward pass reaches it."""

    @staticmethod
    def forward(ctx: Any, seen: _Seen, number: int, output: torch.Tensor) -> torch.Tensor:
        ctx.seen, ctx.number = seen, number
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        ctx.seen.note(ctx.number)
        return None, None, gradient
