"""Twelve models of twelve kinds that amptune was not developed with, as targets; `unseen.py` measures them.

    amptune tune reports/unseen_models.py:state_space --budget 120s

They were named before the search that they judge stood, and nothing was run on a GPU before. Weights are random, built
from configurations; data is synthetic; batches are as one would train them on an H100. Each model's library is imported
when the model is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from foreign_models import text, timm_model  # beside this program
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name all of PyTorch's users give it

from amptune.workload.workload import Workload
from amptune.workload.zoo.recipes import adamw, classification, in_memory, sgd

__all__ = ["MODELS", "WITH_GRID"]

WORDS, LETTERS, CLASSES = 32_000, 64, 1000


def _of_transformers(kind: str, task: str, **sizes: Any) -> nn.Module:
    import transformers

    model: nn.Module = getattr(transformers, kind + task)(getattr(transformers, f"{kind}Config")(**sizes))
    return model


def _held(batch: Callable[[int], Any], batch_size: int) -> list[Any]:
    """Returns batches that were drawn once, for those whose samples are no rows of a tensor."""
    return [batch(batch_size) for _ in range(8)] * 8


# --- text and sound ---------------------------------------------------------------------------------------------------


def experts() -> Workload:
    """A decoder with 16 experts, of which each token takes two (Muennighoff et al., 2024, arXiv:2409.02060)."""

    def batch(n: int) -> dict[str, Tensor]:
        words = torch.randint(WORDS, (n, 512))
        return {"input_ids": words, "labels": words}

    sizes = {"vocab_size": WORDS, "hidden_size": 768, "intermediate_size": 768, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 12, "num_experts": 16, "num_experts_per_tok": 2}
    model = partial(_of_transformers, "Olmoe", "ForCausalLM", **sizes, **heads, eos_token_id=2, use_cache=False)
    return text("experts", model, batch, batch_size=8)


def speech_to_text() -> Workload:
    """Ten seconds of sound in, 48 tokens out (Jeffries et al., 2024, arXiv:2410.15608); rotary positions."""

    def batch(n: int) -> dict[str, Tensor]:
        return {"input_values": torch.randn(n, 160_000), "labels": torch.randint(3, 32_000, (n, 48))}

    layers = {"encoder_num_hidden_layers": 8, "decoder_num_hidden_layers": 8, "pad_token_id": 0}
    model = partial(
        _of_transformers,
        "Moonshine",
        "ForConditionalGeneration",
        use_cache=False,
        hidden_size=416,
        intermediate_size=1664,
        **layers,
    )
    return text("speech_to_text", model, batch, batch_size=16)


def relative_attention() -> Workload:
    """Attention to the distance between tokens, in two streams of products (Yang et al., 2019, arXiv:1906.08237)."""

    def batch(n: int) -> dict[str, Tensor]:
        return {"input_ids": torch.randint(WORDS, (n, 384)), "labels": torch.randint(4, (n,))}

    sizes = {"vocab_size": WORDS, "d_model": 768, "d_inner": 3072, "n_layer": 8, "n_head": 12, "num_labels": 4}
    return text(
        "relative_attention",
        partial(_of_transformers, "XLNet", "ForSequenceClassification", **sizes),
        batch,
        batch_size=8,
    )


class Tagger(nn.Module):
    """Maps words (n, longest) with their lengths to logits (n, longest, 64), by GRU layers in both directions."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, width), nn.Linear(2 * width, LETTERS)
        self.gru = nn.GRU(width, width, 3, dropout=0.2, batch_first=True, bidirectional=True)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        embedded = self.embedding(words)
        packed = nn.utils.rnn.pack_padded_sequence(embedded, lengths.cpu(), batch_first=True, enforce_sorted=False)
        read, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=words.shape[1])
        tags: Tensor = self.head(read)
        return tags


