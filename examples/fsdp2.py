"""FSDP2: modules in FP32 are gathered in FP32. Run by `torchrun --standalone --nproc-per-node 2 fsdp2.py`."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import amptune
from amptune.runtime.integrations.fsdp import fully_shard


def train(device):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(16, 4)).to(device)

    policy = amptune.Policy(autocast="bf16", fp32_modules=(amptune.Fp32Rule(path="2"),))
    tuned = amptune.apply(policy, model)  # or amptune.apply("policy.yaml", model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, tuned, mesh=mesh)
    fully_shard(model, tuned, mesh=mesh)
    optimizer = tuned.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    torch.manual_seed(1 + dist.get_rank())  # data of its own in each process
    x = torch.randn(32, 16, device=device)
    y = x[:, :4].argmax(dim=1)
    losses = []
    for _ in range(20):
        with tuned.autocast():
            loss = nn.functional.cross_entropy(tuned.model(tuned.batch(x)), y)
        tuned.scaler.scale(loss).backward()
        tuned.scaler.step(optimizer)
        tuned.scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if "LOCAL_RANK" not in os.environ:
    raise SystemExit("start this by: torchrun --standalone --nproc-per-node 2 fsdp2.py")
on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
if on_gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpus else "gloo")
train(device)
dist.destroy_process_group()
