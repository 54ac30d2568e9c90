"""The command `amptune verify`: measures whether a policy's claim still holds on this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from amptune.cli.options import (
    FILE,
    SECONDS,
    AtLeast,
    GroupedCommand,
    json_option,
    print_json,
    progress_unless,
    quiet_option,
    say,
    target_argument,
)
from amptune.cli.session import Session, pass_session

if TYPE_CHECKING:
    from amptune.policy.policy_file import PolicyFile
    from amptune.search.gate.long_look import LongLook
    from amptune.search.verification import Verification

__all__ = ["verify_command"]

DOES_NOT_HOLD, INTERRUPTED = 1, 130
CLAIM_S, LONG_LOOK_S = 90.0, 600.0
STEPS, SEEDS = 2000, 5


_GROUPS = {
    "With --numerics": ["numerics", "steps", "seeds"],
    "Effort": ["budget"],
}


@click.command(
    "verify",
    cls=GroupedCommand,
    groups=_GROUPS,
    short_help="Measure a policy's claim again: does it still hold here?",
)
@click.argument("policy", type=FILE, metavar="POLICY.yaml")
@target_argument
@click.option(
    "--numerics", is_flag=True, help="Does it train like FP32? Trains both side by side; measures no claim of speed."
)
@click.option("--steps", type=AtLeast(20), help="Training steps of a run. Default: 2000.")
@click.option("--seeds", type=AtLeast(3), help="Runs of each of the two. Default: 5.")
@click.option("--budget", type=SECONDS, help="Wall-clock time of the whole command. Default: 90s; --numerics: 10m.")
@click.option("--device", metavar="cuda:N|cpu", help="Default: the first GPU, else the CPU.")
@quiet_option
@json_option
@pass_session
def verify_command(
    session: Session,
    policy: str,
    target: str,
    arguments: tuple[str, ...],
    numerics: bool,
    steps: int | None,
    seeds: int | None,
    budget: float | None,
    device: str | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """Measure the claim of POLICY.yaml again, on this machine, against the baseline it names.

    TARGET is the workload it was tuned for, FILE.py[:NAME] or PACKAGE.MODULE:NAME; what stands behind -- are its
    script's own arguments. Policy and baseline are measured in turn, each in a process of its own, until the claim is
    met or missed, or the budget is spent.

    It is met if the new 95 % interval lies above the claim less 2 %, or if the measured value does and its interval
    is at most 10 % to each side. It is missed if the interval lies below that, twice in a row.

    Exit code 0 if the claim is met, 1 if it is missed or amptune could not tell, with the reason and with what changed.
    4 on hardware the policy is not for.

    With --numerics, FP32 and the policy train in your own loop, with several seeds. The policy trains like FP32 (0) if
    its mean loss lies within 3 standard deviations of FP32's seeds in every tenth of the steps, its 95 % interval
    included, and so does what `evaluate` gives; buffers such as BatchNorm's are compared too. Else it does not, or
    amptune could not tell (1). The curves are kept in .amptune/TARGET/curves.jsonl. Ctrl-C answers from what there is.
    """
    asked = {"--steps": steps, "--seeds": seeds}
    alone = next((name for name, value in asked.items() if value is not None), None)
    if alone is not None and not numerics:
        raise click.BadParameter("is for --numerics only", param_hint=alone)
    from amptune.policy.file_io import load

    if policy.endswith(".py"):
        raise click.BadParameter(f"the policy stands first: amptune verify {target} {policy}", param_hint="POLICY.yaml")
    policy_file = load(policy)
    session.start_importing(target, device)
    if numerics:
        options = {"steps": steps or STEPS, "seeds": seeds or SEEDS, "device": device, "arguments": arguments}
        return _long_look(session, policy, policy_file, target, quiet, as_json, budget or LONG_LOOK_S, options)
    from amptune.report.terminal import print_verification
    from amptune.search.verification import verify

    time, machine = session.budget(budget or CLAIM_S), session.evaluator
    with progress_unless(quiet, time) as observer:
        found = verify(
            policy_file,
            target,
            budget=time,
            arguments=arguments,
            device=device,
            observer=observer,
            evaluator=machine,
            ranks=None if session.torchrun is None else session.devices(1, device),
        )
    if as_json:
        print_json("amptune.verify/1", _as_data(found, policy))
    else:
        print_verification(found, sys.stdout)
    return 0 if found.holds else DOES_NOT_HOLD


def _long_look(
    session: Session,
    policy: str,
    policy_file: PolicyFile,
    target: str,
    quiet: bool,
    as_json: bool,
    budget_s: float,
    options: Mapping[str, Any],
) -> int:
    """Trains in FP32 and under the policy, and prints whether the policy trains like FP32."""
    from amptune.report.terminal import print_long_look
    from amptune.search.numerics_verification import verify_numerics
    from amptune.search.request import place_of

    curves = place_of(None, target)[0] / "curves.jsonl"
    time = session.budget(budget_s)
    with progress_unless(quiet, time) as observer:
        look = verify_numerics(
            policy_file,
            target,
            budget=time,
            curves=curves,
            observer=observer,
            evaluator=session.evaluator,
            **options,
        )
    if not as_json:
        print_long_look(look, str(curves), sys.stdout)
    if as_json:  # last, so that stdout has this object or that of an error
        print_json("amptune.verify-numerics/1", {"file": policy, "curves": str(curves), **_as_long_data(look)})
    if look.interrupted:
        say("interrupted: this is what the finished runs say", err=True)
        return INTERRUPTED
    return 0 if look.agreement == "met" else DOES_NOT_HOLD


def _as_long_data(look: LongLook) -> dict[str, Any]:
    return {
        "holds": look.agreement == "met",
        "answer": look.agreement,
        "steps": look.steps_seen,
        "seeds": len(look.pairs),
        "interrupted": look.interrupted,
        "gaps": [gap.as_dict() for gap in look.gaps],
        "buffers": [{"path": one.path, "off": one.off, "apart": one.apart} for one in look.buffers],
        "findings": [finding.as_dict() for finding in look.findings],
    }


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
