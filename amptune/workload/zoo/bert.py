"""BERT-base as a masked language model (Devlin et al., 2018, arXiv:1810.04805), 512 tokens."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from amptune.workload.workload import Workload
from amptune.workload.zoo.layers import named
from amptune.workload.zoo.recipes import adamw, in_memory

__all__ = ["bert_base"]

_VOCABULARY = 30522
_MASK = 103  # the [MASK] token of the published vocabulary
_MASKED_SHARE = 0.15
_UNMASKED = -100  # the target that cross_entropy ignores by default
_DROPOUT = 0.1
_HEAD = 64  # the width of an attention head
_EPSILON = 1e-12


def bert_base(*, width: int = 768, layers: int = 12, tokens: int = 512, batch_size: int = 16) -> Workload:
    text = partial(_masked_text, tokens=tokens)
    return Workload(
        name="bert_base",
        model=partial(MaskedLanguageModel, width, layers, tokens),
        batch=text,
        loader=partial(in_memory, batch=text),
        loss=_masked_cross_entropy,
        optimizer=adamw,
        batch_size=batch_size,
    )


class MaskedLanguageModel(nn.Module):
    """A BERT that maps token numbers (batch, tokens) to logits (batch, tokens, vocabulary)."""

    def __init__(self, width: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.embeddings = Embeddings(width, tokens)
        self.encoder = nn.Sequential(*(EncoderLayer(width) for _ in range(layers)))
        self.transform = named(dense=nn.Linear(width, width), gelu=nn.GELU(), norm=nn.LayerNorm(width, eps=_EPSILON))
        self.decoder = nn.Linear(width, _VOCABULARY)
        self.apply(_draw)
        self.decoder.weight = self.embeddings.word.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.transform(self.encoder(self.embeddings(tokens))))
        return logits


class Embeddings(nn.Module):
    """The sum of word, position and segment embeddings; all tokens are in the first segment here."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.word = nn.Embedding(_VOCABULARY, width)
        self.position = nn.Embedding(tokens, width)
        self.segment = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=_EPSILON)
        self.dropout = nn.Dropout(_DROPOUT)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        total = self.word(tokens) + self.position(places) + self.segment(torch.zeros_like(tokens))
        embedded: Tensor = self.dropout(self.norm(total))
        return embedded


class EncoderLayer(nn.Module):
    """Attention, then a feed-forward network, each normalized after its residual sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = SelfAttention(width)
        self.norm1 = nn.LayerNorm(width, eps=_EPSILON)
        self.feed_forward = named(
            expand=nn.Linear(width, 4 * width), gelu=nn.GELU(), reduce=nn.Linear(4 * width, width)
        )
        self.norm2 = nn.LayerNorm(width, eps=_EPSILON)
        self.dropout = nn.Dropout(_DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x)))
        encoded: Tensor = self.norm2(x + self.dropout(self.feed_forward(x)))
        return encoded


class SelfAttention(nn.Module):
    """Attention (Vaswani et al., 2017, arXiv:1706.03762) with one projection for query, key and value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // _HEAD
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        joint: Tensor = self.query_key_value(x)
        query, key, value = (
            joint.view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind()
        )
        dropout = _DROPOUT if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


def _draw(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def _masked_text(n: int, *, tokens: int) -> tuple[Tensor, Tensor]:
    """Returns token numbers with 15 % masked, and the original tokens there; both of shape (n, tokens)."""
    text = torch.randint(_VOCABULARY, (n, tokens))
    masked = torch.rand(n, tokens) < _MASKED_SHARE
    return text.masked_fill(masked, _MASK), text.masked_fill(~masked, _UNMASKED)


def _masked_cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    text, hidden = batch
    return functional.cross_entropy(model(text).flatten(0, 1), hidden.flatten())
