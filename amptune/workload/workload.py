"""The workload to tune: the user's model, data, loss and optimizer, as four callables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from amptune.errors import TargetError

if TYPE_CHECKING:
    import torch

    from amptune.policy.settings import Policy
    from amptune.runtime.tuned import Tuned

__all__ = ["Workload"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step, in parts that amptune can build, repeat and restore.

    - `model()` builds the module on the CPU; amptune moves it to the device. A module in its place is copied.
    - `batch(n)` returns `n` samples: a tensor, or tuples, lists, dicts or dataclasses of tensors, moved to
      the device by amptune. Fresh data at each call is best; constant data works.
    - `loss(model, batch)` runs the forward pass and returns a scalar tensor.
    - `optimizer(model)` builds the optimizer over the model's parameters; for a `step` also a tuple or list of several.
    - `step(tuned, model, optimizer, batch)` replaces `loss` if a step is not forward, loss, backward, optimizer
      step; it does the whole step, with `tuned.autocast()` and `tuned.scaler`, and returns the loss. It gets what
      `optimizer` returned.
    - `batch_size` is the size training uses today; the baseline uses it too. Samples are counted along the axis
      `batch_dim` of a batch's tensors: 1 for time-major ones (time, samples, …). `accumulate` is today's number of such
      batches for one optimizer step; every policy keeps their product. `clip` is the largest gradient norm, if training
      clips gradients (`clip_grad_norm_`).
    - `loader(batch_size)` returns an iterable of batches like those of `batch`, such as training's DataLoader.
      amptune then tries the winning policy in a loop over it. Without it, that loop calls `batch` at each step.
    - `parallel(model, tuned)` shares the model among the ranks where steps are timed over several devices, in place of
      DistributedDataParallel. It shards `model` in place and returns it, as `fully_shard` does: `loss` and `step` then
      get `tuned.model`. Or it returns a wrapper of `tuned.model`, which they get. `optimizer` is called afterwards,
      with `tuned.model` in either case.
    - `own_loop` is False where a framework's loop calls the model, which cannot train by `tuned.training_step`: then no
      policy that needs that is tried.
    - `evaluate(model)` may rate a trained model by one number. `evaluate_tolerance` is then the largest allowed
      difference between a policy's number and FP32's after a short training; it joins the limits of the numerics gate.
    - `as_is` is what training sets today, which is the baseline if no other is asked for; `summary` says in a line what
      is trained, and `ended_epochs` how many of its epochs have ended within a step. A running script fills them in.
    """

    model: Callable[[], torch.nn.Module]
    batch: Callable[[int], Any]
    optimizer: Callable[[torch.nn.Module], Any]  # one torch.optim.Optimizer, or several
    loss: Callable[[torch.nn.Module, Any], torch.Tensor] | None = None
    step: Callable[[Tuned, torch.nn.Module, Any, Any], torch.Tensor] | None = None
    loader: Callable[[int], Iterable[Any]] | None = None
    parallel: Callable[[torch.nn.Module, Tuned], torch.nn.Module] | None = None
    evaluate: Callable[[torch.nn.Module], float] | None = None
    evaluate_tolerance: float | None = None
    batch_size: int = 32
    batch_dim: int = 0
    accumulate: int = 1
    clip: float | None = None
    own_loop: bool = True
    as_is: Policy | None = None
    ended_epochs: Callable[[], int] | None = None
    summary: str | None = None
    name: str | None = None

    @property
    def in_place(self) -> bool:
        """True for a running script: model and optimizer are its own, and stay so."""
        return self.summary is not None

    def __post_init__(self) -> None:
        """Raises one `TargetError` that names every part that is missing or cannot be called."""
        wrong = [
            f"{part} must be a function, not {type(value).__name__}"
            for part in ("model", "batch", "optimizer", "loss", "step", "loader", "parallel", "evaluate")
            if (value := getattr(self, part)) is not None and not callable(value)
        ]
        wrong += [f"{part} is missing" for part in ("model", "batch", "optimizer") if getattr(self, part) is None]
        if (self.loss is None) == (self.step is None):
            wrong.append("give either loss or step, and not both")
        if self.evaluate_tolerance is not None and (self.evaluate is None or not self.evaluate_tolerance >= 0):
            wrong.append("evaluate_tolerance needs evaluate, and must not be negative")
        wrong += [
            f"{part} must be a whole number of at least 1, not {value!r}"
            for part in ("batch_size", "accumulate")
            if not isinstance(value := getattr(self, part), int) or isinstance(value, bool) or value < 1
        ]
        if not isinstance(self.batch_dim, int) or isinstance(self.batch_dim, bool) or self.batch_dim < 0:
            wrong.append(f"batch_dim must be an axis, 0 or 1 as a rule, not {self.batch_dim!r}")
        if self.step is not None and (self.accumulate != 1 or self.clip is not None):
            wrong.append("accumulate and clip need loss: a step of your own accumulates and clips by itself")
        if self.clip is not None and not (isinstance(self.clip, int | float) and self.clip > 0):
            wrong.append(f"clip must be a positive number, not {self.clip!r}")
        if wrong:
            raise TargetError("Workload: " + "; ".join(wrong))
        if "torch" in sys.modules and isinstance(self.model, sys.modules["torch"].nn.Module):
            from amptune.workload.copied_model import CopiedModel

            object.__setattr__(self, "model", CopiedModel(self.model))

    @classmethod
    def from_loop(
        cls,
        model: torch.nn.Module,
        loader: Iterable[Any],
        loss: Callable[..., torch.Tensor],
        optimizer: torch.optim.Optimizer | Callable[[torch.nn.Module], torch.optim.Optimizer],
        *,
        batch_size: int | None = None,
        batch_dim: int | None = None,
        accumulate: int = 1,
        clip: float | None = None,
        name: str | None = None,
    ) -> Self:
        """Returns the workload of a loop over these objects; they stay as they are, in weights and on their device.

        `loss` is a function `loss(model, batch)`, or PyTorch's kind (`nn.CrossEntropyLoss()`) for batches that are
        pairs (input, target). `optimizer` is built anew over the copied model, from its class, arguments and groups; or
        it is a function of the model. `batch_size` is needed if the loader does not tell it, `batch_dim` where it is
        not certain which axis holds the samples.

        Raises `TargetError` for what cannot be copied, such as quantised weights, with the reason.
        """
        from amptune.workload.from_loop import parts_of_loop

        parts = parts_of_loop(model, loader, loss, optimizer, batch_size, batch_dim)
        return cls(**parts, accumulate=accumulate, clip=clip, name=name)

    @classmethod
    def from_trainer(cls, trainer: Any, *, name: str | None = None) -> Self:
        """Returns the workload of a Trainer of transformers: loss, collator, optimizer, accumulation, clipping.

        Model, arguments, dataset, collator and class are copied; the Trainer is built anew in the measuring processes.
        Schedules and callbacks are not part of the measured step.

        Raises `TargetError` for DeepSpeed, FSDP, quantised weights and a `device_map`, with the reason.
        """
        from amptune.workload.from_trainer import parts_of_trainer

        return cls(**parts_of_trainer(trainer), name=name)

    @classmethod
    def from_lightning(
        cls,
        module: Any,
        loader: Any = None,
        *,
        batch_size: int | None = None,
        accumulate: int = 1,
        clip: float | None = None,
        name: str | None = None,
    ) -> Self:
        """Returns the workload of a LightningModule: its `training_step` and `configure_optimizers` over the loader.

        `loader` may be a LightningDataModule; without it, the module has a `train_dataloader` of its own.
        No Trainer is attached: what `self.log` gets is lost. `accumulate` is the Trainer's `accumulate_grad_batches`,
        `clip` its `gradient_clip_val`; its callbacks are not part of the measured step.

        Raises `TargetError` for manual optimisation and for several optimizers, with the reason.
        """
        from amptune.workload.from_lightning import parts_of_lightning

        parts = parts_of_lightning(module, loader, batch_size)
        return cls(**parts, accumulate=accumulate, clip=clip, name=name)
