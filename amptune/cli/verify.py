"""The command `amptune verify`: measures whether a policy's claim still holds on this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from amptune.cli.options import SECONDS, json_option, print_json
from amptune.cli.session import Session, pass_session

if TYPE_CHECKING:
    from amptune.search.verification import Verification

__all__ = ["verify_command"]

DOES_NOT_HOLD = 1


@click.command("verify", short_help="Measure a policy's claim again: does it still hold here?")
@click.argument("policy", metavar="POLICY.yaml")
@click.argument("target")
@click.option("--budget", type=SECONDS, default="90s", show_default=True, help="Wall-clock time of the whole command.")
@click.option("--device", metavar="cuda:N|cpu", help="Default: the first GPU, else the CPU.")
@json_option
@pass_session
def verify_command(session: Session, policy: str, target: str, budget: float, device: str | None, as_json: bool) -> int:
    """Measure the claim of POLICY.yaml again, on this machine, against the baseline it names.

    TARGET is the workload it was tuned for, FILE.py:NAME or PACKAGE.MODULE:NAME. Policy and baseline are
    measured in turn, each in a process of its own, until the claim is met or missed, or the budget is
    spent.

    It is met if the new 95 % interval lies above the claim less 2 %, or if the measured value does and its interval
    is at most 10 % to each side. It is missed if the interval lies below that, twice in a row.

    Exit code 0 if the claim is met, 1 if it is missed or amptune could not tell, with the reason and with what changed.
    4 on hardware the policy is not for.
    """
    session.start_importing(target)
    from amptune.policy.file_io import load
    from amptune.report.progress import progress_for
    from amptune.report.terminal import print_verification
    from amptune.search.verification import verify

    policy_file = load(policy)
    with progress_for(sys.stderr) as observer:
        time, machine = session.budget(budget), session.evaluator
        found = verify(policy_file, target, budget=time, device=device, observer=observer, evaluator=machine)
    if as_json:
        print_json("amptune.verify/1", _as_data(found, policy))
    else:
        print_verification(found, sys.stdout)
    return 0 if found.holds else DOES_NOT_HOLD


def _as_data(found: Verification, policy: str) -> dict[str, Any]:
    now = found.speedup
    return {
        "file": policy,
        "holds": found.holds,
        "claimed": {
            "speedup": found.claim.speedup,
            "objective": found.claim.objective.name,
            "gain": found.claim.gain,
            "step_ms": found.claim.step_ms,
            "baseline_step_ms": found.claim.baseline_ms,
        },
        "measured": {
            "speedup": now and now.value,
            "speedup_ci95": now and [now.low, now.high],
            "launches": now and now.launches,
            "gain": found.gain and found.gain.value,
            "gain_ci95": found.gain and [found.gain.low, found.gain.high],
            "step_ms": found.policy.step_ms,
            "baseline_step_ms": found.baseline.step_ms,
        },
        "findings": [finding.as_dict() for finding in found.findings],
    }
