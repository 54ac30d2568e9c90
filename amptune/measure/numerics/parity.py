"""Trains shortly in FP32 and under a policy on the same batches, and compares the two."""

from __future__ import annotations

import inspect
import math
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from amptune.measure.bench.bench import Bench
from amptune.measure.bench.failures import NonFiniteError, TooSlowError, failure_of
from amptune.measure.numerics.batches import batches_of, fingerprint_of
from amptune.measure.numerics.casts import parameters_in_half
from amptune.measure.numerics.comparison import comparable, compare
from amptune.measure.numerics.short_training import Training, Weights
from amptune.measure.results.outcome import Failure
from amptune.measure.results.training_runs import (
    ROUNDING,
    THOROUGHNESS,
    Gradients,
    Parity,
    Reference,
    Rounding,
    Run,
    Thoroughness,
)
from amptune.policy.settings import Policy
from amptune.runtime.flags import set_fp32_math
from amptune.workload.user_errors import is_the_users

__all__ = ["judge", "make_reference"]

# Number of batches on which FP32's gradients are taken once more, to see what they differ by from themselves.
REPEATED_BATCHES = 2
# A loss curve that is further from FP32's, in the unit of the distance between FP32's replicas, is trained again in
# other data orders: of forty healthy models, five were that far off by chance.
SUSPICIOUS = 2.0


def make_reference(bench: Bench, policy: Policy, seconds: float) -> Reference:
    """Trains in the user's FP32 (`policy`), as thoroughly as fits into `seconds`; returns the reference.

    Raises any error of the workload, `NonFiniteError` if FP32 itself breaks, and `TooSlowError`.
    """
    _, spread = batches_of(bench, divided=True)
    with bench.staying_on_device():
        try:
            return _reference(bench, policy, seconds, divided=True)
        except Exception as error:
            if spread != "parts" or isinstance(error, TooSlowError):
                raise
            return _reference(bench, policy, seconds, divided=False)  # the workload may accept only whole batches


def _reference(bench: Bench, policy: Policy, seconds: float, *, divided: bool) -> Reference:
    start_s = time.perf_counter()
    rounded = parameters_in_half(bench, policy)
    with Training.on(bench, policy, divided=divided) as training:
        wanted = _affordable(seconds, training.step_s())
        training.feed.keep(wanted.batches)
        count = len(training.feed)
        gradients = _gradients_at((), training, rounded)
        begun = training.evaluated_at_start()
        curve, weights = training.curve(_order(count, wanted.epochs)), training.weights()
        reference = Reference(
            policy=policy,
            run=Run(gradients=gradients.own, curve=curve),
            rounded=gradients.rounded,
            repeated=gradients.repeated,
            replicas=tuple(
                training.curve(_order(count, wanted.epochs, seed), seed) for seed in range(1, 1 + wanted.replicas)
            ),
            names=training.sketcher.names,
            columns=training.sketcher.columns,
            spread=training.feed.spread,
            thoroughness=replace(wanted, batches=count),
            fingerprint=fingerprint_of(bench),
            evaluated_at_start=begun,
        )
        if comparable(reference) < len(reference.names) and time.perf_counter() - start_s < seconds:
            later = _with(_gradients_at(weights, training, rounded), reference)
            if comparable(later) > comparable(reference):
                reference = replace(later, after_training=True)
                _after_training[bench] = (reference, weights)
        return replace(reference, seconds=time.perf_counter() - start_s)


class _Gradients(NamedTuple):
    """FP32 gradients: of all batches; of all, from rounded weights; and of some, once more."""

    own: Gradients
    rounded: Mapping[Rounding, Gradients]
    repeated: Gradients


def _gradients_at(weights: Weights, training: Training, rounded: Collection[str]) -> _Gradients:
    """Returns the gradients at these weights, () for the initial ones; autocast rounds the parameters `rounded`.

    They are computed in IEEE FP32: TF32, which convolutions use on a GPU by default, rounds as coarsely as fp16.
    """
    gradients = partial(training.gradients, weights=weights)
    count = len(training.feed)
    undo = set_fp32_math("ieee")
    try:
        return _Gradients(
            own=gradients(count),
            rounded={kind: gradients(count, prepare=_rounder(share, rounded)) for kind, share in ROUNDING.items()},
            repeated=gradients(min(REPEATED_BATCHES, count)),
        )
    finally:
        undo()


def _with(gradients: _Gradients, reference: Reference) -> Reference:
    """Returns the reference with other gradients."""
    run = replace(reference.run, gradients=gradients.own)
    return replace(reference, run=run, rounded=gradients.rounded, repeated=gradients.repeated)


