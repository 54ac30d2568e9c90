from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from training import POLICY, Batch, batches, net, same_weights, train_plainly

import amptune
from amptune.errors import PolicyApplyError
from amptune.hardware.detect import probe
from amptune.policy.policy_file import PolicyFile
from amptune.policy.settings import LossScale, Policy
from amptune.runtime.apply_policy import PolicyDriftWarning
from amptune.runtime.claim_watch import STEPS

pytest.importorskip("lightning", reason="Lightning is not installed")

import lightning
from lightning.pytorch.plugins.precision import MixedPrecision

from amptune.runtime.integrations.lightning import PolicyPrecision

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # what Lightning itself still uses of PyTorch's
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
]

FP16 = replace(POLICY, autocast="fp16", loss_scale=LossScale(init=256))


class Lit(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.losses: list[torch.Tensor] = []
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        self.seen.append(x)
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.detach())  # item() would break a compiled graph
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(data: Any = None) -> DataLoader[Batch]:
    return DataLoader(data or batches(), batch_size=None)  # type: ignore[arg-type]  # a list is a dataset


QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
}


def trainer(plugin: Any, **more: Any) -> Any:
    return lightning.Trainer(**{"max_epochs": 1, "plugins": [plugin], **QUIET, **more})


HALF = Policy(weights="half", master_weights=True, loss_scale=LossScale(init=256))
# It needs no scaler; Lightning then gives the optimizer a closure.
STATIC = replace(HALF, loss_scale=LossScale(init=1, static=True))


@pytest.mark.parametrize("policy", [POLICY, FP16, Policy(fused_optimizer=True), HALF, STATIC], ids=str)
def test_it_trains_as_the_plain_loop_does(policy: Policy) -> None:
    model, twin = Lit(), net()
    trainer(PolicyPrecision(policy, submodule="net")).fit(model, loader())
    assert [loss.item() for loss in model.losses] == train_plainly(policy, twin, batches())
    assert same_weights(model.net, twin)
    assert model.net.head_dtypes == {torch.float16 if policy.weights == "half" else torch.float32}
    assert type(model.net.head) is nn.Linear  # undone
    assert {p.dtype for p in model.parameters()} == {torch.float32}


