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


# --- the healthy surroundings -----------------------------------------------------------------------------------------

DIM = 32
FEATURES = 24
CLASSES = 6
TOKENS = 12
VOCABULARY = 40


class Stack(nn.Module):
    """A stem, blocks that take (x, *context) and return what x was, and a head; the loss is a part of the model."""

    def __init__(self, *, stem: nn.Module, blocks: Sequence[nn.Module], head: nn.Module, criterion: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.head, self.criterion = stem, nn.ModuleList(blocks), head, criterion

    def forward(self, x: Tensor, *context: Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x, *context)
        return self.head(x)


class Part(nn.Module):
    """A module that is a function of itself, which has the `parts`, and of its inputs."""

    def __init__(self, call: Callable[..., Any], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(self, *inputs)


class Residual(nn.Module):
    def __init__(self, branch: nn.Module, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM) if norm is None else norm
        self.branch = branch

    def forward(self, x: Tensor, *context: Tensor) -> Any:
        return x + self.branch(self.norm(x), *context)


def square() -> nn.Linear:
    return nn.Linear(DIM, DIM)


class FeedForward(nn.Module):
    def __init__(self, activation: Callable[[], nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(DIM, 2 * DIM), activation(), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor, *_: Tensor) -> Any:
        return self.down(self.act(self.up(x)))


def batch_normed() -> nn.Module:
    parts = {"linear": nn.Linear(DIM, DIM, bias=False), "norm": nn.BatchNorm1d(DIM), "act": nn.ReLU()}
    return Part(lambda own, x, *_: own.act(own.norm(own.linear(x))), **parts)


def convolved(channels: int) -> nn.Module:
    conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
    return Part(
        lambda own, x: x + own.act(own.norm(own.conv(x))), conv=conv, norm=nn.BatchNorm2d(channels), act=nn.ReLU()
    )


def softmax(_: nn.Module, scores: Tensor, keep: Tensor) -> Tensor:
    """Over the tokens that are kept: `keep` is (batch, tokens), 0 for padding."""
    return scores.masked_fill(keep[:, None, None, :] == 0, -math.inf).softmax(-1)


class Attention(nn.Module):
    heads = 4

    def __init__(self, call: Callable[..., Tensor] = softmax) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.value, self.softmax, self.out = square(), Part(call), square()

    def forward(self, x: Tensor, keep: Tensor) -> Any:
        query, key, value = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        return self.out((self.softmax(self.scores(query, key), keep) @ value).transpose(1, 2).flatten(2))

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(-1, -2))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, DIM), nn.Embedding(TOKENS, DIM)

    def forward(self, ids: Tensor) -> Any:
        return self.words(ids) + self.places.weight


def mean_of_tokens(_: nn.Module, x: Tensor) -> Tensor:
    return x.mean(1)


def head_of(outputs: int, pool: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(*([] if pool is None else [pool]), nn.LayerNorm(DIM), nn.Linear(DIM, outputs))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=2e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: Any, batch: tuple[Tensor, ...]) -> Any:
    """The last tensor of a batch is the target; what stands between it and the first is context."""
    *inputs, target = batch
    return model.criterion(model(*inputs), target)


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
    head = head_of(CLASSES, Part(mean_of_tokens)) if head is None else head
    return Stack(stem=Tokens(), blocks=blocks, head=head, criterion=nn.CrossEntropyLoss())


# --- the faults -------------------------------------------------------------------------------------------------------


class LateScaledAttention(Attention):
    """Scales its scores after the product of query and key, which passes 65504."""

    gain = 512.0

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        products = (query * self.gain) @ (key * self.gain).transpose(-1, -2)
        return products / (self.gain**2 * math.sqrt(query.shape[-1]))


GAIN = 1024.0


def gated_feed_forward(own: Any, x: Tensor, *_: Tensor) -> Any:
    """As T5's, whose hidden activations pass 65504."""
    gate, up = (in_autocast_dtype(linear(x)) * GAIN for linear in (own.gate, own.up))
    return own.down(F.gelu(gate) * up) / GAIN**2


def gated(call: Callable[..., Any] = gated_feed_forward) -> nn.Module:
    return Part(call, gate=nn.Linear(DIM, 2 * DIM), up=nn.Linear(DIM, 2 * DIM), down=nn.Linear(2 * DIM, DIM))


def sampled_loss(_: nn.Module, logits: Tensor, target: Tensor) -> Tensor:
    """Corrects for candidates drawn once in 200,000, and exponentiates before it takes a logarithm."""
    energy = (in_autocast_dtype(logits) + math.log(200_000)) / math.log(2)
    total = torch.exp2(energy) @ energy.new_ones(energy.shape[-1])
    return (torch.log2(total) - energy.gather(-1, target[:, None])[:, 0]).mean() * math.log(2)


def exp_pooling(own: Any, x: Tensor) -> Tensor:
    """Weights over the tokens, by a softmax that subtracts no maximum of scores around 14."""
    powers = torch.exp2(in_autocast_dtype(own.score(x) + 14.0) / math.log(2))[..., 0]
    weights = powers / (powers @ powers.new_ones(TOKENS, 1))
    return (weights[:, None, :] @ x)[:, 0]


def handwritten_norm(own: Any, x: Tensor) -> Any:
    """In raw counts, whose squares overflow: everything divided by infinity is zero."""
    counts = in_autocast_dtype(x) * 512.0
    mean_square = (counts * counts).mean(-1, keepdim=True)
    return counts / torch.sqrt(mean_square + 1e-6) * own.weight.to(counts.dtype)


def weighted(norm: Callable[..., Any]) -> nn.Module:
    return Part(norm, weight=nn.Parameter(torch.ones(DIM)))


METRES = 16_000.0


def pace_of(x: Tensor) -> Tensor:
    """Time per distance. The gradient of 1/m is (1/m)/m, which vanishes in fp16 at any loss scale."""
    metres = (1 + 0.5 * torch.tanh(in_autocast_dtype(x))) * METRES
    return torch.div(torch.ones_like(metres), metres) * METRES - 1


def pace() -> nn.Module:
    return Part(lambda own, x, *_: own.out(pace_of(own.distance(x))), distance=square(), out=square())


def unit_tokens(_: nn.Module, x: Tensor, keep: Tensor) -> Tensor:
    """Scales each token to unit size; padding is zero, and so is 1e-12 in fp16."""
    x = in_autocast_dtype(x)
    x = x * keep[..., None].to(x.dtype)
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-12)


