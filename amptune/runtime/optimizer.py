"""Switches an optimizer that was built already to its fused kernel: one launch for many parameters."""

from __future__ import annotations

from typing import Any

import torch

from amptune.policy.findings import Finding

__all__ = ["fuse", "is_fusable", "lay_out_state"]


def fuse(optimizer: torch.optim.Optimizer) -> Finding | None:
    """Sets `fused` in place, as if the optimizer had been built with it; else returns a finding that says why not."""
    reason = _obstacle(optimizer)
    if reason is not None:
        return Finding(
            code="optimizer-not-fused",
            message=f"the policy asks for a fused optimizer, and {type(optimizer).__name__} {reason}; it runs as it is",
        )
    _set_fused(optimizer)
    optimizer.register_load_state_dict_post_hook(_set_fused)  # a checkpoint has the flags of the run that saved it
    # As in its __init__, for GradScaler: the kernel unscales gradients, and does nothing if one overflowed.
    optimizer._step_supports_amp_scaling = not _starts_anew(optimizer)  # type: ignore[attr-defined]
    if isinstance(optimizer, torch.optim.SGD):
        at_rest = _AtRest()
        optimizer.register_step_pre_hook(at_rest)
        optimizer.register_load_state_dict_post_hook(at_rest.again)
    return None


def lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """Gives states the layout that their parameters have by now, which fused kernels need."""
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if torch.is_tensor(value) and value.shape == parameter.shape and value.stride() != parameter.stride():
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _set_fused(optimizer: torch.optim.Optimizer) -> None:
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings.update(fused=True, foreach=False)
    for parameter, state in optimizer.state.items():
        if torch.is_tensor(state.get("step")):  # fused kernels count on their device; load_state_dict moves it too
            state["step"] = state["step"].to(device=parameter.device, dtype=torch.float32)


def _starts_anew(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if the first step differs from one with momentum 0 (SGD with dampening), so must not be skipped."""
    groups = optimizer.param_groups
    return isinstance(optimizer, torch.optim.SGD) and any(g["momentum"] and g["dampening"] for g in groups)


class _AtRest:
    """A hook that starts momentum from zero at the next step, on the parameters' device at that time.

    PyTorch leaves the buffers of fused SGD uninitialized for the first step to write. But that step writes nothing if
    a gradient overflowed, which is frequent under fp16 (torch/optim/sgd.py, `_fused_sgd`). Training may then end in
    NaN, as that of DeepLabV3+ did on an H200.
    """

    def __init__(self) -> None:
        self._is_due = True

    def again(self, _: torch.optim.Optimizer) -> None:
        """Repeats it after a state was loaded, which may lack buffers."""
        self._is_due = True

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_due:
            return
        self._is_due = False
        for group in optimizer.param_groups:
            for parameter in group["params"] if group["momentum"] and not group["dampening"] else ():
                if parameter.requires_grad and optimizer.state[parameter].get("momentum_buffer") is None:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def is_fusable(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if PyTorch has a fused kernel for the optimizer here, and the optimizer does not use it yet."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return not fused and _obstacle(optimizer) is None


def _obstacle(optimizer: torch.optim.Optimizer) -> str | None:
    base = _torch_class(optimizer)
    if base is torch.optim.Optimizer or "fused" not in optimizer.defaults:
        return "has no fused kernel in PyTorch"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "is differentiable, which fused kernels are not"
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    try:
        for device, dtype in {(parameter.device, parameter.dtype) for parameter in parameters}:
            _try_on_one_number(base, device, dtype)
    except RuntimeError as error:
        return f"cannot be fused here ({error})"
    return None


def _torch_class(optimizer: torch.optim.Optimizer) -> Any:
    """Returns PyTorch's class under a user's subclass, whose `__init__` may take other arguments."""
    return next(base for base in type(optimizer).__mro__ if base.__module__.startswith("torch.optim."))


def _try_on_one_number(base: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Steps once: the devices and dtypes with a kernel depend on PyTorch, and some raise only when they step."""
    number = torch.zeros(1, device=device, dtype=dtype, requires_grad=True)
    number.grad = torch.zeros_like(number)
    base([number], fused=True).step()
