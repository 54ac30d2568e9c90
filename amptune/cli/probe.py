"""The command `amptune probe`: shows what this machine can do."""

from __future__ import annotations

import dataclasses
import sys

import click

from amptune.cli.options import json_option, print_json

__all__ = ["probe_command"]


@click.command("probe", short_help="Show what this machine can do.")
@click.option("--device", metavar="cuda:N|cpu", help="Default: the first GPU, else the CPU.")
@json_option
def probe_command(device: str | None, as_json: bool) -> None:
    """Show what this machine can do: GPU, precisions, memory, versions, labels."""
    from amptune.hardware.detect import probe
    from amptune.report.terminal import print_hardware

    hardware = probe(device)
    if as_json:
        print_json("amptune.probe/1", {**dataclasses.asdict(hardware), "labels": dict(hardware.labels), "findings": []})
    else:
        print_hardware(hardware, sys.stdout)
