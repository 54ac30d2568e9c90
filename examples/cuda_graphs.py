"""A whole training step captured in a CUDA graph by hand; `compile: reduce-overhead` captures by itself.

After "Whole-network capture" of https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

import torch
from torch import nn

import amptune

if not torch.cuda.is_available():
    raise SystemExit("CUDA graphs are a GPU's, and this PyTorch sees none: run this example on a machine with one")

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).cuda()

policy = amptune.Policy(autocast="bf16", fp32_modules=(amptune.Fp32Rule(path="2"),))
tuned = amptune.apply(policy, model)  # or amptune.apply("policy.yaml", model)
optimizer = tuned.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True))

x = torch.randn(32, 16, device="cuda")  # copy the next batch into it before each replay
y = x[:, :4].argmax(dim=1)


def step():
    optimizer.zero_grad(set_to_none=True)
    with tuned.autocast(cache_enabled=False):  # what is cached outside the graph would be gone when it is replayed
        loss = nn.functional.cross_entropy(tuned.model(tuned.batch(x)), y)
    loss.backward()
    optimizer.step()
    return loss


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    warm_up = [step().item() for _ in range(3)]
torch.cuda.current_stream().wait_stream(side)

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    loss = step()
for _ in range(20):
    graph.replay()
print(f"loss {warm_up[0]:.4f} -> {loss.item():.4f}")