def recurrent() -> Workload:
    """Tags for the words of sentences of changing length, by packed sequences (Cho et al., 2014, arXiv:1406.1078)."""

    def batch(n: int) -> tuple[Tensor, Tensor, Tensor]:
        lengths = torch.randint(40, 201, (n,))
        known = torch.arange(200) < lengths[:, None]
        tags = torch.randint(LETTERS, (n, 200)).where(known, torch.tensor(-100))
        return torch.randint(WORDS, (n, 200)) * known, lengths, tags

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        words, lengths, tags = batch
        return F.cross_entropy(model(words, lengths).flatten(0, 1), tags.flatten())

    loader = partial(in_memory, batch=batch)
    return Workload(
        name="recurrent", model=Tagger, batch=batch, loader=loader, loss=loss, optimizer=adamw, batch_size=64
    )


class Diagonal(nn.Module):
    """A diagonal state space over (n, time, width), as one long convolution by Fourier transforms."""

    def __init__(self, width: int, states: int = 32) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.skip, self.log_step = nn.Parameter(torch.randn(width)), nn.Parameter(torch.rand(width) * 4.6 - 6.9)
        self.log_decay = nn.Parameter(torch.full((width, states), 0.5).log())
        self.turn = nn.Parameter(torch.pi * torch.arange(states).repeat(width, 1))
        self.read = nn.Parameter(torch.randn(width, states, 2) * 0.5)

    def forward(self, x: Tensor) -> Tensor:
        time = x.shape[1]
        known = self.norm(x).transpose(1, 2)
        step = self.log_step.exp()[:, None]
        poles = torch.complex(-self.log_decay.exp(), self.turn) * step
        powers = torch.exp(poles[..., None] * torch.arange(time, device=x.device))
        kernel = 2 * step * torch.einsum("ws,wst->wt", torch.view_as_complex(self.read), powers).real
        spectrum = torch.fft.rfft(known.float(), 2 * time) * torch.fft.rfft(kernel, 2 * time)
        heard = torch.fft.irfft(spectrum, 2 * time)[..., :time] + known * self.skip[:, None]
        result: Tensor = x + F.glu(self.mix(F.gelu(heard).transpose(1, 2)))
        return result


