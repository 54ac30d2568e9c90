"""Small models with a planted numerical fault that half precision brings out, and that FP32 never shows.

Each fault is made of operations that autocast leaves in half on the CPU and on CUDA alike (ATen/autocast_mode.h):
products, element-wise arithmetic, `mean`, `exp2`, `sigmoid`, `sqrt`. `exp`, `log`, `sum`, `softmax` or `layer_norm`
run in FP32 on CUDA alone, so nothing goes wrong in them that has not gone wrong before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name all of PyTorch's users give it

from amptune.workload.workload import Workload

__all__ = ["FAULTS", "Fault"]

Half = Literal["bf16", "fp16"]
FP16: tuple[Half, ...] = ("fp16",)
BF16: tuple[Half, ...] = ("bf16",)
BOTH: tuple[Half, ...] = ("bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A workload whose modules `culprits` break training under plain autocast in the dtypes `breaks`.

    In FP32, and with exactly the culprits kept in FP32, it trains well.
    """

    name: str
    workload: Workload
    culprits: tuple[str, ...]
    breaks: tuple[Half, ...]


def in_autocast_dtype(x: Tensor) -> Tensor:
    """What user code does with `.half()` or `.to(other.dtype)`: inside autocast the result is half."""
    device_type = x.device.type
    return x.to(torch.get_autocast_dtype(device_type)) if torch.is_autocast_enabled(device_type) else x


# --- the healthy surroundings ------------------------------------------------------------------------------------

DIM = 32
FEATURES = 24
CLASSES = 6
TOKENS = 12
VOCABULARY = 40


class Stack(nn.Module):
    """A stem, blocks that take (x, *context) and return what x was, and a head; the loss is a part of the model."""

    def __init__(self, *, stem: nn.Module, blocks: Sequence[nn.Module], head: nn.Module, criterion: nn.Module) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = nn.ModuleList(blocks)
        self.head = head
        self.criterion = criterion

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, *context)
        logits: Tensor = self.head(x)
        return logits


class Residual(nn.Module):
    def __init__(self, branch: nn.Module, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM) if norm is None else norm
        self.branch = branch

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        out: Tensor = x + self.branch(self.norm(x), *context)
        return out


class FeedForward(nn.Module):
    def __init__(self, activation: Callable[[], nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM)
        self.act = activation()
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.up(x)))
        return out


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, bias=False)
        self.norm = nn.BatchNorm1d(DIM)
        self.act = nn.ReLU()

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        out: Tensor = self.act(self.norm(self.linear(x)))
        return out