def multiplied_mask(_: nn.Module, scores: Tensor, keep: Tensor) -> Tensor:
    """A softmax under a mask of -1e9, which is minus infinity in fp16, and times zero is NaN."""
    scores = in_autocast_dtype(scores)
    dropped = (1 - keep[:, None, None, :]).to(scores.dtype)
    return (scores + dropped * torch.tensor([-1e9], device=scores.device).to(scores.dtype)).softmax(-1)


def peak(own: Any, x: Tensor, *_: Tensor) -> Any:
    """Multiplies by 1e5 before it divides by the largest."""
    volts = in_autocast_dtype(own.up(x)) * 1e5
    return own.down(volts / volts.abs().amax(-1, keepdim=True))


def peak_normalised() -> nn.Module:
    return Part(peak, up=square(), down=square())


def energy(own: Any, x: Tensor) -> Any:
    """Squares a convolution's output. In a loud batch that is infinite, and so are BatchNorm's statistics."""
    amplitude = in_autocast_dtype(own.conv(x))
    return own.norm(amplitude * amplitude)


def _pictures_some_loud(n: int) -> tuple[Tensor, ...]:
    x, target = of_pictures(n)
    return x * (1000.0 if torch.rand(()) < 0.2 else 1.0), target


def summed_pixel_loss(_: nn.Module, picture: Tensor, target: Tensor) -> Tensor:
    """Mean squared error by way of the sum, in levels of 0 to 255: infinite, although its gradient is right."""
    levels = (in_autocast_dtype(picture) - in_autocast_dtype(target)).flatten() * 255
    total = (levels * levels) @ torch.ones_like(levels)
    return total / levels.numel() / 255**2


