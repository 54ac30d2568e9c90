"""FP32 checkpoints of a model with half weights, under the same names; also for its parts and modules around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amptune.errors import PolicyApplyError

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from amptune.runtime.half_weights import HalfWeights

__all__ = ["checkpoint_in_fp32"]


def checkpoint_in_fp32(held: HalfWeights) -> list[RemovableHandle]:
    """Makes state_dict() and load_state_dict() of the modules work in FP32, until the handles are removed."""
    handles: list[RemovableHandle] = []
    for module in held.modules:
        if module._parameters or module._buffers:
            handles += [
                module.register_state_dict_post_hook(_Saves(held)),  # type: ignore[no-untyped-call]
                module.register_load_state_dict_pre_hook(_Loads(held)),  # type: ignore[no-untyped-call]
            ]
    return handles


@dataclass(slots=True)
class _Saves:
    """A hook that makes state_dict() return FP32. A class, so that a copied model gets a hook with its own weights."""

    held: HalfWeights
    _from_public_api: bool = False  # set by PyTorch

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        for name, tensor, value in self.held.fp32_values(module):
            if state.get(prefix + name, tensor) is not tensor:  # keep_vars asks for the tensors themselves
                state[prefix + name] = value


@dataclass(slots=True)
class _Loads:
    """A hook that gives the masters the loaded values before load_state_dict() rounds them."""

    held: HalfWeights

    def __call__(
        self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise PolicyApplyError(
                "load_state_dict(assign=True) would replace the half weights of this policy: load without assign, or "
                "before the policy is applied"
            )
        self.held.take_masters(module, state, prefix)
