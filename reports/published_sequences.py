"""The models of text and recommendation in the published tables, as targets.

    amptune predict reports/published_sequences.py:gnmt --gpu all

Attention is written out, as it was then. What is left out of a model or simplified is said at it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from published_models import as_workload
from torch import Tensor, nn
from torch.nn import functional

from amptune.workload.workload import Workload
from amptune.workload.zoo.layers import named


def _tokens(vocabulary: int, *lengths: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda n: tuple(torch.randint(vocabulary, (n, length)) for length in lengths)


class Attention(nn.Module):
    """Multi-head attention with scores written out; `other` gives keys and values if it is not self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.reshape(*y.shape[:2], self.heads, -1).transpose(1, 2)

        source = x if other is None else other
        query, key, value = split(self.query(x)), split(self.key(source)), split(self.value(source))
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])
        shares = functional.dropout(functional.softmax(scores + 0.0, -1), 0.1)
        output: Tensor = self.output((shares @ value).transpose(1, 2).flatten(2))
        return output


class Layer(nn.Module):
    """A transformer's layer, normalized after its sums; with `crossed` it attends to another sequence too."""

    def __init__(self, width: int, heads: int, inner: int, *, crossed: bool = False) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.crossed = Attention(width, heads) if crossed else None
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3 if crossed else 2))
        self.feed = named(expand=nn.Linear(width, inner), act=nn.GELU(), reduce=nn.Linear(inner, width))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        x = self.norms[0](x + functional.dropout(self.attention(x), 0.1))
        if self.crossed is not None:
            x = self.norms[1](x + functional.dropout(self.crossed(x, other), 0.1))
        normed: Tensor = self.norms[-1](x + functional.dropout(self.feed(x), 0.1))
        return normed


