from __future__ import annotations

import pytest
import torch

from amptune.workload import zoo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DTYPES = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("autocast", DTYPES)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_training_at_the_stated_batch_stays_finite(name: str, autocast: str) -> None:
    torch.manual_seed(0)
    workload = zoo.workload(name)
    assert workload.loss is not None
    model = workload.model().cuda()
    optimizer = workload.optimizer(model)
    scaler = torch.amp.GradScaler("cuda", enabled=autocast == "fp16")
    drawn = workload.batch(workload.batch_size)
    batch = drawn.cuda() if isinstance(drawn, torch.Tensor) else tuple(part.cuda() for part in drawn)
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cuda", DTYPES[autocast], enabled=autocast != "off"):
            loss = workload.loss(model, batch)
        torch.autograd.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
    assert loss.isfinite()
    assert all(weights.isfinite().all() for weights in model.parameters())