class Manual(Lit):
    """Lightning runs this whole step inside autocast, which no loop of Lightning's can leave."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, place: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, place))
        optimizer.step()


@pytest.mark.parametrize("policy", [POLICY, FP16], ids=str)
def test_manual_optimization_is_no_mistake(policy: Policy) -> None:
    plugin = PolicyPrecision(policy, submodule="net")
    trainer(plugin).fit(Manual(), loader())
    assert plugin.tuned is not None
    assert plugin.tuned.findings == ()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("policy", [POLICY, FP16, Policy(fused_optimizer=True)], ids=str)
def test_it_does_so_on_a_gpu(policy: Policy) -> None:
    model, twin = Lit(), net().cuda()
    trainer(PolicyPrecision(policy, submodule="net"), accelerator="gpu", devices=1).fit(model, loader())
    data = [(x.cuda(), y.cuda()) for x, y in batches()]
    assert [loss.item() for loss in model.losses] == train_plainly(policy, twin, data)
    assert same_weights(model.net.cpu(), twin.cpu())


def test_clipping_and_accumulation_are_lightnings_own() -> None:
    precision = PolicyPrecision(replace(FP16, accumulate=2), submodule="net")
    model = Lit()
    before = net()
    fitted = trainer(precision, accumulate_grad_batches=precision.policy.accumulate, gradient_clip_val=1e-3)
    fitted.fit(model, loader(batches(2)))
    moved = [after - was for after, was in zip(model.net.parameters(), before.parameters(), strict=True)]
    assert 0 < torch.cat([step.flatten() for step in moved]).norm().item() < 1.1e-4  # lr × the clipped norm
    assert fitted.global_step == 1


@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_steps_are_held_to_the_files_evidence(cuda_graphs: bool) -> None:
    """Not to a time that was measured with CUDA graphs, which Lightning leaves out, with a warning of its own."""
    policy = replace(POLICY, batch_size=8, cuda_graphs=cuda_graphs)
    file = PolicyFile(policy=policy, valid_for=dict(probe("cpu").labels), evidence={"step_ms": 1e-6})
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", PolicyDriftWarning)
        trainer(PolicyPrecision(file, submodule="net")).fit(Lit(), loader(batches(STEPS + 1)))
    (found,) = [str(warning.message) for warning in said if warning.category is PolicyDriftWarning]
    assert ("cuda_graphs is left out" if cuda_graphs else "this policy promised 1e-06") in found


def test_batches_get_the_policys_memory_format() -> None:
    model = Lit()
    model.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3))  # type: ignore[assignment]
    images = [(torch.randn(2, 3, 4, 4), torch.zeros(2, dtype=torch.long))]
    trainer(PolicyPrecision(Policy(memory_format="channels_last"))).fit(model, loader(images))
    assert model.seen[0].is_contiguous(memory_format=torch.channels_last)


def test_a_checkpoint_moves_to_and_from_lightnings_own_plugin(tmp_path: Path) -> None:
    own, back = MixedPrecision("16-mixed", "cpu"), PolicyPrecision(replace(FP16, loss_scale=None), submodule="net")
    path = None
    for epochs, plugin in enumerate((PolicyPrecision(FP16, submodule="net"), own, back), start=1):
        fitted = trainer(plugin, max_epochs=epochs)
        fitted.fit(Lit(), loader(), ckpt_path=path)
        path = tmp_path / f"{epochs}.ckpt"
        fitted.save_checkpoint(path)
    for plugin in (own, back):
        assert plugin.scaler is not None
        assert plugin.scaler.get_scale() == 256


def test_a_second_fit_goes_on_with_the_same_scaler_and_the_model_is_plain_again_when_it_raises() -> None:
    precision, model = PolicyPrecision(FP16, submodule="net"), Lit()
    for _ in range(2):
        trainer(precision).fit(model, loader())
        assert model.net.head_dtypes == {torch.float32}
        scaler = precision.scaler
    assert precision.scaler is scaler
    model.on_train_start = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer(precision).fit(model, loader())
    assert type(model.net.head) is nn.Linear


def test_a_policy_that_compiles_wants_a_model_that_is() -> None:
    policy = replace(POLICY, compile="reduce-overhead")
    with pytest.raises(PolicyApplyError, match=r"trainer\.fit\(torch\.compile\(model, mode='reduce-overhead'\), …\)"):
        trainer(PolicyPrecision(policy, submodule="net")).fit(Lit(), loader())
    whole, part, twin = Lit(), Lit(), net()
    compiled: Any = torch.compile(whole, backend="eager")
    part.net.compile(backend="eager")
    for model in (compiled, part):
        trainer(PolicyPrecision(policy, submodule="net")).fit(model, loader())
    train_plainly(POLICY, twin, batches())
    assert same_weights(whole.net, twin)
    assert same_weights(part.net, twin)


def test_wrong_places_for_the_plugin_are_errors() -> None:
    for submodule, says in (
        ("", r"head: did you mean net\.head"),
        ("model", "Lit has no submodule 'model'; it holds: net"),
    ):
        with pytest.raises(PolicyApplyError, match=says):
            trainer(PolicyPrecision(POLICY, submodule=submodule)).fit(Lit(), loader())
    with pytest.raises(PolicyApplyError, match=r"pass it as Trainer\(plugins=\[…\]\)"):
        PolicyPrecision(POLICY).convert_input(torch.ones(1))
    model = net()
    fabric = lightning.Fabric(accelerator="cpu", plugins=[PolicyPrecision(POLICY)])
    with pytest.raises(PolicyApplyError, match=r"not of Fabric: leave it out of .*amptune\.apply\(policy, model\)"):
        fabric.setup(model, torch.optim.SGD(model.parameters()))
    assert type(model.head) is nn.Linear


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what Lightning itself still uses of jsonargparse's
def test_lightnings_command_line_takes_it_from_a_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse", reason="jsonargparse, which LightningCLI needs, is not installed")
    from lightning.pytorch.cli import LightningCLI

    amptune.save(PolicyFile(policy=POLICY), tmp_path / "policy.yaml")
    loading = type("Loading", (Lit,), {"train_dataloader": lambda _: loader()})
    plugin = {
        "class_path": "amptune.runtime.integrations.lightning.PolicyPrecision",
        "init_args": {"policy": "policy.yaml", "submodule": "net"},
    }
    config = {"trainer": {"max_epochs": 1, "plugins": [plugin], **QUIET}}
    (tmp_path / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "fit", "--config", "config.yaml"])
    cli: Any = LightningCLI(loading, save_config_callback=None, seed_everything_default=False)
    twin = net()
    train_plainly(POLICY, twin, batches())
    assert same_weights(cli.model.net, twin)
    assert "policy: policy.yaml" in cli.parser.dump(cli.config)
