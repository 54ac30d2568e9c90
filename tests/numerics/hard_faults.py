"""Faults of the classes that the gate once missed: small parameters, closed branches, random numbers, exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from faults import (
    BF16,
    BOTH,
    DIM,
    DT,
    EULER_STEPS,
    FP16,
    ZERO,
    Attention,
    Fault,
    FeedForward,
    Part,
    RadialBasis,
    Residual,
    euler_steps,
    fault,
    fixed,
    gated,
    gated_feed_forward,
    hour_of_shift,
    in_autocast_dtype,
    kelvin_loss,
    language,
    of_classes,
    of_sentences,
    of_temperatures,
    of_values,
    of_worked_hours,
    pace_of,
    regression,
    square,
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


class Table(nn.Module):
    """One large weight, and a small table of one row per shift, of which something is added."""

    def __init__(self, offset: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4 * DIM, DIM) / DIM**0.5)
        self.table = nn.Parameter(0.1 * torch.randn(SHIFTS, DIM))
        self.offset = offset

    def forward(self, x: Tensor, shift: Tensor, *_: Tensor) -> Tensor:
        wide = torch.relu(torch.nn.functional.linear(x, self.weight))
        return x + wide.view(*x.shape[:-1], 4, DIM).mean(-2) + self.offset(self.table[shift])


def paces(rows: Tensor) -> Tensor:
    return pace_of(rows) * 4


def stepped(rate: Tensor) -> Tensor:
    """As `euler`: each step is too short for a sum in half."""
    start = in_autocast_dtype(torch.full_like(rate, 2.5))
    state = start
    for _ in range(EULER_STEPS):
        state = state + DT * in_autocast_dtype(torch.tanh(rate))
    return (state - start) / (EULER_STEPS * DT)


def kelvins(rows: Tensor) -> Tensor:
    """As `kelvin_loss`: bf16 tells temperatures apart in steps of 2 K."""
    return in_autocast_dtype(rows + ZERO) - ZERO


def closed(branch: nn.Module) -> nn.Module:
    """A residual branch behind a gate of 0, as in ReZero."""
    gate = nn.Parameter(torch.zeros(()))
    return Part(lambda own, x, *context: x + own.gate * own.branch(x, *context), branch=branch, gate=gate)


OWN = torch.Generator().manual_seed(3)
NUMPY = np.random.default_rng(3)


def noise(draw: Callable[[Tensor], Tensor]) -> nn.Module:
    return Part(lambda _, x, *__: x + 0.3 * draw(x).to(x))


def blurred_kelvin_loss(own: nn.Module, celsius: Tensor, kelvin: Tensor) -> Tensor:
    blur = torch.from_numpy(NUMPY.standard_normal(tuple(kelvin.shape))).to(kelvin)
    return kelvin_loss(own, celsius, kelvin + blur.round() / 4)  # quarters, as the temperatures are


def checked(own: Any, x: Tensor, *_: Tensor) -> Any:
    out = gated_feed_forward(own, x)
    if not torch.isfinite(out).all():
        raise FloatingPointError("the activations are not finite")
    return out


def filled_mask(_: nn.Module, scores: Tensor, keep: Tensor) -> Tensor:
    return in_autocast_dtype(scores).masked_fill(keep[:, None, None, :] == 0, -1e9).softmax(-1)


def scattered(own: Any, x: Tensor, *_: Tensor) -> Tensor:
    """Writes what a layer gives into a tensor of the dtype that it was given."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    out[torch.arange(len(x), device=x.device)] = torch.tanh(own.linear(x))
    return out


def _shifted(block: nn.Module) -> nn.Module:
    return regression(Residual(FeedForward()), block, Residual(FeedForward()), Residual(FeedForward()))


def _among_values(*blocks: nn.Module) -> nn.Module:
    return regression(Residual(FeedForward()), *blocks, Residual(FeedForward()))


def _among_classes(*blocks: nn.Module) -> nn.Module:
    return tabular(Residual(FeedForward()), *blocks, Residual(FeedForward()))


def _masked() -> nn.Module:
    return language(Residual(Attention()), Residual(Attention(filled_mask)), Residual(FeedForward()))


def _fault(name: str, model: Callable[[], nn.Module], culprit: str, breaks: Any, batch: Any = of_values) -> Fault:
    return fault(name, culprit, breaks, model, batch, batch_size=64)


HARD_FAULTS: tuple[Fault, ...] = (
    _fault("small_pace", lambda: _shifted(Table(paces)), "blocks.1", FP16, _shifts),
    _fault("small_steps", lambda: _shifted(Table(stepped)), "blocks.1", BOTH, _shifts),
    _fault("small_kelvin", lambda: _shifted(Table(kelvins)), "blocks.1", BF16, _shifts),
    _fault("closed_steps", lambda: _shifted(closed(Table(stepped))), "blocks.1.branch", BOTH, _shifts),
    _fault("closed_kelvin", lambda: _shifted(closed(Table(kelvins))), "blocks.1.branch", BF16, _shifts),
    _fault("closed_hours", lambda: _shifted(closed(hour_of_shift())), "blocks.1.branch", BF16, of_worked_hours),
    _fault("noisy_distances", lambda: _among_values(noise(torch.randn_like), RadialBasis()), "blocks.2", BOTH),
    _fault(
        "noisy_steps",
        lambda: _among_values(noise(lambda x: torch.randn(x.shape, generator=OWN)), euler_steps()),
        "blocks.2",
        BOTH,
    ),
    _fault(
        "noisy_loss",
        lambda: tabular(
            Residual(FeedForward()), Residual(FeedForward(nn.Tanh)), outputs=1, criterion=Part(blurred_kelvin_loss)
        ),
        "criterion",
        BF16,
        of_temperatures,
    ),
    _fault("checked_overflow", lambda: _among_classes(Residual(gated(checked))), "blocks.1.branch", FP16, of_classes),
    _fault("filled_mask", _masked, "blocks.1.branch.softmax", FP16, of_sentences),
    _fault("scattered", lambda: _among_classes(Part(scattered, linear=square())), "blocks.1.linear", BOTH, of_classes),
)
