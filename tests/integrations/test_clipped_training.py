"""Clipping, accumulation and each precision together, under policies as `tune` writes them, in every framework."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training import Net, batches, net

import amptune
from amptune.policy.settings import Policy

CLIP, RATE = 0.05, 0.5


def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


def in_a_loop(policy: Policy, model: Net, _: Path) -> None:
    with amptune.apply(policy, model) as tuned:
        optimizer = tuned.optimizer(torch.optim.SGD(model.parameters(), lr=RATE))
        for at, (x, y) in enumerate(batches(), 1):
            with tuned.autocast():
                loss = loss_of(tuned.model, x, y) / policy.accumulate
            tuned.scaler.scale(loss).backward()
            if at % policy.accumulate == 0:
                tuned.step(optimizer, clip=CLIP)
                optimizer.zero_grad()


def in_lightning(policy: Policy, model: Net, _: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from amptune.runtime.integrations.lightning import PolicyPrecision

    class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
        net = model
        norms: list[float] = []  # noqa: RUF012

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return loss_of(self.net, *batch)

        def on_before_optimizer_step(self, _: Any) -> None:
            self.norms.append(
                float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
            )

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=RATE)

    module = Lit()
    module.net = model
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    settings: dict[str, Any] = {
        "gradient_clip_val": CLIP,
        "accumulate_grad_batches": policy.accumulate,
        "max_epochs": 1,
    }
    plugin = PolicyPrecision(policy, submodule="net")
    loader = torch.utils.data.DataLoader(batches(), batch_size=None)  # type: ignore[arg-type, var-annotated]
    lightning.Trainer(accelerator="cpu", plugins=[plugin], **settings, **quiet).fit(module, loader)
    assert max(module.norms) < 10  # unscaled, as hooks expect them


def in_fabric(policy: Policy, model: Net, _: Path) -> None:
    lightning = pytest.importorskip("lightning")
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    with amptune.apply(policy, model) as tuned:
        wrapped, optimizer = fabric.setup(tuned.model, tuned.optimizer(torch.optim.SGD(model.parameters(), lr=RATE)))
        for at, (x, y) in enumerate(batches(), 1):
            with tuned.autocast():
                loss = loss_of(wrapped, x, y) / policy.accumulate
            fabric.backward(tuned.scaler.scale(loss))
            if at % policy.accumulate == 0:
                tuned.scaler.unscale_(optimizer.optimizer)
                fabric.clip_gradients(wrapped, optimizer, max_norm=CLIP)
                tuned.scaler.step(optimizer.optimizer)
                tuned.scaler.update()
                optimizer.zero_grad()


def in_accelerate(policy: Policy, model: Net, _: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    from amptune.runtime.integrations.accelerate import accelerator_kwargs, apply_before_prepare

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, **accelerator_kwargs(policy))
    tuned = apply_before_prepare(policy, model, accelerator)
    prepared, optimizer = accelerator.prepare(
        tuned.model, tuned.optimizer(torch.optim.SGD(model.parameters(), lr=RATE))
    )
    for x, y in batches():
        with accelerator.accumulate(prepared):
            with accelerator.autocast():
                loss = loss_of(prepared, x, y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    tuned.undo()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def in_transformers(policy: Policy, model: Net, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from amptune.runtime.integrations.transformers import PolicyCallback, training_arguments

    class ForTrainer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": loss_of(self.net, x, labels)}

    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "num_train_epochs": 1}
    plain = {"optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant", "max_grad_norm": CLIP}
    told = training_arguments(policy, output_dir=str(folder), per_device_train_batch_size=1, **quiet, **plain)
    callback = PolicyCallback(policy)
    trainer = transformers.Trainer(
        ForTrainer(),
        transformers.TrainingArguments(**told),
        data_collator=lambda samples: {"x": samples[0][0], "labels": samples[0][1]},
        train_dataset=batches(),
        callbacks=[callback],
    )
    trainer._get_train_sampler = lambda *_: None  # in order
    trainer.train()
    assert callback.tuned is not None
    callback.tuned.undo()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*does not have many workers")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("autocast", ["off", "bf16", "fp16"])
@pytest.mark.parametrize("train", [in_lightning, in_fabric, in_accelerate, in_transformers])
def test_clipped_steps_are_those_of_the_plain_loop(
    train: Callable[[Policy, Net, Path], None], autocast: Any, accumulate: int, tmp_path: Path
) -> None:
    policy = Policy(autocast=autocast, fused_optimizer=True, accumulate=accumulate)
    start, model, twin = net(), net(), net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the frameworks' own
        train(policy, model, tmp_path)
        in_a_loop(policy, twin, tmp_path)
    names = dict(start.named_parameters())
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert not torch.equal(one, names[name])
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
