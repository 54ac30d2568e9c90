from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from amptune.changes.layout import convert_batch, convert_model, format_of
from amptune.policy.settings import MemoryFormat


def net() -> Any:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 1, 1), nn.Conv2d(3, 8, 3))
    model[2].weight = model[0].weight
    model.register_buffer("grid", torch.randn(1, 2, 5, 5))
    model.register_buffer("spread", torch.ones(1, 1, 1, 1).expand(2, 3, 4, 5))
    return model


def strides(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tensor.stride() for name, tensor in model.state_dict(keep_vars=True).items()}


SHAPES = [(4,), (3, 4), (8, 3, 3, 3), (1, 8, 1, 1), (8, 1, 1, 1), (2, 1, 4, 5), (8, 3, 3, 3, 3), (0, 3, 2, 2)]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data(), memory_format=st.sampled_from(["contiguous", "channels_last", "channels_last_3d"]))
def test_tensors_get_the_format_of_their_dimensions_in_place_and_their_own_strides_back(
    data: st.DataObject, memory_format: MemoryFormat
) -> None:
    """After the optimizer wrote to them too, and after the model moved, which replaces buffers."""
    model = nn.Module()
    for n, shape in enumerate(data.draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4))):
        order = data.draw(st.permutations(range(len(shape))))
        tensor = torch.randn([shape[i] for i in order]).permute([order.index(i) for i in range(len(shape))])
        if data.draw(st.booleans()):
            model.register_parameter(f"p{n}", nn.Parameter(tensor))
        else:
            model.register_buffer(f"b{n}", tensor)
    before, values = strides(model), {name: one.clone() for name, one in model.state_dict().items()}
    identities = [*map(id, model.state_dict(keep_vars=True).values())]
    undo = convert_model(model, memory_format)
    for name, one in model.state_dict(keep_vars=True).items():
        assert torch.equal(one, values[name])
        if one.dim() == {"channels_last": 4, "channels_last_3d": 5}.get(memory_format):
            assert one.is_contiguous(memory_format=getattr(torch, memory_format))
            assert one.stride() == torch.empty(one.shape, memory_format=getattr(torch, memory_format)).stride()
        elif memory_format != "contiguous":
            assert one.stride() == before[name]
    assert [*map(id, model.state_dict(keep_vars=True).values())] == identities
    if data.draw(st.booleans()):
        model.double()
    for parameter in model.parameters():
        parameter.data.mul_(2)
    undo()
    assert strides(model) == before
    for name, one in model.state_dict().items():
        assert torch.equal(one.float(), values[name] * (2 if name.startswith("p") else 1))


def test_undo_leaves_alone_what_was_replaced_since() -> None:
    model = net()
    undo = convert_model(model, "channels_last")
    model[0].weight = nn.Parameter(torch.randn(8, 3, 5, 5))
    del model.grid
    undo()
    assert model[0].weight.shape == (8, 3, 5, 5)
    assert model[2].weight.is_contiguous()
    spread = model.get_buffer("spread")  # elements stored once for many places are not multiplied
    assert spread.stride() == (0, 0, 0, 0)
    assert convert_batch(spread, "channels_last") is spread


def test_a_conversion_that_fails_half_way_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    before = strides(model)
    to = torch.Tensor.to

    def run_out_of_memory(tensor: torch.Tensor, **kwargs: object) -> torch.Tensor:
        if tensor.shape == model[1].weight.shape:
            raise torch.OutOfMemoryError("out of memory")
        return to(tensor, **kwargs)  # type: ignore[call-overload, no-any-return]  # passes on what it was given

    monkeypatch.setattr(torch.Tensor, "to", run_out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        convert_model(model, "channels_last")
    monkeypatch.undo()
    assert strides(model) == before


def test_images_and_volumes_anywhere_in_a_batch_are_converted_and_the_rest_passes_through() -> None:
    image, volume = torch.randn(2, 3, 4, 4), torch.randn(1, 2, 3, 4, 5)
    batch = {"image": image, "rest": (torch.ones(2, 4, 4), "text")}
    converted = convert_batch(batch, "channels_last")
    assert converted["image"].is_contiguous(memory_format=torch.channels_last)
    assert converted["rest"] is batch["rest"]
    assert image.is_contiguous()
    assert convert_batch(batch, "contiguous") is batch
    assert convert_batch(converted, "channels_last") is converted
    assert convert_batch(volume, "channels_last") is volume
    assert convert_batch(volume, "channels_last_3d").is_contiguous(memory_format=torch.channels_last_3d)


@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last", "channels_last_3d"])
def test_a_models_format_is_that_of_all_weights_that_show_one(memory_format: MemoryFormat) -> None:
    three = memory_format == "channels_last_3d"
    conv = nn.Conv3d if three else nn.Conv2d
    model = nn.Sequential(conv(3, 8, 3), conv(8, 8, 1), nn.Linear(2, 2))
    assert format_of(model) == "contiguous"
    convert_model(model, memory_format)
    assert format_of(model) == memory_format
    other = nn.Sequential(model, conv(3, 8, 3))
    assert format_of(other) == "contiguous"
