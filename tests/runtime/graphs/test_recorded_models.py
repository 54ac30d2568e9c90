"""Models that do more with their weights than to hold them: recorded, and trained as they are; or not recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from recorded_training import (
    Net,
    backward_of_squares,
    batch,
    forget,
    require_same_gradients,
    require_same_training,
    said,
)
from torch import nn

from amptune.runtime.graphs.dispatch import NOT_RECORDED


@pytest.fixture(autouse=True)
def _afresh() -> None:
    forget()


class Pair(NamedTuple):
    one: nn.Parameter
    other: nn.Parameter


@dataclass
class Holder:
    weight: nn.Parameter


class Keeping(Net):
    """Has two weights more, in whatever `keep` makes of them; forgets none, and puts none in another place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.full((4,), 0.5)), nn.Parameter(torch.full((4,), 2.0))
        vars(self.a)["gain"] = 3.0
        self.kept: Any = self.keep()

    def keep(self) -> Any:
        return Pair(self.a, self.b)

    def weights(self) -> Any:
        assert self.kept.one is self.a
        return self.kept

    def forward(self, x: torch.Tensor) -> Any:
        one, other = self.weights()
        return super().forward(x) * one * vars(one)["gain"] + other


class InDataclasses(Keeping):
    def keep(self) -> Any:
        return {"layers": [Holder(self.a), Holder(self.b)]}

    def weights(self) -> Any:
        return [holder.weight for holder in self.kept["layers"]]


class InCycle(Keeping):
    def keep(self) -> Any:
        kept: dict[str, Any] = {"a": [self.a], "b": (self.b, 1)}
        kept["self"] = kept
        return kept

    def weights(self) -> Any:
        assert self.kept["self"] is self.kept
        return self.kept["a"][0], self.kept["b"][0]


class Elsewhere(Keeping):
    """Has a weight from a function, beside its modules."""

    def keep(self) -> Any:
        both = self.a, self.b
        return lambda: both

    def weights(self) -> Any:
        return self.kept()


class Rotating(Keeping):
    """Turns the places of its weights."""

    def keep(self) -> Any:
        return [self.a, self.b]

    def weights(self) -> Any:
        self.kept.append(self.kept.pop(0))
        return self.a, self.b


class CountingBeside(Keeping):
    def keep(self) -> Any:
        return {"a": {"weight": self.a, "n": 0}}

    def weights(self) -> Any:
        self.kept["a"]["n"] += 1
        return self.kept["a"]["weight"], self.b


class CountingOnWeight(Keeping):
    def weights(self) -> Any:
        vars(self.a)["gain"] /= 2
        return self.a, self.b


class Hiding(Keeping):
    """Holds a weight that it does not tell of."""

    def keep(self) -> Any:
        return [nn.Parameter(torch.full((4,), 2.0))]

    def forward(self, x: torch.Tensor) -> Any:
        return Net.forward(self, x) * self.kept[0]


HIDDEN, AGAIN = "has gradients for what is none of the weights", "meets a changed model again and again"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Keeping, ""),
        (InDataclasses, HIDDEN),
        (InCycle, HIDDEN),
        (Elsewhere, HIDDEN),
        (CountingBeside, HIDDEN),
        (Rotating, f"{AGAIN} (kept"),
        (CountingOnWeight, f"{AGAIN} (gain"),
        (Hiding, "uses a tensor that is none of its inputs, weights and buffers"),
    ],
)
def test_weights_are_trained_wherever_they_are_kept(make: Callable[[], nn.Module], reason: str) -> None:
    called = require_same_training(make)
    assert [finding.code for finding in said] == ([NOT_RECORDED] if reason else [])
    assert reason in "".join(finding.message for finding in said)
    assert len(called.recordings) == (0 if reason else 1)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = self.linear(x) if x is y else self.linear(x) * y
        return out if x.is_contiguous() else out * 2


def test_inputs_come_in_as_they_are_given() -> None:
    """One twice, a transposed one, an expanded one."""

    def backward(called: Any, seed: int) -> None:
        x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(seed))
        for args in ((x, x), (x, y), (x.t(), y), (x[:1].expand(8, 8), y)):
            called(*args).square().mean().backward()

    require_same_gradients(TwoInputs, backward)
    assert not said


def test_a_lazy_model_is_recorded_once_it_is_built() -> None:
    called = require_same_gradients(lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(4)), backward_of_squares)
    called.recordings.require_some()


@dataclass(frozen=True)
class Answer:
    logits: torch.Tensor
    others: list[torch.Tensor]
    scale: float = 0.5


@pytest.mark.parametrize("more", [False, True])
def test_outputs_in_a_dataclass_come_back_in_one_unless_it_has_more_than_its_fields(*, more: bool) -> None:
    class Answering(Net):
        def forward(self, x: torch.Tensor) -> Any:
            logits = super().forward(x)
            answer = Answer(logits, [logits.detach().mean()])
            vars(answer).update({"kept": "more"} if more else {})
            return answer

    def backward(called: Any, seed: int) -> None:
        answer = called(batch(seed))
        assert (type(answer), answer.scale, "kept" in vars(answer)) == (Answer, 0.5, more)
        (answer.logits - answer.others[0]).square().mean().backward()

    called = require_same_gradients(Answering, backward)
    assert len(called.recordings) == 1 - more
    assert more == any("returns a Answer, whose contents are not known" in finding.message for finding in said)
