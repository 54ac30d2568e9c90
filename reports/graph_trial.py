"""One case of `graph_cases.py`: trained plainly and with recorded CUDA graphs, and the verdict on the difference."""

from __future__ import annotations

import gc
import math
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from graph_models import Case
from graph_models.case import Training
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from amptune.policy.findings import Finding
from amptune.runtime.graphs.graphed_model import GraphedModel

SAME, BY_ITSELF, ENDED, WRONG = "same (recorded)", "same (by itself)", "ended", "wrong"
RAISED, HUNG, CRASHED, PLAIN_FAILS, NOISY = "raised", "hung", "crashed", "plain fails", "noisy"
VERDICTS = (SAME, BY_ITSELF, ENDED, WRONG, RAISED, HUNG, CRASHED, PLAIN_FAILS, NOISY)

# Tensors that hardly change are held against this share of what all change.
LEAST_SHARE = 0.03
# What a step returns is of the size of one, a loss for example; gradients of outputs are smaller.
LEAST_VALUE = 0.1
# Memory that a step leaves is filled with what would be seen, in blocks of these sizes.
BLOCKS, OF_EACH = (1, 16, 144, 512, 4096, 70_000), 6

Row = dict[str, Any]


@dataclass
class Outcome:
    """What one training gave: per step what it returned and its weights; at the end all tensors by name."""

    values: list[Tensor] = field(default_factory=list)
    weights: list[list[Tensor]] = field(default_factory=list)
    buffers: list[list[Tensor]] = field(default_factory=list)
    final: dict[str, Tensor] = field(default_factory=dict)
    findings: list[tuple[int, Finding]] = field(default_factory=list)
    made: int = 0
    live: int = 0
    error: str = ""
    failed_at: int | None = None


def row_of(case: Case, device: torch.device, begins: Callable[[], None]) -> Row:
    """Trains the case twice; tells by `begins` that the plain training is over."""
    start_s = time.perf_counter()
    plain = trained(case, device, graphs=False)
    row: Row = {"name": case.name, "class": case.group}
    if plain.error:
        return {**row, "verdict": PLAIN_FAILS, "reason": plain.error, "seconds": _since(start_s)}
    begins()
    graphed = trained(case, device, graphs=True)
    verdict, reason, difference = judged(plain, graphed, case.tolerance)
    if verdict in (ENDED, WRONG):
        again = trained(case, device, graphs=False)
        own = difference_of(plain, again, case.tolerance)
        if own.worst > case.tolerance:
            verdict, reason = NOISY, f"plain training differs from itself by {own.worst:.2g} in {own.where}"
    return {
        **row,
        "verdict": verdict,
        "reason": reason,
        "worst": difference.worst if math.isfinite(difference.worst) else str(difference.worst),
        "where": difference.where,
        "differs_from_step": difference.step,
        "findings": [{"step": at, "code": one.code, "message": one.message} for at, one in graphed.findings],
        "made": graphed.made,
        "live": graphed.live,
        "seconds": _since(start_s),
    }


def _since(start_s: float) -> float:
    return round(time.perf_counter() - start_s, 2)


# --- training ------------------------------------------------------------------------------------------------------


def trained(case: Case, device: torch.device, *, graphs: bool) -> Outcome:
    outcome = Outcome()
    with contained(), ExitStack() as stack:
        _seed()
        wrapped: list[GraphedModel] = []
        training: Training | None = None

        def say(finding: Finding) -> None:
            outcome.findings.append((0 if training is None else training.number, finding))

        def wrap(model: nn.Module) -> nn.Module:
            if not graphs:
                return model
            wrapped.append(_graphed(model, say, device))
            return wrapped[-1]

        try:
            model = case.model()
            training = Training(model.to(device) if case.moved else model, wrap, device)
            stack.enter_context(training.undo)
            _seed()
            _train(case, training, outcome)
            outcome.final = dict(_tensors_of(training.model))
            _bring(outcome)
        except Exception as error:  # noqa: BLE001  # an error of either training is what is asked for
            outcome.error = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            outcome.failed_at = training.number if training else None
        outcome.made = sum(one.recordings.made for one in wrapped)
        outcome.live = sum(len(one.recordings) for one in wrapped)
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
        training.kept["filled"] = _filled_blocks(training.device)


def _filled_blocks(device: torch.device) -> list[Tensor]:
    """Takes memory that was freed meanwhile, so that a recording that still reads it sees what it should not."""
    return [torch.full((size,), 7.0, device=device, dtype=torch.float32) for size in BLOCKS for _ in range(OF_EACH)]


def _graphed(model: nn.Module, say: Callable[[Finding], None], device: torch.device) -> GraphedModel:
    if device.type == "cuda":
        return GraphedModel(model, say)
    tests = str(Path(__file__).resolve().parent.parent / "tests" / "runtime")
    if tests not in sys.path:
        sys.path.append(tests)
    from taped import TapeRecorder  # a recorder for machines without a GPU

    return GraphedModel(model, say, recorder=TapeRecorder, device_type="cpu")


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
        if parameter.grad is not None:
            yield f"{name}.grad", parameter.grad.detach()
    yield from ((name, buffer.detach()) for name, buffer in model.named_buffers())


