"""The command `amptune diagnose`: explains why a step is slow and where NaNs come from."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from amptune.cli.options import SECONDS, json_option, print_json, progress_unless, quiet_option, target_argument
from amptune.cli.session import Session, pass_session

if TYPE_CHECKING:
    from amptune.search.diagnosis import Diagnosis, DtypeDiagnosis

__all__ = ["diagnose_command"]


@click.command("diagnose", short_help="Why is a training step slow, and where do its NaNs come from?")
@target_argument
@click.option("--budget", type=SECONDS, default="120s", show_default=True, help="Wall-clock time of the whole command.")
@click.option("--device", metavar="cuda:N|cpu", help="Default: the first GPU, else the CPU.")
@quiet_option
@json_option
@pass_session
def diagnose_command(
    session: Session,
    target: str,
    arguments: tuple[str, ...],
    budget: float,
    device: str | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """Say what is wrong with the training step of TARGET on this machine, and what to do about it.

    TARGET is FILE.py[:NAME] or PACKAGE.MODULE:NAME; what stands behind -- are its script's own arguments.

    Numerics: training under autocast in bf16 and in fp16 is held against FP32; where it is not as good, the module in
    which that begins is named, and the smallest set of modules that cures it when kept in FP32. Speed: what the step
    waits for, as stock PyTorch runs it and under the AMP recipe. Exit code 0 whatever is found; 3 if stock
    PyTorch cannot run a step, or its numbers break.
    """
    session.start_importing(target, device)
    from amptune.report.terminal import print_diagnosis
    from amptune.search.diagnosis import diagnose

    time, machine = session.budget(budget), session.evaluator
    with progress_unless(quiet, time) as observer:
        found = diagnose(target, budget=time, arguments=arguments, device=device, observer=observer, evaluator=machine)
    if as_json:
        print_json("amptune.diagnose/1", _as_data(found, target))
    else:
        print_diagnosis(found, sys.stdout)
    return 3 if any(finding.code == "fp32-breaks" for finding in found.findings) else 0


def _as_data(found: Diagnosis, target: str) -> dict[str, Any]:
    return {
        "target": target,
        "hardware": found.hardware.name,
        "numerics": [_numerics(one) for one in found.numerics],
        "profiles": [{"policy": str(policy), **asdict(profile)} for policy, profile in found.profiles],
        "findings": [finding.as_dict() for finding in found.findings],
        "seconds": found.seconds,
    }


def _numerics(one: DtypeDiagnosis) -> dict[str, Any]:
    judgement, cure = one.judgement, one.cure
    return {
        "autocast": one.policy.autocast,
        "sound": judgement and judgement.passes,
        "shortcomings": [finding.as_dict() for finding in judgement.shortcomings] if judgement else [],
        "cure": cure and {
            "modules": list(cure.modules),
            "fp32_modules": [
                {"type": rule.type} if rule.path is None else {"path": rule.path} for rule in cure.rules
            ],
            "judgements": cure.judgements,
        },
    }  # fmt: skip
