"""A model whose training passes are replayed from CUDA graphs, wherever that computes the same as its own forward."""

from __future__ import annotations

import warnings
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from amptune.errors import PolicyApplyError
from amptune.policy.findings import Finding
from amptune.runtime.host_effects import HostEffects, hooked, put_back
from amptune.runtime.model_state import ModelState
from amptune.runtime.recording import CONSTANTS, CudaRecorder, NotRecordableError, Recording

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.utils._pytree import TreeSpec

    from amptune.runtime.recording import Recorder

__all__ = ["NOT_RECORDED", "GraphedModel"]

NOT_RECORDED = "cuda-graphs-not-recorded"

# Each recording keeps the memory of its activations, so no more than these: a batch, the last of an epoch, and a few.
MOST_RECORDINGS = 4
# Where the model was changed all is recorded anew, which takes a second: so often for fewer replays than are worth it.
MOST_WASTED, WORTH_IT = 8, 20


class GraphedModel(nn.Module):
    """Runs `model`: training passes as recorded, all others by the model itself.

    A pass is recorded when its inputs' shapes come for the first time, and replayed as long as the model has the same
    modules and attributes, its weights lie in the same places, modules are in the same mode, and autocast is as it was.
    Everything else runs as without: in evaluation, without gradients, while a backward pass is still to come that needs
    what the last forward pass kept. What cannot be recorded is said once, by `say`, and runs by itself from then on.
    As `torch.compile`'s, its state_dict has another prefix: save the model's own.
    """

    def __init__(
        self,
        model: nn.Module,
        say: Callable[[Finding], None],
        *,
        recorder: Callable[[torch.device], Recorder] = CudaRecorder,
        device_type: str = "cuda",
    ) -> None:
        super().__init__()
        self._orig_mod = model
        self._say = say
        self._recorder = recorder
        self._device_type = device_type
        self._recorded: list[tuple[_Conditions, Recording]] = []
        self._seen: list[_Call] = []
        self._state: ModelState | None = None
        self._replays = self._wasted = 0
        self._said: Finding | None = None
        self._out_of_memory: torch.OutOfMemoryError | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedModel:
        """A copy has recordings of its own."""
        model = deepcopy(self._orig_mod, memo)
        return GraphedModel(model, self._say, recorder=self._recorder, device_type=self._device_type)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What is pickled is the model itself."""
        return _itself, (self._orig_mod,)

    def __getattr__(self, name: str) -> Any:
        """What it has not itself, the model has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_mod"), name)

    @property
    def why_not(self) -> Finding | None:
        """Why nothing (more) is recorded; None while that is not so."""
        return self._said

    def forget(self) -> None:
        """Drops what was recorded, and its memory."""
        self._recorded.clear()
        self._seen.clear()
        self._state = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        model = self._orig_mod
        if torch.compiler.is_compiling() or not (model.training and torch.is_grad_enabled()) or self._is_elsewhere:
            return model(*args, **kwargs)
        call = _Call.of(args, kwargs, self._device_type)
        recording = None if call is None else self._recording_for(call)
        if call is None or recording is None or recording.is_busy:
            return model(*args, **kwargs)
        self._replays += 1
        return recording(call.tensors)

    @property
    def _is_elsewhere(self) -> bool:
        """Whether this is a replica that DataParallel made for one pass, or the loop records graphs of its own."""
        capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
        return capturing or getattr(self, "_is_replica", False)

    def _recording_for(self, call: _Call) -> Recording | None:
        """One that was made, or is made now; None where the model is to run by itself."""
        if self._state is not None and not self._state.holds():
            self._wasted = self._wasted + 1 if self._recorded and self._replays < WORTH_IT else 0
            self.forget()
        if self._state is None:
            self._state = ModelState(self._orig_mod)
        conditions = self._conditions(call, self._state)
        known = next((recording for under, recording in self._recorded if under == conditions), None)
        if known is not None or self._said is not None or not self._is_due(call):
            return known
        try:
            recording = self._record(call)
        except Exception as error:  # noqa: BLE001  # the user's code may raise anything: it will in its own forward too
            self._give_up(error)
            return None
        if not self._recorded:  # the first passes may have set up what stays
            self._state, self._replays = ModelState(self._orig_mod), 0
        self._recorded.append((self._conditions(call.without_tensors(), self._state), recording))
        return recording

    def _conditions(self, call: _Call, state: ModelState) -> _Conditions:
        return _Conditions(call=call, autocast=_autocast(self._device_type), modes=state.modes())

    def _is_due(self, call: _Call) -> bool:
        """Not at first sight, save for the first batch: shapes may never come again."""
        if len(self._recorded) >= MOST_RECORDINGS:
            return False
        if self._wasted >= MOST_WASTED:
            self._refuse(f"{type(self._orig_mod).__name__} goes on changing: it was recorded {self._wasted} times anew")
            return False
        if not self._recorded or call in self._seen:
            return True
        self._seen = [*self._seen[1 - MOST_RECORDINGS :], call.without_tensors()]
        return False

    def _record(self, call: _Call) -> Recording:
        model = self._orig_mod
        reason = hooked(model)
        if reason is not None:
            raise NotRecordableError(reason)
        run = _Observed(lambda tensors: call.on(model, tensors), model)
        device = call.tensors[0].device
        dtype = torch.get_autocast_dtype(self._device_type)
        enabled = torch.is_autocast_enabled(self._device_type)
        # Without its cache: a cast that was made outside of the recording would never be made again.
        cast = torch.amp.autocast(self._device_type, dtype=dtype, enabled=enabled, cache_enabled=False)
        with put_back(model), cast, warnings.catch_warnings():
            # A gradient is given to where earlier steps had it, on another stream; nothing is added to there.
            warnings.filterwarnings("ignore", "The AccumulateGrad node's stream", UserWarning)
            recording = Recording(run, model, call.tensors, self._recorder(device))
            run.require_no_effects()
        return recording

    def _give_up(self, error: Exception) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            self._out_of_memory = torch.OutOfMemoryError(str(error))  # without what its traceback keeps in memory
        first = str(error).strip().partition("\n")[0]
        reason = first if isinstance(error, NotRecordableError) else f"raises {type(error).__name__} ({first})"
        self._refuse(f"the forward pass of {type(self._orig_mod).__name__} {reason}")

    def _refuse(self, because: str) -> None:
        self._said = Finding(
            code=NOT_RECORDED,
            message=f"{because}; it is not recorded as a CUDA graph, and runs as without cuda_graphs",
        )
        self._say(self._said)

    def require_recorded(self) -> None:
        """Raises `PolicyApplyError` with the reason if nothing was recorded of a training that is under way."""
        if self._recorded:
            return
        never = "its training never calls the model with tensors on the GPU, and so nothing is recorded as a CUDA graph"
        raise PolicyApplyError(never if self._said is None else self._said.message) from self._out_of_memory


