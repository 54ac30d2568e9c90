"""Twelve more kinds of training that amptune was not developed with, as targets; most are written out in PyTorch.

    amptune tune reports/other_models.py:diffusion --budget 60s
    python reports/unseen.py reports/other_models.py:gan reports/other_models.py:lstm --budget 60 --out OUT

They were chosen before anything was measured. Weights are random, data is synthetic. Libraries are imported when a
model is built.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from foreign_models import own_loss, timm_model  # beside this program
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name all of PyTorch's users give it

from amptune.workload.workload import Workload
from amptune.workload.zoo.recipes import adamw, cross_entropy, labelled_images, sgd

SIDE, CLASSES, WORDS = 224, 1000, 10_000


# --- pictures ---------------------------------------------------------------------------------------------------------


def coatnet() -> Workload:
    """Convolutions, then attention with relative positions (Dai et al., 2021, arXiv:2106.04803), from timm."""
    return _pictures("coatnet_0_rw_224", adamw, batch_size=32)


def mixer() -> Workload:
    """Dense layers over places and channels (Tolstikhin et al., 2021, arXiv:2105.01601), from timm."""
    return _pictures("mixer_b16_224", adamw, batch_size=64)


def mobilenet() -> Workload:
    """Small depthwise convolutions (Howard et al., 2019, arXiv:1905.02244), from timm."""
    return _pictures("mobilenetv3_large_100", sgd, batch_size=128)


def _pictures(name: str, optimizer: Callable[[nn.Module], torch.optim.Optimizer], batch_size: int) -> Workload:
    batch = partial(labelled_images, side=SIDE, classes=CLASSES)
    return Workload(
        model=partial(timm_model, name), batch=batch, loss=cross_entropy, optimizer=optimizer, batch_size=batch_size
    )


class Residual(nn.Module):
    """Two convolutions that know the time of a diffusion."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, inputs), nn.GroupNorm(32, outputs)
        self.conv1, self.conv2 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.time, self.dropout = nn.Linear(time, outputs), nn.Dropout(0.1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        result: Tensor = self.skip(x) + self.conv2(self.dropout(F.silu(self.norm2(hidden))))
        return result


class SelfAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.qkv, self.out = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        count, width, *places = x.shape
        q, k, v = self.qkv(self.norm(x)).view(count, 3, 4, width // 4, -1).transpose(-1, -2).unbind(1)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(count, width, *places)
        result: Tensor = x + self.out(seen)
        return result


class UNet(nn.Module):
    """Maps noisy pictures (n, 3, 64, 64) and times (n,) to the noise."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        w, time = width, 4 * width
        self.time = nn.Sequential(nn.Linear(w, time), nn.SiLU(), nn.Linear(time, time))
        self.into, self.out = nn.Conv2d(3, w, 3, padding=1), nn.Conv2d(w, 3, 3, padding=1)
        self.down = nn.ModuleList(Residual(i, o, time) for i, o in ((w, w), (w, 2 * w), (2 * w, 2 * w)))
        self.attention, self.middle = SelfAttention(2 * w), Residual(2 * w, 2 * w, time)
        self.up = nn.ModuleList(Residual(i, o, time) for i, o in ((4 * w, 2 * w), (4 * w, w), (2 * w, w)))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        waves = time[:, None] * torch.exp(torch.arange(self.into.out_channels // 2, device=x.device) * -0.1)
        told = self.time(torch.cat([waves.sin(), waves.cos()], 1))
        hidden, skips = self.into(x), []
        for block in self.down:
            hidden = block(hidden, told)
            skips.append(hidden)
            hidden = F.avg_pool2d(hidden, 2)
        hidden = self.middle(self.attention(hidden), told)
        for block in self.up:
            hidden = block(torch.cat([F.interpolate(hidden, scale_factor=2), skips.pop()], 1), told)
        result: Tensor = self.out(hidden)
        return result


def diffusion() -> Workload:
    """A U-Net that learns the noise of a picture (Ho et al., 2020, arXiv:2006.11239)."""

    def loss(model: nn.Module, pictures: Tensor) -> Tensor:
        time, noise = torch.rand(len(pictures), device=pictures.device), torch.randn_like(pictures)
        kept = torch.cos(1.5 * time)[:, None, None, None]
        return F.mse_loss(model(kept * pictures + (1 - kept * kept).sqrt() * noise, 1000 * time), noise)

    batch = lambda n: torch.randn(n, 3, 64, 64)  # noqa: E731
    return Workload(model=UNet, batch=batch, loss=loss, optimizer=adamw, batch_size=32)


class Gan(nn.Module):
    """A generator and what tells its pictures from real ones (Radford et al., 2015, arXiv:1511.06434)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        w = width
        made: list[nn.Module] = [nn.ConvTranspose2d(100, 8 * w, 4), nn.BatchNorm2d(8 * w), nn.ReLU()]
        for i, o in ((8 * w, 4 * w), (4 * w, 2 * w), (2 * w, w)):
            made += [nn.ConvTranspose2d(i, o, 4, 2, 1), nn.BatchNorm2d(o), nn.ReLU()]
        self.made = nn.Sequential(*made, nn.ConvTranspose2d(w, 3, 4, 2, 1), nn.Tanh())
        told: list[nn.Module] = [nn.Conv2d(3, w, 4, 2, 1), nn.LeakyReLU(0.2)]
        for i, o in ((w, 2 * w), (2 * w, 4 * w), (4 * w, 8 * w)):
            told += [nn.Conv2d(i, o, 4, 2, 1), nn.BatchNorm2d(o), nn.LeakyReLU(0.2)]
        self.told = nn.Sequential(*told, nn.Conv2d(8 * w, 1, 4), nn.Flatten(0))

    def forward(self, x: Tensor, part: str) -> Tensor:
        result: Tensor = self.made(x) if part == "make" else self.told(x)
        return result


def gan() -> Workload:
    """Three passes a step, by a step of one's own."""

    def step(tuned: Any, model: nn.Module, optimizer: torch.optim.Optimizer, real: Tensor) -> Tensor:
        noise = torch.randn(len(real), 100, 1, 1, device=real.device)
        with tuned.autocast():
            made = model(tuned.batch(noise), "make")
            loss = F.softplus(-model(tuned.batch(real), "tell")).mean() + F.softplus(-model(made, "tell")).mean()
        tuned.scaler.scale(loss).backward()
        tuned.scaler.step(optimizer)
        tuned.scaler.update()
        optimizer.zero_grad()
        return loss

    batch = lambda n: torch.randn(n, 3, 64, 64)  # noqa: E731
    return Workload(model=Gan, batch=batch, step=step, optimizer=adamw, batch_size=128)


# --- text and sound ---------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.lstm = nn.LSTM(width, width, 2, dropout=0.3, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.head(self.lstm(self.embedding(words))[0])
        return result


def lstm() -> Workload:
    """A language model of two LSTM layers (Zaremba et al., 2014, arXiv:1409.2329)."""

    def loss(model: nn.Module, words: Tensor) -> Tensor:
        return F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())

    batch = lambda n: torch.randint(WORDS, (n, 129))  # noqa: E731
    return Workload(model=Recurrent, batch=batch, loss=loss, optimizer=adamw, batch_size=64)


def distilbert() -> Workload:
    """A small encoder on padded sentences (Sanh et al., 2019, arXiv:1910.01108), from transformers."""

    def model() -> nn.Module:
        from transformers import DistilBertConfig, DistilBertForSequenceClassification

        built: nn.Module = DistilBertForSequenceClassification(DistilBertConfig())
        return built

    def batch(n: int) -> dict[str, Tensor]:
        kept = torch.arange(128) < torch.randint(16, 129, (n, 1))
        words = torch.randint(1000, 30000, (n, 128)) * kept
        return {"input_ids": words, "attention_mask": kept.long(), "labels": torch.randint(2, (n,))}

    return Workload(model=model, batch=batch, loss=own_loss, optimizer=adamw, batch_size=32)


def qwen() -> Workload:
    """A decoder whose activations are computed again (Yang et al., 2024, arXiv:2407.10671), from transformers."""

    def model() -> nn.Module:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 8, "vocab_size": 32000}
        config = Qwen2Config(**sizes, num_attention_heads=14, num_key_value_heads=2, use_cache=False)
        built = Qwen2ForCausalLM(config)
        built.gradient_checkpointing_enable()
        found: nn.Module = built
        return found

    def batch(n: int) -> dict[str, Tensor]:
        words = torch.randint(32000, (n, 512))
        return {"input_ids": words, "labels": words}

    return Workload(model=model, batch=batch, loss=own_loss, optimizer=adamw, batch_size=8)