def _bring(outcome: Outcome) -> None:
    """Copies all to the CPU in FP64; waits for the device, and so raises what went wrong there."""

    def fetched(tensor: Tensor) -> Tensor:
        dense = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        wide = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
        return wide.detach().to("cpu", torch.float64)

    outcome.values = [fetched(one) for one in outcome.values]
    outcome.weights = [[fetched(one) for one in weights] for weights in outcome.weights]
    outcome.buffers = [[fetched(one) for one in buffers] for buffers in outcome.buffers]
    outcome.final = {name: fetched(one) for name, one in outcome.final.items()}


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(0)


@contextmanager
def contained() -> Iterator[None]:
    """Puts back what a case may change in the process."""
    hooks = {name: value for name, value in vars(torch_module).items() if _is_table(name, value)}
    before = {name: dict(value) for name, value in hooks.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _set_flags()
        try:
            yield
        finally:
            for name, table in hooks.items():
                table.clear()
                table.update(before[name])
            _set_flags()


def _is_table(name: str, value: Any) -> bool:
    return name.startswith("_global_") and isinstance(value, dict)


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
    for enable in ("flash", "mem_efficient", "math", "cudnn"):
        with suppress(AttributeError):
            getattr(torch.backends.cuda, f"enable_{enable}_sdp")(True)
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.set_stream(torch.cuda.default_stream())


# --- judging -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The largest relative difference, where it is, and the first step with one above the tolerance."""

    worst: float
    where: str
    step: int | None


def judged(plain: Outcome, graphed: Outcome, tolerance: float) -> tuple[str, str, Difference]:
    """Returns (verdict, reason, the difference)."""
    said = "; ".join(f"step {at}: {one.message}" for at, one in graphed.findings)
    if graphed.error:
        reason = f"step {graphed.failed_at}: {graphed.error}" + (f" (after {said})" if said else "")
        return RAISED, reason, Difference(math.inf, "", graphed.failed_at)
    difference = difference_of(plain, graphed, tolerance)
    if difference.worst > tolerance:
        last = max((at for at, _ in graphed.findings), default=-1)
        # What differs only after all was said is another error than that which was said.
        is_said = difference.step is not None and difference.step <= last
        return (ENDED if is_said else WRONG), said, difference
    if graphed.made and not graphed.findings:
        return SAME, f"{graphed.made} recordings, {graphed.live} in use", difference
    return BY_ITSELF, said or "nothing was recorded, and no finding says why", difference


def difference_of(plain: Outcome, other: Outcome, tolerance: float) -> Difference:
    steps = [_step_difference(plain, other, step) for step in range(len(plain.values))]
    first = next((step for step, one in enumerate(steps) if not one <= tolerance), None)
    found = [(one, f"step {step}") for step, one in enumerate(steps)]
    found += [(one, name) for name, one in _final_differences(plain, other)]
    worst, where = max(found, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])
    return Difference(math.inf if math.isnan(worst) else worst, where, first)


def _step_difference(plain: Outcome, other: Outcome, step: int) -> float:
    """Returns the largest of those in what the step returned, in buffers, and in weights relative to their change."""
    values = _relative_to_each(other.values[step], plain.values[step])
    own, others, begin = plain.weights[step], other.weights[step], plain.weights[0]
    if [one.shape for one in own] != [one.shape for one in others]:
        return math.inf
    alike = step > 0 and [one.shape for one in own] == [one.shape for one in begin]
    change = _size([a - b for a, b in zip(own, begin, strict=True)]) if alike else _size(own)
    weights = math.hypot(*(_distance(a, b) for a, b in zip(others, own, strict=True))) / max(change, 1e-6)
    pairs = zip(other.buffers[step], plain.buffers[step], strict=False)
    return max(values, weights, *(_relative(a, b, _size([b])) for a, b in pairs))


def _relative_to_each(tensor: Tensor, wanted: Tensor) -> float:
    """Returns the largest difference of a number relative to it; small ones may differ as if they were larger."""
    if tensor.shape != wanted.shape:
        return math.inf
    scale = wanted.abs().nan_to_num(0.0, 0.0) + LEAST_VALUE
    return _distance(tensor / scale, wanted / scale)


def _final_differences(plain: Outcome, other: Outcome) -> Iterator[tuple[str, float]]:
    if plain.final.keys() != other.final.keys():
        yield f"{sorted(plain.final.keys() ^ other.final.keys())} is only in one", math.inf
    first = plain.final
    gradients = {name: one for name, one in first.items() if name.endswith(".grad")}
    others = {name: one for name, one in first.items() if name not in gradients}
    for tensors in (gradients, others):
        mean = math.sqrt(_size(tensors.values()) ** 2 / max(1, sum(one.numel() for one in tensors.values())))
        for name, tensor in tensors.items():
            least = LEAST_SHARE * mean * math.sqrt(tensor.numel())
            # A gradient is of one batch, and weights that are a little off make it differ by more.
            scale = max(_size([tensor]), least) * (10 if name in gradients else 1)
            if name in other.final:
                yield name, _relative(other.final[name], tensor, scale)


def _relative(tensor: Tensor, wanted: Tensor, scale: float) -> float:
    return _distance(tensor, wanted) / max(scale, 1e-6)


def _distance(tensor: Tensor, wanted: Tensor) -> float:
    """Returns the norm of the difference; what is not finite is to be the same in both."""
    if tensor.shape != wanted.shape:
        return math.inf
    same = (tensor == wanted) | (torch.isnan(tensor) & torch.isnan(wanted))
    return float((tensor - wanted)[~same].norm())


def _size(tensors: Sequence[Tensor] | Any) -> float:
    squares = [float(one[torch.isfinite(one)].square().sum()) for one in tensors]
    return math.sqrt(sum(squares))
