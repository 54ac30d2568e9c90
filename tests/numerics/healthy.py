"""Small models that train as well in half precision as in FP32, with the oddities that real ones have.

A gate that raises its voice at one of these is wrong. The oddities: gradients that are zero by construction (a bias
in front of a BatchNorm, an attention's key bias), weights that are frozen or unused, the same batch at every call.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import torch
from faults import fixed
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name all of PyTorch's users give it

from amptune.workload.workload import Workload

__all__ = ["HEALTHY"]

CLASSES = 6


def _classification(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, target = batch
    return F.cross_entropy(model(x), target)


def _regression(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, target = batch
    return F.mse_loss(model(x), target)


def _adamw(model: nn.Module, lr: float = 3e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    """Of the weights that train, as everybody filters them."""
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)


def _sgd(model: nn.Module, lr: float = 0.02) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=1e-4)


def _pictures(n: int) -> tuple[Tensor, Tensor]:
    tint = torch.randn(n, 3)
    x = torch.randn(n, 3, 12, 12) + 2 * tint[:, :, None, None]
    return x, (tint @ fixed(3, CLASSES)).argmax(-1)


def _features(n: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 20)
    return x, (torch.tanh(x @ fixed(20, 8) / 2) @ fixed(8, CLASSES, seed=1)).argmax(-1)


# --- a perceptron ------------------------------------------------------------------------------------------------


class Perceptron(nn.Module):
    """With dropout, and with a layer that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES)
        )
        self.retired = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


# --- a residual network ------------------------------------------------------------------------------------------


class BasicBlock(nn.Module):
    """Its convolutions have biases that the BatchNorm behind them takes away: their gradient is zero but for noise."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


def _resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        BasicBlock(8, 8, 1),
        BasicBlock(8, 16, 2),
        BasicBlock(16, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


# --- two transformers --------------------------------------------------------------------------------------------

VOCABULARY = 32
LENGTH = 12


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.places = nn.Parameter(torch.randn(LENGTH, 32) / 10)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True) for _ in range(2))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.places
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x.mean(1))
        return logits


def _sentences(n: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (n, LENGTH))
    return ids, fixed(VOCABULARY, CLASSES)[ids].mean(1).argmax(-1)


class CausalBlock(nn.Module):
    """The bias of its keys adds the same to all scores of a query: its gradient is zero but for noise."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(32)
        self.query = nn.Linear(32, 32)
        self.key = nn.Linear(32, 32)
        self.value = nn.Linear(32, 32)
        self.out = nn.Linear(32, 32)
        self.norm2 = nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        query, key, value = (
            linear(normed).unflatten(-1, (4, 8)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class TinyGpt(nn.Module):
    """Its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.places = nn.Embedding(LENGTH, 32)
        self.blocks = nn.Sequential(CausalBlock(), CausalBlock())
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.places.weight
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def _next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def _counting(n: int) -> Tensor:
    """Each sequence counts up, in threes, from anywhere."""
    return (torch.randint(VOCABULARY, (n, 1)) + 3 * torch.arange(LENGTH + 1)) % VOCABULARY


# --- a recurrent network -----------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 32, batch_first=True)
        self.head = nn.Linear(32, 3)

    def forward(self, series: Tensor) -> Tensor:
        states, _ = self.gru(series)
        logits: Tensor = self.head(states[:, -1])
        return logits


def _series(n: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 16, 4)
    return x, (x[:, -6:].mean(1) @ fixed(4, 3)).argmax(-1)


# --- convolutions in groups --------------------------------------------------------------------------------------


def _separable(channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels),
        nn.GroupNorm(4, channels),
        nn.SiLU(),
        nn.Conv2d(channels, channels, 1, groups=2),
        nn.GroupNorm(4, channels),
        nn.SiLU(),
    )


def _depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, padding=1),
        *_separable(16),
        nn.MaxPool2d(2),
        *_separable(16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


# --- a variational autoencoder -----------------------------------------------------------------------------------


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(48, 64), nn.ELU(), nn.Linear(64, 2 * 6))
        self.decoder = nn.Sequential(nn.Linear(6, 64), nn.ELU(), nn.Linear(64, 48))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + (log_variance / 2).exp() * noise), mean, log_variance


def _evidence(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Less the evidence's lower bound (Kingma & Welling, arXiv:1312.6114), per pixel."""
    picture, mean, log_variance = model(batch["x"], batch["noise"])
    divergence: Tensor = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1)
    return F.mse_loss(picture, batch["x"]) + 0.1 * divergence.mean() / 48


def _low_rank(n: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 4) @ fixed(4, 48) / 4, "noise": torch.randn(n, 6)}


# --- bags of words, over a frozen backbone -----------------------------------------------------------------------


class Bags(nn.Module):
    """Its embeddings train, its random projection is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(200, 16, mode="mean")
        self.projection = nn.Linear(16, 64)
        self.projection.requires_grad_(False)
        self.head = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, ids: Tensor) -> Tensor:
        value: Tensor = self.head(self.projection(self.bag(ids)))
        return value


def _baskets(n: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(200, (n, 10))
    prices = fixed(200, 1) + 2
    return ids, prices[ids].mean(1)


# --- a UNet ------------------------------------------------------------------------------------------------------


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(0.1))
        self.down2 = nn.Sequential(nn.Conv2d(8, 16, 3, 2, padding=1), nn.BatchNorm2d(16), nn.LeakyReLU(0.1))
        self.bottom = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 1, 1)

    def forward(self, picture: Tensor) -> Tensor:
        fine = self.down1(picture)
        coarse = self.bottom(self.down2(fine))
        mask: Tensor = self.out(torch.cat([fine, self.up(coarse)], 1))
        return mask


@cache
def _the_same_blobs(n: int) -> tuple[Tensor, Tensor]:
    """Smooth pictures in noise, the same at each call."""
    smooth = F.interpolate(fixed(n, 1, 4, 4), scale_factor=4.0, mode="bilinear", align_corners=False)
    return smooth + 0.3 * fixed(n, 1, 16, 16, seed=1), (smooth > 0).float()


def _segmentation(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    picture, mask = batch
    return F.binary_cross_entropy_with_logits(model(picture), mask)


# --- a linear model with a temperature ---------------------------------------------------------------------------


class Tempered(nn.Module):
    """As CLIP scales its logits: by the exponential of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(20, CLASSES)
        self.log_scale = nn.Parameter(torch.tensor(math.log(4.0)))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x) * self.log_scale.exp()
        return logits


def _workload(model: Any, batch: Any, loss: Any, optimizer: Any, batch_size: int = 32) -> Workload:
    return Workload(model=model, batch=batch, loss=loss, optimizer=optimizer, batch_size=batch_size)


HEALTHY: dict[str, Workload] = {
    "perceptron": _workload(Perceptron, _features, _classification, partial(_sgd, lr=0.1), 64),
    "resnet": _workload(_resnet, _pictures, _classification, _sgd, 48),
    "encoder": _workload(Encoder, _sentences, _classification, _adamw),
    "gpt": _workload(TinyGpt, _counting, _next_token, partial(_adamw, lr=1e-2), 16),
    "recurrent": _workload(Recurrent, _series, _classification, _adamw),
    "depthwise": _workload(_depthwise, _pictures, _classification, _adamw),
    "vae": _workload(Vae, _low_rank, _evidence, _adam, 64),
    "bags": _workload(Bags, _baskets, _regression, _adam, 64),
    "unet": _workload(UNet, _the_same_blobs, _segmentation, _adam, 8),
    "tempered": _workload(Tempered, _features, _classification, _adam, 64),
}