def judge(bench: Bench, policy: Policy, reference: Reference) -> Parity:
    """Trains under the policy on the reference's batches; an error becomes the `failure` of the result.

    What breaks in this procedure itself is a failure of kind "crash", and no fault of the policy's. If model() or
    batch(n) give other values in this process than in the reference's, it makes its own reference.
    """
    start_s = time.perf_counter()
    with bench.staying_on_device():
        parity = _judged(bench, policy, reference)
    if parity.failure is not None:
        bench.release()  # the traceback held tensors until now
    return replace(parity, seconds=time.perf_counter() - start_s)


def _judged(bench: Bench, policy: Policy, reference: Reference) -> Parity:
    try:
        reference, weights = _on_this_bench(reference, bench)
    except BaseException as error:  # noqa: BLE001  # the user's code may raise anything, SystemExit too
        traceback.print_exc()  # into the worker's log
        failure = failure_of(error)
        kind = failure.kind if failure.kind == "oom" else "crash"  # FP32's failure is not the policy's
        return Parity(failure=Failure(kind=kind, message=f"FP32, in the policy's process: {failure}"))
    try:
        return _parity(bench, policy, reference, weights)
    except BaseException as error:  # noqa: BLE001
        if not isinstance(error, NonFiniteError):
            traceback.print_exc()
        broken = error.modules if isinstance(error, NonFiniteError) else _raised_in(error, bench.model)
        return Parity(failure=_failure_of(error), broken=broken)


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


def _parity(bench: Bench, policy: Policy, reference: Reference, weights: Weights) -> Parity:
    epochs = reference.thoroughness.epochs
    with _training_as(reference, bench, policy) as training:
        count = len(training.feed)
        gradients = training.gradients(count, weights=weights)
        run = Run(gradients=gradients, curve=training.curve(_order(count, epochs)))
        parity = compare(reference, run, _rounding_of(policy))
        if max(parity.drift, parity.below) > SUSPICIOUS:
            seeds = range(1, 1 + len(reference.replicas))
            more = tuple(training.curve(_order(count, epochs, seed), seed) for seed in seeds)
            parity = compare(reference, replace(run, more=more), _rounding_of(policy))
        return parity


@contextmanager
def _training_as(reference: Reference, bench: Bench, policy: Policy) -> Iterator[Training]:
    """Yields training under the policy on the reference's batches."""
    with Training.on(bench, policy, divided=reference.spread == "parts") as training:
        training.feed.keep(reference.thoroughness.batches)
        yield training


# The reference made on a bench, and the weights that its gradients were taken at, if these are trained ones.
_after_training: WeakKeyDictionary[Bench, tuple[Reference, Weights]] = WeakKeyDictionary()


def _on_this_bench(reference: Reference, bench: Bench) -> tuple[Reference, Weights]:
    """Returns the reference as it holds in this process, and the weights that gradients are compared at; () for the
    initial ones.

    If these are trained ones and another process made the reference, they are trained once more, and FP32's gradients
    are taken again: on a GPU, the same training does not end at the same weights.
    """
    if not _alike(fingerprint_of(bench), reference.fingerprint):
        reference = make_reference(bench, reference.policy, reference.seconds)
    if not reference.after_training:
        return reference, ()
    own = _after_training.get(bench)
    if own is None or (own[0].policy, own[0].thoroughness) != (reference.policy, reference.thoroughness):
        rounded = parameters_in_half(bench, reference.policy)
        with _training_as(reference, bench, reference.policy) as training:
            training.curve(_order(len(training.feed), reference.thoroughness.epochs))
            weights = training.weights()
            own = (_with(_gradients_at(weights, training, rounded), reference), weights)
        _after_training[bench] = own
    return own


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


def _rounder(share: float, names: Collection[str]) -> Callable[[torch.nn.Module], None]:
    """Returns a function that changes the parameters of these names at random, by this relative root mean square.

    It has a generator of its own: what the model draws afterwards is what it draws without the change.
    """
    generators: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def change(model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name in names and parameter.is_floating_point():
                device = parameter.device
                generator = generators.setdefault(device, torch.Generator(device))
                noise = torch.randn(parameter.shape, generator=generator, device=device)
                parameter.mul_((1 + share * noise).to(parameter.dtype))

    return change


def _rounding_of(policy: Policy) -> Rounding:
    return "bf16" if policy.autocast == "bf16" else "fp16"
