"""Judging of numerics: trains shortly in FP32 and under a policy on the same batches, and compares them."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from amptune.measure.batches import batches_of, fingerprint_of
from amptune.measure.bench import Bench
from amptune.measure.comparing import compare
from amptune.measure.failing import NonFiniteError, TooSlowError, failure_of
from amptune.measure.numerics import ROUNDING, Parity, Reference, Rounding, Run, Thoroughness
from amptune.measure.training import Training
from amptune.policy.settings import Policy

__all__ = ["judge", "make_reference"]

# Number of batches on which FP32 is compared with itself (weights rounded, another seed).
SELF_BATCHES = 2
# The first entry that fits into the time is used. If the last entry needs more than twice the time, nothing is judged.
THOROUGHNESS = (
    Thoroughness(batches=8, epochs=4, replicas=2),
    Thoroughness(batches=6, epochs=3, replicas=2),
    Thoroughness(batches=4, epochs=3, replicas=2),
    Thoroughness(batches=4, epochs=2, replicas=1),
    Thoroughness(batches=3, epochs=1, replicas=1),
)


def make_reference(bench: Bench, policy: Policy, seconds: float) -> Reference:
    """Trains in the user's FP32 (`policy`), as thoroughly as fits into `seconds`; returns the reference.

    Raises any error of the workload, `NonFiniteError` if FP32 itself breaks, and `TooSlowError`.
    """
    _, spread = batches_of(bench, divided=True)
    try:
        return _reference(bench, policy, seconds, divided=True)
    except Exception as error:
        if spread != "parts" or isinstance(error, TooSlowError):
            raise
        return _reference(bench, policy, seconds, divided=False)  # the workload may accept only whole batches


def _reference(bench: Bench, policy: Policy, seconds: float, *, divided: bool) -> Reference:
    start_s = time.perf_counter()
    with Training.on(bench, policy, divided=divided) as training:
        wanted = _affordable(seconds, training.step_s())
        training.feed.keep(wanted.batches)
        count = len(training.feed)
        run = Run(gradients=training.gradients(count), curve=training.curve(_order(count, wanted.epochs)))
        some = min(SELF_BATCHES, count)
        return Reference(
            policy=policy,
            run=run,
            rounded={kind: training.gradients(some, prepare=_rounder(share)) for kind, share in ROUNDING.items()},
            reseeded=training.gradients(some, seed=1),
            replicas=tuple(
                training.curve(_order(count, wanted.epochs, seed), seed) for seed in range(1, 1 + wanted.replicas)
            ),
            columns=training.sketcher.columns,
            module_of=training.sketcher.module_of,
            spread=training.feed.spread,
            thoroughness=replace(wanted, batches=count),
            fingerprint=fingerprint_of(bench),
            seconds=time.perf_counter() - start_s,
        )


def judge(bench: Bench, policy: Policy, reference: Reference) -> Parity:
    """Trains under the policy on the reference's batches; an error becomes the `failure` of the result.

    If model() or batch(n) give other values in this process than in the reference's, it makes its own reference.
    """
    start_s = time.perf_counter()
    try:
        parity = _parity(bench, policy, reference)
    except BaseException as error:  # noqa: BLE001  # the user's code may raise anything, SystemExit too
        if not isinstance(error, NonFiniteError):
            traceback.print_exc()  # into the worker's log
        broken = error.modules if isinstance(error, NonFiniteError) else ()
        parity = Parity(failure=failure_of(error), broken=broken)
    if parity.failure is not None:
        bench.release()  # the traceback held tensors until now
    return replace(parity, seconds=time.perf_counter() - start_s)


def _parity(bench: Bench, policy: Policy, reference: Reference) -> Parity:
    if not _alike(fingerprint_of(bench), reference.fingerprint):
        reference = make_reference(bench, reference.policy, reference.seconds)
    with Training.on(bench, policy, divided=reference.spread == "parts") as training:
        training.feed.keep(reference.thoroughness.batches)
        count = len(training.feed)
        gradients = training.gradients(count)
        run = Run(gradients=gradients, curve=training.curve(_order(count, reference.thoroughness.epochs)))
    return compare(reference, run, _rounding_of(policy))


def _alike(a: Sequence[float], b: Sequence[float]) -> bool:
    """Returns True if the fingerprints agree; NaN equals NaN, because a batch may hold it in every process."""
    same = (math.isclose(x, y, rel_tol=1e-6) or (math.isnan(x) and math.isnan(y)) for x, y in zip(a, b, strict=False))
    return len(a) == len(b) and all(same)


def _order(count: int, epochs: int, seed: int | None = None) -> list[int]:
    """Returns the order of batches: each once per epoch; with a seed, in random order."""
    if seed is None:
        return list(range(count)) * epochs
    random = np.random.default_rng(seed)
    return [int(i) for _ in range(epochs) for i in random.permutation(count)]


def _affordable(seconds: float, step_s: float) -> Thoroughness:
    """Returns the best thoroughness that fits into the time. Raises `TooSlowError`."""
    fits = (one for one in THOROUGHNESS if one.reference_steps * step_s <= seconds)
    least = THOROUGHNESS[-1]
    least_s = least.reference_steps * step_s
    if least_s > 2 * seconds:
        raise TooSlowError(f"a step takes {step_s:.2g} s, so it takes {least_s:.0f} s, and {seconds:.0f} s are for it")
    return next(fits, least)


def _rounder(share: float) -> Callable[[torch.nn.Module], None]:
    """Returns a function that changes every weight at random by this relative root mean square."""

    @torch.no_grad()
    def change(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + share * torch.randn_like(parameter))

    return change


def _rounding_of(policy: Policy) -> Rounding:
    return "bf16" if policy.autocast == "bf16" else "fp16"
