"""Workloads from a LightningModule, with whatever `configure_optimizers` returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning", reason="Lightning is not installed")

import lightning

from amptune import Workload
from amptune.errors import TargetError
from amptune.measure.bench.bench import Bench
from amptune.measure.results.outcome import Effort, Measurement
from amptune.policy.settings import STOCK
from amptune.workload.by_value import from_bytes, to_bytes

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # what Lightning itself still uses of PyTorch's
    pytest.mark.filterwarnings("ignore:You are trying to `self.log"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch compiles through `self.log`
]


class Lit(lightning.LightningModule):
    def __init__(self, form: str = "single") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.form = form

    def training_step(self, batch: Any, _: int) -> Any:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return {"loss": loss} if self.form == "dict" else loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.25)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=int(steps))
        forms = {
            "single": optimizer,
            "list": [optimizer],
            "two lists": ([optimizer], [schedule]),
            "dict": {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}},
            "list of dicts": [{"optimizer": optimizer, "lr_scheduler": schedule}],
            "two": [optimizer, torch.optim.SGD(self.parameters(), lr=0.1)],
            "none": None,
        }
        return forms[self.form]


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(40, 6), torch.randint(3, (40,))), 8, shuffle=True)


@pytest.mark.parametrize("form", ["single", "list", "two lists", "dict", "list of dicts"])
def test_every_form_of_optimizers_trains_in_another_process(form: str) -> None:
    module = Lit(form)
    workload = from_bytes(to_bytes(Workload.from_lightning(module, loader(), accumulate=2), "workload"))
    assert (workload.batch_size, workload.accumulate) == (8, 2)
    outcome = Bench(workload, torch.device("cpu")).measure(STOCK, Effort(warmup_s=0.01, measure_s=0.01, min_steps=2))
    assert isinstance(outcome, Measurement), outcome
    assert outcome.losses[-1] < outcome.losses[0]
    assert workload.optimizer(workload.model()).param_groups[0]["lr"] in (0.25, pytest.approx(0.02))
    assert module._trainer is None


def test_what_cannot_be_measured_is_refused_with_the_reason() -> None:
    for form, count in (("two", 2), ("none", 0)):
        workload = Workload.from_lightning(Lit(form), loader())
        with pytest.raises(TargetError, match=f"configure_optimizers returned {count} optimizers"):
            workload.optimizer(workload.model())
    by_hand = Lit()
    by_hand.automatic_optimization = False
    with pytest.raises(TargetError, match=r"Lit optimizes by hand .*Workload\(step="):
        Workload.from_lightning(by_hand, loader())
    with pytest.raises(TargetError, match="module is Linear, not a LightningModule"):
        Workload.from_lightning(nn.Linear(2, 2), loader())
    with pytest.raises(TargetError, match=r"Lit has no train_dataloader\(\): give its loader, or a Lightning"):
        Workload.from_lightning(Lit())


def test_a_compiled_policy_compiles_the_training_step() -> None:
    """As Lightning does with the module that torch.compile returns: its forward method alone is never called."""
    workload = Workload.from_lightning(Lit(), loader())
    compiled = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    wrapped: Any = torch.compile(workload.model(), backend=backend)
    assert workload.loss is not None
    loss = workload.loss(wrapped, workload.batch(8))
    assert compiled
    assert loss.requires_grad


class Digits(lightning.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.size = 5 if stage == "fit" else 1

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.randn(40, 6), torch.randint(3, (40,))), self.size, shuffle=True)


class WithLoader(Lit):
    train_dataloader = Digits.train_dataloader
    setup = Digits.setup


def test_a_datamodule_gives_the_loader_as_in_fit_and_without_one_the_module_does() -> None:
    assert Workload.from_lightning(Lit(), Digits()).batch_size == 5
    assert Workload.from_lightning(WithLoader()).batch_size == 5
