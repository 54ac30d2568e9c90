"""The FP32 reference: short training in FP32, made once in a process and completed when more of it is needed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from amptune.changes.flags import set_fp32_math
from amptune.measure.bench.bench import Bench
from amptune.measure.bench.failures import TooSlowError
from amptune.measure.numerics.batches import batches_of, fingerprint_of
from amptune.measure.numerics.casts import parameters_in_half
from amptune.measure.numerics.comparison import comparable
from amptune.measure.numerics.short_training import Training, Weights
from amptune.measure.results.training_runs import (
    REPEATED_BATCHES,
    ROUNDING,
    THOROUGHNESS,
    Gradients,
    LossCurve,
    Reference,
    Rounding,
    Run,
    Thoroughness,
)
from amptune.policy.settings import Fp32Math, Policy

__all__ = ["completed", "made_again", "make_reference", "order_of", "training_as"]

# Gradients are taken so often: of half the models again after training, where more of them can be compared.
GRADIENTS_TIMES = 1.5


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
    in_half, unseen = parameters_in_half(bench, policy)
    with Training.on(bench, policy, divided=divided) as training:
        step_s = _step_seconds(training, policy.fp32_math)
        wanted = _affordable(seconds, time.perf_counter() - start_s, step_s)
        training.feed.keep(wanted.batches)
        count = len(training.feed)
        gradients = _gradients_at((), training, in_half)
        begun = training.evaluated_at_start()
        curve, weights = training.curve(order_of(count, wanted.epochs)), training.weights()
        reference = Reference(
            policy=policy,
            run=Run(gradients=gradients.own, curve=curve),
            rounded=gradients.rounded,
            repeated=gradients.repeated,
            replicas=(),
            names=training.sketcher.names,
            columns=training.sketcher.columns,
            spread=training.feed.spread,
            thoroughness=replace(wanted, batches=count),
            fingerprint=fingerprint_of(bench),
            evaluated_at_start=begun,
            in_half=tuple(in_half),
            all_rounded_because=unseen,
        )
        at: Weights = ()
        if comparable(reference) < len(reference.names) and time.perf_counter() - start_s < seconds:
            later = _with(_gradients_at(weights, training, in_half), reference)
            if comparable(later) > comparable(reference):
                reference, at = replace(later, after_training=True), weights
        reference = replace(reference, seconds=time.perf_counter() - start_s)
        _known[bench] = reference, at
        return reference


class _Gradients(NamedTuple):
    """FP32 gradients: of all batches; of all, from weights rounded to bf16; and of some, once more."""

    own: Gradients
    rounded: Mapping[Rounding, Gradients]
    repeated: Gradients


def _gradients_at(weights: Weights, training: Training, in_half: Collection[str]) -> _Gradients:
    """Returns the gradients at these weights, () for the initial ones; autocast rounds the parameters `in_half`."""
    count = len(training.feed)
    with _ieee():
        return _Gradients(
            own=training.gradients(count, weights=weights),
            rounded={"bf16": _rounded_gradients(weights, training, in_half, "bf16")},
            repeated=training.gradients(min(REPEATED_BATCHES, count), weights=weights),
        )


def _rounded_gradients(weights: Weights, training: Training, in_half: Collection[str], kind: Rounding) -> Gradients:
    with _ieee():
        return training.gradients(len(training.feed), weights=weights, prepare=_rounder(ROUNDING[kind], in_half))


@contextmanager
def _ieee() -> Iterator[None]:
    """Computes in IEEE FP32: TF32, which convolutions use on a GPU by default, rounds as coarsely as fp16."""
    undo = set_fp32_math("ieee")
    try:
        yield
    finally:
        undo()


def _with(gradients: _Gradients, reference: Reference) -> Reference:
    """Returns the reference with other gradients."""
    run = replace(reference.run, gradients=gradients.own)
    return replace(reference, run=run, rounded=gradients.rounded, repeated=gradients.repeated)


@contextmanager
def training_as(reference: Reference, bench: Bench, policy: Policy) -> Iterator[Training]:
    """Yields training under the policy on the reference's batches."""
    with Training.on(bench, policy, divided=reference.spread == "parts") as training:
        training.feed.keep(reference.thoroughness.batches)
        yield training


# The reference as each bench knows it by now, and the weights of its gradients; () for the initial ones.
_known: WeakKeyDictionary[Bench, tuple[Reference, Weights]] = WeakKeyDictionary()