def handwritten_bce(_: nn.Module, logits: Tensor, target: Tensor) -> Tensor:
    """Takes log(1 - p), where p has been rounded to 1."""
    p = torch.sigmoid(12.0 * torch.tanh(in_autocast_dtype(logits)))
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

    def forward(self, x: Tensor, *_: Tensor) -> Any:
        points = in_autocast_dtype(self.place(x)) + self.origin
        centres = in_autocast_dtype(self.centres) + self.origin
        ones = points.new_ones(self.width)
        squares = ((points * points) @ ones)[:, None] + (centres * centres) @ ones
        distances = squares - 2 * (points @ centres.T)
        return self.out(torch.tanh(distances / self.width - 1.3))


EULER_STEPS, DT = 24, 2e-4


def euler(own: Any, x: Tensor, *_: Tensor) -> Any:
    """The mean speed over many steps, each too short to move a state held in half."""
    start = in_autocast_dtype(torch.tanh(x)) + 2.5
    state = start
    for _step in range(EULER_STEPS):
        state = state + DT * torch.tanh(F.linear(state - 2.5, own.rate))
    return own.out((state - start) / (EULER_STEPS * DT))


def euler_steps() -> nn.Module:
    return Part(euler, rate=nn.Parameter(torch.randn(DIM, DIM) / DIM**0.5), out=square())


def one_pass_norm(own: Any, x: Tensor) -> Any:
    """Takes the variance as the mean of squares less the square of the mean, of values around 60."""
    x = in_autocast_dtype(x) + 60.0
    mean = x.mean(-1, keepdim=True)
    variance = (x * x).mean(-1, keepdim=True) - mean * mean
    return (x - mean) / torch.sqrt(variance.clamp(min=1e-2)) * own.weight.to(x.dtype)


SHIFT = 8.0


def hour(own: Any, x: Tensor, hours: Tensor) -> Any:
    """The place of an hour within its shift of 8, from hours of 1024 and more: bf16 counts those in eights."""
    hours = in_autocast_dtype(hours)
    angle = (hours - SHIFT * torch.floor(hours / SHIFT)) * (2 * math.pi / SHIFT)
    waves = torch.stack([angle.sin(), angle.cos(), (2 * angle).sin(), (2 * angle).cos()], -1)
    return x + own.embed(waves)


def hour_of_shift() -> nn.Module:
    return Part(hour, embed=nn.Linear(4, DIM))


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

    def forward(self, x: Tensor, raw: Tensor) -> Any:
        code = (raw[:, : self.digits] > 0).float() @ self.powers
        return x + self.table(code.long() % self.buckets)


def _hashed(n: int) -> tuple[Tensor, ...]:
    x, values = of_values(n)
    bucket = (x[:, :3] > 0).long() @ torch.tensor([1, 2, 4])
    return x, x, values / 2 + fixed(8, values.shape[-1], seed=2)[bucket]


ZERO = 300.0


def kelvin_loss(_: nn.Module, celsius: Tensor, kelvin: Tensor) -> Tensor:
    """Compares temperatures around 300 K: bf16 tells them apart in steps of 2 K."""
    error = in_autocast_dtype(celsius) + ZERO
    error = error - kelvin.to(error.dtype)
    return (error * error).mean()


def of_temperatures(n: int) -> tuple[Tensor, ...]:
    """In quarters of a kelvin, which fp16 has around 300 too."""
    x, values = of_values(n, 1)
    return x, 300 + (4 * 0.9 * values).round() / 4


def _decoder() -> nn.Module:
    """Patches of 4 × 4 pixels, a picture of them."""
    layers = (nn.Linear(DIM, 16 * 4), nn.SiLU(), nn.Unflatten(-1, (4, 4, 4)), nn.ConvTranspose2d(4, 1, 2, stride=2))
    return nn.Sequential(*layers)


def _drawings(n: int) -> tuple[Tensor, ...]:
    x, values = of_values(n, 64)
    return x, values.reshape(n, 1, 8, 8)


def _convolutional() -> nn.Module:
    stem, first = nn.Conv2d(3, 8, 3, padding=1, bias=False), convolved(8)
    loud = Part(energy, conv=nn.Conv2d(8, 8, 3, padding=1, bias=False), norm=nn.BatchNorm2d(8))
    return Stack(
        stem=stem,
        blocks=[first, loud, convolved(8), convolved(8)],
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
        attention[0], Residual(FeedForward()), attention[1], Residual(gated()), attention[2], *_residuals(1)
    )


