"""The modules of `unruly_models.py`, and the transformer blocks of `parity.py`."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

TOPICS, IMAGE_CLASSES = 20, 100
PATCH, MASKED_SHARE = 16, 0.4
EXPERTS, CHOSEN_EXPERTS = 8, 2
# An answer is complete when its weights add up to this.
ENOUGH = 0.99
ROWS_AT_ONCE = 1024


class MaskedImages(nn.Module):
    def __init__(self, *, side: int, width: int, layers: int) -> None:
        super().__init__()
        self.patches_a_side = side // PATCH
        self.embed = nn.Conv2d(3, width, PATCH, PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn(self.patches_a_side**2, width))
        self.unknown = nn.Parameter(torch.zeros(width))
        self.blocks = blocks(width, layers)
        self.restore = nn.Linear(width, 3 * PATCH**2)

    def forward(self, images: Tensor) -> Tensor:
        """Returns the mean error over the pixels of masked patches. The shape of `images` is (n, 3, side, side)."""
        masks = np.stack([self._mask() for _ in range(len(images))])
        masked = torch.from_numpy(masks).to(images.device)
        tokens = self.embed(images).flatten(2).transpose(1, 2)
        tokens = torch.where(masked.unsqueeze(-1), self.unknown.to(tokens.dtype), tokens)
        restored = self.restore(self.blocks(tokens + self.positions))
        wanted = functional.unfold(images, PATCH, stride=PATCH).transpose(1, 2)
        error: Tensor = (restored[masked].float() - wanted[masked].float()).abs().mean()
        return error

    def _mask(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Returns which patches are masked: blocks at random places, until they cover enough (arXiv:2106.08254)."""
        side = self.patches_a_side
        mask = np.zeros((side, side), dtype=bool)
        while mask.mean() < MASKED_SHARE:
            height, width = np.random.randint(1, side // 2 + 1, size=2)
            top, left = np.random.randint(side - height + 1), np.random.randint(side - width + 1)
            mask[top : top + height, left : left + width] = True
        return mask.reshape(-1)


class Ponderer(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = blocks(width, layers)
        self.halt = nn.Linear(width, 1)
        nn.init.constant_(self.halt.bias, -1.5)  # so that a text takes half of the layers, more or less
        self.head = nn.Linear(width, TOPICS)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Returns answers of shape (texts, topics), and a cost that grows with the layers that the texts took."""
        states = self.embed(tokens)
        texts = torch.arange(len(tokens), device=tokens.device)
        answers = torch.zeros(len(tokens), TOPICS, device=tokens.device)
        given = torch.zeros(len(tokens), device=tokens.device)
        layers = given
        for block in self.blocks:
            states = block(states)
            pooled = functional.layer_norm(states.mean(dim=1), states.shape[-1:])
            weights = torch.minimum(self.halt(pooled).squeeze(-1).float().sigmoid(), 1 - given[texts])
            answers = answers.index_add(0, texts, weights.unsqueeze(-1) * self.head(pooled).float())
            given = given.index_add(0, texts, weights)
            layers = layers.index_add(0, texts, 1 - given[texts])
            goes_on = given[texts] < ENOUGH
            if not goes_on.any():
                break
            states, texts = states[goes_on], texts[goes_on]
        return answers, layers.mean()


class Decoder(nn.Module):
    """A causal decoder that returns its loss. Logits may be held for some rows at a time only."""

    def __init__(self, vocabulary: int, width: int, layers: int, *, experts: bool = False, rows: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.blocks = blocks(width, layers, causal=True, experts=experts)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self._rows = rows

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        states, labels = self.norm(self.blocks(self.embed(tokens))).flatten(0, 1), following.flatten()
        if not self._rows:
            return functional.cross_entropy(self.head(states), labels)
        loss: Tensor = _RowsAtATime.apply(states, self.head.weight, labels)  # type: ignore[no-untyped-call]
        return loss


class _Block(nn.Module):
    """Attention, then feed-forward networks."""

    def __init__(self, width: int, *, causal: bool, experts: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.refine = _Experts(width) if experts else _feed_forward(width, 4 * width)
        self._heads, self._causal = max(1, width // 64), causal

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.mix(self.norm1(x)).unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=self._causal)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        refined: Tensor = self.refine(self.norm2(x))
        return x + refined


def blocks(width: int, layers: int, *, causal: bool = False, experts: bool = False) -> nn.Sequential:
    return nn.Sequential(*(_Block(width, causal=causal, experts=experts) for _ in range(layers)))


def _feed_forward(width: int, inner: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))


class _Experts(nn.Module):
    """Feed-forward networks; each works on the tokens that chose it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(_feed_forward(width, 2 * width) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).float().softmax(dim=-1).topk(CHOSEN_EXPERTS)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if len(rows) > 0:
                answer = expert(tokens[rows]) * weights[rows, place].unsqueeze(-1)
                mixed.index_add_(0, rows, answer.to(mixed.dtype))
        return mixed.view_as(x)


class _RowsAtATime(torch.autograd.Function):
    """Cross-entropy of a linear layer's logits."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        loss = torch.zeros((), device=states.device)
        of_states, of_weight = torch.empty_like(states), torch.zeros_like(weight)
        for first in range(0, len(states), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            log_chances = functional.log_softmax((states[rows] @ weight.t()).float(), dim=-1)
            loss += functional.nll_loss(log_chances, labels[rows], reduction="sum")
            of_logits = log_chances.exp()
            of_logits[torch.arange(len(of_logits), device=states.device), labels[rows]] -= 1
            of_logits = (of_logits / len(states)).to(states.dtype)
            of_states[rows] = (of_logits @ weight).to(of_states.dtype)
            of_weight += of_logits.t() @ states[rows]
        ctx.save_for_backward(of_states, of_weight)
        return loss / len(states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        of_states, of_weight = ctx.saved_tensors
        return gradient * of_states, gradient * of_weight, None


class Denoiser(nn.Module):
    """A U-Net with three resolutions, which is told how noisy its images are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(_Residual(a, b) for a, b in zip((width, *widths), widths, strict=False))
        self.middle = _Residual(widths[-1], widths[-1])
        self.up = nn.ModuleList(
            _Residual(2 * a, b) for a, b in zip(widths[::-1], (*widths[-2::-1], width), strict=True)
        )
        self.leave = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        x = self.enter(images) + self.time(times.unsqueeze(-1)).view(len(times), -1, 1, 1)
        passed = []
        for block in self.down:
            x = block(x)
            passed.append(x)
            x = functional.avg_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = functional.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat([x, passed.pop()], dim=1))
        restored: Tensor = self.leave(x)
        return restored


def classifier(width: int, blocks: int) -> nn.Sequential:
    widths = [width * 2**stage for stage in range(4)]
    stages = [
        _Residual(before if first else now, now, stride=2 if first else 1, by_batch=True)
        for before, now in pairwise([width, *widths])
        for first in [True] + [False] * (blocks - 1)
    ]
    enter = (nn.Conv2d(3, width, 3, 2, padding=1), nn.BatchNorm2d(width), nn.SiLU())
    leave = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], IMAGE_CLASSES))
    return nn.Sequential(*enter, *stages, *leave)


class _Residual(nn.Module):
    """Two convolutions, normalized by groups or batches of images, beside a plain way."""

    def __init__(self, channels: int, width: int, *, stride: int = 1, by_batch: bool = False) -> None:
        super().__init__()
        norms = [nn.BatchNorm2d(n) if by_batch else nn.GroupNorm(8, n) for n in (width, width)]
        self.refine = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1),
            norms[0],
            nn.SiLU(),
            nn.Conv2d(width, width, 3, padding=1),
            norms[1],
        )
        self.plain = nn.Conv2d(channels, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(self.refine(x) + self.plain(x))
