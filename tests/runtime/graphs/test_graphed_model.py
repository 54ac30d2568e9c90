from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded_training import (
    Net,
    Step,
    accumulated,
    batch,
    built,
    forwards,
    graphed,
    in_bf16,
    plain_step,
    require_same_training,
    said,
    stepping,
    trained,
)
from taped import TapeRecorder
from torch import nn

from amptune.errors import PolicyApplyError
from amptune.policy.settings import Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.graphs.dispatch import MOST_RECORDINGS, MOST_WASTED, NOT_RECORDED, WORTH_IT
from amptune.runtime.graphs.graphed_model import GraphedModel
from amptune.runtime.graphs.host_effects import NotRecordableError, obstacle_in
from amptune.runtime.graphs.tensor_use import TensorWatch


class Tied(nn.Module):
    """Autocast casts its weight once for three uses, and so sums up its gradient in bf16; not for the fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(192, 192)

    def forward(self, x: torch.Tensor) -> Any:
        out = self.linear(self.linear(self.linear(x.flatten(1))))
        return out + self.linear.weight.square().mean().to(out.dtype)


@pytest.mark.parametrize("step", [plain_step, in_bf16, accumulated, stepping(in_bf16=True, caches=False)])
@pytest.mark.parametrize("make", [Net, Tied])
def test_training_is_bit_for_bit_that_of_the_plain_model(make: Callable[[], nn.Module], step: Step) -> None:
    called = require_same_training(make, step, [4, 4, 3, 4, 4, 3, 4, 3])
    assert len(called.recordings) == 2
    assert not said
    assert make is not Net or called.unused.weight.grad is None  # it has no part in the loss


def test_another_shape_is_recorded_when_it_comes_again_and_only_so_many_are() -> None:
    model = built()
    called = graphed(model)
    called.recordings.checks = False
    trained(model, called, plain_step, [8, 1, 8])
    assert forwards.shapes().count("(1, 3, 8, 8)") == 1
    trained(model, called, plain_step, [1])
    many = forwards.shapes().count("(1, 3, 8, 8)")
    trained(model, called, plain_step, [1, 1, 1])
    assert forwards.shapes().count("(1, 3, 8, 8)") == many > 2
    trained(model, called, plain_step, [2, 2, 3, 3, 5, 5, 6, 6, 7, 7])
    assert len(called.recordings) == MOST_RECORDINGS
    forwards.clear()
    trained(model, called, plain_step, [7, 8])
    assert forwards.shapes() == ["(7, 3, 8, 8)"]


def test_a_model_that_goes_on_changing_is_not_recorded_for_ever() -> None:
    model = built()
    called = graphed(model)
    for replays, is_told in ((WORTH_IT, False), (0, True)):
        for _ in range(MOST_WASTED + 2):
            model.head.weight.data = torch.full((4, 8), 0.5)
            trained(model, called, plain_step, [4] * (replays + 2))
        assert [finding.code for finding in said] == [NOT_RECORDED] * is_told
    assert "meets a changed model again and again (head.weight" in said[0].message


def test_it_stands_for_the_model() -> None:
    model = built()
    called: Any = graphed(model)
    trained(model, called, plain_step, [4, 4])
    copied, before = copy.deepcopy(called), model.head.weight.clone()
    trained(copied._orig_mod, copied, plain_step, [4, 4])
    assert torch.equal(model.head.weight, before)
    assert type(pickle.loads(pickle.dumps(called))) is Net
    called.scale = 3.0
    assert model.scale == 3.0
    del called.scale
    assert not hasattr(model, "scale")
    called.eval()
    assert not model.training
    layers = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    called = graphed(layers)
    assert (called[1], len(called), [*called]) == (layers[1], 2, [*layers])


def test_a_policy_wraps_the_model_until_it_is_undone() -> None:
    model = built()
    tuned = apply(Policy(cuda_graphs=True), model)
    called: Any = tuned.model
    if not torch.cuda.is_available():
        assert [finding.code for finding in tuned.findings] == ["cuda-graphs-without-effect"]
    called.recordings.recorder, called.recordings.device_type = TapeRecorder, "cpu"
    trained(model, called, plain_step, [4, 4, 4])
    assert len(called.recordings) == 1
    tuned.undo()
    assert tuned.model is model
    forwards.clear()
    trained(model, called, plain_step, [4, 4, 4])
    assert len(forwards.shapes()) == 3


def test_a_trial_is_told_why_nothing_was_recorded_and_of_lack_of_memory_as_such() -> None:
    class Full(TapeRecorder):
        def record(self, _: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    called = GraphedModel(built(), said.append, recorder=Full, device_type="cpu")
    for cause, why in ((type(None), "never calls the model with tensors on the GPU"), (torch.OutOfMemoryError, "out")):
        with pytest.raises(PolicyApplyError, match=why) as error:
            called.recordings.require_some()
        assert isinstance(error.value.__cause__, cause)
        called(batch(0)).sum().backward()
        assert called(batch(0)).shape == (4, 4)


def test_an_exchange_with_other_processes_is_refused_before_it_begins() -> None:
    x = torch.ones(3)
    with TensorWatch([x], []), pytest.raises(NotRecordableError, match="exchanges tensors with other processes"):
        torch.ops._c10d_functional.all_reduce(x, "sum", "0")
    parallel: Any = object.__new__(nn.parallel.DistributedDataParallel)  # without a process group
    nn.Module.__init__(parallel)
    assert "DistributedDataParallel, which is to be put around" in str(obstacle_in(nn.Sequential(parallel)))
