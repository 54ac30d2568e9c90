"""What a policy costs in training: the host's time of a step, of an excluded module and of the guard, and the start.

    python reports/costs.py --out reports/costs/h200.json --workload resnet50
    python reports/costs.py --out reports/costs/cpu.json

Each pair runs interleaved in one process, block after block in random order, on twins of one model: the recipe as one
would write it by hand, and the README's loop under the policy. A figure is the median over blocks of the difference
between the two, with the 95 % interval of a bootstrap. A small model shows the host's time, on a GPU too, which waits
for it; `--workload` adds a bundled model that keeps the GPU busy. The start is timed in fresh processes that have
imported torch and put a model on the device, and collected the garbage that importing torch leaves to be looked
through, which takes 0.1 s or more at the next best occasion, whoever gives it: with a policy of settings alone, and
with one as tuning writes it, with the evidence of TUNED, which is held against the machine and the model.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

import amptune
from amptune.runtime.digest import model_digest
from amptune.runtime.tuned import AUTOCAST_DTYPES
from amptune.workload.zoo import NAMES, workload

Step = Callable[[], object]

SEED = 1
BLOCKS, RESAMPLED = 60, 2000
# Longer than the 20 steps that a guard looks at all of them.
WARM_UP_STEPS = 30
EXCLUDED = 64
STARTS = 7
# Whose evidence the tuned file has.
TUNED = Path(__file__).parent / "h200" / "search" / "seresnext50.policy.yaml"
START = """
import gc, sys, time
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 8)).to(sys.argv[2])
gc.collect()
before = time.perf_counter()
import amptune
amptune.apply(amptune.load(sys.argv[1]), model)
print(time.perf_counter() - before)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Medians of two steps in µs, and by how much the second is above the first, with a 95 % interval."""

    what: str
    of: str
    first_us: float
    second_us: float
    difference_us: float
    low_us: float
    high_us: float

    def __str__(self) -> str:
        share = self.difference_us / self.first_us
        interval = f"[{self.low_us:+.2f}, {self.high_us:+.2f}]"
        return f"{self.what}: {self.difference_us:+.2f} µs {interval} a {self.of} ({share:+.2%} of {self.first_us:.1f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workload", choices=NAMES, help="a bundled model that keeps the GPU busy")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    random.seed(SEED)
    costs = [*of_small_models(device)]
    if arguments.workload:
        costs.append(of_workload(arguments.workload, device))
    start_s = {kind: [started(device, tuned=kind == "tuned") for _ in range(STARTS)] for kind in ("settings", "tuned")}
    for cost in costs:
        print(cost)
    for kind, took in start_s.items():
        print(f"import, load and apply, {kind}: {statistics.median(took):.3f} s ({min(took):.3f} to {max(took):.3f})")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    found = {"device": name, "torch": torch.__version__, "start_s": start_s, "costs": list(map(asdict, costs))}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def of_small_models(device: torch.device) -> list[Cost]:
    model = small_model().to(device)
    twin = partial(copy.deepcopy, model)
    x = torch.randn(16, 64, device=device)
    dtypes = ("bf16", "fp16") if device.type == "cuda" else ("bf16",)
    costs = []
    for dtype in dtypes:
        policy = amptune.Policy(autocast=dtype)  # type: ignore[arg-type]  # a loop forgets the literals
        steps = [by_hand(twin(), x, dtype), under(policy, twin(), x)]
        costs.append(difference(f"a policy, {dtype}", "step", *steps))
        steps = [under(policy, twin(), x), under(policy, twin(), x, guard=None)]
        costs.append(difference(f"its watch of the first steps after {WARM_UP_STEPS} steps, {dtype}", "step", *steps))
    chain = nn.Sequential(*(nn.ReLU() for _ in range(EXCLUDED))).to(device)
    policy = amptune.Policy(autocast="bf16")
    rules = (amptune.Fp32Rule(type="ReLU"),)
    calls = [forward(one, chain, x) for one in (policy, replace(policy, fp32_modules=rules))]
    return [*costs, difference("an excluded module", "call", *calls, times=EXCLUDED)]


def small_model() -> nn.Module:
    """Also the one of START."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 8))


