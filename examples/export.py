"""torch.export: autocast entered inside the model is part of the program, and so are the modules kept in FP32."""

import torch
from torch import nn

import amptune


class Inference(nn.Module):
    def __init__(self, tuned):
        super().__init__()
        self.model = tuned.model
        self.tuned = tuned

    def forward(self, x):
        with self.tuned.autocast():
            return self.model(x)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

policy = amptune.Policy(autocast="bf16", fp32_modules=(amptune.Fp32Rule(path="2"),))
tuned = amptune.apply(policy, model)  # or amptune.apply("policy.yaml", model)
x = torch.randn(8, 16)
program = torch.export.export(Inference(tuned), (x,))

with tuned.autocast():
    expected = model(x)
assert torch.equal(program.module()(x), expected)
print("the exported program computes what the model does, its head in", program.module()(x).dtype)
