"""Lets an optimizer that was built already run its fused kernel: one launch for many parameters."""

from __future__ import annotations

from typing import Any

import torch

from amptune.policy.findings import Finding

__all__ = ["fuse", "is_fusable"]


def fuse(optimizer: torch.optim.Optimizer) -> Finding | None:
    """Sets `fused` in place, as if the optimizer had been built with it; or says why it stays as it is."""
    reason = _obstacle(optimizer)
    if reason is not None:
        return Finding(
            code="optimizer-not-fused",
            message=f"the policy asks for a fused optimizer, and {type(optimizer).__name__} {reason}; it runs as it is",
        )
    for settings in (optimizer.defaults, *optimizer.param_groups):
        settings.update(fused=True, foreach=False)
    for parameter, state in optimizer.state.items():
        if torch.is_tensor(state.get("step")):  # fused kernels count where they run; load_state_dict moves it so too
            state["step"] = state["step"].to(device=parameter.device, dtype=torch.float32)
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # as its __init__ does, for GradScaler
    return None


def is_fusable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether fusing would change it: PyTorch has a fused kernel for it here, and it does not use it yet."""
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
    """PyTorch's own class under a user's, whose `__init__` may take other arguments."""
    return next(base for base in type(optimizer).__mro__ if base.__module__.startswith("torch.optim."))


def _try_on_one_number(base: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Which devices and dtypes there are kernels for changes with PyTorch, and some say so only when they step."""
    number = torch.zeros(1, device=device, dtype=dtype, requires_grad=True)
    number.grad = torch.zeros_like(number)
    base([number], fused=True).step()
