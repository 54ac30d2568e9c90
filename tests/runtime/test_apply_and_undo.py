"""Any policy on any small model: `undo` puts everything back to the bit; training before it changes values alone."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch._functorch.config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from amptune.errors import PolicyApplyError
from amptune.policy.settings import Fp32Rule, HalfRule, Policy
from amptune.runtime.apply_policy import apply, has_policy

LAYERS: dict[bool, list[Any]] = {
    False: [lambda: nn.Linear(4, 4), lambda: nn.BatchNorm1d(4), lambda: nn.LayerNorm(4), nn.ReLU],
    True: [lambda: nn.Conv2d(4, 4, 3, padding=1), lambda: nn.BatchNorm2d(4), lambda: nn.GroupNorm(2, 4), nn.ReLU],
}
KINDS = ["Linear", "Conv2d", "BatchNorm2d", "LayerNorm", "GroupNorm"]


@st.composite
def models(draw: st.DrawFn, *, images: bool) -> nn.Sequential:
    """A first layer with weights, others, a block of two that is nested, and perhaps a layer that stands twice."""
    layers = [LAYERS[images][0](), *(draw(st.sampled_from(LAYERS[images]))() for _ in range(draw(st.integers(0, 3))))]
    layers.append(nn.Sequential(*(draw(st.sampled_from(LAYERS[images]))() for _ in range(2))))
    if draw(st.booleans()):
        layers.append(layers[0])
    if draw(st.booleans()):
        tied: Any = LAYERS[images][0]()
        tied.weight = layers[0].weight
        layers.append(tied)
    if draw(st.booleans()):
        layers[0].to(memory_format=torch.channels_last)
    model = nn.Sequential(*layers)
    model.register_buffer("table", torch.rand(5))
    return model


@st.composite
def policies(draw: st.DrawFn, model: nn.Module) -> Policy:
    kinds = [kind for kind in KINDS if any(type(module).__name__ == kind for module in model.modules())]
    wide = draw(st.lists(st.sampled_from(kinds), max_size=2, unique=True))
    autocast: Any = draw(st.sampled_from(["off", "bf16", "fp16"]))
    half = autocast == "off" and draw(st.booleans())
    return Policy(
        autocast=autocast,
        weights="half" if half else "fp32",
        master_weights=half and draw(st.booleans()),
        keep_batchnorm_fp32=half and draw(st.booleans()),
        fp32_math=draw(st.sampled_from(["stock", "ieee", "tf32"])),
        fp32_modules=tuple(Fp32Rule(type=kind, cast_output=draw(st.booleans())) for kind in wide),
        half_modules=(HalfRule(type="LayerNorm"),) if "LayerNorm" in kinds and draw(st.booleans()) else (),
        memory_format=draw(st.sampled_from(["contiguous", "channels_last", "channels_last_3d"])),
        cudnn_benchmark=draw(st.booleans()),
        checkpoint=draw(st.sampled_from([(), ("0",)])),
        fused_optimizer=draw(st.booleans()),
    )


def state_of(model: nn.Module, *, values: bool = True) -> list[Any]:
    """All that `apply` may change, and the values if they are to be the same."""
    backends: Any = torch.backends  # whose stubs know half of it
    modules = [
        (path, type(one), sorted(vars(one)), len(one._forward_pre_hooks), len(one._state_dict_hooks))
        for path, one in model.named_modules(remove_duplicate=False)
    ]
    tensors = [
        (id(one), one.dtype, getattr(one, "grad_dtype", None), one.stride(), one.detach().tolist() if values else None)
        for one in (*model.parameters(), *model.buffers())
    ]
    precisions = [one.fp32_precision for one in (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul)]
    flags = (backends.cudnn.benchmark, torch._functorch.config.backward_pass_autocast, torch.get_num_threads())
    return [modules, tensors, precisions, flags, has_policy(model)]


def step(tuned: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    with tuned.autocast():
        loss = tuned.model(tuned.batch(x)).float().square().mean()
    tuned.scaler.scale(loss).backward()
    tuned.step(optimizer)
    optimizer.zero_grad()


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data(), images=st.booleans(), trains=st.booleans())
@pytest.mark.filterwarnings("ignore")
def test_undo_puts_everything_back_that_a_policy_changed(data: st.DataObject, images: bool, trains: bool) -> None:
    model = data.draw(models(images=images))
    policy = data.draw(policies(model))
    stays = not trains and (policy.weights == "fp32" or policy.master_weights)  # else values are rounded
    before, names = state_of(model, values=stays), list(model.state_dict())
    try:
        tuned = apply(policy, model)
    except PolicyApplyError:  # a weight that is tied across precisions, say
        assert state_of(model, values=stays) == before
        return
    assert [id(one) for one in model.parameters()] == [one for one, *_ in before[1]][: len(list(model.parameters()))]
    saved = model.state_dict()
    assert list(saved) == names
    assert {tensor.dtype for tensor in saved.values() if tensor.is_floating_point()} == {torch.float32}
    x = torch.rand(3, 4, 5, 5) if images else torch.rand(3, 4)
    if trains:
        step(tuned, tuned.optimizer(torch.optim.SGD(model.parameters(), lr=0.01)), x)
    model.eval()
    with torch.no_grad(), tuned.autocast():
        expected = model(x)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(x), expected)
            assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))
    tuned.undo()
    tuned.undo()
    model.train()
    assert state_of(model, values=stays) == before
    assert tuned.model is model
    assert tuned.batch(x) is x
    with pytest.raises(PolicyApplyError, match="haed"):
        apply(Policy(autocast="bf16", memory_format="channels_last", fp32_modules=(Fp32Rule(path="haed"),)), model)
    assert state_of(model, values=stays) == before
