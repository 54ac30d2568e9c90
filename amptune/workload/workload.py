"""The workload to tune: the user's model, data, loss and optimizer, as four callables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amptune.errors import TargetError

if TYPE_CHECKING:
    import torch

    from amptune.runtime.tuned import Tuned

__all__ = ["Workload"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step, in parts that amptune can build, repeat and restore.

    - `model()` builds the module on the CPU; amptune moves it to the device.
    - `batch(n)` returns `n` samples: a tensor, or tuples, lists, dicts or dataclasses of tensors, moved to
      the device by amptune. Fresh data at each call is best; constant data works.
    - `loss(model, batch)` runs the forward pass and returns a scalar tensor.
    - `optimizer(model)` builds the optimizer over the model's parameters.
    - `step(tuned, model, optimizer, batch)` replaces `loss` if a step is not forward, loss, backward, optimizer
      step; it does the whole step, with `tuned.autocast()` and `tuned.scaler`, and returns the loss.
    - `batch_size` is the size training uses today; the baseline uses it too.
    - `loader(batch_size)` returns an iterable of batches like those of `batch`, such as training's DataLoader.
      amptune then tries the winning policy in a loop over it. Without it, that loop calls `batch` at each step.
    - `evaluate(model)` may rate a trained model by one number. `evaluate_tolerance` is then the largest allowed
      difference between a policy's number and FP32's after a short training; it joins the limits of the numerics gate.
    """

    model: Callable[[], torch.nn.Module]
    batch: Callable[[int], Any]
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]
    loss: Callable[[torch.nn.Module, Any], torch.Tensor] | None = None
    step: Callable[[Tuned, torch.nn.Module, torch.optim.Optimizer, Any], torch.Tensor] | None = None
    loader: Callable[[int], Iterable[Any]] | None = None
    evaluate: Callable[[torch.nn.Module], float] | None = None
    evaluate_tolerance: float | None = None
    batch_size: int = 32
    name: str | None = None

    def __post_init__(self) -> None:
        """Raises one `TargetError` that names every part that is missing or cannot be called."""
        wrong = [
            f"{part} must be a function, not {type(value).__name__}"
            for part in ("model", "batch", "optimizer", "loss", "step", "loader", "evaluate")
            if (value := getattr(self, part)) is not None and not callable(value)
        ]
        wrong += [f"{part} is missing" for part in ("model", "batch", "optimizer") if getattr(self, part) is None]
        if (self.loss is None) == (self.step is None):
            wrong.append("give either loss or step, and not both")
        if self.evaluate_tolerance is not None and (self.evaluate is None or not self.evaluate_tolerance >= 0):
            wrong.append("evaluate_tolerance needs evaluate, and must not be negative")
        if not isinstance(self.batch_size, int) or isinstance(self.batch_size, bool) or self.batch_size < 1:
            wrong.append(f"batch_size must be a whole number of at least 1, not {self.batch_size!r}")
        if wrong:
            raise TargetError("Workload: " + "; ".join(wrong))
