"""The update of a training step, recorded as a CUDA graph: gradients unscaled and clipped, optimizer, loss scaler."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import chain
from operator import is_
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as torch_optimizer

from amptune.runtime.graphs.host_effects import NotRecordableError
from amptune.runtime.graphs.model_state import are_same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from amptune.runtime.graphs.capture import Recording
    from amptune.runtime.scaler import PolicyScaler

__all__ = ["RecordedUpdate", "are_own", "has_state", "obstacle_to_update"]

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
# What GradScaler hands to an optimizer for one step, and what a recording of that step holds of the scaler.
_OF_SCALER = ("grad_scale", "found_inf")
_BAKED_OF_SCALER = (
    "_scale",
    "_growth_tracker",
    "_growth_factor",
    "_backoff_factor",
    "_growth_interval",
    "policy_scale",
)


def obstacle_to_update(optimizer: torch.optim.Optimizer, scaler: PolicyScaler) -> str | None:
    """Returns why steps of the optimizer cannot be recorded, in words that follow its name, or None."""
    kind, groups = type(optimizer), optimizer.param_groups
    if not all(one.__module__.startswith("torch.optim.") for one in (kind, kind.step)):
        return "is not PyTorch's own: what its step does on the host is not known"
    if not all(group.get("fused") or group.get("capturable") for group in groups):
        return "is neither fused (fused_optimizer: true, or fused=True) nor capturable=True"
    if any(group.get("differentiable") for group in groups):
        return "is differentiable"
    if scaler.is_enabled() and not getattr(optimizer, "_step_supports_amp_scaling", False):
        return "does not take the loss scale, so that the scaler waits for the device before each step"
    if scaler.is_enabled() and scaler.statistics is not None:
        return "has protect_batch_norm beside it, which keeps statistics from update to update"
    if not are_own(chain.from_iterable(table.values() for table in _tables_of_hooks(optimizer))):
        return "has a hook on its step"
    if not _is_as_its_class_says(optimizer):
        return "has a step that is not its class's"
    return None


def are_own(hooks: Iterable[Any]) -> bool:
    """Returns True if all hooks are amptune's own."""
    owners = (getattr(hook, "__self__", hook) for hook in hooks)
    kinds = (owner if isinstance(owner, FunctionType) else type(owner) for owner in owners)
    return all(kind.__module__.startswith("amptune.runtime.") for kind in kinds)


def _tables_of_hooks(optimizer: torch.optim.Optimizer) -> list[dict[int, Any]]:
    """Returns the hooks on the optimizer's step by number, those on all optimizers included."""
    own = [getattr(optimizer, name) for name in _HOOKS]
    return own + [getattr(torch_optimizer, name) for name in _GLOBAL_HOOKS]


