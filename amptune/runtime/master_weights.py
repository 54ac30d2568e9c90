"""An optimizer of half weights that updates FP32 masters in their place.

For the time of a step, and while a state is loaded, the masters stand in the optimizer's groups; otherwise the model's
own parameters do, so that clipping, zero_grad(), schedulers and loss scalers meet what they know. Gradients are the
parameters' own, in FP32 (amptune.runtime.gradient_dtype), and so is the state: it is made for masters.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from amptune.errors import PolicyApplyError
from amptune.runtime.half_weights import HALF

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from amptune.runtime.half_weights import HalfWeights

__all__ = ["MasterWeights", "parameters_of", "widen_state"]


class MasterWeights:
    """The masters of one optimizer, until `remove`. Raises `PolicyApplyError` for one that cannot have any."""

    def __init__(self, held: HalfWeights, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise PolicyApplyError(
                "LBFGS runs the model within its step, and so cannot have master weights: use another optimizer, or a "
                "policy without master_weights"
            )
        self._held = held
        self._own: list[list[nn.Parameter]] | None = None
        self._handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_pre_hook(self._before_loading),
            optimizer.register_load_state_dict_post_hook(self._take_back),
        ]

    @contextmanager
    def lent(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Within it the optimizer holds the masters."""
        self._lend(optimizer)
        try:
            yield
        finally:
            self._take_back(optimizer)

    def remove(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer goes on with the model's own parameters and the state it has."""
        self._take_back(optimizer)
        for handle in self._handles:
            handle.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        self._lend(optimizer)
        if closure is None:
            return None
        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], self._with_own_parameters(optimizer, closure)), rest

    def _with_own_parameters(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            self._take_back(optimizer)
            loss = closure()
            self._lend(optimizer)
            return loss

        return run

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._take_back(optimizer)
        self._held.round_masters(parameters_of(optimizer))

    def _before_loading(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        saved = [len(group["params"]) for group in state.get("param_groups", ())]
        if saved == [len(group["params"]) for group in optimizer.param_groups]:  # else PyTorch refuses to load it
            self._lend(optimizer)

    def _lend(self, optimizer: torch.optim.Optimizer) -> None:
        self._take_back(optimizer)  # a step that raised has not
        own = [group["params"] for group in optimizer.param_groups]
        lent = [self._held.masters_of(parameters) for parameters in own]
        for group, masters in zip(optimizer.param_groups, lent, strict=True):
            group["params"] = masters
        self._own = own
        pairs = _pairs(own, lent)
        for parameter, master in pairs:
            gradient = parameter.grad
            master.grad = gradient.float() if gradient is not None and gradient.dtype is HALF else gradient
        _rekey(optimizer, {id(parameter): master for parameter, master in pairs})

    def _take_back(self, optimizer: torch.optim.Optimizer) -> None:
        if self._own is None:
            return
        lent = [group["params"] for group in optimizer.param_groups[: len(self._own)]]
        for group, parameters in zip(optimizer.param_groups, self._own, strict=False):
            group["params"] = parameters
        pairs = _pairs(self._own, lent)
        for _, master in pairs:
            master.grad = None
        _rekey(optimizer, {id(master): parameter for parameter, master in pairs})
        self._own = None


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Those of all its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def widen_state(optimizer: torch.optim.Optimizer, held: HalfWeights) -> None:
    """The state that was made for half weights, momentum say, in FP32, for weights that are FP32 again."""
    for parameter, state in optimizer.state.items():
        if parameter in held:
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dtype is HALF:
                    state[name] = value.float()


def _pairs(
    own: Sequence[Sequence[nn.Parameter]], lent: Sequence[Sequence[nn.Parameter]]
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Each parameter that has a master, and that."""
    both = (zip(parameters, masters, strict=True) for parameters, masters in zip(own, lent, strict=True))
    return [(parameter, master) for group in both for parameter, master in group if parameter is not master]


def _rekey(optimizer: torch.optim.Optimizer, becomes: Mapping[int, nn.Parameter]) -> None:
    """The state of what has an id here becomes the state of what that stands for."""
    state = optimizer.state
    moved = [(becomes.get(id(key), key), value) for key, value in state.items()]
    state.clear()
    state.update(moved)
