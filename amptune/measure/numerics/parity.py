"""Trains shortly in FP32 and under a policy on the same batches, and compares the two.

Gradients are compared as sketches. A sketch holds, for each parameter's gradient, a fixed number of sums of its
elements under random signs. It is linear: the sketch of a difference is the difference of the sketches. It preserves
inner products, and therefore lengths, up to a relative error of sqrt(2 / columns) (Charikar, Chen, Farach-Colton 2002,
"Finding frequent items in data streams"; the AMS sketch of Alon, Matias, Szegedy 1996).
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from amptune.measure.bench.bench import Bench
from amptune.measure.bench.failures import NonFiniteError, TooSlowError, failure_of
from amptune.measure.numerics.batches import batches_of, fingerprint_of
from amptune.measure.numerics.short_training import Training
from amptune.measure.results.training_runs import (
    ROUNDING,
    BufferParity,
    Floats,
    Gradients,
    LossCurve,
    ModuleParity,
    Parity,
    Reference,
    Rounding,
    Run,
    Thoroughness,
)
from amptune.policy.settings import Policy

__all__ = ["compare", "judge", "make_reference"]

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
        broken = error.modules if isinstance(error, NonFiniteError) else _raised_in(error, bench.model)
        parity = Parity(failure=failure_of(error), broken=broken)
    if parity.failure is not None:
        bench.release()  # the traceback held tensors until now
    return replace(parity, seconds=time.perf_counter() - start_s)


def _raised_in(error: BaseException | None, model: torch.nn.Module) -> tuple[str, ...]:
    """Returns the path of the innermost module whose code raised the error; () if none did."""
    paths = {id(module): path for path, module in model.named_modules()}
    found: list[str] = []
    while error is not None:
        callers = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
        found += [paths[id(one)] for one in callers if id(one) in paths]
        error = error.__cause__
    return tuple(found[-1:])


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
    """Returns a function that changes every weight at random by this relative root mean square.

    It has a generator of its own: what the model draws afterwards is what it draws without the change.
    """
    generators: dict[torch.device, torch.Generator] = {}

    @torch.no_grad()
    def change(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                device = parameter.device
                generator = generators.setdefault(device, torch.Generator(device))
                noise = torch.randn(parameter.shape, generator=generator, device=device)
                parameter.mul_((1 + share * noise).to(parameter.dtype))

    return change


def _rounding_of(policy: Policy) -> Rounding:
    return "bf16" if policy.autocast == "bf16" else "fp16"


def compare(reference: Reference, run: Run, rounding: Rounding) -> Parity:
    """Compares a run with the reference. Both are finite; `rounding` is the coarsest rounding the policy does."""
    drift, share, below = _drift(reference, run.curve)
    return Parity(
        modules=tuple(_module_parities(reference, run.gradients, rounding)),
        spread=reference.spread,
        drift=drift,
        drift_share=share,
        below=below,
        buffers=tuple(_buffer_parities(reference, run.curve)),
        skipped_share=run.curve.skipped / max(1, len(run.curve.losses)),
        scale=run.curve.scale,
        evaluated=run.curve.evaluated,
        evaluated_fp32=reference.run.curve.evaluated,
    )


def _module_parities(reference: Reference, found: Gradients, rounding: Rounding) -> Iterator[ModuleParity]:
    """Yields the parity of each module that has a gradient in FP32."""
    own, rounded = reference.run.gradients, reference.rounded[rounding]
    whole = _mean_square(own.sketches)
    for path in dict.fromkeys(reference.module_of):
        parameters = [i for i, module in enumerate(reference.module_of) if module == path]
        columns = np.r_[tuple(reference.columns[i] for i in parameters)]
        fp32, theirs = own.sketches[:, columns], found.sketches[:, columns]
        size = _mean_square(fp32)
        if size == 0:
            continue
        itself = _mean_square(_difference(reference.reseeded.sketches[:, columns], fp32))
        lost = own.nonzero[:, parameters].sum() - found.nonzero[:, parameters].sum()
        yield ModuleParity(
            path=path,
            error=math.sqrt(max(0.0, _mean_square(theirs - fp32) - itself) / size),
            bias=_bias(_gram(theirs - fp32), _gram(fp32)),
            noise=math.sqrt(_spread(_gram(fp32)) / size),
            rounding=math.sqrt(_mean_square(_difference(rounded.sketches[:, columns], fp32)) / size),
            size=math.sqrt(_mean_square(theirs) / size),
            slope=float(np.vdot(theirs.astype(np.float64), fp32)) / (len(fp32) * size),
            vanished=max(0.0, float(lost) / max(1.0, float(own.nonzero[:, parameters].sum()))),
            share=math.sqrt(size / whole),
        )


def _difference(some: Floats, all_batches: Floats) -> Floats:
    return some - all_batches[: len(some)]


def _mean_square(rows: Floats) -> float:
    """Returns the mean squared length of the rows."""
    return float(np.mean(np.square(rows.astype(np.float64)).sum(axis=1)))


def _gram(rows: Floats) -> NDArray[np.float64]:
    """Returns the inner products of all pairs of rows."""
    wide = rows.astype(np.float64)
    return wide @ wide.T


def _bias(errors: NDArray[np.float64], gradients: NDArray[np.float64]) -> float:
    """Returns the length of the mean error over that of the mean gradient, from inner products over batches.

    A mean of few batches still contains part of the spread between batches. This part is subtracted from the error
    but not from the gradient: otherwise any error would look large beside a gradient whose mean is 0.
    """
    batches = len(gradients)
    error = max(0.0, float(errors.mean()) - _spread(errors) / batches)
    gradient = float(gradients.mean()) + _spread(gradients) / batches
    return math.sqrt(error / gradient) if gradient > 0 else 0.0


def _spread(gram: NDArray[np.float64]) -> float:
    """Returns the variance of the rows around their mean, summed over columns."""
    batches = len(gram)
    if batches < 2:
        return 0.0
    return max(0.0, float(np.mean(gram.diagonal()) - gram.mean()) * batches / (batches - 1))


# Floor for the yardstick, as a share of the loss: replicas may differ by less than this.
LEAST_DEVIATION = 0.005
# Floor for the loss level, as a share of the first loss: a loss may fall to almost 0.
LEAST_LEVEL = 0.02


def _drift(reference: Reference, curve: LossCurve) -> tuple[float, float, float]:
    """Returns the largest of any epoch: (above FP32, relative to the distance between the replicas; above FP32,
    relative to the loss; below FP32, relative to the distance between the replicas).
    """
    batches = reference.thoroughness.batches
    fp32 = _by_epoch(reference.run.curve.losses, batches)
    above = _by_epoch(curve.losses, batches) - fp32
    apart = [_by_epoch(replica.losses, batches) - fp32 for replica in reference.replicas]
    level = np.maximum(np.abs(fp32), max(LEAST_LEVEL * abs(reference.run.curve.losses[0]), 1e-30))
    own = math.sqrt(float(np.mean(np.square(np.array(apart) / level)))) if apart else 0.0
    share, yardstick = above / level, max(own, LEAST_DEVIATION)
    return float(share.max()) / yardstick, float(share.max()), max(0.0, float(-share.min())) / yardstick


def _buffer_parities(reference: Reference, curve: LossCurve) -> Iterator[BufferParity]:
    """Yields the buffers that training changes: they differ between FP32 and its replicas, or under the policy."""
    for name, own in reference.run.curve.buffers.items():
        found = curve.buffers.get(name)
        if found is None or found.shape != own.shape:
            continue
        others = [replica.buffers[name] for replica in reference.replicas if name in replica.buffers]
        apart = max((_distance(other, own) for other in others if other.shape == own.shape), default=0.0)
        off = _distance(found, own)
        if off or apart:
            size = _scale(name, reference.run.curve.buffers)
            yield BufferParity(path=name, off=off / size, apart=apart / size)


def _distance(one: Floats, other: Floats) -> float:
    """Returns the length of the difference; a mask's infinities, and NaN, differ from nothing equal."""
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    return float(np.linalg.norm(one[~same] - other[~same]))


def _scale(name: str, buffers: Mapping[str, Floats]) -> float:
    """Returns the length that a buffer's distances are relative to: its own, a running mean's standard deviation.

    BatchNorm subtracts a mean and divides by the deviation: behind a layer whose outputs have no mean, the mean is made
    of rounding errors and all the same harmless.
    """
    variance = buffers.get(f"{name.removesuffix('running_mean')}running_var") if name.endswith("running_mean") else None
    lengths = buffers[name] if variance is None else np.sqrt(np.maximum(variance, 0.0))
    return max(float(np.linalg.norm(lengths[np.isfinite(lengths)])), 1e-30)


def _by_epoch(losses: Sequence[float], batches: int) -> NDArray[np.float64]:
    """Returns the mean loss of each epoch: it covers all batches once, so the order of batches matters little."""
    count = max(1, len(losses) // batches)
    return np.array([np.mean(part) for part in np.array_split(np.array(losses), count)])
