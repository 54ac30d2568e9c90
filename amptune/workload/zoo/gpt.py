"""GPT-2 small, a causal language model (Radford et al., 2019), 1024 tokens.

Language Models are Unsupervised Multitask Learners,
https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
"""

from __future__ import annotations

from functools import partial
from math import sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional

from amptune.workload.workload import Workload
from amptune.workload.zoo.layers import SelfAttention, named
from amptune.workload.zoo.recipes import adamw, in_memory

__all__ = ["gpt2"]

_VOCABULARY = 50257
_DROPOUT = 0.1


def gpt2(*, width: int = 768, layers: int = 12, tokens: int = 1024, batch_size: int = 8) -> Workload:
    text = partial(_text, tokens=tokens)
    return Workload(
        name="gpt2",
        model=partial(CausalLanguageModel, width, layers, tokens),
        batch=text,
        loader=partial(in_memory, batch=text),
        loss=_next_token_cross_entropy,
        optimizer=adamw,
        batch_size=batch_size,
    )


class CausalLanguageModel(nn.Module):
    """A GPT-2 that maps token numbers (batch, tokens) to the next tokens' logits (batch, tokens, vocabulary)."""

    def __init__(self, width: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.word = nn.Embedding(_VOCABULARY, width)
        self.position = nn.Embedding(tokens, width)
        self.dropout = nn.Dropout(_DROPOUT)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _VOCABULARY, bias=False)
        self.head.weight = self.word.weight
        _draw(self, layers)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.word(tokens) + self.position(places))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class Block(nn.Module):
    """Attention, then a feed-forward network; each has its input normalized and its output added to that input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, width // 64, dropout=_DROPOUT, causal=True)
        self.norm2 = nn.LayerNorm(width)
        self.feed_forward = named(
            expand=nn.Linear(width, 4 * width), gelu=nn.GELU("tanh"), output=nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(_DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        refined: Tensor = self.dropout(self.feed_forward(self.norm2(x)))
        return x + refined


def _draw(model: nn.Module, layers: int) -> None:
    """Draws normal weights; for layers that add to the residual stream, std is divided by sqrt(number of sums)."""
    for name, weights in model.named_parameters():
        if name.endswith("output.weight"):
            nn.init.normal_(weights, std=0.02 / sqrt(2 * layers))
        elif weights.ndim > 1:
            nn.init.normal_(weights, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(weights)


def _text(n: int, *, tokens: int) -> Tensor:
    """Returns token numbers (n, tokens + 1): all but the last are inputs, all but the first are targets."""
    return torch.randint(_VOCABULARY, (n, tokens + 1))


def _next_token_cross_entropy(model: nn.Module, text: Tensor) -> Tensor:
    return functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
