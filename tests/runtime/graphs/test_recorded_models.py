"""Models that do more with their weights than to hold them: recorded, and trained as they are; or not recorded."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from recorded_training import Net, require_same_training, said
from torch import nn

from amptune.runtime.graphs.dispatch import NOT_RECORDED


@dataclass
class Holder:
    weight: nn.Parameter


def keeping(keep: Callable[[Any], Any], weights: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    """A model with two weights more, in whatever `keep` makes of them; `weights` takes them from it."""

    class Keeping(Net):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.full((4,), 0.5)), nn.Parameter(torch.full((4,), 2.0))
            vars(self.a)["gain"] = 3.0
            self.kept: Any = keep(self)

        def forward(self, x: torch.Tensor) -> Any:
            one, other = weights(self)
            return super().forward(x) * one * vars(one).get("gain", 1.0) + other

    return Keeping


def rotated(own: Any) -> Any:
    own.kept.append(own.kept.pop(0))
    return own.a, own.b


def counted_beside(own: Any) -> Any:
    own.kept["a"]["n"] += 1
    return own.kept["a"]["weight"], own.b


def counted_on_weight(own: Any) -> Any:
    vars(own.a)["gain"] /= 2
    return own.a, own.b


HIDDEN, AGAIN = "has gradients for what is none of the weights", "meets a changed model again and again"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (keeping(lambda own: {"a": own.a, "b": own.b}, lambda own: own.kept.values()), ""),
        (keeping(lambda own: [weakref.ref(own.a), weakref.ref(own.b)], lambda own: [one() for one in own.kept]), ""),
        (
            keeping(lambda own: [[Holder(own.a), Holder(own.b)]], lambda own: [one.weight for one in own.kept[0]]),
            HIDDEN,
        ),
        (keeping(lambda own: lambda both=(own.a, own.b): both, lambda own: own.kept()), HIDDEN),
        (keeping(lambda own: {"a": {"weight": own.a, "n": 0}}, counted_beside), HIDDEN),
        (keeping(lambda own: [own.a, own.b], rotated), f"{AGAIN} (kept"),
        (keeping(lambda _: None, counted_on_weight), f"{AGAIN} (gain"),
        (
            keeping(lambda _: [nn.Parameter(torch.ones(4))], lambda own: (own.kept[0], own.b)),
            "uses a tensor that is none of its inputs, weights and buffers",
        ),
    ],
)
def test_weights_are_trained_wherever_they_are_kept(make: Callable[[], nn.Module], reason: str) -> None:
    called = require_same_training(make)
    assert [finding.code for finding in said] == ([NOT_RECORDED] if reason else [])
    assert reason in "".join(finding.message for finding in said)
    assert len(called.recordings) == (0 if reason else 1)


def test_a_lazy_model_is_recorded_once_it_is_built() -> None:
    require_same_training(lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(4))).recordings.require_some()