class Encoder(nn.Module):
    """BERT with a head of some outputs for each token."""

    def __init__(self, width: int, layers: int, outputs: int, vocabulary: int = 30522) -> None:
        super().__init__()
        self.word = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(Layer(width, width // 64, 4 * width) for _ in range(layers)))
        self.head = nn.Linear(width, outputs)

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.head(self.layers(functional.dropout(self.norm(self.word(tokens)), 0.1)))
        return output


def bert_base_squad() -> Workload:
    """Questions and answers, 384 tokens."""
    return as_workload("bert_base_squad", partial(Encoder, 768, 12, 2), _tokens(30522, 384), batch_size=24)


def bert_large_squad() -> Workload:
    return as_workload("bert_large_squad", partial(Encoder, 1024, 24, 2), _tokens(30522, 384), batch_size=8)


def bert_large_128() -> Workload:
    """Pre-training; the vocabulary's logits of a sixth of the tokens are left out."""
    return as_workload("bert_large_128", partial(Encoder, 1024, 24, 2), _tokens(30522, 128), batch_size=128)


def bert_large_512() -> Workload:
    return as_workload("bert_large_512", partial(Encoder, 1024, 24, 2), _tokens(30522, 512), batch_size=16)


class Translator(nn.Module):
    """Transformer "big" (Vaswani et al., 2017), or BART's shape: encoder and decoder."""

    def __init__(self, width: int, layers: int, heads: int, inner: int, vocabulary: int) -> None:
        super().__init__()
        self.word = nn.Embedding(vocabulary, width)
        self.encoder = nn.Sequential(*(Layer(width, heads, inner) for _ in range(layers)))
        self.decoder = nn.ModuleList(Layer(width, heads, inner, crossed=True) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        seen, x = self.encoder(self.word(source)), self.word(target)
        for layer in self.decoder:
            x = layer(x, seen)
        return functional.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


def translation_transformer() -> Workload:
    """Batches are counted in tokens there: 32 to a sentence here."""
    model = partial(Translator, 1024, 6, 16, 4096, 33708)
    return as_workload("translation_transformer", model, _tokens(33708, 32, 32), batch_size=320)


def bart_128() -> Workload:
    model = partial(Translator, 1024, 12, 16, 4096, 50265)
    return as_workload("bart_128", model, _tokens(50265, 128, 128), batch_size=64)


class Gnmt(nn.Module):
    """GNMT (Wu et al., 2016, arXiv:1609.08144): LSTM layers of 1024; attention over 30 source words."""

    def __init__(self, width: int = 1024, vocabulary: int = 32320) -> None:
        super().__init__()
        self.word = nn.Embedding(vocabulary, width)
        self.first = nn.LSTM(width, width, bidirectional=True)
        self.encoder = nn.ModuleList(nn.LSTM(2 * width if i == 0 else width, width) for i in range(3))
        self.decoder = nn.ModuleList(nn.LSTM(width if i == 0 else 2 * width, width) for i in range(4))
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x = functional.dropout(self.first(self.word(source.t()))[0], 0.2)
        for i, layer in enumerate(self.encoder):
            new = functional.dropout(layer(x)[0], 0.2)
            x = new if i == 0 else x + new
        y = self.decoder[0](self.word(target.t()))[0]
        scores = self.score(torch.tanh(self.query(y).unsqueeze(1) + self.key(x).unsqueeze(0)))  # (source, target, …)
        context = torch.einsum("stb,sbw->tbw", functional.softmax(scores.squeeze(-1), 0), x)
        for layer in list(self.decoder)[1:]:
            y = functional.dropout(layer(torch.cat([y, context], 2))[0], 0.2)
        return functional.cross_entropy(self.head(y).flatten(0, 1), target.t().flatten())


def gnmt() -> Workload:
    return as_workload("gnmt", Gnmt, _tokens(32320, 30, 30), batch_size=128)


class XlLayer(nn.Module):
    """A layer of Transformer-XL (Dai et al., 2019, arXiv:1901.02860): relative positions and a memory."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.joint = nn.Linear(width, 3 * width, bias=False)
        self.relative = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed = named(expand=nn.Linear(width, inner), act=nn.ReLU(), reduce=nn.Linear(inner, width))

    def forward(self, x: Tensor, memory: Tensor, positions: Tensor) -> Tensor:
        query, key, value = self.joint(torch.cat([memory, x], 1)).chunk(3, -1)
        query = query[:, -x.shape[1] :]
        query, key, value = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in (query, key, value))
        relative = self.relative(positions).unflatten(1, (self.heads, -1)).permute(1, 2, 0)
        scores = query @ key.transpose(2, 3) + torch.roll(query @ relative, 1, -1)
        shares = functional.softmax((scores * 0.125).masked_fill(scores > 1e4, -1e4), -1)
        x = self.norm1(x + functional.dropout(self.output((shares @ value).transpose(1, 2).flatten(2)), 0.1))
        normed: Tensor = self.norm2(x + functional.dropout(self.feed(x), 0.1))
        return normed


class Xl(nn.Module):
    """Its adaptive softmax is its first 20,000 words here."""

    def __init__(self, width: int, layers: int, heads: int, inner: int) -> None:
        super().__init__()
        self.word = nn.Embedding(20000, width)
        self.layers = nn.ModuleList(XlLayer(width, heads, inner) for _ in range(layers))
        self.head = nn.Linear(width, 20000)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.word(tokens)
        memory, positions = x.detach(), x.new_ones(2 * x.shape[1], x.shape[2])
        for layer in self.layers:
            x = layer(x, memory, positions)
        return functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def transformerxlbase() -> Workload:
    return as_workload("transformerxlbase", partial(Xl, 512, 16, 8, 2048), _tokens(20000, 192), batch_size=32)


def transformerxllarge() -> Workload:
    return as_workload("transformerxllarge", partial(Xl, 1024, 18, 16, 4096), _tokens(20000, 256), batch_size=8)


class Ncf(nn.Module):
    """Neural collaborative filtering (He et al., 2017, arXiv:1708.05031) on MovieLens 20M."""

    def __init__(self, users: int = 138493, items: int = 26744) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, 64 + 128), nn.Embedding(items, 64 + 128)
        self.mlp = nn.Sequential(
            nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 128), nn.ReLU(), nn.Dropout(0.5),
            nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.5),
        )  # fmt: skip
        self.head = nn.Linear(128, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        user, item = self.users(users.squeeze(1)), self.items(items.squeeze(1))
        product = user[:, :64] * item[:, :64]
        output: Tensor = self.head(torch.cat([product, self.mlp(torch.cat([user[:, 64:], item[:, 64:]], 1))], 1))
        return output


def ncf() -> Workload:
    return as_workload("ncf", Ncf, _tokens(26744, 1, 1), batch_size=1_000_000)
