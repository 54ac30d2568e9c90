"""Trains a case plainly and with recorded passes, and judges the difference.

It is the same, recorded or by itself in the end, as a finding says; it ended, so that it differed until a finding said
so; it is wrong if nothing said so, or raised. If plain training fails or is noisy, this says nothing about recordings.
"""

from __future__ import annotations

import gc
import math
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from amptune.policy.findings import Finding
from amptune.runtime.graphs.graphed_model import GraphedModel

from .case import Case, Training, Why

SAME, BY_ITSELF, ENDED, WRONG = "same (recorded)", "same (by itself)", "ended", "wrong"
RAISED, PLAIN_FAILS, NOISY = "raised", "plain fails", "noisy"

# Steps return values of the size of one, a loss for example; gradients of outputs are smaller.
LEAST_VALUE = 0.1
# Memory that a step leaves is filled with what would be seen, in blocks of these sizes.
BLOCKS, OF_EACH = (1, 16, 144, 512, 4096, 70_000), 6

Row = dict[str, Any]
Wrap = Callable[[nn.Module, Callable[[Finding], None]], GraphedModel]


@dataclass
class Outcome:
    """Values, weights and buffers of one training by step, and its last gradients by name."""

    values: list[Tensor] = field(default_factory=list)
    weights: list[list[Tensor]] = field(default_factory=list)
    buffers: list[list[Tensor]] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    findings: list[tuple[int, Finding]] = field(default_factory=list)
    made: int = 0
    error: str = ""


def row_of(
    case: Case, device: torch.device, wrap: Wrap = GraphedModel, begins: Callable[[], None] = lambda: None
) -> Row:
    """Trains the case twice; tells by `begins` that the plain training is over."""
    start_s = time.perf_counter()
    plain = trained(case, device, None)
    row: Row = {"name": case.name, "kind": case.kind}
    if plain.error:
        return {**row, "verdict": PLAIN_FAILS, "reason": plain.error, "seconds": 0.0}
    begins()
    graphed = trained(case, device, wrap)
    verdict, reason, worst = judged(plain, graphed, case.tolerance)
    if verdict in (ENDED, WRONG):
        own, where, _ = difference_of(plain, trained(case, device, None), case.tolerance)
        if own > case.tolerance:
            verdict, reason = NOISY, f"plain training differs from itself by {own:.2g} in {where}"
    seconds = round(time.perf_counter() - start_s, 2)
    return {**row, "verdict": verdict, "reason": reason, "worst": str(worst), "seconds": seconds}


def is_expected(row: Row, case: Case) -> bool:
    """Returns True if a recording did what the case tells of it."""
    why = case.why if row.get("device") != "cpu" else case.on_cpu or ""
    verdicts = {ENDED if case.ends else BY_ITSELF} if why else {SAME}
    if why == Why.DIFFERS and not case.ends:  # a device may be compared after it differed
        verdicts.add(ENDED)
    return bool(row["verdict"] in verdicts and why in row["reason"])


# --- training ------------------------------------------------------------------------------------------------------


def trained(case: Case, device: torch.device, graphed: Wrap | None) -> Outcome:
    outcome = Outcome()
    with contained(), ExitStack() as stack:
        _seed()
        wrapped: list[GraphedModel] = []
        training: Training | None = None

        def say(finding: Finding) -> None:
            outcome.findings.append((0 if training is None else training.number, finding))

        def wrap(model: nn.Module) -> nn.Module:
            if graphed is None:
                return model
            wrapped.append(graphed(model, say))
            return wrapped[-1]

        try:
            training = Training(case.model().to(device), wrap, device)
            stack.enter_context(training.undo)
            _seed()
            _train(case, training, outcome)
        except Exception as error:  # noqa: BLE001  # an error of either training is what is asked for
            failed_at = training.number if training else 0
            outcome.error = f"step {failed_at}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        outcome.made = sum(one.recordings.made for one in wrapped)
    if device.type == "cuda":
        gc.collect()
    return outcome


def _train(case: Case, training: Training, outcome: Outcome) -> None:
    for number in range(case.steps):
        training.number = number
        if case.event is not None and number in case.at:
            case.event(training)
        outcome.values.append(case.step(training).detach().clone().float())
        outcome.weights.append([one.detach().clone() for one in training.model.parameters()])
        outcome.buffers.append([one.detach().clone() for one in training.model.buffers()])
        # Takes memory that was freed meanwhile, so that a recording that still reads it sees what it should not.
        training.kept["filled"] = [torch.full((size,), 7.0, device=training.device) for size in BLOCKS * OF_EACH]
    named = training.model.named_parameters()
    outcome.gradients = {name: _fetched(one.grad) for name, one in named if one.grad is not None}
    outcome.values = [_fetched(one) for one in outcome.values]
    outcome.weights = [[_fetched(one) for one in weights] for weights in outcome.weights]
    outcome.buffers = [[_fetched(one) for one in buffers] for buffers in outcome.buffers]


