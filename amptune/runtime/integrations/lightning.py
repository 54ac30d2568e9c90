"""Lightning: a precision plugin, `Trainer(plugins=[PolicyPrecision("policy.yaml")])`."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from amptune.errors import PolicyApplyError
from amptune.runtime.integrations.agreement import apply_uncompiled
from amptune.runtime.policy_argument import read_policy, settings_of

# Lightning is published under two names with unrelated classes: take the one that is in use.
_goes_by_its_older_name = "lightning.pytorch" not in sys.modules and (
    "pytorch_lightning" in sys.modules
    or (find_spec("lightning") is None and find_spec("pytorch_lightning") is not None)
)
if TYPE_CHECKING or not _goes_by_its_older_name:
    from lightning.pytorch.plugins.precision import MixedPrecision
else:
    from pytorch_lightning.plugins.precision import MixedPrecision

if TYPE_CHECKING:
    from os import PathLike

    import torch
    from torch import nn

    from amptune.policy.policy_file import PolicyFile
    from amptune.policy.settings import Policy
    from amptune.runtime.tuned import Tuned

__all__ = ["PolicyPrecision"]

# The names that `Trainer(precision=…)` accepts.
_PRECISION = {"off": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed", "half": "16-true"}


class PolicyPrecision(MixedPrecision):
    """A plugin that trains as a policy says, in place of `Trainer(precision=…)`; undone when fit() returns.

    `submodule` is the attribute of the LightningModule that holds the model of the policy, whose paths its rules name;
    the default is the LightningModule itself. The plugin converts batches to the policy's memory format and fuses
    optimizers. A Trainer's other settings are in `.policy`:
    `Trainer(plugins=[precision], accumulate_grad_batches=precision.policy.accumulate)`.

    fit() raises the errors of `amptune.apply`, and `PolicyApplyError` if the policy compiles and the model was not
    compiled: Lightning compiles by `trainer.fit(torch.compile(model))`. Fabric's setup() raises `PolicyApplyError`.
    """

    def __init__(
        self, policy: str | PathLike[str] | Policy | PolicyFile, *, submodule: str = "", any_hardware: bool = False
    ) -> None:
        # No super().__init__(): it refuses training without autocast, and makes a scaler before the device is known.
        self._source = read_policy(policy)
        self._submodule = submodule
        self._any_hardware = any_hardware
        self.policy = settings_of(self._source)
        self.precision: Any = _PRECISION[self.policy.precision]
        self.scaler: torch.amp.GradScaler | None = None
        self.tuned: Tuned | None = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        _require_trainer(module)
        model = self._model_in(module)
        self._require_compiled(module, model)
        self.tuned = apply_uncompiled(self._source, model, any_hardware=self._any_hardware)
        return module

    def connect(self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]) -> Any:
        """Sets up optimizers and scaler here, as both depend on the device and the model is on its device now."""
        tuned = self._applied()
        for optimizer in optimizers:
            tuned.optimizer(optimizer)
            if self.policy.fused_optimizer:
                # Lightning unscales gradients before it clips them and calls its hooks, and refuses to clip for an
                # optimizer that would unscale them again.
                optimizer._step_supports_amp_scaling = False
        if self.scaler is None and tuned.scaler.is_enabled():
            self.scaler = tuned.scaler
        return super().connect(model, optimizers, lr_schedulers)

    def convert_input(self, data: Any) -> Any:
        return self._applied().batch(data)

    def autocast_context_manager(self) -> torch.amp.autocast:
        # Without a cache, as in Lightning: a validation inside a training step would leave cached casts that have no
        # gradient (https://github.com/pytorch/pytorch/issues/65766).
        return self._applied().autocast(cache_enabled=False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the scaler's state under the name of Lightning's own plugin, so that each loads the other's."""
        if own := checkpoint.pop(type(self).__qualname__, None):
            checkpoint[MixedPrecision.__qualname__] = own

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.load_state_dict(checkpoint.get(MixedPrecision.__qualname__, {}))

    def teardown(self) -> None:
        super().teardown()
        if self.tuned is not None:
            self.tuned.undo()

    def _model_in(self, module: nn.Module) -> nn.Module:
        try:
            return module.get_submodule(self._submodule)
        except AttributeError:
            held = ", ".join(name for name, _ in module.named_children()) or "none"
            raise PolicyApplyError(
                f"{type(module).__name__} has no submodule {self._submodule!r}; it holds: {held}"
            ) from None

    def _require_compiled(self, module: nn.Module, model: nn.Module) -> None:
        compiled = getattr(module, "_compiler_ctx", None) or model._compiled_call_impl
        if self.policy.compiles_whole and not compiled:
            raise PolicyApplyError(
                f"the policy compiles, which Lightning does by itself: trainer.fit(torch.compile(model, "
                f"mode={self.policy.compile!r}), …), or call .compile(mode={self.policy.compile!r}) on the part of it "
                "that is to be compiled"
            )

    def _applied(self) -> Tuned:
        if self.tuned is None:
            raise PolicyApplyError("this PolicyPrecision has met no model yet: pass it as Trainer(plugins=[…])")
        return self.tuned


# LightningCLI replaces a path by what the file holds if the parameter may be a dataclass as well (jsonargparse 4.53).
PolicyPrecision.__init__.__annotations__["policy"] = "str | PathLike[str]"


def _require_trainer(module: nn.Module) -> None:
    """Raises `PolicyApplyError` in Fabric: the loop there is the user's own, but a Trainer's plugin steps for it."""
    if getattr(module, "_trainer", None) is None:  # a Trainer attaches itself to its LightningModule before
        raise PolicyApplyError(
            "PolicyPrecision is a plugin of Lightning's Trainer, not of Fabric: leave it out of plugins=…, then "
            "tuned = amptune.apply(policy, model), optimizer = tuned.optimizer(optimizer), fabric.setup(tuned.model, "
            "optimizer), and in the loop tuned.autocast() and tuned.scaler, with fabric.backward(scaled loss)"
        )
