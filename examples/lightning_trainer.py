"""Lightning: a precision plugin, in place of `Trainer(precision=…)`."""

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
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(0)
x = torch.randn(256, 16)
data = TensorDataset(x, x[:, :4].argmax(dim=1))
model = Classifier()

policy = amptune.Policy(autocast="bf16", fp32_modules=(amptune.Fp32Rule(path="2"),), batch_size=32)
precision = PolicyPrecision(policy, submodule="net")  # or PolicyPrecision("policy.yaml", submodule="net")
trainer = lightning.Trainer(
    plugins=[precision],
    accumulate_grad_batches=precision.policy.accumulate,
    gradient_clip_val=1.0,
    max_epochs=4,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(model, DataLoader(data, batch_size=precision.policy.batch_size, shuffle=True))
print(f"loss {model.losses[0]:.4f} -> {model.losses[-1]:.4f}")