def _fetched(tensor: Tensor) -> Tensor:
    """Copies to the CPU in FP64; waits for the device, and so raises what went wrong there."""
    return tensor.detach().to_dense().to("cpu", torch.float64)


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)


@contextmanager
def contained() -> Iterator[None]:
    """Puts back what a case may change in the process."""
    tables = [one for name, one in vars(torch_module).items() if name.startswith("_global_") and isinstance(one, dict)]
    before = [dict(table) for table in tables]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _set_flags()
        try:
            yield
        finally:
            for table, own in zip(tables, before, strict=True):
                table.clear()
                table.update(own)
            _set_flags()


def _set_flags() -> None:
    """Sets what is PyTorch's default, but for TF32 in convolutions, which would be a large rounding."""
    torch.backends.cuda.matmul.allow_tf32 = False
    cudnn = torch.backends.cudnn
    cudnn.allow_tf32 = cudnn.benchmark = cudnn.deterministic = False
    cudnn.enabled = True
    torch.use_deterministic_algorithms(mode=False)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_anomaly_enabled(False)
    torch.autograd.set_multithreading_enabled(True)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.set_stream(torch.cuda.default_stream())


# --- judging -------------------------------------------------------------------------------------------------------


def judged(plain: Outcome, graphed: Outcome, tolerance: float) -> tuple[str, str, float]:
    """Returns (verdict, reason, the largest relative difference)."""
    said = "; ".join(f"step {at}: {one.message}" for at, one in graphed.findings)
    if graphed.error:
        return RAISED, f"{graphed.error} (after {said or 'nothing said'})", math.inf
    worst, where, first = difference_of(plain, graphed, tolerance)
    said = said + (f" ({where} differs, from step {first})" if worst > tolerance else "")
    if worst > tolerance:
        last = max((at for at, _ in graphed.findings), default=-1)
        # A difference that begins after the last finding is another error than the one that was found.
        is_said = first is not None and first <= last
        return (ENDED if is_said else WRONG), said, worst
    if graphed.made and not graphed.findings:
        return SAME, f"{graphed.made} recordings", worst
    return BY_ITSELF, said or Why.SILENT, worst


def difference_of(plain: Outcome, other: Outcome, tolerance: float) -> tuple[float, str, int | None]:
    """Returns the largest relative difference, where it is, and the first step with one above the tolerance."""
    steps = [_step_difference(plain, other, step) for step in range(len(plain.values))]
    first = next((step for step, one in enumerate(steps) if not one <= tolerance), None)
    found = [(one, f"step {step}") for step, one in enumerate(steps)]
    if plain.gradients.keys() != other.gradients.keys():
        found.append((math.inf, f"gradients of {sorted(plain.gradients.keys() ^ other.gradients.keys())}"))
    # Gradients are of one batch, and weights that are a little off make them differ by more.
    scale = 10 * max(_size(plain.gradients.values()), 1e-6)
    found += [(_distance(other.gradients.get(name), one) / scale, name) for name, one in plain.gradients.items()]
    worst, where = max(found, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])
    return math.inf if math.isnan(worst) else worst, where, first


def _step_difference(plain: Outcome, other: Outcome, step: int) -> float:
    """Returns the largest of those in what the step returned, in buffers, and in weights relative to their change."""
    own, begin = plain.weights[step], plain.weights[0]
    alike = step > 0 and [one.shape for one in own] == [one.shape for one in begin]
    change = _size([a - b for a, b in zip(own, begin, strict=True)]) if alike else _size(own)
    # Small numbers may differ as if they were larger.
    scale = plain.values[step].abs().nan_to_num(0.0, 0.0) + LEAST_VALUE
    buffers = plain.buffers[step]
    return max(
        _distance(other.values[step] / scale, plain.values[step] / scale),
        math.hypot(*map(_distance, other.weights[step], own)) / max(change, 1e-6),
        *(_distance(a, b) / max(_size([b]), 1e-6) for a, b in zip(other.buffers[step], buffers, strict=True)),
    )


def _distance(tensor: Tensor | None, wanted: Tensor) -> float:
    """Returns the norm of the difference; what is not finite is to be the same in both."""
    if tensor is None or tensor.shape != wanted.shape:
        return math.inf
    same = (tensor == wanted) | (torch.isnan(tensor) & torch.isnan(wanted))
    return float((tensor - wanted)[~same].norm())


def _size(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(one[torch.isfinite(one)].square().sum()) for one in tensors))
