"""A step followed by shapes: FLOPs and bytes against sums by hand, autocast's casts, memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amptune.errors import TargetError, UserCodeError
from amptune.predict.gpu_table import gpus_named
from amptune.predict.operation import StepFigures, Work
from amptune.predict.prediction import predicted
from amptune.predict.shape_pass import follow_step
from amptune.predict.speed_up import StepSetting
from amptune.workload.workload import Workload


def followed(model: Callable[[], nn.Module], *shape: int, **parts: Any) -> StepFigures:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        output: Tensor = model(x)
        return output.float().square().mean()

    given: dict[str, Any] = {
        "model": model,
        "batch": lambda n: torch.randn(n, *shape),
        "loss": loss,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "batch_size": 8,
    }
    return follow_step(Workload(**{**given, **parts}))


def kinds(work: Work) -> set[str]:
    return {one.kind for one in work.operations}


def total(work: Work, figure: str, *among: str) -> float:
    """Sums a figure over the operations of some kinds, of all without any."""
    return float(sum(getattr(one, figure) for one in work.operations if not among or one.kind in among))


def test_a_linear_layer_takes_two_flops_a_weight_and_sample_in_each_of_its_products() -> None:
    step = followed(lambda: nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 16)), 32)
    first, second = 2 * 8 * 32 * 64, 2 * 8 * 64 * 16
    assert total(step.fp32, "flops") == 2 * first + 3 * second  # the batch needs no gradient


@pytest.mark.parametrize(
    ("loss", "raises"),
    [
        (lambda out, y: nn.BCELoss()(out.sigmoid(), y.to(out.dtype)), True),
        (nn.functional.binary_cross_entropy_with_logits, False),
    ],
)
def test_a_loss_that_autocast_refuses_on_a_gpu_is_told_on_a_cpu(loss: Callable[..., Tensor], raises: bool) -> None:
    step = followed(lambda: nn.Linear(4, 1), 4, loss=lambda model, x: loss(model(x), torch.rand(8, 1)))
    assert step.raises is raises
    [gpu] = gpus_named("V100")
    found = [finding.code for finding in predicted(step, gpu, StepSetting()).missing]
    assert ("refused-by-autocast" in found) is raises


@pytest.mark.parametrize(
    ("words", "gpu", "sizes"), [(1001, "V100", [1001]), (1008, "V100", []), (1001, "GTX-1080-Ti", [])]
)
def test_odd_sizes_are_told_where_tensor_cores_would_mind(words: int, gpu: str, sizes: list[int]) -> None:
    step = followed(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, words)), 64)
    [model] = gpus_named(gpu)
    odd = [one for one in predicted(step, model, StepSetting()).missing if one.code == "odd-sizes"]
    assert [finding.figures["size"] for finding in odd] == sizes


def test_a_grouped_convolution_has_its_share_of_the_flops_forward_and_backward() -> None:
    def flops(groups: int) -> float:
        convolution = nn.Conv2d(16, 32, 3, padding=1, groups=groups)
        step = followed(lambda: nn.Sequential(nn.Conv2d(16, 16, 1), convolution), 16, 8, 8)
        return total(step.fp32, "flops", "convolution", "grouped")

    pointwise = 2 * 2 * 8 * 16 * 16 * 64
    assert flops(1) - pointwise == 4 * (flops(4) - pointwise)
    assert flops(1) - pointwise == 3 * 2 * 8 * 32 * 16 * 9 * 64


def test_depthwise_and_recurrent_layers_are_kinds_of_their_own() -> None:
    assert "depthwise" in kinds(followed(lambda: nn.Conv2d(16, 16, 3, groups=16), 16, 8, 8).fp32)

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(16, 32)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.lstm(x.transpose(0, 1))[0]
            return output

    step = followed(Last, 5, 16)
    for work, in_half in ((step.fp32, False), (step.half, True)):
        assert {(one.steps, one.in_half) for one in work.operations if one.kind == "recurrent"} == {(5, in_half)}


def test_autocast_adds_casts_and_halves_what_products_move() -> None:
    step = followed(lambda: nn.Linear(256, 256), 256)
    assert "cast" not in kinds(step.fp32)
    assert total(step.half, "bytes", "matmul") == total(step.fp32, "bytes", "matmul") / 2
    assert all(one.in_half for one in step.half.operations if one.kind == "matmul")
    assert not any(one.in_half for one in step.fp32.operations)


def test_layer_norm_computes_in_fp32_under_autocast_as_on_cuda() -> None:
    """The CPU's own autocast leaves it in bf16."""
    step = followed(lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), 64)
    norm = [one for one in step.half.operations if one.module == "1" and one.kind == "memory"]
    assert norm
    assert not any(one.in_half for one in norm)


def test_memory_is_that_of_weights_gradients_state_and_activations() -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))

    adam = followed(wide, 512, optimizer=lambda model: torch.optim.Adam(model.parameters()))
    sgd = followed(wide, 512)
    weights = 4 * 2 * (512 * 512 + 512)
    assert sgd.fixed_bytes[0] == weights
    assert adam.fixed_bytes[0] == 3 * weights
    assert sgd.sample_bytes[0] > 3 * 512 * 4  # input and both outputs are there at once


def test_work_grows_with_the_batch_except_for_weights() -> None:
    step = followed(lambda: nn.Linear(128, 128), 128)
    assert total(step.at(32).fp32, "flops") == 4 * total(step.fp32, "flops")
    assert total(step.at(32).fp32, "bytes", "optimizer") == total(step.fp32, "bytes", "optimizer")


def test_real_tensors_are_followed_as_fakes_and_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    before = [one.clone() for one in model.state_dict().values()]
    constant = torch.randn(8, 8)
    step = followed(model, 8, batch=lambda _: constant)
    assert total(step.fp32, "flops") > 0
    assert all(torch.equal(one, other) for one, other in zip(before, model.state_dict().values(), strict=True))


class ByValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y if y.sum().item() > 0 else 2 * y


def test_a_model_that_asks_for_values_is_followed_on_real_tensors() -> None:
    step = followed(ByValue, 8)
    assert step.waits == 1
    assert total(step.fp32, "flops") == 2 * 2 * 8 * 8 * 8


def test_a_model_that_asks_for_values_while_it_is_built_is_followed_by_shapes() -> None:
    def model() -> nn.Module:
        widths = [int(width.item()) for width in torch.linspace(8, 16, 3)]
        return nn.Sequential(*map(nn.Linear, widths, widths[1:]))

    step = followed(model, 8)
    assert step.waits == 0
    assert total(step.fp32, "flops", "matmul") == 2 * 8 * (2 * 8 * 12 + 3 * 12 * 16)


def test_errors_of_the_users_code_are_theirs() -> None:
    def fails(*_: object) -> Tensor:
        raise ValueError("labels out of range")

    with pytest.raises(UserCodeError, match="labels out of range"):
        followed(lambda: nn.Linear(8, 8), 8, loss=fails)
    with pytest.raises(TargetError, match="needs a workload with a loss"):
        followed(lambda: nn.Linear(8, 8), 8, loss=None, step=lambda *_: torch.zeros(()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # TorchScript, by torch itself from 2.10 on
def test_a_scripted_part_is_followed_too() -> None:
    def model() -> nn.Module:
        scripted: nn.Module = torch.jit.script(nn.Sequential(nn.Linear(32, 64), nn.ReLU()))
        return nn.Sequential(scripted, nn.Linear(64, 16))

    plain = followed(lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)), 32)
    assert total(followed(model, 32).fp32, "flops", "matmul") == total(plain.fp32, "flops", "matmul")