class Convolved(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.act = nn.ReLU()

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        out: Tensor = x + self.act(self.norm(self.conv(x)))
        return out


class Softmax(nn.Module):
    """Over the tokens that are kept: `keep` is (batch, tokens), 0 for padding."""

    def forward(self, scores: Tensor, keep: Tensor) -> Tensor:
        return scores.masked_fill(keep[:, None, None, :] == 0, -math.inf).softmax(-1)


class Attention(nn.Module):
    heads = 4

    def __init__(self, softmax: nn.Module | None = None) -> None:
        super().__init__()
        self.query = nn.Linear(DIM, DIM, bias=False)
        self.key = nn.Linear(DIM, DIM, bias=False)
        self.value = nn.Linear(DIM, DIM)
        self.softmax = Softmax() if softmax is None else softmax
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        out: Tensor = self.out((self.softmax(self.scores(query, key), keep) @ value).transpose(1, 2).flatten(2))
        return out

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-1, -2))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, DIM)
        self.places = nn.Embedding(TOKENS, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.words(ids) + self.places.weight
        return out


class MeanOfTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def head_of(outputs: int, pool: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(*([] if pool is None else [pool]), nn.LayerNorm(DIM), nn.Linear(DIM, outputs))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=2e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: Any, batch: tuple[Tensor, ...]) -> Tensor:
    """The last tensor of a batch is the target; what stands between it and the first is context."""
    *inputs, target = batch
    loss: Tensor = model.criterion(model(*inputs), target)
    return loss


def fixed(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _curve(x: Tensor, outputs: int) -> Tensor:
    """The teacher: a smooth function of the features, of about unit size."""
    hidden = torch.tanh(x @ fixed(x.shape[-1], 8) / 2)
    return hidden @ fixed(8, outputs, seed=1) / 2


def of_classes(n: int) -> tuple[Tensor, ...]:
    x = torch.randn(n, FEATURES)
    return x, _curve(x, CLASSES).argmax(-1)


def of_values(n: int, outputs: int = 4) -> tuple[Tensor, ...]:
    x = torch.randn(n, FEATURES)
    return x, _curve(x, outputs)


def of_sentences(n: int) -> tuple[Tensor, ...]:
    ids = torch.randint(1, VOCABULARY, (n, TOKENS))
    keep = (torch.arange(TOKENS) < torch.randint(TOKENS // 2, TOKENS, (n, 1))).float()
    meaning = (fixed(VOCABULARY, CLASSES)[ids] * keep[..., None]).mean(1)
    return ids * keep.long(), keep, meaning.argmax(-1)


def of_pictures(n: int) -> tuple[Tensor, ...]:
    tint = torch.randn(n, 3)
    x = torch.randn(n, 3, 10, 10) + 2 * tint[:, :, None, None]
    return x, (tint @ fixed(3, CLASSES)).argmax(-1)


def tabular(
    *blocks: nn.Module, outputs: int = CLASSES, head: nn.Module | None = None, criterion: nn.Module | None = None
) -> nn.Module:
    return Stack(
        stem=nn.Linear(FEATURES, DIM),
        blocks=blocks,
        head=head_of(outputs) if head is None else head,
        criterion=nn.CrossEntropyLoss() if criterion is None else criterion,
    )


def language(*blocks: nn.Module, head: nn.Module | None = None) -> nn.Module:
    head = head_of(CLASSES, MeanOfTokens()) if head is None else head
    return Stack(stem=Tokens(), blocks=blocks, head=head, criterion=nn.CrossEntropyLoss())


# --- the faults --------------------------------------------------------------------------------------------------


class LateScaledAttention(Attention):
    """Scales its scores after the product of query and key, which passes 65504."""

    gain = 512.0

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        products = (query * self.gain) @ (key * self.gain).transpose(-1, -2)
        return products / (self.gain**2 * math.sqrt(query.shape[-1]))


class GatedFeedForward(nn.Module):
    """As T5's, whose hidden activations pass 65504."""

    gain = 1024.0

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 2 * DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        gate, up = (in_autocast_dtype(linear(x)) * self.gain for linear in (self.gate, self.up))
        hidden = F.gelu(gate) * up
        out: Tensor = self.down(hidden) / self.gain**2
        return out


class SampledSoftmaxLoss(nn.Module):
    """Corrects for candidates drawn once in 200,000, and exponentiates before it takes a logarithm."""

    correction = math.log(200_000)

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        energy = (in_autocast_dtype(logits) + self.correction) / math.log(2)
        total = torch.exp2(energy) @ energy.new_ones(energy.shape[-1])
        return (torch.log2(total) - energy.gather(-1, target[:, None])[:, 0]).mean() * math.log(2)


class ExpPooling(nn.Module):
    """Weights over the tokens, by a softmax that subtracts no maximum."""

    prior = 14.0

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(DIM, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        powers = torch.exp2(in_autocast_dtype(self.score(x) + self.prior) / math.log(2))[..., 0]
        weights = powers / (powers @ powers.new_ones(TOKENS, 1))
        pooled: Tensor = (weights[:, None, :] @ x)[:, 0]
        return pooled


class HandwrittenRmsNorm(nn.Module):
    """In raw counts, whose squares overflow: everything divided by infinity is zero."""

    counts = 512.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        counts = in_autocast_dtype(x) * self.counts
        mean_square = (counts * counts).mean(-1, keepdim=True)
        return counts / torch.sqrt(mean_square + 1e-6) * self.weight.to(counts.dtype)


class Pace(nn.Module):
    """Time per distance. The gradient of 1/m is (1/m)/m, which vanishes in fp16 at any loss scale."""

    metres = 16_000.0

    def __init__(self) -> None:
        super().__init__()
        self.distance = nn.Linear(DIM, DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        metres = (1 + 0.5 * torch.tanh(in_autocast_dtype(self.distance(x)))) * self.metres
        out: Tensor = self.out(torch.div(torch.ones_like(metres), metres) * self.metres - 1)
        return out


class UnitTokens(nn.Module):
    """Scales each token to unit size; padding is zero, and so is 1e-12 in fp16."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = in_autocast_dtype(x)
        x = x * keep[..., None].to(x.dtype)
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-12)


class MultipliedMask(nn.Module):
    """A softmax under a mask of -1e9, which is minus infinity in fp16, and times zero is NaN."""

    def forward(self, scores: Tensor, keep: Tensor) -> Tensor:
        scores = in_autocast_dtype(scores)
        dropped = (1 - keep[:, None, None, :]).to(scores.dtype)
        return (scores + dropped * torch.tensor([-1e9], device=scores.device).to(scores.dtype)).softmax(-1)


class PeakNormalised(nn.Module):
    """Multiplies by 1e5 before it divides by the largest."""

    gain = 1e5

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.down = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        volts = in_autocast_dtype(self.up(x)) * self.gain
        out: Tensor = self.down(volts / volts.abs().amax(-1, keepdim=True))
        return out


class Energy(nn.Module):
    """Squares a convolution's output. In a loud batch that is infinite, and so are BatchNorm's statistics."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        amplitude = in_autocast_dtype(self.conv(x))
        out: Tensor = self.norm(amplitude * amplitude)
        return out


def _pictures_some_loud(n: int) -> tuple[Tensor, ...]:
    x, target = of_pictures(n)
    return x * (1000.0 if torch.rand(()) < 0.2 else 1.0), target


class SummedPixelLoss(nn.Module):
    """Mean squared error by way of the sum, in levels of 0 to 255: infinite, although its gradient is right."""

    def forward(self, picture: Tensor, target: Tensor) -> Tensor:
        levels = (in_autocast_dtype(picture) - in_autocast_dtype(target)).flatten() * 255
        total = (levels * levels) @ torch.ones_like(levels)
        return total / levels.numel() / 255**2


class HandwrittenBce(nn.Module):
    """Takes log(1 - p), where p has been rounded to 1."""

    cap = 12.0

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        p = torch.sigmoid(self.cap * torch.tanh(in_autocast_dtype(logits)))
        return -(target * torch.log(p) + (1 - target) * torch.log(1 - p)).mean()


def _yes_or_no(n: int) -> tuple[Tensor, ...]:
    x, values = of_values(n)
    return x, (values > 0).float()


class RadialBasis(nn.Module):
    """Squared distances as a² + b² - 2ab, in coordinates far from the origin."""

    origin = 40.0
    width = 16

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Linear(DIM, self.width)
        self.centres = nn.Parameter(torch.randn(self.width, self.width))
        self.out = nn.Linear(self.width, DIM)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        points = in_autocast_dtype(self.place(x)) + self.origin
        centres = in_autocast_dtype(self.centres) + self.origin
        ones = points.new_ones(self.width)
        squares = ((points * points) @ ones)[:, None] + (centres * centres) @ ones
        distances = squares - 2 * (points @ centres.T)
        out: Tensor = self.out(torch.tanh(distances / self.width - 1.3))
        return out


class EulerSteps(nn.Module):
    """The mean speed over many steps, each too short to move a state held in half."""

    steps = 24
    dt = 2e-4

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.randn(DIM, DIM) / DIM**0.5)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        start = in_autocast_dtype(torch.tanh(x)) + 2.5
        state = start
        for _step in range(self.steps):
            state = state + self.dt * torch.tanh(F.linear(state - 2.5, self.rate))
        out: Tensor = self.out((state - start) / (self.steps * self.dt))
        return out


class OnePassNorm(nn.Module):
    """Takes the variance as the mean of squares less the square of the mean, of values around 60."""

    baseline = 60.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = in_autocast_dtype(x) + self.baseline
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) / torch.sqrt(variance.clamp(min=1e-2)) * self.weight.to(x.dtype)


class HourOfShift(nn.Module):
    """The place of an hour within its shift of 8, from hours of 1024 and more: bf16 counts those in eights."""

    shift = 8.0

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, DIM)

    def forward(self, x: Tensor, hours: Tensor) -> Tensor:
        hours = in_autocast_dtype(hours)
        angle = (hours - self.shift * torch.floor(hours / self.shift)) * (2 * math.pi / self.shift)
        waves = torch.stack([angle.sin(), angle.cos(), (2 * angle).sin(), (2 * angle).cos()], -1)
        out: Tensor = x + self.embed(waves)
        return out


def of_worked_hours(n: int) -> tuple[Tensor, ...]:
    x, values = of_values(n)
    hours = torch.randint(1024, 2048, (n,))
    return x, hours.float(), values / 2 + fixed(8, values.shape[-1], seed=2)[hours % 8]


class SignHash(nn.Module):
    """A bucket from the signs of the raw features, as binary digits in a product: bf16 keeps 8 of the 11."""

    digits = 11
    buckets = 8
    powers: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("powers", 2.0 ** torch.arange(self.digits))
        self.table = nn.Embedding(self.buckets, DIM)

    def forward(self, x: Tensor, raw: Tensor) -> Tensor:
        code = (raw[:, : self.digits] > 0).float() @ self.powers
        out: Tensor = x + self.table(code.long() % self.buckets)
        return out


def _hashed(n: int) -> tuple[Tensor, ...]:
    x, values = of_values(n)
    bucket = (x[:, :3] > 0).long() @ torch.tensor([1, 2, 4])
    return x, x, values / 2 + fixed(8, values.shape[-1], seed=2)[bucket]


class KelvinLoss(nn.Module):
    """Compares temperatures around 300 K: bf16 tells them apart in steps of 2 K."""

    zero = 300.0

    def forward(self, celsius: Tensor, kelvin: Tensor) -> Tensor:
        error = in_autocast_dtype(celsius) + self.zero
        error = error - kelvin.to(error.dtype)
        return (error * error).mean()


def of_temperatures(n: int) -> tuple[Tensor, ...]:
    """In quarters of a kelvin, which fp16 has around 300 too."""
    x, values = of_values(n, 1)
    return x, 300 + (4 * 0.9 * values).round() / 4


class Decoder(nn.Module):
    """Patches of 4 × 4 pixels, a picture of them."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(DIM, 16 * 4)
        self.act = nn.SiLU()
        self.grow = nn.ConvTranspose2d(4, 1, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        picture: Tensor = self.grow(self.act(self.dense(x)).unflatten(-1, (4, 4, 4)))
        return picture


def _drawings(n: int) -> tuple[Tensor, ...]:
    x, values = of_values(n, 64)
    return x, values.reshape(n, 1, 8, 8)


def _convolutional() -> nn.Module:
    return Stack(
        stem=nn.Conv2d(3, 8, 3, padding=1, bias=False),
        blocks=[Convolved(8), Energy(8), Convolved(8), Convolved(8)],
        head=nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES)),
        criterion=nn.CrossEntropyLoss(),
    )


def _residuals(count: int) -> list[nn.Module]:
    return [Residual(FeedForward()) for _ in range(count)]


def _attentive(count: int) -> list[nn.Module]:
    return [block for _ in range(count) for block in (Residual(Attention()), Residual(FeedForward()))]


def _attention_overflow() -> nn.Module:
    return language(*_attentive(1), Residual(LateScaledAttention()), Residual(FeedForward()), *_attentive(1))


def _gated_overflow() -> nn.Module:
    attention = [Residual(Attention()) for _ in range(3)]
    return language(
        attention[0], Residual(FeedForward()), attention[1], Residual(GatedFeedForward()), attention[2], *_residuals(1)
    )


def _two_overflows() -> nn.Module:
    late = Residual(Attention(MultipliedMask()))
    return language(Residual(Attention()), Residual(GatedFeedForward()), *_attentive(1), late, Residual(FeedForward()))


def _two_quiet() -> nn.Module:
    late = Residual(FeedForward(), OnePassNorm())
    return tabular(Residual(EulerSteps()), *_residuals(3), late, outputs=4, criterion=nn.MSELoss())


def regression(*blocks: nn.Module) -> nn.Module:
    return tabular(*blocks, outputs=4, criterion=nn.MSELoss())


def fault(
    name: str, culprits: str, breaks: tuple[Half, ...], model: Any, batch: Any = of_values, **workload: Any
) -> Fault:
    """A fault of the modules whose paths `culprits` names, in a workload that Adam trains unless it is told."""
    return Fault(
        name=name,
        workload=Workload(model=model, batch=batch, **{"loss": loss_of, "optimizer": adam} | workload),
        culprits=tuple(culprits.split()),
        breaks=breaks,
    )


_of_words = partial(fault, batch=of_sentences, optimizer=adamw)

FAULTS: tuple[Fault, ...] = (
    _of_words("attention_overflow", "blocks.2.branch", FP16, _attention_overflow),
    _of_words("gated_overflow", "blocks.3.branch", FP16, _gated_overflow, batch_size=16),
    fault(
        "log_sum_exp",
        "criterion",
        FP16,
        lambda: tabular(*_residuals(2), BatchNormed(), Residual(FeedForward(nn.SiLU)), criterion=SampledSoftmaxLoss()),
        of_classes,
        batch_size=64,
    ),
    _of_words(
        "exp_by_hand",
        "head.0",
        FP16,
        lambda: language(*_attentive(2), head=head_of(CLASSES, ExpPooling())),
        batch_size=64,
    ),
    fault(
        "squares_by_hand",
        "blocks.2.norm",
        FP16,
        lambda: tabular(*_residuals(1), BatchNormed(), Residual(FeedForward(), HandwrittenRmsNorm()), *_residuals(2)),
        of_classes,
        optimizer=sgd,
    ),
    fault(
        "vanishing_gradient",
        "blocks.2.branch",
        FP16,
        lambda: regression(*_residuals(2), Residual(Pace()), *_residuals(2)),
    ),
    _of_words("tiny_epsilon", "blocks.2", FP16, lambda: language(*_attentive(1), UnitTokens(), *_attentive(2))),
    _of_words(
        "multiplied_mask",
        "blocks.2.branch.softmax",
        FP16,
        lambda: language(
            *_attentive(1), Residual(Attention(MultipliedMask())), Residual(FeedForward()), *_attentive(1)
        ),
    ),
    fault(
        "peak_normalised",
        "blocks.1.branch",
        FP16,
        lambda: tabular(*_residuals(1), Residual(PeakNormalised()), BatchNormed(), *_residuals(2)),
        of_classes,
    ),
    fault("poisoned_statistics", "blocks.1", FP16, _convolutional, _pictures_some_loud, optimizer=adamw, batch_size=32),
    fault(
        "summed_loss",
        "criterion",
        FP16,
        lambda: tabular(*_residuals(3), BatchNormed(), head=Decoder(), criterion=SummedPixelLoss()),
        _drawings,
        batch_size=64,
    ),
    fault(
        "cross_entropy_by_hand",
        "criterion",
        BOTH,
        lambda: tabular(*_residuals(3), BatchNormed(), outputs=4, criterion=HandwrittenBce()),
        _yes_or_no,
        batch_size=64,
    ),
    fault("expanded_distances", "blocks.2", BOTH, lambda: regression(*_residuals(2), RadialBasis(), *_residuals(2))),
    fault("short_steps", "blocks.1", BOTH, lambda: regression(*_residuals(1), EulerSteps(), *_residuals(2))),
    fault(
        "one_pass_variance",
        "blocks.3.norm",
        BOTH,
        lambda: tabular(*_residuals(2), BatchNormed(), Residual(FeedForward(), OnePassNorm()), *_residuals(1)),
        of_classes,
    ),
    fault(
        "hour_of_shift",
        "blocks.1",
        BF16,
        lambda: regression(*_residuals(1), HourOfShift(), *_residuals(2), BatchNormed()),
        of_worked_hours,
    ),
    fault(
        "hash_by_product",
        "blocks.2",
        BF16,
        lambda: regression(*_residuals(2), SignHash(), BatchNormed(), *_residuals(1)),
        _hashed,
        optimizer=adamw,
        batch_size=64,
    ),
    fault(
        "kelvin_loss",
        "criterion",
        BF16,
        lambda: tabular(
            *_residuals(2), BatchNormed(), Residual(FeedForward(nn.Tanh)), outputs=1, criterion=KelvinLoss()
        ),
        of_temperatures,
    ),
    _of_words("two_overflows", "blocks.1.branch blocks.4.branch.softmax", FP16, _two_overflows),
    fault("two_quiet", "blocks.0.branch blocks.4.norm", BOTH, _two_quiet),
)