def of_workload(name: str, device: torch.device) -> Cost:
    """bf16 and channels_last, or bf16 alone for a model without convolutions, five steps a block."""
    bundled = workload(name)
    loss_of = bundled.loss
    if loss_of is None:
        raise SystemExit(f"{name} has a training step of its own, and not a loss")
    model = bundled.model().to(device).train()
    data = tuple(one.to(device) for one in bundled.batch(bundled.batch_size))
    convolutions = any(isinstance(module, nn.Conv2d) for module in model.modules())
    policy = amptune.Policy(autocast="bf16", memory_format="channels_last" if convolutions else "contiguous")

    def hand() -> Step:
        own = copy.deepcopy(model)
        inputs = data
        if convolutions:
            own = own.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # its stub lacks it
            inputs = tuple(one.to(memory_format=torch.channels_last) if one.dim() == 4 else one for one in data)
        optimizer = bundled.optimizer(own)

        def step() -> None:
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = loss_of(own, inputs)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

        return step

    def tuned() -> Step:
        applied = amptune.apply(policy, copy.deepcopy(model), guard=False)
        optimizer = applied.optimizer(bundled.optimizer(applied.model))

        def step() -> None:
            with applied.autocast():
                loss = loss_of(applied.model, applied.batch(data))
            applied.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            applied.scaler.step(optimizer)
            applied.scaler.update()
            optimizer.zero_grad()

        return step

    return difference(f"a policy on {name}, bf16", "step", hand(), tuned(), steps=5)


def by_hand(model: nn.Module, x: torch.Tensor, dtype: str) -> Step:
    """PyTorch's own AMP recipe; with a scaler for fp16 alone."""
    device = x.device.type
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device) if dtype == "fp16" else None

    def step() -> None:
        with torch.autocast(device, dtype=AUTOCAST_DTYPES[dtype]):
            loss = model(x).square().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    return step


def under(policy: amptune.Policy, model: nn.Module, x: torch.Tensor, *, guard: bool | None = False) -> Step:
    """The README's loop."""
    tuned = amptune.apply(policy, model, guard=guard)
    optimizer = tuned.optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))

    def step() -> None:
        with tuned.autocast():
            loss = tuned.model(tuned.batch(x)).square().mean()
        tuned.scaler.scale(loss).backward()
        tuned.scaler.step(optimizer)
        tuned.scaler.update()
        optimizer.zero_grad()

    return step


def forward(policy: amptune.Policy, model: nn.Module, x: torch.Tensor) -> Step:
    tuned = amptune.apply(policy, copy.deepcopy(model), guard=False)

    def call() -> None:
        with tuned.autocast():
            tuned.model(x)

    return call


def difference(what: str, of: str, first: Step, second: Step, *, steps: int = 50, times: int = 1) -> Cost:
    """By how much a call of the second takes longer than one of the first, over so many `times` in it."""
    for step in (first, second):
        block_us(step, WARM_UP_STEPS)
    pairs: list[tuple[float, float]] = []
    for _ in range(BLOCKS):
        order = [first, second]
        random.shuffle(order)
        took = {step: block_us(step, steps) / times for step in order}
        pairs.append((took[first], took[second]))
    differences = [b - a for a, b in pairs]
    low, high = interval(differences)
    return Cost(
        what=what,
        of=of,
        first_us=statistics.median(a for a, _ in pairs),
        second_us=statistics.median(b for _, b in pairs),
        difference_us=statistics.median(differences),
        low_us=low,
        high_us=high,
    )


def block_us(step: Step, steps: int) -> float:
    """Of one of so many steps in a row."""
    synchronize()
    before = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return (time.perf_counter() - before) / steps * 1e6


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Of their median, at 95 %."""
    medians = sorted(statistics.median(random.choices(values, k=len(values))) for _ in range(RESAMPLED))  # noqa: S311
    return medians[int(0.025 * RESAMPLED)], medians[int(0.975 * RESAMPLED)]


def started(device: torch.device, *, tuned: bool) -> float:
    """Seconds to import amptune, load a policy and apply it, in a process that has torch and a model."""
    rules = (amptune.Fp32Rule(type="LayerNorm"),)
    policy_file = amptune.PolicyFile(policy=amptune.Policy(autocast="bf16", fp32_modules=rules), name="costs")
    if tuned:
        labels = {**dict(amptune.probe(str(device)).labels), "model": model_digest(small_model())}
        policy_file = replace(policy_file, valid_for=labels, evidence=amptune.load(TUNED).evidence)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "policy.yaml"
        amptune.save(policy_file, path)
        command = [sys.executable, "-c", START, str(path), str(device)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    if "PolicyDriftWarning" in done.stderr:
        raise SystemExit(f"the policy that is timed does not fit: {done.stderr}")
    return float(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
