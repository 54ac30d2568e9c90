"""Trains shortly in FP32 and under a policy on the same batches, and compares the two."""

from __future__ import annotations

import inspect
import math
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from amptune.measure.bench.bench import Bench
from amptune.measure.bench.failures import NonFiniteError, failure_of
from amptune.measure.numerics.comparison import compare
from amptune.measure.numerics.limits import buffer_limit, is_near_limits
from amptune.measure.numerics.reference import completed, made_again, order_of, training_as
from amptune.measure.numerics.short_training import Weights
from amptune.measure.results.outcome import Failure
from amptune.measure.results.training_runs import (
    Parity,
    Reference,
    Rounding,
    Run,
)
from amptune.policy.settings import Policy
from amptune.workload.user_errors import is_the_users

__all__ = ["judge"]

# A loss curve that is further from FP32's, in the unit of the distance between FP32's replicas, is trained again in
# other data orders: of forty healthy models, five were that far off by chance.
SUSPICIOUS = 2.0


def judge(bench: Bench, policy: Policy, reference: Reference, limit_s: float = math.inf) -> Parity:
    """Trains under the policy on the reference's batches; an error becomes the `failure` of the result.

    What breaks in this procedure itself is a failure of kind "crash", and no fault of the policy's. If model() or
    batch(n) give other values in this process than in the reference's, it makes its own reference. What is near the
    limits is looked at a second time, with other orders and random numbers, if `limit_s` has time for that.
    """
    start_s = time.perf_counter()
    with bench.staying_on_device():
        parity, reference = _first_look(bench, policy, reference)
        is_near = is_near_limits(parity, bench.workload.evaluate_tolerance)
        # FP32's part of it takes up to three times as long as the reference: its replicas are trained too
        until_s = 2 * (time.perf_counter() - start_s) + 3 * reference.seconds
        if is_near and until_s < limit_s:
            parity = _second_look(bench, policy, reference, parity)
    if parity.failure is not None:
        bench.release()  # the traceback held tensors until now
    own_step = bench.workload.loss is None
    return replace(parity, own_step=own_step, seconds=time.perf_counter() - start_s)


def _first_look(bench: Bench, policy: Policy, reference: Reference) -> tuple[Parity, Reference]:
    """Judges with no more replicas of FP32 than it needs: they take most of the time, and only widen what is allowed.

    A graph would be compiled again for each, and gets all at once. Returns the reference as it is in this process too.
    """
    run, rounding, most = None, _rounding_of(policy), reference.thoroughness.replicas
    replicas = 0 if policy.compile == "off" else most
    while True:
        here = _of_fp32(partial(completed, reference, bench, rounding, replicas=replicas))
        if isinstance(here, Failure):
            return Parity(failure=here), reference
        is_the_same = here[0].fingerprint == reference.fingerprint
        reference = here[0]
        parity, run = _look(bench, policy, *here, run if is_the_same else None)
        replicas = len(reference.replicas) + 1
        if parity.failure is not None or replicas > most or not _is_doubtful(parity):
            return parity, reference


def _second_look(bench: Bench, policy: Policy, reference: Reference, first: Parity) -> Parity:
    """Returns the first look with a second one: a figure that exceeds its limit by chance does not do so twice."""
    here = _of_fp32(partial(made_again, reference, bench, _rounding_of(policy)))
    if isinstance(here, Failure):
        return first
    again, _ = _look(bench, policy, *here, None)
    if again.failure is not None:
        return again if again.failure.kind == "nonfinite" else first
    return replace(first, again=again)


def _of_fp32(make: Callable[[], tuple[Reference, Weights]]) -> tuple[Reference, Weights] | Failure:
    """Returns the reference; its failure is not the policy's."""
    try:
        return make()
    except BaseException as error:  # noqa: BLE001  # the user's code may raise anything, SystemExit too
        traceback.print_exc()  # into the worker's log
        failure = failure_of(error)
        kind = failure.kind if failure.kind == "oom" else "crash"
        return Failure(kind=kind, message=f"FP32, in the policy's process: {failure}")


def _look(
    bench: Bench, policy: Policy, reference: Reference, weights: Weights, run: Run | None
) -> tuple[Parity, Run | None]:
    """Returns the comparison, and the policy's run, which is trained unless it is known; None if it broke."""
    try:
        return _parity(bench, policy, reference, weights, run)
    except BaseException as error:  # noqa: BLE001
        if not isinstance(error, NonFiniteError):
            traceback.print_exc()
        broken = error.modules if isinstance(error, NonFiniteError) else _raised_in(error, bench.model)
        return Parity(failure=_failure_of(error), broken=broken), None


def _is_doubtful(parity: Parity) -> bool:
    return _is_far_off(parity) or any(one.off > buffer_limit(one) for one in parity.buffers)


def _is_far_off(parity: Parity) -> bool:
    return max(parity.drift, parity.below) > SUSPICIOUS


def _failure_of(error: BaseException) -> Failure:
    failure = failure_of(error)
    if failure.kind not in ("error", "unsupported") or not _is_our_own(error):
        return failure
    return Failure(kind="crash", message=f"the numerics check itself broke: {failure}")


def _is_our_own(error: BaseException) -> bool:
    """Returns True if the innermost frame that is amptune's or the user's belongs to this room's procedure.

    The modes that change what a function draws stand around each call of the user's; the bench does what it is told.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename == _BENCH or frame.name == "__torch_function__":
            continue
        if is_the_users(frame.filename) or Path(frame.filename).is_relative_to(_PACKAGE):
            return Path(frame.filename).parent == _PROCEDURE
    return False


_PROCEDURE, _BENCH = Path(__file__).parent, inspect.getfile(Bench)
_PACKAGE = _PROCEDURE.parents[1]


def _raised_in(error: BaseException | None, model: torch.nn.Module) -> tuple[str, ...]:
    """Returns the path of the innermost module whose code raised the error; () if none did."""
    paths = {id(module): path for path, module in model.named_modules()}
    found: list[str] = []
    while error is not None:
        callers = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
        found += [paths[id(one)] for one in callers if id(one) in paths]
        error = error.__cause__
    return tuple(found[-1:])


def _parity(
    bench: Bench, policy: Policy, reference: Reference, weights: Weights, run: Run | None
) -> tuple[Parity, Run]:
    if run is not None:
        parity = compare(reference, run, _rounding_of(policy))
        if not _is_far_off(parity):
            return parity, run
    epochs = reference.thoroughness.epochs
    with training_as(reference, bench, policy) as training:
        count = len(training.feed)
        if run is None:
            gradients = training.gradients(count, weights=weights)
            curve = training.curve(order_of(count, epochs, reference.seed), reference.seed)
            run = Run(gradients=gradients, curve=curve)
            parity = compare(reference, run, _rounding_of(policy))
        if _is_far_off(parity) and len(reference.replicas) == reference.thoroughness.replicas:
            seeds = range(reference.seed + 1, reference.seed + 1 + len(reference.replicas))
            run = replace(run, more=tuple(training.curve(order_of(count, epochs, seed), seed) for seed in seeds))
            parity = compare(reference, run, _rounding_of(policy))
        return parity, run


def _rounding_of(policy: Policy) -> Rounding:
    return "bf16" if policy.autocast == "bf16" else "fp16"
