"""DistributedDataParallel: the policy comes first. Run by `torchrun --standalone --nproc-per-node 2 ddp.py`."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import amptune


def train(device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)

    policy = amptune.Policy(autocast="bf16", fp32_modules=(amptune.Fp32Rule(path="2"),))
    tuned = amptune.apply(policy, model)  # or amptune.apply("policy.yaml", model)
    parallel = DistributedDataParallel(tuned.model)
    optimizer = tuned.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    torch.manual_seed(1 + dist.get_rank())  # data of its own in each process
    x = torch.randn(32, 16, device=device)
    y = x[:, :4].argmax(dim=1)
    train_on = tuned.training_step(
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), optimizer, model=parallel
    )
    losses = [train_on((x, y)).item() for _ in range(20)]
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if "LOCAL_RANK" not in os.environ:
    raise SystemExit("start this by: torchrun --standalone --nproc-per-node 2 ddp.py")
on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
if on_gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpus else "gloo")
train(device)
dist.destroy_process_group()  # when DDP is gone: it would hold on to the group's threads until the process ends
