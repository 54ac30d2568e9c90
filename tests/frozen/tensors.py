"""A model's tensors, strides and the global flags under a policy and after it: digests, so that a bit more is seen."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

import amptune
from amptune import Fp32Rule, HalfRule, Policy

__all__ = ["tensors"]

POLICIES: Mapping[str, Policy] = {
    "stock": Policy(),
    "bf16": Policy(autocast="bf16"),
    "fp16, channels_last": Policy(autocast="fp16", memory_format="channels_last"),
    "channels_last_3d": Policy(memory_format="channels_last_3d"),
    "exclusions": Policy(
        autocast="bf16", fp32_modules=(Fp32Rule(path="*.1"), Fp32Rule(type="Linear", cast_output=True))
    ),
    "halves": Policy(autocast="bf16", half_modules=(HalfRule(type="LayerNorm"),)),
    "tf32": Policy(fp32_math="tf32", cudnn_benchmark=True),
    "ieee": Policy(fp32_math="ieee"),
    "half weights": Policy(weights="half"),
    "masters": Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True),
    "fused": Policy(autocast="bf16", fused_optimizer=True, accumulate=4, batch_size=8),
}


class Tied(nn.Module):
    """One weight under two names, a buffer, a parameter that is frozen, and one of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(4, 8, bias=False)
        self.out = nn.Linear(4, 8, bias=False)
        self.out.weight = self.into.weight
        self.norm = nn.LayerNorm(8)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide: torch.Tensor = self.norm(self.into(x))
        return wide @ self.out.weight + self.frozen.sum()


MODELS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolutions": (
        lambda: nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
            nn.Sequential(nn.Conv2d(8, 4, 1), nn.GroupNorm(2, 4)),
            nn.Flatten(),
            nn.Linear(4 * 6 * 6, 5),
        ),
        (2, 3, 8, 8),
    ),
    "volumes": (
        lambda: nn.Sequential(nn.Sequential(nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4)), nn.Flatten(), nn.Linear(32, 3)),
        (2, 2, 4, 4, 4),
    ),
    "tied": (Tied, (2, 4)),
    "attention": (
        lambda: nn.Sequential(
            nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)),
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        ),
        (2, 3, 8),
    ),
}


def tensors() -> str:
    """Every model under every policy: after `apply`, after a forward pass, and after `undo`."""
    told = [_told(model, policy) for model in MODELS for policy in POLICIES]
    return "\n".join(told)


def _told(model_name: str, policy_name: str) -> str:
    build, shape = MODELS[model_name]
    model = _filled(build())
    x = _counted(torch.zeros(shape))
    before, flags = _state(model), _flags()
    lines = [f"== {model_name}, {policy_name}"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tuned = amptune.apply(POLICIES[policy_name], model)
        except amptune.AmptuneError as error:
            lines.append(f"{type(error).__name__}: {error}")
        else:
            lines += _under(tuned, model, x)
            tuned.undo()
    changed = [
        name for name, was, now in zip(before, before.values(), _state(model).values(), strict=True) if was != now
    ]
    lines.append(
        f"undone: {f'other {changed}' if changed else 'the same'}, flags {'the same' if flags == _flags() else 'other'}"
    )
    return "\n".join(lines) + "\n"


def _under(tuned: Any, model: nn.Module, x: torch.Tensor) -> Iterator[str]:
    yield from (f"{name}: {said}" for name, said in _state(model).items())
    yield f"flags: {_flags()}"
    types = sorted({f"{type(module).__module__.split('.')[0]}.{type(module).__name__}" for module in model.modules()})
    yield f"types: {' '.join(types)}; state_dict: {' '.join(model.state_dict())}"
    optimizer = tuned.optimizer(torch.optim.SGD(model.parameters(), lr=0.125))
    yield f"optimizer: {type(optimizer).__name__}, fused {optimizer.defaults.get('fused')}"
    yield f"scaler: {tuned.scaler.is_enabled()}, accumulate {tuned.accumulate}"
    moved = tuned.batch(x)
    yield f"batch: {moved.dtype} {tuple(moved.shape)} {moved.stride()}"
    with tuned.autocast():
        output = tuned.model(moved)
    yield f"output: {output.dtype} {tuple(output.shape)} {output.stride()}"
    output.float().sum().backward()
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        yield f"grad {name}: {None if grad is None else (str(grad.dtype), grad.stride())}"
    yield f"findings: {' '.join(finding.code for finding in tuned.findings)}"


def _state(model: nn.Module) -> dict[str, str]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: _digest(tensor) for name, tensor in named}


def _digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    digest = hashlib.sha256(raw).hexdigest()[:12]
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.requires_grad} {digest}"


def _flags() -> dict[str, Any]:
    return {
        "matmul": torch.backends.cuda.matmul.fp32_precision,
        "conv": torch.backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        "rnn": torch.backends.cudnn.rnn.fp32_precision,  # type: ignore[attr-defined]
        "precision": torch.get_float32_matmul_precision(),
        "benchmark": torch.backends.cudnn.benchmark,
        "autocast": torch.is_autocast_enabled("cpu"),
    }


def _filled(model: nn.Module) -> nn.Module:
    """With numbers that no generator draws, and that half precision rounds."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(_counted(tensor))
    return model


def _counted(tensor: torch.Tensor) -> torch.Tensor:
    count = torch.arange(tensor.numel(), dtype=torch.float64).reshape(tensor.shape)
    return ((count % 17 - 8) / 8 + (count % 5) / 4096 + 1).to(tensor.dtype)
