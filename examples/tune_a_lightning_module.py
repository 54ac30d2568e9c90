"""A LightningModule that amptune tunes as it stands: `amptune tune tune_a_lightning_module.py`, then `python …`."""

from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import amptune
from amptune.runtime.integrations.lightning import PolicyPrecision


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
        self.losses = []

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(0)
x = torch.randn(256, 16)
loader = DataLoader(TensorDataset(x, x[:, :4].argmax(dim=1)), batch_size=32, shuffle=True)
model = Classifier()

workload = amptune.Workload.from_lightning(model, loader)

if __name__ == "__main__":  # amptune imports this file, and must not train then
    trainer = lightning.Trainer(
        plugins=[PolicyPrecision("policy.yaml" if Path("policy.yaml").exists() else amptune.Policy())],
        max_epochs=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, loader)
    print(f"loss {model.losses[0]:.4f} -> {model.losses[-1]:.4f}")
