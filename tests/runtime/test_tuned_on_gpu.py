from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from amptune.policy.settings import Fp32Math, Fp32Rule, Policy
from amptune.runtime.apply_policy import apply

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)
    )


RULES = (Fp32Rule(path="5"), Fp32Rule(path="1", cast_output=True))


@pytest.mark.parametrize("autocast", ["off", "bf16", "fp16"])
@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_the_training_loop_runs_after_the_model_was_moved(autocast: Any, memory_format: Any) -> None:
    model = net()
    policy = Policy(autocast=autocast, memory_format=memory_format, fused_optimizer=True, fp32_modules=RULES)
    with apply(policy, model) as tuned:
        model.cuda()
        optimizer = tuned.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
        assert optimizer.param_groups[0]["fused"] is True
        assert tuned.scaler.is_enabled() == (autocast == "fp16")
        x = tuned.batch(torch.randn(8, 3, 16, 16, device="cuda"))
        losses = []
        for _ in range(12):
            with tuned.autocast():
                out = tuned.model(x)
                assert out.dtype is torch.float32
                loss = out.square().mean()
            tuned.scaler.scale(loss).backward()
            tuned.scaler.step(optimizer)
            tuned.scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(parameter.is_contiguous() for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_excluded_module_computes_what_fp32_does(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(64, 64)).cuda()
    x = torch.randn(32, 64, device="cuda")
    policy = Policy(autocast="bf16" if dtype is torch.bfloat16 else "fp16", fp32_modules=(Fp32Rule(path="0"),))
    with apply(policy, model) as tuned:
        expected = model(x.to(dtype).float())
        with tuned.autocast():
            assert torch.equal(model(x.to(dtype)), expected)


@pytest.mark.filterwarnings("ignore:.* is set for the whole process")  # of another test's model, which may be alive
def test_tf32_changes_matrix_products_and_ieee_restores_them() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no TF32")
    a = torch.randn(512, 512, device="cuda")
    exact = (a.double() @ a.double()).float()
    error: dict[str, float] = {}
    choices: list[Fp32Math] = ["ieee", "tf32", "stock"]
    for math in choices:
        with apply(Policy(fp32_math=math), nn.ReLU()):
            error[math] = float((a @ a - exact).abs().mean())
    assert error["tf32"] > 10 * error["ieee"]
    assert error["stock"] == error["ieee"]


@pytest.mark.parametrize("build", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_an_optimizer_is_fused_here_or_says_why_not(build: Any) -> None:
    model = nn.Linear(8, 8).cuda()
    with apply(Policy(fused_optimizer=True), model, guard=False) as tuned:
        optimizer = build(model.parameters(), lr=0.1)
        for _ in range(2):  # fused only after a step, which must carry its state over
            model(torch.ones(1, 8, device="cuda")).sum().backward()
            optimizer.step()
            tuned.optimizer(optimizer)
        fused = optimizer.param_groups[0]["fused"] is True
        assert fused != bool(tuned.findings)
