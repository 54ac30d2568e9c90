"""The scaling of losses in a script under a policy: by the script's own scaler, or by one that it does not know of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from amptune.policy.settings import LossScale
from amptune.runtime.way_back import WayBack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amptune.policy.settings import Policy

__all__ = ["ArrivingScaler", "Scaling"]


class ArrivingScaler:
    """A loss scaler for a loop without one: each gradient is divided by the scale as it arrives.

    So clipping, and whatever reads gradients, sees their values. A step with values that are not finite is left out and
    the scale halved; it is doubled after `growth_interval` good steps in a row.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], scaling: LossScale) -> None:
        self.scale = scaling.init
        self._growth_interval, self._good = scaling.growth_interval, 0
        trained = [one for one in parameters if one.requires_grad]
        self._ids = set(map(id, trained))
        self._hooks = [one.register_hook(self._divided) for one in trained]  # type: ignore[no-untyped-call]

    def _divided(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / self.scale

    def remove(self) -> None:
        """Takes its hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Drops the gradients of a step that is to be left out: an optimizer passes by what has none."""
        own = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        own = [one for one in own if id(one) in self._ids]
        if not own:
            return
        if bool(torch.stack([torch.isfinite(one.grad).all() for one in own if one.grad is not None]).all()):
            self._good += 1
            if self._good == self._growth_interval:
                self.scale, self._good = 2 * self.scale, 0
            return
        for one in own:
            one.grad = None
        self.scale, self._good = self.scale / 2, 0


class Scaling:
    """The loss scaling of a script: under a policy for fp16 losses are scaled, under others not.

    `of_script` is the script's own scaler, once it is known; it is set as the policy says, from the beginning.
    """

    def __init__(self) -> None:
        self.of_script: Any = None
        self._arriving: ArrivingScaler | None = None
        self._back = WayBack()

    def begin(self, policy: Policy, parameters: Sequence[torch.Tensor]) -> None:
        """Scales as the policy says, until `end`, and no more as one before did."""
        self.end()
        scales, scaling = policy.autocast == "fp16", policy.loss_scale or LossScale()
        scaler = self.of_script
        if scaler is not None:
            self._back.add(_put_back, scaler, dict(vars(scaler)))
            begin = torch.amp.GradScaler.__init__
            options = {"init_scale": scaling.init, "growth_interval": scaling.growth_interval}
            begin(scaler, scaler._device, **options, enabled=scales)  # type: ignore[arg-type]
        elif scales:
            self._arriving = arriving = ArrivingScaler(parameters, scaling)
            self._back.add(arriving.remove)
            hook = register_optimizer_step_pre_hook(lambda optimizer, *_: arriving.before_step(optimizer))
            self._back.add(hook.remove)

    def end(self) -> None:
        """Takes it back."""
        self._back.go()
        self._arriving = None

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns what the backward pass is to begin from."""
        return loss if self._arriving is None else loss * self._arriving.scale


def _put_back(scaler: Any, before: dict[str, Any]) -> None:
    vars(scaler).clear()
    vars(scaler).update(before)
