"""Loss scaling that follows the policy, so that one training loop and one checkpoint serve every precision."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from amptune.policy.settings import Policy

__all__ = ["PolicyScaler", "scaler_for"]

_log = logging.getLogger("amptune")


class PolicyScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` that takes the checkpoint of a run that scaled nothing (bf16, FP32).

    Such a run saves an empty state, which an enabled GradScaler refuses to load. The other way round needs
    nothing: a disabled one ignores what it is given.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.is_enabled() and not state_dict:
            _log.info("the checkpoint's loss scaler was off: loss scaling starts anew at %g", self.get_scale())
            return
        super().load_state_dict(state_dict)


def scaler_for(policy: Policy, device_type: str) -> PolicyScaler:
    """Enabled for fp16 alone: bf16 has the range of FP32."""
    if policy.autocast != "fp16":
        return PolicyScaler(device_type, enabled=False)
    if policy.loss_scale is None:
        return PolicyScaler(device_type)
    scale = policy.loss_scale
    return PolicyScaler(device_type, init_scale=scale.init, growth_interval=scale.growth_interval)
