"""Loss scaling that follows the policy, so that one training loop and one checkpoint serve every precision."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from amptune.policy.settings import Policy
    from amptune.runtime.batch_statistics import FiniteStatistics

__all__ = ["PolicyScaler", "scaler_for"]

_log = logging.getLogger("amptune")


class PolicyScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` that takes the checkpoint of a run that scaled nothing (bf16, FP32).

    Such a run saves an empty state, which an enabled GradScaler refuses to load. The other way round needs
    nothing: a disabled one ignores what it is given. `statistics` are kept finite at each update, where there are any.
    """

    statistics: FiniteStatistics | None = None

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        super().update(new_scale)
        if self.statistics is not None and self.is_enabled():
            self.statistics.restore()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.is_enabled() and not state_dict:
            _log.info("the checkpoint's loss scaler was off: loss scaling starts anew at %g", self.get_scale())
            return
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "statistics": None}  # which are one model's, and not a copy's


def scaler_for(policy: Policy, device_type: str, kind: type[PolicyScaler] = PolicyScaler) -> PolicyScaler:
    """Enabled for fp16 alone: bf16 has the range of FP32."""
    if policy.autocast != "fp16":
        return kind(device_type, enabled=False)
    if policy.loss_scale is None:
        return kind(device_type)
    scale = policy.loss_scale
    return kind(device_type, init_scale=scale.init, growth_interval=scale.growth_interval)
