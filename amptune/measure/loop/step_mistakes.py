"""Mistakes in a workload's steps, told before time is spent on measuring."""

from __future__ import annotations

import math
import warnings

import torch

from amptune.errors import TargetError
from amptune.measure.bench.bench import Bench
from amptune.measure.bench.failures import failure_of
from amptune.measure.modules.inspection import MOST_MICRO_BATCHES
from amptune.policy.findings import Finding
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.runtime.guard.misuse import PolicyMisuseWarning

__all__ = ["batches_that_go_on", "mistakes_in_step", "mistakes_under"]

# A loop without a loss scaler is noticed in its second optimizer step.
WATCHED_STEPS = 2
# This one harms training in FP32 too, which policies are compared with: none would be noticed to do worse.
_IN_ANY_PRECISION = "stepped-twice"
_WITHOUT_AUTOCAST = Finding(
    code="autocast-unused",
    message="step(…) does not call tuned.autocast(), so the autocast of a policy changes nothing in it: run the "
    "forward pass and the loss in `with tuned.autocast():`",
)


def mistakes_in_step(bench: Bench) -> tuple[Finding, ...]:
    """Returns what the guard finds in the workload's own step; nothing for one that amptune or a script makes.

    Autocast shows the most: fp16, since it scales the loss; bf16 on a CPU, where fp16 may take minutes. If the step
    raises an error there, as a scaler does that steps twice, FP32 is tried: its error is reported by the trials.
    Raises `TargetError` if gradients are applied twice.
    """
    if bench.workload.step is None or bench.workload.in_place:
        return ()
    for policy in (amp_recipe("bf16" if bench.device.type == "cpu" else "fp16"), STOCK):
        try:
            found = mistakes_under(policy, bench)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the user's code may raise anything
            print(f"the guarded step failed under {policy}: {failure_of(error)}", flush=True)  # noqa: T201  # the log
            continue
        repeated = next((finding for finding in found if finding.code == _IN_ANY_PRECISION), None)
        if repeated is not None:
            raise TargetError(f"step(…): {repeated}")
        return found
    return ()


_GOES_ON = Finding(
    code="batches-go-on",
    message="the script draws its batches by itself and goes on with them, so that policies are measured on different "
    "ones: their numerics are judged less sharply",
)


def batches_that_go_on(bench: Bench) -> tuple[Finding, ...]:
    """Returns a finding on a script without a loader whose second training from one state has other losses.

    The first step of each does not count: its batch may have been drawn before.
    """
    if not bench.workload.in_place or bench.workload.loader is not None:
        return ()
    losses: list[torch.Tensor] = []
    try:
        with bench.on_device(STOCK) as (_, stepper):
            for _ in range(2):
                bench.restart()
                losses.append(torch.stack([stepper() for _ in range(2 * WATCHED_STEPS)])[1:])
    except (Exception, SystemExit):  # noqa: BLE001  # which the trials will tell
        return ()
    finally:
        bench.release()
    half_the_digits = math.sqrt(torch.finfo(torch.float32).eps)
    return () if torch.allclose(losses[0], losses[1], rtol=half_the_digits) else (_GOES_ON,)


def mistakes_under(policy: Policy, bench: Bench) -> tuple[Finding, ...]:
    """Returns what the guard finds in a few steps under the policy, and whether they leave out the policy's autocast.

    Raises whatever the workload raises.
    """
    try:
        with warnings.catch_warnings(), bench.on_device(policy, guarded=True) as (tuned, stepper):
            warnings.simplefilter("ignore", PolicyMisuseWarning)  # they are reported as findings
            guard = tuned.guard
            assert guard is not None  # noqa: S101  # it was asked for
            for _ in range(MOST_MICRO_BATCHES):
                if guard.step_watch.most_steps >= WATCHED_STEPS:
                    break
                stepper()
            found = [finding for finding in guard.findings if finding.code != _WITHOUT_AUTOCAST.code]
            is_unused = policy.autocast != "off" and not guard.step_watch.autocast_was_used
            return (*found, *((_WITHOUT_AUTOCAST,) if is_unused else ()))
    finally:
        bench.release()
