"""A small GPT as people write it: batches drawn from one array, accumulation, autocast and a rate of its own."""

import argparse
import math
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--context", type=int, default=32)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument("--steps", type=int, default=20_000)
parser.add_argument("--dtype", default="bfloat16")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--words", type=int, default=65)
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        n, t, c = x.shape
        q, k, v = (one.view(n, t, -1, 16).transpose(1, 2) for one in self.qkv(self.ln1(x)).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, t, c)
        x = x + self.out(y)
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(args.words, args.width), nn.Embedding(args.context, args.width)
        self.blocks = nn.ModuleList(Block(args.width) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, args.words, bias=False)

    def forward(self, x, targets=None):
        h = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


data = torch.randint(args.words, (20_000,))


def get_batch():
    at = torch.randint(len(data) - args.context - 1, (args.batch_size,)).tolist()
    x = torch.stack([data[i : i + args.context] for i in at])
    y = torch.stack([data[i + 1 : i + 1 + args.context] for i in at])
    return x.to(device), y.to(device)


def rate(step):
    return 1e-3 * min(1.0, (step + 1) / 100) * (0.5 + 0.5 * math.cos(math.pi * step / args.steps))


model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
dtype = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[args.dtype]
around = nullcontext() if dtype is None else torch.amp.autocast(device, dtype=dtype)
scaler = torch.amp.GradScaler(device, enabled=args.dtype == "float16")
if args.compile:
    model = torch.compile(model)
x, y = get_batch()
for step in range(args.steps):
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    for _ in range(args.accumulate):
        with around:
            _, loss = model(x, y)
            loss = loss / args.accumulate
        x, y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if step % 100 == 0:
        print(f"step {step} loss {args.accumulate * loss.item():.4f}")
