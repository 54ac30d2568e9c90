"""Faults of the classes that the gate once missed: small parameters, closed branches, random numbers, exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from faults import (
    BF16,
    BOTH,
    CLASSES,
    DIM,
    FP16,
    Attention,
    EulerSteps,
    Fault,
    FeedForward,
    GatedFeedForward,
    HourOfShift,
    KelvinLoss,
    MeanOfTokens,
    Pace,
    RadialBasis,
    Residual,
    Stack,
    Tokens,
    fault,
    fixed,
    head_of,
    in_autocast_dtype,
    of_classes,
    of_sentences,
    of_temperatures,
    of_values,
    of_worked_hours,
    regression,
    tabular,
)
from torch import Tensor, nn

__all__ = ["HARD_FAULTS"]

SHIFTS = 8


def _shifts(n: int) -> tuple[Tensor, ...]:
    """The target depends on the shift; only the table of a model's shifts can tell."""
    x, target = of_values(n)
    shift = torch.randint(SHIFTS, (n,))
    return x, shift, target / 2 + fixed(SHIFTS, target.shape[-1], seed=2)[shift]


# --- a small parameter beside a large one ----------------------------------------------------------------------------


class Table(nn.Module):
    """One large weight, and a small table of one row per shift."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4 * DIM, DIM) / DIM**0.5)
        self.table = nn.Parameter(0.1 * torch.randn(SHIFTS, DIM))

    def forward(self, x: Tensor, shift: Tensor, *_: Tensor) -> Tensor:
        wide = torch.relu(torch.nn.functional.linear(x, self.weight))
        return x + wide.view(*x.shape[:-1], 4, DIM).mean(-2) + self.offset(shift)

    def offset(self, shift: Tensor) -> Tensor:
        raise NotImplementedError


class PaceTable(Table):
    """As `Pace`: the gradient of a reciprocal vanishes in fp16."""

    def offset(self, shift: Tensor) -> Tensor:
        metres = (1 + 0.5 * torch.tanh(in_autocast_dtype(self.table[shift]))) * Pace.metres
        return (torch.div(torch.ones_like(metres), metres) * Pace.metres - 1) * 4


class SteppedTable(Table):
    """As `EulerSteps`: each step is too short for a sum in half."""

    def offset(self, shift: Tensor) -> Tensor:
        rate, start = self.table[shift], in_autocast_dtype(torch.full_like(self.table[shift], 2.5))
        state = start
        for _ in range(EulerSteps.steps):
            state = state + EulerSteps.dt * in_autocast_dtype(torch.tanh(rate))
        return (state - start) / (EulerSteps.steps * EulerSteps.dt)


class KelvinTable(Table):
    """As `KelvinLoss`: bf16 tells temperatures apart in steps of 2 K."""

    def offset(self, shift: Tensor) -> Tensor:
        return in_autocast_dtype(self.table[shift] + KelvinLoss.zero) - KelvinLoss.zero


# --- a branch that starts closed --------------------------------------------------------------------------------------


class Closed(nn.Module):
    """A residual branch behind a gate of 0, as in ReZero."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        out: Tensor = x + self.gate * self.branch(x, *context)
        return out


# --- random numbers in the forward pass and in the loss --------------------------------------------------------------

OWN = torch.Generator().manual_seed(3)
NUMPY = np.random.default_rng(3)


class Noise(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        return x + 0.3 * self.draw(x).to(x)


class BlurredKelvinLoss(KelvinLoss):
    def forward(self, celsius: Tensor, kelvin: Tensor) -> Tensor:
        blur = torch.from_numpy(NUMPY.standard_normal(tuple(kelvin.shape))).to(kelvin)
        loss: Tensor = super().forward(celsius, kelvin + blur.round() / 4)  # quarters, as the temperatures are
        return loss


# --- exceptions -------------------------------------------------------------------------------------------------------


class CheckedFeedForward(GatedFeedForward):
    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        out = super().forward(x)
        if not torch.isfinite(out).all():
            raise FloatingPointError("the activations are not finite")
        return out


class FilledMask(nn.Module):
    def forward(self, scores: Tensor, keep: Tensor) -> Tensor:
        return in_autocast_dtype(scores).masked_fill(keep[:, None, None, :] == 0, -1e9).softmax(-1)


class Scattered(nn.Module):
    """Writes what a layer gives into a tensor of the dtype that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        chosen = torch.arange(len(x), device=x.device)
        out[chosen] = torch.tanh(self.linear(x))
        return out


def _shifted(block: nn.Module) -> nn.Module:
    return regression(Residual(FeedForward()), block, Residual(FeedForward()), Residual(FeedForward()))


def _among_values(*blocks: nn.Module) -> nn.Module:
    return regression(Residual(FeedForward()), *blocks, Residual(FeedForward()))


def _among_classes(*blocks: nn.Module) -> nn.Module:
    return tabular(Residual(FeedForward()), *blocks, Residual(FeedForward()))


def _masked() -> nn.Module:
    blocks = [Residual(Attention()), Residual(Attention(FilledMask())), Residual(FeedForward())]
    return Stack(stem=Tokens(), blocks=blocks, head=head_of(CLASSES, MeanOfTokens()), criterion=nn.CrossEntropyLoss())


def _fault(name: str, model: Callable[[], nn.Module], culprit: str, breaks: Any, batch: Any = of_values) -> Fault:
    return fault(name, culprit, breaks, model, batch, batch_size=64)


HARD_FAULTS: tuple[Fault, ...] = (
    _fault("small_pace", lambda: _shifted(PaceTable()), "blocks.1", FP16, _shifts),
    _fault("small_steps", lambda: _shifted(SteppedTable()), "blocks.1", BOTH, _shifts),
    _fault("small_kelvin", lambda: _shifted(KelvinTable()), "blocks.1", BF16, _shifts),
    _fault("closed_steps", lambda: _shifted(Closed(SteppedTable())), "blocks.1.branch", BOTH, _shifts),
    _fault("closed_kelvin", lambda: _shifted(Closed(KelvinTable())), "blocks.1.branch", BF16, _shifts),
    _fault("closed_hours", lambda: _shifted(Closed(HourOfShift())), "blocks.1.branch", BF16, of_worked_hours),
    _fault("noisy_distances", lambda: _among_values(Noise(torch.randn_like), RadialBasis()), "blocks.2", BOTH),
    _fault(
        "noisy_steps",
        lambda: _among_values(Noise(lambda x: torch.randn(x.shape, generator=OWN)), EulerSteps()),
        "blocks.2",
        BOTH,
    ),
    _fault(
        "noisy_loss",
        lambda: tabular(
            Residual(FeedForward()), Residual(FeedForward(nn.Tanh)), outputs=1, criterion=BlurredKelvinLoss()
        ),
        "criterion",
        BF16,
        of_temperatures,
    ),
    _fault(
        "checked_overflow", lambda: _among_classes(Residual(CheckedFeedForward())), "blocks.1.branch", FP16, of_classes
    ),
    _fault("filled_mask", _masked, "blocks.1.branch.softmax", FP16, of_sentences),
    _fault("scattered", lambda: _among_classes(Scattered()), "blocks.1.linear", BOTH, of_classes),
)