def _itself(model: nn.Module) -> nn.Module:
    return model


class _Observed:
    """A call that notes what it does on the host, from the second time on: the first may set up what stays."""

    def __init__(self, call: Callable[[Sequence[torch.Tensor]], Any], model: nn.Module) -> None:
        self._call = call
        self._model = model
        self._effects: HostEffects | None = None
        self._times = 0

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        if self._times == 1:
            self._effects = HostEffects(self._model)
        self._times += 1
        return self._call(tensors)

    def require_no_effects(self) -> None:
        found = None if self._effects is None else self._effects.found()
        if found is not None:
            raise NotRecordableError(found)


@dataclass(frozen=True, slots=True)
class _Meta:
    """What of a tensor a recording depends on."""

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: torch.device


@dataclass(frozen=True, eq=False)
class _Call:
    """Arguments: their structure, and in it tensors and plain values. Equal to others that a recording serves too."""

    structure: TreeSpec
    leaves: tuple[Any, ...]
    tensors: Sequence[torch.Tensor]

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> _Call | None:
        """None for arguments that no recording can serve."""
        found, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
        plain = all(isinstance(leaf, (torch.Tensor, *CONSTANTS)) for leaf in found)
        fitting = all(one.device.type == device_type and not one.requires_grad for one in tensors)
        if not (tensors and plain and fitting):
            return None
        leaves = tuple(_meta(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in found)
        return _Call(structure, leaves, tensors)

    def on(self, model: nn.Module, tensors: Sequence[torch.Tensor]) -> Any:
        """Calls the model with other tensors in the places of these."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, _Meta) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.structure)
        return model(*args, **kwargs)

    def without_tensors(self) -> _Call:
        return replace(self, tensors=())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Call) and (self.leaves, self.structure) == (other.leaves, other.structure)


def _meta(tensor: torch.Tensor) -> _Meta:
    return _Meta(tensor.shape, tensor.dtype, tensor.stride(), tensor.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Conditions:
    """What has to be as it was, for a recording to do what the model would."""

    call: _Call
    autocast: tuple[bool, torch.dtype]
    modes: tuple[tuple[bool, ...], tuple[bool, ...]]


def _autocast(device_type: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