def completed(reference: Reference, bench: Bench, rounding: Rounding, *, replicas: int) -> tuple[Reference, Weights]:
    """Returns the reference as it holds in this process, with what it lacked, and the weights of its gradients.

    It has so many `replicas` at least, and no more than its thoroughness wants.
    If these are trained ones and another process made the reference, they are trained once more, and FP32's gradients
    are taken again: on a GPU, the same training does not end at the same weights.
    """
    if not _alike(fingerprint_of(bench), reference.fingerprint):
        reference = make_reference(bench, reference.policy, reference.seconds)
    own, weights = _known.get(bench, (None, ()))
    is_known = own is not None and _is_the_same(own, reference)
    reference, weights = (own, weights) if own is not None and is_known else (reference, ())
    wanted = reference.thoroughness
    lacking = range(1 + len(reference.replicas), 1 + min(replicas, wanted.replicas))
    if (reference.after_training and not is_known) or rounding not in reference.rounded or lacking:
        with training_as(reference, bench, reference.policy) as training:
            count = len(training.feed)
            if reference.after_training and not is_known:
                training.curve(order_of(count, wanted.epochs))
                weights = training.weights()
                reference = _with(_gradients_at(weights, training, reference.in_half), reference)
            if rounding not in reference.rounded:
                rounded = _rounded_gradients(weights, training, reference.in_half, rounding)
                reference = replace(reference, rounded={**reference.rounded, rounding: rounded})
            more = tuple(_curve(training, wanted.epochs, seed) for seed in lacking)
            reference = replace(reference, replicas=(*reference.replicas, *more))
    _known[bench] = reference, weights
    return reference, weights


def made_again(reference: Reference, bench: Bench, rounding: Rounding) -> tuple[Reference, Weights]:
    """Returns a reference with other data orders and random numbers, and the weights of its gradients."""
    epochs, first = reference.thoroughness.epochs, 1 + reference.thoroughness.replicas
    with training_as(reference, bench, reference.policy) as training:
        curve = _curve(training, epochs, first)
        weights = training.weights() if reference.after_training else ()
        gradients = _gradients_at(weights, training, reference.in_half)
        if rounding not in gradients.rounded:
            more = {rounding: _rounded_gradients(weights, training, reference.in_half, rounding)}
            gradients = gradients._replace(rounded=more)
        replicas = tuple(_curve(training, epochs, seed) for seed in range(first + 1, 2 * first))
    run = Run(gradients=gradients.own, curve=curve)
    return _with(gradients, replace(reference, run=run, replicas=replicas, seed=first)), weights


def _curve(training: Training, epochs: int, seed: int) -> LossCurve:
    return training.curve(order_of(len(training.feed), epochs, seed), seed)


def _is_the_same(own: Reference, other: Reference) -> bool:
    return _alike(own.fingerprint, other.fingerprint) and all(
        getattr(own, name) == getattr(other, name) for name in ("policy", "thoroughness", "after_training")
    )


def _alike(a: Sequence[float], b: Sequence[float]) -> bool:
    """Returns True if the fingerprints agree; NaN equals NaN, because a batch may hold it in every process."""
    same = (math.isclose(x, y, rel_tol=1e-6) or (math.isnan(x) and math.isnan(y)) for x, y in zip(a, b, strict=False))
    return len(a) == len(b) and all(same)


def order_of(count: int, epochs: int, seed: int = 0) -> list[int]:
    """Returns the order of batches: each once per epoch; in random order, unless the seed is 0."""
    if not seed:
        return list(range(count)) * epochs
    random = np.random.default_rng(seed)
    return [int(i) for _ in range(epochs) for i in random.permutation(count)]


class _StepSeconds(NamedTuple):
    """The seconds of a step, and of one that computes in IEEE FP32, as for gradients: convolutions take much longer."""

    own: float
    ieee: float


def _step_seconds(training: Training, fp32_math: Fp32Math) -> _StepSeconds:
    own, bench = training.step_s(), training.bench
    convolves = any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in bench.model.modules())
    if bench.device.type != "cuda" or not (convolves or fp32_math == "tf32"):
        return _StepSeconds(own=own, ieee=own)
    with _ieee():
        return _StepSeconds(own=own, ieee=training.step_s())


def _affordable(seconds: float, spent_s: float, step_s: _StepSeconds) -> Thoroughness:
    """Returns the best thoroughness that fits into the time that is not spent yet. Raises `TooSlowError`."""

    def cost_s(one: Thoroughness, times: float) -> float:
        return times * one.gradient_steps * step_s.ieee + one.curve_steps * step_s.own

    fits = (one for one in THOROUGHNESS if spent_s + cost_s(one, GRADIENTS_TIMES) <= seconds)
    least = THOROUGHNESS[-1]
    least_s = cost_s(least, 1)
    if least_s > 2 * seconds:
        raise TooSlowError(
            f"the numerics check needs {least_s:.0f} s ({step_s.ieee:.2g} s a step), and only {seconds:.0f} s are "
            "left for it; raise --budget"
        )
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
