"""The Trainer of transformers: a callback that applies a policy, and the arguments that go with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from amptune.errors import PolicyApplyError
from amptune.runtime.integrations.agreement import (
    Told,
    apply_uncompiled,
    merged,
    require_agreement,
    require_own_scaler,
)
from amptune.runtime.policy_argument import read_policy, settings_of

if TYPE_CHECKING:
    from os import PathLike

    from torch import nn
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from amptune.policy.policy_file import PolicyFile
    from amptune.policy.settings import Policy
    from amptune.runtime.tuned import Tuned

__all__ = ["PolicyCallback", "training_arguments"]

_REMEDY = 'Build them as TrainingArguments(**training_arguments("policy.yaml"), …).'


def training_arguments(policy: str | PathLike[str] | Policy | PolicyFile, **own: Any) -> dict[str, Any]:
    """Returns what the policy decides, with your own: `TrainingArguments(**training_arguments("policy.yaml", seed=1))`.

    `tf32` is left out: the callback sets the FP32 math, on machines without TF32 too. The Trainer's scaler has no
    maximum. Raises `PolicyApplyError` for arguments that the policy decides, for half weights, and for a static loss
    scale.
    """
    settings = settings_of(read_policy(policy))
    require_own_scaler(settings, "The Trainer")
    arguments: dict[str, Any] = {
        "bf16": settings.autocast == "bf16",
        "fp16": settings.autocast == "fp16",
        "gradient_accumulation_steps": settings.accumulate,
    }
    if settings.batch_size is not None:
        arguments["per_device_train_batch_size"] = settings.batch_size
    if settings.compiles_whole:
        arguments |= {"torch_compile": True, "torch_compile_mode": settings.compile}
    return merged(arguments, own, place="training_arguments(…)")


class PolicyCallback(TrainerCallback):
    """A callback that applies a policy: `Trainer(model, args, callbacks=[PolicyCallback("policy.yaml")])`.

    The Trainer autocasts, scales the loss and compiles by itself, as its arguments say; the optimizer is fused if the
    policy says so. The policy stays on the model until `callback.tuned.undo()`, so evaluate() and predict() run under
    it too. Batches keep their memory format; the first convolution converts them. A model that `model_init` makes for a
    training gets the policy when that begins, and the last model loses it.

    Building the Trainer raises the errors of `amptune.apply`, and `PolicyApplyError` if the arguments differ from the
    policy. So does training with `model_init`: by then the Trainer has prepared the model, which cannot have a rule for
    itself as a whole any more. Training raises `PolicyApplyError` if the callback was added to a built Trainer.
    """

    def __init__(self, policy: str | PathLike[str] | Policy | PolicyFile, *, any_hardware: bool = False) -> None:
        self._source = read_policy(policy)
        self._any_hardware = any_hardware
        self._model: nn.Module | None = None
        self.policy = settings_of(self._source)
        self.tuned: Tuned | None = None

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,  # noqa: ARG002  # all callbacks are given it
        control: TrainerControl,  # noqa: ARG002
        *,
        model: nn.Module,
        **_: Any,
    ) -> None:
        self.tuned = self._apply(args, model)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002
        *,
        model: nn.Module,
        optimizer: Any,
        **_: Any,
    ) -> None:
        """Sets up the optimizer and the scaler, which exist from here on, and a model that `model_init` made."""
        if self.tuned is None:
            raise PolicyApplyError(
                "training begins with a model that has no policy: pass PolicyCallback as Trainer(callbacks=[…]), not "
                "to add_callback()"
            )
        if model is not self._model:
            _require_not_around(model, self._model)
            self.tuned.undo()
            self.tuned = self._apply(args, model)
        self.tuned.optimizer(getattr(optimizer, "optimizer", optimizer))
        scaler = getattr(optimizer, "scaler", None)
        if scaler is not None and self.policy.loss_scale is not None and state.global_step == 0:
            scaler.load_state_dict(self.tuned.scaler.state_dict())
        if self.tuned.claim_watch is not None and args.train_batch_size == self.policy.batch_size:
            self.tuned.claim_watch.has_measured_size = True

    def on_step_begin(self, args: TrainingArguments, *_: Any, **__: Any) -> None:
        """Tells the watch on step times that a forward pass begins: the Trainer does not use `tuned.autocast()`."""
        if self.tuned is not None and self.tuned.claim_watch is not None:
            self.tuned.claim_watch.pass_begins(args.device.type)

    on_substep_end = on_step_begin  # a micro-batch is done, and the next one begins

    def _apply(self, args: TrainingArguments, model: nn.Module) -> Tuned:
        require_own_scaler(self.policy, "The Trainer")
        require_agreement(self.policy, _told(args), remedy=_REMEDY)
        self._model = model
        return apply_uncompiled(self._source, model, any_hardware=self._any_hardware)


def _require_not_around(model: nn.Module, inner: nn.Module | None) -> None:
    if any(module is inner for module in model.modules()):
        raise PolicyApplyError(
            f"the Trainer put a {type(model).__name__} around the model after the policy was applied, as with FSDP: "
            "train a sharded model in a loop of your own, with fully_shard of amptune.runtime.integrations.fsdp"
        )


def _told(args: TrainingArguments) -> Told:
    return Told(
        autocast="fp16" if args.fp16 else "bf16" if args.bf16 else "off",
        compile=(args.torch_compile_mode or "default") if args.torch_compile else "off",
    )
