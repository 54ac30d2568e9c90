"""Eight trainings that wait for their host, for `host_bound.py`: each of another kind, some with a step of their own.

Whole steps were written before any of them was trained with amptune; their first runs showed two faults in these.
"""

# mypy: disable-error-code="no-any-return,no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch import Tensor, nn

from amptune.workload.workload import Workload

__all__ = ["MODELS"]


def adam(model: nn.Module, rate: float = 2.0**-12) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=rate)


# --- two networks against each other -----------------------------------------------------------------------------


class Pair(nn.Module):
    """A generator and a discriminator of pictures of 32 × 32 (Radford et al., 2015, arXiv:1511.06434)."""

    def __init__(self, width: int = 64, *, norm: bool = True) -> None:
        super().__init__()

        def up(a: int, b: int, stride: int, pad: int) -> list[nn.Module]:
            return [nn.ConvTranspose2d(a, b, 4, stride, pad, bias=False), nn.BatchNorm2d(b), nn.ReLU()]

        def down(a: int, b: int) -> list[nn.Module]:
            normed = [nn.BatchNorm2d(b)] if norm and a > 3 else []
            return [nn.Conv2d(a, b, 4, 2, 1), *normed, nn.LeakyReLU(0.2)]

        self.generator = nn.Sequential(
            *up(64, 4 * width, 1, 0), *up(4 * width, 2 * width, 2, 1), *up(2 * width, width, 2, 1),
            nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.critic = nn.Sequential(
            *down(3, width),
            *down(width, 2 * width),
            *down(2 * width, 4 * width),
            nn.Conv2d(4 * width, 1, 4),
            nn.Flatten(),
        )


def both_adams(model: Any) -> tuple[torch.optim.Optimizer, ...]:
    return adam(model.critic, 2.0**-12), adam(model.generator, 2.0**-12)


def noise_like(pictures: Tensor) -> Tensor:
    return torch.randn(len(pictures), 64, 1, 1, device=pictures.device)


def gan() -> Workload:
    """Two networks, two optimizers, two backward passes."""

    def step(tuned: Any, model: Any, optimizers: Any, real: Tensor) -> Tensor:
        critic, generator = optimizers
        with tuned.autocast():
            made = model.generator(tuned.batch(noise_like(real)))
            told = F.softplus(-model.critic(tuned.batch(real))).mean() + F.softplus(model.critic(made.detach())).mean()
        tuned.scaler.scale(told).backward()
        tuned.scaler.step(critic)
        critic.zero_grad()
        with tuned.autocast():
            fooled = F.softplus(-model.critic(made)).mean()
        tuned.scaler.scale(fooled).backward()
        tuned.scaler.step(generator)
        tuned.scaler.update()
        generator.zero_grad()
        critic.zero_grad()
        return told.detach() + fooled.detach()

    pictures = lambda n: torch.randn(n, 3, 32, 32)  # noqa: E731
    return Workload(model=Pair, batch=pictures, step=step, optimizer=both_adams, batch_size=64)


def wgan_gp() -> Workload:
    """A critic with a gradient penalty, twice a step (Gulrajani et al., 2017, arXiv:1704.00028)."""

    def step(tuned: Any, model: Any, optimizers: Any, real: Tensor) -> Tensor:
        critic, generator = optimizers
        for part in real.chunk(2):
            with tuned.autocast():
                made = model.generator(tuned.batch(noise_like(part))).detach().float()
            between = torch.rand(len(part), 1, 1, 1, device=part.device)
            mixed = (between * part + (1 - between) * made).requires_grad_()
            (slope,) = torch.autograd.grad(model.critic(mixed).sum(), mixed, create_graph=True)
            penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
            loss = model.critic(made).mean() - model.critic(part).mean() + 10 * penalty
            loss.backward()
            critic.step()
            critic.zero_grad()
        with tuned.autocast():
            fooled = -model.critic(model.generator(tuned.batch(noise_like(real)))).mean()
        tuned.scaler.scale(fooled).backward()
        tuned.scaler.step(generator)
        tuned.scaler.update()
        for one in optimizers:
            one.zero_grad()
        return loss.detach()

    model = lambda: Pair(norm=False)  # noqa: E731
    pictures = lambda n: torch.randn(n, 3, 32, 32)  # noqa: E731
    return Workload(model=model, batch=pictures, step=step, optimizer=both_adams, batch_size=64)


# --- acting ------------------------------------------------------------------------------------------------------


class ActorCritic(nn.Module):
    """Two networks, a slow copy of one, and a ring of what happened, on the device."""

    def __init__(self, seen: int = 17, acts: int = 6, width: int = 256, kept: int = 8192) -> None:
        super().__init__()
        self.actor = nn.Sequential(
            nn.Linear(seen, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, acts), nn.Tanh()
        )
        of_value = lambda: nn.Sequential(  # noqa: E731
            nn.Linear(seen + acts, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
        )
        self.critic, self.target = of_value(), of_value()
        self.target.load_state_dict(self.critic.state_dict())
        self.target.requires_grad_(requires_grad=False)
        self.register_buffer("ring", torch.zeros(kept, 2 * seen + acts + 1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))


def actor_critic() -> Workload:
    """Deterministic policy gradients with a buffer of their own (Lillicrap et al., 2015, arXiv:1509.02971)."""

    def optimizer(model: Any) -> tuple[torch.optim.Optimizer, ...]:
        return adam(model.critic), adam(model.actor)

    def step(tuned: Any, model: Any, optimizers: Any, new: Tensor) -> Tensor:
        size = len(model.ring)
        with torch.no_grad():
            model.ring.index_copy_(0, (model.place + torch.arange(len(new), device=new.device)) % size, new)
            model.place.add_(len(new)).remainder_(size)
            old = model.ring[torch.randint(size, (256,), device=new.device)]
        seen, acts, reward, later = old.split([17, 6, 1, 17], dim=1)
        with tuned.autocast():
            with torch.no_grad():
                aim = reward + 0.99 * model.target(torch.cat([later, model.actor(later)], 1))
            error = F.mse_loss(model.critic(torch.cat([seen, acts], 1)).float(), aim.float())
        tuned.scaler.scale(error).backward()
        tuned.scaler.step(optimizers[0])
        with tuned.autocast():
            gain = -model.critic(torch.cat([seen, model.actor(seen)], 1)).mean()
        tuned.scaler.scale(gain).backward()
        tuned.scaler.step(optimizers[1])
        tuned.scaler.update()
        for one in optimizers:
            one.zero_grad()
        with torch.no_grad():
            for slow, fast in zip(model.target.parameters(), model.critic.parameters(), strict=True):
                slow.lerp_(fast, 0.005)
        return error.detach()

    batch = lambda n: torch.randn(n, 41)  # noqa: E731
    return Workload(model=ActorCritic, batch=batch, step=step, optimizer=optimizer, batch_size=64)


# --- physics, tables, pictures, words, series --------------------------------------------------------------------


def physics() -> Workload:
    """The heat equation by second derivatives of a network (Raissi et al., 2019, doi:10.1016/j.jcp.2018.10.045)."""

    def model() -> nn.Module:
        layers = [part for _ in range(5) for part in (nn.Linear(128, 128), nn.Tanh())]
        return nn.Sequential(nn.Linear(2, 128), nn.Tanh(), *layers, nn.Linear(128, 1))

    def loss(model: nn.Module, points: Tensor) -> Tensor:
        points = points.clone().requires_grad_()
        heat = model(points)
        (slope,) = torch.autograd.grad(heat.sum(), points, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), points, create_graph=True)
        inside = (slope[:, 1] - 0.1 * bend[:, 0]).square().mean()
        start = torch.stack([points[:, 0], torch.zeros_like(points[:, 0])], 1).detach()
        return inside + (model(start)[:, 0] - torch.sin(math.pi * start[:, 0])).square().mean()

    batch = lambda n: torch.rand(n, 2)  # noqa: E731
    return Workload(model=model, batch=batch, loss=loss, optimizer=adam, batch_size=2048)


class Rows(nn.Module):
    """Embedded categories and numbers through blocks with residuals (Gorishniy et al., 2021, arXiv:2106.11959)."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.kinds = nn.ModuleList(nn.Embedding(100, 8) for _ in range(12))
        self.into = nn.Linear(12 * 8 + 20, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm1d(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(0.1),
                          nn.Linear(2 * width, width))
            for _ in range(6)
        )  # fmt: skip
        self.head = nn.Linear(width, 1)

    def forward(self, numbers: Tensor, kinds: Tensor) -> Tensor:
        x = self.into(torch.cat([numbers, *(one(kinds[:, i]) for i, one in enumerate(self.kinds))], 1))
        for block in self.blocks:
            x = x + block(x)
        found: Tensor = self.head(x)[:, 0]
        return found


def rows() -> Workload:
    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch["numbers"], batch["kinds"]).float(), batch["labels"])

    def batch(n: int) -> dict[str, Tensor]:
        kinds = torch.randint(100, (n, 12))
        return {"numbers": torch.randn(n, 20), "kinds": kinds, "labels": torch.randint(2, (n,)).float()}

    return Workload(model=Rows, batch=batch, loss=loss, optimizer=adam, clip=1.0, batch_size=512)


def resnet18() -> Workload:
    """A small batch of small pictures (He et al., 2015, arXiv:1512.03385), from torchvision."""

    def model() -> nn.Module:
        from torchvision.models import resnet18 as build

        built: nn.Module = build(num_classes=100)
        return built

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]).float(), batch[1])

    batch = lambda n: (torch.randn(n, 3, 64, 64), torch.randint(100, (n,)))  # noqa: E731
    sgd = lambda model: torch.optim.SGD(model.parameters(), lr=2.0**-7, momentum=0.875)  # noqa: E731
    return Workload(model=model, batch=batch, loss=loss, optimizer=sgd, batch_size=16)


def fine_tuned() -> Workload:
    """A small encoder with few sentences a step (Turc et al., 2019, arXiv:1908.08962), from transformers."""

    def model() -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=2048)
        built: nn.Module = BertForSequenceClassification(config)
        return built

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        found: Tensor = model(**batch).loss
        return found

    def batch(n: int) -> dict[str, Tensor]:
        kept = torch.arange(64) < torch.randint(8, 65, (n, 1))
        words = torch.randint(1000, 30000, (n, 64)) * kept
        return {"input_ids": words, "attention_mask": kept.long(), "labels": torch.randint(2, (n,))}

    tuner = lambda model: torch.optim.AdamW(model.parameters(), lr=2.0**-15)  # noqa: E731
    return Workload(model=model, batch=batch, loss=loss, optimizer=tuner, clip=1.0, batch_size=8)


class Cells(nn.Module):
    """Cells that are called for each moment, as research code does."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.GRUCell(16, width), nn.GRUCell(width, width), nn.Linear(width, 16)

    def forward(self, series: Tensor) -> Tensor:
        a = b = series.new_zeros(len(series), self.first.hidden_size)
        found = []
        for moment in series.unbind(1):
            a = self.first(moment, a)
            b = self.second(a, b)
            found.append(self.head(b))
        return torch.stack(found, 1)


def recurrent() -> Workload:
    def loss(model: nn.Module, series: Tensor) -> Tensor:
        return F.mse_loss(model(series[:, :-1]).float(), series[:, 1:])

    batch = lambda n: torch.randn(n, 33, 16).cumsum(1) / 8  # noqa: E731
    return Workload(model=Cells, batch=batch, loss=loss, optimizer=adam, clip=1.0, batch_size=32)


MODELS: Mapping[str, str] = {
    "gan": "a GAN, two optimizers",
    "wgan_gp": "a GAN with a gradient penalty",
    "actor_critic": "an actor-critic with its own buffer",
    "physics": "physics, second derivatives",
    "rows": "a table",
    "resnet18": "ResNet-18, batch 16",
    "fine_tuned": "a small encoder, batch 8",
    "recurrent": "recurrent cells",
}