def wav2vec() -> Workload:
    """Three seconds of sound, to letters (Baevski et al., 2020, arXiv:2006.11477), from transformers; CTC's loss."""

    def model() -> nn.Module:
        from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

        built: nn.Module = Wav2Vec2ForCTC(Wav2Vec2Config(num_hidden_layers=6, ctc_zero_infinity=True))
        return built

    def batch(n: int) -> dict[str, Tensor]:
        return {"input_values": torch.randn(n, 48000), "labels": torch.randint(1, 32, (n, 30))}

    return Workload(model=model, batch=batch, loss=own_loss, optimizer=adamw, batch_size=8)


class Separator(nn.Module):
    """Masks one of the voices in sound (n, 1, samples)."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.into, self.out = nn.Conv1d(1, width, 16, stride=8), nn.ConvTranspose1d(width, 1, 16, stride=8)
        self.blocks = nn.ModuleList(_dilated(width, 2 ** (place % 8)) for place in range(16))

    def forward(self, sound: Tensor) -> Tensor:
        heard = mask = self.into(sound)
        for block in self.blocks:
            mask = mask + block(mask)
        result: Tensor = self.out(heard * mask.sigmoid())
        return result


def _dilated(width: int, dilation: int) -> nn.Sequential:
    inner = 2 * width
    depthwise = nn.Conv1d(inner, inner, 3, padding=dilation, dilation=dilation, groups=inner)
    first = (nn.Conv1d(width, inner, 1), nn.PReLU(), nn.GroupNorm(1, inner))
    return nn.Sequential(*first, depthwise, nn.PReLU(), nn.GroupNorm(1, inner), nn.Conv1d(inner, width, 1))


def separator() -> Workload:
    """Dilated convolutions over sound (Luo and Mesgarani, 2018, arXiv:1809.07454)."""
    batch = lambda n: (torch.randn(n, 1, 16000), torch.randn(n, 1, 16000))  # noqa: E731
    loss = lambda model, batch: F.l1_loss(model(batch[0]), batch[1])  # noqa: E731
    return Workload(model=Separator, batch=batch, loss=loss, optimizer=adamw, batch_size=8)


# --- tables and graphs ------------------------------------------------------------------------------------------------


class Recommender(nn.Module):
    def __init__(self, tables: int = 16, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(100_000, width, mode="sum") for _ in range(tables))
        self.numbers = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.head = nn.Sequential(
            nn.Linear(width + pairs, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 1)
        )

    def forward(self, numbers: Tensor, items: Tensor) -> Tensor:
        first = self.numbers(numbers)
        all_of = torch.stack([first, *(table(items[:, place]) for place, table in enumerate(self.tables))], 1)
        count = all_of.shape[1]
        rows, columns = torch.tril_indices(count, count, -1, device=numbers.device)
        pairs = torch.bmm(all_of, all_of.transpose(1, 2))[:, rows, columns]
        result: Tensor = self.head(torch.cat([first, pairs], 1)).squeeze(1)
        return result


def recommender() -> Workload:
    """Embedding tables and their products (Naumov et al., 2019, arXiv:1906.00091)."""

    def batch(n: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.randn(n, 13), torch.randint(100_000, (n, 16, 4)), torch.randint(2, (n,)).float()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(*batch[:2]), batch[2])

    adagrad = lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01)  # noqa: E731
    return Workload(model=Recommender, batch=batch, loss=loss, optimizer=adagrad, batch_size=2048)


def graphs() -> Workload:
    """Attention over the edges of graphs (Veličković et al., 2017, arXiv:1710.10903); batches of torch_geometric."""
    from torch_geometric.data import Batch, Data  # type: ignore[import-not-found,unused-ignore]
    from torch_geometric.nn import GATConv, global_mean_pool  # type: ignore[import-not-found,unused-ignore]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(GATConv(inputs, 64, heads=4) for inputs in (32, 256, 256))
            self.head = nn.Linear(256, 10)

        def forward(self, batch: Any) -> Tensor:
            nodes = batch.x
            for layer in self.layers:
                nodes = F.elu(layer(nodes, batch.edge_index))
            result: Tensor = self.head(global_mean_pool(nodes, batch.batch, batch.num_graphs))
            return result

    def graph() -> Any:
        nodes = int(torch.randint(20, 40, ()))
        edges = torch.randint(nodes, (2, 4 * nodes))
        return Data(x=torch.randn(nodes, 32), edge_index=edges, y=torch.randint(10, (1,)))

    batch = lambda n: Batch.from_data_list([graph() for _ in range(n)])  # noqa: E731
    loss = lambda model, batch: F.cross_entropy(model(batch), batch.y)  # noqa: E731
    return Workload(model=Net, batch=batch, loss=loss, optimizer=adamw, batch_size=128)
