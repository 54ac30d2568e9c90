"""Loss scaling that follows the policy, so that one training loop and one checkpoint serve every precision."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from amptune.policy.settings import LossScale
from amptune.runtime.weight_hook import PLAIN_WEIGHTS, WeightHook

if TYPE_CHECKING:
    from amptune.policy.settings import Policy
    from amptune.runtime.batch_norm import FiniteStatistics

__all__ = ["PolicyScaler", "has_scaler", "scaler_for"]

_FROM_APEX = "loss_scaler0"  # Apex's key for the state of the first loss's scaler (apex/amp/frontend.py)

_log = logging.getLogger("amptune")


class PolicyScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` that also loads the checkpoint of a run without loss scaling (bf16, FP32).

    Such a run saves an empty state, which an enabled GradScaler refuses to load. (A disabled one ignores any state.)
    It loads the result of `apex.amp.state_dict()` too. The policy may give the scale a maximum, and decides if the
    scale moves, whatever is loaded; a step that overflows is always skipped. Each update makes `statistics`, if
    there are any, finite. With half `weights`, half gradients are accepted. A `guard` is told of all but what
    torch.compile traces.
    """

    statistics: FiniteStatistics | None = None
    weights: WeightHook = PLAIN_WEIGHTS
    guard: Any = None  # a `Guard`, which is no part of what scales a loss
    policy_scale: LossScale = LossScale()

    @property
    def _watch(self) -> Any:
        """The guard's. A compiled graph does not even read it, and so stays when the guard goes."""
        return None if torch.compiler.is_compiling() or self.guard is None else self.guard.step_watch

    def scale(self, outputs: Any) -> Any:
        scaled = super().scale(outputs)
        if (watch := self._watch) is not None and self.is_enabled():
            watch.after_scale(scaled)
        return scaled

    def get_scale(self) -> float:
        if (watch := self._watch) is not None:
            watch.scale_was_asked = True
        return super().get_scale()

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if (watch := self._watch) is not None:
            watch.before_unscale(optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        self.weights.require_masters(optimizer)
        if (watch := self._watch) is not None:
            watch.before_unscale(optimizer)
            watch.before_scaler_step(optimizer, has_closure=bool(args or kwargs))
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        super().update(new_scale)
        if self._watch is not None:
            self.guard.end_when_due()
        if not self.is_enabled():
            return
        if self.policy_scale.max is not None and self._scale is not None:
            self._scale.clamp_(max=self.policy_scale.max)
        if self.statistics is not None:
            self.statistics.restore()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.is_enabled() and not state_dict:
            _log.info("the checkpoint's loss scaler was off: loss scaling starts anew at %g", self.get_scale())
            return
        if self.is_enabled() and not self.policy_scale.static:
            super().load_state_dict(self._as_own(state_dict))

    def _as_own(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns another run's state, with factors that move the scale, and the scale at most this one's maximum."""
        own = super().state_dict()
        if _FROM_APEX in state:
            learned = state[_FROM_APEX]
            state = {**own, "scale": learned["loss_scale"], "_growth_tracker": learned["unskipped"]}
        if state.get("backoff_factor") == 1.0:  # the state of a static scale
            state = {**state, **{factor: own[factor] for factor in ("growth_factor", "backoff_factor")}}
        most = self.policy_scale.max
        return state if most is None else {**state, "scale": min(state["scale"], most)}

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        self.weights.widen_gradients(optimizer)
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16 or self.weights.in_half)

    def __getstate__(self) -> dict[str, Any]:
        # they belong to one model, and not to a copy of the scaler
        return {**super().__getstate__(), "statistics": None, "weights": PLAIN_WEIGHTS, "guard": None}


def has_scaler(policy: Policy) -> bool:
    """Returns True if the policy's loss scaler is enabled: gradients in fp16, and a scale other than a static 1."""
    scale = policy.loss_scale or LossScale()
    return policy.scales_loss and not (scale.static and scale.init == 1)


def scaler_for(policy: Policy, device_type: str) -> PolicyScaler:
    """Returns the policy's loss scaler, disabled unless fp16 gradients need scaling: bf16 has the range of FP32."""
    scale = policy.loss_scale or LossScale()
    if not has_scaler(policy):
        return PolicyScaler(device_type, enabled=False)
    scaler = PolicyScaler(device_type, init_scale=scale.init, growth_interval=scale.growth_interval)
    scaler.policy_scale = scale
    if scale.static:  # GradScaler's __init__ does not accept a growth factor of 1
        scaler.set_growth_factor(1.0)
        scaler.set_backoff_factor(1.0)
    return scaler
