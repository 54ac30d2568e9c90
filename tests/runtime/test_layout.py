from __future__ import annotations

import pytest
import torch
from torch import nn

from amptune.changes.layout import convert_batch, convert_model, is_in_another_format
from amptune.policy.settings import MemoryFormat


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.pointwise = nn.Conv2d(8, 1, 1)
        self.volume = nn.Conv3d(3, 8, 3)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("grid", torch.randn(1, 2, 5, 5))
        self.register_buffer("spread", torch.ones(1, 1, 1, 1).expand(2, 3, 4, 5))
        self.tied = nn.Conv2d(3, 8, 3)
        self.tied.weight = self.conv.weight


def strides(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tensor.stride() for name, tensor in model.state_dict(keep_vars=True).items()}


@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_what_was_converted_is_in_no_other_format(memory_format: MemoryFormat) -> None:
    for tensor in (torch.randn(2, 3, 5, 5), torch.randn(2, 5, 5, 3).permute(0, 3, 1, 2), torch.randn(2, 1, 5, 5)):
        assert not is_in_another_format(convert_batch(tensor, memory_format), memory_format)


def test_another_format_is_told_from_a_crop() -> None:
    image, last = torch.randn(2, 3, 5, 5), torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    volume = torch.randn(2, 3, 5, 5, 5).to(memory_format=torch.channels_last_3d)
    assert is_in_another_format(image, "channels_last")
    assert is_in_another_format(last, "contiguous")
    assert is_in_another_format(volume, "contiguous")
    assert not is_in_another_format(image[..., 1:4, 1:4], "contiguous")


def test_weights_and_buffers_of_four_dimensions_become_channels_last_in_place() -> None:
    model = Net()
    before = list(model.parameters())
    values = [parameter.detach().clone() for parameter in before]
    convert_model(model, "channels_last")
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.conv.weight.stride() == (27, 1, 9, 3)
    assert model.pointwise.weight.stride() == (8, 1, 8, 8)
    assert model.get_buffer("grid").is_contiguous(memory_format=torch.channels_last)
    assert model.volume.weight.is_contiguous()
    assert model.tied.weight is model.conv.weight
    for parameter, was, value in zip(model.parameters(), before, values, strict=True):
        assert parameter is was
        assert torch.equal(parameter, value)


def test_channels_last_3d_is_for_five_dimensions() -> None:
    model = Net()
    convert_model(model, "channels_last_3d")
    assert model.volume.weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert model.conv.weight.is_contiguous()


@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last", "channels_last_3d"])
def test_undo_restores_strides_exactly_even_odd_ones(memory_format: MemoryFormat) -> None:
    model = Net()
    model.conv.weight.data = torch.randn(3, 3, 8, 3).permute(2, 1, 0, 3)
    model.volume.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]  # torch's stub wants 4-D
    before = strides(model)
    convert_model(model, memory_format)()
    assert strides(model) == before


def test_undo_works_after_training_and_after_moving_the_model() -> None:
    model = Net()
    del model.spread
    before = strides(model)
    undo = convert_model(model, "channels_last")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.conv(torch.randn(1, 3, 5, 5)).sum().backward()
    optimizer.step()
    model.double()  # replaces buffers, as moving to a device does
    weight = model.conv.weight.detach().clone()
    undo()
    assert strides(model) == before
    assert torch.equal(model.conv.weight, weight)


def test_undo_leaves_alone_what_was_replaced_since() -> None:
    model = Net()
    undo = convert_model(model, "channels_last")
    model.conv.weight = nn.Parameter(torch.randn(8, 3, 5, 5))
    del model.grid
    undo()
    assert model.conv.weight.shape == (8, 3, 5, 5)
    assert model.tied.weight.is_contiguous()


def test_elements_stored_once_for_many_places_are_not_multiplied() -> None:
    model = Net()
    spread = model.get_buffer("spread")
    convert_model(model, "channels_last")()
    assert model.get_buffer("spread").stride() == (0, 0, 0, 0)
    assert convert_batch(spread, "channels_last") is spread


def test_a_conversion_that_fails_half_way_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    before = strides(model)
    to = torch.Tensor.to

    def run_out_of_memory(tensor: torch.Tensor, **kwargs: object) -> torch.Tensor:
        if tensor.shape == model.pointwise.weight.shape:
            raise torch.OutOfMemoryError("out of memory")
        return to(tensor, **kwargs)  # type: ignore[call-overload, no-any-return]  # passes on what it was given

    monkeypatch.setattr(torch.Tensor, "to", run_out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        convert_model(model, "channels_last")
    monkeypatch.undo()
    assert strides(model) == before


def test_images_anywhere_in_a_batch_are_converted_and_the_rest_passes_through() -> None:
    image, mask, label = torch.randn(2, 3, 4, 4), torch.ones(2, 4, 4), torch.tensor([1, 2])
    batch = {"image": image, "rest": (mask, label, "text")}
    converted = convert_batch(batch, "channels_last")
    assert converted["image"].is_contiguous(memory_format=torch.channels_last)
    assert converted["rest"] is batch["rest"]
    assert image.is_contiguous()
    assert convert_batch(batch, "contiguous") is batch
    assert convert_batch(converted, "channels_last") is converted


def test_volumes_need_the_three_dimensional_format() -> None:
    volume = torch.randn(1, 2, 3, 4, 5)
    assert convert_batch(volume, "channels_last") is volume
    assert convert_batch(volume, "channels_last_3d").is_contiguous(memory_format=torch.channels_last_3d)
