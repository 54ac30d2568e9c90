"""The command `amptune probe`: shows what this machine can do."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING

import click

from amptune.cli.options import json_option, print_json

if TYPE_CHECKING:
    from amptune.hardware.machine import Hardware
    from amptune.policy.findings import Finding

__all__ = ["probe_command"]


@click.command("probe", short_help="Show what this machine can do.")
@click.option("--device", metavar="cuda:N|cpu", help="Default: the first GPU, else the CPU.")
@json_option
def probe_command(device: str | None, as_json: bool) -> None:
    """Show what this machine can do: GPU, precisions, memory, versions, labels."""
    from amptune.hardware.detect import probe
    from amptune.report.terminal import print_hardware

    hardware = probe(device)
    missing = _missing_on(hardware)
    if as_json:
        findings = [finding.as_dict() for finding in missing]
        found = {**dataclasses.asdict(hardware), "labels": dict(hardware.labels), "findings": findings}
        print_json("amptune.probe/1", found)
    else:
        print_hardware(hardware, missing, sys.stdout)


def _missing_on(hardware: Hardware) -> tuple[Finding, ...]:
    import torch

    from amptune.report.missing_features import missing_on

    gpu = hardware.gpu
    return () if gpu is None else missing_on(gpu, torch.cuda.get_arch_list(), hardware.software.torch)
