"""The command `amptune init`: writes a starter workload, which runs unchanged."""

from __future__ import annotations

from pathlib import Path

import click

from amptune.cli.options import json_option, print_json, say
from amptune.workload.written_workload import ARGUMENTS, FILL_IN, doubt_of, options_for, workload_text

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


@click.command("init", short_help="Write a workload: a starter, or one made from a training script.")
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--from", "script", type=click.Path(dir_okay=False, path_type=Path), metavar="TRAIN.py",
              help="The training script to take it from. It is read, not run.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace FILE if it exists.")
@json_option
def init_command(file: Path | None, script: Path | None, force: bool, as_json: bool) -> None:
    """Write a workload to FILE.

    Without --from, FILE (default: workload.py) is a starter that runs as it stands.

    \b
    amptune init --from train.py

    writes train_workload.py beside the script (or FILE), with what the script trains: a Trainer of transformers, a
    LightningModule, or model, loader and optimizer of a loop. The script stays as it is.
    """  # noqa: D301  # click's mark for lines to be left as they are is the backspace itself
    file = file or (Path("workload.py") if script is None else script.with_name(f"{script.stem}_workload.py"))
    _require_paths(file, script, force=force)
    text, options = STARTER.format(file=file, name=file.stem), ""
    if script is not None:
        text, options = workload_text(script, file), options_for(script)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.BadParameter(f"{file} cannot be written: {error.strerror}", param_hint="FILE") from error
    target = f"{file}:workload"
    if as_json:
        print_json("amptune.init/1", {"file": str(file), "target": target, "findings": []})
        return
    say(f"wrote {file}; next: amptune tune {target if script is None else file}{options}")
    if script is not None:
        _tell_more(script, file, text, options)


def _require_paths(file: Path, script: Path | None, *, force: bool) -> None:
    """Raises an error unless `file` can be written and `script` may be one."""
    if file.suffix != ".py":
        raise click.BadParameter(f"{file} does not end in .py", param_hint="FILE")
    if script is not None and script.suffix != ".py":
        raise click.BadParameter(f"{script} is no Python script: its name does not end in .py", param_hint="--from")
    if script is not None and file.resolve() == script.resolve():
        raise click.BadParameter(f"{file} is the script itself", param_hint="FILE")
    if file.exists() and not force:
        raise click.BadParameter(f"{file} exists already; it is left as it is without --force", param_hint="FILE")


def _tell_more(script: Path, file: Path, text: str, options: str) -> None:
    """Prints what the user has to fill in, and what the line that was printed leaves open."""
    for line in text.splitlines():
        if FILL_IN in line:
            say(f"first, in {file}: {line.strip()}")
    if ARGUMENTS in options:
        say(f"ARGUMENTS are those that you give {script}; leave -- out if there are none")
    if (doubt := doubt_of(script)) is not None:
        say(doubt)