class LongSequence(nn.Module):
    """Maps sound (n, time) to logits of 35 words."""

    def __init__(self, width: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(1, width), nn.Linear(width, 35)
        self.layers = nn.Sequential(*(Diagonal(width) for _ in range(layers)))

    def forward(self, sound: Tensor) -> Tensor:
        words: Tensor = self.head(self.layers(self.into(sound[..., None])).mean(1))
        return words


def state_space() -> Workload:
    """Words told from 4,096 samples by diagonal state spaces (Gu et al., 2022, arXiv:2206.11893)."""
    batch = lambda n: (torch.randn(n, 4096), torch.randint(35, (n,)))  # noqa: E731
    loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    loader = partial(in_memory, batch=batch)
    return Workload(
        name="state_space", model=LongSequence, batch=batch, loader=loader, loss=loss, optimizer=adamw, batch_size=16
    )


# --- pictures and video -----------------------------------------------------------------------------------------------


def video() -> Workload:
    """Attention that is pooled over space and time (Li et al., 2021, arXiv:2112.01526); 16 frames of 224²."""

    def model() -> nn.Module:
        from torchvision.models import video as models  # type: ignore[import-not-found,unused-ignore]

        built: nn.Module = models.mvit_v2_s(weights=None)
        return built

    batch = lambda n: (torch.randn(n, 3, 16, 224, 224), torch.randint(400, (n,)))  # noqa: E731
    loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    loader = partial(in_memory, batch=batch)
    return Workload(name="video", model=model, batch=batch, loader=loader, loss=loss, optimizer=adamw, batch_size=4)


def detector() -> Workload:
    """Lists of pictures and of boxes, without anchors (Tian et al., 2019, arXiv:1904.01355)."""

    def model() -> nn.Module:
        from torchvision.models import detection  # type: ignore[import-not-found,unused-ignore]

        sizes = {"min_size": 480, "max_size": 640}
        built: nn.Module = detection.fcos_resnet50_fpn(weights=None, weights_backbone=None, num_classes=21, **sizes)
        return built

    def picture() -> tuple[Tensor, dict[str, Tensor]]:
        count = int(torch.randint(1, 12, ()))
        corner = torch.rand(count, 2) * 300
        boxes = torch.cat([corner, corner + 20 + torch.rand(count, 2) * 150], 1)
        return torch.rand(3, 480, 640), {"boxes": boxes, "labels": torch.randint(1, 21, (count,))}

    def batch(n: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
        pictures = [picture() for _ in range(n)]
        return [one for one, _ in pictures], [boxes for _, boxes in pictures]

    def loss(model: nn.Module, batch: tuple[list[Tensor], list[dict[str, Tensor]]]) -> Tensor:
        losses: dict[str, Tensor] = model(*batch)
        return torch.stack(list(losses.values())).sum()

    loader = partial(_held, batch)
    return Workload(name="detector", model=model, batch=batch, loader=loader, loss=loss, optimizer=sgd, batch_size=8)


def many_resolutions() -> Workload:
    """Branches of four resolutions side by side (Wang et al., 2019, arXiv:1908.07919), from timm."""
    model = partial(timm_model, "hrnet_w18_small")
    return classification(name="many_resolutions", model=model, classes=CLASSES, side=224, batch_size=96)


def visformer() -> Workload:
    """Grouped convolutions, then attention with BatchNorm (Chen et al., 2021, arXiv:2104.12533), from timm."""
    model = partial(timm_model, "visformer_tiny")
    return classification(name="visformer", model=model, classes=CLASSES, side=224, batch_size=128)


class Crossed(nn.Module):
    """A convolutional block that knows the time and reads a text, over (n, width, height, width of the picture)."""

    def __init__(self, inputs: int, outputs: int, told: int = 768) -> None:
        super().__init__()
        self.norms = nn.ModuleList((nn.GroupNorm(32, inputs), nn.GroupNorm(32, outputs), nn.LayerNorm(outputs)))
        self.convs = nn.ModuleList(nn.Conv2d(i, outputs, 3, padding=1) for i in (inputs, outputs))
        self.time, self.skip = nn.Linear(told, outputs), nn.Conv2d(inputs, outputs, 1)
        self.read = nn.MultiheadAttention(outputs, outputs // 64, kdim=told, vdim=told, batch_first=True)

    def forward(self, x: Tensor, time: Tensor, words: Tensor) -> Tensor:
        hidden = self.convs[0](F.silu(self.norms[0](x))) + self.time(F.silu(time))[:, :, None, None]
        x = self.skip(x) + self.convs[1](F.silu(self.norms[1](hidden)))
        places = x.flatten(2).transpose(1, 2)
        read = self.read(self.norms[2](places), words, words, need_weights=False)[0]
        picture: Tensor = (places + read).transpose(1, 2).view_as(x)
        return picture


class TextToPicture(nn.Module):
    """Maps noisy latents (n, 4, 32, 32), times (n,) and texts (n, 77, 768) to the noise."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        w = width
        self.into, self.out, self.time = nn.Conv2d(4, w, 3, padding=1), nn.Conv2d(w, 4, 3, padding=1), nn.Linear(1, 768)
        self.down = nn.ModuleList(Crossed(i, o) for i, o in ((w, w), (w, 2 * w), (2 * w, 4 * w)))
        self.middle = Crossed(4 * w, 4 * w)
        self.up = nn.ModuleList(Crossed(i, o) for i, o in ((8 * w, 2 * w), (4 * w, w), (2 * w, w)))

    def forward(self, x: Tensor, time: Tensor, words: Tensor) -> Tensor:
        told, hidden, skips = self.time(time[:, None]), self.into(x), []
        for block in self.down:
            skips.append(hidden := block(hidden, told, words))
            hidden = F.avg_pool2d(hidden, 2)
        hidden = self.middle(hidden, told, words)
        for block in self.up:
            hidden = block(torch.cat([F.interpolate(hidden, scale_factor=2), skips.pop()], 1), told, words)
        noise: Tensor = self.out(hidden)
        return noise


def text_to_picture() -> Workload:
    """A latent diffusion that reads a text by cross-attention (Rombach et al., 2021, arXiv:2112.10752)."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        latents, words = batch
        time, noise = torch.rand(len(latents), device=latents.device), torch.randn_like(latents)
        share = time[:, None, None, None]
        return F.mse_loss(model((1 - share).sqrt() * latents + share.sqrt() * noise, time, words).float(), noise)

    batch = lambda n: (torch.randn(n, 4, 32, 32), torch.randn(n, 77, 768))  # noqa: E731
    loader = partial(in_memory, batch=batch)
    return Workload(
        name="text_to_picture", model=TextToPicture, batch=batch, loader=loader, loss=loss, optimizer=adamw,
        batch_size=32,
    )  # fmt: skip


# --- tables and graphs ------------------------------------------------------------------------------------------------


class Columns(nn.Module):
    """Maps a table's rows (n, columns) to one number each, by attention among columns."""

    def __init__(self, columns: int = 96, width: int = 192) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(columns, width)), nn.Parameter(torch.zeros(columns, width))
        self.first = nn.Parameter(torch.randn(1, 1, width))
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(width, 1)

    def forward(self, rows: Tensor) -> Tensor:
        tokens = torch.cat([self.first.expand(len(rows), -1, -1), rows[..., None] * self.weight + self.bias], 1)
        found: Tensor = self.head(self.layers(tokens)[:, 0]).squeeze(1)
        return found


def table() -> Workload:
    """Rows of 96 numbers (Gorishniy et al., 2021, arXiv:2106.11959)."""
    batch = lambda n: (torch.randn(n, 96), torch.randn(n))  # noqa: E731
    loss = lambda model, batch: F.mse_loss(model(batch[0]).float(), batch[1])  # noqa: E731
    loader = partial(in_memory, batch=batch)
    return Workload(
        name="table", model=Columns, batch=batch, loader=loader, loss=loss, optimizer=adamw, batch_size=1024
    )


def molecules() -> Workload:
    """Sums over the bonds of graphs of changing size (Hu et al., 2019, arXiv:1905.12265), from torch_geometric."""

    def model() -> nn.Module:
        from torch_geometric import nn as layers  # type: ignore[import-not-found,unused-ignore]

        class Net(nn.Module):
            def __init__(self, width: int = 300) -> None:
                super().__init__()
                self.atoms, self.head = nn.Embedding(120, width), nn.Linear(width, 1)
                self.layers = nn.ModuleList(layers.GINEConv(_mlp(width), edge_dim=16) for _ in range(5))
                self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(5))

            def forward(self, batch: Any) -> Tensor:
                atoms = self.atoms(batch.x)
                for layer, norm in zip(self.layers, self.norms, strict=True):
                    atoms = atoms + F.relu(norm(layer(atoms, batch.edge_index, batch.edge_attr)))
                energy: Tensor = self.head(layers.global_add_pool(atoms, batch.batch, batch.num_graphs)).squeeze(1)
                return energy

        return Net()

    def batch(n: int) -> Any:
        from torch_geometric.data import Batch, Data  # type: ignore[import-not-found,unused-ignore]

        def molecule() -> Any:
            atoms = int(torch.randint(8, 60, ()))
            bonds = torch.randint(atoms, (2, 2 * atoms))
            return Data(
                x=torch.randint(120, (atoms,)), edge_index=torch.cat([bonds, bonds.flip(0)], 1),
                edge_attr=torch.randn(4 * atoms, 16), y=torch.randn(1),
            )  # fmt: skip

        return Batch.from_data_list([molecule() for _ in range(n)])

    loss = lambda model, batch: F.l1_loss(model(batch).float(), batch.y)  # noqa: E731
    loader = partial(_held, batch)
    return Workload(
        name="molecules", model=model, batch=batch, loader=loader, loss=loss, optimizer=adamw, batch_size=256
    )


def _mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width), nn.ReLU(), nn.Linear(2 * width, width))


# By kind, those first whose steps take longest; with them, the four on which a whole grid of settings is measured.
MODELS: Mapping[str, str] = {
    "video": "video",
    "experts": "a mixture of experts",
    "detector": "detection with lists of boxes",
    "relative_attention": "relative attention",
    "text_to_picture": "diffusion with cross-attention",
    "state_space": "a state space",
    "speech_to_text": "speech to text",
    "table": "tabular",
    "many_resolutions": "a small vision network",
    "visformer": "another small vision network",
    "molecules": "graphs of changing size",
    "recurrent": "recurrent",
}
WITH_GRID = ("relative_attention", "text_to_picture", "speech_to_text", "visformer")
