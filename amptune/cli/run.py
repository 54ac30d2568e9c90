"""The command `amptune run`, for `--help` and completion; `runtime.script.under_policy` does it, without click."""

from __future__ import annotations

import click

from amptune.cli.options import FILE

__all__ = ["run_command"]


@click.command("run", context_settings={"ignore_unknown_options": True})
@click.argument("policy", type=FILE, metavar="POLICY.yaml")
@click.argument("script", type=FILE, metavar="SCRIPT.py")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]")
def run_command(policy: str, script: str, arguments: tuple[str, ...]) -> None:
    """Train as SCRIPT.py does, under a policy, without a changed line.

    The script runs as `python SCRIPT.py ARGUMENTS` would. From its second step on, the forward pass of what it trains
    runs under the policy: autocast, memory format, fused optimizer, torch.compile, recorded passes; fp16 with the
    script's own loss scaler, or with one of amptune's. Works under torchrun: torchrun … -m amptune run ….
    """
    from amptune.runtime.script.under_policy import main

    main([policy, script, "--", *arguments])