def _is_as_its_class_says(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True unless `step` was replaced; a scheduler's wrapper, which counts calls, goes on."""
    step = vars(optimizer).get("step")
    return step is None or hasattr(step, "_wrapped_by_lr_sched")


def has_state(optimizer: torch.optim.Optimizer, weights: Iterable[torch.Tensor]) -> bool:
    """Returns True if the optimizer has all state of the weights; a recorded step would make it anew each time."""
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and not group["momentum"]:
            weights = {*weights}.difference(group["params"])
    states = [optimizer.state.get(weight) for weight in weights]
    return all(state and all(value is not None for value in state.values()) for state in states)


class RecordedUpdate:
    """The optimizer's recorded step on the gradients of a recording, and on earlier micro-batches' if `adds` is True.

    `update` is the recipe's: it unscales and clips `grad` of the weights, steps, and updates the scaler. Learning rates
    are read from the parameter groups at each replay; all other settings are a part of the recording. Raises
    `NotRecordableError`, or any error of the optimizer.
    """

    def __init__(
        self,
        recording: Recording,
        optimizer: torch.optim.Optimizer,
        scaler: PolicyScaler,
        update: Callable[[], None],
        *,
        adds: bool,
    ) -> None:
        self._optimizer, self._scaler, self._weights = optimizer, scaler, recording.weights
        self._device = recording.inputs[0].device
        if {*self._weights}.difference(*(group["params"] for group in optimizer.param_groups)):
            raise NotRecordableError("does not train all weights that have gradients")
        self._earlier = [*map(torch.empty_like, self._weights)] if adds else []
        self._rates = [self._rate_of(group) for group in optimizer.param_groups]
        self._filled = [group["lr"] for group in optimizer.param_groups]
        known = self._baked()
        recording.gradients()  # loads its kernels
        with self._as_recorded():
            _, self._replay = recording.by.record(lambda: self._work(recording.gradients(), update))
        if not are_alike(self._baked(), known):
            raise NotRecordableError("makes its state anew in a step")
        self._known = known
        self._places = [one.detach() for one in known if isinstance(one, torch.Tensor)]

    def _rate_of(self, group: dict[str, Any]) -> torch.Tensor | None:
        """Returns the tensor that holds a group's learning rate in replays; None if it is a tensor of the loop's."""
        if isinstance(group["lr"], torch.Tensor):
            if group["lr"].device != self._device:
                raise NotRecordableError("has a learning rate that is a tensor on another device")
            return None
        return torch.full((), float(group["lr"]), dtype=torch.float32, device=self._device)  # as kernels take it

    def _baked(self) -> list[Any]:
        """Returns all that a replay takes for unchanged."""
        optimizer, scaler = self._optimizer, self._scaler
        found: list[Any] = [optimizer.state, optimizer.param_groups, *optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, self._rates, strict=False):
            found += [*group["params"], type(group["lr"]) if rate is not None else group["lr"]]
            found += [value for name, value in group.items() if name not in ("params", "lr")]
        found += chain.from_iterable(state.values() for state in optimizer.state.values())
        found += [vars(optimizer).get("step"), *chain.from_iterable(_tables_of_hooks(optimizer))]
        return [*found, *(getattr(scaler, name, None) for name in _BAKED_OF_SCALER)]

    @property
    def is_valid(self) -> bool:
        """True if a replay would do what the recipe does now."""
        now = self._baked()
        tensors = [one for one in now if isinstance(one, torch.Tensor)]
        return are_alike(now, self._known) and all(map(torch.Tensor.is_set_to, tensors, self._places))

    @contextmanager
    def _as_recorded(self) -> Iterator[None]:
        """Gives the optimizer what a recording needs: rates as tensors, and leave to be captured."""
        groups, gradients = self._optimizer.param_groups, [weight.grad for weight in self._weights]
        before: list[dict[str, Any]] = [
            {name: group[name] for name in ("lr", "capturable") if name in group} for group in groups
        ]
        try:
            for group, rate in zip(groups, self._rates, strict=True):
                group.update({} if rate is None else {"lr": rate})
                group.update({"capturable": True} if "capturable" in group else {})
            yield
        finally:
            for group, own in zip(groups, before, strict=True):
                group.update(own)
            for weight, gradient in zip(self._weights, gradients, strict=True):
                weight.grad = gradient
            for name in _OF_SCALER:
                vars(self._optimizer).pop(name, None)
            if self._scaler.is_enabled():
                self._scaler._per_optimizer_states.pop(id(self._optimizer), None)

    def _work(self, gradients: list[torch.Tensor], update: Callable[[], None]) -> None:
        if self._earlier:
            torch._foreach_add_(gradients, self._earlier)
        for weight, gradient in zip(self._weights, gradients, strict=True):
            weight.grad = gradient
        update()

    def replay(self, earlier: Sequence[torch.Tensor]) -> None:
        """Updates the weights by the recording's gradients and the earlier ones, which are none or one a weight."""
        for place, (group, rate) in enumerate(zip(self._optimizer.param_groups, self._rates, strict=True)):
            if rate is not None and group["lr"] != self._filled[place]:
                rate.fill_(group["lr"])
                self._filled[place] = group["lr"]
        if earlier:
            torch._foreach_copy_(self._earlier, [*earlier])
        before, after = (getattr(self._optimizer, name) for name in _HOOKS)  # amptune's own
        for hook in [*before.values()]:
            hook(self._optimizer, (), {})
        self._replay()
        for hook in [*after.values()]:
            hook(self._optimizer, (), {})
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # as a scheduler expects of a step


def are_alike(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Returns True for the same objects, or equal plain values, in the same places."""
    return len(now) == len(before) and (all(map(is_, now, before)) or all(map(are_same, now, before)))
