"""The command `amptune init`: writes a starter workload, which runs unchanged."""

from __future__ import annotations

from pathlib import Path

import click

from amptune.cli.options import json_option, print_json, say

__all__ = ["STARTER", "init_command"]

STARTER = '''"""What amptune tunes: one training step. Fill in your own, then: amptune tune {file}:workload"""

import torch
from torch import nn

import amptune


def model() -> nn.Module:
    """Your model, on the CPU; amptune moves it to the device."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 10))


def batch(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`n` samples as your loader gives them: a tensor, or tuples, lists, dicts or dataclasses of tensors."""
    return torch.randn(n, 1, 28, 28), torch.randint(10, (n,))


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The forward pass, to a scalar loss."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


workload = amptune.Workload(
    name="{name}",
    model=model,
    batch=batch,
    loss=loss,
    optimizer=optimizer,
    batch_size=128,  # what training uses today, per device
    # loader=lambda batch_size: DataLoader(dataset, batch_size, shuffle=True),  # to be told what training gets
)
'''


@click.command("init", short_help="Write a starter workload.")
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@json_option
def init_command(file: Path | None, force: bool, as_json: bool) -> None:
    """Write a workload to FILE (default: workload.py), to fill in your own training step. It runs as it stands.

    A training script needs none: amptune tune train.py -- its arguments.
    """
    file = file or Path("workload.py")
    if file.suffix != ".py":
        raise click.BadParameter(f"{file} does not end in .py", param_hint="FILE")
    if file.exists() and not force:
        raise click.BadParameter(f"{file} exists already; it is left as it is without --force", param_hint="FILE")
    try:
        file.write_text(STARTER.format(file=file, name=file.stem), encoding="utf-8")
    except OSError as error:
        raise click.BadParameter(f"{file} cannot be written: {error.strerror}", param_hint="FILE") from error
    target = f"{file}:workload"
    if as_json:
        print_json("amptune.init/1", {"file": str(file), "target": target, "findings": []})
        return
    say(f"wrote {file}; next: amptune tune {target}")
