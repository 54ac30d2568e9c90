"""Models of wide Linears, whose products FP8 may make faster: a decoder, an encoder, a diffusion transformer.

Plain torch modules with random weights, of few layers, so that they train on one GPU with Adam's state. The decoder
reads the bytes of Python's standard library; the others get random data.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from amptune.workload.workload import Workload
from amptune.workload.zoo.recipes import adamw, in_memory

BYTES, CLASSES = 256, 1000
# Of the standard library, sorted by path.
MOST_BYTES = 2**24


def wide_decoder() -> Workload:
    """Two layers of width 4096 on 1,024 bytes, 403 million parameters."""
    return _workload("wide_decoder", partial(Decoder, 4096, 2, tokens=1024), partial(text, tokens=1024), batch_size=4)


def large_encoder() -> Workload:
    """Eight of the 32 layers of ViT-H, of width 1280, on 256 patches (Dosovitskiy et al., 2020, arXiv:2010.11929)."""
    return _workload("large_encoder", partial(Encoder, 1280, 8), pictures, batch_size=32)


def diffusion_blocks() -> Workload:
    """Three layers of width 3072 on 1,024 tokens, modulated by a time (Peebles and Xie, 2022, arXiv:2212.09748)."""
    return _workload("diffusion_blocks", partial(Diffusion, 3072, 3), noisy, batch_size=8)


class Attention(nn.Module):
    def __init__(self, width: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = width // 128, causal
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query, key, value = self.inner(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        out: Tensor = self.outer(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return out


class Block(nn.Module):
    def __init__(self, width: int, *, causal: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = Attention(width, causal=causal)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        out: Tensor = x + self.mlp(self.norms[1](x))
        return out


class ModulatedBlock(Block):
    """A block whose parts are shifted, scaled and weighted by what a condition gives; at first they count nothing."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.modulation = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        assert condition is not None  # noqa: S101
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulation(condition)[:, None].chunk(6, dim=-1)
        x = x + gate * self.attention(self.norms[0](x) * (1 + scale) + shift)
        out: Tensor = x + gate_mlp * self.mlp(self.norms[1](x) * (1 + scale_mlp) + shift_mlp)
        return out


class Decoder(nn.Module):
    def __init__(self, width: int, layers: int, *, tokens: int) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(BYTES, width), nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(Block(width, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embedding(batch[:, :-1]) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten())


class Encoder(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=14, stride=14)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        x = self.patches(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x).mean(dim=1)), labels)


class Diffusion(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.first, self.time = nn.Linear(64, width), nn.Linear(1, width)
        self.layers = nn.ModuleList(ModulatedBlock(width) for _ in range(layers))
        self.norm, self.last = nn.LayerNorm(width), nn.Linear(width, 64)

    def forward(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        clean, noise, time = batch
        x, condition = self.first(torch.lerp(clean, noise, time[..., None])), functional.silu(self.time(time))
        for layer in self.layers:
            x = layer(x, condition)
        return functional.mse_loss(self.last(self.norm(x)).float(), noise - clean)


@cache
def library() -> Tensor:
    """Returns the first bytes of Python's standard library."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" not in path.parts and len(found) < MOST_BYTES:
            found += path.read_bytes()
    return torch.frombuffer(found, dtype=torch.uint8)


def text(n: int, *, tokens: int) -> Tensor:
    every = library()
    return torch.stack([every[at : at + tokens + 1] for at in torch.randint(len(every) - tokens, (n,))]).long()


def pictures(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, 224, 224), torch.randint(CLASSES, (n,))


def noisy(n: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(n, 1024, 64), torch.randn(n, 1024, 64), torch.rand(n, 1)


def _loss(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(batch)
    return loss


def _workload(name: str, model: Callable[[], nn.Module], batch: Callable[[int], Any], *, batch_size: int) -> Workload:
    return Workload(
        name=name,
        model=model,
        batch=batch,
        loader=partial(in_memory, batch=batch),
        loss=_loss,
        optimizer=adamw,
        batch_size=batch_size,
    )