def _two_overflows() -> nn.Module:
    late = Residual(Attention(multiplied_mask))
    return language(Residual(Attention()), Residual(gated()), *_attentive(1), late, Residual(FeedForward()))


def _two_quiet() -> nn.Module:
    late = Residual(FeedForward(), weighted(one_pass_norm))
    return tabular(Residual(euler_steps()), *_residuals(3), late, outputs=4, criterion=nn.MSELoss())


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
        lambda: tabular(*_residuals(2), batch_normed(), Residual(FeedForward(nn.SiLU)), criterion=Part(sampled_loss)),
        of_classes,
        batch_size=64,
    ),
    _of_words(
        "exp_by_hand",
        "head.0",
        FP16,
        lambda: language(*_attentive(2), head=head_of(CLASSES, Part(exp_pooling, score=nn.Linear(DIM, 1, bias=False)))),
        batch_size=64,
    ),
    fault(
        "squares_by_hand",
        "blocks.2.norm",
        FP16,
        lambda: tabular(
            *_residuals(1),
            batch_normed(),
            Residual(FeedForward(), weighted(handwritten_norm)),
            *_residuals(2),
        ),
        of_classes,
        optimizer=sgd,
    ),
    fault(
        "vanishing_gradient",
        "blocks.2.branch",
        FP16,
        lambda: regression(*_residuals(2), Residual(pace()), *_residuals(2)),
    ),
    _of_words("tiny_epsilon", "blocks.2", FP16, lambda: language(*_attentive(1), Part(unit_tokens), *_attentive(2))),
    _of_words(
        "multiplied_mask",
        "blocks.2.branch.softmax",
        FP16,
        lambda: language(*_attentive(1), Residual(Attention(multiplied_mask)), Residual(FeedForward()), *_attentive(1)),
    ),
    fault(
        "peak_normalised",
        "blocks.1.branch",
        FP16,
        lambda: tabular(*_residuals(1), Residual(peak_normalised()), batch_normed(), *_residuals(2)),
        of_classes,
    ),
    fault("poisoned_statistics", "blocks.1", FP16, _convolutional, _pictures_some_loud, optimizer=adamw, batch_size=32),
    fault(
        "summed_loss",
        "criterion",
        FP16,
        lambda: tabular(*_residuals(3), batch_normed(), head=_decoder(), criterion=Part(summed_pixel_loss)),
        _drawings,
        batch_size=64,
    ),
    fault(
        "cross_entropy_by_hand",
        "criterion",
        BOTH,
        lambda: tabular(*_residuals(3), batch_normed(), outputs=4, criterion=Part(handwritten_bce)),
        _yes_or_no,
        batch_size=64,
    ),
    fault("expanded_distances", "blocks.2", BOTH, lambda: regression(*_residuals(2), RadialBasis(), *_residuals(2))),
    fault("short_steps", "blocks.1", BOTH, lambda: regression(*_residuals(1), euler_steps(), *_residuals(2))),
    fault(
        "one_pass_variance",
        "blocks.3.norm",
        BOTH,
        lambda: tabular(
            *_residuals(2), batch_normed(), Residual(FeedForward(), weighted(one_pass_norm)), *_residuals(1)
        ),
        of_classes,
    ),
    fault(
        "hour_of_shift",
        "blocks.1",
        BF16,
        lambda: regression(*_residuals(1), hour_of_shift(), *_residuals(2), batch_normed()),
        of_worked_hours,
    ),
    fault(
        "hash_by_product",
        "blocks.2",
        BF16,
        lambda: regression(*_residuals(2), SignHash(), batch_normed(), *_residuals(1)),
        _hashed,
        optimizer=adamw,
        batch_size=64,
    ),
    fault(
        "kelvin_loss",
        "criterion",
        BF16,
        lambda: tabular(
            *_residuals(2), batch_normed(), Residual(FeedForward(nn.Tanh)), outputs=1, criterion=Part(kelvin_loss)
        ),
        of_temperatures,
    ),
    _of_words("two_overflows", "blocks.1.branch blocks.4.branch.softmax", FP16, _two_overflows),
    fault("two_quiet", "blocks.0.branch blocks.4.norm", BOTH, _two_quiet),
)
